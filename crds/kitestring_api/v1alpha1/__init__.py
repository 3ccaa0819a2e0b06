"""The API `kitestring.dev/v1alpha1`: TrainingRun and RolloutPool."""

from kitestring_api.v1alpha1.rollout_pool import RolloutPool, RolloutPoolSpec
from kitestring_api.v1alpha1.training_run import TrainingRun, TrainingRunSpec

__all__ = ["RolloutPool", "RolloutPoolSpec", "TrainingRun", "TrainingRunSpec"]
