"""The one contract between the control side and a node: what ``python trainer.pyz VERB`` reads and writes.

A verb reads one JSON request on stdin and writes one JSON reply on stdout; diagnostics go to stderr. Exit status 0
means that the reply is the answer, whatever it says; any other status means that there is no answer and the last line
of stderr tells why. Secrets travel in requests only, never in argv or in the environment.

Both sides import these classes. A reader ignores keys that it does not know and uses the default for a key that is
missing, so that an older and a newer side understand each other.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Type, TypeVar

T = TypeVar("T")

#: Name of the environment variable that marks every process of a job: ``<node>/<job id>``.
MARKER = "SWIFT_TRAINER_JOB"


class ProtocolError(ValueError):
    """A request or reply that does not have the shape of its class; the message names class, key and value."""


# ---------------------------------------------------------------------------------------------------------------
# Words that both sides compare
# ---------------------------------------------------------------------------------------------------------------


class Phase:
    """Where a job is. ``preparing → running → [stopping →] exited | killed``; ``lost`` is what a reader concludes."""

    ABSENT = "absent"  # this node has never heard of the job
    PREPARING = "preparing"  # lease held, training process not started yet
    RUNNING = "running"
    STOPPING = "stopping"  # a stop was asked for; the tree is not empty yet
    EXITED = "exited"  # ended by itself; ``exit_code`` holds its status
    KILLED = "killed"  # ended by a signal or by a stop; ``signal`` or ``stop_reason`` tells
    LOST = "lost"  # not ended, but its supervisor is dead (reboot, kill -9)

    ENDED = frozenset({EXITED, KILLED, LOST})
    ALIVE = frozenset({PREPARING, RUNNING, STOPPING})


class StartResult:
    """How a start was answered."""

    STARTED = "started"
    ATTACHED = "attached"  # the same job is there already, alive or ended: look at its state
    BUSY = "busy"  # the lease is with another job; ``holder`` names it
    CANCELLED = "cancelled"  # a user has cancelled this try of the task; nothing was started
    FAILED = "failed"  # nothing was left behind; ``error`` says why


class StopReason:
    """Why a job was ended, when it did not end by itself. A ``stop`` request may bring a word of its own."""

    REQUESTED = "requested"
    SUPERSEDED = "superseded"
    DEADLINE = "deadline"  # the supervisor's own clock said so
    RANK_FAILED = "rank_failed"  # a rank died and its launcher did not end; ``error`` names rank, pid and cause
    NOT_COMMITTED = "not_committed"  # prepared, but the word to start did not come in time: another node could not
    SIGNAL = "signal"  # somebody sent SIGTERM to the supervisor without a request: a shutdown of the machine


class Verdict:
    """What the completeness judge says of a checkpoint."""

    COMPLETE = "complete"  # every file that its format needs; training can resume from it
    WEIGHTS_ONLY = "weights_only"  # whole, but saved without optimizer state: not resumable
    INCOMPLETE = "incomplete"  # files are missing; perhaps still being written
    DAMAGED = "damaged"  # files are there but empty, truncated or not parseable


# ---------------------------------------------------------------------------------------------------------------
# Parts of requests and replies
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """A process that cannot be confused with a later one: pid, start time (clock ticks since boot), boot id."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True)
class Owner:
    """Who a lease belongs to, in the words of the control side.

    Two owners are the same task when everything but ``try_number`` is equal.
    """

    dag_id: str = ""
    run_id: str = ""
    task_id: str = ""
    map_index: int = -1
    try_number: int = 0  # the try that started the job; a cancel names the last try that it is meant for
    origin: str = ""  # base URL or host of the Airflow installation

    def same_task(self, other: Owner) -> bool:
        """Whether both are tries of one task instance of one Airflow installation."""
        return dataclasses.replace(self, try_number=0) == dataclasses.replace(other, try_number=0)


@dataclass(frozen=True)
class Holder:
    """A job that holds a lease of a node. ``since`` is in seconds since the epoch."""

    job_id: str
    owner: Owner = field(default_factory=Owner)
    since: float = 0.0
    supervisor: Optional[Identity] = None
    gpus: Optional[List[int]] = None  # the leased GPUs; ``None``: the whole node


@dataclass(frozen=True)
class Progress:
    """The newest step line of ``logging.jsonl``. Times are in seconds, ``seconds_per_step`` is s/it."""

    step: int
    max_steps: int
    epoch: Optional[float] = None
    loss: Optional[float] = None
    grad_norm: Optional[float] = None
    learning_rate: Optional[float] = None
    eval_loss: Optional[float] = None
    elapsed_s: Optional[float] = None
    remaining_s: Optional[float] = None
    seconds_per_step: Optional[float] = None


@dataclass
class MirrorState:
    """What the uploader beside a job does. Bytes; ``done`` of ``total`` of the checkpoint that it sends now.

    ``safe`` are the checkpoints of which this node's files are proven to be in the bucket; the manifest is the backup
    task's to write. ``error`` is what the last upload failed with; it is tried again.
    """

    checkpoint: str = ""
    done: int = 0
    total: int = 0
    rate: float = 0.0  # bytes per second
    remaining_s: Optional[float] = None
    safe: List[str] = field(default_factory=list)
    sent: int = 0
    copied: int = 0
    error: Optional[str] = None
    updated_at: float = 0.0


@dataclass
class JobState:
    """``state.json`` of a job: written by its supervisor alone, by rename, about once a second while it runs.

    ``heartbeat`` grows with every write; a reader that sees it stand still asks the ``status`` verb, which proves
    from pid, start time and boot id whether the supervisor is alive. ``log_bytes`` is the size of the job's log.
    Times are seconds since the epoch.
    """

    job_id: str
    phase: str
    heartbeat: int = 0
    supervisor: Optional[Identity] = None
    child: Optional[Identity] = None
    owner: Owner = field(default_factory=Owner)
    started_at: float = 0.0
    updated_at: float = 0.0
    ended_at: Optional[float] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None  # of the training process, when a signal ended it
    stop_reason: Optional[str] = None  # one of StopReason
    killed: int = 0  # processes that needed SIGKILL at the end
    survivors: List[int] = field(default_factory=list)
    log_bytes: int = 0
    progress: Optional[Progress] = None
    checkpoints: List[str] = field(default_factory=list)  # names, oldest first; complete ones only
    error: Optional[str] = None
    mirror: Optional[MirrorState] = None


@dataclass(frozen=True)
class Gpu:
    """One accelerator as ``nvidia-smi`` reports it. Memory is in bytes."""

    index: int
    name: str
    memory_total: int
    memory_used: int


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint. ``path`` is relative to the checkpoint's folder, with ``/``; ``size`` in bytes.

    ``text`` carries the content of the few small files that the judge must read; ``None`` for all others.
    ``header_ok`` is the verdict on a file whose header was parsed where it lies (safetensors).
    """

    path: str
    size: int
    mtime: float = 0.0
    text: Optional[str] = None
    header_ok: Optional[bool] = None


@dataclass(frozen=True)
class CheckpointListing:
    """What one node holds of one checkpoint folder."""

    name: str
    files: List[FileEntry] = field(default_factory=list)


@dataclass(frozen=True)
class OssCredentials:
    """How to sign. ``auth_type`` is ``AK`` (also with a ``security_token`` for STS). The repr hides the secrets."""

    access_key_id: str = ""
    access_key_secret: str = field(default="", repr=False)
    security_token: Optional[str] = field(default=None, repr=False)
    auth_type: str = "AK"


@dataclass(frozen=True)
class ObjectOptions:
    """How new objects are stored; an empty value leaves it to the bucket. Tags are for lifecycle rules and bills.

    With ``forbid_overwrite`` the server refuses to replace an object: what a manifest speaks of never changes.
    """

    encryption: str = ""  # AES256, KMS or SM4
    kms_key_id: str = ""
    storage_class: str = ""
    tags: Dict[str, str] = field(default_factory=dict)
    forbid_overwrite: bool = False


@dataclass(frozen=True)
class OssTarget:
    """A place in a bucket: ``oss://bucket/prefix``. ``prefix`` has no leading and no trailing slash."""

    endpoint: str
    region: str
    bucket: str
    prefix: str = ""
    credentials: OssCredentials = field(default_factory=OssCredentials)
    options: ObjectOptions = field(default_factory=ObjectOptions)

    @property
    def url(self) -> str:
        """The location as users write it, without anything secret."""
        return "oss://" + self.bucket + ("/" + self.prefix if self.prefix else "")

    def key(self, *parts: str) -> str:
        """The object key of ``parts`` below this target's prefix."""
        return "/".join(part for part in (self.prefix, *parts) if part)


@dataclass(frozen=True)
class StoredFile:
    """One object of a manifest. ``path`` relative to the checkpoint, ``size`` in bytes, ``crc64`` as decimal text."""

    path: str
    size: int
    crc64: str
    node: str = ""


@dataclass
class Manifest:
    """``manifest.json``: the record that makes a checkpoint in the bucket real. It is written last.

    New fields have defaults: a manifest of an older version stays readable. ``schema_version`` grows only when a reader
    that does not know a field would misread the rest.
    """

    name: str
    step: int
    format: str
    verdict: str
    files: List[StoredFile]
    metrics: Dict[str, float] = field(default_factory=dict)
    epoch: Optional[float] = None
    world_size: Optional[int] = None
    recipe: str = ""
    recipe_hash: str = ""
    dag_id: str = ""
    run_id: str = ""
    versions: Dict[str, str] = field(default_factory=dict)
    created_at: str = ""  # ISO 8601, UTC
    schema_version: int = 1
    plan_hash: str = ""  # of the whole launch plan: arguments, nodes, environment
    cluster: str = ""
    engine: str = ""
    model: str = ""  # base model, as the recipe names it: path, oss:// location or hub id
    model_revision: str = ""
    model_digest: str = ""  # SHA-256 that stage found, where the model was staged
    datasets: Dict[str, str] = field(default_factory=dict)  # location → SHA-256 that stage found; "": not known
    run_type: str = ""  # scheduled, manual, …
    triggered_by: str = ""  # user
    origin: str = ""  # base URL or host of the Airflow installation

    @property
    def total_bytes(self) -> int:
        """The sum of the sizes of all files, in bytes."""
        return sum(file.size for file in self.files)


# ---------------------------------------------------------------------------------------------------------------
# Requests and replies, one pair a verb
# ---------------------------------------------------------------------------------------------------------------


@dataclass
class ProbeRequest:
    """``probe``: what is this node like? ``workdir`` is created when it is missing, to prove that it can be."""

    workdir: str
    packages: List[str] = field(default_factory=list)  # distribution names whose versions are wanted
    shared_dir: Optional[str] = None


@dataclass
class ProbeReply:
    """Facts, no verdicts. Sizes are in bytes, ``clock`` in seconds since the epoch, ``None`` means not known."""

    hostname: str
    python_version: str
    python_path: str
    packages: Dict[str, Optional[str]] = field(default_factory=dict)
    gpus: List[Gpu] = field(default_factory=list)
    gpu_error: Optional[str] = None
    workdir_error: Optional[str] = None
    shared_dir_error: Optional[str] = None
    disk_free: Optional[int] = None
    disk_total: Optional[int] = None
    shared_disk_free: Optional[int] = None
    memory_total: Optional[int] = None
    memory_available: Optional[int] = None
    shm_free: Optional[int] = None
    cpu_count: Optional[int] = None
    boot_id: str = ""
    clock: float = 0.0
    holder: Optional[Holder] = None  # the first of ``holders``
    holders: List[Holder] = field(default_factory=list)  # every job that holds a lease here, oldest first


@dataclass
class ArgumentsRequest:
    """``arguments``: which arguments does the ms-swift of this node take for ``command``?"""

    command: str


@dataclass
class ArgumentsReply:
    """``arguments``: name → ``{"type", "choices"?, "default"?, "required"?}``; see :mod:`trainer.swift_arguments`."""

    version: str = ""
    arguments: Dict[str, Any] = field(default_factory=dict)
    error: Optional[str] = None


@dataclass
class ListenRequest:
    """``listen``: bind ``port`` on all addresses, answer each caller with ``nonce``, end after ``expect`` callers."""

    port: int
    nonce: str
    expect: int = 1
    timeout_s: float = 15.0


@dataclass
class ListenReply:
    """``error`` is set when the port could not be bound; ``callers`` counts those that read the nonce."""

    callers: int = 0
    error: Optional[str] = None


@dataclass
class ReachRequest:
    """``reach``: connect to ``host``:``port`` and read ``nonce``; tries again until ``timeout_s`` has passed."""

    host: str
    port: int
    nonce: str
    timeout_s: float = 10.0


@dataclass
class ReachReply:
    """``error`` is ``None`` when the nonce came back."""

    error: Optional[str] = None
    round_trip_s: Optional[float] = None


@dataclass
class StageItem:
    """One thing that must be on the node. ``source`` is an absolute path or an ``oss://bucket/key`` location.

    ``oss://…/`` with a trailing slash is a prefix: everything below it is staged as a folder.
    """

    name: str
    source: str
    oss: Optional[OssTarget] = None  # endpoint and credentials; bucket and prefix are taken from ``source``


@dataclass
class StageRequest:
    """``stage``: put each item into ``<workdir>/cache`` (or prove that it is there) and tell its digest."""

    workdir: str
    items: List[StageItem] = field(default_factory=list)


@dataclass(frozen=True)
class StagedItem:
    """Where an item lies now. ``digest`` is sha256 over names and contents; equal on two nodes = equal content."""

    name: str
    source: str
    path: str = ""
    digest: str = ""
    files: int = 0
    size: int = 0
    fetched: int = 0  # bytes that came over the network now; 0 = it was there
    error: Optional[str] = None


@dataclass
class StageReply:
    """One entry per item of the request, in its order."""

    items: List[StagedItem] = field(default_factory=list)


@dataclass
class JobSpec:
    """Everything a supervisor needs; written beside the job as ``spec.json`` so that any later step can read it.

    ``argv`` is run in ``cwd`` with ``env`` over the node's own environment. ``files`` (name → text) are written into
    the job's folder first; ``{job_dir}`` in ``argv`` and in values of ``env`` stands for that folder. ``grace_s`` is
    the time between TERM and KILL; ``deadline`` (seconds since the epoch) ends the job whether Airflow is up or not.
    ``resume_files`` (path below ``output_dir`` → text) are small files of the checkpoint to resume from that another
    node wrote, such as DeepSpeed's ``latest``; each is put there before the start where it is missing or empty.
    """

    job_id: str
    argv: List[str]
    env: Dict[str, str] = field(default_factory=dict)
    files: Dict[str, str] = field(default_factory=dict)
    cwd: str = ""  # default: the job's folder
    output_dir: str = ""
    world_size: int = 1
    owner: Owner = field(default_factory=Owner)
    grace_s: float = 30.0
    deadline: Optional[float] = None
    gpus: Optional[List[int]] = None  # the GPUs that this job leases; ``None``: the whole node
    port: Optional[int] = None  # must be free when the job is prepared (rendezvous, on the first node)
    resume_files: Dict[str, str] = field(default_factory=dict)


@dataclass
class StartRequest:
    """``start``: attach to the job of that id or start it, decided atomically on the node."""

    workdir: str
    spec: JobSpec
    hold_s: float = 0.0  # > 0: take the lease and wait that long (seconds) for ``commit`` before the training starts


@dataclass
class CommitRequest:
    """``commit``: the other nodes are prepared too; start the training that ``start`` with ``hold_s`` prepared."""

    workdir: str
    job_id: str


@dataclass
class CommitReply:
    """``error`` is ``None`` when the training runs, or has been running already."""

    state: JobState
    error: Optional[str] = None


@dataclass
class CancelRequest:
    """``cancel``: a user has ended this task. Stops every living job of ``owner``, and refuses later starts of it.

    Meant for tries up to ``owner.try_number``: a job of a later try is left alone, and so is its start.
    """

    workdir: str
    owner: Owner
    reason: str = "requested"
    grace_s: Optional[float] = None


@dataclass
class CancelReply:
    """The jobs that were asked to stop."""

    jobs: List[JobState] = field(default_factory=list)


@dataclass
class StartReply:
    """``result`` is one of :class:`StartResult`."""

    result: str
    state: Optional[JobState] = None
    holder: Optional[Holder] = None
    reaped: int = 0  # processes of a dead supervisor that were ended before this start
    error: Optional[str] = None


@dataclass
class StatusRequest:
    """``status``: the proven state, and log bytes from ``log_offset`` on (at most ``max_bytes``; 0 = none)."""

    workdir: str
    job_id: str
    log_offset: int = 0
    max_bytes: int = 0


@dataclass
class StatusReply:
    """``log`` is base64 of raw bytes; the next offset is ``log_offset`` plus the number of decoded bytes."""

    state: JobState
    log: str = ""
    log_offset: int = 0
    orphans: List[int] = field(default_factory=list)


@dataclass
class StopRequest:
    """``stop``: ask the supervisor to end the job; returns at once unless ``wait_s`` > 0. A lost job is reaped."""

    workdir: str
    job_id: str
    reason: str = "requested"
    grace_s: Optional[float] = None
    wait_s: float = 0.0


@dataclass
class StopReply:
    """The state after the request; ``stopped`` says that no process of the job is left."""

    state: JobState
    stopped: bool = False


@dataclass
class JobsRequest:
    """``jobs``: every job that this node knows."""

    workdir: str


@dataclass
class JobsReply:
    """States as ``status`` would prove them, oldest first."""

    jobs: List[JobState] = field(default_factory=list)
    holder: Optional[Holder] = None  # the first of ``holders``
    holders: List[Holder] = field(default_factory=list)  # every job that holds a lease here, oldest first


@dataclass
class CheckpointsRequest:
    """``checkpoints``: what lies in ``output_dir``."""

    output_dir: str


@dataclass
class CheckpointsReply:
    """One listing per ``checkpoint-N`` folder, by step; ``last`` is where the ``last-checkpoint`` link points."""

    checkpoints: List[CheckpointListing] = field(default_factory=list)
    last: Optional[str] = None
    best: Optional[str] = None


@dataclass
class BackupRequest:
    """``backup``: send the named files of one checkpoint to ``target``; each is compared with the server's CRC64."""

    output_dir: str
    checkpoint: str
    files: List[str]
    target: OssTarget
    node: str = ""
    state_dir: str = ""  # where the records of unfinished multipart uploads are kept
    part_size: int = 10 * 1024 * 1024  # bytes
    threads: int = 4
    bandwidth: int = 0  # bytes per second that all threads together may send; 0: as fast as it goes
    low_priority: bool = False  # leave disk and processors to everybody else


@dataclass
class BackupReply:
    """``files`` are proven to be in the bucket; ``errors`` maps the others to what went wrong."""

    files: List[StoredFile] = field(default_factory=list)
    sent: int = 0  # bytes that were sent now
    errors: Dict[str, str] = field(default_factory=dict)
    copied: int = 0  # bytes that the bucket had already, in another checkpoint, and copied by itself
    leftovers: int = 0  # unfinished uploads of dead senders that were dropped
    seconds: float = 0.0


@dataclass
class MirrorRequest:
    """``mirror``: while the job runs, send each checkpoint as soon as it is there; or hand new keys to who does."""

    workdir: str
    job_id: str
    output_dir: str
    target: OssTarget  # prefix = the run's folder in the bucket
    node: str = ""
    share: int = 0  # of nodes that see the same files, this one sends every ``shares``-th
    shares: int = 1
    partial: bool = False  # nodes share no disk: what this node cannot judge alone is sent when it has settled
    state_dir: str = ""  # default: ``<workdir>/uploads``
    part_size: int = 10 * 1024 * 1024  # bytes
    threads: int = 2
    bandwidth: int = 0  # bytes per second; 0: as fast as it goes


@dataclass
class MirrorReply:
    """``error`` is ``None`` when a mirror runs with these keys."""

    started: bool = False
    refreshed: bool = False
    error: Optional[str] = None


@dataclass
class PruneRequest:
    """``prune``: delete these checkpoint folders. ``keep`` are never deleted, whatever ``delete`` says.

    With ``workdir`` neither is one that a living job of this node writes, resumes from or is told of.
    """

    output_dir: str
    delete: List[str]
    keep: List[str] = field(default_factory=list)
    dry_run: bool = False
    workdir: str = ""


@dataclass
class PruneReply:
    """``deleted`` maps names to freed bytes; ``errors`` maps names to what went wrong or why it was refused."""

    deleted: Dict[str, int] = field(default_factory=dict)
    errors: Dict[str, str] = field(default_factory=dict)


@dataclass
class FetchRequest:
    """``fetch``: bring a checkpoint back from the bucket by its manifest, verified, renamed into place when whole."""

    target: OssTarget  # prefix = the checkpoint's folder in the bucket
    destination: str  # absolute path of the folder to create
    threads: int = 4
    bandwidth: int = 0  # bytes per second that all threads together may receive; 0: as fast as it goes


@dataclass
class FetchReply:
    """``error`` is ``None`` when ``destination`` holds the whole verified checkpoint."""

    path: str = ""
    files: int = 0
    size: int = 0
    error: Optional[str] = None
    received: int = 0  # bytes that came over the network now


@dataclass
class SweepRequest:
    """``sweep``: what old jobs and old downloads left on this node. Ages are in seconds; ``None``: leave them alone.

    A download counts from when a run was staged with it last. ``cache_bytes`` is what all downloads may take.
    """

    workdir: str
    jobs_age_s: Optional[float] = None
    cache_age_s: Optional[float] = None
    cache_bytes: Optional[int] = None
    delete: bool = False


@dataclass(frozen=True)
class Swept:
    """One folder of ``jobs`` or ``cache`` that is to go, or is gone. ``age_s`` in seconds, ``size`` in bytes."""

    kind: str  # job or download
    path: str
    size: int
    age_s: float
    reason: str
    error: Optional[str] = None


@dataclass
class SweepReply:
    """What was found, oldest first; with ``delete`` all of it without an ``error`` is gone."""

    found: List[Swept] = field(default_factory=list)


# ---------------------------------------------------------------------------------------------------------------
# JSON
# ---------------------------------------------------------------------------------------------------------------


def to_dict(value: Any) -> Any:
    """A dataclass as plain JSON values."""
    return dataclasses.asdict(value)


def dumps(value: Any) -> str:
    """A dataclass as one line of JSON."""
    return json.dumps(to_dict(value), ensure_ascii=False, separators=(",", ":"))


def loads(cls: Type[T], text: str) -> T:
    """The dataclass ``cls`` from JSON text.

    Raises:
        ProtocolError: the text is not JSON or does not have the shape of ``cls``.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"{cls.__name__}: not JSON ({error}): {text[:200]!r}") from None
    return from_dict(cls, value)


def from_dict(cls: Type[T], value: Any) -> T:
    """The dataclass ``cls`` from plain JSON values; unknown keys are ignored.

    Raises:
        ProtocolError: a key is missing or has a value of another type.
    """
    return typing.cast(T, _decode(cls, value, cls.__name__))


def _decode(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Union:
        if value is None and type(None) in arguments:
            return None
        return _decode(next(a for a in arguments if a is not type(None)), value, where)
    if origin is list:
        _expect(isinstance(value, list), where, "a list", value)
        return [_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict:
        _expect(isinstance(value, dict), where, "an object", value)
        return {str(key): _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(hint, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _expect(isinstance(value, hint) and (hint is bool or not isinstance(value, bool)), where, hint.__name__, value)
    return value


def _decode_dataclass(cls: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, "an object", value)
    hints = _field_types(cls)
    decoded = {name: _decode(hints[name], value[name], f"{where}.{name}") for name in hints if name in value}
    try:
        return cls(**decoded)
    except TypeError as error:
        raise ProtocolError(f"{where}: {error}") from None


@functools.cache
def _field_types(cls: Any) -> Dict[str, Any]:
    """The types of the fields, whose names are evaluated once: a triggerer decodes hundreds of states a second."""
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def _expect(ok: bool, where: str, wanted: str, value: Any) -> None:
    if not ok:
        raise ProtocolError(f"{where}: expected {wanted}, got {str(value)[:120]!r}")
