"""What an earlier life of the run left of a plan: which of its ended attempts count, and which are superseded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kitestring_trainer.commits import CommittedRollout, StepCommit
from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.incarnations import STOPPED, SUPERSEDED
from kitestring_trainer.plan import StepPlan
from kitestring_trainer.queue.proofs import Proof
from kitestring_trainer.queue.rollouts import Restored
from kitestring_trainer.queue.state import Ending, Final, Tries, replay
from kitestring_trainer.queue.verdict import judge, stale_version

REASON_TRACES_MISSING = "TracesMissing"


class Archive(Protocol):
    """Everything that the trace store holds."""

    def ended(self, since_unix: float, wanted: Callable[[str], bool]) -> Iterable[Proof]:
        """Attempts that are proven complete and were written after `since_unix`, of rollouts that are wanted."""


@dataclass(frozen=True, slots=True)
class Remains:
    """What is left of a plan: rollouts whose tries or ends are known, and attempts that are superseded."""

    restored: Mapping[str, Restored]
    superseded: tuple[str, ...]


def remains(plan: StepPlan, proofs: Iterable[Proof], accepted: Callable[[str], bool] | None, tries: Tries) -> Remains:
    """Replay the proven attempts of a plan that was not committed, in the order in which they were opened.

    Only attempts all of whose tokens come from `accepted` policy versions count (None: any). One that was ended because
    its trainer was gone had no end of its own: it is left out.
    """
    planned = set(plan.rollouts)
    endings: dict[str, list[tuple[Proof, Ending]]] = defaultdict(list)
    superseded: list[str] = []
    # Attempt ids are UUIDv7: their order is the order of time.
    for proof in sorted(proofs, key=lambda proof: proof.attempt):
        if proof.end.rollout not in planned or proof.end.reason in (STOPPED, SUPERSEDED):
            continue
        if accepted is not None and stale_version(proof.calls, accepted) is not None:
            superseded.append(proof.attempt)
        else:
            endings[proof.end.rollout].append((proof, judge(proof.end, proof.calls, accepted)))
    restored = {}
    for rollout, ended in endings.items():
        counts, final = replay(rollout, [(proof.attempt, ending) for proof, ending in ended], tries)
        last = None if final is None else next(proof for proof, _ in ended if proof.attempt == final.attempt)
        restored[rollout] = Restored(counts, final, last)
        superseded.extend(proof.attempt for proof, _ in ended[counts.total() :])
    return Remains(restored, tuple(superseded))


def recommitted(commit: StepCommit, proofs: Iterable[Proof], tries: Tries) -> Mapping[str, Restored]:
    """The rollouts of a commit, all of them final; what counted must be proven again, by the same N and digest.

    Raises RunFailedError when the traces of a counted rollout are gone.
    """
    found = {proof.attempt: proof for proof in proofs}
    restored = {}
    for rollout in commit.rollouts:
        proof = found.get(rollout.attempt or "")
        if rollout.excluded is None and not _same(rollout, proof):
            raise RunFailedError(
                REASON_TRACES_MISSING,
                f"{commit.name} was committed with attempt {rollout.attempt} of {rollout.rollout}, whose trace is "
                "not in storage any more: the update cannot be made again",
            )
        final = Final(rollout.rollout, rollout.attempt, _ending(rollout), rollout.tries)
        counts, _ = replay(rollout.rollout, [(rollout.attempt or "", final.ending)], tries)
        restored[rollout.rollout] = Restored(counts, final, proof)
    return restored


def _same(rollout: CommittedRollout, proof: Proof | None) -> bool:
    return proof is not None and (proof.end.n_calls, proof.end.digest) == (rollout.n_calls, rollout.digest)


def _ending(rollout: CommittedRollout) -> Ending:
    return Ending(
        klass=rollout.klass,
        reason=rollout.reason,
        reward=rollout.reward,
        reward_source=rollout.reward_source,
        epoch=rollout.epoch,
        n_calls=rollout.n_calls,
        digest=rollout.digest,
    )
