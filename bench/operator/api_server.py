"""The API of a cluster over HTTP on loopback, as far as the operator, kopf and their clients ask for it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from bench.operator.store import Event, RefusedError, Store
from kitestring_operator.cluster.kinds import KINDS, RESOURCES, Kind
from kitestring_operator.observed import Manifest, ObjectRef

BOOKMARK_SECONDS = 30.0
"""A watch hears something at least so often, as of a real server."""
SERVED = {kind.path(None): kind for kind in KINDS.values() if "kueue" not in kind.group}
"""What is served, by the path of all objects of a kind: a cluster without Kueue, unless someone adds its kinds."""
_BACKBONE = {
    "/api/v1": ("namespaces", "Namespace"),
    "/apis/apiextensions.k8s.io/v1": ("customresourcedefinitions", "CustomResourceDefinition"),
}
"""Kinds that kopf looks for and, told not to, never reads."""
_Selector = Callable[[Mapping[str, str]], bool]


class _Target(NamedTuple):
    """What a path names: a collection, or an object and perhaps a part of it."""

    kind: Kind
    namespace: str | None
    name: str | None
    part: str | None

    @property
    def ref(self) -> ObjectRef:
        assert self.namespace is not None and self.name is not None
        return self.kind.ref(self.namespace, self.name)


class _Told(NamedTuple):
    version: int
    line: bytes
    namespace: str
    labels: Mapping[str, str]


class ApiServer:
    """Serves a store. Belongs to one event loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._told: defaultdict[str, list[_Told]] = defaultdict(list)
        """Every event by kind: whoever lost its watch goes on where it was."""
        self._watched: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._pages: dict[str, tuple[int, list[Manifest]]] = {}
        """By their token: the version at which the list was begun, and what is left of it."""
        self._tokens = itertools.count(1)
        self._stopping = asyncio.Event()
        store.listeners.append(self._tell)

    def routes(self) -> list[web.RouteDef]:
        return [web.route("*", "/{path:(version|apis?)(/.*)?}", self._answer)]

    def is_watched(self, kind: str) -> bool:
        """Whether anyone hears of changes of a kind just now."""
        return bool(self._watched[kind])

    def stop(self) -> None:
        """End all watches."""
        self._stopping.set()
        for kind in self._watched:
            self.cut(kind)

    def cut(self, kind: str) -> None:
        """End the watches of a kind that is served no longer."""
        for news in self._watched[kind]:
            news.set()

    # --- Requests -------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if (found := _discovered(request.path)) is not None:
            return _json(found)
        target = _target(request.path)
        if target is None:
            return _error(HTTPStatus.NOT_FOUND, "the server could not find the requested resource")
        try:
            if request.method == "GET" and target.name is None:
                return await self._collection(request, target)
            answer = self._object(request.method, target, request, await request.read())
        except RefusedError as error:
            return _error(error.status, str(error))
        return _error(HTTPStatus.NOT_FOUND, "not found") if answer is None else _json(answer)

    def _object(self, method: str, target: _Target, request: web.Request, raw: bytes) -> Manifest | None:
        if method == "PATCH":
            return self._patched(target, request, orjson.loads(raw))
        match method:
            case "GET":
                return self.store.get(target.ref)
            case "DELETE":
                return self.store.delete(target.ref)
            case "POST":
                return self.store.create(orjson.loads(raw))
            case "PUT":
                return self.store.update(orjson.loads(raw))
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, f"{method} {request.path}")

    def _patched(self, target: _Target, request: web.Request, body: Manifest) -> Manifest | None:
        if "dryRun" in request.query:
            return body
        if "apply" not in request.content_type:
            return self.store.patch(target.ref, body)
        if target.part == "status":
            return self.store.patch_status(target.ref, body["metadata"]["uid"], body["status"])
        return self.store.apply(body)

    async def _collection(self, request: web.Request, target: _Target) -> web.StreamResponse:
        selector = _selector(request.query.get("labelSelector", ""))
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request, target, selector)
        limit = int(request.query.get("limit", 0)) or None
        token = request.query.get("continue", "")
        if token:
            left = self._pages.pop(token, None)
            if left is None:
                return _error(HTTPStatus.GONE, "the continue token has expired")
            version, items = left
        else:
            version = self.store.version
            items = [item for item in self.store.of_kind(target.kind.kind) if _matches(item, target, selector)]
        page, rest = items[:limit], items[limit:] if limit else []
        token = ""
        if rest:
            token = str(next(self._tokens))
            self._pages[token] = (version, rest)
        bare = [{key: value for key, value in item.items() if key not in ("apiVersion", "kind")} for item in page]
        metadata = {"resourceVersion": str(version), "continue": token}
        kind = {"apiVersion": target.kind.api_version, "kind": f"{target.kind.kind}List"}
        return _json(kind | {"metadata": metadata, "items": bare})

    # --- Watches --------------------------------------------------------------------------------------------------

    def _tell(self, event: Event, manifest: Manifest) -> None:
        metadata, kind = manifest["metadata"], manifest["kind"]
        line = orjson.dumps({"type": event, "object": manifest}) + b"\n"
        labels = metadata.get("labels") or {}
        self._told[kind].append(_Told(int(metadata["resourceVersion"]), line, metadata["namespace"], labels))
        for news in self._watched[kind]:
            news.set()

    async def _watch(self, request: web.Request, target: _Target, selector: _Selector) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        kind = target.kind.kind
        since = int(request.query.get("resourceVersion") or self.store.version)
        with self._listening(kind) as news, contextlib.suppress(ConnectionError):
            told = self._told[kind]
            position = next((at for at, entry in enumerate(told) if entry.version > since), len(told))
            while not self._stopping.is_set() and target.kind.path(None) in SERVED:
                news.clear()
                lines = [
                    entry.line
                    for entry in told[position:]
                    if target.namespace in (None, entry.namespace) and selector(entry.labels)
                ]
                position = len(told)
                if lines:
                    await response.write(b"".join(lines))
                try:
                    await asyncio.wait_for(news.wait(), BOOKMARK_SECONDS)
                except TimeoutError:
                    await response.write(self._bookmark(target.kind))
        return response

    @contextlib.contextmanager
    def _listening(self, kind: str) -> Any:
        news = asyncio.Event()
        self._watched[kind].add(news)
        try:
            yield news
        finally:
            self._watched[kind].discard(news)

    def _bookmark(self, kind: Kind) -> bytes:
        metadata = {"resourceVersion": str(self.store.version)}
        item = {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
        return orjson.dumps({"type": "BOOKMARK", "object": item}) + b"\n"


@contextlib.asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """URL of an application on a free port of loopback."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


# --- Paths --------------------------------------------------------------------------------------------------------


def _target(path: str) -> _Target | None:
    parts = path.strip("/").split("/")
    root, rest = (parts[:2], parts[2:]) if parts[0] == "api" else (parts[:3], parts[3:])
    namespace = None
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    if not rest:
        return None
    kind = SERVED.get("/" + "/".join([*root, rest[0]]))
    name, part = ([*rest[1:3], None, None])[:2]
    return None if kind is None else _Target(kind, namespace, name, part)


def _discovered(path: str) -> Manifest | None:
    """What is served, where a path asks for that."""
    groups = {kind.api_version for kind in SERVED.values() if "/" in kind.api_version}
    groups.add("apiextensions.k8s.io/v1")
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "groups": [_group(version) for version in sorted(groups)]}
    version = path.removeprefix("/apis/").removeprefix("/api/")
    if version != "v1" and version not in groups:
        return None
    found = [_resource(kind.plural, kind.kind) for kind in SERVED.values() if kind.api_version == version]
    if path in _BACKBONE:
        found.append(_resource(*_BACKBONE[path]) | {"namespaced": False})
    status = [_resource(f"{KINDS[kind].plural}/status", kind) for kind in RESOURCES]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": [*found, *status]}


def _group(version: str) -> Manifest:
    only = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.rpartition("/")[0], "versions": [only], "preferredVersion": only}


def _resource(name: str, kind: str) -> Manifest:
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    return {"name": name, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}


def _selector(text: str) -> _Selector:
    """Of labels, by `key=value` and `key!=value`."""
    parts = [part.partition("=") for part in text.split(",") if part]
    same = {key: value for key, _, value in parts if not key.endswith("!")}
    other = {key.removesuffix("!"): value for key, _, value in parts if key.endswith("!")}

    def selects(labels: Mapping[str, str]) -> bool:
        return same.items() <= labels.items() and not any(labels.get(key) == value for key, value in other.items())

    return selects


def _matches(item: Manifest, target: _Target, selector: _Selector) -> bool:
    metadata = item["metadata"]
    return target.namespace in (None, metadata["namespace"]) and selector(metadata.get("labels") or {})


def _json(document: Manifest) -> web.Response:
    return web.Response(body=orjson.dumps(document), content_type="application/json")


def _error(status: HTTPStatus, message: str) -> web.Response:
    document = {"kind": "Status", "status": "Failure", "message": message, "code": int(status)}
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/json")
