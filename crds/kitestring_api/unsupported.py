"""What the API can say and this version cannot carry out: refused with a reason, never ignored.

One table. The command line checks it before a run, the operator sets a condition from it; the reference prints it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kitestring_api import names
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun


@dataclass(frozen=True)
class NotYet:
    """A value that is refused: `path` in documents of `kind`, with `[*]` for every item of a list.

    `refuses` gets the value at `path` (plain data, defaults filled in; absent ones are not asked about). `values` says
    in words what it refuses, `allowed` what is carried out, `reason` why, `remedy` what to write. `part` is the
    offending field below `path`, where that is narrower than what `refuses` must see.
    """

    kind: str
    path: str
    values: str
    refuses: Callable[[Any], bool]
    allowed: str
    reason: str
    remedy: str
    part: str = ""

    @property
    def where(self) -> str:
        """Path of the offending field, with `[*]`."""
        return f"{self.path}.{self.part}" if self.part else self.path


@dataclass(frozen=True)
class Refusal:
    """A value found in a document that this version cannot carry out. `path` has the index of each item."""

    entry: NotYet
    path: str
    value: object

    @property
    def message(self) -> str:
        """One line for a reader."""
        return f"{self.path}: {self.value!r} is not supported yet: {self.entry.reason}; {self.entry.remedy}"


def _is_not(*supported: object) -> Callable[[Any], bool]:
    return lambda value: value not in supported


def _is_positive(value: float) -> bool:
    return value > 0


def _has_no_keys(place: dict[str, Any]) -> bool:
    return "credentialsSecretRef" not in place


_KEYS_ALONE = "object storage is opened with keys from Secrets, not with the identity of a pod"
_KEYS_REMEDY = "name a Secret with the keys accessKeyId and secretAccessKey in credentialsSecretRef"

NOT_YET: tuple[NotYet, ...] = (
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.policies",
        "more than one with train: true",
        lambda policies: sum(policy["train"] for policy in policies) > 1,
        "one policy with train: true",
        "a run trains one policy",
        "set train: false on all but one, or make a run for each",
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.policies[*]",
        "any, with train: false",
        lambda policy: not policy["train"] and "model" in policy,
        "endpoint",
        "policy servers serve the trained policy only",
        "serve the frozen model yourself (vLLM, or any service with the OpenAI API) and write endpoint",
        part="model",
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.rollouts.async.maxStaleness",
        "more than 0",
        _is_positive,
        "0",
        "every step waits for its rollouts",
        "set maxStaleness: 0",
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.rollouts.refill",
        "true",
        bool,
        "false",
        "a skipped group is not replaced by another task",
        "set refill: false",
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.algorithm.advantage",
        "gae",
        _is_not("grpo", "rloo", "reinforce++", "reinforce++-baseline"),
        "grpo, rloo, reinforce++, reinforce++-baseline",
        "advantages are made from the rewards of a group, without a critic",
        "use one of the others",
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.algorithm.loss.kind",
        "cispo, gspo",
        _is_not("ppo"),
        "ppo",
        "only the clipped loss is normalised per rollout",
        "use kind: ppo",
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.algorithm.credit.kind",
        "discounted, perCall",
        _is_not("identical"),
        "identical",
        "every call gets the reward of its rollout",
        "use kind: identical",
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.algorithm.intermediateRewards",
        "any",
        lambda _: True,
        "absent",
        "rewards of single calls are not read",
        "remove intermediateRewards and reward the whole rollout",
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.trainer.mode",
        "managed",
        _is_not("external"),
        "external",
        "weights are pushed to policy servers apart from the trainer",
        "use mode: external",
    ),
    *(
        NotYet(
            names.KIND_TRAINING_RUN,
            path,
            "without credentialsSecretRef",
            _has_no_keys,
            "with credentialsSecretRef",
            _KEYS_ALONE,
            _KEYS_REMEDY,
        )
        for path in ("spec.policies[*].model.s3", "spec.tasks.train.s3", "spec.tasks.validation.s3")
    ),
    NotYet(
        names.KIND_TRAINING_RUN,
        "spec.storage",
        "without credentialsSecretRef, unless credentials names all four",
        lambda storage: _has_no_keys(storage) and len(storage.get("credentials", {})) < 4,
        "credentialsSecretRef, or credentials with traces, agent, weights and trainer",
        _KEYS_ALONE,
        _KEYS_REMEDY,
    ),
)
"""The table. An entry goes when the version carries the value out."""


def refusals(document: TrainingRun | RolloutPool) -> tuple[Refusal, ...]:
    """Everything in `document` that this version cannot carry out, in the order of the table."""
    data = document.manifest()
    found = []
    for entry in NOT_YET:
        if entry.kind != document.kind:
            continue
        for path, value in _values_at(data, entry.path):
            if entry.refuses(value):
                offending = value[entry.part] if entry.part else value
                found.append(Refusal(entry, f"{path}.{entry.part}" if entry.part else path, offending))
    return tuple(found)


def _values_at(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(concrete path, value) for everything that `path` names; nothing for what is absent."""
    places: list[tuple[str, Any]] = [("", data)]
    for step in path.split("."):
        name, every = (step[:-3], True) if step.endswith("[*]") else (step, False)
        places = [(f"{where}.{name}".lstrip("."), value[name]) for where, value in places if name in value]
        if every:
            places = [(f"{where}[{index}]", item) for where, items in places for index, item in enumerate(items)]
    yield from places
