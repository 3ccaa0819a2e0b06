"""Whether a run can be carried out at all, and if not, what its user is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kitestring_api import names
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.observed import MissingReference, Observed

MESSAGE_LENGTH: Final = 4096
KUEUE_VERSIONS: Final = "0.15 or later (tested with 0.17)"
"""Those that serve the version of its API that is used here."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a run is not carried out: a reason of names.REASON_*, and what a reader is told."""

    reason: str
    message: str
    may_mend_itself: bool = False
    """Whether what is missing may come without an event that the operator hears of."""


def refusal(observed: Observed) -> Refusal | None:
    """What stands in the way, the user's own mistakes first; None: nothing."""
    mistakes = [line for line in observed.problems if line not in observed.unsupported]
    if observed.refused is not None:
        mistakes.append(observed.refused)
    if mistakes:
        return Refusal(names.REASON_INVALID_SPEC, _lines(mistakes))
    if observed.unsupported:
        return Refusal(names.REASON_NOT_SUPPORTED, _lines(list(observed.unsupported)))
    if observed.spec is not None and observed.pool is None:
        name = observed.spec.rollouts.pool_ref.name
        return Refusal(
            names.REASON_POOL_NOT_FOUND,
            f"spec.rollouts.poolRef: there is no RolloutPool {name} in namespace {observed.namespace}; create it, or "
            "name another",
        )
    if observed.missing:
        return Refusal(names.REASON_REFERENCE_NOT_FOUND, _lines([_said(entry) for entry in observed.missing]), True)
    if observed.unread:
        lines = [f"{line}; give the operator the right to read it, or mend what keeps it" for line in observed.unread]
        return Refusal(names.REASON_ERROR, _lines(lines), True)
    return None


def _said(missing: MissingReference) -> str:
    what = f"{missing.kind} {missing.name}"
    if missing.kind == names.KIND_TRAINING_RUN:
        return f"{missing.field}: {what} has no checkpoint yet; wait for it, or name another run"
    if missing.key is not None:
        return f"{missing.field}: {what} has no key {missing.key}; add it, or correct the name"
    if missing.kind == "PriorityClass":
        return f"{missing.field}: there is no {what}; create it, or correct the name"
    if not missing.is_kind_served:
        return (
            f"{missing.field}: found {missing.name}, and the cluster does not serve {KINDS[missing.kind].api_version}, "
            f"the API of Kueue; install Kueue {KUEUE_VERSIONS}, or remove the field"
        )
    if missing.kind == "LocalQueue":
        return f"{missing.field}: there is no {what} of Kueue in the namespace; create it, or correct the name"
    return f"{missing.field}: there is no {what} in the namespace; create it, or correct the name"


def _lines(lines: list[str]) -> str:
    text = "\n".join(lines)
    return text if len(text) <= MESSAGE_LENGTH else text[: MESSAGE_LENGTH - 2] + " …"
