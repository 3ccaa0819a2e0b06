"""A gate before which agents wait, so that a scenario acts in the middle of a step and not at a guess.

It is the name of a Service: agents reach DNS and little else, and the scenario opens it by making the Service.
"""

from __future__ import annotations

from typing import Final

from e2e.harness.kinds import SERVICE
from e2e.harness.namespace import Namespace
from e2e.harness.runs import ANSWER

_WAIT: Final = """
import socket, time
def is_open(name):
    try:
        return bool(socket.getaddrinfo(name, None))
    except socket.gaierror:
        return False
while not is_open({host!r}):
    time.sleep(0.1)
"""


class Gate:
    """Closed until `open`; then open for good."""

    def __init__(self, namespace: Namespace, name: str = "gate") -> None:
        self._namespace = namespace
        self._name = name

    @property
    def wait(self) -> str:
        """Python that waits for the gate. Standard library only."""
        # the last dot: no search through other domains, which no answer comes from
        return _WAIT.format(host=f"{self._name}.{self._namespace.name}.svc.cluster.local.")

    @property
    def agent(self) -> str:
        """An agent that asks the model, waits for the gate, and only then says what the model said."""
        return ANSWER.replace("\n    print(", "\n    said = (") + self.wait + "print(said)\n"

    def open(self) -> None:
        """Let agents through."""
        service = {"apiVersion": "v1", "kind": SERVICE.name, "metadata": {"name": self._name}}
        self._namespace.apply(service | {"spec": {"ports": [{"port": 80}]}})
