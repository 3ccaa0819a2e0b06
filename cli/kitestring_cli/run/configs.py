"""The config file of each part of a local run. Ports are chosen beforehand, so that all parts can start at once."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from kitestring_api.errors import UserMistakeError
from kitestring_cli.run.folder import RunFolder
from kitestring_cli.run.quantities import bytes_of
from kitestring_cli.run.resolution import LocalRun, LocalTasks
from kitestring_cli.scorer_process import ScorerConfig
from kitestring_rollout.collector.config import CollectorConfig
from kitestring_rollout.collector.config import Listener as CollectorListener
from kitestring_rollout.gateway.config import (
    Collector,
    FrozenModel,
    GatewayConfig,
    Listener,
    Sampling,
    TrainedPolicy,
)
from kitestring_rollout.storage import DirectoryStoreConfig, S3StoreConfig, StoreConfig
from kitestring_rollout.worker.config import AgentCommand, AgentLimits, WorkerConfig
from kitestring_trainer.config import Listener as TrainerListener
from kitestring_trainer.config import Timing, TrainerConfig
from kitestring_trainer.policy_server.config import PolicyServerConfig

HOST = "127.0.0.1"
_OF_THE_USER = frozenset({"spec", "pool", "command", "args", "env"})
"""Fields of configs that hold what the user wrote: no port in them is one of a part of the run."""

LOCAL_TIMING = Timing(lease=15.0, proof=30.0, poll=0.02, gateway_gone=15.0, stop=50.0)
"""On one machine a silent process is dead, not far away; and nobody kills a trainer that still saves what it has."""


@dataclass(frozen=True)
class Ports:
    collector: int
    agents: int
    admin: int
    policy: int
    queue: int
    scorer: int


@dataclass(frozen=True)
class PartConfigs:
    """Config of each part; `policy_server` is None where an endpoint serves the policy, `scorer` where the pool has no
    scorer of its own."""

    collector: CollectorConfig
    gateway: GatewayConfig
    policy_server: PolicyServerConfig | None
    trainer: TrainerConfig
    workers: tuple[WorkerConfig, ...]
    scorer: ScorerConfig | None = None

    def write(self, folder: Path) -> None:
        """`collector.json`, `gateway.json`, … in `folder`."""
        parts: dict[str, BaseModel | None] = {
            "collector": self.collector,
            "gateway": self.gateway,
            "policy-server": self.policy_server,
            "scorer": self.scorer,
            "trainer": self.trainer,
            **{worker.name: worker for worker in self.workers},
        }
        for name, config in parts.items():
            if config is not None:
                (folder / f"{name}.json").write_text(config.model_dump_json(indent=1, by_alias=True) + "\n")


def free_ports() -> Ports:
    """Free ports of the loopback interface."""
    with ExitStack() as stack:
        return Ports(*_hold_ports(stack, len(fields(Ports))))


def _hold_ports(stack: ExitStack, count: int) -> list[int]:
    """Free ports, all held until the stack ends, so that no two are equal."""
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for listener in sockets:
        listener.bind((HOST, 0))
    return [int(listener.getsockname()[1]) for listener in sockets]


def move_to_free_ports(folder: RunFolder) -> None:
    """Where another program has taken a port of an earlier run meanwhile, give its configs one that is free."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.configs.glob("*.json"))}
    ports = {port for config in files.values() for port in _ports_in(config)}
    taken = sorted(port for port in ports if _is_taken(port))
    with ExitStack() as stack:
        moved = dict(zip(taken, _hold_ports(stack, len(taken)), strict=True))
    for path, config in files.items():
        path.write_text(json.dumps(_moved(config, moved), indent=1) + "\n")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def _ports_in(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        if isinstance(value.get("port"), int):
            yield value["port"]
        for key, item in value.items():
            if key not in _OF_THE_USER:
                yield from _ports_in(item)


def _moved(value: Any, moved: Mapping[int, int]) -> Any:
    """The same config with each port of `moved`, and each loopback URL with such a port, replaced."""
    if isinstance(value, dict):
        return {
            key: item if key in _OF_THE_USER else moved.get(item, item) if key == "port" else _moved(item, moved)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_moved(item, moved) for item in value]
    prefix = f"http://{HOST}:"
    if isinstance(value, str) and value.startswith(prefix) and value.removeprefix(prefix).isdigit():
        port = int(value.removeprefix(prefix))
        return f"{prefix}{moved.get(port, port)}"
    return value


def write_resolved(run: LocalRun, folder: RunFolder) -> None:
    """The resources as they are carried out: overrides applied, defaults filled in."""
    for resource in (run.training_run, run.pool):
        text = yaml.safe_dump(resource.manifest(), sort_keys=False, allow_unicode=True)
        (folder.resolved / f"{resource.kind.lower()}.yaml").write_text(text)
    (folder.root / "run.json").write_text(json.dumps({"run": folder.name, "notApplied": run.not_applied}) + "\n")


def part_configs(run: LocalRun, folder: RunFolder, ports: Ports) -> PartConfigs:
    """All configs of the run; secrets and rows that came from documents are written into the run folder."""
    return PartConfigs(
        collector=_collector(run, folder, ports),
        gateway=_gateway(run, folder, ports),
        policy_server=_policy_server(run, folder, ports),
        trainer=_trainer(run, folder, ports),
        workers=tuple(_worker(run, folder, ports, index) for index in range(run.pool.spec.replicas)),
        scorer=_scorer(run, folder, ports),
    )


def _store(run: LocalRun, folder: RunFolder) -> StoreConfig:
    storage = run.training_run.spec.storage
    if storage is None or run.storage_credentials is None:
        return DirectoryStoreConfig(kind="directory", path=folder.store)
    endpoint = storage.endpoint or f"https://s3.{storage.region or 'us-east-1'}.amazonaws.com"
    scheme, _, host = endpoint.partition("://")
    key, secret = run.storage_credentials
    return S3StoreConfig(
        kind="s3",
        endpoint=host.rstrip("/"),
        bucket=storage.bucket,
        prefix="/".join(part for part in ((storage.prefix or "").strip("/"), folder.name) if part),
        region=storage.region or "us-east-1",
        secure=scheme == "https",
        access_key_file=folder.secret("storage-access-key", key),
        secret_key_file=folder.secret("storage-secret-key", secret),
    )


def _collector(run: LocalRun, folder: RunFolder, ports: Ports) -> CollectorConfig:
    return CollectorConfig(
        listen=CollectorListener(host=HOST, port=ports.collector),
        store=_store(run, folder),
        credential_file=folder.credential("collector"),
        agent_credential_file=folder.credential("collector-agent"),
    )


def _gateway(run: LocalRun, folder: RunFolder, ports: Ports) -> GatewayConfig:
    spec = run.training_run.spec
    policies: tuple[TrainedPolicy, ...] = ()
    if run.model is not None:
        served = TrainedPolicy(
            name=run.policy.name, servers=(f"http://{HOST}:{ports.policy}",), aliases=tuple(run.policy.aliases)
        )
        policies = (served,)
    return GatewayConfig(
        run=folder.name,
        agents=Listener(host=HOST, port=ports.agents),
        admin=Listener(host=HOST, port=ports.admin),
        token_key_file=folder.credential("token-key"),
        admin_credential_file=folder.credential("gateway-admin"),
        policies=policies,
        frozen=tuple(
            FrozenModel(
                name=service.name,
                url=service.url,
                model=service.model,
                aliases=service.aliases,
                api_key_file=folder.secret(f"model-{service.name}", service.api_key) if service.api_key else None,
            )
            for service in run.frozen
        ),
        sampling=Sampling(
            temperature=spec.rollouts.sampling.temperature,
            max_tokens=spec.rollouts.sampling.max_tokens,
            nonconforming=spec.rollouts.sampling.nonconforming,
        ),
        collector=Collector(
            url=f"http://{HOST}:{ports.collector}",
            credential_file=folder.credential("collector"),
            agent_credential_file=folder.credential("collector-agent"),
        ),
        record_contents=spec.traces.record_contents,
        hold_seconds=max(1, spec.gateway.hold_seconds),
        # Whoever ends a local run ends the agents too: nobody is left to wait for.
        drain_seconds=1.0,
    )


def _policy_server(run: LocalRun, folder: RunFolder, ports: Ports) -> PolicyServerConfig | None:
    if run.model is None:
        return None
    spec, policy = run.training_run.spec, run.policy
    parser = policy.tool_parser or "none"
    if parser not in ("hermes", "none"):
        raise UserMistakeError(
            f"spec.policies[{spec.policies.index(policy)}].toolParser: found {parser!r}; the CPU policy server knows "
            "hermes and none; --set spec.policies[0].toolParser=hermes"
        )
    return PolicyServerConfig(
        model=run.model,
        served_model_name=policy.name,
        host=HOST,
        port=ports.policy,
        max_model_len=policy.max_model_len,
        tool_parser="hermes" if parser == "hermes" else None,
        threads=spec.inference.threads or 1,
        seed=spec.seed,
        weights_root=folder.weights,
        require_chat_template=True,
    )


def _trainer(run: LocalRun, folder: RunFolder, ports: Ports) -> TrainerConfig:
    spec = run.training_run.spec
    return TrainerConfig(
        run=folder.name,
        spec=spec,
        pool=run.pool.spec,
        store=_store(run, folder),
        folder=folder.root,
        model=run.model,
        train_tasks=_task_file(run.train, folder, "train"),
        validation_tasks=_task_file(run.validation, folder, "validation") if run.validation else None,
        working_folder=run.working_folder,
        scorer=f"http://{HOST}:{ports.scorer}" if run.scorer is not None else None,
        queue=TrainerListener(host=HOST, port=ports.queue),
        queue_credential_file=folder.credential("queue"),
        gateways=(f"http://{HOST}:{ports.admin}",),
        gateway_credential_file=folder.credential("gateway-admin"),
        policy_servers=(f"http://{HOST}:{ports.policy}",) if run.model is not None else (),
        timing=LOCAL_TIMING,
    )


def _scorer(run: LocalRun, folder: RunFolder, ports: Ports) -> ScorerConfig | None:
    if run.scorer is None:
        return None
    return ScorerConfig(
        command=run.scorer.command,
        env=dict(run.scorer.environment),
        env_files={name: folder.secret(f"scorer-{name}", value) for name, value in run.scorer.secrets.items()},
        working_dir=run.scorer.working_folder,
        port=ports.scorer,
    )


def _task_file(tasks: LocalTasks, folder: RunFolder, name: str) -> Path | None:
    """Rows from a ConfigMap become a file; inline rows stay where the spec has them."""
    if tasks.rows is None:
        return tasks.path
    path = folder.resolved / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in tasks.rows))
    return path


def _worker(run: LocalRun, folder: RunFolder, ports: Ports, index: int) -> WorkerConfig:
    pool, agent = run.pool.spec, run.pool.spec.template.agent
    return WorkerConfig(
        run=folder.name,
        name=f"worker-{index}",
        queue_url=f"http://{HOST}:{ports.queue}",
        queue_credential_file=folder.credential("queue"),
        capacity=pool.rollouts_per_worker,
        agent=AgentCommand(
            command=tuple(agent.command),
            args=tuple(agent.args),
            env=dict(run.agent_environment),
            env_files={name: folder.secret(f"agent-{name}", value) for name, value in run.agent_secrets.items()},
            working_dir=run.working_folder,
        ),
        agent_protocol=pool.agent_protocol,
        limits=AgentLimits(
            log_bytes=pool.limits.log_bytes,
            cpu_seconds=pool.limits.cpu_seconds,
            memory_bytes=bytes_of(pool.limits.memory) if pool.limits.memory else None,
            processes=pool.limits.processes,
        ),
        scratch_root=folder.scratch,
        # What ends the worker of a local run ends the whole run: no rollout of it can count any more.
        drain_seconds=0.0,
    )
