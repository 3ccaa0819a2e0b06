"""A namespace of a scenario's own, and how it is left."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from e2e.harness.api import Api, NotYet, Object, is_true
from e2e.harness.kinds import EVENT, NAMESPACE, OF_A_RUN, POD, POOL, RUN, Kind
from e2e.harness.kubectl import Kubectl
from kitestring_api import names

LABEL = "kitestring-e2e"
"""Label of every namespace that a scenario makes, by which forgotten ones are found."""


class Namespace:
    """Objects of one namespace: what a scenario reads, writes and waits for."""

    def __init__(self, api: Api, name: str, kubectl: Kubectl) -> None:
        self.api = api
        self.name = name
        self.kubectl = kubectl.in_namespace(name)

    @classmethod
    def create(cls, api: Api, purpose: str, kubectl: Kubectl) -> Namespace:
        """A new one; `purpose` becomes part of its name."""
        plain = "".join(letter if letter.isalnum() else "-" for letter in purpose.lower()).strip("-")[:40].strip("-")
        name = f"e2e-{plain}-{secrets.token_hex(2)}"
        metadata = {"name": name, "labels": {LABEL: "scenario"}}
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        # Pods can be made once the namespace has its service account.
        account = Kind("ServiceAccount", "v1", "serviceaccounts")
        api.until(
            account, lambda found: "default" in found, "service account of the namespace", seconds=30, namespace=name
        )
        return cls(api, name, kubectl)

    def apply(self, *items: Object) -> None:
        """Server-side apply each."""
        for item in items:
            self.api.apply(item, self.name)

    def apply_file(self, path: Path, change: Callable[[Object], Object] | None = None) -> list[Object]:
        """Apply each document of a YAML file, after `change`."""
        items = [item for item in yaml.safe_load_all(path.read_text()) if item]
        if change is not None:
            items = [change(item) for item in items]
        self.apply(*items)
        return items

    def get(self, kind: Kind, name: str) -> Object:
        """An object that is there."""
        found = self.api.get(kind, name, self.name)
        assert found is not None, f"{kind.name} {name} is not there"
        return found

    def listed(self, kind: Kind, selector: str = "") -> list[Object]:
        """Objects of a kind."""
        return self.api.listed(kind, self.name, selector)

    def patch(self, kind: Kind, name: str, change: dict[str, Any], part: str = "") -> Object:
        """Merge patch."""
        return self.api.patch(kind, name, self.name, change, part)

    def delete(self, kind: Kind, name: str, grace: int | None = None) -> None:
        """Ask for the end of an object."""
        self.api.delete(kind, name, self.name, grace)

    def until(
        self, kind: Kind, done: Callable[[dict[str, Object]], bool], what: str, *, seconds: float, selector: str = ""
    ) -> dict[str, Object]:
        """Objects of a kind, once `done` says so of them."""
        return self.api.until(kind, done, what, seconds=seconds, namespace=self.name, selector=selector)

    def until_object(
        self, kind: Kind, name: str, done: Callable[[Object], bool], what: str, *, seconds: float
    ) -> Object:
        """One object, once `done` says so of it."""
        return self.api.until_object(kind, name, self.name, done, what, seconds=seconds)

    def until_condition(self, kind: Kind, name: str, condition: str, *, seconds: float) -> Object:
        """One object, once a condition of it is True."""
        what = f"{condition} of {kind.name} {name}"
        return self.until_object(kind, name, lambda item: is_true(item, condition), what, seconds=seconds)

    def until_gone(self, kind: Kind, *, seconds: float, selector: str = "", name: str = "") -> None:
        """Return once no such object is left."""
        self.api.until_gone(kind, self.name, seconds=seconds, selector=selector, name=name)

    def pods(self, selector: str = "") -> list[Object]:
        """Pods, by name."""
        return self.listed(POD, selector)

    def events_of(self, kind: Kind, name: str) -> list[Object]:
        """Events about one object, the oldest first."""
        return [
            event
            for event in self.api.events(self.name)
            if event["involvedObject"].get("kind") == kind.name and event["involvedObject"].get("name") == name
        ]

    def exec(self, pod: str, container: str, *command: str, seconds: float = 30) -> str:
        """Standard output of a command in a container."""
        return self.kubectl("exec", pod, "--container", container, "--", *command, seconds=seconds)

    def objects_of_run(self, run: str) -> dict[str, list[str]]:
        """Names of what belongs to a run, by kind."""
        selector = f"{names.LABEL_RUN}={run}"
        found = {kind.name: [item["metadata"]["name"] for item in self.listed(kind, selector)] for kind in OF_A_RUN}
        return {kind: items for kind, items in found.items() if items}

    def remove(self, *, seconds: float = 120) -> None:
        """Delete runs and pools as a user would, then the namespace; raises NotYet when something stays.

        A namespace deletes nothing before its pods are gone, and looks for that once a minute only: so it goes last.
        """
        deadline = time.monotonic() + seconds
        for kind in (RUN, POOL):
            for item in self.listed(kind):
                self.delete(kind, item["metadata"]["name"])
        for kind in (RUN, POOL):
            self.until_gone(kind, seconds=max(1.0, deadline - time.monotonic()))
        self.until_gone(POD, seconds=max(1.0, deadline - time.monotonic()), selector=names.LABEL_RUN)
        self.api.delete(NAMESPACE, self.name)
        try:
            self.api.until_gone(NAMESPACE, None, seconds=seconds, name=self.name)
        except NotYet as late:
            left = {kind.name: [item["metadata"]["name"] for item in self.listed(kind)] for kind in (*OF_A_RUN, EVENT)}
            raise NotYet(f"{late}; left: { ({kind: items for kind, items in left.items() if items}) }") from None
