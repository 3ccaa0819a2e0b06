"""Made-up run folders, written through the real encoder, reader's keys, sample maker and metrics: no process runs.

Time is made up too, ten seconds a plan, so that all ids and outputs are the same in every test run.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import zstandard

from kitestring_api import names
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun
from kitestring_cli.run.folder import RunFolder
from kitestring_rollout.protocol.gateway_admin import CallCounts, Mode
from kitestring_rollout.storage import DirectoryStore, DirectoryStoreConfig
from kitestring_rollout.traces.codec import digest
from kitestring_rollout.traces.encoder import CallEncoder, encode_end
from kitestring_rollout.traces.records import AttemptIdentity, CallRecord, ChoiceRecord, EndRecord, Json, VersionSpan
from kitestring_rollout.traces.requests import export_request
from kitestring_trainer.collect import no_update
from kitestring_trainer.commits import StepCommit
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.learner import Agreement, UpdateMetrics
from kitestring_trainer.metrics import MetricsFile, rollout_metrics, sample_metrics, update_metrics, validation_metrics
from kitestring_trainer.outcome import committed_rollouts
from kitestring_trainer.plan import StepPlan, plan_training_step, plan_validation
from kitestring_trainer.queue.proofs import Proof
from kitestring_trainer.queue.rollouts import RolloutResult
from kitestring_trainer.queue.state import Final
from kitestring_trainer.queue.verdict import judge
from kitestring_trainer.samples.batches import SampleRules, ScoredRollout, make_samples
from kitestring_trainer.samples.rows import RowLimits
from kitestring_trainer.samples.transitions import transitions
from kitestring_trainer.validation import ValidationMode, validation_result

BEGAN = 1_760_000_000.0
EPOCH = "0123456789abcdef"
TOOLS: tuple[Json, ...] = ({"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}},)


@dataclass
class Try:
    """What one attempt at a rollout is to be. `calls`: messages of the replies, in order."""

    outcome: str = names.CLASS_SUCCEEDED
    reason: str | None = None
    reward: float | None = 1.0
    output: str | None = "Answer: 4"
    complete: bool = True
    """False: its end record never came."""
    replies: Sequence[Json] = (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "call-0", "type": "function", "function": {"name": "calculator", "arguments": '{"x": "2+2"}'}}
            ],
        },
        {"role": "assistant", "content": "Answer: 4"},
    )
    question: str = "What is 2+2?"


Play = Callable[[StepPlan, int], Sequence[Try]]
"""(plan, index of the rollout in it) → its attempts."""


def half_right(plan: StepPlan, index: int) -> Sequence[Try]:
    """Every other rollout is right."""
    return [Try() if index % 2 == 0 else Try(reward=0.0, output="no idea")]


@dataclass
class MadeUpRun:
    """`ids`: the token ids that every call of an attempt had, by (attempt, seq), as the encoder got them."""

    folder: RunFolder
    config: TrainerConfig
    store: DirectoryStore
    now: float = BEGAN
    ids: dict[tuple[str, int], tuple[list[int], list[int], list[float]]] = field(default_factory=dict)
    attempts: dict[str, list[str]] = field(default_factory=dict)
    """Attempts by rollout."""
    random: random.Random = field(default_factory=lambda: random.Random(1))
    _spans: list[bytes] = field(default_factory=list)
    record_contents: bool = True

    def step(self, step: int, play: Play = half_right, *, commit: bool = True, update: bool = False) -> None:
        """A training step: plan, rollouts, commit, samples, figures."""
        rollouts = self.config.spec.rollouts
        plan = plan_training_step(
            seed=self.config.spec.seed,
            step=step,
            n_tasks=10,
            tasks_per_step=rollouts.tasks_per_step,
            group_size=rollouts.group_size,
        )
        results = self._roll_out(plan, play)
        if not commit:
            return
        made = self._commit(plan, results, rollouts.min_group_size)
        scored = [
            ScoredRollout(
                result.rollout, result.group, result.final.ending.reward, tuple(transitions(result.proof.calls))
            )
            for result in results
            if result.proof is not None and result.final.ending.reward is not None
        ]
        rules = SampleRules("grpo", True, rollouts.min_group_size, RowLimits(1000, 1000), 2)
        samples = make_samples(step, "1.0", scored, rules)
        lines = b"".join(json.dumps(asdict(record)).encode() + b"\n" for record in samples.records)
        self.store.put(f"state/samples/{plan.name}.jsonl.zst", zstandard.compress(lines))
        metrics = _update(step) if update else no_update(step, len(samples.batch.rows))
        MetricsFile(self.folder.metrics).append(
            {
                "step": step,
                "skipped": not made.counted,
                "redone": False,
                **rollout_metrics(made, [result.proof for result in results if result.proof is not None]),
                **sample_metrics(samples),
                "unix_time": self.now,
                "incarnation": 1,
                "policy_version": f"1.{step - 1}" if update else None,
                "degraded": False,
                **update_metrics(metrics),
                **validation_metrics([]),
                "step_seconds": 10.0,
                "seconds": {"rollout": 6.0, "samples": 0.5, "update": 3.0, "push": 0.5},
                "tokens_per_second": 100.0,
            }
        )

    def validation(self, step: int, mode: ValidationMode, play: Play = half_right) -> None:
        plan = plan_validation(mode=mode, step=step, n_tasks=4, repeats=1)
        results = self._roll_out(plan, play)
        made = self._commit(plan, results, 1, validation=False)
        self._put_commit(made, validation_result(mode, made, results))

    def result(self, **changes: Any) -> None:
        """The result of the run, as `kitestring run` leaves it."""
        result = {
            "run": self.folder.name,
            "phase": "Succeeded",
            "reason": "Completed",
            "message": None,
            "steps": 2,
            "tokens": 1000,
            "wall_seconds": 42.0,
            "checkpoint": None,
        }
        self.folder.result.write_text(json.dumps(result | changes))

    def flush(self) -> None:
        """Spans written so far become an object."""
        if self._spans:
            self.store.put(self._key(), export_request(self._spans, {}))
            self._spans = []

    # --- inside ---

    def _roll_out(self, plan: StepPlan, play: Play) -> list[RolloutResult]:
        self.store.put(f"state/plans/{plan.name}.json", json.dumps(plan.to_json() | {"unix_time": self.now}).encode())
        results: list[RolloutResult] = []
        for group in plan.groups:
            for rollout in group.rollouts:
                tries = play(plan, len(results))
                proof = None
                for attempt in tries:
                    self.now += 0.01
                    proof = self._attempt(plan, group.group, group.task, rollout, attempt)
                assert proof is not None, "the last attempt of a made-up rollout is complete"
                ending = judge(proof.end, proof.calls, None)
                counts = Counter(attempt.outcome for attempt in tries)
                final = Final(rollout, proof.attempt, ending, counts.total())
                results.append(RolloutResult(rollout, group.group, group.task, final, proof))
            self.flush()
        self.now += 10.0
        return results

    def _attempt(self, plan: StepPlan, group: str, task: int, rollout: str, wanted: Try) -> Proof | None:
        name = str(self._uuid7())
        self.attempts.setdefault(rollout, []).append(name)
        identity = AttemptIdentity(self.folder.name, rollout, name, group, task, plan.step, plan.mode, EPOCH)
        encoder = CallEncoder(identity, record_contents=self.record_contents)
        calls, hashes = [], []
        messages: tuple[Json, ...] = (
            {"role": "system", "content": "Use the calculator."},
            {"role": "user", "content": wanted.question},
        )
        prompt = [self.random.randrange(1000) for _ in range(12)]
        for seq, reply in enumerate(wanted.replies, start=1):
            response = [self.random.randrange(1000) for _ in range(5)]
            logprobs = np.array([-self.random.random() for _ in response], np.float32)
            self.ids[name, seq] = (list(prompt), response, logprobs.tolist())
            calls.append(self._call(identity, seq, messages, reply, prompt, response, logprobs))
            span = encoder.encode(calls[-1])
            hashes.append(span.payload_sha256)
            self._spans.append(span.data)
            prompt = prompt + response + [7, 7]
            messages = (*messages, reply, {"role": "tool", "tool_call_id": "call-0", "content": "4"})
        if not wanted.complete:
            return None
        end = EndRecord(
            identity=identity,
            n_calls=len(calls),
            digest=digest(hashes),
            outcome=wanted.outcome,
            started_unix_nano=int(self.now * 1e9),
            ended_unix_nano=int(self.now * 1e9) + 1000,
            reason=wanted.reason,
            reward=wanted.reward,
            reward_source="builtin" if wanted.reward is not None else None,
            exit_code=0 if wanted.outcome == names.CLASS_SUCCEEDED else 1,
            seconds=0.5,
            output=wanted.output,
            calls=CallCounts(admitted=len(calls), ok=len(calls)),
        )
        self._spans.append(encode_end(end, record_contents=self.record_contents).data)
        return Proof(name, end, tuple(calls))

    def _call(  # noqa: PLR0917 - what makes a call
        self,
        identity: AttemptIdentity,
        seq: int,
        messages: tuple[Json, ...],
        reply: Json,
        prompt: list[int],
        response: list[int],
        logprobs: np.ndarray[Any, Any],
    ) -> CallRecord:
        greedy = identity.mode == names.MODE_VALIDATION_GREEDY
        calls = reply.get("tool_calls")
        return CallRecord(
            identity=identity,
            seq=seq,
            api="chat",
            model="policy",
            requested_model="policy",
            trained=True,
            outcome="ok",
            status=200,
            started_unix_nano=int(self.now * 1e9) + seq,
            ended_unix_nano=int(self.now * 1e9) + seq + 250_000_000,
            sampling={"temperature": 0.0 if greedy else 1.0, "max_tokens": 40},
            prompt_token_ids=np.array(prompt, np.int32),
            choices=(
                ChoiceRecord(
                    index=0,
                    token_ids=np.array(response, np.int32),
                    logprobs=logprobs,
                    versions=(VersionSpan("1.0", 0, len(response)),),
                    finish_reason="tool_calls" if calls else "stop",
                    message=reply,
                    tool_calls=len(calls) if isinstance(calls, list) else 0,
                ),
            ),
            prompt_tokens=len(prompt),
            completion_tokens=len(response),
            response_id=f"chatcmpl-{seq}",
            messages=messages,
            tools=TOOLS,
        )

    def _commit(
        self, plan: StepPlan, results: Sequence[RolloutResult], min_group_size: int, *, validation: bool = True
    ) -> StepCommit:
        commit = StepCommit(
            run=self.folder.name,
            mode=plan.mode,
            step=plan.step,
            incarnation=1,
            policy_version="1.0",
            unix_time=self.now,
            rollouts=committed_rollouts(results, min_group_size),
        )
        if validation:
            self._put_commit(commit, None)
        return commit

    def _put_commit(self, commit: StepCommit, validation: Any) -> None:
        data = commit.to_json()
        if validation is not None:
            data["validation"] = validation.model_dump(mode="json")
        self.store.put(f"state/commits/{commit.name}.json", json.dumps(data).encode())
        self.now += 10.0

    def _uuid7(self) -> UUID:
        milliseconds = int(self.now * 1000)
        return UUID(int=(milliseconds << 80) | (7 << 76) | (2 << 62) | self.random.getrandbits(60))

    def _key(self) -> str:
        minute = datetime.fromtimestamp(int(self.now), UTC).strftime("%Y%m%d/%H%M")
        return f"traces/{minute}/traces_{self._uuid7()}.binpb"


def make_run(runs: Path, name: str = "calc-20261129-120000", *, backend: str = "collect", **spec: Any) -> MadeUpRun:
    """The folder of a run that has begun and done nothing yet: 2 tasks of 2 rollouts in a step, 4 to validate on."""
    folder = RunFolder(runs.resolve() / name)
    for path in (folder.configs, folder.resolved, folder.logs, folder.store, folder.secrets):
        path.mkdir(parents=True)
    for credential in ("queue", "gateway-admin"):
        folder.credential(credential)
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(10)]
    run = {
        "apiVersion": names.API_VERSION,
        "kind": "TrainingRun",
        "metadata": {"name": "calc"},
        "spec": {
            "policies": [{"name": "policy", "model": {"path": "model"}}],
            "tasks": {"train": {"inline": rows}, "validation": {"inline": rows[:4]}, "hiddenFields": ["answer"]},
            "rollouts": {"poolRef": {"name": "pool"}, "groupSize": 2, "minGroupSize": 1, "tasksPerStep": 2},
            "trainer": {"backend": backend, "device": "cpu"},
            "inference": {"backend": "cpu"},
            "steps": 2,
            **spec,
        },
    }
    pool = {
        "apiVersion": names.API_VERSION,
        "kind": "RolloutPool",
        "metadata": {"name": "pool"},
        "spec": {
            "template": {"spec": {"containers": [{"name": "agent", "image": "a", "command": ["agent"]}]}},
            "agentProtocol": {"task": {"from": "stdin", "format": "text", "field": "question"}},
            "reward": {"source": "builtin", "builtin": {"kind": "exactMatch", "expectedField": "answer"}},
        },
    }
    resource = TrainingRun.model_validate_json(json.dumps(run))
    config = TrainerConfig(
        run=name,
        spec=resource.spec,
        pool=RolloutPool.model_validate_json(json.dumps(pool)).spec,
        store=DirectoryStoreConfig(kind="directory", path=folder.store),
        folder=folder.root,
        model=runs / "model" if backend == "verl" else None,
        policy_servers=("http://127.0.0.1:9",) if backend == "verl" else (),
        queue={"port": 9},
        queue_credential_file=folder.secrets / "queue",
        gateway_credential_file=folder.secrets / "gateway-admin",
        gateways=("http://127.0.0.1:9",),
    )
    (folder.configs / "trainer.json").write_text(config.model_dump_json(by_alias=True))
    (folder.resolved / "trainingrun.yaml").write_text(json.dumps(resource.manifest()))
    store = DirectoryStore(folder.store)
    store.put("state/incarnations/000001.json", b"{}")
    return MadeUpRun(folder, config, store)


def _update(step: int) -> UpdateMetrics:
    return UpdateMetrics(
        step=step,
        updates=2,
        loss=(0.1, 0.05),
        grad_norm=(0.5, 0.4),
        learning_rate=1e-3,
        entropy=1.0 / step,
        clip_fraction=0.01,
        policy_kl=1e-4,
        rows=4,
        tokens=100,
        trained_tokens=40,
        agreement=Agreement(tokens=40, correlation=0.999999, kl_k1=1e-6, kl_k3=2e-6, largest_difference=1e-5),
        seconds={},
        raw={},
    )


MODES: tuple[Mode, ...] = ("train", "validation-greedy", "validation-sampled")
