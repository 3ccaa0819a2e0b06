"""Isolation Worker: the pods that pull rollouts from the queue, `replicas` of them for each run.

They are a Deployment. A Job in the work-queue pattern (no completions) would say better what they are, but the Job
controller (Kubernetes 1.34.4, pkg/controller/job) delays every new pod by 10 s x 2^(n-1), at most 10 minutes, where n
counts all pods that failed since one last succeeded. There is one count for the whole Job; a pod that
`podFailurePolicy` ignores counts as well (`getNewFinishedPods` does not look at the policy), and in a work queue no pod
may succeed before the end, since after the first success none is created any more. So each worker that is drained,
evicted or out of memory makes the next replacement slower, for as long as the run lasts. Measured with a real control
plane, 4 pods, exit 143 and DisruptionTarget ignored:

                                         Job                       Deployment
    replaced after eviction 1, 2, … 5    12, 21, 42, 81, 161 s     at once
    scaled 4 → 1 → 4, drained between    600 s                     0.6 s

With a Deployment, besides: a launcher or an agent's container that ends is started again in its pod, and a change of
the workers (rolloutsPerWorker, a new version) drains them one part after the other instead of being refused.

Scaling in: the pods too many get TERM, lease nothing more, and have `terminationGracePeriodSeconds` for what they run;
they are no longer counted, so that scaling out again does not wait for them. At the end of a run the workers end with
0 and are started again (with the kubelet's growing pauses) until the operator, which sees the same end, deletes them.
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
