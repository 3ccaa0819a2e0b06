"""Attempts that an earlier incarnation of the trainer left open at gateways which outlived it.

Nobody will ever finish them: their leases died with their trainer. Until they are fenced their agents' tokens work, and
a gateway that is to end would wait for them.
"""

from __future__ import annotations

import asyncio
import logging

from kitestring_rollout.protocol.gateway_admin import HeldAttempt
from kitestring_trainer.incarnations import SUPERSEDED
from kitestring_trainer.queue.gateways import Gateways
from kitestring_trainer.queue.state import Place

logger = logging.getLogger(__name__)

_AT_ONCE = 32
"""Attempts of one gateway that are ended at once; a fence waits for acknowledgements from storage."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0


async def end_leftovers(gateways: Gateways, run: str, urls: tuple[str, ...]) -> None:
    """Fence and end whatever the gateways `urls` hold of this run, as Infrastructure.

    `urls` come from `Gateways.shut_unswept`: each opens attempts again once it has said what it holds, so that nothing
    of this incarnation is among it. One that cannot be reached is asked again for as long as it is one of the run's.
    """
    await asyncio.gather(*(_end_at(gateways, run, url) for url in urls))


async def _end_at(gateways: Gateways, run: str, url: str) -> None:
    pause = _FIRST_PAUSE_SECONDS
    while (held := await gateways.held(url)) is None:
        await asyncio.sleep(pause)
        pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)
        if url not in gateways.opening:
            logger.info("gateway %s has gone before it said what it holds", url)
            return
    if not gateways.mark_swept(url):
        return
    left = [attempt for attempt in held.attempts if attempt.run == run]
    if not left:
        return
    logger.info("gateway %s holds %d attempts of an earlier incarnation: ending them", url, len(left))
    place, limit = Place(url, held.epoch), asyncio.Semaphore(_AT_ONCE)

    async def end(attempt: HeldAttempt) -> None:
        async with limit:
            await gateways.abandon(place, attempt.attempt, SUPERSEDED)

    await asyncio.gather(*(end(attempt) for attempt in left))
