"""Runs of a trainer and two workers that end hard before their k-th change of the disk, and what is left.

A change is a file that is opened to be written, renamed or removed, a directory that is made or removed, or a
statement of SQLite that writes: each is noticed by Python's own audit hook, whoever makes it. The process ends
by os._exit() before the change is made, as by `kill -9`.
"""

import asyncio
import json
import os
import random
import re
import sqlite3
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from support.counting_environment import NUMBERS, STOP, CountingEnvironment
from support.swarm import CONFIG, RUN, Running, Swarm
from support.witness import Event, Fakes, WitnessAuditor, WitnessBackend

from primerl.crypto.hashing import derive, digest
from primerl.node.app import trainer as trainer_app
from primerl.node.app.factories import Factories, MakeLedger
from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.environments.environment import Score, Task
from primerl.node.inference.engine import GenerateRequest
from primerl.node.storage.ledger import HonestRollout, Ledger
from primerl.node.storage.rollouts import RolloutFiles
from primerl.node.storage.run_files import holds_run
from primerl.node.trainer.kept_rollouts import RolloutKeeper, TrainedStep
from primerl.node.trainer.state import state_of
from primerl.node.training.backend import Sample, StepMetrics, TrainBatch
from primerl.node.training.buffer import BufferSnapshot, RolloutGroup
from primerl.node.training.checkpoint import Checkpoints
from primerl.node.verification.auditor import AuditItem, Auditor, Measured, Unreadable
from primerl.node.weights.state import State
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.rollouts import Submission, unpack_u32
from primerl.scripts.bench import promises
from primerl.scripts.bench.promises import Witness

STEPS, MORE = 4, 2
"""Steps of the run that is ended, and those by which the run that goes on is longer."""
LIFE_S = 90.0
WORKERS = ("w1", "w2")
CRASHED = 9
IMPORTED = (
    *("PIL.JpegImagePlugin", "matplotlib.backends.backend_agg", "pandas", "pyarrow.parquet"),
    *("pyarrow.pandas_compat", "torch", "transformers.convert_slow_tokenizer", "trio"),
    "transformers.models.qwen3.configuration_qwen3",
)
"""What nodes import when they need it: here before the forks, as it takes ten seconds."""
READING = ("SELECT", "PRAGMA", "BEGIN", "--", "ROLLBACK", "VACUUM")
SLOW_S = 0.05
"""Longest delay of a change that a thread makes, and of an audit: what is begun first does not end first."""
POINT_S = 0.1
"""Time that a resume point takes to get its name: a version that does not wait for it is announced before."""
REPLY = 5
"""Tokens by which two rollouts are told apart."""


@dataclass
class CrashPoint:
    """Ends this process before change number `at` of a file below `directory`; 0: never."""

    directory: str
    at: int
    note: Path
    """Where the change that is not made is written."""
    count: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(self.at)

    def watch(self) -> None:
        """Begin to count."""
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        match event:
            case "open":
                path, _, flags = arguments
                if flags & (os.O_WRONLY | os.O_RDWR):
                    self._change(path, "open")
            case "os.rename":
                self._change(arguments[1], "rename")
            case "os.remove" | "os.mkdir" | "os.rmdir" | "os.truncate":
                self._change(arguments[0], event)
            case _:
                pass

    def trace(self, statement: str) -> None:
        """Count a statement of SQL, unless it only reads."""
        verb, *rest = statement.split()
        if verb.upper() not in READING:
            places = ("INTO", "FROM", "EXISTS", "UPDATE", "TABLE")
            at = max((i for i, word in enumerate((verb, *rest)) if word in places), default=-1)
            self._count(f"SQL {verb} {(verb, *rest, '')[at + 1] if at >= 0 else ''}".rstrip())

    def _change(self, path: Any, kind: str) -> None:
        name = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
        if name.startswith(self.directory):
            self._count(f"{kind} {name.removeprefix(self.directory)}")
        elif name and not name.startswith("/"):  # below an open directory
            self._count(f"{kind} {name}")

    def _count(self, kind: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            slow = POINT_S if kind.startswith("rename") and kind.endswith(".resume") else 0.0
            time.sleep(slow + SLOW_S * self._chance.random() ** 3)  # others overtake it
        self.count += 1
        if self.count == self.at:
            note = os.open(self.note, os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(note, kind.encode())
            os._exit(CRASHED)


class Journal:
    """What was promised to somebody, line by line, in a file that no crash of a node takes away."""

    def __init__(self, path: Path, point: CrashPoint | None = None) -> None:
        self.point = point
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, what: str, *values: Any) -> None:
        """Add a line."""
        os.write(self._file, json.dumps([what, *values]).encode() + b"\n")


class NotedLedger(Ledger):
    """Notes what is committed, once it is."""

    def __init__(self, path: Path, *, fsync: bool, journal: Journal) -> None:
        self._journal = journal
        super().__init__(path, fsync=fsync)

    def connect(self) -> sqlite3.Connection:
        """See Ledger; what it writes is counted."""
        connection = super().connect()
        if self._journal.point is not None:
            connection.set_trace_callback(self._journal.point.trace)
        return connection

    def add_head(self, epoch: int, version: int, sealed: bytes, manifest: bytes) -> None:
        """See Ledger."""
        super().add_head(epoch, version, sealed, manifest)
        self._journal.note("head", epoch, version, sealed.hex())
        if self.path.parent.name == "trainer":
            self._note_commit(version)

    def _note_commit(self, version: int) -> None:
        """Note what is on the disk as a version is signed: by that a resume must go on from it."""
        run_dir = self.path.parents[1]
        saved = [parts for step, parts in promises.saved_parts(run_dir) if step == version]
        if saved and (state := state_of(saved[0])):
            buffer = msgspec.msgpack.decode(saved[0]["buffer"], type=BufferSnapshot)
            self._journal.note(
                "commit", version, state.verified_up_to, state.used, names_of(buffer.groups)
            )
        elif version:
            self._journal.note("fault", f"version {version} was announced before it was durable")

    def receive(
        self, digest: bytes, lease_id: int, node: bytes, sealed: bytes, received: int
    ) -> int:
        """See Ledger."""
        arrival = super().receive(digest, lease_id, node, sealed, received)
        names = [
            name(unpack_u32(branch.tokens))
            for group in unseal(sealed, Purpose.SUBMISSION, Submission, now=0).body.groups
            for rollout in group.rollouts
            for branch in rollout.branches
        ]
        self._journal.note("receipt", arrival, digest.hex(), names)
        return arrival

    def add_verdict(
        self,
        node: bytes,
        sealed: bytes,
        arrival: int | None = None,
        reputations: Any = None,
        honest: Sequence[HonestRollout] = (),
        bounds: Any = None,
        *,
        clean: bool = False,
    ) -> bool:
        """See Ledger."""
        new = super().add_verdict(node, sealed, arrival, reputations, honest, bounds, clean=clean)
        if new and arrival is not None:
            self._journal.note("verdict", arrival)
        return new


class NotedBackend(WitnessBackend):
    """Notes which rollouts it trains on."""

    def __init__(self, fakes: Fakes, journal: Journal) -> None:
        super().__init__(fakes)
        self._journal = journal

    async def step(self, batch: TrainBatch) -> StepMetrics:
        """See TrainBackend."""
        self._journal.note("trained", batch.step, [name(s.token_ids) for s in batch.samples])
        return await super().step(batch)


class NotedKeeper(RolloutKeeper):
    """Notes what each step leaves untrained, and when its file, which says so, is written."""

    def __init__(self, *arguments: Any, journal: Journal, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._journal = journal

    def lost(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """See RolloutKeeper."""
        super().lost(groups, reason)
        self._journal.note("swept", names_of(groups))

    def trained(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        samples: Sequence[Sample],
        baselines: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> TrainedStep:
        """See RolloutKeeper."""
        closed = super().trained(step, groups, samples, baselines)
        untrained = [*groups, *(group for group, _ in closed.lost.groups)]
        rejected = [
            name(unpack_u32(branch.tokens))
            for rollout in closed.lost.rollouts
            if rollout.record is not None
            for branch in rollout.record.branches
        ]
        self._journal.note("sorted", step, [*names_of(untrained), *rejected])
        return closed

    def _write(self, step: TrainedStep, head: bytes) -> None:
        super()._write(step, head)
        self._journal.note("kept", step.step)


class UnevenAuditor(WitnessAuditor):
    """Takes more or less time, so that verdicts come in another order than submissions."""

    async def audit(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """See Auditor."""
        measured = await super().audit(items, states)
        await asyncio.sleep(random.random() * SLOW_S)
        return measured


class NotedEvents(list[Event]):
    """Notes which versions an engine loads."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def append(self, event: Event) -> None:
        """Add an event."""
        if event.kind == "load":
            self._journal.note("loaded", event.version, event.state.hex())


class NumberedEnvironment(CountingEnvironment):
    """Its tasks differ by their prompts, and hardly any group has equal rewards: all are trained on."""

    def _worth(self, task: Task, reply: Sequence[int]) -> Score:
        return Score(reward=reply[0] / (3 + NUMBERS))

    async def prompt(self, task: Task) -> list[int]:
        """The task's index in two tokens, then the question."""
        first, number = await super().prompt(task)
        high, low = divmod(task.index, NUMBERS)
        return [first, 3 + high, 3 + low, number]


def numbered(request: GenerateRequest) -> list[int]:
    """Reply with tokens by which no two seeds and prompts are alike."""
    drawn = derive("reply", repr((request.prompt, request.seed)).encode())
    return [*(3 + byte % NUMBERS for byte in drawn[:REPLY]), STOP]


def name(tokens: Sequence[int]) -> str:
    """The name of a rollout: its tokens."""
    return ".".join(map(str, tokens))


class NotedSwarm(Swarm):
    """A trainer and two workers whose promises are noted in `journal`."""

    def __init__(self, directory: Path, model: Path, journal: Journal, **settings: Any) -> None:
        fakes = Fakes(reply=numbered, events=NotedEvents(journal))
        super().__init__(
            directory,
            model,
            fakes=fakes,
            trainer_ledger=partial(NotedLedger, journal=journal),
            sampling={"max_tokens": REPLY + 1},
            checkpoint={"interval": 2},
            **settings,
        )
        own = NumberedEnvironment(max_tokens=REPLY + 1)
        self.environments = {
            node: {CONFIG["environment"]["id"]: own} for node in ("trainer", *WORKERS)
        }
        self._journal = journal

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        def backend(_: RunConfig) -> NotedBackend:
            self.backends.append(NotedBackend(self.fakes, self._journal))
            return self.backends[-1]  # type: ignore[return-value]

        def auditor(_: EngineConfig, timeout_s: float) -> Auditor:
            return UnevenAuditor(self.fakes)

        own = super()._factories(running, ledger)
        return replace(own, backend=backend, auditor=auditor)


async def live(directory: Path, model: Path, journal: Journal, *, resume: bool) -> None:
    """Run trainer and workers to the last step: from the beginning, or on from what is on the disk."""
    steps = STEPS + MORE if resume else STEPS
    trainer_app.RolloutKeeper = partial(NotedKeeper, journal=journal)  # type: ignore[assignment,misc]
    async with NotedSwarm(directory, model, journal, max_steps=steps) as swarm:
        goes_on = resume and holds_run(swarm.run_dir)
        await swarm.start_trainer(resume=goes_on)
        workers = [
            swarm.add_worker(name, ledger=partial(NotedLedger, journal=journal)) for name in WORKERS
        ]
        await swarm.finished(LIFE_S)
        for worker in workers:
            await worker.ended(LIFE_S)


def prepare() -> None:
    """Import all that nodes import, before any fork."""
    for module in IMPORTED:
        import_module(module)


def fork(work: Callable[[], None], log: Path) -> int:
    """Begin `work` in a fork of this process, with its output in `log`; return its process id."""
    child = os.fork()
    if child:
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(child: int) -> int:
    """Wait for the end of a fork; return its exit code."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@dataclass
class CrashedRun:
    """What a run came to that ended before a change and went on."""

    at: int
    change: str
    """The change that was not made; "" where there are not so many."""
    faults: list[str]
    again: int = 0
    """Steps that were trained again."""
    unkept: int = 0
    """Steps whose rollouts were not kept."""
    changes: int = 0
    """How many there were, of a run that was not ended."""

    @property
    def kind(self) -> str:
        """Which statement of SQL, or which folder: two of its names, without numbers and digests."""
        verb, _, path = self.change.partition(" ")
        place = f"ledger, {path.split()[0]}" if verb == "SQL" else "/".join(path.split("/")[:3])
        return re.sub(r"[0-9a-f]{8,}|\d+", "*", place) or "none"


def crash(directory: Path, model: Path, at: int) -> CrashedRun:
    """End a run in `directory` before its change number `at`, go on, and check what was promised."""
    directory.mkdir()
    nodes, journal, log = directory / "n", directory / "journal", directory / "log"
    nodes.mkdir()
    last = directory / "change"

    def first() -> None:
        point = CrashPoint(f"{nodes}/", at, last)
        point.watch()
        asyncio.run(live(nodes, model, Journal(journal, point), resume=False))
        last.write_text(f"{point.count}")

    def second() -> None:
        asyncio.run(live(nodes, model, Journal(journal), resume=True))

    code = ended(fork(first, log))
    if code not in (0, CRASHED):
        return CrashedRun(at, "", [f"the run itself failed: {tail(log)}"])
    noted = last.read_text()
    change, changes = (noted, 0) if code == CRASHED else ("", int(noted))
    promised = read_journal(journal)
    left = left_behind(nodes, promised)
    buffered = saved_buffer(nodes / RUN)
    if code := ended(fork(second, log)):
        return CrashedRun(at, change, [f"it did not go on (exit code {code}): {tail(log)}"])
    faults, again = check(nodes, promised, read_journal(journal), buffered)
    faults = [*left, *faults]
    unkept = STEPS + MORE - len(RolloutFiles(nodes / RUN / "rollouts").steps())
    return CrashedRun(at, change, faults, again, unkept, changes)


def tail(log: Path) -> str:
    """The end of a log."""
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:])


Promises = dict[str, list[list[Any]]]


def left_behind(nodes: Path, promised: Promises) -> list[str]:
    """What is wrong with what a crash left: every moment has to keep the promises, not only the end."""
    run_dir = nodes / RUN
    if not promised["head"]:
        return []
    return promises.broken(run_dir, [nodes / name for name in WORKERS], witness(promised))


def read_journal(journal: Path) -> Promises:
    """What a journal says, by kind."""
    lines: Promises = defaultdict(list)
    text = journal.read_text() if journal.exists() else ""
    for what, *values in map(json.loads, text.splitlines()):
        lines[what].append(values)
    return lines


def check(
    nodes: Path, promised: Promises, after: Promises, buffered: AbstractSet[str]
) -> tuple[list[str], int]:
    """What is wrong with a run that went on to its end, and how many steps it trained again.

    `promised` was noted before the crash, `after` by the end. It went on with the rollouts `buffered`.
    """
    run_dir = nodes / RUN
    faults = promises.broken(run_dir, [nodes / name for name in WORKERS], witness(after))
    judged = Counter(arrival for arrival, _ in promises.read_ledger(run_dir / "trainer").verdicts)
    faults += [
        f"submission {arrival} has {judged[arrival]} verdicts"
        for arrival, _, _ in promised["receipt"]
        if judged[arrival] != 1
    ]
    published = {version for _, version, _ in promised["head"]}
    steps: dict[int, list[str]] = {}
    again = 0
    for number, (step, names) in enumerate(after["trained"]):
        if step in steps:
            again += 1
            if step in published and number >= len(promised["trained"]):
                faults.append(f"step {step} was trained again after its version was published")
        steps[step] = names
    used = Counter(name for names in steps.values() for name in names)
    faults += [
        f"rollout {name} was used {count} times" for name, count in used.items() if count > 1
    ]
    if sorted(steps) != list(range(1, STEPS + MORE + 1)):
        faults.append(f"steps {sorted(steps)} were trained")
    if (logged := promises.steps_logged(run_dir)) != sorted(steps):
        faults.append(f"metrics.jsonl has steps {logged}")
    faults += unnamed(after, steps)
    kept = set(RolloutFiles(run_dir / "rollouts").steps())
    faults += [
        f"the rollouts of step {step} were kept and are gone"
        for (step,) in after["kept"]
        if step not in kept
    ]
    faults += lost_rollouts(run_dir, set(used), promised, after, buffered)
    return faults, again


def witness(noted: Promises) -> Witness:
    """What a journal notes of what the nodes promised."""
    return Witness(
        receipts={bytes.fromhex(name) for _, name, _ in noted["receipt"]},
        heads={(t, v): digest(bytes.fromhex(sealed)) for t, v, sealed in noted["head"]},
        loaded=[(version, bytes.fromhex(state)) for version, state in noted["loaded"]],
        faults=[text for (text,) in noted["fault"]],
    )


def unnamed(noted: Promises, steps: Mapping[int, Sequence[str]]) -> list[str]:
    """Submissions that a version used, and that were not named where it is durable."""
    arrivals = {name: arrival for arrival, _, names in noted["receipt"] for name in names}
    faults: list[str] = []
    for version, verified_up_to, used, buffered in noted["commit"]:
        trained = {name for step in steps if step <= version for name in steps[step]}
        # a process that ended between the ledger's commit and our note of it promised nothing
        contained = {arrivals[name] for name in trained | set(buffered) if name in arrivals}
        faults += promises.unnamed(version, verified_up_to, used, contained)
    return faults


def names_of(groups: Sequence[RolloutGroup]) -> list[str]:
    """The names of the rollouts of groups."""
    return [
        name(branch.token_ids)
        for group in groups
        for rollout in group.rollouts
        for branch in rollout.branches
    ]


def saved_buffer(run_dir: Path) -> set[str]:
    """The rollouts that wait in the buffer with which a run goes on."""
    saved = [(step, parts["buffer"]) for step, parts in promises.saved_parts(run_dir)]
    if not saved:
        return set()
    _, data = max(saved)
    return set(names_of(msgspec.msgpack.decode(data, type=BufferSnapshot).groups))


def lost_rollouts(
    run_dir: Path,
    used: AbstractSet[str],
    promised: Promises,
    after: Promises,
    buffered: AbstractSet[str],
) -> list[str]:
    """Rollouts with a receipt that were not trained on, do not wait, and were not sorted out for a reason.

    The reason is in the file of a step's rollouts. A crash may cost that file, which is written once its step
    is durable: then it counts what the step left untrained as it was closed. Groups that were swept out of the
    buffer since then are to be in the next step's file: before a crash it counts that they were, unless the run
    went on with them.
    """
    checkpoints = Checkpoints(run_dir / "checkpoints", keep_last=1)
    buffer = msgspec.msgpack.decode(checkpoints.glance(STEPS + MORE, "buffer"), type=BufferSnapshot)
    waiting = set(names_of(buffer.groups))
    kept = RolloutFiles(run_dir / "rollouts")
    sorted_out = {
        name([*row.prompt_ids, *row.completion_ids])
        for step in kept.steps()
        for row in kept.read(step)
        if row.reason
    }
    unkept = {
        rollout for step, names in after["sorted"] if step not in kept.steps() for rollout in names
    }
    swept = {rollout for (names,) in promised["swept"] for rollout in names}
    unkept |= swept - buffered
    received = {name for _, _, names in promised["receipt"] for name in names}
    lost = received - used - waiting - sorted_out - unkept
    return [f"rollout {name} had a receipt and is lost" for name in sorted(lost)]
