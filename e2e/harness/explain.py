"""What explains a failed scenario: objects, conditions, events, logs; short on the screen, whole in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from e2e.harness.api import Api, ApiError, Object, condition
from e2e.harness.kinds import (
    CLAIM,
    DEPLOYMENT,
    JOB,
    NETWORK_POLICY,
    NODE,
    POD,
    POOL,
    RUN,
    SERVICE,
    STATEFUL_SET,
    WORKLOAD,
    Kind,
)

_KINDS = (RUN, POOL, WORKLOAD, JOB, STATEFUL_SET, DEPLOYMENT, POD, SERVICE, CLAIM, NETWORK_POLICY)
_SHOWN_LINES = 25
_KEPT_LINES = 5000


def explain(api: Api, namespaces: list[str], folder: Path) -> str:
    """A text for the test's report. Everything, with whole logs, is written below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [*_nodes(api)]
    for namespace in namespaces:
        parts.append(f"===== namespace {namespace}")
        parts += _objects(api, namespace, folder)
        parts += _events(api, namespace)
        parts += _logs(api, namespace, folder)
    text = "\n".join([*parts, f"===== everything, with whole logs: {folder}"])
    (folder / "explanation.txt").write_text(text)
    return text


def _nodes(api: Api) -> Iterator[str]:
    for node in api.listed(NODE):
        ready = condition(node, "Ready")
        if ready.get("status") != "True" or node["spec"].get("unschedulable"):
            yield f"node {node['metadata']['name']}: {ready.get('reason')}: {ready.get('message')}; spec {node['spec']}"


def _objects(api: Api, namespace: str, folder: Path) -> Iterator[str]:
    for kind in _KINDS:
        items = api.listed(kind, namespace)
        if not items:
            continue
        for item in items:
            item["metadata"].pop("managedFields", None)
        (folder / f"{namespace}-{kind.plural}.yaml").write_text(yaml.safe_dump_all(items, sort_keys=False))
        for item in items:
            yield f"{kind.name} {item['metadata']['name']}: {_summary(kind, item)}"


def _summary(kind: Kind, item: Object) -> str:
    status = item.get("status", {})
    deleted = "being deleted; " if "deletionTimestamp" in item["metadata"] else ""
    conditions = [
        (entry["status"], f"{entry['type']}={entry['status']} {entry.get('reason', '')} {entry.get('message', '')}")
        for entry in status.get("conditions") or ()
    ]
    if kind in (RUN, POOL, WORKLOAD):
        plain = {key: value for key, value in status.items() if key != "conditions"}
        return "\n    ".join([f"{deleted}{plain}", *(said for _, said in conditions)])
    if kind is POD:
        where = item["spec"].get("nodeName", "on no node")
        lacking = [said for value, said in conditions if value == "False"]
        return "\n    ".join([f"{deleted}{status.get('phase')} {where}", *lacking, *_containers(status)])
    counts = {key: value for key, value in status.items() if isinstance(value, int)}
    return f"{deleted}{counts} {'; '.join(said for value, said in conditions if value == 'True')}"


def _containers(status: dict[str, Any]) -> Iterator[str]:
    for entry in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        state: dict[str, dict[str, Any]] = entry.get("state") or {"unknown": {}}
        now, detail = next(iter(state.items()))
        reason = " ".join(str(detail[key]) for key in ("reason", "exitCode", "message") if key in detail)
        last = entry.get("lastState", {}).get("terminated")
        before = f"; before: {last.get('reason')} {last.get('exitCode')} {last.get('message', '')}" if last else ""
        ready = "ready" if entry.get("ready") else "not ready"
        yield f"{entry['name']}: {now} {reason} ({ready}, {entry.get('restartCount', 0)} restarts{before})"


def _events(api: Api, namespace: str) -> Iterator[str]:
    events = api.events(namespace)
    if events:
        yield f"----- events of {namespace}"
    for event in events[-60:]:
        about = event["involvedObject"]
        when = event.get("lastTimestamp") or event.get("eventTime")
        many = f" ×{event['count']}" if event.get("count", 1) > 1 else ""
        what = f"{about.get('kind')}/{about.get('name')} {event['reason']}{many}"
        yield f"{when} {event['type']} {what}: {event['message']}"


def _logs(api: Api, namespace: str, folder: Path) -> Iterator[str]:
    for pod in api.listed(POD, namespace):
        name, status = pod["metadata"]["name"], pod.get("status", {})
        for entry in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
            for previous in (True, False) if entry.get("restartCount") else (False,):
                try:
                    log = api.logs(name, namespace, entry["name"], tail=_KEPT_LINES, previous=previous)
                except ApiError as error:
                    log = f"no log: {error.message}"
                if not log:
                    continue
                title = f"{name}-{entry['name']}" + ("-previous" if previous else "")
                (folder / f"{title}.log").write_text(log)
                lines = log.splitlines()
                yield f"----- log of {title}, last lines of {len(lines)}"
                yield from lines[-_SHOWN_LINES:]
