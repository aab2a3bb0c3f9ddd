"""The trainer's loop: which workers fill a batch, and which work overlaps with training."""

import asyncio
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.bare_node import bare_services
from support.kept_cases import keeper
from support.waiting import ended, until

from primerl.crypto.hashing import digest
from primerl.node.config.run import RunConfig
from primerl.node.config.sft import SftConfig
from primerl.node.config.training import TrainingConfig
from primerl.node.errors import RunFailed, StorageError, UsageError
from primerl.node.ops.metrics import MetricsLog
from primerl.node.sft.data import MixedReader
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer.demonstrations import Demonstrations
from primerl.node.trainer.lease_book import LeaseBook, LeasePolicy, MixtureShare
from primerl.node.trainer.loop import TrainerRole
from primerl.node.trainer.scheduler import LeaseDemand
from primerl.node.trainer.state import Progress
from primerl.node.training.backend import Sample, StepMetrics, TrainBatch
from primerl.node.training.buffer import BranchTokens, RolloutBuffer, RolloutGroup, ScoredRollout
from primerl.node.training.curriculum import Curriculum
from primerl.node.training.skipped_steps import MAX_SKIPPED

A, B, C = (bytes([n]) * 32 for n in (10, 11, 12))
WANTED = 8
"""Groups per batch."""
NEVER = {"interval": 100_000}


def played(node: bytes) -> RolloutGroup:
    """A group whose tokens say whose it is."""
    branch = BranchTokens([1, node[0]], [False, True], [0.0, -1.0])
    rollouts = [ScoredRollout([branch], reward) for reward in (0.0, 1.0)]
    return RolloutGroup(b"t", "e", rollouts, 0, node, b"lease")


class Recorder:
    """A backend that remembers whose groups it was given."""

    def __init__(self) -> None:
        self.batches: list[Counter[int]] = []
        self.trained = 0
        self.given: list[list[int]] = []
        """Tokens of demonstrations, by batch."""
        self.advantages: list[list[float]] = []
        self.compiled = asyncio.Event()
        self.compiled.set()
        self.figures: dict[str, float] = {}
        """Metrics of every step."""

    async def compile_step(self) -> None:
        await self.compiled.wait()

    async def step(self, batch: TrainBatch) -> StepMetrics:
        self.trained = batch.step
        rollouts = [sample for sample in batch.samples if not sample.given]
        self.advantages.append([sample.advantage for sample in rollouts])
        self.given.append([sample.token_ids[1] for sample in batch.samples if sample.given])
        samples = Counter(sample.token_ids[1] for sample in rollouts)
        self.batches.append(Counter({node: count // 2 for node, count in samples.items()}))
        return StepMetrics(self.figures)

    def snapshot(self) -> asyncio.Future[int]:
        """Return the step whose policy it is."""
        return ended(self.trained)

    async def save(self, directory: Path) -> None:
        await asyncio.to_thread(directory.mkdir, exist_ok=True)


class FakeQueue:
    """Judges nothing: tests put groups into the buffer themselves."""

    def __init__(self, buffer: RolloutBuffer, progress: Progress, directory: Path) -> None:
        self.buffer = buffer
        self.progress = progress
        self.kept = keeper(directory)
        self.grown = asyncio.Condition()
        self.curricula = {"e": Curriculum(TrainingConfig(), environment="e", seed=0)}
        self.verifier = SimpleNamespace(judge_fault="")

    def waiting(self) -> int:
        return 0

    async def run(self) -> None:
        await asyncio.Event().wait()


def _proven(node: bytes) -> bool:
    return True


def _present() -> int:
    return 2


class SlowPublisher:
    """Publishes a version when a test lets it."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.policies: list[object] = []
        self.may_end = asyncio.Semaphore(1000)
        self.last_delta_bytes = self.delta_bytes = self.full_bytes = 0
        self.phases: dict[str, float] = {}
        self.states: dict[int, Any] = defaultdict(dict)

    async def publish(self, version: int, policy: object, **_: object) -> None:
        self.begun.append(version)
        self.policies.append(policy)
        await self.may_end.acquire()

    async def close(self) -> None: ...


def begin_nothing(version: int, state: object) -> None:
    pass


async def nothing(*_: object, **__: object) -> None:
    pass


class World:
    """A trainer's loop with a real buffer, ledger and book; no network, no model."""

    def __init__(self, directory: Path, share: float, timeout_s: float, bound: int) -> None:
        rollouts = {
            "max_off_policy_steps": bound,
            "groups_per_batch": WANTED,
            "groups_per_lease": 4,
            "max_peer_share": share,
            "lease_timeout_s": timeout_s,
        }
        self.config = RunConfig.model_validate(
            {
                "name": "r",
                "output_dir": directory,
                "max_steps": 10_000,
                "rollouts": rollouts,
                "checkpoint": NEVER,
            }
        )
        policy = LeasePolicy((MixtureShare(2),), WANTED, 4, 2, 2, timeout_s, 1000)
        self.ledger = Ledger(directory / "ledger.sqlite", fsync=False)
        self.book, self.recorder = LeaseBook(policy), Recorder()
        self.metrics = MetricsLog(directory / "metrics.jsonl")
        self.buffer = RolloutBuffer(max_off_policy_steps=10_000, capacity=1000)
        self.progress, services = Progress(), bare_services(ledger=self.ledger)
        services.heads = cast(Any, SimpleNamespace(latest=lambda: None))
        registry: Any = SimpleNamespace(
            present=_present,
            services=services,
            book=self.book,
            proven=_proven,
            reputations={},
            restore={}.update,
        )
        self.demand = LeaseDemand(self.config, registry, self.buffer, self.progress)
        self.queue = FakeQueue(self.buffer, self.progress, directory)
        self.publisher = SlowPublisher()
        parts: list[Any] = [
            SimpleNamespace(
                registry=registry,
                book=self.book,
                demand=self.demand,
                take_back=self.book.expire,
                work_changed=nothing,
                tasks=[],
            ),
            self.queue,
            self.recorder,
            self.publisher,
            self.metrics,
            SimpleNamespace(begin=begin_nothing),
        ]
        self.role_parts: list[Any] = [self.config, *parts]
        self.role = TrainerRole(*self.role_parts)

    def deliver(self, node: bytes, groups: int) -> None:
        """So many groups of `node` were judged good."""
        for _ in range(groups):
            assert self.buffer.add(played(node), 0) is None

    def lease(self, node: bytes) -> int:
        """Grant `node` what it may have; the number of groups."""
        lease = self.book.grant(
            node,
            version=0,
            capacity=self.demand.capacity(node),
            digest_of=lambda _, index: digest(b"%d" % index),
            seed=bytes(32),
            now=time.time(),
        )
        return len(lease.tasks) if lease else 0

    def close(self) -> None:
        """Close what it wrote."""
        self.ledger.close()
        self.metrics.close()

    async def judged(self) -> None:
        """Wake the trainer, and give it time to take what it may."""
        async with self.queue.grown:
            self.queue.grown.notify_all()
        for _ in range(20):
            await asyncio.sleep(0)
            await self.role.resume_points.finish()


@asynccontextmanager
async def world(
    directory: Path, *, share: float = 0.5, timeout_s: float = 600.0, bound: int = 8
) -> AsyncGenerator[World]:
    """The loop runs until the end of the block."""
    made = World(directory, share, timeout_s, bound)
    try:
        async with training(made.role, 0):
            await asyncio.sleep(0)
            yield made
    finally:
        made.close()


@asynccontextmanager
async def training(role: TrainerRole, step: int) -> AsyncGenerator[None]:
    """The loop runs from `step` on until the end of the block."""
    running = asyncio.create_task(role.run(step))
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_flood_does_not_fill_a_batch_while_another_worker_has_leases(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as swarm:
        assert swarm.lease(B) == 4
        swarm.deliver(A, 30)
        await swarm.judged()
        assert swarm.recorder.batches == []
        swarm.deliver(B, 4)
        await swarm.judged()
        assert swarm.recorder.batches == [{A[0]: 4, B[0]: 4}]


async def test_what_is_in_verification_is_waited_for_too(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        swarm.ledger.receive(digest(b"bundle"), 1, B, b"sealed", 7)
        swarm.deliver(A, 30)
        await swarm.judged()
        assert swarm.recorder.batches == []
        swarm.progress.verified_up_to = 1  # it was worth nothing
        await swarm.judged()
        assert swarm.recorder.batches == [{A[0]: 8}] * 3


async def test_what_is_used_and_waits_to_be_judged_is_not_waited_for(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        arrival = swarm.ledger.receive(digest(b"bundle"), 1, B, b"sealed", 7)
        swarm.progress.used = {arrival: B}
        swarm.deliver(A, 30)
        await swarm.judged()
        assert swarm.recorder.batches == [{A[0]: 8}] * 3


async def test_work_that_waits_counts_as_the_groups_of_its_lease(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        assert swarm.lease(B) == 4
        swarm.deliver(A, 8)
        assert swarm.lease(C) == 2, "all that is left of 1.75 batches"
        [number] = swarm.book.held.of(C)
        swarm.ledger.receive(digest(b"bundle"), number, C, b"sealed", 7)
        swarm.book.settle(number, C, time.time())
        assert swarm.demand.waiting_groups() == 8 + 2
        swarm.ledger.receive(digest(b"another"), 1 << 40, C, b"sealed", 7)
        assert swarm.demand.waiting_groups() == 8 + 2 + 4, "of an earlier start: a whole lease"


async def test_a_worker_alone_fills_its_batches(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        for done in range(1, 4):
            swarm.deliver(A, WANTED)
            await swarm.judged()
            assert swarm.recorder.batches == [{A[0]: WANTED}] * done


async def test_a_dead_worker_is_waited_for_a_quarter_of_a_lease_at_most(tmp_path: Path) -> None:
    """Nobody wakes the trainer: its own clock does."""
    async with world(tmp_path, timeout_s=6.0) as swarm:
        assert swarm.lease(B) == 4
        swarm.deliver(A, 12)
        await swarm.judged()
        assert swarm.recorder.batches == []
        await until(lambda: swarm.recorder.batches == [{A[0]: 8}])
        assert swarm.book.leased()[B] == 4


async def test_a_flood_leaves_capacity_for_others(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        assert swarm.lease(B) == 4
        swarm.deliver(A, 7)
        assert swarm.demand.capacity(A) == 1
        swarm.deliver(A, 1)
        assert swarm.demand.capacity(A) == 0
        assert swarm.demand.capacity(C) == 2  # of 1.75 batches


async def test_a_version_is_published_while_the_next_batch_is_trained_and_never_two(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, bound=4) as swarm:
        swarm.publisher.may_end = asyncio.Semaphore(0)
        swarm.deliver(A, 4 * WANTED)
        await swarm.judged()
        assert len(swarm.recorder.batches) == 2
        assert swarm.publisher.begun == [1]
        assert swarm.progress.step == 1  # the second waits: it is announced as a version of its own
        swarm.publisher.may_end.release()
        await until(lambda: swarm.publisher.begun == [1, 2])
        assert len(swarm.recorder.batches) == 3


async def test_a_version_is_the_policy_of_its_step_though_the_next_batch_is_here(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, bound=4) as swarm:
        swarm.deliver(A, 4 * WANTED)
        await until(lambda: swarm.publisher.begun == [1, 2, 3, 4])
        assert swarm.publisher.policies == [1, 2, 3, 4]


async def test_with_a_small_bound_nothing_is_trained_before_the_version_is_out(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, bound=2) as swarm:
        swarm.publisher.may_end = asyncio.Semaphore(0)
        swarm.deliver(A, 4 * WANTED)
        await swarm.judged()
        assert len(swarm.recorder.batches) == 1
        swarm.publisher.may_end.release()
        await until(lambda: swarm.publisher.begun == [1, 2])
        assert len(swarm.recorder.batches) == 2


async def test_a_full_batch_waits_for_the_compiler_and_for_no_workers(tmp_path: Path) -> None:
    swarm = World(tmp_path, 0.5, 600.0, 8)
    swarm.recorder.compiled.clear()
    try:
        async with training(swarm.role, 0):
            swarm.deliver(A, WANTED)
            await swarm.judged()
            assert swarm.role.waits_for() == "the training step is being compiled"
            swarm.recorder.compiled.set()
            await swarm.judged()
            assert len(swarm.recorder.batches) == 1
    finally:
        swarm.close()


async def test_after_the_last_step_it_waits_for_no_workers(tmp_path: Path) -> None:
    async with world(tmp_path, bound=4) as swarm:
        swarm.progress.step = 10_000
        assert swarm.role.waits_for() == "the last version and checkpoint are being written"


def gate(swarm: World) -> Curriculum:
    training = TrainingConfig.model_validate({"curriculum": {"gates": {"signal": {}}}})
    made = Curriculum(training, environment="e", seed=0)
    swarm.queue.curricula["e"] = made
    swarm.role = TrainerRole(*swarm.role_parts)
    return made


async def test_a_run_whose_groups_are_all_replaced_stops_and_says_so(tmp_path: Path) -> None:
    """Ten batches of them in a row, as where they are not replaced."""
    made = World(tmp_path, 0.5, 600.0, 8)
    curriculum = gate(made)
    running = asyncio.create_task(made.role.run(0))
    flat = played(A)
    flat.rollouts[0] = flat.rollouts[1]
    for count in range(1, 10 * WANTED + 1):
        assert not running.done()
        assert not curriculum.observe(flat)
        if count % WANTED == 0:
            await made.judged()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, 5.0)
    assert caught.group_contains(RunFailed, match="80 groups in a row had no signal")
    made.close()


async def test_a_judge_that_is_down_is_waited_for_however_many_batches_are_late(
    tmp_path: Path,
) -> None:
    made = World(tmp_path, 0.5, 600.0, 8)
    made.config.rollouts.batch_timeout_s = 0.01
    made.queue.verifier.judge_fault = "the judge does not answer"
    running = asyncio.create_task(made.role.run(0))
    await asyncio.sleep(0.5)  # a run without batches ends after ten of 0.01 s
    assert not running.done()
    assert made.progress.late == 0
    made.queue.verifier.judge_fault = ""
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, 30.0)
    assert caught.group_contains(RunFailed, match="no batch came in 10 x")
    made.close()


async def test_a_run_ends_when_no_task_is_left_that_may_be_chosen(tmp_path: Path) -> None:
    made = World(tmp_path, 0.5, 600.0, 8)
    pools = {"learnt": {"threshold": 0.5, "weight": 0.0}, "more": {"threshold": 1.0, "weight": 1.0}}
    sampler = {"num_tasks": 1, "pools": pools}
    training = TrainingConfig.model_validate({"curriculum": {"sampler": sampler}})
    made.queue.curricula["e"] = Curriculum(training, environment="e", seed=0)
    made.role = TrainerRole(*made.role_parts)
    assert made.lease(A) == 4
    made.queue.curricula["e"].observe(replace(played(A), task_index=0))
    running = asyncio.create_task(made.role.run(0))
    await made.judged()
    assert not running.done()  # what is on lease may change a reward
    made.book.settle(0, A, time.time())
    await made.judged()
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, 5.0)
    assert caught.group_contains(RunFailed, match="pool of weight 0")
    made.close()


class Shown:
    """Endless demonstrations: number n is the sample [99, n]."""

    size = None

    def sample(self, index: int) -> Sample:
        return Sample([99, index], [False, True], [0.0, 0.0], 1.0)

    def where(self, index: int) -> str:
        return str(index)

    def identity(self) -> str:
        return "shown"


async def test_a_resumed_run_goes_on_in_its_demonstrations_and_takes_no_others(
    tmp_path: Path,
) -> None:
    made = World(tmp_path, 0.5, 600.0, 8)
    mixed = MixedReader(Shown(), SftConfig(), 1 / 5)  # 32 tokens of rollouts, 8 of demonstrations
    made.role_parts.append(Demonstrations(mixed))
    role = TrainerRole(*made.role_parts)
    async with training(role, 0):
        made.deliver(A, 2 * WANTED)
        await until(lambda: len(made.recorder.given) == 2)
        await role.checkpoint(2)
    assert made.recorder.given == [[0, 1, 2, 3], [4, 5, 6, 7]]

    parts = await role.checkpoints.read(2)
    made.role_parts[-1] = Demonstrations(mixed)
    again = TrainerRole(*made.role_parts)
    await again.restore(2, parts)
    async with training(again, 2):
        made.deliver(A, WANTED)
        await until(lambda: len(made.recorder.given) == 3)
    assert made.recorder.given[2] == [8, 9, 10, 11]

    mixed.identity = "others"
    with pytest.raises(UsageError, match="not those that the run began with"):
        await TrainerRole(*made.role_parts).restore(2, parts)
    made.close()


async def test_a_resumed_run_knows_whose_unjudged_work_its_buffer_contains(tmp_path: Path) -> None:
    made = World(tmp_path, 0.5, 600.0, 8)
    bodies = [bytes([number]) for number in range(3)]
    arrivals = [made.ledger.receive(digest(body), at, B, body, 7) for at, body in enumerate(bodies)]
    made.progress.verified_up_to, made.progress.used = arrivals[0], {arrivals[2]: B}
    role = TrainerRole(*made.role_parts)
    await role.checkpoint(1)
    parts = await role.checkpoints.read(1)
    made.progress.verified_up_to, made.progress.used = 0, {}
    lease = SimpleNamespace(environment=0, tasks=())

    def opened(_: object) -> tuple[None, object]:
        return None, lease

    cast(Any, made.queue).open = opened
    await TrainerRole(*made.role_parts).restore(1, parts)
    assert made.progress.verified_up_to == arrivals[0]
    assert made.progress.used == {arrivals[2]: B}
    made.close()


async def test_a_lost_group_of_used_work_waits_to_be_leased_again_in_a_resumed_run(
    tmp_path: Path,
) -> None:
    """Its submission was used, and not judged, when the checkpoint was made: nothing queues it again."""
    made = World(tmp_path, 0.5, 600.0, 8)
    arrival = made.ledger.receive(digest(b"used"), 0, B, b"used", 7)
    made.progress.verified_up_to, made.progress.used = 0, {arrival: B}
    queue = made.book.tasks[0]
    queue.next_task = 2
    made.book.lease_again(0, 1)
    role = TrainerRole(*made.role_parts)
    await role.checkpoint(1)
    parts = await role.checkpoints.read(1)
    queue.next_task = 0
    queue.requeued.clear()
    lease = SimpleNamespace(
        environment=0, tasks=(SimpleNamespace(index=0), SimpleNamespace(index=1))
    )

    def opened(_: object) -> tuple[None, object]:
        return None, lease

    cast(Any, made.queue).open = opened
    await TrainerRole(*made.role_parts).restore(1, parts)
    assert (queue.next_task, list(queue.requeued)) == (2, [1])
    made.close()


async def test_a_resumed_run_goes_on_with_the_baselines_of_its_agents(tmp_path: Path) -> None:
    made = World(tmp_path, 0.5, 600.0, 8)
    rae = TrainingConfig(advantage="rae", rae_decay=0.5)
    made.role_parts[0] = made.config.model_copy(update={"training": rae})
    role = TrainerRole(*made.role_parts)
    async with training(role, 0):
        made.deliver(A, WANTED)
        await until(lambda: len(made.recorder.advantages) == 1)
        await role.checkpoint(1)
    parts = await role.checkpoints.read(1)
    again = TrainerRole(*made.role_parts)
    await again.restore(1, parts)
    async with training(again, 1):
        made.deliver(A, WANTED)
        await until(lambda: len(made.recorder.advantages) == 2)
    found, baseline = [one for batch in made.recorder.advantages for one in batch], 0.0
    for number, advantage in enumerate(found):
        reward = float(number % 2)
        assert advantage == reward - baseline
        baseline = 0.5 * baseline + 0.5 * reward
    assert len(found) == 4 * WANTED
    made.close()


async def test_a_version_that_cannot_be_published_ends_the_run_at_once(tmp_path: Path) -> None:
    made = World(tmp_path, 0.5, 600.0, 8)

    async def fail(*_: object, **__: object) -> None:
        raise StorageError("the disk is full")

    cast(Any, made.publisher).publish = fail
    made.deliver(A, WANTED)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(made.role.run(0), 5.0)
    assert caught.group_contains(StorageError)
    made.close()


# -- weights that are ruined -----------------------------------------------------------------------


async def test_skipped_steps_in_a_row_end_a_run_and_one_between_others_does_not(
    tmp_path: Path,
) -> None:
    made = World(tmp_path, 1.0, 600.0, 8)
    skipped = {"optim/skipped": 1.0, "optim/grad_norm": math.nan}
    try:
        running = asyncio.create_task(made.role.run(0))
        for number in range(1, 7 + MAX_SKIPPED):
            made.recorder.figures = skipped if number in (2, 4) or number > 6 else {}
            made.deliver(A, WANTED)
            await made.judged()
            await until(lambda number=number: made.recorder.trained == number)
            await made.judged()
            assert bool(made.progress.skipping) == bool(made.recorder.figures)
        with pytest.raises(ExceptionGroup) as ended_by:
            await running
    finally:
        made.close()
    (error,) = ended_by.value.exceptions
    assert isinstance(error, RunFailed)
    assert f"{MAX_SKIPPED} steps in a row had no finite gradient" in str(error)
    assert made.progress.skipped == 2 + MAX_SKIPPED
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    counted = [line["step"] for line in lines if line.get("optim/skipped")]
    assert counted == [2, 4, *range(7, 7 + MAX_SKIPPED)]
    assert {line["optim/grad_norm"] for line in lines if line["step"] in counted} == {None}
    assert made.publisher.begun[-1] == 5 + MAX_SKIPPED, "not the version of the step that ended it"


async def test_weights_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    made = World(tmp_path, 1.0, 600.0, 8)
    try:
        running = asyncio.create_task(made.role.run(0))
        for number in (1, 2):
            made.recorder.figures = {"optim/ruined": 1.0} if number == 2 else {}
            made.deliver(A, WANTED)
            await made.judged()
            await until(lambda number=number: made.recorder.trained == number)
        with pytest.raises(ExceptionGroup) as ended_by:
            await running
    finally:
        made.close()
    assert "step 2 made weights that are not finite" in str(ended_by.value.exceptions[0])
    assert made.publisher.begun == [1]


async def test_what_is_verified_while_a_checkpoint_begins_is_not_counted_as_contained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = World(tmp_path, 0.5, 600.0, 8)
    forgotten: list[int] = []
    monkeypatch.setattr(made.ledger, "forget_covered", forgotten.append)

    async def begin(*_: object) -> None:
        made.progress.verified_up_to += 5

    monkeypatch.setattr(made.role.checkpoints, "begin", begin)
    made.progress.verified_up_to = 10
    for step in (1, 2):
        await made.role.checkpoint(step)
    assert forgotten == [10]
    made.close()
