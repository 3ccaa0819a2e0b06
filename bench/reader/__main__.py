"""10,000 attempts of 10 calls, interleaved, at least 100 spans an object: listed and proven complete on one core."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from uuid_utils import uuid7

from bench.pace import faster, pace
from bench.report import Figure, load_ranges, machine, report
from kitestring_rollout.storage import DirectoryStore
from kitestring_rollout.traces.attempts import ProvenAttempt
from kitestring_rollout.traces.codec import digest
from kitestring_rollout.traces.encoder import CallEncoder, encode_end
from kitestring_rollout.traces.object_keys import new_key
from kitestring_rollout.traces.reader import TraceReader
from kitestring_rollout.traces.records import AttemptIdentity, CallRecord, ChoiceRecord, EndRecord, Json, VersionSpan
from kitestring_rollout.traces.requests import export_request

ATTEMPTS = 10_000
CALLS = 10
CONCURRENT = 100
"""Attempts in progress at once: their spans are mixed in the objects."""
SPANS = 110
"""Spans of an object."""
NEW_TOKENS = 20
"""Prompt tokens new in a call, and tokens of a reply."""


def _calls(random: np.random.Generator) -> list[CallRecord]:
    """The calls of one attempt: a growing conversation."""
    identity = AttemptIdentity("bench", "", "", "", 0, 1, "train", "0123456789abcdef")
    context = np.zeros(0, np.int32)
    messages: tuple[Json, ...] = ()
    calls = []
    for seq in range(1, CALLS + 1):
        context = np.concatenate([context, random.integers(0, 150_000, NEW_TOKENS, np.int32)])
        messages = (*messages, {"role": "user", "content": f"What is {seq} times {seq + 7}?"})
        reply = random.integers(0, 150_000, NEW_TOKENS, np.int32)
        said = {"role": "assistant", "content": f"Answer: {seq * (seq + 7)}"}
        logprobs = -random.random(NEW_TOKENS, np.float32)
        choice = ChoiceRecord(0, reply, logprobs, (VersionSpan("1.3", 0, NEW_TOKENS),), "stop", said)
        calls.append(
            CallRecord(
                identity=identity,
                seq=seq,
                api="chat",
                model="policy",
                requested_model="policy",
                trained=True,
                outcome="ok",
                status=200,
                started_unix_nano=time.time_ns(),
                ended_unix_nano=time.time_ns(),
                sampling={"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 40},
                prompt_token_ids=context,
                choices=(choice,),
                prompt_tokens=len(context),
                completion_tokens=NEW_TOKENS,
                response_id=f"chatcmpl-{uuid7().hex}",
                messages=messages,
            )
        )
        context = np.concatenate([context, reply])
        messages = (*messages, said)
    return calls


def _attempt(number: int, calls: Sequence[CallRecord]) -> Iterator[bytes]:
    group = f"t000001-{number // 8:08d}"
    identity = AttemptIdentity(
        "bench", f"{group}-{number % 8:03d}", str(uuid7()), group, number // 8, 1, "train", "0123456789abcdef"
    )
    encoder, hashes = CallEncoder(identity), []
    for call in calls:
        span = encoder.encode(replace(call, identity=identity))
        hashes.append(span.payload_sha256)
        yield span.data
    now = time.time_ns()
    yield encode_end(EndRecord(identity, len(calls), digest(hashes), "Succeeded", now, now, reward=1.0)).data


def _spans(random: np.random.Generator) -> Iterator[bytes]:
    """Spans in the order in which a gateway with CONCURRENT attempts in progress would export them."""
    calls = _calls(random)
    running = [_attempt(number, calls) for number in range(CONCURRENT)]
    begun = CONCURRENT
    while running:
        at = int(random.integers(len(running)))
        span = next(running[at], None)
        if span is not None:
            yield span
        elif begun < ATTEMPTS:
            running[at] = _attempt(begun, calls)
            begun += 1
        else:
            del running[at]


def _write(store: DirectoryStore) -> tuple[int, int]:
    objects = size = 0
    waiting: list[bytes] = []
    for span in _spans(np.random.default_rng(0)):
        waiting.append(span)
        if len(waiting) == SPANS:
            body = export_request(waiting, {"kitestring.run": "bench"})
            store.put(new_key("traces/"), body)
            objects, size = objects + 1, size + len(body)
            waiting.clear()
    if waiting:
        store.put(new_key("traces/"), export_request(waiting, {"kitestring.run": "bench"}))
        objects += 1
    return objects, size


def _read(store: DirectoryStore) -> tuple[float, float]:
    """CPU seconds, and MiB by which the process grew at most, with each attempt let go at once."""
    process = psutil.Process()
    before = process.memory_info().rss
    grown, complete = 0, 0
    reader = TraceReader(store)
    start = time.process_time()
    for decided in reader.poll():
        complete += isinstance(decided, ProvenAttempt)
        if complete % 1000 == 0:
            grown = max(grown, process.memory_info().rss - before)
    seconds = time.process_time() - start
    if complete != ATTEMPTS:
        raise RuntimeError(f"{complete} of {ATTEMPTS} attempts were proven complete")
    return seconds, grown / 2**20


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.reader", description=__doc__)
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args(argv)
    before = pace()
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(Path(folder) / "store")
        objects, size = _write(store)
        first, grown = _read(store)
        seconds = min(first, _read(store)[0])
    found = faster(before, pace())
    described = machine(["protobuf", "opentelemetry-proto"], found)
    ranges = load_ranges(Path(__file__).parent, found)
    values = (
        ("calls listed and proven complete per core-second", ATTEMPTS * CALLS / seconds, "1/s"),
        ("memory grown while reading, attempts let go", grown, "MiB"),
    )
    return report(
        "reader",
        f"{ATTEMPTS:,} attempts of {CALLS} calls and their end records in {objects} objects ({size / 2**20:.0f} MiB) "
        "of a folder, payload hashes checked; CPU time of the process with its threads; the better of two runs",
        [Figure(name, value, unit, ranges[name]) for name, value, unit in values],
        described,
        options.output,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
