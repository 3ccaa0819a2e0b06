"""Replies in vLLM's shapes, whole or in chunks, as plain data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kitestring_trainer.policy_server.requests import GenerationRequest
from kitestring_trainer.policy_server.sequence import GeneratedSequence
from kitestring_trainer.policy_server.tokenizer import ServedTokenizer
from kitestring_trainer.policy_server.tool_calls import HermesStream, Reply, parse_hermes

Json = dict[str, Any]


@dataclass
class _Progress:
    """How much of a choice has been sent."""

    tokens: int = 0
    text_offset: int = 0
    calls: HermesStream | None = None
    finished: bool = False


@dataclass
class ReplyWriter:
    """Writes the reply to one request: either `whole()` once, or `chunks()` after every news, then `usage_chunk()`."""

    id: str
    model: str
    request: GenerationRequest
    sequences: list[GeneratedSequence]
    tokenizer: ServedTokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        reads = self.request.read_tool_calls
        self._progress = [_Progress(calls=HermesStream() if reads else None) for _ in self.sequences]
        self._opened = False

    @property
    def finished(self) -> bool:
        """Whether every choice's last chunk has been written."""
        return all(progress.finished for progress in self._progress)

    def whole(self) -> Json:
        """The reply to a request that does not stream."""
        chat = self.request.api == "chat"
        reply = self._envelope("chat.completion" if chat else "text_completion")
        reply["choices"] = [self._chat_choice(s) if chat else self._completion_choice(s) for s in self.sequences]
        reply["usage"] = self.usage()
        if chat and self.request.return_token_ids:
            reply["prompt_token_ids"] = self.sequences[0].prompt
        return reply

    def usage(self) -> Json:
        """Token counts; a prompt counts once, however many choices it has."""
        prompt = sum(len(prompt) for prompt in self.request.prompts)
        completion = sum(sequence.published for sequence in self.sequences)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def usage_chunk(self) -> Json:
        """The last chunk of a stream that asked for usage."""
        kind = "chat.completion.chunk" if self.request.api == "chat" else "text_completion"
        return {**self._envelope(kind), "choices": [], "usage": self.usage()}

    def chunks(self) -> Iterator[Json]:
        """What is new since the last call, a chunk per choice; a chat opens with a chunk that names the role."""
        if not self._opened:
            if not any(sequence.published or sequence.finish_reason for sequence in self.sequences):
                return
            self._opened = True
            if self.request.api == "chat":
                yield from self._opening()
        for sequence, progress in zip(self.sequences, self._progress, strict=True):
            if progress.finished:
                continue
            # In this order: once there is a reason, `published` is final.
            finish = sequence.finish_reason
            end = sequence.published
            if end == progress.tokens and finish is None:
                continue
            yield self._chunk(sequence, progress, end, finish)

    def _opening(self) -> Iterator[Json]:
        for sequence in self.sequences:
            delta = {"role": "assistant", "content": ""}
            choice = {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = {**self._envelope("chat.completion.chunk"), "choices": [choice]}
            if self.request.return_token_ids and sequence.index == 0:
                chunk["prompt_token_ids"] = sequence.prompt
            yield chunk

    def _chunk(self, sequence: GeneratedSequence, progress: _Progress, end: int, finish: str | None) -> Json:
        start = progress.tokens
        progress.tokens = end
        progress.finished = finish is not None
        text = "".join(sequence.texts[start:end])
        if finish is not None:
            text += sequence.tail
        choice: Json = {"index": sequence.index}
        if self.request.api == "chat":
            reply = Reply(text)
            if progress.calls is not None:
                text = progress.calls.push(text)
                reply = progress.calls.finish() if finish is not None else Reply(None)
                reply = self._allowed(Reply((text + (reply.content or "")) or None, reply.tool_calls))
                finish = _finish_reason(finish, reply)
            choice["delta"] = _delta(reply)
            choice["logprobs"] = self._chat_logprobs(sequence, start, end)
        else:
            choice["text"] = text
            choice["logprobs"] = self._completion_logprobs(sequence, start, end, progress.text_offset)
            progress.text_offset += sum(len(self.tokenizer.piece(token)[0]) for token in sequence.tokens[start:end])
            if self.request.return_token_ids and start == 0:
                choice["prompt_token_ids"] = sequence.prompt
        choice["finish_reason"] = finish
        if finish is not None:
            choice["stop_reason"] = sequence.stop_reason
        if self.request.return_token_ids:
            choice["token_ids"] = sequence.tokens[start:end]
        if self.request.return_weight_versions and finish is not None:
            choice["weight_versions"] = sequence.version_spans()
        kind = "chat.completion.chunk" if self.request.api == "chat" else "text_completion"
        return {**self._envelope(kind), "choices": [choice]}

    def _chat_choice(self, sequence: GeneratedSequence) -> Json:
        text = self._text(sequence)
        reply = self._allowed(parse_hermes(text)) if self.request.read_tool_calls else Reply(text)
        message: Json = {"role": "assistant", "content": reply.content}
        if reply.tool_calls:
            message["tool_calls"] = list(reply.tool_calls)
        return {
            "index": sequence.index,
            "message": message,
            "logprobs": self._chat_logprobs(sequence, 0, len(sequence.tokens)),
            "finish_reason": _finish_reason(sequence.finish_reason, reply),
            **self._choice_tail(sequence),
        }

    def _completion_choice(self, sequence: GeneratedSequence) -> Json:
        choice = {
            "index": sequence.index,
            "text": self._text(sequence),
            "logprobs": self._completion_logprobs(sequence, 0, len(sequence.tokens), 0),
            "finish_reason": sequence.finish_reason,
            **self._choice_tail(sequence),
        }
        if self.request.return_token_ids:
            choice["prompt_token_ids"] = sequence.prompt
        return choice

    def _choice_tail(self, sequence: GeneratedSequence) -> Json:
        tail: Json = {"stop_reason": sequence.stop_reason}
        if self.request.return_token_ids:
            tail["token_ids"] = sequence.tokens
        if self.request.return_weight_versions:
            tail["weight_versions"] = sequence.version_spans()
        return tail

    def _text(self, sequence: GeneratedSequence) -> str:
        if sequence.text is not None:
            return "".join(sequence.texts) + sequence.tail
        tokens = sequence.tokens
        if sequence.finish_reason == "stop":  # Without text while generating, only a stop token can have ended it.
            tokens = tokens[:-1]
        return self.tokenizer.decode(tokens, skip_special_tokens=self.request.skip_special_tokens)

    def _allowed(self, reply: Reply) -> Reply:
        return reply if self.request.parallel_tool_calls else Reply(reply.content, reply.tool_calls[:1])

    def _chat_logprobs(self, sequence: GeneratedSequence, start: int, end: int) -> Json | None:
        if not self.request.logprobs:
            return None
        content = []
        for place in range(start, end):
            top = sequence.alternatives[place] if self.request.sampling.alternatives else ()
            entry = self._logprob(sequence.tokens[place], sequence.logprobs[place])
            entry["top_logprobs"] = [self._logprob(token, logprob) for token, logprob in top]
            content.append(entry)
        return {"content": content}

    def _logprob(self, token: int, logprob: float) -> Json:
        text, data = self.tokenizer.piece(token)
        return {"token": text, "logprob": logprob, "bytes": data}

    def _completion_logprobs(self, sequence: GeneratedSequence, start: int, end: int, offset: int) -> Json | None:
        if not self.request.logprobs:
            return None
        pieces = [self.tokenizer.piece(token)[0] for token in sequence.tokens[start:end]]
        offsets = []
        tops = []
        for place, piece in zip(range(start, end), pieces, strict=True):
            offsets.append(offset)
            offset += len(piece)
            top = {piece: sequence.logprobs[place]}
            if self.request.sampling.alternatives:
                top.update({self.tokenizer.piece(token)[0]: value for token, value in sequence.alternatives[place]})
            tops.append(top)
        logprobs = sequence.logprobs[start:end]
        return {"tokens": pieces, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _envelope(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def _finish_reason(finish: str | None, reply: Reply) -> str | None:
    return "tool_calls" if reply.tool_calls and finish == "stop" else finish


def _delta(reply: Reply) -> Json:
    delta: Json = {}
    if reply.content:
        delta["content"] = reply.content
    if reply.tool_calls:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(reply.tool_calls)]
    return delta
