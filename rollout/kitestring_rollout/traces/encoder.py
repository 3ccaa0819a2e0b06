"""From records to spans: one encoder per open attempt, owned by the gateway process that owns the attempt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import orjson
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kitestring_rollout.traces import codec
from kitestring_rollout.traces import conventions as names
from kitestring_rollout.traces.attributes import (
    OPERATIONS,
    call_attributes,
    flag,
    identity_attributes,
    number,
    real,
    text,
)
from kitestring_rollout.traces.identity import call_span_id, root_span_id, trace_id
from kitestring_rollout.traces.messages import to_semconv
from kitestring_rollout.traces.records import AttemptIdentity, CallRecord, ChoiceRecord, EndRecord, Json

PROOF_FORMAT = "1"
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
TEXT_MARK = "kitestring.text"
"""Marks an output message that stands for the text of a completion."""
MAX_CONVERSATIONS = 4
"""So many interleaved conversations of an attempt (sub-agents) are told apart for the delta; more cost bytes only."""
MAX_CONTENTS_BYTES: Final = 128 << 20
"""Contents that are written of one attempt: more than 256 calls of 300 KB that have nothing in common, and no more than
the store and the reader of traces can take from agents that send whatever their calls allow."""
MAX_KEPT_BYTES: Final = 4 << 20
"""Memory that messages of an attempt's earlier calls may take: of what would be more, hashes are kept. To compare
messages costs a tenth of what it costs to hash them."""
MAX_HASHED_MESSAGES: Final = 4096
"""Of a call; those beyond are written again by the next."""
_OMITTED: Final = flag(names.CONTENTS_OMITTED, True)


@dataclass(slots=True)
class EncodedSpan:
    """A span as the exporter sends it."""

    data: bytes
    """Serialised `opentelemetry.proto.trace.v1.Span`."""
    payload_sha256: bytes
    """32 bytes: what the attempt's digest is made of."""
    contents: tuple[int, int] = (0, 0)
    """Where the contents begin and end in `data`; equal where it has none."""

    def without_contents(self) -> EncodedSpan:
        """The same span, marked as having lost its contents: it proves the same, and training reads no more of it."""
        start, end = self.contents
        return EncodedSpan(b"".join((self.data[:start], _OMITTED, self.data[end:])), self.payload_sha256)


@dataclass(slots=True, eq=False)
class _Said:
    """Messages and tools of a call, or hashes of them, to find out what another call repeats."""

    messages: Sequence[Json | bytes] = ()
    tools: Sequence[Json] | bytes | None = None
    memory: int = 0
    """Bytes that they take, roughly."""
    is_hashes: bool = False
    _hashes: _Said | None = None

    def hashes(self) -> _Said:
        """Of messages and tools."""
        if self._hashes is None:
            messages = [_sha256(message) for message in self.messages[:MAX_HASHED_MESSAGES]]
            tools = None if self.tools is None else _sha256(self.tools)
            self._hashes = _Said(messages, tools, is_hashes=True)
        return self._hashes

    def like(self, other: _Said) -> _Said:
        """In the form of `other`."""
        return self.hashes() if other.is_hashes else self


@dataclass(slots=True, eq=False)
class _Conversation:
    """What the next call of a conversation probably begins with."""

    seq: int
    ids: bytes
    """Prompt and first choice of call `seq`, packed int32."""
    said: _Said


class CallEncoder:
    """Encodes the calls of one attempt, in any order of `seq`; not thread-safe.

    It keeps the last prompt of up to `MAX_CONVERSATIONS` conversations, so that a call costs the bytes that are new in
    it. With `record_contents=False` messages, texts, tool definitions and outputs are left out; token ids and logprobs,
    which training needs, are not. Contents beyond `max_contents_bytes` in all are left out too, and that is marked.
    """

    def __init__(
        self,
        identity: AttemptIdentity,
        *,
        record_contents: bool = True,
        max_contents_bytes: int = MAX_CONTENTS_BYTES,
    ) -> None:
        self._identity = identity
        self._contents_left = max_contents_bytes
        self._contents = record_contents
        self._trace_id = trace_id(identity.attempt)
        self._root = root_span_id(identity.attempt)
        self._fixed = identity_attributes(identity)
        self._head = orjson.Fragment(orjson.dumps(identity_head(identity)))
        self._conversations: list[_Conversation] = []

    def encode(self, record: CallRecord, contents_room: int = MAX_CONTENTS_BYTES) -> EncodedSpan:
        """The span of a call, with contents of `contents_room` bytes at most: larger ones are left out, and that is
        marked. Raises ValueError for a record that contradicts itself."""
        if record.identity is not self._identity and record.identity != self._identity:
            raise ValueError(f"call {record.seq} belongs to attempt {record.attempt}, not {self._identity.attempt}")
        prompt = _packed(record.prompt_token_ids, _INT32)
        head, arrays = _call_head(record, prompt)
        said = _Said(record.messages, record.tools, record.memory_bytes) if self._contents else _Said()
        base, base_shared, shared = self._base(prompt, said)
        head["identity"] = self._head
        head["prompt"] = {
            "base": base.seq if base is not None else 0,
            "shared": base_shared,
            "count": len(prompt) // 4,
            "sha256": hashlib.sha256(prompt).hexdigest(),
        }
        contents = b""
        omitted = False
        if self._contents:
            new_tools = None if base is not None and base.said.tools == said.like(base.said).tools else record.tools
            head["contents"], contents = _call_contents(record, shared, new_tools)
            omitted = len(contents) > min(contents_room, self._contents_left)
            if omitted:
                del head["contents"]
                contents, said = b"", _Said()  # nothing that a later call could refer to
            self._contents_left -= len(contents)
        payload = codec.pack(head, [prompt[4 * base_shared :], *arrays])
        hashed = codec.payload_sha256("c", self._trace_id, record.epoch, record.seq, payload)
        span = Span(
            trace_id=self._trace_id,
            span_id=call_span_id(record.attempt, record.epoch, record.seq),
            parent_span_id=self._root,
            name=f"{OPERATIONS[record.api]} {record.model}",
            kind=Span.SPAN_KIND_CLIENT,
            start_time_unix_nano=record.started_unix_nano,
            end_time_unix_nano=record.ended_unix_nano,
        )
        parts = [
            span.SerializeToString(),
            text(names.PROOF, f"{PROOF_FORMAT}:c:{record.epoch}:{record.seq}:{hashed.hex()}"),
            text(names.PAYLOAD, payload),
            self._fixed,
            *call_attributes(record),
        ]
        start = sum(map(len, parts))
        parts.append(_OMITTED if omitted else contents)
        if record.outcome != "ok":
            parts.append(text(names.ERROR_TYPE, str(record.status) if record.status else record.outcome))
            parts.append(_failed(record.error or record.outcome))
        if base is not None and (4 * base_shared == len(base.ids) or shared == len(base.said.messages) > 0):
            self._conversations.remove(base)  # this call goes on where that one ended
        elif len(self._conversations) == MAX_CONVERSATIONS:
            del self._conversations[0]
        reply = _packed(record.choices[0].token_ids, _INT32) if record.choices else b""
        if said.memory + sum([conversation.said.memory for conversation in self._conversations]) > MAX_KEPT_BYTES:
            said = said.hashes()
        self._conversations.append(_Conversation(record.seq, prompt + reply, said))
        return EncodedSpan(b"".join(parts), hashed, (start, start + len(contents)))

    def _base(self, prompt: bytes, said: _Said) -> tuple[_Conversation | None, int, int]:
        """The conversation that shares most with this call, and how many ids and messages; the newest of equals, None
        when none shares anything."""
        best, most = None, (0, 0)
        for conversation in reversed(self._conversations):
            shared = (
                codec.shared_ids(conversation.ids, prompt),
                _shared_messages(conversation.said.messages, said.like(conversation.said).messages),
            )
            if shared > most:
                best, most = conversation, shared
                if shared[0] and 4 * shared[0] == len(conversation.ids):
                    break
        return best, *most


def encode_end(record: EndRecord, *, record_contents: bool = True) -> EncodedSpan:
    """The attempt's root span, which proves the attempt."""
    identity = record.identity
    head: Json = {
        "identity": identity_head(identity),
        "n_calls": record.n_calls,
        "digest": record.digest,
        "outcome": record.outcome,
        "reason": record.reason,
        "reward": record.reward,
        "reward_source": record.reward_source,
        "exit_code": record.exit_code,
        "seconds": record.seconds,
        "calls": record.calls.model_dump(),
        "started": record.started_unix_nano,
        "ended": record.ended_unix_nano,
    }
    if record_contents:
        head["output"] = record.output
    payload = codec.pack(head, ())
    hashed = codec.payload_sha256("e", trace_id(record.attempt), record.epoch, 0, payload)
    span = Span(
        trace_id=trace_id(record.attempt),
        span_id=root_span_id(record.attempt),
        name=names.ROOT_SPAN_NAME,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=record.started_unix_nano,
        end_time_unix_nano=record.ended_unix_nano,
    )
    parts = [
        text(names.PROOF, f"{PROOF_FORMAT}:e:{record.epoch}:0:{hashed.hex()}"),
        text(names.PAYLOAD, payload),
        identity_attributes(identity),
        text(names.OPERATION, "invoke_agent"),
        text(names.OUTCOME, record.outcome),
        number(names.N_CALLS, record.n_calls),
    ]
    if record.exit_code is not None:
        parts.append(number(names.EXIT_CODE, record.exit_code))
    if record.reason is not None:
        parts.append(text(names.REASON, record.reason))
    if record_contents and record.output is not None:
        parts.append(text(names.OUTPUT, record.output))
    if record.reward is not None:
        parts.append(real(names.REWARD, record.reward))
    if record.outcome != "Succeeded":
        parts.append(text(names.ERROR_TYPE, record.outcome))
    span.MergeFromString(b"".join(parts))
    if record.reward is not None:
        event = span.events.add(time_unix_nano=record.ended_unix_nano, name=names.EVALUATION_EVENT)
        event.attributes.add(key=names.EVALUATION_NAME).value.string_value = record.reward_source or "reward"
        event.attributes.add(key=names.EVALUATION_SCORE).value.double_value = record.reward
    if record.outcome != "Succeeded":
        span.status.code = Status.STATUS_CODE_ERROR
        span.status.message = record.reason or record.outcome
    return EncodedSpan(span.SerializeToString(), hashed)


def identity_head(identity: AttemptIdentity) -> Json:
    """The identity as the head of a payload holds it."""
    return {
        "run": identity.run,
        "rollout": identity.rollout,
        "attempt": identity.attempt,
        "group": identity.group,
        "task": identity.task,
        "step": identity.step,
        "mode": identity.mode,
        "epoch": identity.epoch,
    }


def _failed(message: str) -> bytes:
    """The status of a span, serialised: its last field."""
    data: bytes = Span(status=Status(code=Status.STATUS_CODE_ERROR, message=message)).SerializeToString()
    return data


def _call_head(record: CallRecord, prompt: bytes) -> tuple[Json, list[bytes]]:
    choices: list[Json] = []
    arrays: list[bytes] = []
    for choice in record.choices:
        ids, logprobs = _packed(choice.token_ids, _INT32), _packed(choice.logprobs, _FLOAT32)
        _check_choice(record.seq, choice, len(ids) // 4, len(logprobs) // 4)
        arrays += (ids, logprobs)
        choices.append(
            {
                "index": choice.index,
                "tokens": len(ids) // 4,
                "logprobs": len(logprobs) // 4,
                "versions": [(span.version, span.start, span.end) for span in choice.versions],
                "finish_reason": choice.finish_reason,
                "tool_calls": _tool_calls(choice),
            }
        )
    head: Json = {
        "seq": record.seq,
        "api": record.api,
        "model": record.model,
        "requested_model": record.requested_model,
        "trained": record.trained,
        "outcome": record.outcome,
        "streamed": record.streamed,
        "status": record.status,
        "error": record.error,
        "agent": record.agent,
        "started": record.started_unix_nano,
        "ended": record.ended_unix_nano,
        "first_chunk": record.first_chunk_unix_nano,
        "sampling": record.sampling,
        "nonconforming": record.nonconforming,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "response_id": record.response_id,
        "choices": choices,
    }
    return head, arrays


def _check_choice(seq: int, choice: ChoiceRecord, tokens: int, logprobs: int) -> None:
    if logprobs not in (0, tokens):
        raise ValueError(f"call {seq}, choice {choice.index}: {tokens} token ids but {logprobs} logprobs")
    position = 0
    for span in choice.versions:
        if span.start != position or span.end < span.start:
            raise ValueError(f"call {seq}, choice {choice.index}: versions leave a gap at token {position}")
        position = span.end
    if choice.versions and position != tokens:
        raise ValueError(f"call {seq}, choice {choice.index}: versions cover {position} of {tokens} tokens")


def _tool_calls(choice: ChoiceRecord) -> int:
    calls = choice.message.get("tool_calls") if choice.message is not None else None
    return len(calls) if isinstance(calls, list) else choice.tool_calls


def _call_contents(record: CallRecord, shared: int, tools: tuple[Json, ...] | None) -> tuple[Json, bytes]:
    """What the head says of a call's contents, and their attributes in the order in which they are hashed. An earlier
    call has `shared` of the messages, and the tools where `tools` is None."""
    messages = record.messages[shared:] if shared else record.messages
    contents = []
    if messages:
        contents.append((names.INPUT_MESSAGES, _json([to_semconv(message) for message in messages])))
    if record.choices:
        contents.append((names.OUTPUT_MESSAGES, _json([_output_message(choice) for choice in record.choices])))
    if tools is not None:
        contents.append((names.TOOL_DEFINITIONS, _json(tools)))
    head = {
        "attributes": [name for name, _ in contents],
        "sha256": codec.contents_sha256([value for _, value in contents]),
        "messages": {"shared": shared, "new": len(messages)},
        "tools": "none" if record.tools is None else "new" if tools is not None else "base",
    }
    attributes = (number(names.MESSAGES_SHARED, shared), *[text(name, value) for name, value in contents])
    return head, b"".join(attributes)


def _output_message(choice: ChoiceRecord) -> Json:
    if choice.message is not None:
        message = to_semconv(choice.message)
    elif choice.text is not None:
        message = {"role": "assistant", "parts": [{"type": "text", "content": choice.text}], TEXT_MARK: True}
    else:
        message = {"role": "assistant", "parts": []}
    return {**message, "finish_reason": choice.finish_reason}


def _sha256(value: Any) -> bytes:
    return hashlib.sha256(orjson.dumps(value)).digest()


def _shared_messages(known: Sequence[Json | bytes], messages: Sequence[Json | bytes]) -> int:
    shared = 0
    for one, other in zip(known, messages, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def _packed(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> bytes:
    return (array if array.dtype is dtype else array.astype(dtype)).tobytes()


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
