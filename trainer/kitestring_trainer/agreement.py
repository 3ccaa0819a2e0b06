"""Is the policy that was sampled the policy that is trained? The bounds, and what follows from leaving them."""

from __future__ import annotations

from dataclasses import dataclass

from kitestring_api.names import REASON_PROBABILITIES_DIVERGE
from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.learner import Agreement

STEPS_TO_FAIL = 3
"""Steps in a row outside the bounds that fail the run."""


@dataclass(frozen=True, slots=True)
class AgreementBounds:
    """The defaults are for float32 on both sides."""

    correlation: float = 0.999
    kl_nats: float = 0.002
    difference_nats: float = 0.001
    """Where no token differs by more, the two agree, whatever the correlation: that of a policy that has become nearly
    certain of every token is rounding noise."""


BOUNDS = {"float32": AgreementBounds(), "bfloat16": AgreementBounds(0.99, 0.01, 0.001)}
"""By the type of the pushed weights. Those of bfloat16 are guesses until they are measured on a GPU."""


class AgreementWatch:
    """Follows a run's steps."""

    def __init__(self, bounds: AgreementBounds) -> None:
        self._bounds = bounds
        self._outside = 0

    @property
    def degraded(self) -> bool:
        return self._outside > 0

    def note(self, step: int, agreement: Agreement) -> str | None:
        """What is wrong at this step; None when nothing is. A step without tokens to compare says nothing.

        Raises RunFailedError at the third wrong step in a row.
        """
        problem = disagreement(agreement, self._bounds)
        if problem is None:
            self._outside = self._outside if agreement.tokens == 0 else 0
            return None
        self._outside += 1
        if self._outside >= STEPS_TO_FAIL:
            raise RunFailedError(
                REASON_PROBABILITIES_DIVERGE, f"{STEPS_TO_FAIL} steps in a row, step {step}: {problem}"
            )
        return problem


def disagreement(agreement: Agreement, bounds: AgreementBounds) -> str | None:
    """Why policy servers and trainer do not agree on the probabilities of sampled tokens; None when they do."""
    if agreement.tokens == 0:
        return None
    if agreement.largest_difference is not None and agreement.largest_difference <= bounds.difference_nats:
        return None
    if agreement.kl_k3 is not None and not agreement.kl_k3 <= bounds.kl_nats:
        return f"mean KL of sampler and trainer is {agreement.kl_k3:.3g} nats, bound {bounds.kl_nats:g}"
    if agreement.correlation is not None and not agreement.correlation >= bounds.correlation:
        return (
            f"correlation of sampled tokens' probabilities at sampler and trainer is {agreement.correlation:.6f}, "
            f"bound {bounds.correlation:g}"
        )
    return None
