"""How well the policy that was sampled is the policy that is trained. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kitestring_trainer.learner import Agreement


def agreement(
    sampler: npt.NDArray[np.floating], trainer: npt.NDArray[np.floating], counted: npt.NDArray[np.bool_]
) -> Agreement:
    """Compare log-probabilities [tokens] of the sampler and the trainer, over the tokens in `counted` [tokens]."""
    s, t = sampler[counted].astype(np.float64), trainer[counted].astype(np.float64)
    if not len(s):
        return Agreement(0, None, None, None, None)
    away = t - s
    return Agreement(
        tokens=len(s),
        correlation=_correlation(np.exp(s), np.exp(t)),
        kl_k1=float(-away.mean()),
        kl_k3=float((np.expm1(away) - away).mean()),
        largest_difference=float(np.abs(away).max()),
    )


def _correlation(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float | None:
    """Pearson's; None where it is not defined: one token, or all probabilities the same (up to rounding)."""
    if len(x) < 2 or min(np.ptp(x), np.ptp(y)) < 1e-6:
        return None
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))
