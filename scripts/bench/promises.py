"""Look for broken promises in what the nodes of a run left on the disk.

Four promises: what was acknowledged or published is there; no rollout is used twice; no byte is kept, loaded
or served on that was not verified; every process makes progress or says what it waits for. The nodes must be
dead or stopped by SIGSTOP while their directories are read. Nothing is written to them: ledgers are copied.
"""

import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from primerl.crypto.hashing import digest
from primerl.node.errors import StorageError
from primerl.node.storage.chunk_store import chunk_path
from primerl.node.storage.ledger import OWNER
from primerl.node.storage.rollouts import BRIEF, RolloutFiles
from primerl.node.storage.run_files import CHECKPOINTS, METRICS, ROLLOUTS
from primerl.node.trainer.state import state_of
from primerl.node.training.buffer import BufferSnapshot
from primerl.node.training.checkpoint import Checkpoints
from primerl.node.training.resume_points import ResumePoints
from primerl.node.weights.chain import VersionChain
from primerl.node.weights.replica import WeightReplica
from primerl.node.weights.state import WeightsError
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.errors import RemoteProtocolError
from primerl.protocol.manifests import PolicyHead, PolicyManifest
from primerl.protocol.rollouts import Verdict
from primerl.protocol.session import decode

CHUNK = re.compile(r"[0-9a-f]{64}")
Order = tuple[int, int]
"""(epoch, version)."""


@dataclass
class Witness:
    """What was promised, as seen from outside of the nodes that promised it."""

    receipts: set[bytes] = field(default_factory=set[bytes])
    """Digests of submissions that had a receipt."""
    heads: dict[Order, bytes] = field(default_factory=dict[Order, bytes])
    """Digests of the sealed heads that were announced."""
    loaded: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    """(version, digest of the state) of what engines loaded."""
    faults: list[str] = field(default_factory=list[str])
    """Promises that were broken before now."""


@dataclass(frozen=True)
class Marks:
    """How far the nodes of a run were: newest version and submissions of each, by directory."""

    at: float
    """Unix seconds."""
    progress: Mapping[Path, tuple[Order, int]]


@dataclass(frozen=True)
class Records:
    """What the ledger of a node says."""

    path: Path
    owner: bytes
    ledger_id: str
    heads: dict[Order, tuple[bytes, bytes]]
    """(sealed head, manifest document)."""
    inbox: dict[int, tuple[bytes, int]]
    """(digest, lease) by arrival."""
    verdicts: list[tuple[int | None, bytes]]
    """(arrival at the trainer, sealed verdict)."""
    spool: dict[bytes, int]
    """Leases of the submissions without a receipt, by digest."""

    @property
    def newest(self) -> Order:
        """The newest head; version -1 before the first."""
        return max(self.heads, default=(0, -1))


def broken(
    run_dir: Path,
    workers: Sequence[Path] = (),
    witness: Witness | None = None,
    before: Marks | None = None,
) -> list[str]:
    """Name every promise that a run broke: the ledgers and directories of its trainer and `workers` say it.

    `workers` are data directories. With `before`, each node must have got further since, or say why not.
    """
    witness = witness or Witness()
    trainer = read_ledger(run_dir / "trainer")
    others = [records for path in workers for records in _runs(path)]
    faults = [
        *witness.faults,
        *_lost(trainer, others, witness),
        *_used_twice(run_dir, trainer),
        *_unverified(trainer, [trainer, *others], witness),
        *irreproducible(run_dir, trainer),
    ]
    if before is not None:
        faults += _stalled(run_dir, workers, before)
    return faults


# -- nothing is lost -------------------------------------------------------------------------------


def _lost(trainer: Records, others: Sequence[Records], witness: Witness) -> Iterator[str]:
    """Submissions that were acknowledged, and versions that were published, which the trainer does not have."""
    received = {name for name, _ in trainer.inbox.values()}
    for name in sorted(witness.receipts - received):
        yield f"submission {name.hex()[:10]} had a receipt and is lost"
    arrivals = sorted(trainer.inbox)
    yield from (
        f"submissions {a + 1} to {b - 1} are lost" for a, b in pairwise(arrivals) if b > a + 1
    )
    judged = [arrival for arrival, _ in trainer.verdicts if arrival is not None]
    yield from (f"the verdict on submission {at} is of none" for at in set(judged) - set(arrivals))
    yield from (
        f"submission {at} has several verdicts" for at in set(judged) if judged.count(at) > 1
    )
    versions = [version for _, version in sorted(trainer.heads)]
    gaps = [(a, b) for a, b in pairwise(versions) if b != a + 1]
    yield from (f"version {b} follows version {a}" for a, b in gaps)
    oldest = min(trainer.heads, default=(0, 0))
    announced = {order: (name, "was announced") for order, name in witness.heads.items()}
    for records in others:
        for order, (sealed, _) in records.heads.items():
            announced[order] = digest(sealed), f"is known to {records.path.parent.name}"
        for _, sealed in records.verdicts:
            about = unseal(sealed, Purpose.VERDICT, Verdict, now=0, signer=trainer.owner).body
            if about.submission not in received:
                yield f"submission {about.submission.hex()[:10]} was judged and is lost"
    for order, (name, why) in announced.items():
        own = trainer.heads.get(order)
        if order >= oldest and (own is None or digest(own[0]) != name):
            yield f"version {order[1]} {why}, and is lost or was signed again"
    if trainer.newest[0]:
        yield f"the chain began again: epoch {trainer.newest[0]}"


# -- nothing is used twice -------------------------------------------------------------------------


def _used_twice(run_dir: Path, trainer: Records) -> Iterator[str]:
    """Groups that two steps trained on; and groups that a resume would use again."""
    trained: dict[tuple[int, str], int] = {}
    files = RolloutFiles(run_dir / ROLLOUTS)
    for step in files.steps():
        groups = {
            (row.lease, row.task) for row in files.read(step, BRIEF) if row.verdict == "trained"
        }
        for group in groups & trained.keys():
            yield f"a group of lease {group[0]} was used by steps {trained[group]} and {step}"
        trained.update(dict.fromkeys(groups, step))
    arrivals = {lease: arrival for arrival, (_, lease) in trainer.inbox.items()}
    for step, parts in saved_parts(run_dir):
        state = state_of(parts)
        if state is None or state.ledger != trainer.ledger_id:
            continue
        buffer = msgspec.msgpack.decode(parts["buffer"], type=BufferSnapshot)
        leases = {int.from_bytes(group.lease[:8], "big") for group in buffer.groups}
        leases |= {lease for (lease, _), at in trained.items() if at <= step}
        for lease in leases - arrivals.keys():
            yield f"step {step} used lease {lease}, of which no submission arrived"
        contained = {arrivals[lease] for lease in leases & arrivals.keys()}
        yield from unnamed(step, state.verified_up_to, state.used, contained)


def unnamed(
    step: int, verified_up_to: int, used: Sequence[int], contained: set[int]
) -> Iterator[str]:
    """Name the submissions that a resume would use again from a saved state, which has these two fields.

    `contained` are the arrival numbers of those of which its buffer or its weights contain work.
    """
    for arrival in sorted(contained - set(used)):
        if arrival > verified_up_to:
            yield f"step {step} used submission {arrival} and does not name it: it would be used twice"


def saved_parts(run_dir: Path) -> Iterator[tuple[int, Mapping[str, bytes]]]:
    """Read the parts of every whole resume point and checkpoint, with its step."""
    points = ResumePoints(run_dir / CHECKPOINTS)
    yield from ((point.step, point.parts) for point in points.newest_first(-1))
    for path in (run_dir / CHECKPOINTS).glob("step_*/COMPLETE"):
        step = int(path.parent.name.removeprefix("step_")) if path.parent.name[5:].isdigit() else -1
        checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep_last=1)
        if step >= 0 and checkpoints.is_intact(step):
            yield step, {name: checkpoints.glance(step, name) for name in ("cursor", "buffer")}


# -- nothing unverified ----------------------------------------------------------------------------


def _unverified(trainer: Records, nodes: Sequence[Records], witness: Witness) -> Iterator[str]:
    """Chunks that are not what their names say, heads that the trainer did not sign, states of none."""
    states: dict[int, bytes] = {}
    for records in nodes:
        where = str(records.path.parent)
        for path in (records.path.parent / "chunks").glob("*/*/*"):
            if CHUNK.fullmatch(path.name) and digest(path.read_bytes()).hex() != path.name:
                yield f"{where} keeps a chunk that is not {path.name[:10]}"
        for order, (sealed, document) in records.heads.items():
            try:
                head = unseal(sealed, Purpose.HEAD, PolicyHead, now=0, signer=trainer.owner).body
            except RemoteProtocolError as error:
                yield f"{where} took version {order[1]}: {error}"
                continue
            states[head.version] = head.state
            if document and digest(document) != head.manifest:
                yield f"{where} took another manifest of version {order[1]}"
    for version, state in witness.loaded:
        if states.get(version, state) != state:
            yield f"an engine loaded a state that is not version {version}"


# -- what was announced can be reproduced ----------------------------------------------------------


def irreproducible(run_dir: Path, trainer: Records | None = None) -> Iterator[str]:
    """Say why a resume could not go on from the newest version that was announced.

    Version 0, with which a run begins, is announced before its checkpoint is written: it is made again.
    """
    trainer = trainer or read_ledger(run_dir / "trainer")
    version = trainer.newest[1]
    if version > 0 and not any(step >= version for step, _ in saved_parts(run_dir)):
        yield f"version {version} is announced, and no checkpoint or resume point of it is on the disk"
    if version >= 0 and (why := _cannot_rebuild(trainer, version)):
        yield f"version {version} is announced, and cannot be made from the chunks: {why}"


def _cannot_rebuild(trainer: Records, version: int) -> str:
    chain, replica = VersionChain(), WeightReplica(threads=1)
    try:
        for _, document in trainer.heads.values():
            chain.add(decode(document, PolicyManifest))
        for reached, artifact in chain.plan(-1, b"", version):
            manifest = chain.get(reached)
            assert manifest is not None
            paths = (chunk_path(trainer.path.parent / "chunks", c.digest) for c in artifact.chunks)
            chunks = (path.read_bytes() for path in paths)
            replica.commit(replica.prepare(manifest, artifact, chunks))
    except (WeightsError, StorageError, OSError) as error:
        return str(error)
    return ""


# -- progress --------------------------------------------------------------------------------------


def marks(run_dir: Path, workers: Sequence[Path], at: float) -> Marks:
    """Note how far each node is at `at`, Unix seconds."""
    return Marks(at, _progress(run_dir, workers))


def _progress(run_dir: Path, workers: Sequence[Path]) -> dict[Path, tuple[Order, int]]:
    trainer = read_ledger(run_dir / "trainer")
    progress = {run_dir / "trainer": (trainer.newest, len(trainer.inbox))}
    for path in workers:
        runs = _runs(path)
        newest = max((records.newest for records in runs), default=(0, -1))
        progress[path] = newest, sum(len(records.verdicts) for records in runs)
    return progress


def _stalled(run_dir: Path, workers: Sequence[Path], before: Marks) -> Iterator[str]:
    """Nodes that got no further, and whose logs do not say why."""
    for path, now in _progress(run_dir, workers).items():
        logs = (run_dir if path == run_dir / "trainer" else path) / "logs"
        if now == before.progress.get(path) and not words_since(logs, before.at):
            yield f"{path.name} got no further, and says nothing"


def words_since(logs: Path, since: float) -> list[str]:
    """Return what the log of a node said after a time, Unix seconds."""
    lines: list[dict[str, Any]] = []
    for path in logs.glob("*.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue  # cut by a full disk
    return [str(line.get("message", "")) for line in lines if float(line.get("time", 0)) > since]


def steps_logged(run_dir: Path) -> list[int]:
    """Return the steps of metrics.jsonl, in order."""
    lines = (run_dir / METRICS).read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "step" in row]


# -- ledgers ---------------------------------------------------------------------------------------


def _runs(data_dir: Path) -> list[Records]:
    """Read the ledgers of the runs that a worker has joined."""
    return [read_ledger(path.parent) for path in sorted(data_dir.glob("runs/*/ledger.db"))]


def read_ledger(directory: Path) -> Records:
    """Read a copy of the ledger in a node's directory."""
    with open_copy(directory / "ledger.db") as db:
        known = dict(db.execute("SELECT key, value FROM meta"))
        heads = db.execute("SELECT term, version, sealed, manifest FROM heads").fetchall()
        return Records(
            directory / "ledger.db",
            bytes(known.get(OWNER, b"")),
            bytes(known.get("id", b"")).hex(),
            {(epoch, version): (sealed, document) for epoch, version, sealed, document in heads},
            {
                arrival: (name, lease)
                for arrival, name, lease in db.execute(
                    "SELECT arrival, digest, lease_id FROM inbox"
                )
            },
            db.execute("SELECT arrival, sealed FROM verdicts").fetchall(),
            dict(db.execute("SELECT digest, lease_id FROM spool")),
        )


@contextmanager
def open_copy(path: Path) -> Generator[sqlite3.Connection]:
    """Open a copy of a database with its log: recovery of the log changes nothing in the original."""
    with tempfile.TemporaryDirectory(prefix="primerl-promises-") as name:
        for file in (path, path.with_name(f"{path.name}-wal")):
            if file.exists():
                shutil.copyfile(file, Path(name) / file.name)
        with closing(sqlite3.connect(Path(name) / path.name)) as db:
            yield db
