"""What agents may reach."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitestring_operator.observed import Manifest
from kitestring_operator.rollouts.network import rollout_policy
from tests.operator.parts.strict import faults
from tests.operator.rollouts.rendering import context, pool_of


def _policy(egress: list[dict[str, Any]]) -> Manifest:
    pool = pool_of("worker")
    pool["spec"]["network"] = {"egress": egress}
    return rollout_policy(context(pool))


def _allowed(egress: list[dict[str, Any]]) -> list[Manifest]:
    """What the pool's own word adds."""
    rules: list[Manifest] = _policy(egress)["spec"]["egress"][3:]
    return rules


def test_by_itself_an_agent_reaches_gateway_queue_and_dns() -> None:
    spec = _policy([])["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["ingress"] == []
    ports = [[(port["protocol"], port["port"]) for port in rule["ports"]] for rule in spec["egress"]]
    assert ports == [[("TCP", 8080)], [("TCP", 8090)], [("UDP", 53), ("TCP", 53)]]
    peers = [peer for rule in spec["egress"][:2] for peer in rule["to"]]
    components = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in peers]
    assert components == ["gateway", "trainer"]
    assert all(peer["podSelector"]["matchLabels"]["kitestring.dev/run"] == "sums" for peer in peers)
    assert not any("namespaceSelector" in peer for peer in peers)


def test_no_rule_is_open_to_all() -> None:
    for rule in _policy([])["spec"]["egress"]:
        assert rule["to"]
        assert rule["ports"]
        assert {} not in rule["to"]


def test_pods_of_other_namespaces() -> None:
    selectors = {"podSelector": {"matchLabels": {"app": "search"}}, "namespaceSelector": {}}
    assert _allowed([selectors | {"ports": [{"port": 53, "protocol": "UDP"}]}]) == [
        {"to": [selectors], "ports": [{"protocol": "UDP", "port": 53}]}
    ]
    assert _allowed([{"podSelector": {}}]) == [{"to": [{"podSelector": {}}]}]


@pytest.mark.parametrize(
    ("cidr", "except_", "left_out"),
    [
        ("0.0.0.0/0", [], ["169.254.0.0/16"]),
        ("::/0", [], ["fe80::/10", "fd00:ec2::254/128"]),
        ("fd00::/8", [], ["fd00:ec2::254/128"]),
        ("169.254.0.0/15", [], ["169.254.0.0/16"]),
        ("10.0.0.0/8", [], []),
        # said by itself: meant
        ("169.254.0.0/16", [], []),
        ("169.254.169.254/32", [], []),
        ("fd00:ec2::254/128", [], []),
        # said already
        ("0.0.0.0/0", ["169.0.0.0/8"], []),
        ("0.0.0.0/0", ["169.254.169.254/32"], ["169.254.0.0/16"]),
    ],
)
def test_what_of_a_range_stays_out_of_reach(cidr: str, except_: list[str], left_out: list[str]) -> None:
    ((rule),) = _allowed([{"cidr": cidr, "except": except_}])
    block = rule["to"][0]["ipBlock"]
    assert block["cidr"] == cidr
    assert block.get("except", []) == [*except_, *left_out]


@given(st.ip_addresses(v=4), st.integers(min_value=0, max_value=32))
def test_every_range_makes_a_policy_that_kubernetes_takes(address: ipaddress.IPv4Address, length: int) -> None:
    cidr = ipaddress.ip_network((address, length), strict=False)
    policy = _policy([{"cidr": str(cidr)}])
    assert faults(policy) == []
    block = policy["spec"]["egress"][3]["to"][0]["ipBlock"]
    for text in block.get("except", ()):
        part = ipaddress.ip_network(text)
        # the API server wants each to lie within, and not to be the whole
        assert part.subnet_of(cidr)  # type: ignore[arg-type]
        assert part != cidr
