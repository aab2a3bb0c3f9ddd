"""Measure the search for copies among long texts: time, memory, and how long it stops a trainer's event loop.

    python scripts/bench/copies.py [--quick] [--tokens N] [--rollouts N] [--json FILE]

Beside it stands the search as it was first written (tests/support/copies_reference.py), which looks up every
window by itself. Time is CPU time of the thread per rollout of --tokens sampled tokens: new texts of 2 and of
0.4 nats a token, a text received before, one word again and again, and new texts at a store that is full.

The event loop's stops are the longest times between two turns of a task that only waits, while a bundle of
--rollouts rollouts is verified: by a Verifier, and by the same checks in the loop, as they once were. Rewards
cost nothing and nothing is audited. Wall time counts other load on the machine, CPU time does not: goals are on
CPU time.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass
from operator import sub
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.copies_reference import ReferenceDetector
from support.counting_environment import CountingEnvironment
from support.protocol_cases import LEADERS, LEASE, MANIFEST, WORKER, played_otherwise

from primerl.crypto.hashing import digest
from primerl.node.environments.environment import Branch, Score, Split, Task
from primerl.node.inference.fingerprint import pack
from primerl.node.process.threads import share_python
from primerl.node.verification.auditor import AuditAnswer, AuditCall
from primerl.node.verification.checks import CheckedRollout, Rejected, check_submission
from primerl.node.verification.duplicates import MAX_WINDOWS, CopyDetector
from primerl.node.verification.verdict import ReceivedSubmission, Verified
from primerl.node.verification.verifier import Verifier
from primerl.protocol.leases import Lease, TaskRef
from primerl.protocol.manifests import RunManifest
from primerl.protocol.rollouts import BranchRecord, GroupRecord, RolloutRecord, Submission
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

MS = 5.0
"""Goal: CPU time for a rollout of 16,384 tokens."""
STOP_MS = 50.0
"""Goal: longest stop of the event loop while a bundle of 64 such rollouts is verified."""
MIB = 64.0
"""Goal: memory of a full store."""
FASTER = 20.0
"""Goal: times faster than the first search, with new texts."""
SIZE = 16
"""Rollouts of a group."""
WORDS = 500
NODE = bytes(32)

Tokens = NDArray[np.uint32]
Detector = CopyDetector | ReferenceDetector


@dataclass(frozen=True)
class Row:
    """One kind of text."""

    text: str
    tokens: int
    ms: float
    """CPU time per rollout, median."""
    reference_ms: float
    """The same of the first search; 0 if it was not measured."""


@dataclass(frozen=True)
class Stop:
    """The longest time between two turns of the event loop."""

    work: str
    cpu_ms: float
    """CPU time of the process meanwhile: what other programs on the machine do adds nothing."""
    ms: float


class Unquestioned(CountingEnvironment):
    """Has any number of tasks, and gives every rollout the reward 1 at once."""

    async def task(self, index: int, split: Split = "train") -> Task:
        """Task number `index`."""
        return Task(index, digest(b"task %d" % index))

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Return 1."""
        return Score(1.0)


class NoAudits:
    """An AuditService that nobody asks."""

    async def audit_rollouts(self, call: AuditCall) -> AuditAnswer:
        """Raise AssertionError."""
        raise AssertionError("nothing is to be audited")


def rollout(tokens: Tokens, nats: float, index: int) -> CheckedRollout:
    """Make a rollout of one branch."""
    count = len(tokens)
    sampled, logprobs = [False] + [True] * count, [0.0] + [-nats] * count
    branch = Branch([7, *tokens.tolist()], sampled, logprobs, 3, 3, "stop")
    return CheckedRollout(0, index, [branch], 0.0)


def words(count: int, seed: int) -> Tokens:
    """Draw a text of `count` tokens."""
    return np.random.default_rng(seed).integers(3, WORDS, count).astype(np.uint32)


def per_rollout(detector: Detector, arrival: int, rollouts: Sequence[CheckedRollout]) -> float:
    """Return the median CPU time of a check, ms."""
    taken: list[float] = []
    for one in rollouts:
        start = time.thread_time()
        try:
            detector.check(arrival, NODE, one)
        except Rejected:
            pass
        taken.append(1000 * (time.thread_time() - start))
    return statistics.median(taken)


def times(tokens: int, count: int, others: int) -> list[Row]:
    """Measure `count` rollouts of every kind, and `others` by the first search."""
    texts = [words(tokens, seed) for seed in range(count)]
    word = np.full(tokens, 5, np.uint32)
    rows: list[Row] = []

    def measure(name: str, arrival: int, kind: Sequence[CheckedRollout], *stores: Detector) -> None:
        mine, *theirs = stores
        reference = per_rollout(theirs[0], arrival, kind[:others]) if theirs else 0.0
        rows.append(Row(name, tokens, per_rollout(mine, arrival, kind), reference))
        print(f"  {name:34} {rows[-1].ms:9.2f} {reference:12.2f}", flush=True)

    print(f"\n  {tokens:,} tokens, ms per rollout {'':8} now    reference")
    surprising = [rollout(text, 2.0, index) for index, text in enumerate(texts)]
    both: tuple[Detector, Detector] = CopyDetector(), ReferenceDetector()
    measure("new texts, 2 nats a token", 1, surprising, *both)
    measure("received before", 2, surprising, *both)
    usual = [rollout(text, 0.4, index) for index, text in enumerate(texts)]
    measure("new texts, 0.4 nats a token", 1, usual, CopyDetector(), ReferenceDetector())
    repeated = [rollout(word, 2.0, index) for index in range(count)]
    measure("one word, again and again", 1, repeated, CopyDetector(), ReferenceDetector())
    full = CopyDetector()
    seed = count
    while len(full) < MAX_WINDOWS:
        full.check(1, NODE, rollout(words(1 << 17, seed), 2.0, seed))
        seed += 1
    measure("new texts, at a full store", 2, surprising, full)
    return rows


def bundle(tokens: int, rollouts: int, branches: int) -> tuple[Submission, Lease, RunManifest]:
    """Make a submission, its lease and its run."""
    run = played_otherwise(MANIFEST, max_tokens=tokens)
    limits = msgspec.structs.replace(run.limits, max_model_len=2 * tokens)
    run = msgspec.structs.replace(run, limits=limits)
    random = np.random.default_rng(0)
    proof = pack(random.normal(size=(tokens, 7)).astype(np.float32))

    def branch() -> BranchRecord:
        return BranchRecord(
            random.integers(3, WORDS, tokens + 2).astype(np.uint32).tobytes(),
            bytes(2) + b"\1" * tokens,
            (-4 * random.random(tokens)).astype(np.float32).tobytes(),
            3,
            3,
            "length",
            proof=proof,
        )

    tasks = tuple(TaskRef(at, digest(b"task %d" % at)) for at in range(max(1, rollouts // SIZE)))
    size = min(rollouts, SIZE)
    lease = msgspec.structs.replace(LEASE, group_size=size, tasks=tasks)
    groups = tuple(
        GroupRecord(
            task.index,
            task.digest,
            tuple(
                RolloutRecord(tuple(branch() for _ in range(branches)), 1.0, "")
                for _ in range(size)
            ),
        )
        for task in tasks
    )
    return Submission(lease=b"", groups=groups, engine="hf"), lease, run


async def longest_stop(work: Awaitable[object]) -> tuple[float, float]:
    """Return the longest time, CPU and wall, without a turn for another task while `work` is awaited, ms."""
    stopped = [0.0, 0.0]

    def clocks() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    async def turn() -> None:
        last = clocks()
        while True:
            await asyncio.sleep(0.001)
            now = clocks()
            stopped[:] = (max(*each) for each in zip(stopped, map(sub, now, last), strict=True))
            last = now

    turning = asyncio.create_task(turn())
    await asyncio.sleep(0.01)
    result = await work
    await asyncio.sleep(0.01)
    turning.cancel()
    del result  # a trainer keeps what it accepts: to free it is not part of verifying it
    return 1000 * stopped[0], 1000 * stopped[1]


async def verify_in_thread(submission: Submission, lease: Lease, run: RunManifest) -> Verified:
    """Verify as a trainer does."""
    environment = Unquestioned()
    verifier = Verifier(LEADERS, run, [environment], NoAudits(), {3: {}}, CopyDetector())
    arrival = ReceivedSubmission(1, digest(b"bundle"), WORKER.node_id, b"", bytes(32))
    verified = await verifier.verify(submission, lease, arrival, version=4, rate=0.0)
    if verified.rejections:
        raise SystemExit(f"rejected: {verified.rejections[0]}")
    return verified


async def verify_in_loop(submission: Submission, lease: Lease, run: RunManifest) -> None:
    """Unpack and look for copies without a pause."""
    checked, copies = check_submission(submission, lease, run, 4), ReferenceDetector()
    for one in checked.rollouts:
        copies.check(1, WORKER.node_id, one)


def stops(options: argparse.Namespace) -> list[Stop]:
    """Measure the stops of the loop."""
    found: list[Stop] = []

    async def with_turns(work: Awaitable[object]) -> tuple[float, float]:
        return await longest_stop(work)

    def measure(name: str, work: Awaitable[object]) -> None:
        found.append(Stop(name, *asyncio.run(with_turns(work))))
        print(f"  {name:34} {found[-1].cpu_ms:9.1f} {found[-1].ms:12.1f}", flush=True)

    print(f"\n  longest stop, {options.rollouts} rollouts, ms {'':10} CPU         wall")
    measure("nothing to verify", asyncio.sleep(1.0))
    single = bundle(options.tokens, options.rollouts, 1)
    measure("verified", verify_in_thread(*single))
    measure("in the loop, as before", verify_in_loop(*single))
    if not options.quick:
        several = bundle(options.tokens, options.rollouts, 4)
        measure("verified, four branches a rollout", verify_in_thread(*several))
    return found


def judge(rows: Sequence[Row], stopped: Sequence[Stop], size: float) -> list[Goal]:
    """Return every goal with the value reached."""
    ratio = rows[0].reference_ms / rows[0].ms
    return [
        *(at_most(f"{row.text}: CPU time", row.ms, MS, "ms per rollout") for row in rows),
        at_least("new texts: faster than the first search", ratio, FASTER, "x"),
        at_most("memory of a full store", size, MIB, "MiB"),
        at_most("longest stop of the loop", stopped[1].cpu_ms, STOP_MS, "ms of CPU"),
    ]


def main() -> int:
    """Measure, print, write the report, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "texts of 2,048 tokens, few of them: seconds")
    parser.add_argument("--tokens", type=int, help="sampled tokens of a rollout")
    parser.add_argument("--rollouts", type=int, help="rollouts of a bundle")
    options = parser.parse_args()
    options.tokens = options.tokens or (2048 if options.quick else 16384)
    options.rollouts = options.rollouts or (16 if options.quick else 64)
    share_python()
    size = CopyDetector().nbytes / 2**20
    rows = times(options.tokens, *(8, 2) if options.quick else (32, 6))
    stopped = stops(options)
    goals = judge(rows, stopped, size)
    table = [asdict(row) for row in rows]
    return conclude(table, goals, options.json, stops=list(map(asdict, stopped)), store_mib=size)


if __name__ == "__main__":
    raise SystemExit(main())
