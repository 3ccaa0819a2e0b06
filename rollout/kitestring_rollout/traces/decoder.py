"""From proven spans back to records."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping

import orjson

from kitestring_rollout.protocol.gateway_admin import CallCounts
from kitestring_rollout.traces import codec
from kitestring_rollout.traces import conventions as names
from kitestring_rollout.traces.codec import ArrayReader, PayloadCorrupt
from kitestring_rollout.traces.encoder import TEXT_MARK
from kitestring_rollout.traces.messages import from_semconv
from kitestring_rollout.traces.proof import CallSpan
from kitestring_rollout.traces.records import (
    AttemptIdentity,
    CallRecord,
    ChoiceRecord,
    EndRecord,
    Json,
    TokenIds,
    VersionSpan,
)


def decode_end(payload: str) -> EndRecord:
    """The record in an end span's payload; raises `PayloadCorrupt`."""
    head, arrays = codec.unpack(payload)
    ArrayReader(arrays).finish()
    try:
        return EndRecord(
            identity=AttemptIdentity(**head["identity"]),
            n_calls=head["n_calls"],
            digest=head["digest"],
            outcome=head["outcome"],
            reason=head["reason"],
            reward=head["reward"],
            reward_source=head["reward_source"],
            exit_code=head["exit_code"],
            seconds=head["seconds"],
            output=head.get("output"),
            calls=CallCounts.model_validate(head["calls"]),
            started_unix_nano=head["started"],
            ended_unix_nano=head["ended"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadCorrupt(f"not an end record: {error!r}") from error


def decode_calls(spans: Iterable[CallSpan], *, skip_missing: bool = False) -> tuple[CallRecord, ...]:
    """The calls in the order of their numbers; raises `PayloadCorrupt`.

    A prompt is written as what it adds to that of another call: all calls of the attempt must be there, or with
    `skip_missing` those whose prompt cannot be made whole are left out.
    """
    packed = {span.seq: (span, *codec.unpack(span.payload)) for span in spans}
    bases = {seq: _base(head) for seq, (_, head, _) in packed.items()}
    decoded: dict[int, CallRecord | None] = {}
    for seq in packed:
        for chained in _chain(seq, bases, decoded):
            decoded[chained] = _decode(*packed[chained], decoded, skip_missing)
    return tuple(record for seq in sorted(decoded) if (record := decoded[seq]) is not None)


def _base(head: Json) -> int:
    """The call that the prompt builds on, 0 for none."""
    try:
        base: int = head["prompt"]["base"]
    except (KeyError, TypeError) as error:
        raise PayloadCorrupt("the payload says nothing of its prompt") from error
    return base


def _chain(seq: int, bases: Mapping[int, int], decoded: Mapping[int, object]) -> Iterator[int]:
    """Calls to decode so that `seq` can be: the ones its prompt builds on first."""
    chain: dict[int, None] = {}
    while seq in bases and seq not in decoded:
        if seq in chain:
            raise PayloadCorrupt(f"the prompt of call {seq} builds on itself")
        chain[seq] = None
        seq = bases[seq]
    return reversed(chain)


def _decode(
    span: CallSpan, head: Json, data: memoryview, decoded: Mapping[int, CallRecord | None], skip_missing: bool
) -> CallRecord | None:
    arrays = ArrayReader(data)
    try:
        identity = AttemptIdentity(**head["identity"])
        if (head["seq"], identity.epoch) != (span.seq, span.epoch):
            raise PayloadCorrupt(f"call {span.seq} says that it is call {head['seq']} of epoch {identity.epoch}")
        prompt = head["prompt"]
        base = decoded.get(prompt["base"]) if prompt["base"] else None
        if prompt["base"] and base is None:
            if skip_missing:
                return None
            raise PayloadCorrupt(f"call {span.seq} builds on call {prompt['base']}, which is not there")
        ids = _prompt_ids(span.seq, prompt, base, arrays)
        contents = _Contents(head.get("contents"), span, base)
        choices = tuple(_choice(position, choice, arrays, contents) for position, choice in enumerate(head["choices"]))
        arrays.finish()
        return CallRecord(
            identity=identity,
            seq=span.seq,
            api=head["api"],
            model=head["model"],
            requested_model=head["requested_model"],
            trained=head["trained"],
            outcome=head["outcome"],
            streamed=head["streamed"],
            status=head["status"],
            error=head["error"],
            agent=head["agent"],
            started_unix_nano=head["started"],
            ended_unix_nano=head["ended"],
            first_chunk_unix_nano=head["first_chunk"],
            sampling=head["sampling"],
            nonconforming=tuple(head["nonconforming"]),
            prompt_token_ids=ids,
            choices=choices,
            prompt_tokens=head["prompt_tokens"],
            completion_tokens=head["completion_tokens"],
            response_id=head["response_id"],
            messages=contents.messages,
            tools=contents.tools,
            messages_shared=contents.shared,
        )
    except (KeyError, TypeError, IndexError) as error:
        raise PayloadCorrupt(f"call {span.seq} is not a call record: {error!r}") from error


def _prompt_ids(seq: int, prompt: Json, base: CallRecord | None, arrays: ArrayReader) -> TokenIds:
    suffix = arrays.take(prompt["count"] - prompt["shared"], "<i4")
    packed = suffix.tobytes()
    if base is not None:
        reply = base.choices[0].token_ids.tobytes() if base.choices else b""
        packed = (base.prompt_token_ids.tobytes() + reply)[: 4 * prompt["shared"]] + packed
    if hashlib.sha256(packed).hexdigest() != prompt["sha256"]:
        raise PayloadCorrupt(f"the prompt of call {seq} is not the one that was written")
    return ArrayReader(memoryview(packed)).take(prompt["count"], "<i4")


def _choice(position: int, choice: Json, arrays: ArrayReader, contents: _Contents) -> ChoiceRecord:
    message, text = contents.reply(position)
    return ChoiceRecord(
        index=choice["index"],
        token_ids=arrays.take(choice["tokens"], "<i4"),
        logprobs=arrays.take(choice["logprobs"], "<f4"),
        versions=tuple(VersionSpan(*version) for version in choice["versions"]),
        finish_reason=choice["finish_reason"],
        message=message,
        text=text,
        tool_calls=choice["tool_calls"],
    )


class _Contents:
    """What agent and model said in a call; empty where that was not recorded, not read, or stripped on the way."""

    def __init__(self, head: Json | None, span: CallSpan, base: CallRecord | None) -> None:
        self.messages: tuple[Json, ...] = ()
        self.tools: tuple[Json, ...] | None = None
        self.shared = 0
        self._replies: list[Json] = []
        if head is None or span.contents is None or not all(name in span.contents for name in head["attributes"]):
            return
        texts = {name: span.contents[name] for name in head["attributes"]}
        if codec.contents_sha256(list(texts.values())) != head["sha256"]:
            raise PayloadCorrupt(f"the contents of call {span.seq} are not the ones that were written")
        new = orjson.loads(texts.get(names.INPUT_MESSAGES, "[]"))
        self.shared = head["messages"]["shared"]
        earlier = base.messages[: self.shared] if base is not None else ()
        if len(earlier) == self.shared:  # else that call's contents were left out on the way
            self.messages = (*earlier, *(from_semconv(message) for message in new))
        if head["tools"] == "new":
            self.tools = tuple(orjson.loads(texts[names.TOOL_DEFINITIONS]))
        elif head["tools"] == "base" and base is not None:
            self.tools = base.tools
        self._replies = orjson.loads(texts.get(names.OUTPUT_MESSAGES, "[]"))

    def reply(self, position: int) -> tuple[Json | None, str | None]:
        """(message, text) of the choice at `position`."""
        if position >= len(self._replies):
            return None, None
        reply = {key: value for key, value in self._replies[position].items() if key != "finish_reason"}
        if reply.pop(TEXT_MARK, False):
            return None, reply["parts"][0]["content"]
        if reply == {"role": "assistant", "parts": []}:
            return None, None
        return from_semconv(reply), None
