"""A disk that is full: its node says so, keeps what it acknowledged, and goes on once there is room."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from support.hostile import Rogue, reason_of
from support.machine import fill, small_disk
from support.swarm import Swarm
from support.waiting import until
from support.witness import Fakes, WitnessEngine

from primerl.node.app.trainer import Farewell
from primerl.node.errors import EngineError, StorageError
from primerl.node.storage.ledger import Ledger
from primerl.node.worker import loop
from primerl.node.worker.weight_sync import RETRY_S
from primerl.protocol.errors import Reason


class Filling:
    """A disk that tests fill and free."""

    def __init__(self, keep: str) -> None:
        self.full = False
        self.refused = 0
        self._keep = keep

    def ledger(self, path: Path, *, fsync: bool) -> Ledger:
        """A ledger on this disk."""
        return SmallLedger(path, self, self._keep, fsync=fsync)


class SmallLedger(Ledger):
    """A ledger whose file cannot grow while its disk is full; SQLite itself says so."""

    def __init__(self, path: Path, disk: Filling, keep: str, *, fsync: bool) -> None:
        self._disk = disk
        self._growing = keep
        super().__init__(path, fsync=fsync)

    def _write(
        self, statement: str, values: tuple[object, ...], db: sqlite3.Connection | None = None
    ) -> sqlite3.Cursor:
        if not (self._disk.full and f" INTO {self._growing} " in statement):
            return super()._write(statement, values, db)
        file = db or self._db
        pages = file.execute("PRAGMA page_count").fetchone()[0]
        file.execute(f"PRAGMA max_page_count={pages}")
        padded = tuple(v + bytes(1 << 20) if isinstance(v, bytes) else v for v in values)
        try:
            return super()._write(statement, padded, db)
        except StorageError:
            self._disk.refused += 1
            raise
        finally:
            file.execute("PRAGMA max_page_count=1073741823")


async def test_a_trainer_without_room_refuses_and_the_worker_delivers_later(
    tmp_path: Path, model_dir: Path
) -> None:
    disk = Filling("inbox")
    async with Swarm(tmp_path, model_dir, trainer_ledger=disk.ledger) as swarm:
        await swarm.start_trainer()
        disk.full = True
        swarm.add_worker("w1")
        await until(lambda: disk.refused >= 2)
        assert (await swarm.trainer.status())["accepted"] == 0
        async with Rogue(swarm, "hand") as hand:
            await hand.hello()
            lease, sealed = await hand.lease()
            bundle = hand.bundle(sealed, await hand.play(lease))
            assert await reason_of(hand.submit(bundle, lease.lease_id)) == Reason.DISK_FULL
            disk.full = False
            assert (await hand.submit(bundle, lease.lease_id)).lease_id == lease.lease_id
        summary = await swarm.finished()
    assert summary["steps"] == 3
    assert summary["rejected"].keys() <= {"stale"}


async def test_a_worker_without_room_for_its_spool_loses_a_lease_and_works_on(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FULL_S", 0.2)
    disk = Filling("spool")
    rollouts = {"lease_timeout_s": 1.5}
    async with Swarm(tmp_path, model_dir, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        disk.full = True
        swarm.add_worker("w1", ledger=disk.ledger)
        await until(lambda: disk.refused >= 2)
        disk.full = False
        summary = await swarm.finished()
    assert summary["steps"] == 3
    assert summary["rejected"].keys() <= {"stale"}


async def test_a_worker_that_cannot_keep_its_work_takes_no_more_leases_and_says_why(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "FULL_S", 1e6)
    disk = Filling("spool")
    async with Swarm(tmp_path, model_dir, rollouts={"lease_timeout_s": 1.5}) as swarm:
        await swarm.start_trainer()
        disk.full = True
        worker = swarm.add_worker("w1", ledger=disk.ledger)
        await until(lambda: disk.refused > 0)

        async with asyncio.timeout(60.0):
            status = await worker.status()
            while status["leases"] or "full" not in status["waiting_for"]:
                await asyncio.sleep(0.05)
                status = await worker.status()
        lost = disk.refused
        swarm.add_worker("w2")
        assert (await swarm.finished())["steps"] == 3
    assert disk.refused == lost


async def test_a_worker_without_room_for_the_model_says_so_and_ends(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", weights={"max_disk_gib": 1e-6})
        with pytest.raises(
            StorageError, match=r"raise weights\.max_disk_gib or lower weights\.keep_versions"
        ):
            await worker.ended()
        swarm.add_worker("w2")
        await swarm.wait_step(1)


async def test_a_worker_whose_store_fills_up_drops_old_versions_and_follows_on(
    tmp_path: Path, model_dir: Path
) -> None:
    swarm = Swarm(tmp_path, model_dir, max_steps=12)
    swarm.fakes.words = 20_000
    async with swarm:
        await swarm.start_trainer()
        small = {"max_disk_gib": 250_000 / 2**30, "keep_versions": 1}
        swarm.add_worker("w1", weights=small)
        await swarm.wait_step(10)
    versions = [event.version for event in swarm.fakes.loads("w1")]
    assert versions == sorted(versions)
    assert versions[-1] >= 9


async def test_a_worker_without_room_for_the_next_version_says_so_once_of_each(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swarm = Swarm(tmp_path, model_dir, max_steps=10_000)
    swarm.fakes.words = 20_000
    async with swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", weights={"max_disk_gib": 150_000 / 2**30})
        await until(lambda: "cannot be kept" in caplog.text)
        await asyncio.sleep(3 * RETRY_S)  # nobody else works: there is no newer version
        waiting = (await worker.status())["waiting_for"]
    assert "raise weights.max_disk_gib" in waiting
    unkept = [line.split(" cannot")[0] for line in caplog.messages if "cannot be kept" in line]
    assert len(unkept) == len(set(unkept))


async def test_a_trainer_without_room_for_weights_stops_and_resumes_where_it_was(
    tmp_path: Path, model_dir: Path
) -> None:
    swarm = Swarm(tmp_path, model_dir, max_steps=4)
    swarm.fakes.words = 20_000
    async with swarm:
        await swarm.start_trainer(weights={"max_disk_gib": 150_000 / 2**30})
        swarm.add_worker("w1")
        with pytest.raises(StorageError, match=r"raise weights\.max_disk_gib"):
            await swarm.trainer.ended()
        before = swarm.heads()
        swarm.network.drop(swarm.trainer.node_id)
        await swarm.start_trainer(resume=True, weights={"max_disk_gib": 1.0})
        await swarm.finished()
        after = swarm.heads()
    assert after.items() >= before.items()
    assert sorted(after) == [(0, version) for version in range(5)]


async def test_a_worker_that_cannot_keep_its_last_status_says_so_and_what_it_did_counts(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        (worker.data_dir / "last_status.json").mkdir(parents=True)
        assert (await swarm.finished())["steps"] == 3
        with pytest.raises(
            StorageError, match=r"last_status\.json: Is a directory: .* move it away"
        ):
            await worker.ended()


class BreakingEngine(WitnessEngine):
    """An engine that is lost for good with the second version."""

    async def load(self, *args: Any, **options: Any) -> Any:
        if args[0]:
            raise EngineError("the engine broke")
        return await super().load(*args, **options)

    async def update(self, *args: Any, **options: Any) -> Any:
        raise EngineError("the engine broke")


async def test_the_cause_of_a_workers_end_is_reported_even_if_its_disk_is_full(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", engine=BreakingEngine(swarm.fakes, "w1"))
        (worker.data_dir / "last_status.json").mkdir(parents=True)
        with pytest.raises(EngineError, match="the engine broke"):
            await worker.ended()


@pytest.mark.slow
async def test_a_worker_whose_real_disk_is_full_ends_with_the_reason(
    tmp_path: Path, model_dir: Path
) -> None:
    with small_disk(tmp_path / "w1", 4096) as disk:
        fakes, rollouts = Fakes(last_step=1), {"lease_timeout_s": 1.5}
        async with Swarm(
            tmp_path,
            model_dir,
            fakes=fakes,
            farewell=Farewell(finished_s=60.0),  # until the worker was told the end
            max_steps=4,
            rollouts=rollouts,
        ) as swarm:
            await swarm.start_trainer()
            worker = swarm.add_worker("w1")
            await swarm.wait_step(1)
            fill(disk)
            fakes.go.set()
            swarm.add_worker("w2")
            assert (await swarm.finished())["steps"] == 4
            with pytest.raises(
                StorageError, match=r"disk is full\)|No space left on device: make room"
            ):
                await worker.ended()
