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
_GRACE = "terminationGracePeriodSeconds"


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

_OFF_BY_ITSELF = frozenset({"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace", "setHostnameAsFQDN"})
"""Fields of a pod whose absence says false: who writes that changes nothing."""
_LABELS = (names.LABEL_APP, names.LABEL_MANAGED_BY, names.LABEL_COMPONENT)


def overlaid(base: Manifest, template: Mapping[str, Any] | None, *, field: str, walls: Walls = WALLS) -> Manifest:
    """`base` (a PodTemplateSpec of ours) with the user's `template` laid over it; both stay as they are.

    `field` is where the template stands, for the message. Raises OverlayRefusedError with everything that is wrong.
    """
    if not template:
        return base
    malformed = list(_malformed(template, field))
    if malformed:
        raise OverlayRefusedError(malformed)
    made: Manifest = merged(base, template)
    changed = list(_changed(base, made, field, walls))
    if changed:
        raise OverlayRefusedError(changed)
    return made


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Strategic merge of plain data, with no wall around what is ours."""
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
        elif isinstance(value, list) and key in MERGE_KEYS:
            result[key] = _merged_list(_items(result.get(key)), value, key)
        else:
            result[key] = deepcopy(value)
    return result


def _merged_list(base: Sequence[Mapping[str, Any]], overlay: list[Any], name: str) -> list[Any]:
    """Items that are there keep their place, new ones come after them."""
    key = MERGE_KEYS[name]
    if not all(isinstance(item, Mapping) and (key in item or _DIRECTIVE in item) for item in overlay):
        return deepcopy(overlay)  # it cannot be merged; the API server says why it cannot be had either
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


# --- What a merge cannot carry out --------------------------------------------------------------------------------


def _malformed(template: Mapping[str, Any], field: str) -> Iterator[Refusal]:
    for key, value in template.items():
        if key not in ("metadata", "spec"):
            remedy = "move it below one of them"
            yield Refusal(f"{field}.{key}", "a field", "a pod template has metadata and spec", remedy)
        elif not isinstance(value, Mapping):
            yield Refusal(f"{field}.{key}", _short(value), "an object is needed", "write an object")
        else:
            yield from _directives(value, f"{field}.{key}")
    for key in _mapping(template.get("metadata")):
        if key not in ("labels", "annotations", _DIRECTIVE):
            yield Refusal(f"{field}.metadata.{key}", "a field", "allowed: labels, annotations", "remove it")


def _directives(value: Mapping[str, Any], field: str) -> Iterator[Refusal]:
    directive = value.get(_DIRECTIVE)
    if directive not in (None, "merge", "replace", "delete"):
        yield Refusal(f"{field}.$patch", _short(directive), "allowed: merge, replace, delete", "correct the word")
    for key, item in value.items():
        here = f"{field}.{key}"
        if key.startswith("$") and key != _DIRECTIVE:
            yield Refusal(here, "a directive", "of the directives only $patch is honoured", "write the whole list")
        elif isinstance(item, Mapping):
            yield from _directives(item, here)
        elif isinstance(item, list) and key in MERGE_KEYS:
            yield from _list_directives(item, here, MERGE_KEYS[key])


def _list_directives(items: Sequence[object], field: str, key: str) -> Iterator[Refusal]:
    for index, item in enumerate(items):
        if not isinstance(item, Mapping):
            yield Refusal(f"{field}[{index}]", _short(item), "an object is needed", "write an object")
        elif key in item:
            yield from _directives(item, f"{field}[{item[key]}]")
        elif dict(item) != {_DIRECTIVE: "replace"}:
            yield Refusal(f"{field}[{index}]", f"no {key}", "items of this list are told apart by it", f"add {key}")


# --- What of ours is no longer as it was --------------------------------------------------------------------------


def _changed(base: Manifest, made: Manifest, field: str, walls: Walls) -> Iterator[Refusal]:
    """By what way does not matter: a field that was written over, a directive, a null."""
    for part in ("labels", "annotations"):
        before = _ours_of(_mapping(base.get("metadata")).get(part))
        after = _ours_of(_mapping(made.get("metadata")).get(part))
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                where = f"{field}.metadata.{part}[{key}]"
                yield Refusal(where, _short(after.get(key)), "Kitestring finds its pods by it", "use a key of your own")
    ours, spec, where = base["spec"], _mapping(made.get("spec")), f"{field}.spec"
    for name, remedy in walls.pod_fields.items():
        is_same = spec.get(name) is False and name in _OFF_BY_ITSELF and not ours.get(name)
        if spec.get(name) != ours.get(name) and not is_same:
            yield Refusal(f"{where}.{name}", _short(spec.get(name)), "Kitestring sets it", remedy)
    seconds = spec.get(_GRACE)
    if _GRACE in ours and (not isinstance(seconds, int) or isinstance(seconds, bool) or seconds < 1):
        remedy = "write a number of seconds from 1"
        yield Refusal(f"{where}.{_GRACE}", _short(seconds), "an integer is needed", remedy)
    for group, other in (("initContainers", "containers"), ("containers", "initContainers")):
        elsewhere = _by(spec.get(other), "name")
        found = _by(spec.get(group), "name")
        for container in ours.get(group, ()):
            name = container["name"]
            here = f"{where}.{group}[{name}]"
            if name in elsewhere:
                taken = f"{where}.{other}[{name}]"
                yield Refusal(taken, "a container", f"ours of that name is in {group}", "choose another name")
            if name not in found:
                yield Refusal(here, "nothing", "it is a part of Kitestring", "leave it in its place")
            else:
                yield from _container(container, found[name], here, walls)
    yield from _volumes(ours, spec, f"{where}.volumes")


def _container(ours: Mapping[str, Any], made: Mapping[str, Any], field: str, walls: Walls) -> Iterator[Refusal]:
    for name, remedy in walls.container_fields.items():
        if made.get(name) != ours.get(name):
            yield Refusal(f"{field}.{name}", _short(made.get(name)), "Kitestring sets it", remedy)

    def protected(container: Mapping[str, Any]) -> dict[str, Any]:
        variables = _by(container.get("env"), "name")
        return {key: value for key, value in variables.items() if any(_matches(key, wall) for wall in walls.variables)}

    def mounted(container: Mapping[str, Any]) -> dict[str, Any]:
        mounts = {
            posixpath.normpath(str(path)): item
            for path, item in _by(container.get("volumeMounts"), "mountPath").items()
        }
        roots = walls.mount_roots
        return {path: item for path, item in mounts.items() if any(f"{path}/".startswith(f"{root}/") for root in roots)}

    for key in _differing(protected(ours), protected(made)):
        yield Refusal(f"{field}.env[{key}]", "another value or none", "Kitestring sets it", "leave it as it is")
    for key in _differing(mounted(ours), mounted(made)):
        why = "configs and secrets of ours are there"
        yield Refusal(f"{field}.volumeMounts[{key}]", "another mount or none", why, "mount yours elsewhere")


def _volumes(ours: Mapping[str, Any], made: Mapping[str, Any], field: str) -> Iterator[Refusal]:
    """Scratch volumes of ours may become others; those with configs and secrets may not."""
    before, after = _by(ours.get("volumes"), "name"), _by(made.get("volumes"), "name")
    for name, volume in before.items():
        if {"configMap", "secret", "projected"} & set(volume) and after.get(name) != volume:
            why = "ours of that name holds configs or secrets"
            yield Refusal(f"{field}[{name}]", "another volume or none", why, "choose another name for yours")


def _ours_of(metadata: object) -> dict[str, Any]:
    own = _mapping(metadata)
    return {key: value for key, value in own.items() if key.startswith(f"{names.GROUP}/") or key in _LABELS}


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


def _matches(name: str, wall: str) -> bool:
    return name.startswith(wall[:-1]) if wall.endswith("*") else name == wall


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _items(value: object) -> list[Mapping[str, Any]]:
    """The objects in a list; what is none is the API server's to refuse."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _by(value: object, key: str) -> dict[str, Mapping[str, Any]]:
    """The objects in a list by the text that tells them apart."""
    return {item[key]: item for item in _items(value) if isinstance(item.get(key), str)}


def _short(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
