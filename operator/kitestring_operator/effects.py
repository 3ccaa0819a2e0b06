"""Carrying out what was decided: the requests to the cluster and to the trainer, in an order that may stop anywhere."""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from kitestring_api import names
from kitestring_operator import identity
from kitestring_operator.changes import Apply, Change, Occupied, Resize, changes
from kitestring_operator.cluster.cache import ObjectCache
from kitestring_operator.cluster.errors import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    RefusedError,
)
from kitestring_operator.cluster.kinds import KINDS, is_watched
from kitestring_operator.cluster.protocol import Cluster
from kitestring_operator.events import Events
from kitestring_operator.memory import RunMemory
from kitestring_operator.metrics import Metrics
from kitestring_operator.observed import Desired, Event, GeneratedSecret, Manifest, ObjectRef, Observed
from kitestring_operator.pods import controller_uid
from kitestring_operator.rate import TokenBucket
from kitestring_operator.rollouts.outcome import MESSAGE_LENGTH
from kitestring_operator.rollouts.rollout_jobs import rollout_of
from kitestring_operator.status import is_urgent
from kitestring_operator.stopping import is_rollout_job
from kitestring_operator.trainer_client import TrainerRefusedError, TrainerSilentError
from kitestring_operator.trainers import Trainers

STATUS_SECONDS: Final = 1.0
"""Between two writes of the status of a run."""
COUNTERS_SECONDS: Final = 5.0
"""The same, where only counters have changed."""
OCCUPIED_SECONDS: Final = 2.0
_QUOTA: Final = "exceeded quota"
"""In the API server's words where a ResourceQuota has no room."""

log = logging.getLogger(__name__)

_BEFORE_PODS: Final = frozenset({"NetworkPolicy", "ConfigMap", "Secret", "Service"})
"""Kinds of what pods must find when they start: their walls, what they read, and whom they tell their credentials."""


class Effects:
    """Carries decisions out."""

    def __init__(
        self,
        cluster: Cluster,
        cache: ObjectCache,
        *,
        events: Events,
        trainers: Trainers,
        jobs: TokenBucket,
        metrics: Metrics,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._events = events
        self._trainers = trainers
        self._jobs = jobs
        self._metrics = metrics
        self._pools_written: dict[str, float] = {}

    async def carry_out(self, observed: Observed, decision: Desired, memory: RunMemory) -> float | None:
        """Seconds after which to look again, if anything waits. Raises what the cluster answers.

        What the API server refuses for good is remembered, so that the next decision tells the user.
        """
        waits = [decision.requeue_seconds]
        stood = memory.hindrance
        failed: ClusterError | None = None
        for step in (self._make, self._tell_and_delete, self._write_status, self._tell_queue):
            # what a user reads does not wait for what cannot be done just now
            try:
                waits.append(await step(observed, decision, memory))
            except ClusterError as error:
                if isinstance(error, RefusedError) and step == self._make:
                    remedy = "correct the field that leads to it, or what refuses it; it is tried again at each resync"
                    memory.refused = (generations(observed), f"{error}; {remedy}")
                    # the status is decided anew; the trainer hears all the same of the rollouts that are lost
                    await self._tell_and_delete(observed, decision, memory)
                    return 0.0
                failed = failed or error
                if step == self._make and not isinstance(error, ConflictError):
                    memory.hindrance = f"{error}; it is tried again"
        if failed is None and memory.hindrance is not None and memory.hindrance == stood:
            # a namesake's remains are gone by the second look; the status of a run that works does not say it
            await self._events.say(observed.run, Event("Warning", names.REASON_ERROR, memory.hindrance[:1024]))
        if isinstance(failed, ForbiddenError):
            memory.hindrance = f"{failed}; give the operator this right, or make room in the namespace's quota"
        if failed is not None and not isinstance(failed, ConflictError):
            await self._events.say(observed.run, Event("Warning", names.REASON_ERROR, str(failed)[:1024]))
        if failed is not None:
            raise failed
        known = [wait for wait in waits if wait is not None]
        return min(known) if known else None

    async def say(self, about: Manifest, event: Event) -> None:
        """Tell who looks at a resource."""
        await self._events.say(about, event)

    # --- Objects --------------------------------------------------------------------------------------------------

    async def _make(self, observed: Observed, decision: Desired, memory: RunMemory) -> float | None:
        memory.hindrance = None
        for manifest in decision.rehearsed:
            await self._cluster.rehearse(manifest)
        for secret in decision.generated_secrets:
            if not await self._generate(observed, secret):
                memory.hindrance = _occupied(KINDS["Secret"].ref(observed.namespace, secret.name))
                return OCCUPIED_SECONDS
        waits: list[float] = []
        lacks = False  # something without which no pod may start, such as a wall
        for change in sorted(changes(decision.objects, self._cache.get, observed.uid), key=_makes_pods):
            if lacks and _makes_pods(change):
                continue
            match change:
                case Apply(manifest, is_new):
                    is_rollouts = is_new and manifest["kind"] == "Secret" and _is_of_rollout(manifest)
                    if is_rollouts and not self._jobs.take():
                        waits.append(self._jobs.wait_seconds())
                        break
                    try:
                        is_ours = await self._apply(observed, manifest, is_new=is_new)
                    except (RefusedError, ForbiddenError) as error:
                        await self._blame_task(manifest, decision.sample, error, memory)
                        waits.append(0.0)
                        continue
                    if not is_ours:
                        memory.hindrance = _occupied(ObjectRef.of(manifest))
                        waits.append(OCCUPIED_SECONDS)
                        lacks = lacks or manifest["kind"] in _BEFORE_PODS
                    elif is_rollout_job(manifest) and memory.trainer is not None:
                        memory.trainer.has_executor(*rollout_of(manifest))
                case Resize(ref, patch, _):
                    self._saw(await self._cluster.patch(ref, patch))
                case Occupied(ref):
                    await self._look_at_owner(ref)
                    memory.hindrance = _occupied(ref)
                    waits.append(OCCUPIED_SECONDS)
                    lacks = lacks or ref.kind in _BEFORE_PODS
        return min(waits, default=None)

    async def _blame_task(
        self, manifest: Manifest, sample: Manifest | None, error: ClusterError, memory: RunMemory
    ) -> None:
        """Remember that a task cannot have what it asks for; the next decision tells the queue.

        Raises `error` where what was refused is no Job of a rollout, or one that asks for nothing would be refused too.
        """
        is_count = _QUOTA in error.reason  # of Jobs, whatever they ask for; it may have room in the next moment
        if memory.trainer is None or sample is None or not is_rollout_job(manifest) or is_count:
            raise error
        try:
            await self._cluster.rehearse(sample)
        except (RefusedError, ForbiddenError):
            raise error from None
        why = f"the API server refuses what the task asks for (image, resources): {error.reason}"
        memory.trainer.unfit[rollout_of(manifest)] = why[:MESSAGE_LENGTH]

    async def _look_at_owner(self, ref: ObjectRef) -> None:
        """Whether the object that has the name is still there: of what is not watched, no event tells."""
        known = self._cache.get(ref)
        if known is None or is_watched(known):
            return
        there = await self._cluster.get(ref)
        if there is None:
            self._cache.forget(ref, known["metadata"]["uid"])
        self._saw(there)

    async def _apply(self, observed: Observed, manifest: Manifest, *, is_new: bool) -> bool:
        """Whether the name was free or the object ours."""
        if is_new:
            # what does not carry our labels was never seen, and must not be taken over
            there = await self._cluster.get(ObjectRef.of(manifest))
            if there is not None and controller_uid(there) != observed.uid:
                return False
        self._saw(await self._cluster.apply(manifest))
        if is_new and is_rollout_job(manifest):
            self._metrics.rollout_jobs.inc()
        return True

    async def _generate(self, observed: Observed, secret: GeneratedSecret) -> bool:
        """Make the Secret, or add the keys that it lacks; whether it is ours. Values that are there stay."""
        metadata = identity.metadata(observed, secret.name)
        # the digest of the names of its keys: nothing need be read to know that all are there
        empty = {"metadata": {}, "keys": sorted(secret.keys)}
        metadata["annotations"] = {names.ANNOTATION_SPEC_HASH: identity.spec_hash(empty)}
        ref = KINDS["Secret"].ref(observed.namespace, secret.name)
        known = self._cache.get(ref)
        if known is not None and controller_uid(known) == observed.uid:
            annotations = known["metadata"].get("annotations") or {}
            if annotations.get(names.ANNOTATION_SPEC_HASH) == metadata["annotations"][names.ANNOTATION_SPEC_HASH]:
                return True
        manifest: Manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
        try:
            self._saw(await self._cluster.create(manifest | {"data": _random(secret, secret.keys)}))
            return True
        except AlreadyExistsError:
            there = await self._cluster.get(ref)
        if there is None or controller_uid(there) != observed.uid:
            return False
        lacking = secret.keys.keys() - (there.get("data") or {}).keys()
        patch = {"metadata": {"annotations": metadata["annotations"]}, "data": _random(secret, lacking)}
        self._saw(await self._cluster.patch(ref, patch))
        return True

    async def _tell_and_delete(self, observed: Observed, decision: Desired, memory: RunMemory) -> None:
        told = await self._tell(observed, decision, memory)
        await self._delete(decision.deletions, memory, keep_rollouts=not told)

    async def _delete(self, deletions: Sequence[ObjectRef], memory: RunMemory, *, keep_rollouts: bool) -> None:
        for ref in deletions:
            known = self._cache.get(ref)
            if known is None or (keep_rollouts and _is_of_rollout(known)):
                continue
            uid = known["metadata"]["uid"]
            await self._cluster.delete(ref, uid=uid)
            if is_watched(known):
                self._cache.mark_deleted(ref, uid)
            else:
                self._cache.forget(ref, uid)  # no event will tell
            if is_rollout_job(known) and memory.trainer is not None:
                memory.trainer.has_lost_executor(*rollout_of(known), asyncio.get_running_loop().time())

    def _saw(self, manifest: Manifest | None) -> None:
        if manifest is not None:
            self._cache.observe(manifest)

    # --- The trainer ----------------------------------------------------------------------------------------------

    async def _tell(self, observed: Observed, decision: Desired, memory: RunMemory) -> bool:
        """Tell the trainer what it must know. Whether it knows all about lost rollouts."""
        if decision.live is not None and memory.trainer is not None and memory.trainer.live != decision.live:
            try:
                await self._trainers.change(observed, memory, decision.live)
                memory.trainer.live = decision.live
            except TrainerSilentError as error:
                log.info("%s", error)
            except TrainerRefusedError as error:
                memory.trainer.live = decision.live  # the same words would be refused again
                await self._events.say(observed.run, Event("Warning", names.REASON_ERROR, str(error)[:1024]))
        memory.told_lost &= {(lost.rollout, lost.number) for lost in decision.lost}
        for lost in decision.lost:
            if (lost.rollout, lost.number) in memory.told_lost:
                continue
            try:
                await self._trainers.lost(observed, memory, lost)
            except TrainerSilentError as error:
                log.info("%s", error)
                return False  # nor would it hear of the others
            except TrainerRefusedError as error:
                log.info("%s", error)  # it knows no such rollout: a trainer that started since
            memory.told_lost.add((lost.rollout, lost.number))
        return True

    # --- The queue ------------------------------------------------------------------------------------------------

    async def _tell_queue(self, observed: Observed, decision: Desired, _: RunMemory) -> None:
        if decision.quota is None or observed.workload is None:
            return
        try:
            ref = ObjectRef.of(observed.workload)
            self._saw(await self._cluster.patch(ref, decision.quota, subresource="status"))
        except ConflictError as error:
            log.info("%s", error)  # Kueue was faster; its event brings us back

    # --- Pools ----------------------------------------------------------------------------------------------------

    async def write_pool_status(self, pool: Manifest, status: Mapping[str, Any]) -> float | None:
        """Seconds after which to look again, if it is too early to write."""
        if status == (pool.get("status") or {}):
            return None
        ref, uid = ObjectRef.of(pool), pool["metadata"]["uid"]
        now = asyncio.get_running_loop().time()
        left = self._pools_written.get(uid, -STATUS_SECONDS) + STATUS_SECONDS - now
        if left > 0:
            return left
        self._pools_written[uid] = now
        self._saw(await self._cluster.patch_status(ref, uid, status))
        return None

    def resynced(self, uids: Collection[str]) -> None:
        """Everything was listed, and these are the runs and pools that are there."""
        self._pools_written = {uid: when for uid, when in self._pools_written.items() if uid in uids}

    # --- Status ---------------------------------------------------------------------------------------------------

    async def _write_status(self, observed: Observed, decision: Desired, memory: RunMemory) -> float | None:
        if decision.status == observed.status:
            return None
        now = asyncio.get_running_loop().time()
        if memory.status_written_at is not None:
            quiet = STATUS_SECONDS if is_urgent(observed.status, decision.status) else COUNTERS_SECONDS
            left = memory.status_written_at + quiet - now
            if left > 0:
                return left
        memory.status_written_at = now
        written = await self._cluster.patch_status(ObjectRef.of(observed.run), observed.uid, decision.status)
        self._saw(written)
        if written is not None:
            for event in decision.events:
                await self._events.say(observed.run, event)
        return None


def generations(observed: Observed) -> tuple[int, int]:
    """Of run and pool: what was asked for."""
    pool = 0 if observed.pool is None else observed.pool.metadata.generation or 0
    return observed.generation, pool


def _occupied(ref: ObjectRef) -> str:
    return (
        f"{ref.kind} {ref.name} is there already and is not of this run; it may be what a deleted run of this name "
        "left, which goes by itself: else delete it, or give the run another name"
    )


def _random(secret: GeneratedSecret, keys: Iterable[str]) -> dict[str, str]:
    return {key: base64.b64encode(secrets.token_urlsafe(secret.keys[key]).encode()).decode() for key in keys}


def _makes_pods(change: Change) -> bool:
    """Whether pods follow from it, or it is the credential of one."""
    match change:
        case Apply(manifest, _):
            return manifest["kind"] in identity.SIZE or _is_of_rollout(manifest)
        case Resize(_, _, grows):
            return grows
    return False


def _is_of_rollout(manifest: Manifest) -> bool:
    return names.LABEL_ROLLOUT in (manifest["metadata"].get("labels") or {})
