"""A run whose storage is written down wrong: its status says so within minutes, with the field and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.harness import runs
from e2e.harness.api import Object
from e2e.harness.images import Images
from e2e.harness.kinds import EVENT, RUN
from e2e.harness.namespace import Namespace
from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase

pytestmark = pytest.mark.full

KEYS = "keys"
SAID_SECONDS = 180.0
"""Until the status names the cause: a trainer is started, and waits a minute for the first answer."""
EVENT_SECONDS = 10.0


def test_a_wrong_host_shows_in_the_status(images: Images, namespace: Namespace) -> None:
    """The trainer is started again, with more patience, in case that it was an outage; meanwhile the cause is there."""
    namespace.apply(runs.pool(images), secret(), run(endpoint=f"http://nowhere.{namespace.name}.svc:8333"))

    def is_told(status: dict[str, Any]) -> bool:
        return status.get("reason") == names.REASON_STORAGE_UNAVAILABLE

    told = runs.until_status(namespace, "run", is_told, "the cause", seconds=SAID_SECONDS)["status"]
    assert told["phase"] == Phase.RESTARTING
    for text in (told["message"], told["lastError"]):
        assert "object storage (spec.storage) has not answered once" in text
        assert f"nowhere.{namespace.name}.svc" in text
    namespace.until(EVENT, is_warned_of, "the Event, which follows the status", seconds=EVENT_SECONDS)


def is_warned_of(events: dict[str, Object]) -> bool:
    found = [event for event in events.values() if event["involvedObject"].get("kind") == RUN.name]
    return any((event["type"], event["reason"]) == ("Warning", names.REASON_STORAGE_UNAVAILABLE) for event in found)


def secret() -> Object:
    data = {"accessKeyId": "access-key", "secretAccessKey": "secret-key"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": KEYS}, "stringData": data}


def run(**storage: Any) -> Object:
    """A run that names its storage."""
    return runs.collecting(storage={"bucket": "runs", "credentialsSecretRef": {"name": KEYS}} | storage)
