"""What the operator asks of a cluster: twelve requests. Behind it is the official client; in tests, a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from kitestring_operator.observed import Manifest, ObjectRef

Propagation = Literal["Background", "Foreground"]


class Cluster(Protocol):
    """Requests to an API server. Each may raise one of `cluster.errors`; a write without the lease, NotLeadingError.

    Objects come back whole, `metadata.managedFields` left out.
    """

    async def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply under our field manager: takes fields over from others, creates what is absent."""
        ...

    async def rehearse(self, manifest: Manifest) -> None:
        """Whether `apply` would do: raises what it would. Nothing is changed."""
        ...

    async def create(self, manifest: Manifest) -> Manifest:
        """Create. AlreadyExistsError where an object of the name is there."""
        ...

    async def update(self, manifest: Manifest) -> Manifest:
        """Replace the object that has this `metadata.resourceVersion`. ConflictError when it has another by now."""
        ...

    async def patch(
        self, ref: ObjectRef, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Manifest | None:
        """Merge-patch an object, or a subresource of it; None when it is not there.

        A `metadata.resourceVersion` in the patch must be that of the object (ConflictError).
        """
        ...

    async def patch_status(self, ref: ObjectRef, uid: str, status: Mapping[str, Any]) -> Manifest | None:
        """Apply the whole status: fields that are not in it go. None when the object of this uid is gone."""
        ...

    async def delete(
        self, ref: ObjectRef, *, uid: str, propagation: Propagation = "Background", grace_seconds: int | None = None
    ) -> None:
        """Delete the object that has this uid; one that is gone already is fine."""
        ...

    async def get(self, ref: ObjectRef) -> Manifest | None:
        """The object, or None."""
        ...

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Manifest]:
        """All objects of a kind that the label selector selects; `namespace=None`: of all namespaces.

        They are read by pages, and of each is kept what `trimmed` keeps.
        """
        ...

    async def log_tail(self, pod: ObjectRef, container: str, *, lines: int, limit_bytes: int) -> str:
        """The last lines of a container's log, of these the first so many bytes at most; empty when there is none."""
        ...

    async def latest_event(self, namespace: str, uid: str, reason: str) -> str:
        """Message of the latest event with this reason about the object of this uid; empty when there is none."""
        ...

    async def serves(self, kind: str) -> bool:
        """Whether the API server knows a kind."""
        ...
