"""Which namespaces of the settings are served: one may go, and its Role with it, while the others go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import NoReturn

from kitestring_api import names
from kitestring_api.errors import UserMistakeError
from kitestring_operator.cluster.errors import ClusterError, ForbiddenError
from kitestring_operator.cluster.protocol import Cluster

log = logging.getLogger(__name__)


class NamespacesChangedError(Exception):
    """Other namespaces can be served than when this process began to watch."""


def is_lost(error: ClusterError) -> bool:
    """Whether the API server knows this process, and grants it a right no longer, or not yet."""
    return error.status == HTTPStatus.FORBIDDEN


async def served(cluster: Cluster, namespaces: Iterable[str]) -> tuple[str, ...]:
    """Those in which this process may look for runs; the others are told in the log.

    Raises ClusterError, and UserMistakeError where it may in none.
    """
    found = []
    refused: list[ForbiddenError] = []
    for namespace in namespaces:
        problem = await _problem(cluster, namespace)
        if problem is None:
            found.append(namespace)
        else:
            log.warning("namespace %s is not served until its Role is there: %s", namespace, problem)
            refused.append(problem)
    if refused and not found:
        raise UserMistakeError(f"namespaces: this process has rights in none of them: {refused[0]}")
    return tuple(found)


async def await_role(cluster: Cluster, namespaces: Iterable[str], seconds: float) -> NoReturn:
    """Look every so many seconds whether one of them can be served by now: then raises NamespacesChangedError."""
    while True:
        await asyncio.sleep(seconds)
        for namespace in namespaces:
            try:
                problem = await _problem(cluster, namespace)
            except ClusterError as error:
                log.warning("namespace %s: %s", namespace, error)
                continue
            if problem is None:
                raise NamespacesChangedError(
                    f"namespace {namespace} can be served now: this process ends, the next one serves it"
                )


async def _problem(cluster: Cluster, namespace: str) -> ForbiddenError | None:
    """Why this process cannot serve a namespace. Raises ClusterError where that is not a matter of rights."""
    try:
        await cluster.list(names.KIND_TRAINING_RUN, namespace)
    except ForbiddenError as error:
        if is_lost(error):
            return error
        raise
    return None
