"""A cluster's API over HTTP that only answers what it was given: lists of objects, and logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from e2e.harness.kinds import KINDS, Kind


class ClusterApi:
    """What there is: objects, and logs by pod, container and whether it is that of the container before."""

    def __init__(self, *absent: Kind) -> None:
        self._absent = absent
        self._objects: list[dict[str, Any]] = []
        self._logs: dict[tuple[str, str, bool], str] = {}

    def put(self, kind: Kind, name: str, namespace: str | None = None, **fields: Any) -> None:
        metadata = {"name": name, "namespace": namespace, "managedFields": [{"manager": "kitestring-e2e"}]}
        self._objects.append({"kind": kind.name, "apiVersion": kind.api_version, "metadata": metadata, **fields})

    def log(self, pod: str, container: str, text: str, *, previous: bool = False) -> None:
        self._logs[pod, container, previous] = text

    def answer(self, target: str) -> tuple[int, str]:
        """Status and body of a GET."""
        url = urlsplit(target)
        match url.path.strip("/").split("/"):
            case [*_, "pods", pod, "log"]:
                return self._log(pod, {key: values[0] for key, values in parse_qs(url.query).items()})
            case [*_, "namespaces", namespace, plural]:
                return self._list(plural, namespace)
            case [*_, plural]:
                return self._list(plural, None)

    def _list(self, plural: str, namespace: str | None) -> tuple[int, str]:
        if plural in {kind.plural for kind in self._absent}:
            return 404, json.dumps(
                {"reason": "NotFound", "message": "the server could not find the requested resource"}
            )
        kind = next(kind for kind in KINDS.values() if kind.plural == plural)
        of_kind = [item for item in self._objects if item["kind"] == kind.name]
        items = [item for item in of_kind if item["metadata"]["namespace"] == namespace]
        return 200, json.dumps({"items": items, "metadata": {"resourceVersion": "1"}})

    def _log(self, pod: str, query: dict[str, str]) -> tuple[int, str]:
        container = query["container"]
        text = self._logs.get((pod, container, query["previous"] == "true"))
        if text is None:
            waits = f'container "{container}" in pod "{pod}" is waiting to start: trying and failing to pull image'
            return 400, json.dumps({"reason": "BadRequest", "message": waits})
        return 200, "".join(text.splitlines(keepends=True)[-int(query["tailLines"]) :])


@contextmanager
def served(cluster: ClusterApi, folder: Path) -> Iterator[Path]:
    """The kubeconfig, written into a folder, of a cluster that answers meanwhile."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = cluster.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Not into the tests' output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        kubeconfig = folder / "kubeconfig"
        named = {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "test", "context": {"cluster": "test", "user": "test"}}
        users = [{"name": "test", "user": {}}]
        document = {"clusters": [named], "contexts": [context], "users": users, "current-context": "test"}
        kubeconfig.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **document}))
        yield kubeconfig
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
