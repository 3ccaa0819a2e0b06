"""Gateways and policy servers that come and go while the run goes on, and the number of its steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kitestring_trainer.goal import StepGoal, StepsRefusedError
from kitestring_trainer.live import LiveChange, LiveRefusedError, LiveState
from kitestring_trainer.queue.thread import QueueThread
from kitestring_trainer.serving import Look
from kitestring_trainer.status import StatusBoard
from kitestring_trainer.weights import PolicyServers, ServerUnreachableError

logger = logging.getLogger(__name__)

JOIN_SECONDS = 2.0
"""Between two looks whether a new policy server can take the weights yet: its pod may only be starting."""


class Membership:
    """Applies changes of the run. Everything happens in the queue's event loop."""

    def __init__(
        self,
        queue: QueueThread,
        servers: PolicyServers | None,
        *,
        policy: str,
        policy_servers: Sequence[str],
        goal: StepGoal,
        board: StatusBoard,
        look: Look | None,
    ) -> None:
        """`servers` is None where weights are never pushed. `look` says what a server serves, where servers start by
        themselves: then a new one must serve before gateways hear of it."""
        self._queue = queue
        self._servers = servers
        self._policy = policy
        self._goal = goal
        self._board = board
        self._look = look
        self._listed = _clean(policy_servers)
        self._wanted = self._listed
        self._joining: set[str] = set()
        self._telling = asyncio.Lock()

    def change(self, change: LiveChange) -> LiveState:
        """Raises LiveRefusedError; then nothing was changed."""
        if change.steps is not None:
            try:
                self._goal.want(change.steps)
            except StepsRefusedError as error:
                raise LiveRefusedError("StepsMade", str(error)) from error
            self._board.update(steps=self._goal.steps)
        if change.gateways is not None:
            self._change_gateways(_clean(change.gateways))
        if change.policy_servers is not None:
            self._change_servers(_clean(change.policy_servers))
        gateways = self._queue.gateways
        return LiveState(
            steps=self._goal.steps,
            policy_servers=self._listed,
            policy_servers_joining=tuple(sorted(self._joining)),
            gateways=gateways.opening,
            gateways_leaving=gateways.leaving,
        )

    # --- gateways ---

    def _change_gateways(self, urls: tuple[str, ...]) -> None:
        gateways = self._queue.gateways
        new = set(urls) - set(gateways.opening)
        if urls == gateways.opening:
            return
        logger.info("gateways: %s", ", ".join(urls))
        gateways.change(urls)
        self._queue.sweep()
        for url in sorted(new) if self._listed else ():
            # Its own config may be older than a change of the policy servers.
            self._queue.queue.spawn(self._tell(url))

    async def _tell(self, url: str) -> None:
        async with self._telling:
            await self._queue.gateways.put_servers(url, self._policy, self._listed)

    # --- policy servers ---

    def _change_servers(self, urls: tuple[str, ...]) -> None:
        if urls == self._wanted:
            return
        logger.info("policy servers: %s", ", ".join(urls))
        self._wanted = urls
        for url in urls:
            if url not in self._listed and url not in self._joining:
                self._joining.add(url)
                self._queue.queue.spawn(self._join(url))
        self._queue.queue.spawn(self._list())

    async def _join(self, url: str) -> None:
        """Have a new server serve the current weights; only then gateways hear of it."""
        try:
            while url in self._wanted:
                try:
                    if await self._joins(url):
                        break
                except ServerUnreachableError as error:
                    logger.info("policy server %s cannot take the weights yet: %s", url, error)
                await asyncio.sleep(JOIN_SECONDS)
        finally:
            self._joining.discard(url)
        await self._list()

    async def _joins(self, url: str) -> bool:
        if self._servers is not None:
            await self._servers.join(url)
            if url not in self._wanted:  # no more
                self._servers.leave(url)
            return True
        return self._look is None or await self._look(url) is not None

    async def _list(self) -> None:
        """Tell every gateway which servers there are, when that has changed."""
        async with self._telling:
            ready = tuple(url for url in self._wanted if url not in self._joining)
            if not ready or ready == self._listed:
                return
            gone = set(self._listed) - set(ready)
            self._listed = ready
            told = ready
            if self._servers is not None:
                for url in gone:
                    self._servers.leave(url)
                told = tuple(url for url in ready if url not in self._servers.left_out) or ready
            gateways = self._queue.gateways
            await asyncio.gather(*(gateways.put_servers(url, self._policy, told) for url in gateways.urls))


def _clean(urls: Sequence[str]) -> tuple[str, ...]:
    return tuple(url.rstrip("/") for url in urls)
