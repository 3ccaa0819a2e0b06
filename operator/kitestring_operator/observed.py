"""What the operator knows and what it decides, as plain data: the arguments and the result of the one pure function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from kitestring_api import names
from kitestring_api.v1alpha1 import RolloutPool, RolloutPoolSpec, TrainingRunSpec
from kitestring_operator.settings import Settings

Manifest = dict[str, Any]
"""An object of the cluster as its API says it: what is read, and what is applied."""


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Which object: enough to read or delete it."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, manifest: Manifest) -> ObjectRef:
        """The reference to an object that names its namespace."""
        metadata = manifest["metadata"]
        return cls(manifest["apiVersion"], manifest["kind"], metadata["namespace"], metadata["name"])


@dataclass(frozen=True, slots=True)
class Event:
    """What a user wants to read under a resource: `reason` is one word of a closed set (kitestring_api.names)."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


# --- What is observed ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The last answer of the trainer to GET /run/v1/status."""

    status: Mapping[str, Any]
    age_seconds: float


@dataclass(frozen=True, slots=True)
class WantedRollout:
    """A rollout that waits for an executor of its own, as the trainer's queue says it."""

    rollout: str
    number: int
    """Which attempt of the rollout this will be, from 1."""
    credential: str
    """Secret: leases this rollout and no other."""
    image: str | None = None
    resources: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class MissingReference:
    """An object, or a key in it, that the run names and that is not there."""

    field: str
    kind: Literal["Secret", "ConfigMap", "PersistentVolumeClaim", "TrainingRun", "LocalQueue", "PriorityClass"]
    name: str
    key: str | None = None
    is_kind_served: bool = True
    """Whether the cluster knows the kind, in the version that we ask for."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a queue wants pods to be: of a resource flavor, or of an admission check."""

    node_labels: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


class Objects:
    """Objects of one run, sorted by kind and part: it has thousands, and is asked for few of them a dozen times."""

    __slots__ = ("_all", "_sorted")

    def __init__(self, items: Iterable[Manifest] = ()) -> None:
        self._all: list[Manifest] = []
        self._sorted: defaultdict[str | tuple[str, str], list[Manifest]] = defaultdict(list)
        for item in items:
            kind = item["kind"]
            component = (item["metadata"].get("labels") or {}).get(names.LABEL_COMPONENT, "")
            self._all.append(item)
            self._sorted[kind].append(item)
            self._sorted[kind, component].append(item)

    def __iter__(self) -> Iterator[Manifest]:
        return iter(self._all)

    def of_kind(self, kind: str) -> Sequence[Manifest]:
        """Those of one kind, in the order in which they were listed."""
        return self._sorted.get(kind, ())

    def of_part(self, kind: str, component: str) -> Sequence[Manifest]:
        """Those of them that belong to one part (names.COMPONENT_*)."""
        return self._sorted.get((kind, component), ())


@dataclass(frozen=True, slots=True)
class Observed:
    """A run and everything that matters to it, at one moment. Nothing in it is asked for again while deciding."""

    now: datetime
    """With time zone."""
    run: Manifest
    """The TrainingRun, raw: metadata with uid, generation, annotations and deletionTimestamp."""
    spec: TrainingRunSpec | None
    """None: the models refuse it; `problems` says why."""
    problems: tuple[str, ...]
    """What of run or pool this version cannot carry out, a line each: field, found, remedy."""
    pool: RolloutPool | None
    """None: there is no such pool, or the models refuse it (`problems`)."""
    objects: Objects = field(default_factory=Objects)
    """Every object that the run owns, pods of its Jobs and StatefulSets included, raw."""
    trainer: TrainerReport | None = None
    """Of the newest trainer; of the last one while there is none. None: it has not answered since the operator started.
    """
    wanted: tuple[WantedRollout, ...] = ()
    """Empty where there is no trainer to ask."""
    unfit: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """Those of `wanted`, by rollout and number, whose Job the API server refuses for what their task asks, and its
    words."""
    checkpoints: Mapping[str, str] | None = None
    """status.checkpoint of the other runs of the namespace, by their names."""
    missing: tuple[MissingReference, ...] = ()
    unread: tuple[str, ...] = ()
    """What must be known before anything is made, and the cluster did not let be read: what it answered."""
    workload: Manifest | None = None
    """Kueue's Workload of the run."""
    flavors: Mapping[str, Placement] = field(default_factory=dict)
    """The resource flavors that the Workload was assigned."""
    priority: int | None = None
    """Value of the priority class that the run names, where it is queued and has no quota yet."""
    refused: str | None = None
    """What the API server said when an object of the run was last made as run and pool are now; it is tried again."""
    unsupported: tuple[str, ...] = ()
    """Those of `problems` that another version may carry out (kitestring_api.unsupported)."""
    hindrance: str | None = None
    """What kept an object of the run from being made when that was last tried."""
    refused_pods: Mapping[str, str] = field(default_factory=dict)
    """Which object cannot have its pods and why, by part of the run (names.COMPONENT_*)."""
    trainer_log: str = ""
    """Last lines of the newest trainer that ended badly, where its pod is still there."""

    @property
    def name(self) -> str:
        return str(self.run["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.run["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.run["metadata"]["uid"])

    @property
    def generation(self) -> int:
        return int(self.run["metadata"].get("generation", 0))

    @property
    def status(self) -> Mapping[str, Any]:
        """As it stands in the cluster; empty for a run that was never looked at."""
        status: Mapping[str, Any] = self.run.get("status") or {}
        return status

    @property
    def is_deleted(self) -> bool:
        return "deletionTimestamp" in self.run["metadata"]

    @property
    def is_suspended(self) -> bool:
        """Whether its user wants it to hold no pod: by what stands there, also where the models refuse the rest."""
        return (self.run.get("spec") or {}).get("suspend") is True

    @property
    def queue_name(self) -> str | None:
        """The queue that the run names; likewise."""
        scheduling = (self.run.get("spec") or {}).get("scheduling")
        name = scheduling.get("queueName") if isinstance(scheduling, Mapping) else None
        return name if isinstance(name, str) else None

    def of_kind(self, kind: str) -> Sequence[Manifest]:
        """The run's objects of one kind, in the order in which they were listed."""
        return self.objects.of_kind(kind)

    def of_part(self, kind: str, component: str) -> Sequence[Manifest]:
        """Those of them that belong to one part (names.COMPONENT_*)."""
        return self.objects.of_part(kind, component)


# --- What the parts of a run are made from ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StorageTarget:
    """Where the objects of one run lie, and the Secrets (keys accessKeyId, secretAccessKey) that open each part."""

    bucket: str
    prefix: str
    """Of the run: the prefix of the storage and the run's id, without slashes at its ends."""
    endpoint: str
    """URL of the service, also where the spec left it out."""
    region: str
    traces_secret: str
    agent_secret: str
    weights_secret: str
    trainer_secret: str


@dataclass(frozen=True, slots=True)
class RunContext:
    """Everything that the objects of a running run are made from."""

    settings: Settings
    name: str
    namespace: str
    uid: str
    run_id: str
    spec: TrainingRunSpec
    pool: RolloutPoolSpec
    pool_name: str
    trainer_number: int
    """N of RUN-trainer-N, from 1."""
    storage: StorageTarget
    checkpoints: Mapping[str, str]
    """status.checkpoint of the other runs of the namespace, by their names; once the run has started, the one that it
    began from."""
    is_first_start: bool = False
    """Whether no trainer of the run has been lost before this one, nor made a step."""

    def __hash__(self) -> int:
        """Of what tells runs apart; specs have none."""
        return hash((self.uid, self.trainer_number))


# --- What is decided ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GeneratedSecret:
    """A Secret that is made once, from random bytes, and never overwritten; further keys are added where it lacks them.

    Each value is the base64url text of so many random bytes.
    """

    name: str
    keys: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LostRollout:
    """What the trainer's queue is to be told of an executor that ended without a finish."""

    rollout: str
    number: int
    outcome: str
    """A failure class (kitestring_api.names.CLASSES)."""
    message: str


@dataclass(frozen=True, slots=True)
class Desired:
    """What is to be. Carrying out the same decision twice changes nothing."""

    status: Mapping[str, Any]
    """The whole status."""
    rehearsed: tuple[Manifest, ...] = ()
    """Before anything is made: none of it is, but the API server must be ready to take it."""
    objects: tuple[Manifest, ...] = ()
    """To be applied where their spec hash differs, in this order."""
    sample: Manifest | None = None
    """Where there are Jobs of rollouts among `objects`: one whose task asks for nothing. If the API server would take
    it, one that it refuses is at fault itself."""
    generated_secrets: tuple[GeneratedSecret, ...] = ()
    """Before `objects`."""
    deletions: tuple[ObjectRef, ...] = ()
    events: tuple[Event, ...] = ()
    live: Mapping[str, Any] | None = None
    """Body of PUT /run/v1/live; None: the trainer need not be told anything."""
    lost: tuple[LostRollout, ...] = ()
    quota: Mapping[str, Any] | None = None
    """Merge patch of the status of Kueue's Workload, for the version that was observed; None: Kueue knows all."""
    classes: Mapping[str, int] | None = None
    """Committed rollouts of the run by failure class, for the operator's own figures; None: nothing new is known."""
    requeue_seconds: float | None = None
    """Look again after so many seconds even if nothing happens."""
