"""Gathering all that matters to one run into an Observed: from the cache, from memory, and few reads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, TypeVar

from pydantic import ValidationError

from kitestring_api import consistency, names
from kitestring_api.unsupported import refusals
from kitestring_api.v1alpha1 import RolloutPool, TrainingRun, TrainingRunSpec
from kitestring_operator.cluster.cache import ObjectCache
from kitestring_operator.cluster.errors import ClusterError
from kitestring_operator.cluster.kinds import KINDS
from kitestring_operator.cluster.protocol import Cluster
from kitestring_operator.memory import RunMemory, TrainerMemory
from kitestring_operator.observed import Manifest, MissingReference, Objects, Observed, Placement, TrainerReport
from kitestring_operator.pods import controller_uid
from kitestring_operator.queueing import flavors_of, may_change
from kitestring_operator.references import Reference, missing_of, references
from kitestring_operator.refused_pods import RefusedPods
from kitestring_operator.trainer_job import (
    CONTAINER,
    EndKind,
    has_ended,
    is_active,
    newest_trainer,
    number_of,
    trainer_jobs,
)

LOG_LINES: Final = 20
LOG_READ_BYTES: Final = 256 * 1024
"""Asked for: where these lines are longer, a kubelet gives their beginning, and what ended the process comes last."""
LOG_LENGTH: Final = 4096
"""Kept: the last characters."""
MOST_PROBLEMS: Final = 5
"""Of a document that the models refuse; more would hide the first."""

Document = TypeVar("Document", TrainingRun, RolloutPool)
Value = TypeVar("Value")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reading:
    """A raw run and its raw pool as the models read them."""

    spec: TrainingRunSpec | None
    pool: RolloutPool | None
    problems: tuple[str, ...]
    unsupported: tuple[str, ...]


class Observation:
    """Makes Observed. Documents that have not changed are not read again."""

    def __init__(self, cluster: Cluster, cache: ObjectCache) -> None:
        self._cluster = cluster
        self._cache = cache
        self._readings: dict[str, tuple[tuple[int, str, int], Reading]] = {}
        """uid of the run → generations for which it was read, and the reading."""
        self._flavors_read: dict[str, Placement] = {}
        self._priorities: dict[str, int] = {}
        self._fresh: set[str] = set()
        """Flavors that were read since the last resync."""
        self._pools: dict[str, tuple[int, tuple[str, ...]]] = {}
        self._refused_pods = RefusedPods(cluster)

    async def of(self, run: Manifest, memory: RunMemory) -> Observed:
        """What cannot be read is named in `unread`; it keeps no run from its status."""
        metadata = run["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        reading = self._reading(run)
        spec = reading.spec
        problems, refused = reading.problems, None
        generations = (metadata.get("generation", 0), _generation(reading.pool))
        if memory.refused is not None and memory.refused[0] == generations:
            refused = memory.refused[1]
        workload = self._cache.get(KINDS["Workload"].ref(namespace, name))
        if workload is not None and controller_uid(workload) != uid:
            workload = None
        unread: list[str] = []
        missing = await _read(self._missing(run, spec), unread)
        flavors = await _read(self._flavors(run, workload), unread)
        priority = await _read(self._priority(spec, workload), unread)
        objects = Objects(
            item for item in self._cache.of_run(namespace, name) if item["kind"] == "Pod" or controller_uid(item) == uid
        )
        newest = newest_trainer(objects)
        said = memory.trainer
        if said is not None and newest is not None and _is_another(newest, said):
            said = None  # of one before it, which says nothing of this one
        is_asked = newest is not None and is_active(newest)
        observed = Observed(
            now=datetime.now(UTC),
            run=run,
            spec=spec,
            problems=problems,
            refused=refused,
            pool=reading.pool,
            objects=objects,
            trainer=None if said is None else _report(said),
            wanted=said.wanted if said is not None and is_asked else (),
            unfit={} if said is None else dict(said.unfit),
            checkpoints=self._checkpoints(namespace, spec),
            missing=missing or (),
            unread=tuple(unread),
            workload=workload,
            flavors=flavors or {},
            priority=priority,
            unsupported=reading.unsupported,
            hindrance=memory.hindrance,
        )
        refused_pods = await self._refused_pods.of(observed)
        return await self._with_log(replace(observed, refused_pods=refused_pods) if refused_pods else observed, memory)

    def problems_of(self, pool: Manifest) -> tuple[str, ...]:
        """What is wrong with a pool by itself."""
        metadata = pool["metadata"]
        known = self._pools.get(metadata["uid"])
        if known is None or known[0] != metadata.get("generation", 0):
            known = self._pools[metadata["uid"]] = (metadata.get("generation", 0), read_pool(pool))
        return known[1]

    def resynced(self, uids: Collection[str]) -> None:
        """Everything was listed, and these are the runs and pools that are there. What no watch tells of is asked for
        again."""
        self._readings = {uid: known for uid, known in self._readings.items() if uid in uids}
        self._pools = {uid: known for uid, known in self._pools.items() if uid in uids}
        self._refused_pods.resynced()
        self._priorities.clear()
        self._fresh.clear()

    # --- Documents ------------------------------------------------------------------------------------------------

    def _reading(self, run: Manifest) -> Reading:
        metadata = run["metadata"]
        pool = self._pool_of(run)
        pool_uid = "" if pool is None else pool["metadata"]["uid"]
        key = (metadata.get("generation", 0), pool_uid, 0 if pool is None else pool["metadata"].get("generation", 0))
        known = self._readings.get(metadata["uid"])
        if known is not None and known[0] == key:
            return known[1]
        reading = read(run, pool)
        self._readings[metadata["uid"]] = (key, reading)
        return reading

    def _pool_of(self, run: Manifest) -> Manifest | None:
        name = (((run.get("spec") or {}).get("rollouts") or {}).get("poolRef") or {}).get("name")
        if not isinstance(name, str):
            return None
        return self._cache.get(KINDS[names.KIND_ROLLOUT_POOL].ref(run["metadata"]["namespace"], name))

    # --- What else ------------------------------------------------------------------------------------------------

    def _checkpoints(self, namespace: str, spec: TrainingRunSpec | None) -> dict[str, str]:
        found = {}
        for policy in spec.policies if spec is not None else ():
            if policy.model is None or policy.model.checkpoint_of is None:
                continue
            name = policy.model.checkpoint_of.training_run
            other = self._cache.get(KINDS[names.KIND_TRAINING_RUN].ref(namespace, name))
            checkpoint = ((other or {}).get("status") or {}).get("checkpoint")
            if checkpoint:
                found[name] = checkpoint
        return found

    async def _missing(self, run: Manifest, spec: TrainingRunSpec | None) -> tuple[MissingReference, ...]:
        """Asked for before the start only: what goes later shows in the pods."""
        if spec is None or (run.get("status") or {}).get("startTime"):
            return ()
        namespace = run["metadata"]["namespace"]
        found = []
        for reference in references(spec):
            missing = missing_of(reference, await self._referenced(namespace, reference))
            if missing is not None:
                # of the kinds that are named, Kueue's alone may be unknown to a cluster
                served = missing.kind != "LocalQueue" or await self._cluster.serves(missing.kind)
                found.append(replace(missing, is_kind_served=served))
        return tuple(found)

    async def _referenced(self, namespace: str, reference: Reference) -> Manifest | None:
        kind = KINDS[reference.kind]
        ref = kind.ref("" if reference.kind == "PriorityClass" else namespace, reference.name)
        if reference.kind == names.KIND_TRAINING_RUN:
            return self._cache.get(ref)
        return await self._cluster.get(ref)

    async def _flavors(self, run: Manifest, workload: Manifest | None) -> dict[str, Placement]:
        """Of the flavors that were assigned; they are read once after each resync."""
        wanted = frozenset() if (run.get("status") or {}).get("completionTime") else flavors_of(workload)
        for name in wanted - self._fresh:
            try:
                flavor = await self._cluster.get(KINDS["ResourceFlavor"].ref("", name))
            except ClusterError as error:
                if name not in self._flavors_read:
                    raise
                log.warning("%s; what it said before is used", error)
                continue
            spec = {} if flavor is None else flavor.get("spec") or {}
            self._flavors_read[name] = Placement(spec.get("nodeLabels") or {}, tuple(spec.get("tolerations") or ()))
            self._fresh.add(name)
        return {name: self._flavors_read[name] for name in wanted}

    async def _priority(self, spec: TrainingRunSpec | None, workload: Manifest | None) -> int | None:
        """Of a run whose Workload is to be made; read once after each resync: another class may have the name."""
        if spec is None or spec.scheduling.queue_name is None or spec.scheduling.priority_class_name is None:
            return None
        if not may_change(workload):
            return None
        name = spec.scheduling.priority_class_name
        if name not in self._priorities:
            found = await self._cluster.get(KINDS["PriorityClass"].ref("", name))
            if found is None:
                return None
            self._priorities[name] = int(found["value"])
        return self._priorities[name]

    async def _with_log(self, observed: Observed, memory: RunMemory) -> Observed:
        """With the last lines of the newest trainer, if it ended badly; they are read once."""
        jobs = trainer_jobs(observed)
        newest = jobs[-1] if jobs else None
        end = None if newest is None else newest.end
        if newest is None or end is None or end.kind not in (EndKind.LOST, EndKind.FAILED) or end.pod is None:
            return observed
        if memory.log is None or memory.log[0] != newest.uid:
            pod = KINDS["Pod"].ref(observed.namespace, end.pod)
            container = end.container or CONTAINER
            try:
                tail = await self._cluster.log_tail(pod, container, lines=LOG_LINES, limit_bytes=LOG_READ_BYTES)
            except ClusterError as error:
                # its node may be gone since: the run goes on without these lines
                log.warning("%s", error)
                tail = ""
            memory.log = (newest.uid, printable(tail))
        return replace(observed, trainer_log=memory.log[1])


def _is_another(newest: Manifest, said: TrainerMemory) -> bool:
    """Whether the newest Job is not the one that was asked, nor one before it that has ended: those are kept. One that
    goes on comes after it whatever its number: numbers begin anew where no Job is left."""
    if newest["metadata"]["uid"] == said.job_uid:
        return False
    return number_of(newest) >= said.number or not has_ended(newest)


def _report(trainer: TrainerMemory) -> TrainerReport | None:
    """Its last answer; None: it has given none."""
    now = asyncio.get_running_loop().time()
    status = trainer.status(now)
    return None if status is None else TrainerReport(status, now - trainer.answered_at)


async def _read(asked: Awaitable[Value], unread: list[str]) -> Value | None:
    """The answer; None where the cluster gives none, which `unread` then says."""
    try:
        return await asked
    except ClusterError as error:
        log.warning("%s", error)
        unread.append(str(error))
        return None


def read(run: Manifest, pool: Manifest | None) -> Reading:
    """The documents by the models, and all that is wrong with them."""
    problems: list[str] = []
    unsupported: list[str] = []
    typed_run = _typed(run, TrainingRun, problems)
    typed_pool = None if pool is None else _typed(pool, RolloutPool, problems)
    for document in (typed_run, typed_pool):
        if document is not None:
            unsupported += [refusal.message for refusal in refusals(document)]
    found: list[consistency.Inconsistency] = []
    if typed_run is not None:
        found += consistency.of_run(typed_run)
    if typed_pool is not None:
        found += consistency.of_pool(typed_pool)
    if typed_run is not None and typed_pool is not None:
        found += consistency.of_run_and_pool(typed_run, typed_pool)
    problems += [_line(entry) for entry in found if entry.severity == "error"]
    return Reading(
        None if typed_run is None else typed_run.spec, typed_pool, tuple(problems + unsupported), tuple(unsupported)
    )


def read_pool(pool: Manifest) -> tuple[str, ...]:
    """All that is wrong with a pool by itself."""
    problems: list[str] = []
    typed = _typed(pool, RolloutPool, problems)
    if typed is not None:
        problems += [_line(entry) for entry in consistency.of_pool(typed) if entry.severity == "error"]
        problems += [refusal.message for refusal in refusals(typed)]
    return tuple(problems)


def _typed(manifest: Manifest, model: type[Document], problems: list[str]) -> Document | None:
    """Without the status, which is ours and may be of a newer version."""
    document = {field: manifest[field] for field in ("apiVersion", "kind", "metadata", "spec") if field in manifest}
    try:
        return model.from_manifest(document)
    except ValidationError as error:
        for found in error.errors(include_url=False)[:MOST_PROBLEMS]:
            where = ".".join(str(part) for part in found["loc"])
            given = str(found["input"])[:100]
            problems.append(f"{where}: found {given}: {found['msg']}; correct it")
        return None


def _line(entry: consistency.Inconsistency) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in entry.path).lstrip(".")
    return f"{entry.kind} {path}: found {entry.found}; {entry.requires}; {entry.remedy}"


def _generation(pool: RolloutPool | None) -> int:
    return 0 if pool is None else pool.metadata.generation or 0


def printable(text: str) -> str:
    """The last lines as printable characters: a log may hold anything."""
    lines = ("".join(c if c.isprintable() else " " for c in line).rstrip() for line in text[-LOG_LENGTH:].splitlines())
    return "\n".join(lines)
