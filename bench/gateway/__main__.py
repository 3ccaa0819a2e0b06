"""The gateway on one core against a bare aiohttp hop on the same core, both before the same instant model server.

Everything but the hop and the gateway runs on the other core. Rounds of hop and gateway alternate; a share is the
median of the rounds' shares. Every call of the gateway is captured, exported to a collector that writes to a directory,
and acknowledged; the fence after each round proves it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uuid_utils
import uvloop

from bench.gateway.load import Result, load, request
from bench.report import Figure, load_ranges, machine, report

CONNECTIONS = 32
ROUNDS = 3
PACED_RATE = 400.0
LARGE_BYTES = 300_000
SMALL_BODY = {"model": "small", "messages": [{"role": "user", "content": "What is 12 times 34, please? Think first."}]}
LARGE_BODY = {
    "model": "large",
    "messages": [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": "word " * (LARGE_BYTES // 20 // 5)}
        for turn in range(20)
    ],
}
Json = dict[str, Any]


class Bench:
    """The processes, and rounds on them."""

    def __init__(self, urls: dict[str, str], credential: str, pids: dict[str, int], seconds: float) -> None:
        self.urls = urls
        self.pids = pids
        self.seconds = seconds
        self._headers = {"Authorization": f"Bearer {credential}"}

    async def _admin(self, session: aiohttp.ClientSession, path: str, body: Json | None = None) -> Json:
        async with session.post(self.urls["admin"] + path, json=body, headers=self._headers) as reply:
            answer: Json = await reply.json()
            if reply.status != 200:
                raise RuntimeError(f"{path}: {answer}")
            return answer

    async def _load(self, process: str, requests: list[bytes], url: str, rate: float | None) -> Result:
        before = _cpu_seconds(self.pids[process])
        result = await load(requests, url, self.seconds, rate)
        result.cpu_seconds = _cpu_seconds(self.pids[process]) - before
        return result

    async def hop(self, kind: str, body: Json, connections: int, rate: float | None = None) -> Result:
        url = f"{self.urls['hop']}/{kind}/v1/chat/completions"
        return await self._load("hop", [request(url, json.dumps(body).encode())] * connections, url, rate)

    async def gateway(self, body: Json, connections: int, rate: float | None = None) -> tuple[Result, float]:
        """The round, and the seconds until every span of it was acknowledged."""
        async with aiohttp.ClientSession() as session:
            opened = [await self._admin(session, "/admin/v1/attempts", _opening()) for _ in range(connections)]
            payload = json.dumps(body).encode()
            requests = [request(f"{attempt['base_url']}/v1/chat/completions", payload) for attempt in opened]
            result = await self._load("gateway", requests, self.urls["agents"], rate)
            start = time.perf_counter()
            fenced = [
                await self._admin(session, f"/admin/v1/attempts/{attempt['attempt']}/fence") for attempt in opened
            ]
            settled = time.perf_counter() - start
            lost = [attempt["lost"] for attempt in fenced if attempt["lost"] is not None]
            ok = sum(attempt["calls"]["ok"] for attempt in fenced)
            if lost or ok != result.calls:
                raise RuntimeError(f"{result.calls} calls, {ok} recorded ok, lost: {lost}")
            end = {"outcome": "Succeeded", "reward": 1.0, "reward_source": "builtin"}
            for attempt in opened:
                await self._admin(session, f"/admin/v1/attempts/{attempt['attempt']}/end", end)
            return result, settled

    async def compare(self, kind: str, body: Json, connections: int) -> Json:
        shares, cpu_shares, rates, hops, settled = [], [], [], [], []
        for _ in range(ROUNDS):
            hop = await self.hop(kind, body, connections)
            gateway, after = await self.gateway(body, connections)
            shares.append(gateway.rate / hop.rate)
            cpu_shares.append(hop.cpu_per_call / gateway.cpu_per_call)
            rates.append(gateway.rate)
            hops.append(hop.rate)
            settled.append(after)
        median = statistics.median
        return {
            "share": median(shares),
            "cpu share": median(cpu_shares),
            "rate": median(rates),
            "hop": median(hops),
            "settled": max(settled),
        }

    async def first_chunk(self) -> float:
        """Median seconds that the gateway's first chunk comes later than the upstream's own."""
        body = _stream_body("first")
        direct_url = f"{self.urls['upstream']}/first/v1/chat/completions"
        direct = await load([request(direct_url, json.dumps(body).encode())], direct_url, self.seconds)
        through, _ = await self.gateway(body, 1)
        return statistics.median(through.first) - statistics.median(direct.first)


def _stream_body(kind: str) -> Json:
    return {"model": kind, "messages": SMALL_BODY["messages"], "stream": True}


def _opening() -> Json:
    return {
        "run": "bench",
        "rollout": "t000001-00000000-000",
        "attempt": str(uuid_utils.uuid7()),
        "group": "t000001-00000000",
        "task": 0,
        "step": 1,
        "mode": "train",
        "limits": {"calls": 10**7, "concurrent_calls": 64, "tokens": 10**12},
        "reward": {"accepted": False},
        "lifetime_seconds": 3600,
    }


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(bench: Bench) -> list[Figure]:
    small = await bench.compare("small", SMALL_BODY, CONNECTIONS)
    paced_hop = await bench.hop("small", SMALL_BODY, 8, PACED_RATE)
    paced, _ = await bench.gateway(SMALL_BODY, 8, PACED_RATE)
    large = await bench.compare("large", LARGE_BODY, 8)
    stream, _ = await bench.gateway(_stream_body("stream"), 16)
    later = await bench.first_chunk()
    values = [
        ("small, share of a bare hop", small["share"], "ratio"),
        ("small, share by CPU time", small["cpu share"], "ratio"),
        ("small, calls", small["rate"], "calls/s"),
        ("small, bare hop", small["hop"], "calls/s"),
        ("small, added latency p50", 1e3 * (paced.percentile(0.5) - paced_hop.percentile(0.5)), "ms"),
        ("small, added latency p99", 1e3 * (paced.percentile(0.99) - paced_hop.percentile(0.99)), "ms"),
        ("small, acknowledged after load", small["settled"], "s"),
        ("large, share of a bare hop", large["share"], "ratio"),
        ("large, share by CPU time", large["cpu share"], "ratio"),
        ("large, calls", large["rate"], "calls/s"),
        ("large, bare hop", large["hop"], "calls/s"),
        ("streaming, chunks", stream.events / stream.seconds, "chunks/s"),
        ("streaming, first chunk later p50", 1e3 * later, "ms"),
    ]
    ranges = load_ranges(Path(__file__).parent)
    unknown = ranges.keys() - {name for name, _, _ in values}
    if unknown:
        raise RuntimeError(f"ranges.yaml: no such figure: {', '.join(sorted(unknown))}")
    return [Figure(name, value, unit, ranges.get(name, (None, None))) for name, value, unit in values]


@contextlib.contextmanager
def _processes(folder: Path, core: int, others: int) -> Iterator[tuple[dict[str, str], str, dict[str, int]]]:
    """Starts upstream, collector, hop and gateway; yields URLs, the admin credential, and pids."""
    credential = secrets.token_hex(16)
    for name, content in (("admin", credential), ("collector", secrets.token_hex(16)), ("key", secrets.token_hex(32))):
        (folder / name).write_text(content)
    started: list[subprocess.Popen[str]] = []
    urls: dict[str, str] = {}
    pids: dict[str, int] = {}

    def start(name: str, on: int, *command: str) -> None:
        log = (folder / f"{name}.log").open("w")
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        os.sched_setaffinity(process.pid, {on})
        started.append(process)
        pids[name] = process.pid
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name} did not start:\n{(folder / f'{name}.log').read_text()}")
        urls.update(json.loads(line)["listening"])

    try:
        start("upstream", others, "bench.gateway.upstream")
        collector = folder / "collector.json"
        collector.write_text(
            json.dumps(
                {
                    "store": {"kind": "directory", "path": str(folder / "store")},
                    "credential_file": str(folder / "collector"),
                }
            )
        )
        start("collector", others, "kitestring_cli", "collector", "--config", str(collector))
        start("hop", core, "bench.gateway.hop", urls["upstream"])
        gateway = folder / "gateway.json"
        gateway.write_text(
            json.dumps(
                {
                    "run": "bench",
                    "token_key_file": str(folder / "key"),
                    "admin_credential_file": str(folder / "admin"),
                    "policies": [
                        {"name": kind, "servers": [f"{urls['upstream']}/{kind}"]}
                        for kind in ("small", "large", "stream", "first")
                    ],
                    "collector": {"url": urls["otlp"], "credential_file": str(folder / "collector")},
                }
            )
        )
        start("gateway", core, "kitestring_cli", "gateway", "--config", str(gateway))
        yield urls, credential, pids
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(timeout=30)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    options = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    described = machine(["aiohttp", "orjson", "uvloop"])
    with (
        tempfile.TemporaryDirectory() as folder,
        _processes(Path(folder), cores[0], cores[-1]) as (urls, credential, pids),
    ):
        os.sched_setaffinity(0, {cores[-1]})
        try:
            figures = uvloop.run(measure(Bench(urls, credential, pids, options.seconds)))
        finally:
            os.sched_setaffinity(0, set(cores))
    method = (
        f"gateway and bare aiohttp hop in turn on core {cores[0]}, the rest on core {cores[-1]}; {ROUNDS} rounds of "
        f"{options.seconds:g} s, medians; small: {CONNECTIONS} connections; large: 8 of {LARGE_BYTES // 1000} KB, with "
        f"75,000 prompt ids in the reply; latency at {PACED_RATE:g} calls/s; streams of 200 chunks, 16 at once; every "
        "call acknowledged by a collector"
    )
    return report("gateway", method, figures, described, options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
