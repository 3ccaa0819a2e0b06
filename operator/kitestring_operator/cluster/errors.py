"""How a request to the API server can fail, as far as the operator does something different about it."""

from __future__ import annotations


class ClusterError(Exception):
    """A request to the API server failed. `status` is its HTTP status, 0 when it was not answered."""

    def __init__(self, what: str, status: int, reason: str) -> None:
        super().__init__(f"{what}: {reason} ({status or 'no answer'})")
        self.status = status
        self.reason = reason


class ConflictError(ClusterError):
    """409: the object changed meanwhile, or is another one (its uid differs)."""


class AlreadyExistsError(ClusterError):
    """409 on create: there is an object of that name."""


class RefusedError(ClusterError):
    """400, 404 of a kind or namespace, 422: asking again does not help before something changes."""


class ForbiddenError(ClusterError):
    """401, 403: the operator lacks a right; the reason says which."""


class UnavailableError(ClusterError):
    """429, 5xx, or no answer, also after the retries."""


class NotLeadingError(Exception):
    """A write was refused here because this process does not hold the lease."""
