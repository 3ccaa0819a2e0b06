"""What the tests rely on, tried once: names, Services across nodes, NetworkPolicy both ways, the mounts."""

from __future__ import annotations

import json
from typing import Any, Final

from e2e.node import layout
from e2e.node.command import Failed
from e2e.node.kube import kubectl
from e2e.node.progress import step

_NAMESPACE: Final = "kitestring-e2e-smoke"
_WORKERS: Final = (f"{layout.CLUSTER}-worker", f"{layout.CLUSTER}-worker2")
_SERVE: Final = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port=8080)"
# A policy takes hold of a pod within moments of its start, either way: each tries until it sees what should be.
_TRY: Final = """
import socket, sys, time
wanted = sys.argv[1]
address = socket.getaddrinfo("server", 8080)[0][4]
deadline = time.monotonic() + 45
while time.monotonic() < deadline:
    try:
        socket.create_connection(address, timeout=2).close()
        seen = "reached"
    except OSError as error:
        seen = "denied"
    if seen == wanted:
        sys.exit(0)
    time.sleep(0.2)
sys.exit(f"{seen} where {wanted} was expected")
"""


def check() -> None:
    """Raise `Failed` when the cluster lacks something that the tests rely on; leaves nothing behind."""
    with step("smoke check"):
        kubectl("delete", "namespace", _NAMESPACE, "--ignore-not-found", "--wait=true", timeout=120)
        jobs = _jobs()
        names = [f"job/{job['metadata']['name']}" for job in jobs]
        try:
            _apply(_fixtures())
            kubectl("--namespace", _NAMESPACE, "wait", "pod/server", "--for=condition=Ready", "--timeout=60s")
            _apply(jobs)
            kubectl("--namespace", _NAMESPACE, "wait", *names, "--for=condition=Complete", "--timeout=90s")
        except Failed as failure:
            explained = [_said("get", "jobs,pods", "--output", "wide"), _said("get", "events")]
            explained += [f"{name}: {_said('logs', name)}" for name in names]
            raise Failed("\n".join([str(failure), *explained])) from failure
        finally:
            kubectl("delete", "namespace", _NAMESPACE, "--ignore-not-found", "--wait=false")


def _said(*arguments: str) -> str:
    """What kubectl says, for a failure's report."""
    try:
        return kubectl("--namespace", _NAMESPACE, *arguments)
    except Failed as failure:
        return str(failure)


def _apply(objects: list[dict[str, Any]]) -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": objects}
    kubectl("apply", "--server-side", "--filename", "-", stdin=json.dumps(listed))


def _fixtures() -> list[dict[str, Any]]:
    """A server that only pods labelled `may: reach` may call; pods labelled `egress: names` may only ask for names."""
    names = {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}
    callers = {"from": [{"podSelector": {"matchLabels": {"may": "reach"}}}]}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": _NAMESPACE}},
        _named("v1", "Pod", "server", _pod(_SERVE, _WORKERS[0]), {"app": "server"}),
        _named("v1", "Service", "server", {"selector": {"app": "server"}, "ports": [{"port": 8080}]}),
        _policy("server", {"app": "server"}, "Ingress", ingress=[callers]),
        _policy("names-only", {"egress": "names"}, "Egress", egress=[names]),
    ]


def _jobs() -> list[dict[str, Any]]:
    """On both workers, so both besides the server and across nodes: who may reach it, and who may not."""
    jobs = []
    for number, worker in enumerate(_WORKERS):
        jobs += [
            _job(f"reaches-{number}", _pod(_TRY, worker, "reached"), {"may": "reach"}),
            _job(f"denied-entry-{number}", _pod(_TRY, worker, "denied"), {}),
            _job(f"denied-exit-{number}", _pod(_TRY, worker, "denied"), {"may": "reach", "egress": "names"}),
        ]
    return [*jobs, _job("mounts", _mounting_pod(), {})]


def _mounting_pod() -> dict[str, Any]:
    """The environment of the host, imported by another user than root in a pod."""
    pod = _pod("import aiohttp, kitestring_api.names", _WORKERS[1], python=str(layout.VENV / "bin" / "python"))
    mounts = [path for path, read_only in layout.mounts() if read_only]
    named = [(f"m{number}", str(path)) for number, path in enumerate(mounts)]
    pod["containers"][0]["volumeMounts"] = [{"name": name, "mountPath": path, "readOnly": True} for name, path in named]
    pod["volumes"] = [{"name": name, "hostPath": {"path": path, "type": "Directory"}} for name, path in named]
    return pod


def _pod(script: str, node: str, *arguments: str, python: str = "python3") -> dict[str, Any]:
    security = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "python",
        "image": layout.BASE_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": [python, "-u", "-c", script, *arguments],
        "securityContext": security,
    }
    return {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "containers": [container],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
    }


def _job(name: str, pod: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    return _named(
        "batch/v1", "Job", name, {"backoffLimit": 0, "template": {"metadata": {"labels": labels}, "spec": pod}}
    )


def _policy(name: str, selects: dict[str, str], kind: str, **rules: list[dict[str, Any]]) -> dict[str, Any]:
    return _named(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        name,
        {"podSelector": {"matchLabels": selects}, "policyTypes": [kind], **rules},
    )


def _named(
    api: str, kind: str, name: str, spec: dict[str, Any], labels: dict[str, str] | None = None
) -> dict[str, Any]:
    metadata = {"name": name, "namespace": _NAMESPACE, "labels": labels or {}}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}
