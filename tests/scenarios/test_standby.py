"""A standby's copy of a run: a trainer whose disk is lost goes on from it, in a new epoch."""

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from support.swarm import Running, Swarm, key_of
from support.waiting import until

from primerl.node.app.standby import COPY
from primerl.node.errors import NodeError
from primerl.node.storage.run_files import COPY_MARK
from primerl.node.trainer import backups

LONG = 100_000
"""Steps that no test reaches."""
CHECKPOINT = {"interval": 3, "standbys": [key_of("standby").node_id.hex()]}


async def test_a_run_whose_trainer_lost_its_disk_goes_on_from_the_copy_of_its_standby(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "LEAST_AGE_S", 0.2)
    async with Swarm(tmp_path, model_dir, max_steps=LONG, checkpoint=CHECKPOINT) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        standby, copy = swarm.add_standby()
        await until(lambda: standby.step >= 6)
        await swarm.wait_step(standby.step + 2)  # which the copy has not
        await swarm.stop_worker("standby")
        copied = standby.step
        accepted = (await worker.status())["accepted"]
        await swarm.lose_disk()
        shutil.move(copy.data_dir / COPY, swarm.run_dir)
        await swarm.start_trainer(resume=True)
        await swarm.wait_step(copied + 8)
        status = await worker.status()
        assert status["accepted"] > accepted
        assert set(status["rejected"]) <= {"stale", "stale_epoch", "expired"}
        assert not (swarm.run_dir / COPY_MARK).exists()
        await swarm.stop_trainer()
        heads = swarm.heads()
    steps = [line["step"] for line in swarm.metrics() if "reward/mean" in line]
    assert steps == list(range(1, len(steps) + 1))
    first = min(version for epoch, version in heads if epoch == 1)
    assert copied <= first <= copied + 2  # a version may be announced while the ledger is copied
    assert all(version <= first for epoch, version in heads if epoch == 0)


async def test_a_node_that_the_trainer_does_not_name_gets_no_backup(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(4)
        standby, running = swarm.add_standby()
        await until_waiting_for("checkpoint.standbys", running)
        assert standby.step == -1
        assert not (swarm.run_dir / "trainer/backup").exists()


async def until_waiting_for(words: str, node: Running) -> None:
    """Wait until a node's status says that it waits for something with these words."""
    waiting = ""
    async with asyncio.timeout(60):
        while words not in waiting:
            await asyncio.sleep(0.05)  # a status costs milliseconds
            with suppress(NodeError):
                waiting = (await node.status())["waiting_for"]
