"""The trainers of the runs: where each is, with which credential it is spoken to, and what it last said."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from kitestring_api import names
from kitestring_api.v1alpha1.status import Phase
from kitestring_operator import identity
from kitestring_operator.cluster.cache import ObjectCache, RunKey
from kitestring_operator.cluster.errors import ClusterError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.cluster.protocol import Cluster
from kitestring_operator.conditions import ANSWER_SECONDS
from kitestring_operator.identity import Named
from kitestring_operator.memory import RunMemory, TrainerMemory
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import LostRollout, Manifest, Objects
from kitestring_operator.parts.credentials import QUEUE
from kitestring_operator.pods import controller_uid
from kitestring_operator.trainer_client import TrainerClient, TrainerRefusedError, TrainerSilentError
from kitestring_operator.trainer_job import is_active, newest_trainer, number_of

AT_ONCE: Final = 32
"""Trainers asked at once."""
_UNAUTHORIZED: Final = 401
_ACTIVE: Final = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING})

log = logging.getLogger(__name__)


class Trainers:
    """Speaks to trainers. What they say is kept in the memory of their run."""

    def __init__(self, cluster: Cluster, client: TrainerClient, metrics: Metrics, cluster_domain: str) -> None:
        self._cluster = cluster
        self._client = client
        self._metrics = metrics
        self._domain = cluster_domain

    async def change(self, run: Named, memory: RunMemory, live: Mapping[str, Any]) -> None:
        """Raises TrainerSilentError, TrainerRefusedError."""
        await self._client.change(self._url(run), await self._credential(run, memory), live)

    async def lost(self, run: Named, memory: RunMemory, lost: LostRollout) -> None:
        """Raises TrainerSilentError, TrainerRefusedError."""
        await self._client.lost(self._url(run), await self._credential(run, memory), lost)

    async def ask(self, run: Named, memory: RunMemory, job: Manifest, rollouts: int) -> bool:
        """Ask a Job's trainer how the run goes, and for so many rollouts at most that wait. Whether anything is new."""
        loop = asyncio.get_running_loop()
        trainer, job_uid = memory.trainer, job["metadata"]["uid"]
        if trainer is None or trainer.job_uid != job_uid:
            trainer = memory.trainer = TrainerMemory(job_uid, number_of(job))
        asked_at = loop.time()
        was_silent = asked_at - trainer.answered_at > ANSWER_SECONDS
        try:
            url, credential = self._url(run), await self._credential(run, memory)
            report = await self._client.report(url, credential)
            wanted = await self._client.wanted(url, credential, rollouts) if rollouts else ()
        except TrainerSilentError as error:
            self._metrics.trainer_polls.labels("silent").inc()
            log.debug("%s", error)
            return not was_silent and loop.time() - trainer.answered_at > ANSWER_SECONDS
        except TrainerRefusedError as error:
            self._metrics.trainer_polls.labels("refused").inc()
            log.warning("%s", error)
            if error.status == _UNAUTHORIZED:
                memory.queue_credential = None
            return False
        self._metrics.trainer_polls.labels("answered").inc()
        says_more = trainer.answered(report, loop.time())
        wants_more = trainer.asked_for(wanted, asked_at)
        return says_more or wants_more or was_silent

    def met_bug(self) -> None:
        """Count a question that ended with an error of the operator."""
        self._metrics.trainer_polls.labels("bug").inc()

    def _url(self, run: Named) -> str:
        host = identity.service_host(identity.trainer_name(run.name), run.namespace, self._domain)
        return f"http://{host}:{names.PORT_QUEUE}"

    async def _credential(self, run: Named, memory: RunMemory) -> str:
        if memory.queue_credential is None:
            ref = KINDS["Secret"].ref(run.namespace, identity.keys_name(run.name))
            try:
                secret = await self._cluster.get(ref)
            except ClusterError as error:
                raise TrainerSilentError(str(error)) from error
            if secret is None or controller_uid(secret) != run.uid or QUEUE not in (secret.get("data") or {}):
                raise TrainerSilentError(f"Secret {ref.namespace}/{ref.name} has no {QUEUE} of this run yet")
            credential = base64.b64decode(secret["data"][QUEUE])
            if not credential or not all(0x21 <= byte < 0x7F for byte in credential):  # somebody wrote over it
                raise TrainerSilentError(f"Secret {ref.namespace}/{ref.name}: {QUEUE} is no credential")
            memory.queue_credential = credential.decode()
        return memory.queue_credential


class Poller:
    """Asks every trainer that runs, again and again."""

    def __init__(
        self,
        trainers: Trainers,
        cache: ObjectCache,
        *,
        memory_of: Callable[[RunKey, str], RunMemory],
        changed: Callable[[RunKey], None],
        seconds: float,
    ) -> None:
        self._trainers = trainers
        self._cache = cache
        self._memory_of = memory_of
        self._changed = changed
        self._seconds = seconds

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.ask_all()
            await asyncio.sleep(self._seconds)

    async def ask_all(self) -> None:
        """Ask every trainer once. A bug that one of them meets is logged and counted, and the others are asked."""
        at_once = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for run in list(self._cache.of_kind(names.KIND_TRAINING_RUN)):
                if (run.get("status") or {}).get("phase") in _ACTIVE:
                    group.create_task(self._ask(run, at_once))

    def _trainer_of(self, run: Manifest) -> Manifest | None:
        """The newest trainer Job, if it has not ended."""
        metadata = run["metadata"]
        objects = self._cache.of_run(metadata["namespace"], metadata["name"])
        jobs = (item for item in objects if item["kind"] == "Job" and controller_uid(item) == metadata["uid"])
        newest = newest_trainer(Objects(jobs))
        return newest if newest is not None and is_active(newest) else None

    async def _ask(self, run: Manifest, at_once: asyncio.Semaphore) -> None:
        named = RunName(run)
        key = (named.namespace, named.name)
        async with at_once:
            try:
                job = self._trainer_of(run)
                if job is None:
                    return
                memory = self._memory_of(key, named.uid)
                if await self._trainers.ask(named, memory, job, self._rollouts(run)):
                    self._changed(key)
            except Exception:  # the boundary of one run
                log.exception("TrainingRun %s/%s: an error of the operator while its trainer was asked", *key)
                self._trainers.met_bug()

    def _rollouts(self, run: Manifest) -> int:
        """How many rollouts may have a Job at once; 0: they have none of their own."""
        pool_name = run["spec"]["rollouts"]["poolRef"]["name"]
        pool = self._cache.get(KINDS[names.KIND_ROLLOUT_POOL].ref(run["metadata"]["namespace"], pool_name))
        if pool is None or pool["spec"].get("isolation") != "Job":
            return 0
        return int(pool["spec"].get("replicas", 1))


class RunName:
    """Name, namespace and uid of a raw run."""

    def __init__(self, run: Manifest) -> None:
        self.name: str = run["metadata"]["name"]
        self.namespace: str = run["metadata"]["namespace"]
        self.uid: str = run["metadata"]["uid"]
