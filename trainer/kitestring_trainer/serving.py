"""The servers of a run's policy, as the run begins.

On one machine they serve the initial model by themselves. In a cluster they start on weights from storage: the model is
put there, and the servers are awaited, since rollouts before that would only fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kitestring_rollout.storage import ObjectStore
from kitestring_rollout.storage.published_weights import current_version
from kitestring_trainer.config import TrainerConfig
from kitestring_trainer.errors import RunFailedError
from kitestring_trainer.incarnations import policy_version
from kitestring_trainer.ledger import Ledger
from kitestring_trainer.queue.thread import QueueThread
from kitestring_trainer.server_weights import SidecarWeights
from kitestring_trainer.weights import (
    REASON_WEIGHTS_NOT_SERVED,
    PolicyServers,
    ServerUnreachableError,
    WeightsPublisher,
)

logger = logging.getLogger(__name__)

INITIAL_VERSION = policy_version(0, 0)
"""The model as it was given. What the trainer makes of it before its first step is another version: its numbers may be
of another type."""
START_SECONDS = 1800.0
"""How long the first server may take to start: its image has to be pulled, its model fetched and loaded."""
SPARE_SECONDS = 60.0
"""How much longer the others may take."""
LOOK_SECONDS = 1.0
WATCH_SECONDS = 2.0
"""Between two looks at what the policy servers serve."""

Look = Callable[[str], Awaitable[str | None]]
"""The version that a server serves, by its URL; None: none yet. Raises ServerUnreachableError."""


@dataclass(frozen=True, slots=True)
class Serving:
    """`pushed` get new weights; None: the run makes none, or its policy is not served by it. `look` says what a server
    that starts from storage serves."""

    pushed: PolicyServers | None = None
    look: Look | None = None
    urls: tuple[str, ...] = ()

    def wait(self, queue: QueueThread) -> None:
        """Block until the servers serve. Raises RunFailedError, and what the queue fails with meanwhile."""
        if self.look is not None:
            queue.call_or_fail(all_serve(self.look, self.urls))


def serve_policy(
    config: TrainerConfig, queue: QueueThread, store: ObjectStore, ledger: Ledger, credential: str
) -> Serving:
    """Have the servers of the config serve the policy; `credential` is that of their sidecars."""
    collects = config.spec.trainer.backend == "collect"
    if not config.policy_servers or (collects and not config.artifacts):
        return Serving()
    servers = PolicyServers(
        config.policy_servers,
        config.policy.name,
        queue.gateways,
        queue.session,
        drain_seconds=config.spec.gateway.hold_seconds,
        publisher=WeightsPublisher(store, ledger) if config.artifacts else None,
        credential=credential,
    )
    if not collects:
        queue.watch(servers.watch(WATCH_SECONDS))
    if not config.artifacts:
        return Serving(servers)
    if config.model is not None and ledger.persist(lambda: current_version(store)) is None:
        queue.watch(servers.offer(config.model, INITIAL_VERSION))
    look = SidecarWeights(queue.session, credential, START_SECONDS).version
    return Serving(None if collects else servers, look, config.policy_servers)


async def all_serve(look: Look, urls: Sequence[str]) -> None:
    """Return when every server serves some version, or one does and the others take too long.

    Raises RunFailedError when none does.
    """
    began, first = time.monotonic(), None
    while True:
        missing = [url for url in urls if not await _serves(look, url)]
        now = time.monotonic()
        if not missing:
            return
        if len(missing) < len(urls):
            first = first or now
            if now - first > SPARE_SECONDS:
                logger.warning("policy servers that do not serve yet: %s; going on", ", ".join(missing))
                return
        elif now - began > START_SECONDS:
            message = f"no policy server serves the model {START_SECONDS:.0f} s after the trainer's start"
            raise RunFailedError(REASON_WEIGHTS_NOT_SERVED, message, restart_helps=True)
        await asyncio.sleep(LOOK_SECONDS)


async def _serves(look: Look, url: str) -> bool:
    try:
        return await look(url) is not None
    except ServerUnreachableError as error:
        logger.debug("policy server %s: %s", url, error)
        return False
