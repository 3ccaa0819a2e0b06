"""The gateway as a process: what it prints, how it ends, what it says to a user's mistake."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from kitestring_rollout.gateway.config import GatewayConfig
from tests.gateway.conftest import CREDENTIAL, opening

HEADERS = {"Authorization": f"Bearer {CREDENTIAL}"}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "key").write_bytes(os.urandom(32))
    (tmp_path / "admin").write_text(CREDENTIAL)
    return {
        "run": "run-1",
        "token_key_file": str(tmp_path / "key"),
        "admin_credential_file": str(tmp_path / "admin"),
        "policies": [{"name": "policy", "servers": ["http://127.0.0.1:9"]}],
        "collector": {"url": "http://127.0.0.1:9"},
        "drain_seconds": 30,
    }


def start(config: dict[str, Any], tmp_path: Path) -> tuple[subprocess.Popen[str], dict[str, str]]:
    file = tmp_path / "gateway.json"
    file.write_text(json.dumps(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "kitestring_cli", "gateway", "--config", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, json.loads(line)["listening"] if line else {}


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


def test_it_serves_and_ends_cleanly_on_sigterm(config: dict[str, Any], tmp_path: Path) -> None:
    process, urls = start(config, tmp_path)
    try:
        assert urls.keys() == {"agents", "admin"}
        assert httpx.get(f"{urls['agents']}/health").status_code == 200
        assert httpx.get(f"{urls['admin']}/admin/v1/status", headers=HEADERS).json()["draining"] is False
    finally:
        process.send_signal(signal.SIGTERM)
        code, _ = end(process)
    assert code == 0


@pytest.mark.parametrize("bound", [30.0, 0.2])
def test_sigterm_waits_for_open_attempts_up_to_the_bound(config: dict[str, Any], tmp_path: Path, bound: float) -> None:
    process, urls = start({**config, "drain_seconds": bound}, tmp_path)
    try:
        with httpx.Client(headers=HEADERS, base_url=urls["admin"]) as admin:
            attempt = admin.post("/admin/v1/attempts", json=opening()).json()["attempt"]
            process.send_signal(signal.SIGTERM)
            if bound > 1:
                while not admin.get("/admin/v1/status").json()["draining"]:
                    pass
                assert admin.post("/admin/v1/attempts", json=opening()).json()["reason"] == "Draining"
                assert admin.post(f"/admin/v1/attempts/{attempt}/fence").status_code == 200
                # Without a collector the end cannot become durable: the attempt stays open until the bound.
                process.kill()
    finally:
        code, errors = end(process)
    if bound < 1:
        assert code == 1 and "1 attempts were still open" in errors


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token_key_file": "/nowhere/key"}, "token_key_file: cannot read /nowhere/key"),
        ({"admin_credential_file": "/nowhere/admin"}, "admin_credential_file: cannot read /nowhere/admin"),
        ({"surprise": 1}, "surprise"),
        ({"policies": []}, "at least one model"),
        ({"policies": [{"name": "a", "servers": ["http://x"], "aliases": ["a"]}]}, "given twice"),
        ({"policies": [{"name": "a", "servers": ["not a url"]}]}, "servers"),
        ({"admin": {"port": 70000}}, "port"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(
    config: dict[str, Any], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    process, _ = start({**config, **changes}, tmp_path)
    code, errors = end(process)
    assert code == 2 and says in errors and "Traceback" not in errors


def test_a_short_key_and_a_taken_port_are_mistakes_too(
    config: dict[str, Any], tmp_path: Path, unused_tcp_port: int
) -> None:
    (tmp_path / "short").write_bytes(b"x" * 31)
    process, _ = start({**config, "token_key_file": str(tmp_path / "short")}, tmp_path)
    code, errors = end(process)
    assert code == 2 and "31 bytes, 32 are needed" in errors
    process, urls = start(config, tmp_path)
    try:
        port = int(urls["agents"].rsplit(":", 1)[1])
        other, _ = start({**config, "agents": {"port": port}}, tmp_path)
        code, errors = end(other)
        assert code == 2 and f"agents.port {port}" in errors and "Traceback" not in errors
    finally:
        process.send_signal(signal.SIGTERM)
        end(process)


def test_the_example_of_the_documentation_is_a_config() -> None:
    text = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    example = text.split("```json\n", 1)[1].split("```", 1)[0]
    GatewayConfig.model_validate_json(example)


def test_every_error_code_is_in_the_documentation() -> None:
    """The codes are the literals in the code's place of the calls that make a refusal."""
    places = {"Refusal": 1, "_over": 0, "upstream_failed": 1}
    root = Path(__file__).parents[2]
    found = set()
    for source in (root / "rollout" / "kitestring_rollout" / "gateway").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in places:
                place = places[node.func.id]
                code = node.args[place] if len(node.args) > place else None
                if isinstance(code, ast.Constant):
                    found.add(str(code.value))
    documented = (root / "docs" / "gateway.md").read_text()
    assert len(found) > 25 and not {code for code in found if f"`{code}`" not in documented}
