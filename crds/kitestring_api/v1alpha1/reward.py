"""Who scores a rollout, and what happens when a score is missing or comes twice."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.network import Network, PortNumber
from kitestring_api.v1alpha1.pod_template import EnvVariable
from kitestring_api.v1alpha1.resources import Resources
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import FieldName, JsonObject, Seconds, Text

PORT_VARIABLE = "PORT"
"""Tells a scorer on which port to listen."""

UrlPath = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^/[^\s?#]*$")]
"""Path of a URL."""

RewardSource = Literal["agent", "exitCode", "builtin", "command", "scorer"]


class BuiltinScorer(ApiModel):
    """A scorer of ours, run apart from the agent on its output and the hidden part of the task."""

    rules = (
        Rule(
            "has(self.expectedField) == (self.kind != 'regex')",
            "spec.reward.builtin.expectedField is required, except with kind: regex, which takes none",
            "name the field of the task row that holds the right answer; for regex use pattern or patternField",
            field=".expectedField",
        ),
        Rule(
            "self.kind == 'regex' ? has(self.pattern) != has(self.patternField) "
            ": !has(self.pattern) && !has(self.patternField)",
            "spec.reward.builtin needs exactly one of pattern and patternField with kind: regex, and neither otherwise",
            "write pattern for one expression for all tasks, patternField for one in each task row",
            field=".pattern",
        ),
        Rule(
            "has(self.path) == (self.kind == 'jsonField')",
            "spec.reward.builtin.path is required with kind: jsonField and has no meaning otherwise",
            "name the field of the agent's JSON output to compare, e.g. path: result.answer",
            field=".path",
        ),
        Rule(
            "!has(self.tolerance) || self.kind == 'numeric'",
            "spec.reward.builtin.tolerance has no meaning except with kind: numeric",
            "remove tolerance, or use kind: numeric",
            field=".tolerance",
            reason="FieldValueForbidden",
        ),
    )

    kind: Literal["exactMatch", "numeric", "regex", "jsonField", "wordF1"] = Field(
        description="exactMatch: 1 if the output equals the expected text, else 0; numeric: 1 if the last number of "
        "the output is the expected one within `tolerance`, else 0; regex: 1 if the expression is found in the output, "
        "else 0; jsonField: 1 if the field at `path` of the JSON output equals the expected value, else 0; wordF1: F1 "
        "of the words of output and expected text, 0 to 1."
    )
    expected_field: FieldName | None = Field(None, description="Field of the task row with the right answer.")
    tolerance: float | None = Field(
        None, ge=0, description="numeric: largest absolute difference that counts as right; absent: 0."
    )
    pattern: Text | None = Field(None, description="regex: a Python regular expression.")
    pattern_field: FieldName | None = Field(None, description="regex: field of the task row with the expression.")
    path: Text | None = Field(None, description="jsonField: dotted path in the agent's JSON output.")
    ignore_case: bool = Field(False, description="Compare without regard to case (exactMatch, regex, wordF1).")
    strip_whitespace: bool = Field(True, description="Leave blanks at both ends out of the comparison.")


class CommandScorer(ApiModel):
    """A scorer of the user's: a command that runs once per attempt, apart from the agent.

    It gets one JSON object on standard input (task, hidden, output, exitCode, messages, calls) and prints a number, or
    {"reward": number, …}, as its last line.
    """

    command: list[Text] = Field(min_length=1, max_length=64, description="Program and arguments; no shell is between.")
    timeout_seconds: Seconds = Field(60, description="Seconds after which the command is ended and no reward comes.")


class ContainerScorer(ApiModel):
    """A scorer of the user's: a container in pods of its own, which serves HTTP and is asked once for each attempt.

    It listens on 0.0.0.0:$PORT. A POST has the JSON object that a command gets on standard input; the answer is 200
    with a number, or {"reward": number, …}. docs/rewards.md says the rest.
    """

    rules = (
        Rule(
            f"!self.env.exists(e, e.name == '{PORT_VARIABLE}')",
            f"spec.reward.scorer.env must not set {PORT_VARIABLE}, which Kitestring sets",
            "remove it, and write spec.reward.scorer.port for another port",
            field=".env",
            reason="FieldValueForbidden",
        ),
    )

    image: Text = Field(min_length=1, description="Image of the container.")
    command: list[Text] = Field(
        default_factory=list,
        max_length=64,
        description="Program and first arguments; empty: the image's entrypoint. A local run starts it as a process "
        "and needs it.",
    )
    args: list[Text] = Field(default_factory=list, max_length=256, description="Further arguments.")
    env: list[EnvVariable] = Field(
        default_factory=list,
        max_length=64,
        description="Environment variables.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    port: PortNumber = Field(
        8000,
        description=f"Port of the container; it stands in the variable {PORT_VARIABLE}, on one machine a free one.",
    )
    path: UrlPath = Field("/score", description="Path that is asked for scores.")
    replicas: int = Field(
        1, ge=1, le=256, description="Pods, for each run that uses the pool. It may change while runs use the pool."
    )
    timeout_seconds: Seconds = Field(
        60,
        description="Seconds for one score, tries after errors included; after them the attempt has no reward. The "
        "wait for a turn (`concurrency`) does not count.",
    )
    concurrency: int = Field(32, ge=1, le=4096, description="Scores that are asked for at once, over all replicas.")
    resources: Resources | None = Field(None, description="Resources of the container.")
    network: Network = Field(
        default_factory=Network, description="What the scorer may reach beside the cluster's DNS, e.g. a judge model."
    )
    template: JsonObject | None = Field(
        None, description="Pod template laid over ours by strategic merge; its container is called `scorer`."
    )


class ExitCodeReward(ApiModel):
    """Rewards by the exit code of the agent."""

    success: float = Field(1.0, description="Reward for exit code 0.")
    failure: float = Field(0.0, description="Reward for any other exit code.")


class Reward(ApiModel):
    """Who may score a rollout. A missing reward is missing: it is excluded unless this says otherwise."""

    rules = (
        Rule(
            "has(self.builtin) == (self.source == 'builtin')",
            "spec.reward.builtin is required with source: builtin and has no meaning otherwise",
            "write e.g. builtin: {kind: exactMatch, expectedField: answer}, or remove it",
            field=".builtin",
        ),
        Rule(
            "has(self.command) == (self.source == 'command')",
            "spec.reward.command is required with source: command and has no meaning otherwise",
            "write e.g. command: {command: [python, score.py]}, or remove it",
            field=".command",
        ),
        Rule(
            "has(self.scorer) == (self.source == 'scorer')",
            "spec.reward.scorer is required with source: scorer and has no meaning otherwise",
            "write e.g. scorer: {image: registry.example/judge:1, command: [python, judge.py]}, or remove it",
            field=".scorer",
        ),
        Rule(
            "!has(self.exitCode) || self.source == 'exitCode'",
            "spec.reward.exitCode has no meaning except with source: exitCode",
            "remove exitCode, or use source: exitCode",
            field=".exitCode",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.min) || !has(self.max) || self.min <= self.max",
            "spec.reward.min must not be greater than spec.reward.max",
            "exchange them, or remove one",
            field=".min",
        ),
    )

    source: RewardSource = Field(
        description="agent: the agent itself, by POST {base URL}/rewards; exitCode: its exit code; builtin: a scorer "
        "of ours; command: a command of yours; scorer: a container of yours."
    )
    builtin: BuiltinScorer | None = Field(None, description="The scorer of source: builtin.")
    command: CommandScorer | None = Field(None, description="The command of source: command.")
    scorer: ContainerScorer | None = Field(None, description="The container of source: scorer.")
    exit_code: ExitCodeReward | None = Field(None, description="The rewards of source: exitCode; absent: 1 and 0.")
    duplicates: Literal["refuse", "first", "last", "max"] = Field(
        "refuse",
        description="A second reward of the agent in one attempt: refuse it (409), or take first, last or greatest.",
    )
    booleans: Literal["refuse", "asNumber"] = Field(
        "refuse", description="A reward true or false: refuse it, or read it as 1 or 0."
    )
    missing: Literal["exclude", "zero"] = Field(
        "exclude",
        description="An attempt that ended without a reward: exclude it from baseline and loss, or give it 0. One "
        "whose scorer could not be asked is always excluded.",
    )
    on_agent_failure: Literal["exclude", "zero", "score"] = Field(
        "exclude", description="An agent that ended with an error: exclude the rollout, give it 0, or score it."
    )
    on_timeout: Literal["exclude", "zero", "score"] = Field(
        "exclude", description="An agent that ran out of time: exclude the rollout, give it 0, or score it."
    )
    min: float | None = Field(None, description="Least reward accepted; one below is refused like a non-finite one.")
    max: float | None = Field(None, description="Greatest reward accepted; one above is refused.")
