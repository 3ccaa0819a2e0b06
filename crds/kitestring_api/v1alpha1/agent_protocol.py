"""How a task reaches the agent, and what is read back from it."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import FieldName

ModuleName = Annotated[
    str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
]


class TaskDelivery(ApiModel):
    """How the visible part of a task is handed to the agent."""

    rules = (
        Rule(
            "self.format != 'text' || has(self.field)",
            "spec.agentProtocol.task.field is required with format: text",
            "name the field of the task row whose text the agent gets, or use format: json",
            field=".field",
            reason="FieldValueRequired",
        ),
        Rule(
            "self.format != 'json' || !has(self.field)",
            "spec.agentProtocol.task.field has no meaning with format: json, which hands over the whole visible part",
            "remove field, or use format: text",
            field=".field",
            reason="FieldValueForbidden",
        ),
    )

    from_: Literal["file", "environment", "argument", "stdin"] = Field(
        "file",
        alias="from",
        description="file: a file whose path is in KITESTRING_TASK_FILE; environment: the variable KITESTRING_TASK; "
        "argument: one more argument after `args`; stdin: standard input.",
    )
    format: Literal["json", "text"] = Field(
        "json", description="json: the whole visible part of the task as one JSON object; text: one field as it is."
    )
    field: FieldName | None = Field(None, description="Field of the task row that is handed over with format: text.")


class AgentOutput(ApiModel):
    """What of the agent's doing the scorers see as its output."""

    from_: Literal["stdout", "file", "lastMessage", "none"] = Field(
        "stdout",
        alias="from",
        description="stdout: what the agent prints; file: the file whose path is in KITESTRING_OUTPUT_FILE; "
        "lastMessage: the text of the last reply of a trained policy; none: nothing.",
    )
    max_bytes: int = Field(65536, ge=1, le=16_777_216, description="Bytes kept; what is longer is cut and flagged.")


class AgentProtocol(ApiModel):
    """How Kitestring and the agent meet: task in, output out. The agent needs no library of ours."""

    task: TaskDelivery = Field(default_factory=TaskDelivery, description="How the task reaches the agent.")
    output: AgentOutput = Field(default_factory=AgentOutput, description="What scorers see as the agent's output.")
    preload: list[ModuleName] = Field(
        default_factory=list,
        max_length=64,
        description="Python modules that are imported once per worker; the agent's unmodified script is then forked "
        "for each rollout, which saves its start. Needs a command that starts with a Python interpreter.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
