"""What pods of the user's, agents' and scorers', may reach beside what every one of them may."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from kitestring_api.v1alpha1.api_model import ApiModel
from kitestring_api.v1alpha1.rule import Rule
from kitestring_api.v1alpha1.scalars import JsonObject

Cidr = Annotated[str, StringConstraints(min_length=1, max_length=49, pattern=r"^[0-9a-fA-F:.]+/[0-9]{1,3}$")]
"""Range of IPv4 or IPv6 addresses, such as 10.0.0.0/8; `consistency` reads it."""

PortNumber = Annotated[int, Field(ge=1, le=65535)]


class DestinationPort(ApiModel):
    """A port, or a range of ports, of a destination."""

    rules = (
        Rule(
            "!has(self.endPort) || self.endPort >= self.port",
            "spec[.reward.scorer].network.egress[].ports[].endPort must not be less than port",
            "exchange them, or remove endPort",
            field=".endPort",
        ),
    )

    port: PortNumber = Field(description="Number of the port; of a Service, that of its pods.")
    end_port: PortNumber | None = Field(None, description="Last port of a range that begins with `port`.")
    protocol: Literal["TCP", "UDP", "SCTP"] = Field("TCP", description="Protocol of the port.")


class Destination(ApiModel):
    """Something that may be reached: a range of addresses, or pods by their labels."""

    rules = (
        Rule(
            "has(self.cidr) != (has(self.podSelector) || has(self.namespaceSelector))",
            "spec[.reward.scorer].network.egress[] needs either cidr or podSelector and namespaceSelector",
            "write cidr for addresses, podSelector (and namespaceSelector for those of other namespaces) for pods",
            field=".cidr",
        ),
        Rule(
            "has(self.cidr) || size(self.except) == 0",
            "spec[.reward.scorer].network.egress[].except has no meaning without cidr",
            "remove except, or write cidr",
            field=".except",
            reason="FieldValueForbidden",
        ),
    )

    cidr: Cidr | None = Field(
        None,
        description="Range of addresses. Link-local ones (169.254.0.0/16, fe80::/10), where clouds give out the "
        "credentials of a node, are left out of a wider range: name them by themselves.",
    )
    except_: list[Cidr] = Field(
        default_factory=list, alias="except", max_length=64, description="Ranges within `cidr` that stay out of reach."
    )
    pod_selector: JsonObject | None = Field(
        None,
        description="Label selector of pods: in the namespace of the pool, or in those that namespaceSelector selects.",
    )
    namespace_selector: JsonObject | None = Field(None, description="Label selector of namespaces.")
    ports: list[DestinationPort] = Field(
        default_factory=list, max_length=64, description="Ports there; empty: all of them."
    )


class Network(ApiModel):
    """What pods may reach. Without a word here, agents reach the gateway and the cluster's DNS, scorers DNS alone."""

    egress: list[Destination] = Field(default_factory=list, max_length=64, description="What else they may reach.")
