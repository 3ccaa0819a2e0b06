"""The requests of `cluster.protocol`, sent by the official client from a thread pool of their own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Self

import tenacity
import urllib3.exceptions
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.config.incluster_config import load_incluster_config
from kubernetes.config.kube_config import load_kube_config

from kitestring_api import names
from kitestring_api.errors import UserMistakeError
from kitestring_operator.cluster.errors import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    NotLeadingError,
    RefusedError,
    UnavailableError,
)
from kitestring_operator.cluster.kinds import KINDS, Kind, path_of
from kitestring_operator.cluster.protocol import Propagation
from kitestring_operator.cluster.trimmed import needs_content, trimmed
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import Manifest, ObjectRef

THREADS: Final = 8
"""Requests at once. The default executor of asyncio is not used: it is shared and may be full of other waits."""
TIMEOUT_SECONDS: Final = (5.0, 30.0)
"""Of a request: to connect, to read."""
TRIES: Final = 4
PAGE: Final = 100
"""Objects in one page of a list: one page of each list is in memory, and a pod takes eighty kilobytes there."""
METADATA_PAGE: Final = 500
"""The same of kinds of which only the metadata is asked for."""

_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"
_JSON: Final = "application/json"
_METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_READS: Final = frozenset({"get", "list", "log", "discover"})
_FIELD_MANAGER: Final = names.LABEL_MANAGED_BY_VALUE
_ESCAPED: Final = re.compile(r"\\\\|\\ud[89ab]..\\ud[c-f]..")
"""In JSON: a backslash that stands for itself, or a character beyond U+FFFF."""


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Request:
    """One request, before it has a connection."""

    verb: str
    kind: str
    what: str
    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    content_type: str | None = None
    body: Mapping[str, Any] | None = None
    accept: str = _JSON


class RequestedCluster:
    """The cluster behind one ApiClient. `may_write` is asked before each write, on the thread that sends it."""

    def __init__(
        self,
        client: ApiClient,
        executor: ThreadPoolExecutor,
        metrics: Metrics,
        may_write: Callable[[], bool] = _always,
    ) -> None:
        self._client = client
        self._executor = executor
        self._metrics = metrics
        self._may_write = may_write

    def fenced(self, may_write: Callable[[], bool]) -> Self:
        """The same cluster, on the same connections, whose writes are refused unless `may_write()`."""
        return type(self)(self._client, self._executor, self._metrics, may_write)

    async def apply(self, manifest: Manifest) -> Manifest:
        return await self._written(_applied("apply", manifest), retry_conflict=True)

    async def rehearse(self, manifest: Manifest) -> None:
        await self._written(_applied("rehearse", manifest, ("dryRun", "All")), retry_conflict=True)

    async def create(self, manifest: Manifest) -> Manifest:
        ref = ObjectRef.of(manifest)
        path = KINDS[ref.kind].path(ref.namespace)
        query = (("fieldManager", _FIELD_MANAGER),)
        return await self._written(Request("create", ref.kind, _what(ref), "POST", path, query, _JSON, manifest))

    async def update(self, manifest: Manifest) -> Manifest:
        query = (("fieldManager", _FIELD_MANAGER),)
        return await self._written(_request("update", ObjectRef.of(manifest), "PUT", query, _JSON, manifest))

    async def patch(
        self, ref: ObjectRef, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Manifest | None:
        query = (("fieldManager", _FIELD_MANAGER),)
        verb = "patch" if subresource is None else subresource
        path = path_of(ref, subresource)
        return await self._sent(Request(verb, ref.kind, _what(ref), "PATCH", path, query, _MERGE, patch))

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> Manifest | None:
        body = {
            "apiVersion": ref.api_version,
            "kind": ref.kind,
            "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": uid},
            "status": status,
        }
        query = (("fieldManager", _FIELD_MANAGER), ("force", "true"))
        path = path_of(ref, "status")
        request = Request("status", ref.kind, f"status of {_what(ref)}", "PATCH", path, query, _APPLY, body)
        try:
            return await self._sent(request)
        except ConflictError:
            return None  # another object has the name by now

    async def delete(
        self, ref: ObjectRef, *, uid: str, propagation: Propagation = "Background", grace_seconds: int | None = None
    ) -> None:
        body: dict[str, Any] = {"propagationPolicy": propagation, "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            await self._sent(_request("delete", ref, "DELETE", (), _JSON, body))
        except ConflictError:
            return  # another object has the name by now

    async def get(self, ref: ObjectRef) -> Manifest | None:
        return await self._sent(_request("get", ref, "GET"))

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
        entry = KINDS[kind]
        limit, accept = (PAGE, _JSON) if needs_content(kind) else (METADATA_PAGE, _METADATA_LIST)
        where = "all namespaces" if namespace is None else namespace
        found: list[Manifest] = []
        token = ""
        while True:
            asked = (("limit", str(limit)), ("labelSelector", selector), ("continue", token))
            query = tuple((key, value) for key, value in asked if value)
            request = Request(
                "list", kind, f"{entry.plural} of {where}", "GET", entry.path(namespace), query, accept=accept
            )
            try:
                answer = await self._tried(request, retry_conflict=False)
            except _MissingError:
                why = "the cluster does not know this kind"
                raise RefusedError(f"list {request.what}", HTTPStatus.NOT_FOUND, why) from None
            # the event loop, with a lease to renew, goes on between its objects
            items, token = await asyncio.get_running_loop().run_in_executor(self._executor, _page, entry, answer)
            found += items
            if not token:
                return found

    async def log_tail(self, pod: ObjectRef, container: str, *, lines: int, limit_bytes: int) -> str:
        query = (("container", container), ("tailLines", str(lines)), ("limitBytes", str(limit_bytes)))
        path = path_of(pod, "log")
        request = Request("log", "Pod", f"log of {_what(pod)}", "GET", path, query, accept="*/*")
        try:
            text = await self._tried(request, retry_conflict=False)
        except (RefusedError, _MissingError):
            return ""  # the container never started, or its pod is gone
        return text.decode(errors="replace")

    async def latest_event(self, namespace: str, uid: str, reason: str) -> str:
        kind = KINDS["Event"]
        query = (("fieldSelector", f"involvedObject.uid={uid},reason={reason}"), ("limit", str(PAGE)))
        what = f"{kind.plural} of {namespace}"
        found = await self._sent(Request("list", kind.kind, what, "GET", kind.path(namespace), query))
        events = [] if found is None else found.get("items") or []
        return str(max(events, key=_said_at).get("message") or "") if events else ""

    async def serves(self, kind: str) -> bool:
        entry = KINDS[kind]
        path = "/api/v1" if entry.api_version == "v1" else f"/apis/{entry.api_version}"
        found = await self._sent(Request("discover", kind, f"kinds of {entry.api_version}", "GET", path))
        return found is not None and any(item["name"] == entry.plural for item in found["resources"])

    async def _written(self, request: Request, *, retry_conflict: bool = False) -> Manifest:
        answer = await self._sent(request, retry_conflict=retry_conflict)
        if answer is None:
            raise RefusedError(f"{request.verb} {request.what}", HTTPStatus.NOT_FOUND, "its namespace or kind is gone")
        return answer

    async def _sent(self, request: Request, *, retry_conflict: bool = False) -> Manifest | None:
        try:
            answer = await self._tried(request, retry_conflict=retry_conflict)
        except _MissingError:
            return None
        manifest: Manifest = json.loads(answer)
        return _stripped(manifest)

    async def _tried(self, request: Request, *, retry_conflict: bool) -> bytes:
        """Send until it is answered for good: 429, 5xx, silence and, if asked, conflicts are tried again."""
        again = (UnavailableError, ConflictError) if retry_conflict else UnavailableError
        loop = asyncio.get_running_loop()
        async for attempt in tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(again),
            stop=tenacity.stop_after_attempt(TRIES),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        ):
            with attempt:
                return await loop.run_in_executor(self._executor, self._send, request)
        raise AssertionError("tenacity reraises")

    def _send(self, request: Request) -> bytes:
        if request.verb in _READS:
            self._metrics.api_reads.labels(request.kind, request.verb).inc()
        else:
            if not self._may_write():
                raise NotLeadingError(f"{request.verb} {request.what}: this process does not hold the lease")
            self._metrics.api_writes.labels(request.kind, request.verb).inc()
        headers = {"Accept": request.accept}
        if request.content_type is not None:
            headers["Content-Type"] = request.content_type
        serialized = self._client.param_serialize(
            request.method,
            request.path,
            query_params=list(request.query),
            header_params=headers,
            body=as_yaml(request.body) if request.content_type == _APPLY else request.body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._client.call_api(*serialized, _request_timeout=TIMEOUT_SECONDS)
            body: bytes = response.read()  # type: ignore[no-untyped-call]
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            self._metrics.api_errors.labels(request.kind, request.verb, "0").inc()
            raise UnavailableError(f"{request.verb} {request.what}", 0, str(error)) from error
        if response.status < HTTPStatus.MULTIPLE_CHOICES:
            return body
        self._metrics.api_errors.labels(request.kind, request.verb, str(response.status)).inc()
        raise _error(request, response.status, body)


class _MissingError(Exception):
    """404 of the object itself."""


def connect() -> ApiClient:
    """A client by the pod's service account, else by the kubeconfig of the environment. Raises UserMistakeError."""
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        try:
            load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except ConfigException as error:
            raise UserMistakeError(
                f"no cluster: neither a service account is mounted nor a kubeconfig found: {error}; set KUBECONFIG"
            ) from error
    configuration.connection_pool_maxsize = THREADS
    configuration.retries = False  # tries are counted and paced here
    return ApiClient(configuration)


def _applied(verb: str, manifest: Manifest, *further: tuple[str, str]) -> Request:
    """A server-side apply under our name."""
    query = (("fieldManager", _FIELD_MANAGER), ("force", "true"), *further)
    return _request(verb, ObjectRef.of(manifest), "PATCH", query, _APPLY, manifest)


def _request(
    verb: str,
    ref: ObjectRef,
    method: str,
    query: tuple[tuple[str, str], ...] = (),
    *body: Any,
) -> Request:
    """`body`: content type and content, where there is any."""
    return Request(verb, ref.kind, _what(ref), method, path_of(ref), query, *body)


def _page(kind: Kind, answer: bytes) -> tuple[list[Manifest], str]:
    """The trimmed objects of a page, and the token of the next one, empty after the last."""
    page = json.loads(answer)
    named = {"apiVersion": kind.api_version, "kind": kind.kind}
    return [trimmed(item | named) for item in page.get("items") or ()], page["metadata"].get("continue", "")


def _said_at(event: Manifest) -> str:
    """When an event was said last: times as the API server writes them are in order as texts, to the second."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def as_yaml(body: Mapping[str, Any] | None) -> str:
    """JSON that the API server's reader of YAML takes for the same.

    It refuses the pairs of escapes by which JSON in ASCII writes characters beyond U+FFFF, and takes some that JSON may
    leave as they are for ends of lines.
    """
    return _ESCAPED.sub(lambda found: found[0] if found[0] == r"\\" else json.loads(f'"{found[0]}"'), json.dumps(body))


def _what(ref: ObjectRef) -> str:
    return f"{ref.kind} {ref.namespace}/{ref.name}"


def _error(request: Request, status: int, body: bytes) -> Exception:
    what = f"{request.verb} {request.what}"
    try:
        answer = json.loads(body)
        reason = str(answer.get("message") or answer.get("reason") or status)
    except (ValueError, AttributeError):
        reason = body[:200].decode(errors="replace") or str(status)
    if status == HTTPStatus.NOT_FOUND:
        return _MissingError(what)
    if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return UnavailableError(what, status, reason)
    kinds: dict[int, type[ClusterError]] = {
        HTTPStatus.CONFLICT: AlreadyExistsError if request.verb == "create" else ConflictError,
        HTTPStatus.UNAUTHORIZED: ForbiddenError,
        HTTPStatus.FORBIDDEN: ForbiddenError,
    }
    return kinds.get(status, RefusedError)(what, status, reason)


def _stripped(manifest: Manifest) -> Manifest:
    metadata = manifest.get("metadata")
    if isinstance(metadata, dict):
        metadata.pop("managedFields", None)
    return manifest
