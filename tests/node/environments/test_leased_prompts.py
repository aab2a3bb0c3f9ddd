"""Tasks that come with a lease: what the signed lease asks is what is played and checked, and nothing else."""

from collections.abc import Sequence

import msgspec
import pytest
from support.protocol_cases import LEASE, PROMPTED_LEASE, PROMPTS

from primerl.node.environments.allowed import find_package
from primerl.node.environments.environment import (
    Branch,
    EnvironmentFailed,
    Score,
    ScoreMismatch,
    Task,
)
from primerl.node.environments.leased_prompts import LeasedPrompts, of_lease
from primerl.node.environments.policies import PlayFailed
from primerl.node.inference.engine import Completion
from primerl.protocol.leases import LEASED_PROMPTS, Lease, TaskRef

PROMPT = [11, 12, 13]
REFERENCE = PROMPTED_LEASE.tasks[0]
TASK = Task(REFERENCE.index, REFERENCE.digest)


async def draws(prompt: Sequence[int], turn: int) -> Completion:
    return Completion([len(prompt), 9], [-0.5, -0.25], "stop", 0, 0, proof=b"p")


def branch(token_ids: list[int], sampled: list[bool]) -> Branch:
    return Branch(token_ids, sampled, [0.0] * len(token_ids), 0, 0, "stop")


async def test_a_prompt_of_the_lease_is_answered_once_and_earns_nothing() -> None:
    environment = of_lease(LeasedPrompts(), PROMPTED_LEASE)
    tasks = [await environment.task(one.index) for one in PROMPTED_LEASE.tasks]
    assert [one.digest for one in tasks] == [one.digest for one in PROMPTED_LEASE.tasks]
    assert await environment.prompt(TASK) == PROMPT
    episode = await environment.run(TASK, draws)
    (played,) = episode.branches
    assert played.token_ids == [*PROMPT, 3, 9]
    assert played.sampled == [False] * 3 + [True] * 2
    assert (played.logprobs[3:], played.proof, episode.score.reward) == ([-0.5, -0.25], b"p", 0.0)
    assert await environment.score(TASK, episode.branches) == Score(0.0)


@pytest.mark.parametrize(
    "branches",
    [
        [],
        [branch([*PROMPT, 9], [False] * 3 + [True])] * 2,
        [branch([11, 12, 14, 9], [False] * 3 + [True])],
        [branch(PROMPT, [False] * 3)],
        [branch([*PROMPT, 9], [False, False, True, True])],
        [branch([*PROMPT, 9, 9, 9], [False] * 3 + [True, False, True])],
    ],
    ids=["none", "two", "another prompt", "no reply", "a drawn prompt", "a second turn"],
)
async def test_what_is_not_the_prompt_and_one_reply_is_refused(branches: list[Branch]) -> None:
    with pytest.raises(ScoreMismatch):
        await LeasedPrompts(PROMPTED_LEASE).score(TASK, branches)


@pytest.mark.parametrize(
    "lease",
    [
        LEASE,
        msgspec.structs.replace(PROMPTED_LEASE, prompts=()),
        msgspec.structs.replace(PROMPTED_LEASE, tasks=(TaskRef(1, REFERENCE.digest),)),
    ],
    ids=["none", "left out", "of another number"],
)
async def test_a_task_whose_prompt_the_lease_lacks_fails_and_harms_nobody(lease: Lease) -> None:
    with pytest.raises(EnvironmentFailed, match="primerl-node judge"):
        await LeasedPrompts(lease).task(TASK.index)


async def test_a_prompt_that_was_swapped_is_another_task() -> None:
    swapped = LeasedPrompts(msgspec.structs.replace(PROMPTED_LEASE, prompts=PROMPTS[::-1]))
    assert (await swapped.task(TASK.index)).digest != TASK.digest
    with pytest.raises(ScoreMismatch):
        await swapped.prompt(TASK)


async def test_a_prompt_that_is_no_list_of_tokens_costs_its_rollout() -> None:
    torn = LeasedPrompts(msgspec.structs.replace(PROMPTED_LEASE, prompts=(b"12345", PROMPTS[1])))
    episode = await torn.run(await torn.task(TASK.index), draws)
    assert (episode.branches, "cut short" in episode.error) == ([], True)


async def test_what_the_policy_refuses_costs_the_rollout() -> None:
    async def refuses(prompt: Sequence[int], turn: int) -> Completion:
        raise PlayFailed("too long")

    assert (await LeasedPrompts(PROMPTED_LEASE).run(TASK, refuses)).error == "too long"


def test_no_package_is_imported_for_it() -> None:
    assert find_package(LEASED_PROMPTS) is None
