"""What a worker costs beside its agents. The worker is a process of its own, the queue is this one.

start overhead: median time from lease to finish of `true`, less the median time of `true` started from here, in turns.
first line: median time from lease to the first line of a script that has `openai` preloaded.
memory: proportional set size of worker, launcher and 64 guardians while 64 agents wait; of the launcher with preloaded
modules likewise. CPU: of all processes, per rollout of that script.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil

from bench.pace import faster, pace
from bench.report import Figure, load_ranges, machine, report
from bench.worker.queue import BenchQueue
from kitestring_rollout.worker.config import WorkerConfig

ROUNDS = 40
AGENTS = 64
SCRIPT = "import time\nprint(time.monotonic())\n"
WORKER = (
    "import sys\n"
    "from kitestring_rollout.worker.config import WorkerConfig\n"
    "from kitestring_rollout.worker.main import run\n"
    "sys.exit(run(WorkerConfig.model_validate_json(sys.argv[1])))"
)


@contextlib.asynccontextmanager
async def worker(
    folder: Path, command: list[str], preload: list[str], capacity: int
) -> AsyncIterator[tuple[BenchQueue, psutil.Process]]:
    """A worker that is ready, and its queue."""
    queue = BenchQueue()
    await queue.start()
    (folder / "credential").write_text("bench")
    config = WorkerConfig.model_validate(
        {
            "run": "bench",
            "name": "bench",
            "queue_url": queue.url,
            "queue_credential_file": folder / "credential",
            "capacity": capacity,
            "agent": {
                "command": command,
                "env": {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
                "working_dir": folder,
            },
            "agent_protocol": {"task": {"from": "stdin"}, "preload": preload},
            "scratch_root": folder / "scratch",
            "drain_seconds": 0.0,
            "grace_seconds": 0.0,
        }
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, config.model_dump_json(by_alias=True), stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await queue.give(1)
        yield queue, psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()
        await queue.close()


async def one(queue: BenchQueue) -> tuple[float, float | None]:
    """Seconds from lease to finish, and to the first line where that says the time, of one further rollout."""
    done = len(queue.finished)
    await queue.give(1)
    await queue.until(lambda: len(queue.finished) > done)
    lease, at, finish = queue.finished[-1]
    if finish.ended != "exited" or finish.exit_code != 0:
        raise RuntimeError(f"the agent did not run: {finish}")
    begun = queue.leased_at[lease]
    return at - begun, float(finish.output) - begun if finish.output else None


async def overhead(folder: Path) -> float:
    ours, bare = [], []
    async with worker(folder, ["true"], [], 1) as (queue, _):
        await queue.until(lambda: bool(queue.finished))
        for _ in range(ROUNDS):
            ours.append((await one(queue))[0])
            begun = time.monotonic()
            process = await asyncio.create_subprocess_exec("true")
            await process.wait()
            bare.append(time.monotonic() - begun)
    return statistics.median(ours) - statistics.median(bare)


async def preloaded(folder: Path) -> tuple[float, float]:
    """Seconds to the first line; CPU seconds of a rollout."""
    (folder / "agent.py").write_text(SCRIPT)
    async with worker(folder, ["python", "agent.py"], ["openai"], 1) as (queue, process):
        await queue.until(lambda: bool(queue.finished))
        before = cpu_seconds(process)
        lines = [(await one(queue))[1] for _ in range(ROUNDS)]
        return statistics.median([line for line in lines if line is not None]), (cpu_seconds(process) - before) / ROUNDS


def cpu_seconds(process: psutil.Process) -> float:
    """Of the worker, and of the launcher with all whose end it has seen."""
    used = process.cpu_times()
    launchers = [child.cpu_times() for child in process.children()]
    return used.user + used.system + sum(sum(times[:4]) for times in launchers)


async def memory(folder: Path, command: list[str], preload: list[str]) -> float:
    """Bytes of ours while the agents wait. An agent is the child of a guardian, a guardian of the launcher."""
    async with worker(folder, command, preload, AGENTS) as (queue, process):
        await queue.give(AGENTS - 1)
        await queue.until(lambda: len(queue.leased_at) == AGENTS)
        (launcher,) = process.children()
        guardians = launcher.children()
        while sum(bool(guardian.children()) for guardian in guardians) < AGENTS:
            await asyncio.sleep(0.1)  # an agent that waits has nothing to say
            guardians = launcher.children()
        return float(sum(each.memory_full_info().pss for each in (process, launcher, *guardians)))


async def measure(folder: Path) -> dict[str, tuple[float, str]]:
    first_line, cpu = await preloaded(folder)
    wait = "import signal; signal.pause()"
    return {
        "start overhead": (1000 * await overhead(folder), "ms"),
        "preloaded agent to its first line": (1000 * first_line, "ms"),
        "CPU of a preloaded rollout": (1000 * cpu, "ms"),
        "memory beside 64 agents": (await memory(folder, ["sleep", "600"], []) / 1e6, "MB"),
        "memory beside 64 preloaded agents": (await memory(folder, ["python", "-c", wait], ["openai"]) / 1e6, "MB"),
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.worker", description=__doc__)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args(argv)
    before = pace()
    with tempfile.TemporaryDirectory() as folder:
        measured = asyncio.run(measure(Path(folder)))
    found = faster(before, pace())
    ranges = load_ranges(Path(__file__).parent, found)
    figures = [Figure(name, value, unit, ranges[name]) for name, (value, unit) in measured.items()]
    method = " ".join((__doc__ or "").split())
    return report("worker", method, figures, machine(["aiohttp", "openai"], found), options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
