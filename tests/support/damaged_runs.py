"""Runs of a trainer and a worker whose files are damaged, one at a time, before both start again.

What became of a damaged file is an Outcome; what was promised before is checked in each case.
"""

import asyncio
import contextvars
import logging
import math
import re
import shutil
import sqlite3
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.damages import damage, damages
from support.swarm import Running, Swarm
from support.witness import version_of, witness_logprob

from primerl.crypto.keys import KeyFileError, SecretKey
from primerl.node.app.daemon import load_key
from primerl.node.errors import NodeError, StorageError, first_cause
from primerl.node.training.backend import Sample, TrainBatch

STEPS = 60
KEEP = {"keep_last": 2, "weights_interval": 1}
ROWS = {
    "`.primerl-run`": r"r/\.primerl-run",
    "`config.json` `ticket.txt`": r"r/(config\.json|ticket\.txt)",
    "`metrics.jsonl`": r"r/metrics\.jsonl",
    "`model/config.json` `model/tokenizer*`": r"r/model/.*\.json",
    "`checkpoints/step_N/`": r"r/checkpoints/step_\d+/.*",
    "`checkpoints/step_N.resume`, killed": r"killed/r/checkpoints/step_\d+\.resume",
    "`weights/step_N/`": r"r/weights/.*",
    "`rollouts/step_N.parquet`": r"r/rollouts/.*",
    "`trainer/key.pem`": r"r/trainer/key\.pem",
    "`trainer/chunks/`": r"r/trainer/chunks/.*",
    "`trainer/ledger.db`": r"r/trainer/ledger\.db",
    "`trainer/ledger.db-wal`, killed": r"killed/r/trainer/ledger\.db-wal",
    "`ledger.lock`": r".*/ledger\.lock",
    "`ledger.db-shm`, killed": r"killed/.*/ledger\.db-shm",
    "a worker's `key.pem`": r"w1/key\.pem",
    "`last_status.json`": r"w1/last_status\.json",
    "`limits.json`": r"w1/limits\.json",
    "`runs/ID/chunks/`": r"w1/runs/[^/]+/chunks/.*",
    "`runs/ID/model/`": r"w1/runs/[^/]+/model/.*",
    "`runs/ID/ledger.db`": r"w1/runs/[^/]+/ledger\.db",
    "`runs/ID/ledger.db-wal`, killed": r"killed/w1/runs/[^/]+/ledger\.db-wal",
}
"""Rows of the table in docs/operating.md: the files of each, below a run that was stopped, or killed."""
ELSEWHERE = re.compile(r"r/model/model\.safetensors")
"""Files that only a real learner or engine reads: tests/node/storage/test_damaged_bytes.py has them."""
NOISE = re.compile(r"lease \d+ was refused|empty batch")
"""Lines of the log that also come where nothing is damaged."""
LINES: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("LINES", default=None)


@dataclass(frozen=True)
class Case:
    """A file of a whole run, and what it is replaced by (None: removed)."""

    row: str
    run: "Whole"
    name: str
    way: str
    data: bytes | None


@dataclass
class Outcome:
    """What became of a case."""

    word: str
    """`on`, `line` (goes on and says so), or `stops N`, N being the exit code."""
    lines: list[str]
    faults: list[str] = field(default_factory=list[str])
    """Promises that were broken."""


class CapturedLines(logging.Handler):
    """Gives the warnings of each case to that case, although all share one process."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning or an error."""
        lines = LINES.get()
        if lines is not None and record.levelno >= logging.WARNING:
            line = record.getMessage()
            if not NOISE.search(line):
                lines.append(line)


@contextmanager
def captured() -> Generator[None]:
    """Capture warnings while the block runs."""
    handler = CapturedLines()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


class KeyedSwarm(Swarm):
    """A swarm whose nodes have their keys in files, and whose model is in the run's directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, directory / "r" / "model", max_steps=STEPS, checkpoint=KEEP)
        self.trainer = Running(load_key(self.trainer.data_dir), self.trainer.data_dir)
        worker = directory / "w1"
        self.workers["w1"] = Running(load_key(worker), worker)


@dataclass(frozen=True)
class Whole:
    """A run whose nodes were stopped or killed, and what its trainer has promised."""

    directory: Path
    promised: "Promised"


async def whole_run(directory: Path, model: Path, seed: int, *, killed: bool) -> Whole:
    """Make a run of two nodes with keys of that seed, which are stopped, or killed between two checkpoints."""
    for number, node in enumerate(("r/trainer", "w1")):
        key = SecretKey.from_seed(bytes([seed, number]).rjust(32, b"k"))
        key.save(directory / node / "key.pem")
    shutil.copytree(model, directory / "r" / "model")
    (directory / "r" / ".primerl-run").write_text("begun 2026-11-30\n")
    async with KeyedSwarm(directory) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(3)
        if killed:
            await swarm.crash_trainer()
            image = directory / "image"
            shutil.copytree(directory / "w1", image, ignore=shutil.ignore_patterns("*.sock"))
            await swarm.crash_worker("w1")
            shutil.rmtree(directory / "w1")
            image.rename(directory / "w1")
        else:
            await swarm.stop_worker("w1")
            await swarm.stop_trainer()
    copy = directory.with_name(f"{directory.name}.copy")
    shutil.copytree(directory, copy)  # a reader of a database changes its log
    return Whole(directory, promises(copy))


def cases(run: Whole, another: Whole, flips: int) -> Iterator[Case]:
    """Every damage of files of `run` that have a row of the table: the newest of each kind, and all chunks."""
    files, others = newest(run.directory), newest(another.directory)
    for name, path in files.items():
        if row := row_of(run.directory.name, name):
            twin = next((others[n] for n in others if kind_of(n) == kind_of(name)), None)
            other = twin.read_bytes() if twin else b"another"
            for way, data in damages(
                path.read_bytes(), other, name, 1 if "chunks" in name else flips
            ):
                yield Case(row, run, name, way, data)


def newest(directory: Path) -> dict[str, Path]:
    """The files below a directory, by their names there: all chunks, and the last one of each other kind."""
    files: dict[str, tuple[str, Path]] = {}
    for path in sorted(directory.rglob("*"), key=lambda path: (len(path.name), path)):
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            files[name if "chunks" in name else kind_of(name)] = (name, path)
    return dict(files.values())


def row_of(whole: str, name: str) -> str:
    """The row of the table that a file belongs to; "" for a file without a row there."""
    for row, pattern in ROWS.items():
        if re.fullmatch(pattern, f"killed/{name}" if "killed/" in pattern else name):
            return row if ("killed/" in pattern) == (whole == "killed") else ""
    return "" if whole == "killed" or ELSEWHERE.fullmatch(name) else f"no row: {name}"


def kind_of(path: str) -> str:
    """The name of a file without the numbers and digests by which files of a kind differ."""
    return re.sub(r"[0-9a-f]{8,}|(?<=/)[0-9a-f]{2}(?=/)|\d+", "*", path)


async def outcome(case: Case, place: Path) -> Outcome:
    """Damage the file of a copy of the run in `place`, start both nodes, and let them train a step together."""
    shutil.copytree(case.run.directory, place)
    damage(place / case.name, case.way, case.data)
    lines: list[str] = []
    LINES.set(lines)
    try:
        swarm = KeyedSwarm(place)
        async with swarm:
            await goes_on(swarm)
            batches = [batch for backend in swarm.backends for batch in backend.batches]
    except (NodeError, KeyFileError) as error:
        code = error.exit_code if isinstance(error, NodeError) else StorageError.exit_code
        line = str(error)
        faults = [] if line and "\n" not in line else [f"no line: {line}"]
        return Outcome(f"stops {code}", [*lines, line], faults)
    faults = [*broken(case.run.promised, promises(place)), *untrue(swarm, batches)]
    return Outcome("line" if lines else "on", lines, faults)


async def goes_on(swarm: Swarm) -> None:
    """Start both nodes until they have trained a step together. Raises the error that ends one of them."""
    await swarm.start_trainer(resume=True)
    begun = (await swarm.trainer.status())["version"]
    worker = swarm.add_worker("w1")
    assert worker.task is not None
    trained = asyncio.create_task(swarm.wait_step(max(begun, 0) + 2))
    try:
        async with asyncio.timeout(60.0):
            await asyncio.wait({worker.task, trained}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        trained.cancel()
    ended = worker if worker.task.done() else swarm.trainer
    assert ended.task is not None
    if ended.task.done():
        try:
            ended.task.result()
        except BaseExceptionGroup as group:
            raise first_cause(group) from group


@dataclass(frozen=True)
class Promised:
    """What a trainer has promised: signed versions, and submissions with a receipt."""

    heads: dict[tuple[int, int], bytes]
    receipts: set[bytes]


def promises(directory: Path) -> Promised:
    """Read them from the ledger of a run that is not needed any more."""
    with closing(sqlite3.connect(directory / "r" / "trainer" / "ledger.db")) as db:
        heads = db.execute("SELECT term, version, sealed FROM heads")
        receipts = db.execute("SELECT digest FROM inbox")
        return Promised({(t, v): s for t, v, s in heads}, {row for (row,) in receipts})


def broken(before: Promised, after: Promised) -> Iterator[str]:
    """Describe the promises that were not kept."""
    if lost := before.receipts - after.receipts:
        yield f"{len(lost)} submissions with a receipt are lost"
    newest = max(epoch for epoch, _ in after.heads)
    for order, sealed in before.heads.items():
        if after.heads.get(order, sealed if order[0] < newest else b"") != sealed:
            yield f"version {order} is lost or was signed again"


def untrue(swarm: Swarm, batches: Iterable[TrainBatch]) -> Iterator[str]:
    """Describe what an engine loaded, or a learner trained on, that no signed version accounts for."""
    states: dict[int, set[bytes]] = {}
    for (_, version), head in swarm.heads().items():
        states.setdefault(version, set()).add(head.state)
    for event in swarm.fakes.loads("w1"):
        if event.state not in states.get(event.version, ()):
            yield f"the worker loaded weights that are not version {event.version}"
    for batch in batches:
        for sample in batch.samples:
            if not drawn(sample, states):
                yield f"step {batch.step} was trained on a rollout that no version drew"


def drawn(sample: Sample, states: Mapping[int, set[bytes]]) -> bool:
    """Say whether a sample's tokens have the logprobs that a signed version gives them."""
    for at, (token, sampled, logprob) in enumerate(
        zip(sample.token_ids, sample.mask, sample.logprobs, strict=True)
    ):
        version, before = version_of(logprob), sample.token_ids[:at]
        if sampled and not any(
            math.isclose(logprob, witness_logprob(state, version, 1.0, before, token), rel_tol=1e-6)
            for state in states.get(version, ())
        ):
            return False
    return True
