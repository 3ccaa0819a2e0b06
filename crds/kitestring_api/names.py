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
KIND_TRAINING_RUN: Final = "TrainingRun"
KIND_ROLLOUT_POOL: Final = "RolloutPool"

# --- Environment of an agent ---------------------------------------------------------------------------------------
# What an agent process finds in its environment. The OPENAI_* and OTEL_* names belong to those projects.

ENV_OPENAI_BASE_URL: Final = "OPENAI_BASE_URL"
ENV_OPENAI_API_BASE: Final = "OPENAI_API_BASE"
"""The older name of OPENAI_BASE_URL, still read by many clients."""
ENV_OPENAI_API_KEY: Final = "OPENAI_API_KEY"
"""The attempt's token: base URL and key both carry it, so that either suffices."""
ENV_OPENAI_MODEL: Final = "OPENAI_MODEL"
"""Name of the policy that is trained."""
ENV_BASE_URL: Final = "KITESTRING_BASE_URL"
"""The attempt's base URL without a version: `{base}/v1`, `{base}/rewards`, `{base}/otlp` lie below it."""
ENV_MODEL: Final = "KITESTRING_MODEL"
ENV_TASK: Final = "KITESTRING_TASK"
"""The task itself, when the pool delivers it by environment."""
ENV_TASK_FILE: Final = "KITESTRING_TASK_FILE"
"""Path of the task, when the pool delivers it by file."""
ENV_OUTPUT_FILE: Final = "KITESTRING_OUTPUT_FILE"
"""Where the agent writes its output, when the pool reads it back from a file."""
ENV_RUN: Final = "KITESTRING_RUN"
ENV_ROLLOUT: Final = "KITESTRING_ROLLOUT"
ENV_ATTEMPT: Final = "KITESTRING_ATTEMPT"
ENV_STEP: Final = "KITESTRING_STEP"
ENV_MODE: Final = "KITESTRING_MODE"
"""One of MODE_TRAIN, MODE_VALIDATION_GREEDY, MODE_VALIDATION_SAMPLED, MODE_TRY."""
ENV_TRACEPARENT: Final = "TRACEPARENT"
ENV_OTEL_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
ENV_OTEL_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_PROTOCOL"
ENV_OTEL_RESOURCE: Final = "OTEL_RESOURCE_ATTRIBUTES"
ENV_OTEL_SERVICE: Final = "OTEL_SERVICE_NAME"

MODE_TRAIN: Final = "train"
MODE_VALIDATION_GREEDY: Final = "validation-greedy"
MODE_VALIDATION_SAMPLED: Final = "validation-sampled"
MODE_TRY: Final = "try"

# --- Environment of Kitestring's own processes ---------------------------------------------------------------------

ENV_LOG_LEVEL: Final = "KITESTRING_LOG_LEVEL"
ENV_QUEUE_CREDENTIAL_FILE: Final = "KITESTRING_QUEUE_CREDENTIAL_FILE"
ENV_S3_ACCESS_KEY: Final = "AWS_ACCESS_KEY_ID"
ENV_S3_SECRET_KEY: Final = "AWS_SECRET_ACCESS_KEY"  # noqa: S105 -- the name of a variable

# --- Routes: gateway, the side of the agents -----------------------------------------------------------------------

ROUTE_ATTEMPT: Final = "/r/{token}"
"""Base URL of an attempt; everything below is also served without it when the token comes as API key."""
ROUTE_CHAT: Final = "/v1/chat/completions"
ROUTE_COMPLETIONS: Final = "/v1/completions"
ROUTE_MODELS: Final = "/v1/models"
ROUTE_REWARDS: Final = "/rewards"
ROUTE_AGENT_TRACES: Final = "/otlp/v1/traces"
ROUTE_HEALTH: Final = "/health"
ROUTE_METRICS: Final = "/metrics"

# --- Routes: gateway, the side of the trainer (own port, bearer credential) ----------------------------------------

ROUTE_ADMIN_STATUS: Final = "/admin/v1/status"
ROUTE_ADMIN_ATTEMPTS: Final = "/admin/v1/attempts"
ROUTE_ADMIN_FENCE: Final = "/admin/v1/attempts/{attempt}/fence"
ROUTE_ADMIN_END: Final = "/admin/v1/attempts/{attempt}/end"
ROUTE_ADMIN_HOLD: Final = "/admin/v1/policies/{policy}/hold"
ROUTE_ADMIN_RELEASE: Final = "/admin/v1/policies/{policy}/release"
ROUTE_ADMIN_DRAIN: Final = "/admin/v1/drain"

# --- Routes: collector ---------------------------------------------------------------------------------------------

ROUTE_OTLP_TRACES: Final = "/v1/traces"
"""OTLP over HTTP of the trusted pipeline."""
ROUTE_OTLP_AGENT_TRACES: Final = "/agent/v1/traces"
"""OTLP over HTTP of the untrusted pipeline: lands below PREFIX_AGENT."""

# --- Routes: rollout queue (bearer credential) ---------------------------------------------------------------------

ROUTE_QUEUE_LEASE: Final = "/queue/v1/lease"
ROUTE_QUEUE_HEARTBEAT: Final = "/queue/v1/leases/{lease}/heartbeat"
ROUTE_QUEUE_FINISH: Final = "/queue/v1/leases/{lease}/finish"
ROUTE_RUN_STATUS: Final = "/run/v1/status"

# --- Headers -------------------------------------------------------------------------------------------------------

HEADER_AGENT: Final = "X-Kitestring-Agent"
"""Name of the (sub-)agent that makes a call; a label for `algorithm.select.agents`, never an identity."""
HEADER_IDEMPOTENCY: Final = "Idempotency-Key"
HEADER_RETRY_COUNT: Final = "X-Stainless-Retry-Count"
"""Sent by the OpenAI and Anthropic clients: above 0 the call repeats an earlier one."""
HEADER_POLICY_VERSION: Final = "X-Kitestring-Policy-Version"
"""Set by a policy server's sidecar where the server itself cannot report versions per token."""

# --- Object storage, below the run's prefix ------------------------------------------------------------------------

PREFIX_TRACES: Final = "traces/"
PREFIX_AGENT: Final = "agent/"
PREFIX_STATE: Final = "state/"
PREFIX_WEIGHTS: Final = "weights/"
PREFIX_CHECKPOINTS: Final = "checkpoints/"

# --- Failure classes of an attempt (design: docs/architecture.md, "Failure classes") -------------------------------

CLASS_SUCCEEDED: Final = "Succeeded"
CLASS_AGENT_FAILED: Final = "AgentFailed"
CLASS_TIMED_OUT: Final = "TimedOut"
CLASS_INFRASTRUCTURE: Final = "Infrastructure"
CLASS_INVALID_TASK: Final = "InvalidTask"
CLASSES: Final = (CLASS_SUCCEEDED, CLASS_AGENT_FAILED, CLASS_TIMED_OUT, CLASS_INFRASTRUCTURE, CLASS_INVALID_TASK)

# --- Exit codes of the command line --------------------------------------------------------------------------------

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
"""The run failed, or a bug."""
EXIT_USER: Final = 2
"""The user can mend it: a bad file, a missing folder, a taken port."""
EXIT_INTERRUPTED: Final = 130
"""Ended by Ctrl-C."""
