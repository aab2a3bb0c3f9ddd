"""Nothing is credited that no audit could have looked at, and a verdict outlives a killed trainer."""

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.counting_environment import STOP, counting_task, question, right_reply
from support.hostile import Rogue, say
from support.swarm import Swarm

from primerl.node.p2p.rpc import Refused
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease
from primerl.protocol.manifests import PolicyHead
from primerl.protocol.messages import GetHeads, GetVerdicts, Heads, Verdicts
from primerl.protocol.rollouts import GroupRecord, RolloutRecord, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEADLINE = 60.0


def forged(lease: Lease, head: PolicyHead) -> tuple[GroupRecord, ...]:
    """The work of a lease without any model: texts typed in, proofs of a state that never was."""
    fake = msgspec.structs.replace(head, version=lease.min_version, state=b"\x07" * 32)
    groups: list[GroupRecord] = []
    for reference in lease.tasks:
        task = counting_task(reference.index)
        prompt, right = question(task), right_reply(task)
        rollouts: list[RolloutRecord] = []
        for index in range(lease.group_size):
            wrong = [5 + (lease.lease_id * 7 + index) % 50, 4 + index, STOP]
            said = wrong if index % 2 else right
            rollouts.append(RolloutRecord((say(prompt, said, fake),), float(said == right), ""))
        groups.append(GroupRecord(reference.index, reference.digest, tuple(rollouts)))
    return tuple(groups)


async def wait_version(rogue: Rogue, version: int) -> PolicyHead:
    """The first head that is seen of `version` or a newer one."""
    async with asyncio.timeout(DEADLINE):
        while True:
            head = await rogue.head()
            if head.version >= version:
                return head
            await asyncio.sleep(0.005)


async def head_of(rogue: Rogue, version: int) -> PolicyHead:
    """The head of one version."""
    reply = await rogue.ask(GetHeads(version - 1), Heads)
    sealed = (notice.head for notice in reply.notices)
    heads = [unseal(one, Purpose.HEAD, PolicyHead, now=0).body for one in sealed]
    return next(head for head in heads if head.version == version)


async def verdicts_on(rogue: Rogue, lease_id: int) -> list[Verdict]:
    """All verdicts on the work of one lease."""
    reply = await rogue.ask(GetVerdicts(0), Verdicts)
    opened = [unseal(one, Purpose.VERDICT, Verdict, now=0).body for one in reply.verdicts]
    return [one for one in opened if one.lease_id == lease_id]


async def again_judged(swarm: Swarm, before: dict[str, Any]) -> None:
    """Wait until a trainer that was resumed has judged all that it had judged before, as it did."""
    async with asyncio.timeout(DEADLINE):
        while True:
            now = await swarm.trainer.status()
            if (now["accepted"], now["rejected"]) == (before["accepted"], before["rejected"]):
                return
            await asyncio.sleep(0.01)


async def trust(swarm: Swarm, rogue: Rogue) -> float:
    """Trust in the rogue, as the trainer shows it."""
    rows = {row["id"]: row for row in await swarm.trainer.peers()}
    return rows[rogue.key.node_id.hex()]["trust"]


def reasons(verdict: Verdict) -> set[Reason]:
    """Why rollouts were rejected."""
    return {one.reason for one in verdict.rejections}


async def work_of_an_older_version(swarm: Swarm, rogue: Rogue) -> tuple[Lease, bytes, PolicyHead]:
    """A lease of the version before the newest, as the trainer is killed: (lease, sealed, its head)."""
    await rogue.hello()
    lease, sealed = await rogue.lease()
    head = await head_of(rogue, lease.min_version)
    swarm.fakes.last_step = head.version + 1
    await wait_version(rogue, head.version + 1)
    await swarm.crash_worker("honest")
    await swarm.crash_trainer()
    return lease, sealed, head


@asynccontextmanager
async def attacked(
    tmp_path: Path, model_dir: Path, name: str, *, lease_s: float = 60.0, step: int = 2
) -> AsyncGenerator[tuple[Swarm, Rogue]]:
    """A run with an honest worker, and a rogue from a step on.

    Leases live as long as a test, and no worker that holds one is waited for.
    """
    rollouts = {"lease_timeout_s": lease_s, "max_peer_share": 1.0}
    async with Swarm(tmp_path, model_dir, max_steps=4000, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("honest")
        await swarm.wait_step(step)
        async with Rogue(swarm, name) as rogue:
            yield swarm, rogue


async def test_no_trust_is_earned_by_waiting_until_a_version_is_not_held_any_more(
    tmp_path: Path, model_dir: Path
) -> None:
    # a newcomer's second lease comes after a quarter of a lease's time
    async with attacked(tmp_path, model_dir, "farmer", lease_s=20.0, step=1) as (swarm, farmer):
        await farmer.hello()
        lease, sealed = await farmer.lease()
        head = await wait_version(farmer, lease.min_version + 5)
        await farmer.submit(farmer.bundle(sealed, forged(lease, head)), lease.lease_id)
        verdict = await farmer.verdict(lease.lease_id)
        assert (verdict.accepted, reasons(verdict)) == (0, {Reason.STALE})
        assert await trust(swarm, farmer) == 0.5
        lease, sealed = await farmer.lease()
        bundle = farmer.bundle(sealed, forged(lease, await farmer.head()))
        await farmer.submit(bundle, lease.lease_id)
        verdict = await farmer.verdict(lease.lease_id)
        assert (verdict.accepted, verdict.audited) == (0, verdict.rejected)
        assert Reason.STALE not in reasons(verdict)


async def test_a_forgery_of_a_version_from_before_a_kill_is_audited_after_it(
    tmp_path: Path, model_dir: Path
) -> None:
    async with attacked(tmp_path, model_dir, "patient") as (swarm, rogue):
        lease, sealed, head = await work_of_an_older_version(swarm, rogue)
        await swarm.start_trainer(resume=True)
        await rogue.submit(rogue.bundle(sealed, forged(lease, head)), lease.lease_id)
        verdict = await rogue.verdict(lease.lease_id)
        assert (verdict.accepted, verdict.audited) == (0, verdict.rejected)
        assert Reason.STALE not in reasons(verdict)
        rows = {row["id"]: row for row in await swarm.trainer.peers()}
        assert rows[rogue.key.node_id.hex()]["accepted"] == 0


async def test_honest_work_of_a_version_from_before_a_kill_is_audited_and_accepted_after_it(
    tmp_path: Path, model_dir: Path
) -> None:
    async with attacked(tmp_path, model_dir, "late") as (swarm, rogue):
        lease, sealed, head = await work_of_an_older_version(swarm, rogue)
        await swarm.start_trainer(resume=True)
        groups = tuple(rogue.group(lease, task, head) for task in lease.tasks)
        await rogue.submit(rogue.bundle(sealed, groups), lease.lease_id)
        verdict = await rogue.verdict(lease.lease_id)
        assert verdict.accepted == verdict.audited == len(groups) * lease.group_size


async def test_what_the_store_cannot_rebuild_is_stale_and_costs_no_trust(
    tmp_path: Path, model_dir: Path
) -> None:
    async with attacked(tmp_path, model_dir, "late") as (swarm, rogue):
        lease, sealed, head = await work_of_an_older_version(swarm, rogue)
        shutil.rmtree(swarm.trainer.data_dir / "chunks")
        await swarm.start_trainer(resume=True)
        groups = tuple(rogue.group(lease, task, head) for task in lease.tasks)
        await rogue.submit(rogue.bundle(sealed, groups), lease.lease_id)
        verdict = await rogue.verdict(lease.lease_id)
        assert (verdict.accepted, reasons(verdict)) == (0, {Reason.STALE})
        assert await trust(swarm, rogue) == 0.5


async def test_a_ban_and_its_verdict_outlive_a_trainer_killed_before_the_next_checkpoint(
    tmp_path: Path, model_dir: Path
) -> None:
    async with attacked(tmp_path, model_dir, "lucky") as (swarm, rogue):
        await rogue.hello()
        lease, sealed = await rogue.lease()
        newest = await wait_version(rogue, lease.min_version + 1)
        await swarm.crash_worker("honest")
        await rogue.submit(rogue.bundle(sealed, forged(lease, newest)), lease.lease_id)
        verdict = await rogue.verdict(lease.lease_id)
        assert verdict.accepted == 0
        with pytest.raises(Refused, match="banned"):
            await rogue.poll(1)
        before = await swarm.trainer.status()
        await swarm.crash_trainer()
        await swarm.start_trainer(resume=True)
        await again_judged(swarm, before)
        with pytest.raises(Refused, match="banned"):
            await rogue.poll(1)
        assert await verdicts_on(rogue, lease.lease_id) == [verdict]
