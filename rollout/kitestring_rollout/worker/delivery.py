"""What an agent gets: its task, its environment, its limits, as one message to the launcher. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kitestring_api import names
from kitestring_api.v1alpha1.agent_protocol import TaskDelivery
from kitestring_rollout.launcher.launcher import AgentStart
from kitestring_rollout.protocol.queue import Lease
from kitestring_rollout.worker.config import WorkerConfig
from kitestring_rollout.worker.launcher_socket import PodPlan
from kitestring_rollout.worker.program import PythonProgram

LOG_TAIL_BYTES = 65536
"""What a finish carries at most (protocol/queue.py)."""
NPROC_SLACK = 64


class TaskUndeliverable(ValueError):
    """This task cannot be handed to this agent; the text says why."""


def task_text(task: Mapping[str, Any], delivery: TaskDelivery) -> str:
    """The task as the agent reads it: one JSON object, or one field: text as it is, anything else as JSON."""
    if delivery.format == "json":
        return json.dumps(task, ensure_ascii=False, separators=(",", ":"))
    if delivery.field is None or delivery.field not in task:
        found = ", ".join(sorted(task)) or "none"
        raise TaskUndeliverable(
            f"the task has no field {delivery.field!r} (agentProtocol.task.field); found: {found}; "
            "correct the field's name or the task"
        )
    value = task[delivery.field]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


DEFAULTS = {"LANG": "C.UTF-8", names.ENV_OTEL_SERVICE: "agent"}
"""What agents have where nothing says otherwise."""
POD_DEFAULTS = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **DEFAULTS}
"""The same for agents in the launcher's container, whose own environment lies over it."""


def base_environment(config: WorkerConfig, path: str, secrets: Mapping[str, str]) -> dict[str, str]:
    """What every agent of the worker and its launcher have, before anything of an attempt: no credential of ours.

    `path` is the search path of this machine, `secrets` what the files of `env_files` hold. In another container only
    what the configuration says: the rest is found there.
    """
    said = {**config.agent.env, **secrets}
    return said if config.launcher_socket is not None else {"PATH": path, **DEFAULTS, **said}


def pod_plan(config: WorkerConfig, base: Mapping[str, str], program: PythonProgram | None, scratch: Path) -> PodPlan:
    """What a launcher in another container is to make ready."""
    return PodPlan(
        preload=tuple(config.agent_protocol.preload),
        program=(program.kind, program.target) if program else None,
        interpreter=(program.interpreter, *program.options) if program else (),
        env=base,
        defaults=POD_DEFAULTS,
        cwd=str(config.agent.working_dir or ""),
        scratch=str(scratch),
    )


def attempt_environment(config: WorkerConfig, lease: Lease, scratch: Path) -> dict[str, str]:
    """The variables that Kitestring itself says; nothing else may stand under these names."""
    url = f"{lease.base_url}/v1"
    resource = {"kitestring.run": config.run, "kitestring.rollout": lease.rollout, "kitestring.attempt": lease.attempt}
    environment = {
        names.ENV_OPENAI_BASE_URL: url,
        names.ENV_OPENAI_API_BASE: url,
        names.ENV_OPENAI_API_KEY: lease.token,
        names.ENV_OPENAI_MODEL: lease.model,
        names.ENV_BASE_URL: lease.base_url,
        names.ENV_MODEL: lease.model,
        names.ENV_RUN: config.run,
        names.ENV_ROLLOUT: lease.rollout,
        names.ENV_ATTEMPT: lease.attempt,
        names.ENV_STEP: str(lease.step),
        names.ENV_MODE: lease.mode,
        names.ENV_TRACEPARENT: lease.traceparent,
        names.ENV_OTEL_ENDPOINT: f"{lease.base_url}/otlp",
        names.ENV_OTEL_PROTOCOL: "http/protobuf",
        names.ENV_OTEL_RESOURCE: ",".join(f"{key}={value}" for key, value in resource.items()),
    }
    task = config.agent_protocol.task
    if task.from_ == "environment":
        environment[names.ENV_TASK] = task_text(lease.task, task)
    elif task.from_ == "file":
        environment[names.ENV_TASK_FILE] = str(_task_file(scratch, task))
    if config.agent_protocol.output.from_ == "file":
        environment[names.ENV_OUTPUT_FILE] = str(scratch / "output")
    return environment


def _task_file(scratch: Path, task: TaskDelivery) -> Path:
    return scratch / ("task.json" if task.format == "json" else "task.txt")


def agent_start(
    config: WorkerConfig, lease: Lease, base: Mapping[str, str], scratch: Path, program: PythonProgram | None
) -> AgentStart:
    """One agent for the launcher; TaskUndeliverable when its task is not what the pool says."""
    task, output = config.agent_protocol.task, config.agent_protocol.output
    argv = list(program.argv if program else (*config.agent.command, *config.agent.args))
    text = task_text(lease.task, task)
    if task.from_ == "argument":
        argv.append(text)
    temporary = scratch / "tmp"
    folders = {"HOME": str(scratch), "TMPDIR": str(temporary)}
    in_pod = config.launcher_socket is not None
    return AgentStart(
        argv=argv,
        env={**folders, **base, **attempt_environment(config, lease, scratch)},
        cwd=str(config.agent.working_dir or ("" if in_pod else scratch)),
        scratch=str(scratch),
        folders=[str(temporary)],
        files={str(_task_file(scratch, task)): text} if task.from_ == "file" else {},
        stdin=text if task.from_ == "stdin" else None,
        output_file=str(scratch / "output") if output.from_ == "file" else None,
        output_bytes=output.max_bytes if output.from_ in ("stdout", "file") else 0,
        log_bytes=min(config.limits.log_bytes, LOG_TAIL_BYTES),
        seconds=lease.deadline_seconds,
        grace_seconds=config.grace_seconds,
        processes=config.limits.processes,
        process_headroom=None if in_pod else (config.limits.processes or 0) * config.capacity + NPROC_SLACK,
        rlimits=_rlimits(config),
        defaults=POD_DEFAULTS if in_pod else None,
    )


def _rlimits(config: WorkerConfig) -> dict[str, int]:
    limits = {"CORE": 0, "FSIZE": config.limits.file_bytes}
    if config.limits.cpu_seconds is not None:
        limits["CPU"] = config.limits.cpu_seconds
    if config.limits.memory_bytes is not None:
        limits["DATA"] = config.limits.memory_bytes
    return limits
