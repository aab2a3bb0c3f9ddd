"""A run outlives its trainer: a standby that the root certified goes on from its copy, workers follow it."""

import asyncio
import re
import sqlite3
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

import pytest
from support.swarm import Running, Swarm, key_of
from support.waiting import until

from primerl.crypto.hashing import short
from primerl.crypto.keys import SecretKey
from primerl.node.app.standby import StandbyNode
from primerl.node.errors import NodeError, SteppedDown
from primerl.node.ops import control
from primerl.node.storage.run_files import COPY_MARK
from primerl.node.trainer import backups
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.leaders import EPOCHS_OF_PLACE, EPOCHS_OF_TURN
from primerl.protocol.rollouts import Submission

LONG = 100_000
"""Steps that no test reaches."""
FIRST = EPOCHS_OF_TURN + EPOCHS_OF_PLACE
"""First epoch of the first successor."""
HARMLESS = {"stale", "expired"}


@asynccontextmanager
async def backed_up(
    directory: Path,
    model_dir: Path,
    *,
    lease_s: int = 60,
    workers: Sequence[str] = ("w1",),
    standbys: Sequence[str] = ("standby",),
    root: SecretKey | None = None,
) -> AsyncGenerator[tuple[Swarm, list[Running], list[StandbyNode], list[Running]]]:
    """Start a run with workers and standbys, which have copies of step 3 or later; those are nodes, too."""
    checkpoint = {"interval": 3} | ({"root": root.node_id.hex()} if root else {})
    async with Swarm(directory, model_dir, max_steps=LONG, checkpoint=checkpoint) as swarm:
        swarm.root = root
        await swarm.start_trainer()
        await swarm.certify(*standbys, lease_s=lease_s)
        working = [swarm.add_worker(name) for name in workers]
        nodes, copies = zip(*map(swarm.add_standby, standbys), strict=True)
        await until(lambda: all(node.step >= 3 for node in nodes))
        yield swarm, working, list(nodes), list(copies)


@pytest.fixture(autouse=True)
def frequent_backups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backups, "LEAST_AGE_S", 0.2)


async def test_a_standby_leads_the_run_after_its_trainer_and_its_disk_are_lost(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with backed_up(tmp_path, model_dir, lease_s=2) as (swarm, [worker], [standby], _):
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
    # a version may be announced while the ledger is copied
    assert copied <= resumed(caplog) <= copied + 2
    assert max(heads)[0] == FIRST


async def test_a_run_that_is_handed_over_loses_no_version(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with backed_up(tmp_path, model_dir) as (swarm, [worker], _, _):
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
        # a step that was trained, and not announced yet, is in the checkpoint of the stop
        assert last <= resumed(caplog) <= last + 1


@pytest.mark.slow
async def test_a_trainer_that_comes_back_late_steps_down(tmp_path: Path, model_dir: Path) -> None:
    async with backed_up(tmp_path, model_dir, lease_s=1) as (swarm, _, [standby], _):
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


@pytest.mark.slow
async def test_what_had_a_receipt_of_the_lost_trainer_is_given_to_the_next_one(
    tmp_path: Path, model_dir: Path
) -> None:
    async with backed_up(tmp_path, model_dir, lease_s=2) as (swarm, _, [standby], [copy]):
        swarm.network.partition(swarm.trainer.node_id, copy.node_id)  # no more backups
        await swarm.wait_step(standby.step + 1)
        taken = receipted(swarm.trainer)
        await swarm.lose_disk()
        await swarm.succeed()
        await swarm.wait_step(standby.step + 4)
        await swarm.stop_trainer()
        usable = {lease for lease, version in taken.items() if version <= standby.step}
        assert usable
        assert usable <= received(swarm.trainer)


@pytest.mark.slow
async def test_of_two_that_lead_at_once_the_newer_epoch_wins(
    tmp_path: Path, model_dir: Path
) -> None:
    async with backed_up(tmp_path, model_dir, lease_s=1, workers=("near", "far")) as (
        swarm,
        [near, far],
        [standby],
        [copy],
    ):
        cut = [
            (swarm.trainer.node_id, copy.node_id),
            (swarm.trainer.node_id, far.node_id),
            (near.node_id, copy.node_id),
            (near.node_id, far.node_id),
        ]
        for ends in cut:
            swarm.network.partition(*ends)
        first = swarm.trainer
        await swarm.succeed()
        await swarm.wait_step(standby.step + 3)  # with one worker
        assert first.task is not None
        assert not first.task.done()  # with the other
        accepted = (await near.status())["accepted"]
        for ends in cut:
            swarm.network.heal(*ends)
        with pytest.raises(SteppedDown):
            await first.ended()
        await swarm.until_row(near, lambda row: row["accepted"] > accepted, 60)
        for worker in (near, far):
            assert set((await worker.status())["rejected"]) <= HARMLESS


@pytest.mark.slow
async def test_the_second_standby_leads_if_the_first_is_lost_as_well(
    tmp_path: Path, model_dir: Path
) -> None:
    async with backed_up(tmp_path, model_dir, lease_s=1, standbys=("s1", "s2")) as (
        swarm,
        [worker],
        [_, second],
        _,
    ):
        await swarm.stop_worker("s1")
        await swarm.lose_disk()
        await swarm.succeed("s2")
        await swarm.wait_step(second.step + 3)
        assert set((await worker.status())["rejected"]) <= HARMLESS
        await swarm.stop_trainer()
        assert max(swarm.heads())[0] == EPOCHS_OF_TURN + 2 * EPOCHS_OF_PLACE


@pytest.mark.slow
async def test_workers_follow_no_standby_that_they_know_to_be_revoked(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with backed_up(tmp_path, model_dir, lease_s=1) as (swarm, [worker], [standby], [copy]):
        for node in (swarm.trainer, worker):
            swarm.network.partition(node.node_id, copy.node_id)
        await swarm.revoke(copy, swarm.trainer)
        before = standby.step
        await swarm.wait_step(before + 4)  # with a head, and the list
        version = (await worker.status())["version"]
        await swarm.lose_disk()
        await swarm.succeed()
        swarm.network.heal(worker.node_id, copy.node_id)
        # it does not know, and the worker does
        await until(lambda: f"bad head from {short(copy.node_id)}" in caplog.text)
        assert (await worker.status())["newest_version"] >= version


@pytest.mark.slow
async def test_a_standby_leads_at_once_when_the_root_revokes_the_trainer(
    tmp_path: Path, model_dir: Path
) -> None:
    root = SecretKey.generate()
    async with backed_up(tmp_path, model_dir, root=root) as (swarm, [worker], [standby], [copy]):
        stolen = swarm.trainer
        await swarm.revoke(stolen, copy)  # which it would not publish itself
        await swarm.succeed()
        await swarm.wait_step(standby.step + 3)
        await swarm.until_row(worker, lambda row: row["accepted"] > 0, 60)
        with pytest.raises(SteppedDown, match="revoked"):
            await stolen.ended()


async def test_a_node_that_is_not_certified_gets_no_backup(tmp_path: Path, model_dir: Path) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=LONG) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(4)
        standby, running = swarm.add_standby()
        await until_waiting_for("root certify", running)
        assert standby.step == -1
        assert not (swarm.run_dir / "trainer/backup").exists()


def receipted(trainer: Running) -> dict[int, int]:
    """Return the newest policy of each submission whose bytes a trainer holds, by lease."""
    with closing(sqlite3.connect(trainer.data_dir / "ledger.db")) as ledger:
        rows = ledger.execute(
            "SELECT inbox.lease_id, bodies.sealed FROM inbox JOIN bodies USING (arrival)"
        ).fetchall()
    found: dict[int, int] = {}
    for lease, sealed in rows:
        body = unseal(sealed, Purpose.SUBMISSION, Submission, now=0).body
        branches = [
            branch
            for group in body.groups
            for rollout in group.rollouts
            for branch in rollout.branches
        ]
        found[lease] = max(branch.policy_last for branch in branches)
    return found


def resumed(caplog: pytest.LogCaptureFixture) -> int:
    """Return the version with which the first standby began its epoch."""
    begun = re.search(rf"resuming version (\d+) in epoch {FIRST}", caplog.text)
    assert begun is not None
    return int(begun[1])


def received(trainer: Running) -> set[int]:
    """Return the leases of all submissions that a trainer ever had."""
    with closing(sqlite3.connect(trainer.data_dir / "ledger.db")) as ledger:
        return {lease for (lease,) in ledger.execute("SELECT lease_id FROM inbox")}


async def until_waiting_for(words: str, node: Running) -> None:
    """Wait until a node's status says that it waits for something with these words."""
    waiting = ""
    async with asyncio.timeout(60):
        while words not in waiting:
            await asyncio.sleep(0.05)  # a status costs milliseconds
            with suppress(NodeError):
                waiting = (await node.status())["waiting_for"]
