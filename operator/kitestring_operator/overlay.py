"""Pod templates laid over ours: strategic merge, as `kubectl patch` does it, and what of ours may not be replaced.

Lists are merged by the key that Kubernetes' API gives them (containers by name, mounts by mountPath, …), others are
replaced; `null` removes a field; `$patch: delete` and `$patch: replace` are honoured, other directives refused.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from kitestring_api import names
from kitestring_api.errors import UserMistakeError
from kitestring_operator.observed import Manifest

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "claims": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""List of a PodTemplateSpec → what tells its items apart (`patchMergeKey` of the Kubernetes API)."""

_ONE_OF = frozenset({"volumes", "env"})
"""Lists whose items have one source each: another kind of source takes the place of the one that was there."""

_DIRECTIVE = "$patch"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something in a template that cannot be laid over ours."""

    field: str
    found: str
    why: str
    remedy: str

    @property
    def message(self) -> str:
        return f"{self.field}: found {self.found}; {self.why}; {self.remedy}"


class OverlayRefusedError(UserMistakeError):
    """A template asks for what it must not. The message has a line for each refusal."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("\n".join(refusal.message for refusal in refusals))
        self.refusals = tuple(refusals)


@dataclass(frozen=True, slots=True)
class Walls:
    """What of our pod a template must leave as it is, with the reason or the field that is meant for it."""

    container_fields: Mapping[str, str]
    """Field of our containers → remedy."""
    pod_fields: Mapping[str, str]
    """Field of the pod → remedy."""
    variables: Sequence[str] = ()
    """Variables of our containers; one that ends in `*` stands for all that begin so."""
    mount_roots: Sequence[str] = ()
    """Nothing may be mounted there or below."""


WALLS = Walls(
    container_fields={
        "image": "name the image in the field of the spec that is meant for it, or in the settings of the installation",
        "command": "remove it: the part is started by its own command",
        "args": "remove it: the part is started by its own arguments",
        "startupProbe": "remove it: the part says itself when it is ready",
        "readinessProbe": "remove it: the part says itself when it is ready",
        "livenessProbe": "remove it: the part says itself whether it lives",
        "lifecycle": "remove it: the part drains itself",
        "ports": "remove it, or put further ports on a container of your own",
        "restartPolicy": "remove it: it decides in which order the containers start",
        "terminationMessagePath": "remove it: the operator reads how the part ended there",
        "terminationMessagePolicy": "remove it: the operator reads how the part ended there",
    },
    pod_fields={
        "restartPolicy": "remove it: the operator decides what is started again",
        "hostname": "remove it: the other parts find the pod by its name",
        "subdomain": "remove it: the other parts find the pod by its name",
        "setHostnameAsFQDN": "remove it: the other parts find the pod by its name",
        "activeDeadlineSeconds": "remove it, and use spec.activeDeadlineSeconds of the run",
        "ephemeralContainers": "remove it, and use kubectl debug",
    },
    variables=(
        f"{names.AGENT_ENV_PREFIX}*",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "VLLM_SERVER_DEV_MODE",
        names.ENV_S3_ACCESS_KEY,
        names.ENV_S3_SECRET_KEY,
    ),
    mount_roots=("/etc/kitestring", "/etc/kitestring-secrets"),
)
"""Of every part of ours."""

_LABELS = (names.LABEL_APP, names.LABEL_MANAGED_BY, names.LABEL_COMPONENT)


def overlaid(base: Manifest, template: Mapping[str, Any] | None, *, field: str, walls: Walls = WALLS) -> Manifest:
    """`base` (a PodTemplateSpec of ours) with the user's `template` laid over it; both stay as they are.

    `field` is where the template stands, for the message. Raises OverlayRefusedError with everything that is wrong.
    """
    if not template:
        return base
    refusals = [*_malformed(template, field), *_forbidden(base, template, field, walls)]
    if refusals:
        raise OverlayRefusedError(refusals)
    merged_template: Manifest = merged(base, template)
    return merged_template


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Strategic merge of plain data; the overlay has been checked."""
    if overlay.get(_DIRECTIVE) == "replace":
        return {key: deepcopy(value) for key, value in overlay.items() if key != _DIRECTIVE}
    result = deepcopy(dict(base))
    for key, value in overlay.items():
        if key == _DIRECTIVE:
            continue
        if value is None or (isinstance(value, Mapping) and value.get(_DIRECTIVE) == "delete"):
            result.pop(key, None)
        elif isinstance(value, Mapping):
            there = result.get(key)
            result[key] = merged(there if isinstance(there, Mapping) else {}, value)
        elif isinstance(value, Sequence) and not isinstance(value, str) and key in MERGE_KEYS:
            result[key] = _merged_list(result.get(key) or [], value, key)
        else:
            result[key] = deepcopy(value)
    return result


def _merged_list(base: Sequence[Any], overlay: Sequence[Any], name: str) -> list[Any]:
    """Items that are there keep their place, new ones come after them."""
    key = MERGE_KEYS[name]
    replaces = any(item.get(_DIRECTIVE) == "replace" and key not in item for item in overlay)
    result = [] if replaces else [deepcopy(item) for item in base]
    for item in overlay:
        if key not in item:
            continue
        place = next((index for index, there in enumerate(result) if there.get(key) == item[key]), None)
        if item.get(_DIRECTIVE) == "delete":
            if place is not None:
                del result[place]
        elif place is None:
            result.append(merged({}, item))
        else:
            result[place] = merged(_without_other_source(result[place], item, name), item)
    return result


def _without_other_source(there: Mapping[str, Any], item: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name not in _ONE_OF or set(item) <= {MERGE_KEYS[name], _DIRECTIVE}:
        return there
    return {key: value for key, value in there.items() if key in item}


# --- What is refused ----------------------------------------------------------------------------------------------


def _malformed(template: Mapping[str, Any], field: str) -> Iterator[Refusal]:
    """What a strategic merge cannot carry out, and what is no part of a pod template."""
    for key in template:
        if key not in ("metadata", "spec"):
            yield Refusal(
                f"{field}.{key}", "a field", "a pod template has metadata and spec", "move it below one of them"
            )
    for part in ("metadata", "spec"):
        value = template.get(part)
        if value is not None and not isinstance(value, Mapping):
            yield Refusal(f"{field}.{part}", _short(value), "an object is needed", "write an object")
        elif value is not None:
            yield from _directives(value, f"{field}.{part}", top=True)


def _directives(value: Mapping[str, Any], field: str, *, top: bool = False) -> Iterator[Refusal]:
    directive = value.get(_DIRECTIVE)
    if directive not in (None, "merge", "replace", "delete"):
        yield Refusal(f"{field}.$patch", _short(directive), "allowed: merge, replace, delete", "correct the word")
    if top and directive in ("replace", "delete"):
        yield Refusal(f"{field}.$patch", _short(directive), "it would take our pod away", "remove it")
    for key, item in value.items():
        here = f"{field}.{key}"
        if key.startswith("$") and key != _DIRECTIVE:
            yield Refusal(here, "a directive", "of the directives only $patch is honoured", "write the whole list")
        elif isinstance(item, Mapping):
            yield from _directives(item, here)
        elif key in MERGE_KEYS:
            yield from _list_directives(item, here, MERGE_KEYS[key])


def _list_directives(items: object, field: str, key: str) -> Iterator[Refusal]:
    if items is None:
        return
    if not isinstance(items, Sequence) or isinstance(items, str):
        yield Refusal(field, _short(items), "a list is needed", "write a list")
        return
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            yield Refusal(f"{field}[{index}]", _short(item), "an object is needed", "write an object")
        elif key not in item:
            if dict(item) != {_DIRECTIVE: "replace"}:
                yield Refusal(f"{field}[{index}]", f"no {key}", "items of this list are told apart by it", f"add {key}")
        else:
            yield from _directives(item, f"{field}[{item[key]}]")


def _forbidden(base: Manifest, template: Mapping[str, Any], field: str, walls: Walls) -> Iterator[Refusal]:
    yield from _metadata(_mapping(template.get("metadata")), f"{field}.metadata")
    spec = _mapping(template.get("spec"))
    where = f"{field}.spec"
    for name, remedy in walls.pod_fields.items():
        if name in spec:
            yield Refusal(f"{where}.{name}", _short(spec[name]), "Kitestring sets it", remedy)
    seconds = spec.get("terminationGracePeriodSeconds", 1)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or seconds < 1:
        remedy = "write a number of seconds from 1"
        yield Refusal(f"{where}.terminationGracePeriodSeconds", _short(seconds), "an integer is needed", remedy)
    ours = base["spec"]
    for group in ("initContainers", "containers"):
        yield from _containers(ours, group, spec.get(group), f"{where}.{group}", walls)
    yield from _volumes(ours, spec.get("volumes"), f"{where}.volumes")


def _metadata(metadata: Mapping[str, Any], field: str) -> Iterator[Refusal]:
    for key in metadata:
        if key not in ("labels", "annotations"):
            yield Refusal(f"{field}.{key}", "a field", "allowed: labels, annotations", "remove it")
    for part in ("labels", "annotations"):
        for key in _mapping(metadata.get(part)):
            if key.startswith(f"{names.GROUP}/") or (part == "labels" and key in _LABELS):
                remedy = "use a key of your own"
                yield Refusal(f"{field}.{part}[{key}]", "a value", "Kitestring finds its pods by it", remedy)


def _containers(ours: Manifest, group: str, theirs: object, field: str, walls: Walls) -> Iterator[Refusal]:
    other = "containers" if group == "initContainers" else "initContainers"
    here = {container["name"] for container in ours.get(group, ())}
    there = {container["name"] for container in ours.get(other, ())}
    for item in _items(theirs):
        if dict(item) == {_DIRECTIVE: "replace"} and here:
            yield Refusal(field, "$patch: replace", "it would take our containers away", "remove it")
        name = item.get("name")
        if name in there:
            yield Refusal(f"{field}[{name}]", "a container", f"ours of that name is in {other}", "choose another name")
        if name in here:
            yield from _container(item, f"{field}[{name}]", walls)


def _container(item: Mapping[str, Any], field: str, walls: Walls) -> Iterator[Refusal]:
    if item.get(_DIRECTIVE) in ("delete", "replace"):
        yield Refusal(f"{field}.$patch", item[_DIRECTIVE], "it would take a container of ours away", "remove it")
    for name, remedy in walls.container_fields.items():
        if name in item:
            yield Refusal(f"{field}.{name}", _short(item[name]), "Kitestring sets it", remedy)
    for variable in _items(item.get("env")):
        name = str(variable.get("name", ""))
        if any(_matches(name, wall) for wall in walls.variables):
            yield Refusal(f"{field}.env[{name}]", "a variable", "Kitestring sets it", "remove it")
    for mount in _items(item.get("volumeMounts")):
        path = posixpath.normpath(str(mount.get("mountPath", "")))
        if any(path == root or path.startswith(f"{root}/") for root in walls.mount_roots):
            remedy = "mount it elsewhere"
            yield Refusal(f"{field}.volumeMounts[{path}]", "a mount", "configs and secrets of ours are there", remedy)


def _volumes(ours: Manifest, theirs: object, field: str) -> Iterator[Refusal]:
    """Scratch volumes of ours may become others; those with configs and secrets may not."""
    fixed = {v["name"] for v in ours.get("volumes", ()) if "configMap" in v or "secret" in v or "projected" in v}
    for item in _items(theirs):
        if dict(item) == {_DIRECTIVE: "replace"}:
            yield Refusal(field, "$patch: replace", "it would take our volumes away", "remove it")
        elif item.get("name") in fixed:
            remedy = "choose another name"
            yield Refusal(f"{field}[{item['name']}]", "a volume", "ours of that name holds configs or secrets", remedy)


def _matches(name: str, wall: str) -> bool:
    return name.startswith(wall[:-1]) if wall.endswith("*") else name == wall


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> list[Mapping[str, Any]]:
    """The objects in a list; what else is there is reported as malformed."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return []
    return [item for item in value if isinstance(item, Mapping)]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
