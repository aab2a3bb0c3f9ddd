"""A run outlives its trainer: a standby that the root certified goes on from its copy, workers follow it."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from support.swarm import Running, Swarm, key_of
from support.waiting import until

from primerl.node.errors import NodeError, SteppedDown
from primerl.node.ops import control
from primerl.node.storage.run_files import COPY_MARK
from primerl.node.trainer import backups
from primerl.protocol.leaders import EPOCHS_OF_PLACE, EPOCHS_OF_TURN

LONG = 100_000
"""Steps that no test reaches."""
FIRST = EPOCHS_OF_TURN + EPOCHS_OF_PLACE
"""First epoch of the first successor."""
HARMLESS = {"stale", "stale_epoch", "expired"}


@pytest.fixture(autouse=True)
def frequent_backups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "LEAST_AGE_S", 0.2)


async def test_a_standby_leads_the_run_after_its_trainer_and_its_disk_are_lost(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG, checkpoint={"interval": 3}) as swarm:
        await swarm.start_trainer()
        await swarm.certify("standby", lease_s=2)
        worker = swarm.add_worker("w1")
        standby, _ = swarm.add_standby()
        await until(lambda: standby.step >= 6)
        await swarm.wait_step(standby.step + 2)  # which the copy has not
        copied = standby.step
        accepted = (await worker.status())["accepted"]
        await swarm.lose_disk()
        await swarm.succeed()
        await swarm.wait_step(copied + 8)
        status = await worker.status()
        assert status["accepted"] > accepted
        assert set(status["rejected"]) <= HARMLESS
        assert not (swarm.run_dir / COPY_MARK).exists()
        await swarm.stop_trainer()
        heads = swarm.heads()
    steps = [line["step"] for line in swarm.metrics() if "reward/mean" in line]
    assert steps == list(range(1, len(steps) + 1))
    first = min(version for epoch, version in heads if epoch == FIRST)
    assert copied <= first <= copied + 2  # a version may be announced while the ledger is copied
    assert {epoch for epoch, _ in heads} == {0, FIRST}


async def test_a_run_that_is_handed_over_loses_no_version(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG, checkpoint={"interval": 3}) as swarm:
        await swarm.start_trainer()
        await swarm.certify("standby")
        worker = swarm.add_worker("w1")
        standby, _ = swarm.add_standby()
        await until(lambda: standby.step >= 3)
        given = await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "handover")
        assert given == {"node": key_of("standby").node_id.hex()}
        with pytest.raises(SteppedDown):
            await swarm.trainer.ended()
        before = swarm.heads()
        last = max(version for _, version in before)
        await swarm.succeed()
        await swarm.wait_step(last + 4)
        status = await worker.status()
        assert set(status["rejected"]) <= HARMLESS
        await swarm.stop_trainer()
        assert min(version for epoch, version in swarm.heads() if epoch == FIRST) == last


async def test_a_trainer_that_comes_back_late_steps_down(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG, checkpoint={"interval": 3}) as swarm:
        await swarm.start_trainer()
        await swarm.certify("standby", lease_s=1)
        swarm.add_worker("w1")
        standby, _ = swarm.add_standby()
        await until(lambda: standby.step >= 3)
        late = swarm.trainer
        await swarm.crash_trainer()
        await swarm.succeed()
        leads = swarm.trainer
        await swarm.wait_step(standby.step + 2)
        swarm.trainer = late
        await swarm.start_trainer(
            resume=True, name="r", output_dir=tmp_path, data_dir=late.data_dir
        )
        with pytest.raises(SteppedDown, match=key_of("standby").node_id.hex()):
            await late.ended()
        swarm.trainer = leads


async def test_a_node_that_is_not_certified_gets_no_backup(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(4)
        standby, running = swarm.add_standby()
        await until_waiting_for("root certify", running)
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
