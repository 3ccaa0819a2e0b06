"""The pods of a user: a template of which the container `agent` concerns us, and everything else passes through."""

from typing import Annotated

from pydantic import Field, StringConstraints

from kitestring_api import names
from kitestring_api.v1alpha1.api_model import OpenModel
from kitestring_api.v1alpha1.references import KeyReference
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import JsonObject, Path, Text

AGENT_CONTAINER = "agent"
"""Name of the container that holds the user's agent."""

ContainerName = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]
VariableName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^=\s]+$")]


class EnvSource(OpenModel):
    """Where the value of an environment variable comes from."""

    secret_key_ref: KeyReference | None = Field(None, description="A key of a Secret.")
    config_map_key_ref: KeyReference | None = Field(None, description="A key of a ConfigMap.")


class EnvVariable(OpenModel):
    """An environment variable of a container."""

    name: VariableName = Field(description="Name of the variable.")
    value: str | None = Field(None, max_length=32768, description="Its value.")
    value_from: EnvSource | None = Field(None, description="Where its value comes from, instead of `value`.")


class Container(OpenModel):
    """A container of a pod; fields that are not named here (resources, mounts, security context) pass through."""

    name: ContainerName = Field(description="Name of the container; the user's agent is called `agent`.")
    image: Text | None = Field(None, description="Image of the container.")
    command: list[Text] = Field(
        default_factory=list,
        max_length=64,
        description="Program and first arguments; required for `agent`, since the launcher starts it, not the image.",
    )
    args: list[Text] = Field(default_factory=list, max_length=256, description="Further arguments.")
    env: list[EnvVariable] = Field(
        default_factory=list,
        max_length=256,
        description="Environment variables.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    working_dir: Path | None = Field(None, description="Working folder; absent: the image's.")


class PodSpec(OpenModel):
    """The pod; fields that are not named here (volumes, tolerations, node selector) pass through."""

    containers: list[Container] = Field(
        min_length=1,
        max_length=16,
        description="Containers of the pod: exactly one is called `agent`.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )


class PodTemplate(OpenModel):
    """A PodTemplateSpec with a container `agent`."""

    rules = (
        Rule(
            "self.spec.containers.exists_one(c, c.name == 'agent')",
            "spec.template.spec.containers must hold exactly one container named agent",
            "call the container of your agent `agent`",
            field=".spec.containers",
        ),
        Rule(
            "self.spec.containers.all(c, c.name != 'agent' || size(c.command) > 0)",
            "spec.template.spec.containers[agent].command must not be empty",
            "write the program that the image would start, e.g. command: [python, agent.py]",
            field=".spec.containers",
            reason="FieldValueRequired",
        ),
        Rule(
            "self.spec.containers.all(c, c.name != 'agent' || !c.env.exists(e, "
            f"e.name.startsWith('{names.AGENT_ENV_PREFIX}') || e.name in {list(names.AGENT_ENV_RESERVED)}))",
            "spec.template.spec.containers[agent].env must not set what Kitestring sets: "
            f"{', '.join(names.AGENT_ENV_RESERVED)}, {names.AGENT_ENV_PREFIX}*",
            "remove these variables: the agent finds base URL and key of the gateway in them",
            field=".spec.containers",
            reason="FieldValueForbidden",
        ),
    )

    metadata: JsonObject | None = Field(None, description="Labels and annotations of the pods.")
    spec: PodSpec = Field(description="The pods.")

    @property
    def agent(self) -> Container:
        """The container `agent`. StopIteration is impossible in a template that passed the rules."""
        return next(container for container in self.spec.containers if container.name == AGENT_CONTAINER)
