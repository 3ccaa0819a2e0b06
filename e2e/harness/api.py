"""The cluster's API: objects as plain dictionaries, and waiting on watch events with a deadline, never on sleeps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import kubernetes
import urllib3

from e2e.harness.kinds import EVENT, KINDS, Kind
from kitestring_operator.cluster.requests import as_yaml

Object = dict[str, Any]
FIELD_MANAGER: Final = "kitestring-e2e"
_APPLY: Final = "application/apply-patch+yaml"
_GONE: Final = 410
_WHEN_BUSY: Final = urllib3.Retry(
    total=10,
    connect=False,
    read=False,
    redirect=False,
    status_forcelist=[429],
    backoff_factor=0.5,
    raise_on_status=False,
)
"""Of reading: just after a definition was made, the server says for a moment that its storage is being initialized."""


class ApiError(Exception):
    """The API refused a request; `message` is what a user would read."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class NotYet(AssertionError):
    """What a scenario waits for did not come within its deadline."""


class Api:
    """A cluster, by its kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        client = kubernetes.config.new_client_from_config(config_file=str(kubeconfig))  # type: ignore[no-untyped-call]
        self._host = client.configuration.host
        self._pool: urllib3.PoolManager = client.rest_client.pool_manager
        self._headers = dict(client.default_headers)

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, object] | None = None,
    ) -> Any:
        """The parsed answer. Raises ApiError for anything but success."""
        return json.loads(self._send(method, path, body, content_type=content_type, query=query).data)

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """An object, or None where there is none."""
        try:
            found: Object = self.request("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def listed(self, kind: Kind, namespace: str | None = None, selector: str = "") -> list[Object]:
        """Objects of a kind, those of all namespaces without one; none where the cluster does not know the kind."""
        try:
            return list(self._list(kind, kind.path(namespace), _selectors(selector, ""))[0].values())
        except ApiError as error:
            if error.status == 404:
                return []
            raise

    def apply(self, item: Object, namespace: str | None = None) -> Object:
        """Server-side apply, as `kubectl apply --server-side` does it."""
        kind = KINDS[item["kind"]]
        path = kind.path(item["metadata"].get("namespace", namespace), item["metadata"]["name"])
        applied: Object = self.request(
            "PATCH",
            path,
            item,
            content_type=_APPLY,
            query={"fieldManager": FIELD_MANAGER, "force": "true", "fieldValidation": "Strict"},
        )
        return applied

    def create(self, item: Object, namespace: str | None = None) -> Object:
        """Create; refused where it exists."""
        path = KINDS[item["kind"]].path(item["metadata"].get("namespace", namespace))
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        created: Object = self.request("POST", path, item, query=query)
        return created

    def patch(self, kind: Kind, name: str, namespace: str | None, change: Mapping[str, Any], part: str = "") -> Object:
        """Merge patch; `part` is a subresource (`status`, `scale`)."""
        path = kind.path(namespace, name) + (f"/{part}" if part else "")
        patched: Object = self.request(
            "PATCH", path, change, content_type="application/merge-patch+json", query={"fieldManager": FIELD_MANAGER}
        )
        return patched

    def delete(self, kind: Kind, name: str, namespace: str | None = None, grace: int | None = None) -> None:
        """Ask for the end of an object; nothing where there is none. `grace` 0 ends a pod at once, like `kill -9`."""
        body: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", kind.path(namespace, name), body)
        except ApiError as error:
            if error.status != 404:
                raise

    def logs(self, pod: str, namespace: str, container: str, *, tail: int = 200, previous: bool = False) -> str:
        """Last lines of a container."""
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        query = {"container": container, "tailLines": tail, "previous": str(previous).lower()}
        return self._send("GET", path, query=query).data.decode(errors="replace")

    def events(self, namespace: str) -> list[Object]:
        """Events of a namespace, the oldest first."""

        def when(event: Object) -> str:
            return event.get("lastTimestamp") or event.get("eventTime") or ""

        return sorted(self.listed(EVENT, namespace), key=when)

    def until(
        self,
        kind: Kind,
        done: Callable[[dict[str, Object]], bool],
        what: str,
        *,
        seconds: float,
        namespace: str | None = None,
        selector: str = "",
        name: str = "",
    ) -> dict[str, Object]:
        """Objects by name, once `done` says so of them; it is asked on each change.

        Raises NotYet, saying `what` did not come, after `seconds`.
        """
        deadline = time.monotonic() + seconds
        path, chosen = kind.path(namespace), _selectors(selector, name)
        while True:
            objects, version = self._list(kind, path, chosen)
            if done(objects):
                return objects
            for change, item in self._changes(path, chosen | {"resourceVersion": version}, deadline):
                if change == "DELETED":
                    objects.pop(item["metadata"]["name"], None)
                else:
                    objects[item["metadata"]["name"]] = item
                if done(objects):
                    return objects
            if time.monotonic() >= deadline:
                raise NotYet(f"{what}: not within {seconds:g} s")

    def until_object(
        self, kind: Kind, name: str, namespace: str | None, done: Callable[[Object], bool], what: str, *, seconds: float
    ) -> Object:
        """One object, once it is there and `done` says so of it."""

        def is_done(objects: dict[str, Object]) -> bool:
            return name in objects and done(objects[name])

        return self.until(kind, is_done, what, seconds=seconds, namespace=namespace, name=name)[name]

    def until_gone(
        self, kind: Kind, namespace: str | None, *, seconds: float, selector: str = "", name: str = ""
    ) -> None:
        """Return once no such object is left."""
        what = f"end of {kind.plural} {name or selector}".strip()
        self.until(
            kind, lambda objects: not objects, what, seconds=seconds, namespace=namespace, selector=selector, name=name
        )

    def _list(self, kind: Kind, path: str, chosen: Mapping[str, object]) -> tuple[dict[str, Object], str]:
        """Objects by name, and the version of the list."""
        answer = self.request("GET", path, query=chosen)
        typed = {"kind": kind.name, "apiVersion": kind.api_version}
        return {item["metadata"]["name"]: item | typed for item in answer["items"]}, answer["metadata"][
            "resourceVersion"
        ]

    def _changes(self, path: str, query: Mapping[str, object], deadline: float) -> Iterator[tuple[str, Object]]:
        """Changes since a version until the deadline; ends earlier when the server wants a new list."""
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return
        watch = {"watch": "1", "timeoutSeconds": int(seconds) + 1}
        try:
            answer = self._send("GET", path, query={**query, **watch}, seconds=seconds, stream=True)
        except ApiError as error:
            if error.status == _GONE:
                return
            raise
        try:
            for line in _lines(answer):
                change = json.loads(line)
                if change["type"] == "ERROR":
                    return
                yield change["type"], change["object"]
                if time.monotonic() >= deadline:
                    return
        except (urllib3.exceptions.ReadTimeoutError, urllib3.exceptions.ProtocolError):
            return
        finally:
            answer.close()

    def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, object] | None = None,
        seconds: float = 60,
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        url = f"{self._host}{path}" + (f"?{urlencode(query)}" if query else "")
        headers = self._headers | {"Accept": "application/json"}
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = as_yaml(body) if content_type == _APPLY else json.dumps(body)
        timeout = urllib3.Timeout(connect=10, read=seconds)
        retries = _WHEN_BUSY if method == "GET" else False
        answer = self._pool.request(
            method, url, body=data, headers=headers, timeout=timeout, retries=retries, preload_content=not stream
        )
        if answer.status >= 400:
            said = answer.data.decode(errors="replace")
            try:
                status = json.loads(said)
            except ValueError:
                raise ApiError(answer.status, "", said) from None
            raise ApiError(answer.status, status.get("reason", ""), status.get("message", said))
        return answer


def condition(item: Object, kind: str) -> Object:
    """A condition of an object's status; empty where it has none."""
    for entry in item.get("status", {}).get("conditions") or ():
        if entry["type"] == kind:
            return dict(entry)
    return {}


def is_true(item: Object, kind: str) -> bool:
    """Whether a condition of an object's status is True."""
    return condition(item, kind).get("status") == "True"


def _selectors(selector: str, name: str) -> dict[str, object]:
    chosen: dict[str, object] = {}
    if selector:
        chosen["labelSelector"] = selector
    if name:
        chosen["fieldSelector"] = f"metadata.name={name}"
    return chosen


def _lines(answer: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Lines of a streamed answer, as they come."""
    pending = b""
    for chunk in answer.stream(amt=None):
        pending += chunk
        *whole, pending = pending.split(b"\n")
        yield from whole
