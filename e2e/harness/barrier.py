"""A barrier: agents stop there in the midst of a rollout, until the scenario lets them go on.

It is a pod with a Service, which the pool lets its agents reach; the scenario speaks to it through a forwarded port.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from e2e.harness.api import NotYet, Object, is_true
from e2e.harness.images import Images
from e2e.harness.kinds import POD
from e2e.harness.namespace import Namespace

NAME: Final = "barrier"
PORT: Final = 7000
ENV: Final = {"name": "BARRIER", "value": f"{NAME}:{PORT}"}
"""For the container `agent`: where `pause_at` of the agents here goes."""
EGRESS: Final[Object] = {"podSelector": {"matchLabels": {"e2e": NAME}}, "ports": [{"port": PORT}]}
"""For `spec.network.egress` of the pool."""


class Barrier:
    """Points are names; an agent that stands at one says what it wants to be known by."""

    def __init__(self, port: int) -> None:
        self._port = port

    def until(self, point: str, count: int, *, seconds: float) -> list[dict[str, Any]]:
        """What those say who stand at the point, once they are so many. Raises NotYet."""
        try:
            said = self._ask({"until": count, "point": point}, seconds)
        except TimeoutError:
            raise NotYet(f"{count} agents at {point}: not within {seconds:g} s") from None
        return list(said)

    def open(self, point: str) -> None:
        """Let go on who stands there, and whoever comes later."""
        self._ask({"open": point}, 30)

    def _ask(self, said: dict[str, Any], seconds: float) -> Any:
        with socket.create_connection(("127.0.0.1", self._port), timeout=seconds) as connection:
            connection.sendall(json.dumps(said).encode() + b"\n")
            with connection.makefile("rb") as answer:
                return json.loads(answer.readline())


@contextmanager
def barrier(namespace: Namespace, images: Images, **where: Any) -> Iterator[Barrier]:
    """A barrier in the namespace; `where` are fields of its pod's spec, for where it is to run."""
    program = Path(__file__).with_name("barrier_server.py").read_text()
    container = {
        "name": NAME,
        "image": images.python,
        "command": ["python3", "-c", program, str(PORT)],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    }
    labels = {"e2e": NAME}
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": NAME, "labels": labels},
            "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], **where},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME},
            "spec": {"selector": labels, "ports": [{"port": PORT}]},
        },
    )
    namespace.until_object(POD, NAME, lambda pod: is_true(pod, "Ready"), "the barrier", seconds=60)
    with namespace.kubectl.forwarded(f"pod/{NAME}", PORT) as port:
        yield Barrier(port)
