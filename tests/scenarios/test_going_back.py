"""A run that goes back to an older checkpoint, or begins where another one is; and when versions are told."""

import asyncio
import json
import shutil
import sqlite3
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.swarm import Running, Swarm
from support.waiting import until
from support.witness import Fakes, WitnessBackend

from primerl.node.app import rundir
from primerl.node.app.factories import Factories, MakeLedger
from primerl.node.config.run import RunConfig
from primerl.node.errors import StorageError, UsageError
from primerl.node.storage.ledger import Ledger
from primerl.node.training.checkpoint import COMPLETE, Checkpoints, StagingBackend
from primerl.node.weights.state import digests, state_digest

EVERY = {"interval": 1}
KEEP = {"keep_last": 9, **EVERY}


def at(directory: Path, **changes: Any) -> RunConfig:
    """The config of a run in `directory`."""
    return RunConfig.model_validate({"name": "r", "output_dir": directory, **changes})


def alter(checkpoint: Path) -> None:
    """Damage a file that its record names."""
    part = checkpoint / "parts" / "cursor"
    part.write_bytes(part.read_bytes() + b" ")


async def failure(swarm: Swarm) -> BaseException:
    """The one error that ends the trainer."""
    task = swarm.trainer.task
    assert task is not None
    await asyncio.wait([task], timeout=100.0)
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert error is not None
    return error


async def trained(tmp_path: Path, model_dir: Path, steps: int, **settings: Any) -> Path:
    """The directory of a run that has ended."""
    async with Swarm(tmp_path, model_dir, max_steps=steps, checkpoint=KEEP, **settings) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.finished()
        return swarm.run_dir


async def test_a_run_goes_back_to_a_step_and_what_came_after_is_set_aside(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=5)
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=6, checkpoint=KEEP) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        swarm.add_worker("w2")
        await until(lambda: all(fakes.newest(name) == 5 for name in swarm.workers))
        await swarm.crash_trainer()
        before = swarm.heads()
        had = {name: len(fakes.loads(name)) for name in swarm.workers}
        await swarm.start_trainer(resume={"step": 3})
        await until(lambda: all(len(fakes.loads(name)) > had[name] for name in had))
        fakes.go.set()  # a worker that has not found back by the end would wait for ever
        summary = await swarm.finished()
        for worker in swarm.workers.values():
            await worker.ended()
        after = swarm.heads()
    assert [order for order in sorted(after) if order[0]] == [(1, 3), (1, 4), (1, 5), (1, 6)]
    assert after[1, 3].state == before[0, 3].state
    assert [batch.step for batch in swarm.backend.batches] == [4, 5, 6]
    assert set(summary["rejected"]) <= {"stale"}
    aside = Checkpoints(swarm.run_dir / "checkpoints" / "void_1", keep_last=1)
    assert aside.steps() == [4, 5]
    assert Checkpoints(swarm.run_dir / "checkpoints", keep_last=9).steps() == list(range(7))


async def test_a_damaged_newest_checkpoint_costs_its_step_and_no_more(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=4)
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=5, checkpoint=EVERY) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(4)
        await swarm.crash_trainer()
        checkpoints = swarm.run_dir / "checkpoints"
        assert Checkpoints(checkpoints, keep_last=2).steps() == [3, 4]
        alter(checkpoints / "step_4")
        fakes.go.set()
        await swarm.start_trainer(resume=True)
        await swarm.finished()
        steps = [batch.step for batch in swarm.backend.batches]
    assert steps == [4, 5]
    assert max(swarm.heads()) == (1, 5)
    assert (checkpoints / "void_1" / "step_4" / COMPLETE).is_file()


async def test_a_checkpoint_that_was_named_is_taken_or_the_run_does_not_start(
    tmp_path: Path, model_dir: Path
) -> None:
    run_dir = await trained(tmp_path, model_dir, 2)
    with pytest.raises(UsageError, match=r"no checkpoint of step 9: there are 0, 1, 2"):
        rundir.prepare(at(tmp_path, resume={"step": 9}))
    alter(run_dir / "checkpoints" / "step_1")
    async with Swarm(tmp_path, model_dir, max_steps=2, checkpoint=KEEP) as swarm:
        await swarm.start_trainer(resume={"step": 1})
        error = await failure(swarm)
    assert isinstance(error, StorageError)
    assert "checkpoint 1 was altered" in str(error)
    assert Checkpoints(run_dir / "checkpoints", keep_last=9).steps() == [0, 1, 2]


async def test_a_fork_is_a_new_run_that_goes_on_in_the_data_and_not_in_the_books(
    tmp_path: Path, model_dir: Path
) -> None:
    (tmp_path / "a").mkdir()
    source = await trained(tmp_path / "a", model_dir, 4)
    kept = {path: path.stat().st_mtime_ns for path in source.rglob("*") if path.is_file()}
    async with Swarm(tmp_path / "b", model_dir, max_steps=6, checkpoint=EVERY) as swarm:
        await swarm.start_trainer(resume={"dir": source, "step": 3})
        await swarm.wait_step(3)
        theirs, ours = [await cursor(run, 3) for run in (source, swarm.run_dir)]
        assert (await swarm.trainer.status())["waiting_groups"] == 0
        swarm.add_worker("w1")
        summary = await swarm.finished()
        await swarm.workers["w1"].ended()
        heads, batches = swarm.heads(), swarm.backend.batches
        loads = swarm.fakes.loads("w1")
    assert sorted(heads) == [(0, version) for version in range(3, 7)]
    assert [batch.step for batch in batches] == [4, 5, 6]
    assert loads[0].version >= 3
    assert [event.state for event in loads] == [heads[0, e.version].state for e in loads]
    assert heads[0, 3].state == await _state(source, 3, model_dir)
    assert summary["run_id"] != json.loads((source / "summary.json").read_text())["run_id"]
    assert {p: p.stat().st_mtime_ns for p in source.rglob("*") if p.is_file()} == kept
    assert Checkpoints(swarm.run_dir / "checkpoints", keep_last=2).latest() == 6
    for name in ("tasks", "history", "staleness_max", "reputations"):
        assert ours[name] == theirs[name], name
    assert theirs["verified_up_to"] > 0 == ours["verified_up_to"]
    assert (ours["accepted"], ours["received"], ours["rejected"]) == (0, 0, {})


async def cursor(run_dir: Path, step: int) -> dict[str, Any]:
    """The books in a checkpoint."""
    parts = await Checkpoints(run_dir / "checkpoints", keep_last=1).read(step)
    return msgspec.json.decode(parts["cursor"])


async def _state(source: Path, step: int, model_dir: Path) -> bytes:
    """Digest of the policy in a checkpoint."""
    backend = WitnessBackend(Fakes())
    await backend.start(model_dir)
    await backend.load(Checkpoints(source / "checkpoints", keep_last=1).backend_directory(step))
    return state_digest(digests(await backend.state()))


async def test_where_a_fork_may_go_and_where_not(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "a").mkdir()
    source = await trained(tmp_path / "a", model_dir, 1)
    with pytest.raises(UsageError, match="no checkpoint to begin from"):
        rundir.prepare(at(tmp_path / "b", resume={"dir": tmp_path}))
    with pytest.raises(UsageError, match=r"no checkpoint of step 7: there are 0, 1"):
        rundir.prepare(at(tmp_path / "b", resume={"dir": source, "step": 7}))
    with pytest.raises(UsageError, match="nothing to resume"):
        rundir.prepare(at(tmp_path / "b", resume=True))
    assert rundir.prepare(at(tmp_path / "b", resume={"dir": source}))
    (tmp_path / "b" / "r" / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match="holds a run"):
        rundir.prepare(at(tmp_path / "b", resume={"dir": source}))
    rundir.prepare(at(tmp_path / "b", resume={"dir": source}, clean=True))
    assert not (tmp_path / "b" / "r" / "metrics.jsonl").exists()
    for own in (source, source / "checkpoints"):
        with pytest.raises(ValueError, match=r"resume\.step"):
            at(tmp_path / "a", resume={"dir": own}, clean=True)


def test_adapters_are_forked_only_on_the_model_that_they_were_made_for(tmp_path: Path) -> None:
    source = tmp_path / "a" / "r"
    (source / "checkpoints" / "step_2").mkdir(parents=True)
    (source / "checkpoints" / "step_2" / COMPLETE).touch()
    begun = at(tmp_path / "a", model={"name": "one"}, training={"lora": {}})
    (source / "config.json").write_text(begun.model_dump_json())
    fork = {"dir": source}
    rundir.prepare(at(tmp_path / "b", model={"name": "one"}, training={"lora": {}}, resume=fork))
    with pytest.raises(UsageError, match="adapters fit only"):
        rundir.prepare(
            at(tmp_path / "c", model={"name": "two"}, training={"lora": {}}, resume=fork)
        )
    (source / "config.json").unlink()
    with pytest.raises(UsageError, match=r"config\.json"):
        rundir.prepare(
            at(tmp_path / "c", model={"name": "one"}, training={"lora": {}}, resume=fork)
        )


async def test_a_checkpoint_of_another_kind_of_run_says_what_to_do(
    tmp_path: Path, model_dir: Path
) -> None:
    backend = WitnessBackend(Fakes())
    await backend.start(model_dir)
    source = tmp_path / "sft"
    checkpoints = Checkpoints(source / "checkpoints", keep_last=1)
    await checkpoints.write(5, {"cursor": b'{"epoch":1}'}, backend)
    async with Swarm(tmp_path / "b", model_dir, checkpoint=EVERY) as swarm:
        await swarm.start_trainer(resume={"dir": source})
        error = await failure(swarm)
    assert isinstance(error, StorageError)
    assert "--model.name" in str(error)


class StagedWitness(WitnessBackend):
    """Writes from a copy, and only when it is let."""

    def __init__(self, fakes: Fakes, gates: dict[int, asyncio.Event]) -> None:
        super().__init__(fakes)
        self._gates = gates
        self._copy = copy(self)

    async def stage(self) -> None:
        self._copy = copy(self)

    async def write_staged(self, directory: Path) -> None:
        step = self._copy.batches[-1].step if self._copy.batches else 0
        if step in self._gates:
            await self._gates[step].wait()
        await self._copy.save(directory)


class StagedSwarm(Swarm):
    """A trainer whose checkpoints take as long as a test wants: `gates` by step."""

    gates: dict[int, asyncio.Event]

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        def backend(config: RunConfig) -> StagedWitness:
            self.backends.append(StagedWitness(self.fakes, self.gates))
            return self.backends[-1]  # type: ignore[return-value]

        return replace(super()._factories(running, ledger), backend=backend)


async def test_a_version_is_published_only_after_its_checkpoint_is_written(
    tmp_path: Path, model_dir: Path
) -> None:
    swarm = StagedSwarm(tmp_path, model_dir, max_steps=3, checkpoint=EVERY)
    swarm.gates = {2: asyncio.Event()}
    async with swarm:
        await swarm.start_trainer()
        assert isinstance(swarm.backend, StagingBackend)
        swarm.add_worker("w1")
        await swarm.wait_step(1)
        partial = swarm.run_dir / "checkpoints" / "step_2.partial"
        await until(partial.exists)
        await asyncio.sleep(0.5)
        status = await swarm.trainer.status()
        assert (status["step"], status["version"]) == (2, 1)
        assert {event.version for event in swarm.fakes.loads("w1")} <= {0, 1}
        swarm.gates[2].set()
        await swarm.finished()
        assert max(swarm.heads()) == (0, 3)
        assert swarm.metrics()[1]["time/save_ckpt"] > 0.05  # step 2 was held up, and says so


async def test_with_a_longer_interval_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, model_dir: Path
) -> None:
    swarm = StagedSwarm(tmp_path, model_dir, max_steps=5, checkpoint={"interval": 2})
    swarm.gates = {2: asyncio.Event()}
    async with swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(3)
        await until(lambda: swarm.backend.batches[-1].step == 4)
        checkpoints = Checkpoints(swarm.run_dir / "checkpoints", keep_last=2)
        assert checkpoints.steps() == [0]
        assert (await swarm.trainer.status())[
            "version"
        ] == 3  # the next one waits for the one before
        swarm.gates[2].set()
        await swarm.finished()
        assert checkpoints.steps() == [4, 5]


async def test_a_crash_while_a_checkpoint_is_written_falls_back_to_the_one_before(
    tmp_path: Path, model_dir: Path
) -> None:
    swarm = StagedSwarm(tmp_path, model_dir, max_steps=4, checkpoint=EVERY)
    swarm.gates = {3: asyncio.Event()}
    async with swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await until((swarm.run_dir / "checkpoints" / "step_3.partial").exists)
        image = tmp_path / "image"
        await asyncio.to_thread(
            shutil.copytree, swarm.run_dir / "checkpoints", image, dirs_exist_ok=True
        )
        assert Checkpoints(image, keep_last=2).latest() == 2
        swarm.gates[3].set()  # else the end would wait for it
        await swarm.finished()


async def test_another_ledger_beside_checkpoints_is_refused_and_nothing_is_lost_by_it(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(last_step=1)
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=4, checkpoint=KEEP) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        own, older = swarm.trainer.data_dir / "ledger.db", tmp_path / "older.db"
        with sqlite3.connect(own) as now, sqlite3.connect(older) as backup:
            now.backup(backup)
        swarm.add_worker("w1")
        await swarm.wait_step(1)
        fakes.last_step = 3
        fakes.go.set()
        fakes.go.clear()
        await swarm.wait_step(3)
        checkpoints = Checkpoints(swarm.run_dir / "checkpoints", keep_last=9)
        while checkpoints.latest() != 3:  # noqa: ASYNC110 - it is written beside the run
            await asyncio.sleep(0.02)
        await swarm.crash_worker("w1")
        await swarm.crash_trainer()
        Ledger(own).close()  # what was beside the file is in it now
        kept = own.read_bytes()
        foreign = Ledger(tmp_path / "foreign.db", fsync=False)
        for number in range(99):
            foreign.receive(bytes([number]) * 32, number, bytes(32), b"", 0)
        foreign.close()
        others = {"empty": b"", "older": older.read_bytes()}
        others["of another run"] = (tmp_path / "foreign.db").read_bytes()
        for why, data in others.items():
            for _ in range(2):  # the first refusal leaves no traces that let the second pass
                own.write_bytes(data)
                with pytest.raises(StorageError, match=why) as refused:
                    await swarm.start_trainer(resume=True)
                assert f"--resume.dir {swarm.run_dir}" in str(refused.value)
                data = own.read_bytes()
        own.write_bytes(kept)
        fakes.go.set()
        await swarm.start_trainer(resume=True)
        swarm.add_worker("w1")
        await swarm.finished()
        heads = swarm.heads()
    assert sorted(heads) == [(0, version) for version in range(5)]


async def test_a_run_does_not_go_on_with_other_tokens_than_its_workers_have(
    tmp_path: Path, model_dir: Path
) -> None:
    own = shutil.copytree(model_dir, tmp_path / "model")
    async with Swarm(tmp_path / "run", own, max_steps=1, checkpoint=KEEP) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        await swarm.finished()
        await worker.ended()
        tokens = own / "tokenizer.json"
        whole = tokens.read_text()
        tokens.write_text(whole.replace('"w5"', '"v5"'))
        with pytest.raises(StorageError, match=r"tokenizer\.json is not the file .*: put it back"):
            await swarm.start_trainer(resume=True, max_steps=2)
        tokens.write_text(whole)
        await swarm.start_trainer(resume=True, max_steps=2)
        swarm.add_worker("w1")
        await swarm.finished()


def test_checkpoints_alone_are_a_run_that_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds a run"):
        rundir.prepare(at(tmp_path))
