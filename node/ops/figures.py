"""What a node shows of itself: typed, bounded figures, made by the node alone.

`status`, `peers`, the live view, the page in the browser, /metrics and W&B of a worker are views of it: they
add no figure of their own, and ask nobody else. Every list has a bound: peers that of the table of peers,
curves MAX_POINTS. What the world may see is the fields of the Public types, and nothing else: no text of a
peer's, no address, no id that one could be found by.
"""

from collections import Counter

import msgspec

MAX_POINTS = 512
"""Points of a curve."""
MAX_SOURCES = 8
MAX_PUBLIC_PEERS = 200
STATES = ("working", "starting", "paused", "silent", "left", "refused")
ROLES = ("trainer", "inference", "validator", "standby", "learner")


class PeerRow(msgspec.Struct):
    """One line of `primerl-node peers`."""

    id: str
    short: str
    role: str
    path: str
    """direct, relayed, memory, or - when not connected."""
    rtt_ms: float | None
    bytes_sent: int
    bytes_received: int
    version: int
    """Policy version that it reports; -1 before the first."""
    lag: int
    leases: int
    accepted: int
    rejected: int
    top_reason: str
    trust: float
    """The lowest of `trusts`; 0.5 for a node without judged work."""
    reliability: float
    last_seen_s: float | None
    """Seconds ago."""
    software: str
    audited: int = 0
    """Its rollouts that were audited."""
    suspicion: float = 0.0
    """Evidence from audits as a share of what a ban takes: at 1 it is banned."""
    refused: str = ""
    """Why it gets no leases, or none of some environments, or its audits no longer count; empty while all is
    well."""
    audits: int = 0
    """Audits that it made for the trainer, as a validator."""
    stage: str = ""
    """Its stage of a pipeline and that stage's layers; empty for none."""
    numerics: str = ""
    """Numerics class that it reports; empty if none."""
    silent_s: float = 0.0
    """Seconds since its last message, where one was due; 0 while all is well."""
    starting: bool = False
    """Whether it is connected but has not asked for work: its engine or its first policy is loading."""
    left: bool = False
    """Whether it said goodbye before it fell silent."""
    trusts: dict[str, float] = {}
    """Trust by environment, for those that it sent work on."""
    trust_low: float = 0.05
    """Lower 5 % quantile of the lowest trust: what can be counted on."""
    reasons: dict[str, int] = {}
    """Rejected rollouts by reason."""
    chunk_bytes: dict[str, int] = {}
    """Chunk bytes that it says it has fetched, from its MAX_SOURCES largest sources (trainer)."""
    second: str = ""
    """Warning that another program with its key was refused lately, and from where."""
    ticket: str = ""
    """At the trainer: the ticket that admitted it, by label and the beginning of its id."""
    name: str = ""
    """The name that it gives itself, which proves nothing."""
    paused: str = ""
    """Why it is paused, in its own words; empty while it works."""

    @property
    def state(self) -> str:
        """One of STATES."""
        if self.refused:
            return "refused"
        if self.left:
            return "left"
        if self.silent_s:
            return "silent"
        return "paused" if self.paused else "starting" if self.starting else "working"


class PingRow(msgspec.Struct):
    """One try of `primerl-node ping`."""

    id: str
    short: str
    role: str
    name: str = ""
    path: str = "-"
    """direct, relayed, memory, or - where no reply came."""
    remote: str = ""
    """IP address of the peer; empty over a relay."""
    connect_ms: float = 0.0
    """Until there was a connection; near 0 where there was one before."""
    rtt_ms: float | None = None
    """From the request to the reply of the peer's program; None: none came."""
    path_rtt_ms: float | None = None
    """Round trip of the path, as the transport estimates it."""
    why: str = ""
    """Why no reply came, or why the request was refused."""


class MachineRow(msgspec.Struct):
    """Use of the machine by a node's processes, with those of its engine and environments."""

    cpu_cores: float
    """Mean number of busy cores since the reading before this one; of the first, since the start."""
    memory_bytes: int
    """Resident memory; pages that processes share count in each."""
    disk_free_bytes: int
    """Room on the disk of the node's data directory."""
    gpus: int = 0
    """GPUs that the node sees."""
    gpu_busy: float | None = None
    """Share of the last second or less in which they computed, mean; None where none says."""
    gpu_memory_bytes: int = 0
    gpu_memory_total_bytes: int = 0
    """Memory of these GPUs, used (also by other programs) and in all."""


class LimitsRow(msgspec.Struct):
    """Limits that a node's owner set, and their use so far."""

    paused: str = ""
    """Why it is paused, and until when; empty while it works."""
    serves: bool = True
    """Whether it sends chunks to others."""
    hours: str = ""
    when: str = "always"
    upload: float = 0.0
    download: float = 0.0
    """Megabits/s; 0: no limit."""
    monthly_gb: float = 0.0
    """0: no limit."""
    month: str = ""
    """The month that is counted, 2026-11."""
    month_sent: int = 0
    month_received: int = 0
    """Bytes of that month."""


class BanRow(msgspec.Struct):
    """One line of `primerl-node bans`."""

    id: str
    short: str
    since: float
    """Unix seconds; 0: not known."""
    why: str
    ticket: str = ""
    """Ticket that admitted it: label and beginning of the id."""
    accepted: int = 0
    rejected: int = 0
    until: float = 0.0
    """When it ends, in Unix seconds; 0: when the operator pardons it."""


class EngineRow(msgspec.Struct):
    """The engine of a worker."""

    type: str
    inflight: int = 0
    """Sequences submitted and not finished."""
    cap: int = 0
    """Present limit of sequences in flight."""
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Share of its cache that is in use, 0 to 1."""
    preemptions: int = 0
    taken_back: int = 0
    """Sequences that were stopped for lack of room, and generated again later."""
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens (speculative decoding): proposed, and accepted."""
    tokens_per_s: float = 0.0
    """Over the last minute."""
    restarts: int = 0
    fault: str = ""
    """Why it does not work at present, and the remedy; empty while it works."""


class EnvironmentRow(msgspec.Struct):
    """An environment that a run trains on."""

    name: str
    id: str
    share: float
    """Share of the leased groups by its ratio, 0 to 1."""
    group_size: int
    reward: float | None = None
    """Mean reward of its rollouts in the last batch that had some; None before the first."""
    accepted: int = 0
    """Rollouts of it so far."""
    rejected: int = 0
    workers: int = 0
    """Workers that are here and can play it."""


class GroupRow(msgspec.Struct):
    """A pipeline that the trainer has planned."""

    group: str
    generation: int
    stages: list[str]
    """Short ids of its nodes, in order."""
    layers: list[str]
    """Layers of each stage: first-last."""
    spares: int
    round_trip_ms: float | None
    """Round trip of the whole ring, as its stages measured it; None while one of them is silent."""
    kv_tokens: int
    """Tokens that it has room for at a time."""
    state: str
    """planned, or waiting: for a node in place of one that is lost."""


class StageRow(msgspec.Struct):
    """A worker's stage of a pipeline."""

    group: str
    generation: int
    rank: int
    stages: int
    layers: str
    """Its first and last layers: 0-13."""
    state: str
    """`healthy`, `starting`, or the fault."""
    epoch: int = -1
    """Epoch of the ring; higher after every break."""
    breaks: int = 0
    bytes_out: int = 0
    """Bytes to the next stage, since this ring began."""
    bytes_in: int = 0
    """Bytes from the stage before."""
    rtt_ms: float | None = None
    """Round trip to the next stage."""
    round_ms: float | None = None
    """Time of a trip around the ring (stage 0)."""
    stall_share: float | None = None
    """Share of its time that this stage waits for the others; at stage 0 of the slowest stage."""
    lanes: int = 0
    """Micro-batches that the sequences are cut into (stage 0)."""
    in_flight: int = 0
    """Micro-batches in flight around the ring (stage 0)."""


class BoundsRow(msgspec.Struct):
    """The bounds of noise of one numerics class, in a run that measures them."""

    numerics: str
    number: int
    """0 while they are provisional; rises each time that they are made anew."""
    rollouts: int
    """Rollouts of reference workers behind the bounds."""
    tokens: int
    first_version: int
    last_version: int
    """Policy versions that drew these rollouts."""
    rejected_at_most: float
    """Share of honest rollouts that is rejected by noise, 95 % upper bound; 1 where nothing was measured."""
    gathered: int = 0
    """Rollouts of references so far (trainer)."""
    workers: int = 0
    """Workers that claim the class (trainer)."""


class Status(msgspec.Struct, kw_only=True):
    """`primerl-node status`."""

    id: str
    short: str
    role: str
    software: str
    pid: int
    uptime_s: float
    data_dir: str
    run: str = ""
    run_name: str = ""
    phase: str = "starting"
    """starting, joining, catching up, warm-up, evaluating, running, finishing, ended."""
    step: int = 0
    max_steps: int = 0
    version: int = -1
    """Policy version that this node holds."""
    newest_version: int = -1
    """Newest version that it has heard of."""
    reward: float | None = None
    """Mean reward of the last batch (trainer)."""
    staleness: float | None = None
    """Mean staleness of the last batch, versions (trainer)."""
    leases: int = 0
    """Leases held (worker) or out (trainer)."""
    waiting_groups: int = 0
    accepted: int = 0
    rejected: dict[str, int] = {}
    trust: float | None = None
    """The lowest of `trusts` (worker); None before the first verdict."""
    trusts: dict[str, float] = {}
    """Trust by environment, by the verdicts on leases since its start, as the trainer counts it (worker)."""
    bytes_sent: int = 0
    bytes_received: int = 0
    chunk_bytes_by_source: dict[str, int] = {}
    """Chunk bytes fetched, by short id of the source (`trainer` for the trainer)."""
    peers: int = 0
    neighbours: int = 0
    """libp2p connections."""
    detail: str = ""
    warnings: list[str] = []
    """Conditions that the operator should act on, a sentence each."""
    bounds: list[BoundsRow] = []
    """Bounds of each class (trainer), or of this node's own (worker), in a run that measures bounds of
    noise."""
    waiting_for: str = ""
    """Reason for which the run (trainer) or this node (worker, validator) waits; empty while it works."""
    engine: EngineRow | None = None
    """The engine of a worker."""
    environment: str = ""
    """The environments' present work, or their last fault; empty while all is well."""
    environments: list[EnvironmentRow] = []
    """Environments of the run (trainer)."""
    limits: LimitsRow | None = None
    """Limits that its owner set (worker, validator)."""
    stage: StageRow | None = None
    """Pipeline stage of a worker that holds the model together with others."""
    event_loop_lag: dict[str, float] = {}
    """Event-loop lag, seconds: mean, p90 and max over the last ten seconds (worker)."""
    pipelines: list[GroupRow] = []
    """Pipelines: groups of nodes that hold the model together (trainer)."""
    evaluating: int = -1
    """Version that is being evaluated beside training; -1 while none is (trainer)."""
    evaluations: dict[str, dict[str, float]] = {}
    """Environment -> figures of the version that was evaluated last, and its number (trainer)."""
    history: list[tuple[int, float]] = []
    """(step, mean reward) so far, older steps averaged: MAX_POINTS at most (trainer)."""
    newest: dict[str, float] = {}
    """Figures of the newest step by their names in metrics.jsonl, of those that curves show (trainer)."""
    step_s: float | None = None
    """Median seconds from step to step lately; None before the second (trainer)."""
    eta_s: float | None = None
    """Seconds to the last step at that pace (trainer)."""
    ticket_expires: float | None = None
    """Unix time at which the trainer's own ticket expires."""
    machine: MachineRow | None = None
    page: str = ""
    """Address of the node's page, without its token; empty if it serves none."""
    seconds: dict[str, float] = {}
    """Seconds by phase."""


class Curves(msgspec.Struct):
    """Figures of a run's steps: MAX_POINTS at most, of which older ones are means of several steps."""

    steps: list[int] = []
    values: dict[str, list[float | None]] = {}
    """By their names in metrics.jsonl, one for each of `steps`; None where a step has none."""


class NodeFigures(msgspec.Struct):
    """All figures of a node at a moment."""

    time: float
    """Unix seconds."""
    status: Status
    peers: list[PeerRow]


class PublicEnvironment(msgspec.Struct):
    """What everybody may see of an EnvironmentRow."""

    name: str
    share: float
    reward: float | None
    accepted: int
    rejected: int
    workers: int


class PublicPeer(msgspec.Struct):
    """What everybody may see of a PeerRow."""

    short: str
    """The beginning of its id, by which no discovery finds it."""
    role: str
    state: str
    version: int
    lag: int
    accepted: int
    rejected: int
    audited: int
    trust: float
    trust_low: float


class PublicStatus(msgspec.Struct):
    """What everybody may see of a trainer's Status."""

    role: str
    run_name: str
    phase: str
    step: int
    max_steps: int
    version: int
    reward: float | None
    staleness: float | None
    accepted: int
    rejected: dict[str, int]
    environments: list[PublicEnvironment]
    evaluating: int
    newest: dict[str, float]
    step_s: float | None
    eta_s: float | None
    uptime_s: float


class PublicFigures(msgspec.Struct):
    """What everybody may see of a run's NodeFigures."""

    time: float
    status: PublicStatus
    workers: dict[str, int]
    """Workers by state."""
    audited: int
    """Rollouts of all peers that were audited."""
    peers: list[PublicPeer]
    """The MAX_PUBLIC_PEERS with the most accepted rollouts."""
    curves: Curves
    public: bool = True


def public_figures(figures: NodeFigures, curves: Curves) -> PublicFigures:
    """Take from figures what the Public types name."""
    # a peer's own word, empty for one that only asked something
    known = [row for row in figures.peers if row.role in ROLES]
    best = sorted(known, key=lambda row: -row.accepted)[:MAX_PUBLIC_PEERS]
    peers = [msgspec.convert(row, PublicPeer, from_attributes=True) for row in best]
    return PublicFigures(
        figures.time,
        msgspec.convert(figures.status, PublicStatus, from_attributes=True),
        dict(Counter(row.state for row in figures.peers if row.role == "inference")),
        sum(row.audited for row in figures.peers),
        peers,
        curves,
    )
