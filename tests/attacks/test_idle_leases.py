"""Contributors that are admitted, take leases, and choose what to bring back of them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from support.counting_environment import counting_task, question
from support.hostile import Rogue, altered
from support.lease_attacks import FAILURE, Contributor, failed
from support.swarm import Swarm
from support.waiting import until

from primerl.node.trainer.lease_book import MAX_FREE_RETURNS
from primerl.protocol.rollouts import GroupRecord

SOON = 60.0


@asynccontextmanager
async def run_of(directory: Path, model: Path, **settings: Any) -> AsyncGenerator[Swarm]:
    """A run without an end, in which one honest worker has proved itself."""
    async with Swarm(directory, model, max_steps=100_000, **settings) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("honest")
        await swarm.wait_step(2)
        yield swarm


@asynccontextmanager
async def abusing(rogue: Contributor, how: str) -> AsyncGenerator[None]:
    """A contributor earns its place, and abuses it while the block lasts."""
    await rogue.earn_groups(2)
    task = asyncio.create_task(getattr(rogue, how)())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_that_answers_with_failures_rests_and_its_tasks_are_done_by_others(
    tmp_path: Path, model_dir: Path
) -> None:
    """Before, it burnt a run's tasks as fast as they were leased, at full trust and without a rest."""
    async with run_of(tmp_path, model_dir) as swarm, Contributor(swarm, "burner") as burner:
        burnt: set[int] = set()
        await burner.earn_groups(2)
        while "rests" not in burner.obstacle:
            for lease, sealed in await burner.take():
                burnt |= {task.index for task in lease.tasks}
                groups = tuple(failed(lease, task) for task in lease.tasks)
                await burner.submit(burner.bundle(sealed, groups), lease.lease_id)
            await asyncio.sleep(0.02)
        assert burnt
        prompts = {tuple(question(counting_task(index))) for index in burnt}
        await until(lambda: prompts <= swarm.fakes.prompts("honest"), SOON)


async def test_a_worker_that_hands_leases_back_is_named_and_rests(
    tmp_path: Path, model_dir: Path
) -> None:
    async with run_of(tmp_path, model_dir) as swarm, Contributor(swarm, "looker") as looker:
        async with abusing(looker, "look"):
            await until(lambda: "rests" in looker.obstacle, SOON)
        assert looker.taken <= 4 * (MAX_FREE_RETURNS + 2)
        version = (await swarm.trainer.status())["version"]
        await swarm.wait_step(version + 3, SOON)


async def test_the_ticket_whose_keys_answer_with_nothing_is_named_and_a_newcomer_gets_its_turn(
    tmp_path: Path, model_dir: Path
) -> None:
    """Before, a lease that came back with failures alone counted as kept."""
    rollouts = {"lease_timeout_s": 4.0}
    async with run_of(tmp_path, model_dir, rollouts=rollouts) as swarm, AsyncExitStack() as stack:
        for number in range(11):
            rogue = await stack.enter_async_context(Rogue(swarm, f"idle {number}"))
            await rogue.hello()
            lease, sealed = await rogue.lease()
            groups = tuple(failed(lease, task) for task in lease.tasks)
            await rogue.submit(rogue.bundle(sealed, groups), lease.lease_id)
            await rogue.verdict(lease.lease_id)
        await warned(swarm, "ticket revoke")
        newcomer = swarm.add_worker("late")
        await swarm.until_row(newcomer, lambda row: row["accepted"] > 0, SOON)


async def warnings(swarm: Swarm) -> list[str]:
    return (await swarm.trainer.status())["warnings"]


async def warned(swarm: Swarm, words: str) -> str:
    """Wait for a warning with these words; return it."""
    async with asyncio.timeout(SOON):
        while True:
            for warning in await warnings(swarm):
                if words in warning:
                    return warning
            await asyncio.sleep(0.05)


async def test_contributors_that_play_the_cheap_environment_alone_do_not_move_the_mixture(
    tmp_path: Path, model_dir: Path
) -> None:
    """Before, six of them moved a mixture of 1:1 to 25:1, with full credit."""
    environments = [{"id": "reverse-text", "name": "cheap"}, {"id": "arithmetic", "name": "dear"}]
    async with (
        run_of(tmp_path, model_dir, environments=environments) as swarm,
        AsyncExitStack() as stack,
    ):
        for number in range(3):
            rogue = await stack.enter_async_context(
                Contributor(swarm, f"cheap {number}", environments=(0,))
            )
            await rogue.hello()
            task = asyncio.create_task(rogue.work_at_pace_of("honest"))
            stack.callback(task.cancel)
        version = (await swarm.trainer.status())["version"]
        await swarm.wait_step(version + 8, SOON)
        before = await accepted(swarm)
        await swarm.wait_step(version + 24, SOON)
        after = await accepted(swarm)
        cheap, dear = (after[name] - before[name] for name in ("cheap", "dear"))
        assert cheap < 1.7 * dear, (before, after)
        await warned(swarm, "play 'cheap' alone")  # whenever the cheap one is a batch ahead


async def accepted(swarm: Swarm) -> dict[str, int]:
    """Return the accepted rollouts by environment."""
    rows = (await swarm.trainer.status())["environments"]
    return {row["name"]: row["accepted"] for row in rows}


async def test_a_worker_that_takes_back_its_right_answers_shifts_no_rewards_and_is_named(
    tmp_path: Path, model_dir: Path
) -> None:
    """Before, 90 of 240 rollouts were withdrawn by their reward at full trust, and the others trained."""
    rollouts = {"lease_timeout_s": 4.0}  # after each loss it rests for a quarter of that
    async with (
        run_of(tmp_path, model_dir, rollouts=rollouts) as swarm,
        Contributor(swarm, "chooser") as chooser,
    ):
        await chooser.earn_groups(1)
        async with asyncio.timeout(SOON):
            while not (named := [one for one in await warnings(swarm) if "takes back" in one]):
                for lease, sealed in await chooser.take():
                    groups = map(without_right, await chooser.play(lease))
                    await chooser.submit(chooser.bundle(sealed, groups), lease.lease_id)
                    await chooser.verdict(lease.lease_id)
                await asyncio.sleep(0.02)
        assert chooser.key.node_id.hex()[:12] in named[0]
        before, withdrawn = await withdrawals(swarm), 0
        async with asyncio.timeout(SOON):
            while await withdrawals(swarm) <= before + withdrawn:  # its other answers go, too
                for lease, sealed in await chooser.take():
                    groups = [without_right(group) for group in await chooser.play(lease)]
                    withdrawn += sum(
                        bool(rollout.error) for group in groups for rollout in group.rollouts
                    )
                    await chooser.submit(chooser.bundle(sealed, groups), lease.lease_id)
                    await chooser.verdict(lease.lease_id)
                await asyncio.sleep(0.02)


async def withdrawals(swarm: Swarm) -> int:
    """Count the rollouts that the trainer rejected as taken back."""
    return (await swarm.trainer.status())["rejected"].get("withdrawn", 0)


def without_right(group: GroupRecord) -> GroupRecord:
    """Take back the rollouts with a reward."""
    for index, rollout in enumerate(group.rollouts):
        if rollout.reward:
            group = altered(group, index, branches=(), reward=0.0, error=FAILURE)
    return group
