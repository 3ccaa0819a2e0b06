"""Names of spans, attributes and events: OpenTelemetry's GenAI names (semantic conventions v1.41.1) where one exists,
`kitestring.*` where none does. The table in docs/traces.md is generated from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

SEMCONV_VERSION: Final = "1.41.1"
SCHEMA_URL: Final = f"https://opentelemetry.io/schemas/{SEMCONV_VERSION}"
SCOPE_NAME: Final = "kitestring.gateway"
SERVICE_NAME: Final = "kitestring-gateway"
PROVIDER: Final = "kitestring"
ROOT_SPAN_NAME: Final = "invoke_agent"
EVALUATION_EVENT: Final = "gen_ai.evaluation.result"

# Both kinds of span.
PROOF: Final = "kitestring.proof"
PAYLOAD: Final = "kitestring.payload"
RUN: Final = "kitestring.run"
ROLLOUT: Final = "kitestring.rollout"
ATTEMPT: Final = "kitestring.attempt"
GROUP: Final = "kitestring.group"
TASK: Final = "kitestring.task"
STEP: Final = "kitestring.step"
MODE: Final = "kitestring.mode"
OPERATION: Final = "gen_ai.operation.name"
CONVERSATION: Final = "gen_ai.conversation.id"
OUTCOME: Final = "kitestring.outcome"
ERROR_TYPE: Final = "error.type"

# Calls.
SEQ: Final = "kitestring.seq"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_ID: Final = "gen_ai.response.id"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
FIRST_CHUNK_SECONDS: Final = "gen_ai.response.time_to_first_chunk"
STREAM: Final = "gen_ai.request.stream"
TEMPERATURE: Final = "gen_ai.request.temperature"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
CHOICE_COUNT: Final = "gen_ai.request.choice.count"
SEED: Final = "gen_ai.request.seed"
AGENT_NAME: Final = "gen_ai.agent.name"
TRAINED: Final = "kitestring.trained"
POLICY_VERSION: Final = "kitestring.policy.version"
NONCONFORMING: Final = "kitestring.nonconforming"
STATUS_CODE: Final = "http.response.status_code"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
MESSAGES_SHARED: Final = "kitestring.input.messages.shared"
CONTENTS_OMITTED: Final = "kitestring.contents.omitted"

# The end of an attempt.
N_CALLS: Final = "kitestring.calls"
REWARD: Final = "kitestring.reward"
REASON: Final = "kitestring.reason"
EXIT_CODE: Final = "process.exit.code"
OUTPUT: Final = "kitestring.output"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"


@dataclass(frozen=True, slots=True)
class Attribute:
    """A row of the table of conventions."""

    name: str
    on: Literal["both", "call", "end", "event"]
    type: Literal["string", "string[]", "int", "double", "boolean", "JSON string"]
    meaning: str

    @property
    def source(self) -> str:
        return "kitestring" if self.name.startswith("kitestring.") else "OpenTelemetry"


ATTRIBUTES: Final = (
    Attribute(
        PROOF, "both", "string", "first attribute: `{format}:{c|e}:{epoch}:{seq}:{sha256 of the payload in its place}`"
    ),
    Attribute(PAYLOAD, "both", "string", "second attribute: everything that training reads, packed (see below)"),
    Attribute(RUN, "both", "string", "run"),
    Attribute(ROLLOUT, "both", "string", "rollout"),
    Attribute(ATTEMPT, "both", "string", "attempt; its UUID's bytes are the trace id"),
    Attribute(GROUP, "both", "string", "group"),
    Attribute(TASK, "both", "int", "row of the task file, from 0"),
    Attribute(STEP, "both", "int", "step"),
    Attribute(MODE, "both", "string", "train, validation-greedy, validation-sampled or try"),
    Attribute(CONVERSATION, "both", "string", "the attempt again, for viewers that group by conversation"),
    Attribute(OPERATION, "both", "string", "chat, text_completion, or invoke_agent for the end record"),
    Attribute(OUTCOME, "both", "string", "call: ok, failed, cancelled, undelivered; end: failure class of the attempt"),
    Attribute(
        ERROR_TYPE, "both", "string", "HTTP status or outcome of a call that is not ok; failure class of an attempt"
    ),
    Attribute(SEQ, "call", "int", "number of the call in its attempt, 1..N in the order of admission"),
    Attribute(PROVIDER_NAME, "call", "string", "always `kitestring`"),
    Attribute(REQUEST_MODEL, "call", "string", "model as the agent named it"),
    Attribute(RESPONSE_MODEL, "call", "string", "model's name in the run"),
    Attribute(RESPONSE_ID, "call", "string", "id of the reply"),
    Attribute(FINISH_REASONS, "call", "string[]", "one per choice"),
    Attribute(INPUT_TOKENS, "call", "int", "prompt tokens"),
    Attribute(OUTPUT_TOKENS, "call", "int", "tokens of all choices"),
    Attribute(FIRST_CHUNK_SECONDS, "call", "double", "seconds from the request to the first chunk of a stream"),
    Attribute(STREAM, "call", "boolean", "the agent asked for a stream"),
    Attribute(TEMPERATURE, "call", "double", "as sent upstream"),
    Attribute(MAX_TOKENS, "call", "int", "as sent upstream"),
    Attribute(CHOICE_COUNT, "call", "int", "choices asked for, when more than one"),
    Attribute(SEED, "call", "int", "as sent upstream"),
    Attribute(AGENT_NAME, "call", "string", "sub-agent as claimed by the call: a label, never an identity"),
    Attribute(TRAINED, "call", "boolean", "the model is a policy that is trained"),
    Attribute(POLICY_VERSION, "call", "string", "versions that sampled the reply, comma-separated"),
    Attribute(NONCONFORMING, "call", "string[]", "request fields that were replaced for training"),
    Attribute(STATUS_CODE, "call", "int", "HTTP status that the agent got"),
    Attribute(INPUT_MESSAGES, "call", "JSON string", "content: messages new since an earlier call of the attempt"),
    Attribute(MESSAGES_SHARED, "call", "int", "how many messages before those an earlier call holds"),
    Attribute(OUTPUT_MESSAGES, "call", "JSON string", "content: one message per choice"),
    Attribute(TOOL_DEFINITIONS, "call", "JSON string", "content: tools of the request, when they changed"),
    Attribute(CONTENTS_OMITTED, "call", "boolean", "in place of contents that were too large (see below)"),
    Attribute(N_CALLS, "end", "int", "N: calls of the attempt"),
    Attribute(REWARD, "end", "double", "reward, when there is one"),
    Attribute(REASON, "end", "string", "why the attempt did not succeed, or has no reward"),
    Attribute(EXIT_CODE, "end", "int", "exit code of the agent"),
    Attribute(OUTPUT, "end", "string", "content: what the agent gave back"),
    Attribute(EVALUATION_NAME, "event", "string", f"on event `{EVALUATION_EVENT}`: where the reward is from"),
    Attribute(EVALUATION_SCORE, "event", "double", f"on event `{EVALUATION_EVENT}`: the reward"),
)
"""Every attribute that a gateway span may carry."""
