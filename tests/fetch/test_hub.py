"""Models of the hub, from a stand-in on the loopback interface: the hub itself was never asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

FILES = {
    "config.json": b"{}",
    "model.safetensors": os.urandom(50_000),
    "tokenizer.json": b"[]",
    "pytorch_model.bin": b"the same weights again",
    ".gitattributes": b"",
}
COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """The routes that a download asks for."""

    asked: list[tuple[str, str | None]]
    broken: int

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:  # noqa: PLR0911
        hub = type(self)
        hub.asked.append((self.path, self.headers.get("Authorization")))
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/model"):
            if "/revision/nope" in path:
                return self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            if "/tree/" in path:
                tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40} for name in FILES]
                return self._send(200, json.dumps(tree).encode(), body, {"Content-Type": "application/json"})
            info = {"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            return self._send(200, json.dumps(info).encode(), body, {"Content-Type": "application/json"})
        if path.startswith("/org/model/resolve/"):
            if body and hub.broken:
                hub.broken -= 1
                return self._send(503, b"", body, {})
            data = FILES[path.rpartition("/")[2]]
            return self._send(200, data, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{sha256(data).hexdigest()}"'})
        if "gated" in path:
            return self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        return self._send(401, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    handler = type("Hub", (Hub,), {"asked": [], "broken": 0})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fetch(hub: ThreadingHTTPServer, tmp_path: Path, source: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the hub's client reads its environment when it is imported."""
    file = tmp_path / "fetch.json"
    items = [{"huggingFace": source, "to": str(tmp_path / "in" / "model")}]
    file.write_text(json.dumps({"items": items, "retry_seconds": 3}))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HOME": "/nonexistent"}
    command = [str(Path(sys.executable).with_name("kitestring")), "fetch", "--config", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_model_becomes_a_folder(hub: ThreadingHTTPServer, tmp_path: Path, broken: int) -> None:
    hub.RequestHandlerClass.broken = broken  # type: ignore[attr-defined]
    (tmp_path / "token").write_text("hub-token\n")
    ended = fetch(hub, tmp_path, {"id": "org/model", "revision": "main", "token_file": str(tmp_path / "token")})
    assert ended.returncode == 0, ended.stderr
    found = {path.name: path.read_bytes() for path in (tmp_path / "in" / "model").rglob("*") if path.is_file()}
    assert found == {name: FILES[name] for name in ("config.json", "model.safetensors", "tokenizer.json")}
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["model"]
    asked = hub.RequestHandlerClass.asked  # type: ignore[attr-defined]
    assert {credential for path, credential in asked if "org/model" in path} == {"Bearer hub-token"}
    assert "hub-token" not in ended.stderr


def test_a_hub_that_is_away_is_tried_again_and_given_up(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    hub.RequestHandlerClass.broken = 10_000  # type: ignore[attr-defined]
    ended = fetch(hub, tmp_path, {"id": "org/model"})
    assert ended.returncode == 1, ended.stderr
    assert "given up: the hub cannot serve org/model" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list((tmp_path / "in").iterdir())


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"id": "org/nowhere"}, "items[0].huggingFace.id: the hub has no model org/nowhere"),
        ({"id": "org/gated"}, "items[0].huggingFace.id: org/gated asks for consent"),
        ({"id": "org/model", "revision": "nope"}, "items[0].huggingFace.revision: org/model has no revision nope"),
        ({"id": "org/model", "token_file": "/nowhere"}, "items[0].huggingFace.token_file: cannot read /nowhere"),
    ],
)
def test_mistakes_are_one_line(hub: ThreadingHTTPServer, tmp_path: Path, source: dict[str, Any], says: str) -> None:
    ended = fetch(hub, tmp_path, source)
    assert ended.returncode == 2, ended.stderr
    assert f"error: {says}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "in").exists() or not list((tmp_path / "in").iterdir())
