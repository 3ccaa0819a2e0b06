"""Made-up rollouts: strategies and builders shared by the tests of traces."""

from __future__ import annotations

import dataclasses
import string
from typing import Any
from uuid import UUID

import numpy as np
from hypothesis import strategies as st

from kitestring_rollout.protocol.gateway_admin import CallCounts
from kitestring_rollout.traces.codec import digest
from kitestring_rollout.traces.encoder import CallEncoder, EncodedSpan, encode_end
from kitestring_rollout.traces.records import (
    AttemptIdentity,
    CallRecord,
    ChoiceRecord,
    EndRecord,
    VersionSpan,
)

EPOCH = "0123456789abcdef"
START = 1_760_000_000_000_000_000


def identity(number: int = 1, epoch: str = EPOCH) -> AttemptIdentity:
    """Of attempt `number`, begun that many milliseconds after a fixed time."""
    uid = UUID(int=((1_760_000_000_000 + number) << 80) | (7 << 76) | (2 << 62) | number)
    return AttemptIdentity(
        "run", f"t000001-{number:08d}-000", str(uid), f"t000001-{number:08d}", number, 1, "train", epoch
    )


def int32(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int32)


def call(seq: int = 1, **changes: Any) -> CallRecord:
    """An ordinary small call."""
    values: dict[str, Any] = {
        "identity": identity(),
        "seq": seq,
        "api": "chat",
        "model": "policy",
        "requested_model": "policy",
        "trained": True,
        "outcome": "ok",
        "status": 200,
        "started_unix_nano": START + seq,
        "ended_unix_nano": START + seq + 1000,
        "sampling": {"temperature": 1.0, "max_tokens": 40},
        "prompt_token_ids": int32(1, 2, 3, seq),
        "choices": (
            ChoiceRecord(
                0,
                int32(7, 8),
                np.array([-0.5, -0.25], dtype=np.float32),
                (VersionSpan("1.0", 0, 2),),
                "stop",
                {"role": "assistant", "content": "Answer: 4"},
            ),
        ),
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "response_id": f"chatcmpl-{seq}",
        "messages": ({"role": "system", "content": "Be brief."}, {"role": "user", "content": f"2+{seq}"}),
    }
    return CallRecord(**{**values, **changes})


def end(calls: int, hashes: list[bytes], of: AttemptIdentity | None = None, **changes: Any) -> EndRecord:
    values: dict[str, Any] = {
        "identity": of or identity(),
        "n_calls": calls,
        "digest": digest(hashes),
        "outcome": "Succeeded",
        "started_unix_nano": START,
        "ended_unix_nano": START + 5000,
        "reward": 1.0,
        "reward_source": "exactMatch",
        "exit_code": 0,
        "seconds": 0.5,
        "output": "Answer: 4",
        "calls": CallCounts(admitted=calls, ok=calls),
    }
    return EndRecord(**{**values, **changes})


def encoded(calls: list[CallRecord], of: AttemptIdentity, **options: Any) -> list[EncodedSpan]:
    """The spans of an attempt, encoded in the order given; the end record is the last."""
    encoder = CallEncoder(of, **options)
    spans = {record.seq: encoder.encode(record) for record in calls}
    hashes = [spans[seq].payload_sha256 for seq in sorted(spans)]
    return [*(spans[record.seq] for record in calls), encode_end(end(len(calls), hashes, of), **options)]


def plain(record: Any) -> Any:
    """A record as values that compare."""
    if isinstance(record, np.ndarray):
        return (str(record.dtype), record.tobytes())
    if dataclasses.is_dataclass(record):
        return {field.name: plain(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, (tuple, list)):
        return [plain(item) for item in record]
    if isinstance(record, dict):
        return {key: plain(value) for key, value in record.items()}
    return record


texts = st.text(st.characters(codec="utf-8"), max_size=20)
names = st.text(string.ascii_lowercase, min_size=1, max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
tool_calls = st.lists(
    st.fixed_dictionaries(
        {
            "id": texts,
            "type": st.just("function"),
            "function": st.fixed_dictionaries({"name": names, "arguments": texts}),
        }
    )
    | json_values,
    max_size=3,
)
parts = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts})
    | st.fixed_dictionaries({"type": st.just("image_url"), "image_url": json_values})
    | json_values,
    max_size=3,
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool"]) | json_values,
        "content": texts | parts | json_values,
        "tool_calls": tool_calls | json_values,
        "tool_call_id": texts | json_values,
        "name": texts,
        "refusal": json_values,
        "parts": json_values,
        "finish_reason": json_values,
        "kitestring.raw": json_values,
        "kitestring.content": json_values,
        "kitestring.text": json_values,
    },
)
ids = st.lists(st.integers(0, 200_000), max_size=8).map(lambda values: np.array(values, dtype=np.int32))


@st.composite
def choices(draw: st.DrawFn, index: int) -> ChoiceRecord:
    token_ids = draw(ids)
    count = len(token_ids)
    logprobs = np.array(draw(st.lists(st.floats(-30, 0, width=32), min_size=count, max_size=count)), dtype=np.float32)
    cut = draw(st.integers(0, count))
    versions = draw(
        st.sampled_from(
            [(), (VersionSpan("1.0", 0, count),), (VersionSpan("1.0", 0, cut), VersionSpan("1.1", cut, count))]
        )
    )
    message = draw(st.none() | messages)
    reply_calls = message.get("tool_calls") if message is not None else None
    return ChoiceRecord(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs if draw(st.booleans()) else logprobs[:0],
        versions=versions,
        finish_reason=draw(st.sampled_from([None, "stop", "length", "tool_calls"])),
        message=message,
        text=draw(st.none() | texts) if message is None else None,
        tool_calls=len(reply_calls) if isinstance(reply_calls, list) else draw(st.integers(0, 2)),
    )


@st.composite
def attempts(draw: st.DrawFn, max_calls: int = 5) -> list[CallRecord]:
    """The calls of one attempt in the order in which they ended; prompts go on from each other, or do not."""
    count = draw(st.integers(1, max_calls))
    order = draw(st.permutations(range(1, count + 1)))
    calls: list[CallRecord] = []
    for seq in order:
        prompt, said = draw(ids), tuple(draw(st.lists(messages, max_size=3)))
        goes_on: bool = draw(st.booleans())
        if calls and goes_on:
            earlier = draw(st.sampled_from(calls))
            kept = draw(st.integers(0, len(earlier.prompt_token_ids)))
            replied: bool = draw(st.booleans())
            reply = earlier.choices[0].token_ids if earlier.choices and replied else prompt[:0]
            prompt = np.concatenate([earlier.prompt_token_ids[:kept], reply, prompt]).astype(np.int32)
            said = (*earlier.messages[: draw(st.integers(0, len(earlier.messages)))], *said)
        replies = tuple(draw(choices(index)) for index in range(draw(st.integers(0, 3))))
        calls.append(
            CallRecord(
                identity=identity(),
                seq=seq,
                api=draw(st.sampled_from(["chat", "completions"])),
                model=draw(names),
                requested_model=draw(texts),
                trained=draw(st.booleans()),
                outcome=draw(st.sampled_from(["ok", "failed", "cancelled", "undelivered"])),
                status=draw(st.none() | st.integers(200, 599)),
                error=draw(st.none() | texts),
                agent=draw(st.none() | names),
                streamed=draw(st.booleans()),
                started_unix_nano=START,
                ended_unix_nano=START + draw(st.integers(0, 10**12)),
                first_chunk_unix_nano=draw(st.none() | st.just(START + 5)),
                sampling=draw(
                    st.dictionaries(st.sampled_from(["temperature", "seed", "max_tokens", "stop"]), json_values)
                ),
                nonconforming=tuple(draw(st.lists(names, max_size=2))),
                prompt_token_ids=prompt,
                choices=replies,
                prompt_tokens=draw(st.none() | st.integers(0, 10**6)),
                completion_tokens=draw(st.none() | st.integers(0, 10**6)),
                response_id=draw(st.none() | texts),
                messages=said,
                tools=draw(
                    st.none() | st.lists(st.dictionaries(texts, json_values, max_size=2), max_size=2).map(tuple)
                ),
            )
        )
    return calls
