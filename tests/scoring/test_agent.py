from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import kitestring_rollout.agent
from kitestring_api import names
from kitestring_rollout.agent import reward


class Rewards(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[tuple[str, object]] = []
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: Rewards

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, json.loads(body)))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "a reward was posted before"}}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rewards]:
    server = Rewards()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv(names.ENV_BASE_URL, f"http://127.0.0.1:{server.server_port}/r/token")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_posts_below_the_base_url_of_the_attempt_past_any_proxy(gateway: Rewards) -> None:
    assert reward(0.5)
    assert reward(1, name="style")
    assert gateway.got == [
        ("/r/token/rewards", {"value": 0.5, "name": "reward"}),
        ("/r/token/rewards", {"value": 1, "name": "style"}),
    ]


def test_a_refused_reward_is_said_and_does_not_stop_the_agent(
    gateway: Rewards, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.status = 409
    assert not reward(1.0)
    assert "reward refused: HTTP 409" in capsys.readouterr().err


def test_an_unreachable_gateway_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(names.ENV_BASE_URL, "http://127.0.0.1:1/r/token")
    assert not reward(1.0)
    assert "reward not delivered" in capsys.readouterr().err


def test_does_nothing_outside_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(names.ENV_BASE_URL, raising=False)
    assert not reward(1.0)


def test_needs_nothing_but_python() -> None:
    file = Path(kitestring_rollout.agent.__file__)
    code = f"import runpy; assert runpy.run_path({str(file)!r})['reward'](1.0) is False"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, env={})
