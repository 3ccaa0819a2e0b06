"""Isolation Worker: the pods that pull rollouts from the queue, `replicas` of them for each run.

They are a Deployment. As a Job in the work-queue pattern their replacements would come ever later: the Job controller
delays new pods by the number of all that failed since the last success, ignored or not, and no worker may succeed
before the end. Figures: docs/decisions/0004-workers-are-a-deployment.md.

Scaling in: the pods too many get TERM, lease nothing more, and have `terminationGracePeriodSeconds` for what they run;
they no longer count, so that scaling out again does not wait for them. At the end of a run workers wait a while
for the operator, which sees the same end and deletes them; if it is away they end with 0 and are started again, with
the kubelet's growing pauses.
"""

from __future__ import annotations

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.observed import Manifest, RunContext
from kitestring_operator.rollouts.pod import WorkerFiles, rollout_pod
from kitestring_operator.rollouts.worker_config import worker_config


def workers(context: RunContext) -> Manifest:
    """Deployment RUN-rollout. Raises OverlayRefusedError."""
    template = rollout_pod(context, WorkerFiles.of_run(context))
    metadata = template["metadata"]
    # a worker reads its config once: pods with another one are other pods
    config = {"metadata": {}, "data": worker_config(context)}
    metadata["annotations"] = metadata.get("annotations", {}) | {names.ANNOTATION_SPEC_HASH: identity.spec_hash(config)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": identity.metadata(
            context,
            identity.worker_job_name(context.name),
            names.COMPONENT_ROLLOUT,
            {names.LABEL_POOL: context.pool_name},
        ),
        "spec": {
            "replicas": context.pool.replicas,
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": identity.selector(context, names.COMPONENT_ROLLOUT)},
            # none beyond what was asked for: machines for more may not be there
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "50%"}},
            "template": template,
        },
    }
