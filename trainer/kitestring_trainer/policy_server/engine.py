"""The decoding thread: sequences join and leave between two tokens, weights change between two tokens."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

import torch

from kitestring_trainer.policy_server.attention import SlotCache, make_batch
from kitestring_trainer.policy_server.model import ServedModel
from kitestring_trainer.policy_server.sampling import draw
from kitestring_trainer.policy_server.sequence import FinishReason, GeneratedSequence

logger = logging.getLogger(__name__)

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")

_TOKENS_PER_PREFILL = 4096
"""Prompt tokens taken into one step, at least one prompt: bounds the memory of a step and the wait of the others."""


class NotPaused(Exception):
    """Weights may change only while generation is paused, so that every token's version is exact."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for /metrics; counters only grow."""

    running: int
    waiting: int
    cells_used: float
    """Share of the key-value cells in use, 0..1."""
    prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]
    """Finish reason -> sequences."""


class Engine:
    """Continuous batching over one model.

    Public methods may be called from any thread. `publish` is called on the engine's thread, once per step, with the
    sequences that have news; `failed` with the error that ended the thread, after which every sequence has
    finish_reason "error".
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        max_sequences: int,
        version: str,
        publish: Callable[[list[GeneratedSequence]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._model = model
        self._cache = SlotCache(model.config, max_sequences, model.max_model_len)
        self._max_sequences = max_sequences
        self._version = version
        self._publish = publish
        self._failed = failed
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._running: list[GeneratedSequence] = []
        """In order of their slots."""
        self._waiting: deque[GeneratedSequence] = deque()
        self._paused: PauseMode | None = None
        self._drained: list[Future[None]] = []
        self._stopping = False
        self._news: list[GeneratedSequence] = []
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    # --- from any thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start decoding."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step; what is unfinished is aborted."""
        self._command(self._set_stopping)
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the decoding thread runs."""
        return self._thread.is_alive()

    @property
    def version(self) -> str:
        """Version of the weights as last reported to us."""
        return self._version

    @property
    def paused(self) -> bool:
        """Whether generation is paused or about to be."""
        return self._paused is not None

    def stats(self) -> EngineStats:
        """Figures for /metrics, good to within a step."""
        running = list(self._running)
        used = sum(sequence.length for sequence in running)
        return EngineStats(
            running=len(running),
            waiting=len(self._waiting),
            cells_used=used / (self._cache.slots * self._cache.length),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            finished=dict(self._finished),
        )

    def submit(self, sequences: Iterable[GeneratedSequence]) -> None:
        """Queue sequences; they join at the next token, as slots allow, in order."""
        new = tuple(sequences)
        self._command(lambda: self._waiting.extend(new))

    def cancel(self, sequences: Iterable[GeneratedSequence]) -> None:
        """Abort sequences nobody waits for any more, at the next token."""
        for sequence in sequences:
            sequence.cancelled = True
        self._command(self._drop_cancelled)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop generating. abort: end everything now. wait: finish what runs. keep: freeze what runs until `resume`.

        In every mode new sequences queue up until `resume`. The future is done when nothing is generated any more.
        """
        return self._ask(lambda done: self._do_pause(mode, done))

    def resume(self) -> Future[None]:
        """Generate again."""
        return self._ask(self._do_resume)

    def install(self, weights: Mapping[str, torch.Tensor]) -> Future[None]:
        """Swap verified weights in; the future fails with NotPaused unless generation has come to rest.

        Sequences frozen by `pause("keep")` go on after `resume` with keys and values computed anew from their tokens.
        """
        return self._ask(lambda done: self._do_install(weights, done))

    def set_version(self, version: str) -> Future[None]:
        """Report tokens from now on as generated by `version`."""
        return self._ask(lambda done: self._do_set_version(version, done))

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _ask(self, command: Callable[[Future[None]], None]) -> Future[None]:
        done: Future[None] = Future()
        self._command(lambda: command(done))
        return done

    # --- on the decoding thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take_commands()
                    if self._may_step():
                        self._step()
                    self._send_news()
        except BaseException as error:  # the thread's boundary: logged, reported, and the server ends
            logger.exception("the decoding thread failed")
            self._end_all("error")
            self._send_news()
            self._failed(error)
        else:
            self._end_all("abort")
            self._send_news()

    def _take_commands(self) -> None:
        if not self._commands:
            if self._may_step():
                return
            with self._wake:
                while not self._commands:
                    self._wake.wait()
        while self._commands:
            self._commands.popleft()()

    def _may_step(self) -> bool:
        if self._paused is None:
            return bool(self._running or self._waiting)
        return self._paused == "wait" and bool(self._running)

    def _send_news(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self._publish(news)

    def _step(self) -> None:
        joining = self._joining() if self._paused is None else []
        for sequence in joining:
            if not sequence.tokens:
                self._prompt_tokens += len(sequence.prompt)
        # Equal prompts (the rollouts of a group, n choices) are computed once and copied.
        distinct: dict[tuple[int, ...], int] = {}
        rows = [distinct.setdefault((*s.prompt, *s.tokens), len(distinct)) for s in joining]
        count = len(self._running)
        continued = [(sequence.tokens[-1], sequence.length - 1) for sequence in self._running]
        self._running.extend(joining)
        logits = self._model.forward(make_batch(self._cache, continued, list(distinct)))
        if len(distinct) < len(joining):
            logits = logits[[*range(count), *(count + row for row in rows)]]
            # Backwards: a slot is overwritten only after all that copy from it have their own.
            for place in reversed(range(len(joining))):
                if rows[place] != place:
                    self._cache.copy(count + rows[place], count + place, joining[place].length)
        drawn = draw(logits, [s.sampling for s in self._running], [s.noise for s in self._running])
        left = []
        for slot, sequence in enumerate(self._running):
            alternatives = drawn.alternatives.get(slot)
            finish = self._append(sequence, drawn.tokens[slot], drawn.logprobs[slot], alternatives)
            if finish is not None:
                left.append((slot, finish))
        for slot, finish in reversed(left):
            self._leave(slot, finish)
        if self._paused == "wait":
            self._settle()

    def _joining(self) -> list[GeneratedSequence]:
        joining: list[GeneratedSequence] = []
        tokens = 0
        while self._waiting and len(self._running) + len(joining) < self._max_sequences:
            length = self._waiting[0].length
            if joining and tokens + length > _TOKENS_PER_PREFILL:
                break
            tokens += length
            joining.append(self._waiting.popleft())
        return joining

    def _append(
        self, sequence: GeneratedSequence, token: int, logprob: float, alternatives: list[tuple[int, float]] | None
    ) -> FinishReason | None:
        """Record a token; returns why the sequence ends with it, if it does."""
        if not math.isfinite(logprob):
            return "error"
        if not sequence.versions or sequence.versions[-1][0] != self._version:
            sequence.versions.append((self._version, len(sequence.tokens)))
        if not sequence.tokens:
            sequence.first_token_at = time.monotonic()
        self._generation_tokens += 1
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        if alternatives is not None:
            sequence.alternatives.append(alternatives)
        finish: FinishReason | None = None
        if token in sequence.stop_tokens:
            finish, sequence.stop_reason = "stop", sequence.stop_tokens[token]
        elif len(sequence.tokens) >= sequence.max_tokens:
            finish = "length"
        if sequence.text is not None:
            if finish == "stop":
                sequence.texts.append("")
            else:
                text, stopped_by = sequence.text.push(token)
                sequence.texts.append(text)
                if stopped_by is not None:
                    finish, sequence.stop_reason = "stop", stopped_by
        sequence.published = len(sequence.tokens)
        if sequence.live and finish is None:
            self._news.append(sequence)
        return finish

    def _leave(self, slot: int, reason: FinishReason) -> None:
        """Take a sequence out of its slot; the sequence in the last slot moves there."""
        sequence = self._running[slot]
        if reason == "error":
            self._cache.clear(slot)
        last = self._running.pop()
        if last is not sequence:
            self._cache.copy(len(self._running), slot, last.length)
            self._running[slot] = last
        self._finish(sequence, reason)

    def _finish(self, sequence: GeneratedSequence, reason: FinishReason) -> None:
        if sequence.text is not None and not isinstance(sequence.stop_reason, str):
            sequence.tail = sequence.text.finish()
        sequence.finish_reason = reason
        self._finished[reason] += 1
        self._news.append(sequence)

    def _end_all(self, reason: FinishReason) -> None:
        while self._running:
            self._leave(len(self._running) - 1, reason)
        while self._waiting:
            self._finish(self._waiting.popleft(), reason)

    def _drop_cancelled(self) -> None:
        for slot in reversed(range(len(self._running))):
            if self._running[slot].cancelled:
                self._leave(slot, "abort")
        for sequence in [sequence for sequence in self._waiting if sequence.cancelled]:
            self._waiting.remove(sequence)
            self._finish(sequence, "abort")
        if self._paused == "wait":
            self._settle()

    def _settle(self) -> None:
        """Tell those who asked for a pause, once it is one."""
        if self._paused != "wait" or not self._running:
            for done in self._drained:
                done.set_result(None)
            self._drained.clear()

    def _do_pause(self, mode: PauseMode, done: Future[None]) -> None:
        self._paused = mode
        self._drained.append(done)
        if mode == "abort":
            self._end_all("abort")
        self._settle()

    def _do_resume(self, done: Future[None]) -> None:
        self._paused = None
        self._settle()
        done.set_result(None)

    def _do_install(self, weights: Mapping[str, torch.Tensor], done: Future[None]) -> None:
        if self._paused is None or (self._paused == "wait" and self._running):
            done.set_exception(NotPaused())
            return
        self._model.install(weights)
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        done.set_result(None)

    def _do_set_version(self, version: str, done: Future[None]) -> None:
        self._version = version
        done.set_result(None)

    def _set_stopping(self) -> None:
        self._stopping = True
