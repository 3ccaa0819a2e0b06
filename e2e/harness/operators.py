"""The processes of the operator, by their own figures and by what the kernel says of them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from e2e.harness.api import NotYet, Object, is_true
from e2e.harness.kinds import LEASE, POD
from e2e.harness.kubectl import CommandFailed, Kubectl
from e2e.harness.release import Release
from kitestring_api import names
from kitestring_operator.pods import parse_time
from kitestring_operator.probes import READY_ROUTE

_PROXIED: Final = "/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{route}"


class Operators:
    """The two processes of a release."""

    def __init__(self, release: Release, kubectl: Kubectl) -> None:
        self._release = release
        self._kubectl = kubectl

    def sum(self, name: str, **labels: str) -> float:
        """Sum of a metric over all that answer."""
        return sum(total(text, name, labels) for text in self._pages().values())

    def until(self, name: str, label: str, figures: Mapping[str, float], *, seconds: float) -> None:
        """Return once a metric has these figures by a label, all others 0. Raises NotYet with those that it had last.

        No event tells of figures: they are asked for once a second.
        """
        deadline = time.monotonic() + seconds
        while (last := self._by(name, label)) != figures:
            if time.monotonic() >= deadline:
                raise NotYet(f"{name} of {dict(figures)} by {label}: not within {seconds:g} s; last: {last}")
            time.sleep(1)

    def writes(self) -> float:
        """Requests that may change something, those about the Lease left out."""
        return self.sum("kitestring_operator_api_writes_total") - self.sum(
            "kitestring_operator_api_writes_total", kind="Lease"
        )

    def looked_at(self) -> float:
        """Reconciliations of runs."""
        return self.sum("kitestring_operator_reconcile_seconds_count", kind=names.KIND_TRAINING_RUN)

    def leader(self) -> str | None:
        """Name of the pod that acts."""
        pages = self._pages().items()
        return next((pod for pod, text in pages if total(text, "kitestring_operator_is_leader", {}) == 1), None)

    def lease_holder(self) -> str:
        """Name of the pod that has the Lease, whether it is ready or not; empty when nobody has it."""
        lease = self._release.api.get(LEASE, self._release.namespace, self._release.namespace)
        return str(((lease or {}).get("spec") or {}).get("holderIdentity") or "")

    def page(self, pod: str) -> str:
        """All metrics of a process."""
        return self._raw(pod, names.ROUTE_METRICS)

    def kill(self, pod: str) -> None:
        """As a rollout or a drain does it."""
        self._release.api.delete(POD, pod, self._release.namespace)

    def pods(self) -> list[str]:
        """Names of those that are not being deleted."""
        return [pod["metadata"]["name"] for pod in self._there()]

    def is_ready(self, pod: str) -> bool:
        """What the process itself answers to its probe, without the wait for the kubelet's next one."""
        try:
            return bool(self._raw(pod, READY_ROUTE))
        except CommandFailed:
            return False

    def seconds_since_start(self, pod: str) -> float:
        """For how long its container runs, up to a second more: the kubelet cuts fractions off."""
        found = self._release.api.get(POD, pod, self._release.namespace) or {}
        began = parse_time(found["status"]["containerStatuses"][0]["state"]["running"]["startedAt"])
        assert began is not None
        return (datetime.now(UTC) - began).total_seconds()

    def memory_mb(self, pod: str) -> float:
        """Largest resident set of the process so far."""
        text = self._exec(pod, "cat", "/proc/1/status")
        (line,) = (line for line in text.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6

    def cpu_seconds(self, pod: str) -> float:
        """User and system time of the process so far."""
        fields = self._exec(pod, "cat", "/proc/1/stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def _by(self, name: str, label: str) -> dict[str, float]:
        """Sums of a metric by a label, without those that are 0."""
        sums: defaultdict[str, float] = defaultdict(float)
        for text in self._pages().values():
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == name:
                        sums[sample.labels[label]] += sample.value
        return {value: figure for value, figure in sums.items() if figure}

    def _pages(self) -> dict[str, str]:
        return {pod["metadata"]["name"]: self.page(pod["metadata"]["name"]) for pod in self._running()}

    def _running(self) -> list[Object]:
        return [pod for pod in self._there() if is_true(pod, "Ready")]

    def _there(self) -> list[Object]:
        pods = self._release.api.listed(POD, self._release.namespace, "app.kubernetes.io/name=kitestring")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def _raw(self, pod: str, route: str) -> str:
        path = _PROXIED.format(namespace=self._release.namespace, pod=pod, port=names.PORT_OPERATOR, route=route)
        return self._kubectl("get", "--raw", path)

    def _exec(self, pod: str, *command: str) -> str:
        return self._kubectl.in_namespace(self._release.namespace)("exec", pod, "--", *command)


def total(text: str, name: str, labels: Mapping[str, str]) -> float:
    """Sum of the samples of a metric that have these labels, on a page of metrics."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
