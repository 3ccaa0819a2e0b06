"""A run whose gateway reaches its policy server through the recorder; started and looked at as a user would."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from uuid_utils import uuid7

from kitestring_cli.run.command import local_run
from kitestring_cli.run.configs import Ports, free_ports, part_configs, write_resolved
from kitestring_cli.run.folder import RunFolder, create_run_folder
from kitestring_rollout.gateway.config import GatewayConfig
from kitestring_trainer.queue.gateways import Gateways
from kitestring_trainer.weights import PolicyServers
from tests.faults.local_run import LocalRun, wait_until, write_files
from tests.policy_server.tiny_policy import make_policy
from tests.thread.recorder import Recorder

HERE = Path(__file__).parent
JUDGE_KEY = "sk-judge-0123456789abcdef"
JUDGE_LIMIT = 60
GROUP_SIZE = 2
SCENES = (
    "turns", "streams", "choices", "together", "repeats", "leaves", "samples", "update", "judge", "spans", "attack",
    "gate",
)  # fmt: skip
PRELOAD = [
    "openai",
    "opentelemetry.sdk.trace.export",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
]


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def code(self) -> str | None:
        """Of an error of the agents' side, or the reason of one of the admin side."""
        answer = json.loads(self.body)
        return answer["error"]["code"] if isinstance(answer.get("error"), dict) else answer.get("reason")


@dataclass
class Thread:
    """A run that is over, and what everyone around it saw."""

    folder: RunFolder
    recorder: Recorder
    run: LocalRun
    evidence: list[dict[str, Any]]
    """What each agent wrote down."""
    metrics: dict[tuple[str, ...], float] = field(default_factory=dict)
    """The gateway's, before it ended: name and values of the labels."""
    collected: dict[tuple[str, ...], float] = field(default_factory=dict)
    """The collector's."""
    late: dict[str, Answer] = field(default_factory=dict)
    """Answers to tokens of attempts that had ended, and of another gateway process."""
    refusing: dict[str, Answer] = field(default_factory=dict)
    """Answers of a gateway that refuses other sampling, to an attempt that may post rewards."""
    result: dict[str, Any] = field(default_factory=dict)

    def of(self, scene: str) -> list[dict[str, Any]]:
        return [seen for seen in self.evidence if seen["scene"] == scene]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """`kitestring export`, as JSON lines."""
        return [json.loads(line) for line in self.export().splitlines()]

    def export(self, *arguments: str) -> bytes:
        command = [sys.executable, "-m", "kitestring_cli", "export", str(self.folder.root), *arguments]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout


def play(root: Path) -> Iterator[Thread]:
    """One whole run; yields when it is over."""
    model = make_policy(root / "model")
    ports = free_ports()
    evidence = root / "evidence"
    evidence.mkdir()
    with Recorder(_url(ports.policy), JUDGE_KEY) as recorder:
        files = _files(root, model, ports, recorder)
        folder, gateway = _write_configs(root, files, ports, recorder)
        recorder.update = _updates(folder, model, ports)
        run = LocalRun(root, [], resume=folder.root)
        try:
            _wait_for_gate(run, evidence, ports)
            seen = _read(evidence)
            thread = Thread(folder, recorder, run, seen)
            with _refusing_gateway(root, files, ports, folder, recorder) as config:
                _visit(thread, config)
            thread.late |= _late(seen, gateway)
            thread.metrics, thread.collected = _metrics(ports.admin), _metrics(ports.collector)
            (root / "release").touch()
            thread.result = run.wait()
            thread.evidence = _read(evidence)
            yield thread
        finally:
            run.end()


def _files(root: Path, model: Path, ports: Ports, recorder: Recorder) -> list[Path]:
    targets = {name: _url(getattr(ports, name)) for name in ("admin", "queue", "collector")}
    environment = {"EVIDENCE": str(root / "evidence"), "TARGETS": json.dumps(targets)}
    agent = {
        "name": "agent",
        "command": [sys.executable, str(HERE / "scene_agent.py")],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
    }
    gate = {"signal": str(root / "signal"), "release": str(root / "release")}
    return write_files(
        root,
        model,
        [{"scene": scene, **gate, "expected": "done", "canary": f"canary-{scene}"} for scene in SCENES],
        group_size=GROUP_SIZE,
        pool={
            "rolloutsPerWorker": 8,
            "template": {"spec": {"containers": [agent]}},
            "agentProtocol": {"preload": PRELOAD},
            "reward": {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "expected"}},
            "limits": {"seconds": 150, "frozenTokens": {"judge": JUDGE_LIMIT}},
        },
        run={
            "policies": [
                {
                    "name": "policy",
                    "model": {"path": str(model)},
                    "toolParser": "hermes",
                    "aliases": ["gpt-4o-mini"],
                },
                {
                    "name": "judge",
                    "train": False,
                    "endpoint": {
                        "url": recorder.judge_url,
                        "model": "judge-large",
                        "apiKeySecretRef": {"name": "judge", "key": "key"},
                    },
                    "aliases": ["gpt-judge"],
                },
            ],
            "tasks": {"train": {"path": "tasks.jsonl"}, "hiddenFields": ["expected", "canary"]},
        },
        documents=[
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "judge"}, "stringData": {"key": JUDGE_KEY}}
        ],
    )


def _write_configs(root: Path, files: list[Path], ports: Ports, recorder: Recorder) -> tuple[RunFolder, GatewayConfig]:
    """What `kitestring run` writes; but for the gateway, the recorder is the policy server."""
    run = local_run([str(file) for file in files], [])
    folder = create_run_folder(root / "runs", "thread", datetime.now(UTC))
    write_resolved(run, folder)
    configs = part_configs(run, folder, ports)
    gateway = _recorded(configs.gateway, recorder)
    dataclasses.replace(configs, gateway=gateway).write(folder.configs)
    return folder, gateway


def _recorded(gateway: GatewayConfig, recorder: Recorder) -> GatewayConfig:
    policies = tuple(policy.model_copy(update={"servers": (recorder.url,)}) for policy in gateway.policies)
    return gateway.model_copy(update={"policies": policies})


def _updates(folder: RunFolder, model: Path, ports: Ports) -> Any:
    """Pushes weights as the trainer does, other ones each time."""
    folders = [folder.weights / "other", folder.weights / "first"]
    make_policy(folders[0], seed=1)
    shutil.copytree(model, folders[1])
    credential = folder.credential("gateway-admin").read_text()
    pushed = 0
    one_at_a_time = asyncio.Lock()

    async def update() -> None:
        nonlocal pushed
        async with one_at_a_time, aiohttp.ClientSession() as session:
            pushed += 1
            version, weights = f"1.{pushed}", folders[(pushed - 1) % 2]
            gateways = Gateways([_url(ports.admin)], credential, session)
            servers = PolicyServers([_url(ports.policy)], "policy", gateways, session, drain_seconds=0)
            await servers.push(weights, version)

    return update


def _wait_for_gate(run: LocalRun, evidence: Path, ports: Ports) -> None:
    """Until all agents but those of the gate have ended and their attempts are closed."""

    def going() -> None:
        run.processes()
        if run.process.poll() is not None:
            raise AssertionError(f"the run ended with {run.process.returncode}:\n{run.logs()}")

    def at_gate() -> bool:
        return len(list(evidence.glob("*.json"))) >= (len(SCENES) - 1) * GROUP_SIZE

    try:
        wait_until(at_gate, "all agents but those of the gate", seconds=140, while_=going)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{[path.name for path in evidence.iterdir()]}\n{run.logs()}") from None
    wait_until(
        lambda: _metrics(ports.admin)[("kitestring_gateway_attempts_open",)] == GROUP_SIZE,
        "their attempts' end",
        while_=going,
    )


def _read(evidence: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(evidence.glob("*.json"))]


def _metrics(port: int) -> dict[tuple[str, ...], float]:
    text = ask("GET", _url(port) + "/metrics").body.decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _late(seen: list[dict[str, Any]], gateway: GatewayConfig) -> dict[str, Answer]:
    """A token of an attempt that has ended, used by someone who kept it."""
    token = seen[0]["environment"]["OPENAI_API_KEY"]
    base = f"http://{gateway.agents.host}:{gateway.agents.port}/r/{token}"
    return {
        "chat": ask("POST", base + "/v1/chat/completions", CALL),
        "models": ask("GET", base + "/v1/models"),
        "spans": ask("POST", base + "/otlp/v1/traces", b"", content_type="application/x-protobuf"),
        "reward": ask("POST", base + "/rewards", {"value": 1.0}),
    }


CALL = {"model": "policy", "messages": [{"role": "user", "content": "v"}], "max_tokens": 4, "user": "outside"}


@contextmanager
def _refusing_gateway(
    root: Path, files: list[Path], ports: Ports, folder: RunFolder, recorder: Recorder
) -> Iterator[GatewayConfig]:
    """A second gateway of the run, as the files would have it with `nonconforming: refuse`."""
    run = local_run([str(file) for file in files], ["spec.rollouts.sampling.nonconforming=refuse"])
    own = free_ports()
    ports = dataclasses.replace(ports, agents=own.agents, admin=own.admin)
    config = _recorded(part_configs(run, folder, ports).gateway, recorder)
    path = root / "refusing.json"
    path.write_text(config.model_dump_json())
    command = [sys.executable, "-m", "kitestring_cli", "gateway", "--config", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and b"listening" in process.stdout.readline()
            yield config
        finally:
            process.terminate()
            assert process.wait(30) == 0


def _visit(thread: Thread, config: GatewayConfig) -> None:
    """One attempt at the refusing gateway, opened and ended as the queue does; its token goes to the other gateway."""
    attempt = str(UUID(int=uuid7().int))
    admin = f"http://{config.admin.host}:{config.admin.port}/admin/v1/attempts"
    credential = config.admin_credential_file.read_text()
    names = {"run": config.run, "rollout": "outside", "group": "outside", "attempt": attempt}
    limits = {"calls": 9, "concurrent_calls": 9, "tokens": 999}
    rest = {"task": 0, "step": 1, "mode": "train", "limits": limits, "reward": {"accepted": True}}
    opened = ask("POST", admin, {**names, **rest, "lifetime_seconds": 60}, credential)
    answer = json.loads(opened.body)
    base, token = answer["base_url"], answer["token"]
    chat, rewards = base + "/v1/chat/completions", base + "/rewards"
    thread.refusing = {
        "greedy": ask("POST", chat, {**CALL, "temperature": 0}),
        "cut": ask("POST", chat, {**CALL, "top_p": 0.5}),
        "as the run": ask("POST", chat, {**CALL, "temperature": 1, "top_p": 1}),
        "not a number": ask("POST", rewards, b'{"value": NaN}'),
        "boolean": ask("POST", rewards, {"value": True}),
        "reward": ask("POST", rewards, {"value": 0.5}),
        "again": ask("POST", rewards, {"value": 0.7}),
        "fence": ask("POST", f"{admin}/{attempt}/fence", {}, credential),
        "end": ask("POST", f"{admin}/{attempt}/end", {"outcome": "Succeeded", "reward": 0.5}, credential),
    }
    main = json.loads((thread.folder.configs / "gateway.json").read_text())["agents"]
    thread.late["other process"] = ask(
        "POST", f"http://{main['host']}:{main['port']}/r/{token}/v1/chat/completions", CALL
    )


def ask(
    method: str,
    url: str,
    body: Any = None,
    credential: str | None = None,
    content_type: str = "application/json",
) -> Answer:
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": content_type})
    if credential is not None:
        request.add_header("Authorization", f"Bearer {credential}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
            return Answer(response.status, response.read())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read())


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
