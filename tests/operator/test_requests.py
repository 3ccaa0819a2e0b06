"""The requests that reach an API server, and what its answers mean. The server here answers as it is told."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes.client.api_client import ApiClient
from kubernetes.client.configuration import Configuration

from kitestring_operator.cluster import requests
from kitestring_operator.cluster.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    NotLeadingError,
    RefusedError,
    UnavailableError,
)
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.cluster.requests import RequestedCluster
from kitestring_operator.metrics import Metrics

POD = KINDS["Pod"].ref("n", "p")
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "namespace": "n"}, "data": {"a": "b"}}


class Server:
    """An API server: `answers` are given in turn, the last one again and again."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.answers: list[tuple[int, Any]] = [(200, {})]
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                server.asked.append((self.command, self.path, dict(self.headers), json.loads(body) if body else None))
                status, answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def cluster(server: Server, metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestedCluster]:
    monkeypatch.setattr(requests.tenacity, "wait_random_exponential", lambda **_: requests.tenacity.wait_none())
    configuration = Configuration()
    configuration.host = server.url
    configuration.retries = False
    client = ApiClient(configuration)
    executor = ThreadPoolExecutor(2)
    yield RequestedCluster(client, executor, metrics)
    executor.shutdown()
    client.close()


def writes(metrics: Metrics, kind: str, verb: str) -> float:
    return (
        metrics.registry.get_sample_value("kitestring_operator_api_writes_total", {"kind": kind, "verb": verb}) or 0.0
    )


async def test_apply(server: Server, cluster: RequestedCluster, metrics: Metrics) -> None:
    server.answers = [(200, CONFIG | {"metadata": {"name": "c", "managedFields": [1]}})]
    found = await cluster.apply(CONFIG)
    method, path, headers, body = server.asked[0]
    assert (method, path) == ("PATCH", "/api/v1/namespaces/n/configmaps/c?fieldManager=kitestring-operator&force=true")
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert body == CONFIG
    assert "managedFields" not in found["metadata"]
    assert writes(metrics, "ConfigMap", "apply") == 1


async def test_a_rehearsal_is_an_apply_that_changes_nothing(server: Server, cluster: RequestedCluster) -> None:
    await cluster.rehearse(CONFIG)
    method, path, headers, body = server.asked[0]
    assert (method, path.split("?")[0]) == ("PATCH", "/api/v1/namespaces/n/configmaps/c")
    assert path.endswith("?fieldManager=kitestring-operator&force=true&dryRun=All")
    assert (headers["Content-Type"], body) == ("application/apply-patch+yaml", CONFIG)
    server.answers = [(422, {"message": "image: Required value"})]
    with pytest.raises(RefusedError, match="rehearse ConfigMap n/c: image: Required value"):
        await cluster.rehearse(CONFIG)


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("\U0001f9ea \\ \\ud83e\\uddea \u2028\x85\x7f\ufeff")
def test_any_text_can_be_applied(text: str) -> None:
    """What is applied is read as YAML 1.1, whose escapes know no surrogates and whose lines end in more ways."""
    written = requests.as_yaml({"a": text})
    assert yaml.safe_load(written) == json.loads(written) == {"a": text}
    assert all(letter.isascii() or letter > "\uffff" for letter in written)
    assert not re.search(r"(?<!\\)(\\\\)*\\ud[89a-f]", written)


async def test_status_is_of_one_object_only(server: Server, cluster: RequestedCluster) -> None:
    ref = KINDS["TrainingRun"].ref("n", "r")
    await cluster.patch_status(ref, "uid-1", {"phase": "Running"})
    method, path, _, body = server.asked[0]
    assert (method, path.split("?")[0]) == ("PATCH", "/apis/kitestring.dev/v1alpha1/namespaces/n/trainingruns/r/status")
    assert body["metadata"] == {"name": "r", "namespace": "n", "uid": "uid-1"}
    server.answers = [(409, {"message": "uid mismatch"})]
    assert await cluster.patch_status(ref, "uid-1", {"phase": "Running"}) is None
    server.answers = [(404, {})]
    assert await cluster.patch_status(ref, "uid-1", {"phase": "Running"}) is None


async def test_delete_is_of_one_object_only(server: Server, cluster: RequestedCluster) -> None:
    await cluster.delete(POD, uid="u", grace_seconds=3)
    method, path, _, body = server.asked[0]
    assert (method, path) == ("DELETE", "/api/v1/namespaces/n/pods/p")
    assert body == {"propagationPolicy": "Background", "preconditions": {"uid": "u"}, "gracePeriodSeconds": 3}
    for status in (404, 409):
        server.answers = [(status, {})]
        await cluster.delete(POD, uid="u")


async def test_lists_are_read_by_pages_and_trimmed(server: Server, cluster: RequestedCluster) -> None:
    bulky = {"metadata": {"name": "a", "managedFields": [{}]}, "spec": {"parallelism": 2, "template": {"spec": {}}}}
    page = {"metadata": {"continue": "more"}, "items": [bulky]}
    server.answers = [(200, page), (200, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]})]
    found = await cluster.list("Job", None, "a=b")
    assert [(item["kind"], item["apiVersion"], item["metadata"]["name"]) for item in found] == [
        ("Job", "batch/v1", "a"),
        ("Job", "batch/v1", "b"),
    ]
    assert found[0]["metadata"] == {"name": "a"} and found[0]["spec"] == {"parallelism": 2}
    assert server.asked[0][1] == "/apis/batch/v1/jobs?limit=100&labelSelector=a%3Db"
    assert server.asked[1][1].endswith("&continue=more")


async def test_of_what_only_metadata_matters_no_more_is_asked_for(server: Server, cluster: RequestedCluster) -> None:
    """The values of Secrets, first of all."""
    item = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": {"name": "a"}}
    server.answers = [(200, {"kind": "PartialObjectMetadataList", "metadata": {}, "items": [item]})]
    assert await cluster.list("Secret", "n") == [{"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "a"}}]
    _, path, headers, _ = server.asked[0]
    assert path == "/api/v1/namespaces/n/secrets?limit=500"
    assert headers["Accept"].startswith("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")


async def test_what_is_not_there_is_none(server: Server, cluster: RequestedCluster) -> None:
    server.answers = [(404, {"message": "pods p not found"})]
    assert await cluster.get(POD) is None
    assert await cluster.patch(POD, {}) is None
    assert await cluster.log_tail(POD, "c", lines=3, limit_bytes=10) == ""
    assert not await cluster.serves("Workload")
    with pytest.raises(RefusedError):
        await cluster.apply(CONFIG)


async def test_logs(server: Server, cluster: RequestedCluster) -> None:
    server.answers = [(200, b"one\n\xff two")]
    assert await cluster.log_tail(POD, "c", lines=3, limit_bytes=10) == "one\n� two"
    assert server.asked[0][1] == "/api/v1/namespaces/n/pods/p/log?container=c&tailLines=3&limitBytes=10"


async def test_the_latest_event_counts(server: Server, cluster: RequestedCluster) -> None:
    events = [
        {"message": "first", "lastTimestamp": "2026-03-01T12:00:00Z"},
        {"message": "last", "lastTimestamp": None, "series": {"lastObservedTime": "2026-03-01T12:00:09.000001Z"}},
        {"message": "second", "eventTime": "2026-03-01T12:00:05.000000Z"},
    ]
    server.answers = [(200, {"metadata": {}, "items": events})]
    assert await cluster.latest_event("n", "u", "FailedCreate") == "last"
    path = "/api/v1/namespaces/n/events?fieldSelector=involvedObject.uid%3Du%2Creason%3DFailedCreate&limit=100"
    assert server.asked[0][:2] == ("GET", path)
    server.answers = [(200, {"metadata": {}, "items": []})]
    assert await cluster.latest_event("n", "u", "FailedCreate") == ""


async def test_kinds(server: Server, cluster: RequestedCluster) -> None:
    server.answers = [(200, {"resources": [{"name": "workloads"}]})]
    assert await cluster.serves("Workload")
    assert server.asked[0][1] == "/apis/kueue.x-k8s.io/v1beta2"


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_what_may_pass_is_tried_again(
    server: Server, cluster: RequestedCluster, metrics: Metrics, status: int
) -> None:
    server.answers = [(status, {}), (status, {}), (200, CONFIG)]
    await cluster.apply(CONFIG)
    assert len(server.asked) == 3
    assert writes(metrics, "ConfigMap", "apply") == 3


@pytest.mark.parametrize(
    ("status", "error", "tries"),
    [(422, RefusedError, 1), (403, ForbiddenError, 1), (409, ConflictError, 4), (503, UnavailableError, 4)],
)
async def test_what_does_not_pass_is_said(
    server: Server, cluster: RequestedCluster, status: int, error: type[Exception], tries: int
) -> None:
    server.answers = [(status, {"message": "spec.x: Invalid value"})]
    with pytest.raises(error, match=r"apply ConfigMap n/c: spec.x: Invalid value"):
        await cluster.apply(CONFIG)
    assert len(server.asked) == tries


async def test_a_conflict_decides_between_two(server: Server, cluster: RequestedCluster) -> None:
    server.answers = [(409, {})]
    with pytest.raises(AlreadyExistsError):
        await cluster.create(CONFIG)
    with pytest.raises(ConflictError):
        await cluster.update(CONFIG | {"metadata": CONFIG["metadata"] | {"resourceVersion": "1"}})
    assert len(server.asked) == 2, "not tried again: someone else was first"


async def test_silence_is_an_error(server: Server, cluster: RequestedCluster) -> None:
    server.close()
    with pytest.raises(UnavailableError):
        await cluster.get(POD)


async def test_without_the_lease_nothing_is_written(server: Server, cluster: RequestedCluster) -> None:
    fenced = cluster.fenced(lambda: False)
    for write in (fenced.apply(CONFIG), fenced.create(CONFIG), fenced.patch(POD, {}), fenced.delete(POD, uid="u")):
        with pytest.raises(NotLeadingError):
            await write
    assert server.asked == []
    await fenced.get(POD)
    assert len(server.asked) == 1
