"""When and how often: validation, checkpoints, what counts as failure, queueing."""

from pydantic import Field

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import Name, Token


class Validation(ApiModel):
    """When the policy is validated on `tasks.validation`, and how. Without such tasks nothing is validated."""

    rules = (
        Rule(
            "self.greedy || self.sampled",
            "spec.validation needs greedy or sampled",
            "set one of them to true; to validate never, set before and after to false and every to 0",
            field=".sampled",
        ),
    )

    before: bool = Field(True, description="Validate before the first step.")
    every: int = Field(0, ge=0, le=1_000_000, description="Validate after every so many steps; 0: not in between.")
    after: bool = Field(True, description="Validate after the last step.")
    sampled_repeats: int = Field(1, ge=1, le=256, description="Sampled rollouts of each task.")
    greedy: bool = Field(True, description="One rollout of each task at temperature 0.")
    sampled: bool = Field(True, description="Rollouts of each task sampled as in training.")


class Checkpoints(ApiModel):
    """Exported models (Hugging Face folders), and the state from which a run resumes."""

    every: int = Field(
        20, ge=0, le=1_000_000, description="Export the model after every so many steps; 0: after the last step only."
    )
    keep: int = Field(3, ge=1, le=10_000, description="Exported models that are kept, the latest ones.")
    resume_every: int = Field(
        1, ge=1, le=1_000_000, description="Write the state from which the run resumes after every so many steps."
    )


class FailurePolicy(ApiModel):
    """What ends a run as failed."""

    max_skipped_steps: int = Field(
        3, ge=1, le=1_000_000, description="Steps in a row without a group to learn from that fail the run."
    )
    max_restarts: int = Field(3, ge=0, le=1_000_000, description="Restarts of the trainer; one more fails the run.")


class Scheduling(ApiModel):
    """How a cluster admits the run."""

    queue_name: Name | None = Field(
        None, description="Local queue of Kueue (0.15 or later); absent: the run starts at once."
    )
    priority_class_name: Token | None = Field(None, description="Priority class of its pods and of its workload.")
