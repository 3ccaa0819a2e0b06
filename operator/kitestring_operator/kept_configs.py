"""Configs of parts that run in another form than this operator would give them: they stay as they were started. Pure.

A part whose container is started again reads its config again, and the models refuse fields that they do not know: the
file of a newer operator would end an older image, and the other way round.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.lifecycle import POD_BEARING, is_pod_bearing
from kitestring_operator.observed import Manifest, Observed
from kitestring_operator.parts.places import (
    AGENT_COLLECTOR_FILE,
    COLLECTOR_FILE,
    FETCH_FILE,
    GATEWAY_FILE,
    POLICY_SERVER_FILE,
    SIDECAR_FILE,
    TRAINER_FILE,
    WORKER_FILE,
)

_READERS: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        COLLECTOR_FILE: names.COMPONENT_COLLECTOR,
        AGENT_COLLECTOR_FILE: names.COMPONENT_COLLECTOR,
        GATEWAY_FILE: names.COMPONENT_GATEWAY,
        SIDECAR_FILE: names.COMPONENT_POLICY_SERVER,
        POLICY_SERVER_FILE: names.COMPONENT_POLICY_SERVER,
        TRAINER_FILE: names.COMPONENT_TRAINER,
        FETCH_FILE: names.COMPONENT_TRAINER,
        WORKER_FILE: None,  # workers do not stay as they were started
    }
)
"""The part that reads a file."""


def with_kept_configs(objects: Sequence[Manifest], observed: Observed) -> tuple[Manifest, ...]:
    """The objects that are wanted, with their hashes; those of RUN-config may be the ones that are there."""
    name = identity.config_name(observed.name)
    there = next((item for item in observed.of_kind("ConfigMap") if item["metadata"]["name"] == name), None)
    kept = _kept_parts(objects, observed)
    if there is None or not kept:
        return tuple(objects)
    return tuple(
        _merged(item, there.get("data") or {}, kept)
        if item["kind"] == "ConfigMap" and item["metadata"]["name"] == name
        else item
        for item in objects
    )


def _kept_parts(objects: Iterable[Manifest], observed: Observed) -> frozenset[str]:
    """Parts that are there in another form."""
    wanted = {(item["kind"], item["metadata"]["name"]): item for item in objects if item["kind"] in POD_BEARING}
    kinds = {kind for kind, _ in wanted}
    there = ((wanted.get((kind, item["metadata"]["name"])), item) for kind in kinds for item in observed.of_kind(kind))
    return frozenset(
        item["metadata"]["labels"][names.LABEL_COMPONENT]
        for other, item in there
        if other is not None and _form(other) != _form(item) and is_pod_bearing(item)
    )


def _form(item: Manifest) -> str | None:
    form: str | None = (item["metadata"].get("annotations") or {}).get(names.ANNOTATION_SPEC_HASH)
    return form


def _merged(wanted: Manifest, there: Mapping[str, str], kept: frozenset[str]) -> Manifest:
    data = dict(wanted["data"])
    for file, text in there.items():
        # a file that this version does not write is one of another's
        if file not in _READERS or _READERS[file] in kept:
            data[file] = _with_servers(text, data[file]) if file == GATEWAY_FILE and file in data else text
    return identity.with_spec_hash(wanted | {"data": data})


def _with_servers(text: str, wanted: str) -> str:
    """A gateway's config with the policy servers of now: their number changes while the gateway runs.

    What another version wrote may look otherwise: what is not found stays.
    """
    servers = {policy["name"]: policy["servers"] for policy in json.loads(wanted)["policies"]}
    try:
        config: dict[str, Any] = json.loads(text)
        policies = [
            policy | {"servers": servers[policy["name"]]}
            if "servers" in policy and policy["name"] in servers
            else policy
            for policy in config["policies"]
        ]
    except (ValueError, KeyError, TypeError):
        return text
    return json.dumps(config | {"policies": policies}, indent=1, ensure_ascii=False) + "\n"
