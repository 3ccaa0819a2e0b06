"""What the API lets through in a pool's template, and no pod can be made of, or none with walls. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kitestring_api.v1alpha1.pod_template import AGENT_CONTAINER
from kitestring_operator.observed import Manifest
from kitestring_operator.overlay import OverlayRefusedError, Refusal

FIELD = "spec.template"


def check(template: Manifest, reserved: Collection[str], *, imageless: Collection[str] = ()) -> None:
    """`reserved`: volumes that no container of the user's may mount. `imageless`: containers that have an image from
    elsewhere. Raises OverlayRefusedError, which says all."""
    found = [*_directives(template, FIELD), *_metadata(template.get("metadata") or {})]
    spec = template["spec"]
    for group in ("initContainers", "containers"):
        for one in spec.get(group) or ():
            field = f"{FIELD}.spec.{group}[{one['name']}]"
            found += _container(one, field, reserved)
            if one["name"] == AGENT_CONTAINER:
                found += _ended_alone(one, field)
            if one["name"] not in imageless:
                found += _image(one.get("image"), f"{field}.image")
    if found:
        raise OverlayRefusedError(found)


def _directives(value: object, field: str) -> Iterator[Refusal]:
    """It is merged with what is ours as patches are, and is none: what it asks for is whole."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _directives(item, f"{field}[{index}]")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if str(key).startswith("$"):
                yield Refusal(f"{field}.{key}", "a directive", "a pool's template is a pod, not a patch", "remove it")
            else:
                yield from _directives(item, f"{field}.{key}")


def _metadata(metadata: Mapping[str, Any]) -> Iterator[Refusal]:
    for part in ("labels", "annotations"):
        yield from _object(metadata.get(part), f"{FIELD}.metadata.{part}")


def _container(one: Mapping[str, Any], field: str, reserved: Collection[str]) -> Iterator[Refusal]:
    resources = one.get("resources")
    yield from _object(resources, f"{field}.resources")
    if isinstance(resources, Mapping):
        for kind in ("requests", "limits"):
            yield from _object(resources.get(kind), f"{field}.resources.{kind}")
    mounts = one.get("volumeMounts")
    if mounts is not None and not isinstance(mounts, list):
        yield Refusal(f"{field}.volumeMounts", _kind(mounts), "a list is needed", "write a list")
        return
    for index, item in enumerate(mounts or ()):
        where = f"{field}.volumeMounts[{index}]"
        if not isinstance(item, Mapping) or not isinstance(item.get("mountPath"), str):
            yield Refusal(where, _kind(item), "an object with name and mountPath is needed", "write both")
        elif item.get("name") in reserved:
            why = "what lies there is for Kitestring's own containers"
            yield Refusal(f"{where}.name", str(item["name"]), why, "mount a volume of your own")


def _ended_alone(one: Mapping[str, Any], field: str) -> Iterator[Refusal]:
    """Of the agents' container: the worker hears of the end of a pod, not of one of its containers."""
    for probe in ("livenessProbe", "startupProbe"):
        if one.get(probe) is not None:
            why = "one that fails would kill all agents that run in the container"
            yield Refusal(f"{field}.{probe}", _kind(one[probe]), why, "remove it: limits.seconds ends agents that hang")


def _image(image: object, field: str) -> Iterator[Refusal]:
    """The API asks for none: on one machine an agent is a process."""
    if not isinstance(image, str) or not image.strip():
        found = "nothing" if image is None else _kind(image)
        yield Refusal(field, found, "in a cluster a container needs an image", "write the image that holds its program")


def _object(value: object, field: str) -> Iterator[Refusal]:
    if value is not None and not isinstance(value, Mapping):
        yield Refusal(field, _kind(value), "an object is needed", "write an object")


def _kind(value: object) -> str:
    return "an object" if isinstance(value, Mapping) else f"{value!r:.80}"
