"""`kitestring operator`: the process. It serves its probes, waits for the lease, sees all that is there, and acts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import kopf

from kitestring_api.errors import UserMistakeError
from kitestring_api.names import EXIT_FAILED, EXIT_OK, GROUP
from kitestring_operator import handlers
from kitestring_operator.cluster.cache import ObjectCache
from kitestring_operator.cluster.errors import NotLeadingError
from kitestring_operator.cluster.kinds import KINDS, RESOURCES
from kitestring_operator.cluster.requests import THREADS, RequestedCluster, connect
from kitestring_operator.controller import Controller, KindsChangedError
from kitestring_operator.effects import Effects
from kitestring_operator.events import Events
from kitestring_operator.leader import Leader, LeaseLostError
from kitestring_operator.metrics import Metrics
from kitestring_operator.probes import Probes
from kitestring_operator.rate import TokenBucket
from kitestring_operator.served import NamespacesChangedError, await_role, served
from kitestring_operator.settings import Settings, load_settings
from kitestring_operator.trainer_client import TrainerClient
from kitestring_operator.trainers import Poller, Trainers

SILENCE: Final = 5
"""So many resyncs without a word of the cluster, and the process is not alive."""
SHORTEST_SILENCE_SECONDS: Final = 180.0
FIRST_LOOK_SECONDS: Final = 10.0
"""kopf begins to watch when everything was looked at, or after so long."""
STUCK_SECONDS: Final = 600.0
"""A resource that is being looked at for so long: the process is not alive."""
_ENDS: Final = LeaseLostError | KindsChangedError | NamespacesChangedError | NotLeadingError
"""What ends this process, and is nobody's mistake: the next one begins with what has changed."""
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

log = logging.getLogger(__name__)


def run(config: Path, host: str, port: int) -> int:
    """Until SIGTERM; the process's exit code. Raises UserMistakeError."""
    return asyncio.run(serve(load_settings(config), host, port))


async def serve(settings: Settings, host: str, port: int) -> int:
    """Until SIGTERM, or until this process may not or cannot act any longer."""
    async with AsyncExitStack() as stack:
        operator = _Operator(settings, stack)
        return await operator.run(host, port)


class _Operator:
    """Everything of one process."""

    def __init__(self, settings: Settings, stack: AsyncExitStack) -> None:
        self._settings = settings
        self._stack = stack
        self._metrics = Metrics()
        client = connect()
        executor = ThreadPoolExecutor(THREADS, thread_name_prefix="cluster")
        stack.callback(client.close)
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        self._plain = RequestedCluster(client, executor, self._metrics)
        self._leader: Leader | None = None
        if settings.leader_election.enabled:
            self._leader = Leader(
                self._plain,
                settings.leader_election,
                namespace=settings.leader_election.namespace or _own_namespace(),
                identity=_own_name(),
                metrics=self._metrics,
            )
        self._controller: Controller | None = None

    async def run(self, host: str, port: int) -> int:
        stop = asyncio.Event()
        _stop_on_signals(stop)
        probes = Probes(self._metrics, alive=self._problem, ready=self._unready)
        bound = await probes.start(host, port)
        self._stack.push_async_callback(probes.stop)
        sys.stdout.write(json.dumps({"listening": {"http": f"http://{host}:{bound}"}}) + "\n")
        sys.stdout.flush()
        if self._leader is not None:
            if not await _until(self._leader.acquire(), stop):
                return EXIT_OK
            self._stack.push_async_callback(self._leader.release)
        return await self._act(stop)

    async def _act(self, stop: asyncio.Event) -> int:
        """With the lease."""
        keeping: list[asyncio.Task[None]] = []
        if self._leader is not None:
            # At once: the first list of a large cluster takes longer than the lease lasts.
            keeping.append(asyncio.create_task(self._leader.keep()))
            self._stack.push_async_callback(_ended, keeping[0])
        cluster = self._plain if self._leader is None else self._plain.fenced(self._leader.may_act)
        for kind in RESOURCES:
            if not await cluster.serves(kind):
                raise UserMistakeError(
                    f"the cluster does not know {KINDS[kind].plural}.{GROUP}; install it: kitestring crds | "
                    "kubectl apply --server-side -f -"
                )
        named = self._settings.namespaces
        self._settings = self._settings.model_copy(update={"namespaces": await served(cluster, named)})
        cache = ObjectCache()
        trainers = Trainers(
            cluster,
            await self._stack.enter_async_context(TrainerClient()),
            self._metrics,
            self._settings.cluster_domain,
        )
        effects = Effects(
            cluster,
            cache,
            events=Events(cluster, _own_name()),
            trainers=trainers,
            jobs=TokenBucket(self._settings.job_creation_per_second),
            metrics=self._metrics,
        )
        has_kueue = await cluster.serves("Workload")
        controller = self._controller = Controller(
            self._settings, cluster, cache, effects, metrics=self._metrics, has_kueue=has_kueue
        )
        if not await _until(controller.resync(), stop, *keeping):
            return outcome({task for task in keeping if task.done()})
        poller = Poller(
            trainers,
            cache,
            memory_of=controller.memory_of,
            changed=controller.trainer_said,
            seconds=self._settings.poll_seconds,
        )
        working = [controller.work(), controller.keep_in_sync(), poller.run()]
        unserved = set(named) - set(self._settings.namespaces)
        if unserved:
            working.append(await_role(cluster, sorted(unserved), self._settings.resync_seconds))
        tasks = {*keeping, *(asyncio.create_task(one) for one in working)}
        return await self._all(tasks, controller, stop, has_kueue=has_kueue)

    async def _all(
        self,
        tasks: set[asyncio.Task[Any]],
        controller: Controller,
        stop: asyncio.Event,
        *,
        has_kueue: bool,
    ) -> int:
        """Run them and kopf side by side until one ends."""
        tasks.add(asyncio.create_task(stop.wait()))
        await _first_look(controller, tasks)
        watches = []
        if not any(task.done() for task in tasks):
            watches.append(await self._watch(controller, stop, has_kueue=has_kueue))
        done, _ = await asyncio.wait({*tasks, *watches}, return_when=asyncio.FIRST_COMPLETED)
        stop.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leader is not None:
            # Nothing writes any more. kopf takes five seconds to end, for which the next process need not wait.
            await self._leader.release()
        await asyncio.gather(*watches, return_exceptions=True)
        return outcome({*done, *watches})

    async def _watch(self, controller: Controller, stop: asyncio.Event, *, has_kueue: bool) -> asyncio.Task[None]:
        """kopf, which has begun to watch."""
        await asyncio.sleep(0)
        ours = asyncio.all_tasks()
        namespaces = self._settings.namespaces
        watching = await kopf.spawn_tasks(
            registry=handlers.registry(controller.observe, has_kueue=has_kueue),
            settings=handlers.settings(),
            # else it asks for the name of this process's user, which has none in a container
            identity=_own_name(),  # type: ignore[arg-type]
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=stop,
        )
        # kopf has taken the signals over, and would end before what is ours
        _stop_on_signals(stop)
        return asyncio.create_task(kopf.run_tasks(watching, ignored=ours))

    # --- Probes ---------------------------------------------------------------------------------------------------

    def _problem(self) -> str | None:
        if self._controller is None:
            return None  # waits for the lease, or for the first list: the answer itself shows that the loop turns
        silence = max(SILENCE * self._settings.resync_seconds, SHORTEST_SILENCE_SECONDS)
        if time.monotonic() - self._controller.heard_at > silence:
            return f"nothing was heard of the cluster for {silence:.0f} s"
        stuck = self._controller.longest_seconds()
        if stuck > STUCK_SECONDS:
            return f"a resource is being looked at for {stuck:.0f} s"
        return None

    def _unready(self) -> str | None:
        if self._controller is None:
            # one that waits for the lease is ready to take over, as long as it hears of it
            if self._leader is not None and time.monotonic() - self._leader.heard_at > SHORTEST_SILENCE_SECONDS:
                return "the API server does not answer"
            return None
        return None if self._controller.is_synced else "the first list of all objects is not there yet"


def _stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def outcome(done: set[asyncio.Task[Any]]) -> int:
    """Exit code of a process of which these tasks have ended. Raises what is a bug."""
    for task in done:
        error = None if task.cancelled() else task.exception()
        if error is None:
            continue
        found = [*_leaves(error)]
        if all(isinstance(leaf, _ENDS) for leaf in found):
            log.error("%s", found[0])
            return EXIT_FAILED
        if all(isinstance(leaf, handlers.KindGoneError) for leaf in found):
            log.error("a kind was removed from the cluster: this process ends, the next one watches what is there")
            return EXIT_FAILED
        refused = [leaf for leaf in found if isinstance(leaf, handlers.MayNotWatchError)]
        if len(refused) == len(found):
            log.error("%s: this process ends, the next one watches where it has rights", refused[0].message)
            return EXIT_FAILED
        raise error
    return EXIT_OK


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event, *meanwhile: asyncio.Task[None]) -> bool:
    """Whether `work` ended before it was to stop, and before any of `meanwhile`."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped, *meanwhile}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        task.result()
        return True
    await _ended(task)
    return False


async def _first_look(controller: Controller, tasks: set[asyncio.Task[Any]]) -> None:
    """Until everything was looked at once, or one of the tasks has ended.

    kopf lists everything again, which would take the time from it. What changes meanwhile, kopf's list says; what goes,
    the controller's second one.
    """
    looked = asyncio.create_task(controller.looked_at_all.wait())
    await asyncio.wait({*tasks, looked}, timeout=FIRST_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    await _ended(looked)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task, and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _own_name() -> str:
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


def _own_namespace() -> str:
    """Of this pod. Raises UserMistakeError outside a cluster, where the settings must say it."""
    named = os.environ.get("POD_NAMESPACE")
    if named:
        return named
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError as error:
        raise UserMistakeError(
            "leaderElection.namespace: found nothing, and this process runs in no pod; name the namespace of the Lease"
        ) from error
