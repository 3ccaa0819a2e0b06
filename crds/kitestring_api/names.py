"""Every name that crosses a process or a folder: API group, labels, reasons, environment variables, routes, prefixes.

Nothing else in the tree spells one of these as a literal.
"""

from __future__ import annotations

from typing import Final

# --- API ---------------------------------------------------------------------------------------------------------

GROUP: Final = "kitestring.dev"
"""API group of both resources, and the prefix of every label and annotation."""
VERSION: Final = "v1alpha1"
"""The only served version."""
API_VERSION: Final = f"{GROUP}/{VERSION}"
"""What `apiVersion` of both resources says."""
KIND_TRAINING_RUN: Final = "TrainingRun"
"""Kind of a run."""
KIND_ROLLOUT_POOL: Final = "RolloutPool"
"""Kind of a pool."""

# --- Labels and annotations ------------------------------------------------------------------------------------------
# On every object that the operator makes. LABEL_APP* are the labels that Kubernetes recommends.

LABEL_APP: Final = "app.kubernetes.io/part-of"
"""Kubernetes' label for the application that an object is part of."""
LABEL_APP_VALUE: Final = "kitestring"
"""What LABEL_APP says on every object of ours."""
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
"""Kubernetes' label for what manages an object."""
LABEL_MANAGED_BY_VALUE: Final = "kitestring-operator"
"""Also the field manager of server-side apply."""
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
"""One of the COMPONENT_* values."""
LABEL_RUN: Final = f"{GROUP}/run"
"""Name of the TrainingRun that an object belongs to."""
LABEL_POOL: Final = f"{GROUP}/pool"
"""Name of the RolloutPool whose agent a pod runs."""
LABEL_POLICY: Final = f"{GROUP}/policy"
"""Name of the policy that a policy server serves."""
LABEL_ROLLOUT: Final = f"{GROUP}/rollout"
"""Id of the rollout that a Job runs (isolation: Job)."""
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""Kueue's own label for the local queue."""
ANNOTATION_SPEC_HASH: Final = f"{GROUP}/spec-hash"
"""Digest of what an object was made from; equal: nothing is written."""
ANNOTATION_RUN_ID: Final = f"{GROUP}/run-id"
"""Identity of the run in object storage: its name and the start of its uid, so that a namesake finds no old state."""
ANNOTATION_TRAINER_NUMBER: Final = f"{GROUP}/trainer-number"
"""On a trainer Job: which one of the run it is, from 1."""
ANNOTATION_RESTARTS: Final = f"{GROUP}/restarts"
"""On a trainer Job: how many trainers of the run had ended before it for a cause that counts."""
ANNOTATION_DISRUPTIONS: Final = f"{GROUP}/disruptions"
"""On a trainer Job: how many trainers before it the cluster took away since the last new step."""
ANNOTATION_STEP: Final = f"{GROUP}/step"
"""On a trainer Job: the furthest step that the run had made before it."""
ANNOTATION_ROLLOUT: Final = f"{GROUP}/rollout"
"""Id of the rollout that a Job runs, in full (isolation: Job)."""
ANNOTATION_NUMBER: Final = f"{GROUP}/number"
"""Which attempt of its rollout a Job runs, from 1."""
ANNOTATION_TASK_IMAGE: Final = f"{GROUP}/task-image"
"""On such a Job: the image that the task asked for, where it asked for one."""

COMPONENT_TRAINER: Final = "trainer"
"""Pods that train and host the rollout queue."""
COMPONENT_POLICY_SERVER: Final = "policy-server"
"""Pods that serve a policy."""
COMPONENT_GATEWAY: Final = "gateway"
"""Pods between agents and models."""
COMPONENT_COLLECTOR: Final = "collector"
"""Pods that write traces to storage."""
COMPONENT_ROLLOUT: Final = "rollout"
"""Pods that run agents."""
COMPONENT_SCORER: Final = "scorer"
"""Pods that score rollouts."""
COMPONENTS: Final = (
    COMPONENT_TRAINER,
    COMPONENT_POLICY_SERVER,
    COMPONENT_GATEWAY,
    COMPONENT_COLLECTOR,
    COMPONENT_ROLLOUT,
    COMPONENT_SCORER,
)
"""All values of LABEL_COMPONENT."""

# --- Ports in a cluster -----------------------------------------------------------------------------------------------

PORT_AGENTS: Final = 8080
"""Gateway, the side of the agents."""
PORT_GATEWAY_ADMIN: Final = 8081
"""Gateway, the side of the trainer."""
PORT_COLLECTOR: Final = 4318
"""Collector: OTLP over HTTP."""
PORT_QUEUE: Final = 8090
"""Trainer: rollout queue and status of the run."""
PORT_POLICY: Final = 8000
"""Sidecar of a policy server: the only listener on the pod's address."""
PORT_SERVER: Final = 8001
"""The policy server itself, on the loopback interface of its pod."""
PORT_WORKER: Final = 8085
"""Worker: health."""
PORT_RAY: Final = 6379
"""Ray's head, between the trainer's pods."""
PORT_OPERATOR: Final = 8080
"""Operator: health and metrics."""

# --- Reasons ---------------------------------------------------------------------------------------------------------
# One word each, in `status.reason`, in conditions and in events. A closed set: scripts may compare with them.

REASON_ACCEPTED: Final = "Accepted"
"""The spec can be carried out."""
REASON_INVALID_SPEC: Final = "InvalidSpec"
"""The spec contradicts itself in a way that the schema cannot say; the message names the field."""
REASON_NOT_SUPPORTED: Final = "NotSupportedYet"
"""The spec asks for what this version cannot carry out (kitestring_api.unsupported)."""
REASON_POOL_NOT_FOUND: Final = "PoolNotFound"
"""`spec.rollouts.poolRef` names no pool of the namespace."""
REASON_REFERENCE_NOT_FOUND: Final = "ReferenceNotFound"
"""A Secret, ConfigMap, volume or checkpoint that the spec names is not there."""
REASON_ADMITTED: Final = "Admitted"
"""The queue has given the run its resources, or it asks for none."""
REASON_WAITING_FOR_QUEUE: Final = "WaitingForQueue"
"""The queue has not admitted the run."""
REASON_STARTING: Final = "Starting"
"""Parts are being started."""
REASON_RUNNING: Final = "Running"
"""Rollouts and updates go on."""
REASON_STALLED: Final = "Stalled"
"""No step has ended for much longer than steps of this run take."""
REASON_SUSPEND_REQUESTED: Final = "SuspendRequested"
"""`spec.suspend` is true."""
REASON_PREEMPTED: Final = "Preempted"
"""The queue took the resources back; the run goes on when it is admitted again."""
REASON_TRAINER_LOST: Final = "TrainerLost"
"""The trainer ended without finishing and is started again."""
REASON_IMAGE_PULL: Final = "ImagePull"
"""An image cannot be pulled; the message names image and pod."""
REASON_CONTAINER_START: Final = "ContainerStart"
"""A container cannot be made or started: what it refers to is not there, or its program; the message names both."""
REASON_SUSPENDED_BY_OTHERS: Final = "SuspendedByOthers"
"""Something in the cluster suspended the trainer's Job; the message names what, and the remedy."""
REASON_SCORER_UNREACHABLE: Final = "ScorerUnreachable"
"""The pool's scorer accepts no connection."""
REASON_STORAGE_UNAVAILABLE: Final = "StorageUnavailable"
"""Object storage does not answer, or refuses."""
REASON_PROBABILITIES_DIVERGE: Final = "ProbabilitiesDiverge"
"""Policy servers and trainer disagree about the probabilities of sampled tokens: what is sampled is not what is
trained."""
REASON_STEPS_SKIPPED: Final = "StepsSkipped"
"""Too many steps in a row had no group to learn from (`failurePolicy.maxSkippedSteps`)."""
REASON_TOO_MANY_RESTARTS: Final = "TooManyRestarts"
"""The trainer was lost more often than `failurePolicy.maxRestarts`."""
REASON_DEADLINE_EXCEEDED: Final = "DeadlineExceeded"
"""`activeDeadlineSeconds` is over."""
REASON_INVALID_TASKS: Final = "InvalidTasks"
"""A task file is empty or unreadable, or no row has the fields that the spec names."""
REASON_ERROR: Final = "Error"
"""The trainer failed; `status.lastError` has its last lines."""
REASON_INTERRUPTED: Final = "Interrupted"
"""Ended by the user (local runs)."""
REASON_COMPLETED: Final = "Completed"
"""All steps are done and the checkpoint is written."""

# --- Environment of an agent ---------------------------------------------------------------------------------------
# What an agent process finds in its environment. The OPENAI_* and OTEL_* names belong to those projects.

ENV_OPENAI_BASE_URL: Final = "OPENAI_BASE_URL"
"""Where the agent's OpenAI client sends its calls: the attempt's base URL and /v1."""
ENV_OPENAI_API_BASE: Final = "OPENAI_API_BASE"
"""The older name of OPENAI_BASE_URL, still read by many clients."""
ENV_OPENAI_API_KEY: Final = "OPENAI_API_KEY"
"""The attempt's token: base URL and key both carry it, so that either suffices."""
ENV_OPENAI_MODEL: Final = "OPENAI_MODEL"
"""Name of the policy that is trained."""
ENV_BASE_URL: Final = "KITESTRING_BASE_URL"
"""The attempt's base URL without a version: `{base}/v1`, `{base}/rewards`, `{base}/otlp` lie below it."""
ENV_MODEL: Final = "KITESTRING_MODEL"
"""The same as OPENAI_MODEL, for agents that do not use OpenAI's names."""
ENV_TASK: Final = "KITESTRING_TASK"
"""The task itself, when the pool delivers it by environment."""
ENV_TASK_FILE: Final = "KITESTRING_TASK_FILE"
"""Path of the task, when the pool delivers it by file."""
ENV_OUTPUT_FILE: Final = "KITESTRING_OUTPUT_FILE"
"""Where the agent writes its output, when the pool reads it back from a file."""
ENV_RUN: Final = "KITESTRING_RUN"
"""Identity of the run, for the agent's own logs."""
ENV_ROLLOUT: Final = "KITESTRING_ROLLOUT"
"""Identity of the rollout, for the agent's own logs."""
ENV_ATTEMPT: Final = "KITESTRING_ATTEMPT"
"""Identity of the attempt, for the agent's own logs."""
ENV_STEP: Final = "KITESTRING_STEP"
"""Step that the rollout belongs to."""
ENV_MODE: Final = "KITESTRING_MODE"
"""One of MODE_TRAIN, MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED, MODE_TRY."""
ENV_TRACEPARENT: Final = "TRACEPARENT"
"""W3C trace context: the agent's own spans become children of the attempt."""
ENV_OTEL_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""Where the agent's own spans go: the attempt's base URL and /otlp."""
ENV_OTEL_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
"""Encoding of the agent's own spans: http/protobuf."""
ENV_OTEL_RESOURCE: Final = "OTEL_RESOURCE_ATTRIBUTES"
"""Resource attributes of the agent's own spans."""
ENV_OTEL_SERVICE: Final = "OTEL_SERVICE_NAME"
"""Service name of the agent's own spans."""
AGENT_ENV_RESERVED: Final = (
    ENV_OPENAI_BASE_URL,
    ENV_OPENAI_API_BASE,
    ENV_OPENAI_API_KEY,
    ENV_TRACEPARENT,
    ENV_OTEL_ENDPOINT,
    ENV_OTEL_PROTOCOL,
)
"""What a pool's template must not set, since Kitestring does; nor anything that starts with AGENT_ENV_PREFIX."""
AGENT_ENV_PREFIX: Final = "KITESTRING_"
"""Beginning of all variables of ours in the environment of an agent."""

MODE_TRAIN: Final = "train"
"""A rollout whose calls are trained on."""
MODE_VALIDATION_GREEDY: Final = "validation-greedy"
"""A rollout that validates at temperature 0."""
MODE_VALIDATION_SAMPLED: Final = "validation-sampled"
"""A rollout that validates as it is sampled in training."""
MODE_TRY: Final = "try"
"""A rollout of `kitestring try`."""

# --- Environment of Kitestring's own processes ---------------------------------------------------------------------

ENV_LOG_LEVEL: Final = "KITESTRING_LOG_LEVEL"
"""Level of the log of every process: debug, info, warning, error."""
ENV_QUEUE_CREDENTIAL_FILE: Final = "KITESTRING_QUEUE_CREDENTIAL_FILE"
"""Path of the credential of the rollout queue."""
ENV_S3_ACCESS_KEY: Final = "AWS_ACCESS_KEY_ID"
"""Access key of object storage, by the name that every S3 client reads."""
ENV_S3_SECRET_KEY: Final = "AWS_SECRET_ACCESS_KEY"  # noqa: S105 -- the name of a variable
"""Secret key of object storage, by the name that every S3 client reads."""

ENV_PARENT_FD: Final = "KITESTRING_PARENT_FD"
"""Descriptor of a pipe whose other end the parent holds: when it closes, the process ends all it started and itself."""

# --- Routes: gateway, the side of the agents -----------------------------------------------------------------------

ROUTE_ATTEMPT: Final = "/r/{token}"
"""Base URL of an attempt; everything below is also served without it when the token comes as API key."""
ROUTE_CHAT: Final = "/v1/chat/completions"
"""OpenAI Chat Completions."""
ROUTE_COMPLETIONS: Final = "/v1/completions"
"""OpenAI Completions."""
ROUTE_MODELS: Final = "/v1/models"
"""Names of the models that the agent may ask for."""
ROUTE_REWARDS: Final = "/rewards"
"""Where an agent posts its reward, below the attempt's base URL."""
ROUTE_AGENT_TRACES: Final = "/otlp/v1/traces"
"""Where an agent's own spans arrive, below the attempt's base URL."""
ROUTE_HEALTH: Final = "/health"
"""Whether a process serves; every part that listens has it: gateway (both sides), collector, policy server, queue."""
ROUTE_READY: Final = "/ready"
"""Whether a part is to be sent work: gateway (not while it drains), collector (its store answers), policy server's
sidecar (its server serves the current version)."""
ROUTE_METRICS: Final = "/metrics"
"""Metrics in Prometheus' text format: of gateway (the trainer's side), collector and policy server. The trainer's and
the workers' figures are in the run's status and in its metrics.jsonl."""

# --- Routes: gateway, the side of the trainer (own port, bearer credential) ----------------------------------------

ROUTE_ADMIN_STATUS: Final = "/admin/v1/status"
"""GET: epoch, attempts, policies of the gateway process."""
ROUTE_ADMIN_ATTEMPTS: Final = "/admin/v1/attempts"
"""POST: open an attempt. GET: the attempts that the process holds."""
ROUTE_ADMIN_FENCE: Final = "/admin/v1/attempts/{attempt}/fence"
"""POST: admit no further call of an attempt, abort those in flight, await acknowledgements."""
ROUTE_ADMIN_END: Final = "/admin/v1/attempts/{attempt}/end"
"""POST: write the end record of a fenced attempt."""
ROUTE_ADMIN_HOLD: Final = "/admin/v1/policies/{policy}/hold"
"""POST: hold calls to a policy while its weights change."""
ROUTE_ADMIN_RELEASE: Final = "/admin/v1/policies/{policy}/release"
"""POST: let held calls go on."""
ROUTE_ADMIN_SERVERS: Final = "/admin/v1/policies/{policy}/servers"
"""PUT: the addresses of a policy's servers, which may change while a run goes on."""
ROUTE_ADMIN_DRAIN: Final = "/admin/v1/drain"
"""POST: refuse new attempts; the process is to end."""

# --- Routes: collector ---------------------------------------------------------------------------------------------

ROUTE_OTLP_TRACES: Final = "/v1/traces"
"""OTLP over HTTP of the trusted pipeline."""
ROUTE_OTLP_AGENT_TRACES: Final = "/agent/v1/traces"
"""OTLP over HTTP of the untrusted pipeline: lands below PREFIX_AGENT."""

# --- Routes: rollout queue (bearer credential) ---------------------------------------------------------------------

ROUTE_QUEUE_LEASE: Final = "/queue/v1/lease"
"""POST: lease a rollout, long-polled."""
ROUTE_QUEUE_HEARTBEAT: Final = "/queue/v1/leases/{lease}/heartbeat"
"""POST: keep a lease."""
ROUTE_QUEUE_FINISH: Final = "/queue/v1/leases/{lease}/finish"
"""POST: say how the agent of a lease ended."""
ROUTE_QUEUE_WANTED: Final = "/queue/v1/wanted"
"""GET ?limit=: rollouts that wait for an executor of their own (isolation: Job), each with a credential for it."""
ROUTE_QUEUE_LOST: Final = "/queue/v1/rollouts/{rollout}/lost"
"""POST: the executor of a rollout ended without a word; what the cluster knows of it."""
ROUTE_RUN_STATUS: Final = "/run/v1/status"
"""GET: step, phase and counters of the run."""
ROUTE_RUN_LIVE: Final = "/run/v1/live"
"""PUT: what may change while a run goes on: its steps, the addresses of policy servers and gateways."""

# --- Routes: policy server -----------------------------------------------------------------------------------------
# vLLM's own names, below the same ROUTE_CHAT, ROUTE_COMPLETIONS, ROUTE_MODELS, ROUTE_HEALTH, ROUTE_METRICS. Only the
# trainer calls them; no agent can reach them.

ROUTE_SERVER_PAUSE: Final = "/pause"
"""POST ?mode=keep|wait|abort: generate no further token until ROUTE_SERVER_RESUME."""
ROUTE_SERVER_RESUME: Final = "/resume"
"""POST: generate again."""
ROUTE_SERVER_IS_PAUSED: Final = "/is_paused"
"""GET: whether the server is paused."""
ROUTE_SERVER_RPC: Final = "/collective_rpc"
"""POST {"method": "reload_weights", "kwargs": {"weights_path": …}}: load a version of the weights in place."""
ROUTE_SERVER_RESET_CACHE: Final = "/reset_prefix_cache"
"""POST: forget cached prefixes, which belong to the old weights."""
ROUTE_SERVER_VERSION: Final = "/update_weight_version"
"""POST {"new_version": …}: what the server reports as the version of tokens from now on."""
ROUTE_SERVER_INFO: Final = "/weight_info"
"""GET: the version that the server serves."""

# --- Routes: sidecar of a policy server (bearer credential of the trainer) -----------------------------------------

ROUTE_SIDECAR_WEIGHTS: Final = "/kitestring/v1/weights"
"""POST {"version"}: fetch, verify and serve a version. GET: the version served, the process epoch of the server."""
ROUTE_SIDECAR_STARTUP: Final = "/startup"
"""Whether the weights lie there on which the server starts: startup probe of the sidecar."""
ROUTE_SIDECAR_SERVER_HEALTH: Final = "/server/health"
"""The server's own ROUTE_HEALTH, for probes of its container: it listens on the loopback interface only."""

# --- Headers -------------------------------------------------------------------------------------------------------

HEADER_AGENT: Final = "X-Kitestring-Agent"
"""Name of the (sub-)agent that makes a call; a label for `algorithm.select.agents`, never an identity."""
HEADER_IDEMPOTENCY: Final = "Idempotency-Key"
"""A call with a key that was seen before is replayed or joined, and takes no new number."""
HEADER_RETRY_COUNT: Final = "X-Stainless-Retry-Count"
"""Sent by the OpenAI and Anthropic clients: above 0 the call repeats an earlier one."""
HEADER_POLICY_VERSION: Final = "X-Kitestring-Policy-Version"
"""Set by a policy server's sidecar where the server itself cannot report versions per token."""

# --- Object storage, below the run's prefix ------------------------------------------------------------------------

PREFIX_TRACES: Final = "traces/"
"""Gateway spans, put by the collector."""
PREFIX_AGENT: Final = "agent/"
"""Agents' own spans: untrusted."""
PREFIX_STATE: Final = "state/"
"""Plans, commits, samples, incarnations, put by the trainer."""
PREFIX_WEIGHTS: Final = "weights/"
"""Versions of the policy's weights, put by the trainer, read by policy servers."""
PREFIX_CHECKPOINTS: Final = "checkpoints/"
"""Exported models and resumable state, put by the trainer."""

# --- Failure classes of an attempt (design: docs/architecture.md, "Failure classes") -------------------------------

CLASS_SUCCEEDED: Final = "Succeeded"
"""The agent ended well and its attempt is complete."""
CLASS_AGENT_FAILED: Final = "AgentFailed"
"""The agent ended with an error of its own."""
CLASS_TIMED_OUT: Final = "TimedOut"
"""The agent ran out of time."""
CLASS_INFRASTRUCTURE: Final = "Infrastructure"
"""Not the agent's doing: retried, then excluded from baseline and loss."""
CLASS_INVALID_TASK: Final = "InvalidTask"
"""The task cannot be given to any agent: never retried, reported once."""
CLASSES: Final = (CLASS_SUCCEEDED, CLASS_AGENT_FAILED, CLASS_TIMED_OUT, CLASS_INFRASTRUCTURE, CLASS_INVALID_TASK)
"""All classes, the good one first."""

# --- Exit codes of the command line --------------------------------------------------------------------------------

EXIT_OK: Final = 0
"""Everything was done."""
EXIT_FAILED: Final = 1
"""The run failed, or a bug."""
EXIT_USER: Final = 2
"""The user can mend it: a bad file, a missing folder, a taken port."""
EXIT_RUN_FAILED: Final = 3
"""Trainer in a cluster: the run failed for a reason of its own; starting the trainer again does not help."""
EXIT_STOPPED: Final = 143
"""Trainer and launcher in a cluster: stopped by SIGTERM, the state is written, to be started again."""
EXIT_INTERRUPTED: Final = 130
"""Ended by Ctrl-C."""
