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

LAUNCHER_CONTAINER = "launcher"
"""Name of our init container that copies the launcher."""

WORKER_CONTAINER = "worker"
"""Name of our sidecar, which holds the queue's credential."""

WORKER_USER = 65532
"""User id of the worker: the one that no container of a template may have."""

RESERVED_VOLUME_PREFIX = "kitestring-"
"""Beginning of the names of our volumes."""

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


class ContainerSecurity(OpenModel):
    """The security context of a container; what it says replaces our defaults."""

    privileged: bool | None = Field(None, description="Refused: a privileged container has no walls.")
    run_as_user: int | None = Field(None, ge=0, le=2_147_483_647, description="User id; absent: the pod's.")


class PodSecurity(OpenModel):
    """The security context of the pod; what it says replaces our defaults."""

    run_as_user: int | None = Field(
        None, ge=0, le=2_147_483_647, description="User id of the containers; absent: 10001."
    )


class Volume(OpenModel):
    """A volume of the pod; its source passes through."""

    name: ContainerName = Field(description="Name of the volume.")


class InitContainer(OpenModel):
    """A container that runs before the agent, or beside it (restartPolicy: Always); its fields pass through."""

    name: ContainerName = Field(description="Name of the container.")
    security_context: ContainerSecurity | None = Field(None, description="Security context of the container.")


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
    security_context: ContainerSecurity | None = Field(None, description="Security context of the container.")


class PodSpec(OpenModel):
    """The pod; fields that are not named here (tolerations, node selector, runtime class) pass through."""

    containers: list[Container] = Field(
        min_length=1,
        max_length=16,
        description="Containers of the pod: exactly one is called `agent`.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    init_containers: list[InitContainer] = Field(
        default_factory=list,
        max_length=16,
        description="Containers that run before the agent, in their order; ours follow.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    volumes: list[Volume] = Field(
        default_factory=list,
        max_length=64,
        description="Volumes of the pod. A mount of `agent` at /tmp or /kitestring/scratch takes the place of ours.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    security_context: PodSecurity | None = Field(
        None,
        description="Security context of the pod. Absent: user and group 10001, not root, seccomp RuntimeDefault.",
    )
    automount_service_account_token: bool = Field(
        False, description="Give the pod the token of its service account: an agent then reaches the API server."
    )
    restart_policy: str | None = Field(None, max_length=16, description="Refused: Kitestring sets it.")
    host_network: bool | None = Field(None, description="Refused when true.")
    host_pid: bool | None = Field(None, alias="hostPID", description="Refused when true.")
    host_ipc: bool | None = Field(None, alias="hostIPC", description="Refused when true.")
    share_process_namespace: bool | None = Field(None, description="Refused when true.")


_OURS = [LAUNCHER_CONTAINER, WORKER_CONTAINER]


def _every_container(field: str, holds: str) -> str:
    """CEL: `holds` of every container `c` whose security context has `field`."""
    absent = f"!has(c.securityContext) || !has(c.securityContext.{field})"
    return " && ".join(f"self.spec.{where}.all(c, {absent} || {holds})" for where in ("containers", "initContainers"))


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
        Rule(
            f"self.spec.containers.all(c, !(c.name in {_OURS})) && self.spec.initContainers.all(c, "
            f"!(c.name in {[*_OURS, AGENT_CONTAINER]}))",
            f"spec.template.spec must not have a container called {' or '.join(_OURS)}, which are Kitestring's, nor an "
            "init container called agent",
            "call it something else",
            field=".spec.initContainers",
            reason="FieldValueForbidden",
        ),
        Rule(
            f"self.spec.volumes.all(v, !v.name.startsWith('{RESERVED_VOLUME_PREFIX}'))",
            f"spec.template.spec.volumes must not have a name that starts with {RESERVED_VOLUME_PREFIX}",
            "call the volume something else",
            field=".spec.volumes",
            reason="FieldValueForbidden",
        ),
        Rule(
            " && ".join(
                f"!(has(self.spec.{name}) && self.spec.{name})"
                for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace")
            ),
            "spec.template.spec must not set hostNetwork, hostPID, hostIPC or shareProcessNamespace",
            "remove them: an agent would reach the node, or the worker that holds the queue's credential",
            field=".spec",
            reason="FieldValueForbidden",
        ),
        Rule(
            f"{_every_container('privileged', '!c.securityContext.privileged')}",
            "spec.template.spec must not have a privileged container, which no wall holds",
            "remove privileged; add the capabilities that are needed, or set runtimeClassName",
            field=".spec.containers",
            reason="FieldValueForbidden",
        ),
        Rule(
            "(!has(self.spec.securityContext) || !has(self.spec.securityContext.runAsUser) "
            f"|| self.spec.securityContext.runAsUser != {WORKER_USER}) && "
            f"{_every_container('runAsUser', f'c.securityContext.runAsUser != {WORKER_USER}')}",
            f"spec.template.spec must not use the user id {WORKER_USER}, which is the worker's",
            "use another runAsUser",
            field=".spec",
            reason="FieldValueForbidden",
        ),
        Rule(
            "!has(self.spec.restartPolicy)",
            "spec.template.spec.restartPolicy is Kitestring's to set",
            "remove restartPolicy",
            field=".spec.restartPolicy",
            reason="FieldValueForbidden",
        ),
    )

    metadata: JsonObject | None = Field(None, description="Labels and annotations of the pods.")
    spec: PodSpec = Field(description="The pods.")

    @property
    def agent(self) -> Container:
        """The container `agent`. StopIteration is impossible in a template that passed the rules."""
        return next(container for container in self.spec.containers if container.name == AGENT_CONTAINER)
