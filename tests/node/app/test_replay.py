"""A finished run is computed again: every step follows, and what was changed is found at its step."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from support.replay_cases import KEEP, STEPS, LearningSwarm, finished, real_model
from support.swarm import Swarm
from support.waiting import ended, until
from support.witness import Fakes, WitnessBackend

from primerl.crypto.keys import SecretKey
from primerl.node.app.factories import Factories, make_backend
from primerl.node.app.replay import KeptRun, ReplayedStep, RunReplay, difference, follows
from primerl.node.config.run import RunConfig
from primerl.node.errors import StorageError, UsageError
from primerl.node.storage.chunk_store import CHUNKS, chunk_path
from primerl.node.storage.ledger import Ledger
from primerl.node.storage.rollouts import KeptRollout, RolloutFiles
from primerl.node.training.backend import Snapshot, StepMetrics, TrainBackend, TrainBatch
from primerl.node.training.local_backend import LocalBackend
from primerl.node.weights.state import State, Tensor
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.manifests import PolicyHead, PolicyManifest
from primerl.protocol.session import decode


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Swarm:
    """A swarm that ran to its end and keeps everything."""
    swarm = Swarm(tmp_path_factory.mktemp("kept"), model_dir, **KEEP)
    asyncio.run(finished(swarm))
    return swarm


@pytest.fixture
def run_dir(tmp_path: Path, kept: Swarm) -> Path:
    """A copy of its directory, to change."""
    return shutil.copytree(kept.run_dir, tmp_path / "r")


def witness(config: RunConfig) -> TrainBackend:
    del config
    return WitnessBackend(Fakes())


async def replayed(
    run_dir: Path,
    backend: Callable[[RunConfig], TrainBackend] = witness,
    tolerance: float | None = None,
) -> list[ReplayedStep]:
    run = KeptRun.open(run_dir)
    async with (
        RunReplay(run, tolerance=tolerance, factories=Factories(backend=backend)) as replay,
        aclosing(replay.steps()) as steps,
    ):
        return [one async for one in steps]


def outcomes(steps: Sequence[ReplayedStep]) -> list[str]:
    return [one.outcome for one in steps]


def rewrite(
    run_dir: Path, step: int, change: Callable[[list[KeptRollout]], list[KeptRollout]]
) -> None:
    """Change the kept rollouts of a step; the signed head beside them stays."""
    files = RolloutFiles(run_dir / "rollouts", fsync=False)
    record = files.record(step)
    files.write(record, change(files.read(step)))


def written(directory: Path) -> dict[Path, int]:
    """When each file was written."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


async def test_every_step_of_a_run_follows_and_nothing_is_written(run_dir: Path) -> None:
    before = written(run_dir)
    steps = await replayed(run_dir)
    assert [one.step for one in steps] == [1, 2, 3, 4]
    assert outcomes(steps) == ["equal"] * STEPS, steps
    assert all(one.weights and one.samples and one.computed == one.published for one in steps)
    assert follows(steps)
    changed = {path.name for path, at in written(run_dir).items() if before.get(path) != at}
    assert changed <= {"ledger.db-shm", "ledger.db-wal"}


def first_trained(kept: list[KeptRollout], **changes: Any) -> list[KeptRollout]:
    """The rows, with the first that was learned from changed."""
    first = learned(kept)
    return [replace(one, **changes) if one is first else one for one in kept]


def learned(kept: list[KeptRollout]) -> KeptRollout:
    return next(one for one in kept if one.verdict == "trained")


def with_token(kept: list[KeptRollout]) -> list[KeptRollout]:
    return first_trained(kept, completion_ids=[9, *learned(kept).completion_ids[1:]])


def with_logprob(kept: list[KeptRollout]) -> list[KeptRollout]:
    logprobs = learned(kept).completion_logprobs
    return first_trained(kept, completion_logprobs=[-0.5, *logprobs[1:]])


def with_reward(kept: list[KeptRollout]) -> list[KeptRollout]:
    return first_trained(kept, reward=0.125)


def without_one(kept: list[KeptRollout]) -> list[KeptRollout]:
    return [one for one in kept if one is not learned(kept)]


def in_another_order(kept: list[KeptRollout]) -> list[KeptRollout]:
    return [*without_one(kept), learned(kept)]


@pytest.mark.parametrize(
    "change", [with_token, with_logprob, with_reward, without_one, in_another_order]
)
async def test_a_changed_rollout_is_found_at_its_step(
    run_dir: Path, change: Callable[[list[KeptRollout]], list[KeptRollout]]
) -> None:
    """Later steps have no state to go on from, until the next checkpoint that was kept."""
    rewrite(run_dir, 2, change)
    steps = await replayed(run_dir)
    assert outcomes(steps) == ["equal", "departs", "unchecked", "equal"], steps
    assert "another than the published" in steps[1].note
    assert steps[1].computed != steps[1].published
    assert "no checkpoint of the step before" in steps[2].note
    assert not follows(steps)
    if change is with_reward:
        assert "does not give the advantage" in steps[1].note


class Dishonest(WitnessBackend):
    """Publishes another state at one step than it trained."""

    def __init__(self, step: int) -> None:
        super().__init__(Fakes())
        self.lies_at = step

    def snapshot(self) -> asyncio.Future[Snapshot]:
        made = super().snapshot().result()
        if self.batches and self.batches[-1].step == self.lies_at:
            name, tensor = next(iter(made.state.items()))
            return ended(Snapshot({**made.state, name: replace(tensor, data=tensor.data ^ 1)}))
        return ended(made)


async def test_a_version_that_is_not_what_was_trained_is_found(
    tmp_path: Path, model_dir: Path
) -> None:
    """The trainer signed it and every node holds it: the rollouts do not lead to it."""
    keep = KEEP | {"checkpoint": {"interval": 1, "keep_first": True, "keep_last": STEPS}}
    run_dir = await finished(
        LearningSwarm(tmp_path, model_dir, backend=lambda _: Dishonest(2), **keep)
    )
    steps = await replayed(run_dir)
    assert outcomes(steps) == ["equal", "departs", "departs", "equal"], steps
    assert "another than the published" in steps[1].note
    assert steps[1].largest is not None
    assert "kept state of step 2 is not version 2" in steps[2].note


def delta_of(run_dir: Path, version: int) -> Path:
    """The file of the first chunk of a version's delta."""
    ledger = Ledger(run_dir / "trainer" / "ledger.db")
    try:
        manifests = [decode(document, PolicyManifest) for _, document in ledger.heads()]
    finally:
        ledger.close()
    (found,) = (one for one in manifests if one.version == version)
    delta = next(one for one in found.artifacts if one.kind == "delta")
    return chunk_path(run_dir / "trainer" / CHUNKS, delta.chunks[0].digest)


async def test_a_swapped_delta_is_found_at_its_version(run_dir: Path) -> None:
    target, other = delta_of(run_dir, 3), delta_of(run_dir, 2)
    shutil.copyfile(other, target)
    steps = await replayed(run_dir)
    assert outcomes(steps)[:3] == ["equal", "equal", "departs"], steps
    assert "to version 3 was altered" in steps[2].note
    target.unlink()
    steps = await replayed(run_dir)
    assert outcomes(steps) == ["equal"] * STEPS, "what is not held cannot be wrong"
    assert [one.weights for one in steps] == [True, True, False, True]


async def test_a_head_of_another_key_or_beside_another_one_is_found(
    run_dir: Path, kept: Swarm
) -> None:
    files = RolloutFiles(run_dir / "rollouts", fsync=False)
    record = files.record(2)
    opened = unseal(record.head, Purpose.HEAD, PolicyHead, now=0)
    run = KeptRun.open(run_dir).documents.run_id

    async def with_head(key: SecretKey, head: PolicyHead) -> ReplayedStep:
        sealed = seal(key, Purpose.HEAD, run, head, expires=opened.expires)
        files.write(structs.replace(record, head=sealed), files.read(2))
        return (await replayed(run_dir))[1]

    forged = await with_head(SecretKey.generate(), opened.body)
    assert (forged.outcome, "not signed by" in forged.note) == ("departs", True)
    lie = structs.replace(opened.body, state=bytes(32))
    twice = await with_head(kept.trainer.key, lie)
    assert (twice.outcome, "two heads" in twice.note) == ("departs", True)


async def test_what_is_not_kept_is_not_checked_and_the_rest_is(run_dir: Path) -> None:
    files = RolloutFiles(run_dir / "rollouts", fsync=False)
    files.path(1).unlink()
    files.path(2).write_bytes(b"no parquet")
    steps = await replayed(run_dir)
    assert outcomes(steps) == ["unchecked", "unchecked", "unchecked", "equal"]
    assert "not kept" in steps[0].note
    assert "damaged" in steps[1].note
    assert "no checkpoint of the step before" in steps[2].note
    assert follows(steps)
    record = files.record(4)
    files.write(structs.replace(record, kept=record.groups - 1), files.read(4))
    steps = await replayed(run_dir)
    assert "rollouts.keep.share" in steps[3].note
    assert not follows(steps), "nothing could be checked"


@pytest.mark.parametrize(
    ("field", "odd"),
    [("task", "no hex"), ("worker", "x"), ("completion_mask", []), ("reward", None)],
)
async def test_rows_of_any_content_end_no_replay(run_dir: Path, field: str, odd: Any) -> None:
    rewrite(run_dir, 2, lambda kept: first_trained(kept, **{field: odd}))
    steps = await replayed(run_dir)
    assert steps[0].outcome == "equal"
    assert steps[1].outcome in ("departs", "unchecked"), steps[1]
    assert steps[1].note


def test_a_directory_without_a_run_or_with_a_foreign_ledger_is_refused(
    tmp_path: Path, run_dir: Path
) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        KeptRun.open(tmp_path)
    ledger = run_dir / "trainer" / "ledger.db"
    for path in ledger.parent.glob("ledger.db*"):
        path.unlink()
    with pytest.raises(StorageError):
        KeptRun.open(run_dir)


class Gated(LocalBackend):
    """The product's learner; it waits before a step until it may go on."""

    def __init__(self, config: RunConfig, last_step: int, go: asyncio.Event) -> None:
        super().__init__(config.training, max_steps=config.max_steps, seed=config.seed)
        self._last_step = last_step
        self._go = go

    async def step(self, batch: TrainBatch) -> StepMetrics:
        if batch.step > self._last_step:
            await self._go.wait()
        return await super().step(batch)


async def test_a_real_learner_gives_the_same_bits_again(tmp_path: Path) -> None:
    """From the model itself, as no first checkpoint was kept; options may change on the way."""
    model, go = real_model(tmp_path / "model"), asyncio.Event()
    training = {"lr": 1e-3, "threads": 1, "device": "cpu"}
    keep = KEEP | {"checkpoint": {"interval": 1, "keep_last": 2}, "training": training}
    async with LearningSwarm(
        tmp_path, model, backend=lambda config: Gated(config, 2, go), **keep
    ) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        run_dir = swarm.run_dir
        await until(RolloutFiles(run_dir / "rollouts").path(2).exists)
        await swarm.crash_trainer()
        go.set()
        await swarm.start_trainer(resume=True, training={"lr": 1e-2})
        await swarm.finished()
    steps = await replayed(run_dir, backend=make_backend)
    assert outcomes(steps) == ["equal"] * STEPS, steps
    honest = RolloutFiles(run_dir / "rollouts").read(2)
    rewrite(run_dir, 2, with_reward)
    (_, wrong, *_) = await replayed(run_dir, backend=make_backend)
    assert wrong.outcome == "departs"
    assert wrong.drift is not None
    assert 0 < wrong.drift < 2
    (_, wrong, *_) = await replayed(run_dir, backend=make_backend, tolerance=2.0)
    assert wrong.outcome == "departs", "advantages are exact, whatever the tolerance"
    rewrite(run_dir, 2, lambda _: with_logprob(honest))
    (_, near, *rest) = await replayed(run_dir, backend=make_backend, tolerance=2.0)
    assert (near.outcome, near.weights) == ("close", True)
    assert "departs" not in outcomes(rest)


def test_a_difference_is_measured_against_the_way_that_was_made() -> None:
    def state(*values: float) -> State:
        bits = np.array(values, np.float32).view(np.uint32) >> 16
        return {"w": Tensor("BF16", (len(values),), bits.astype("<u2"))}

    start, published = state(0.0, 0.0), state(3.0, 4.0)
    assert difference(published, published, start) == (0.0, 0.0)
    largest, drift = difference(state(3.0, 4.5), published, start)
    assert (largest, drift) == (0.5, pytest.approx(0.1))
    assert difference(start, published, {})[1] == np.inf
    assert difference(start, published, published)[1] == np.inf


def test_a_backend_of_the_product_is_what_replay_uses() -> None:
    config = RunConfig.model_validate({"training": {"device": "cpu"}})
    assert isinstance(Factories().backend(config), LocalBackend)
