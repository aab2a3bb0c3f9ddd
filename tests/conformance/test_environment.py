"""What every environment promises, for all of them."""

import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support import counting_environment
from support.chat_model import make_chat_model
from support.counting_environment import STOP, CountingEnvironment, shown_reply

from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments.environment import Branch, Environment, Policy, ScoreMismatch
from primerl.node.environments.hosted import HostedEnvironment
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.inference.engine import Completion

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["counting", "reverse-text", "arithmetic", "hosted"],
)
async def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Environment]:
    made: Environment = CountingEnvironment()
    told: dict[str, Any] = {"seed": 0, "max_tokens": 16, "temperature": 1.0}
    if request.param == "hosted":
        program = (sys.executable, counting_environment.__file__)
        config = EnvironmentConfig(id="counting")
        made = HostedEnvironment(config, model_dir=Path(), program=program, **told)
    elif request.param != "counting":
        model = make_chat_model(tmp_path_factory.mktemp("chat"))
        made = VerifiersEnvironment(EnvironmentConfig(id=request.param), model_dir=model, **told)
    await made.start()
    yield made
    await made.close()


async def stop_of(environment: Environment) -> int:
    return (await shown_reply(environment, await environment.task(0)))[-1]


def saying(
    token_ids: list[int], *, finish: str = "stop", versions: tuple[int, int] = (3, 4)
) -> Policy:
    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        assert turn == 0
        return Completion(
            token_ids=list(token_ids),
            logprobs=[-0.5 - i for i in range(len(token_ids))],
            finish="stop" if finish == "stop" else "length",
            policy_first=versions[0],
            policy_last=versions[1],
        )

    return policy


async def play_first_task(
    environment: Environment, token_ids: list[int] | None = None
) -> list[Branch]:
    task = await environment.task(0)
    reply = await shown_reply(environment, task) if token_ids is None else token_ids
    return (await environment.run(task, saying(reply))).branches


async def test_a_task_number_always_names_the_same_task(environment: Environment) -> None:
    assert await environment.task(7) == await environment.task(7)
    assert len({(await environment.task(i)).digest for i in range(50)}) == 50
    assert len((await environment.task(7)).digest) == 32


async def test_splits_share_no_prompt(environment: Environment) -> None:
    prompts = {
        split: {
            tuple(await environment.prompt(await environment.task(i, split))) for i in range(100)
        }
        for split in ("train", "eval")
    }
    assert not prompts["train"] & prompts["eval"]


async def test_a_demonstration_earns_the_full_reward(environment: Environment) -> None:
    for index in range(5):
        task = await environment.task(index)
        shown = await shown_reply(environment, task)
        episode = await environment.run(task, saying(shown))
        assert episode.error == ""
        assert episode.score.reward == 1.0
        assert episode.score.metrics["exact"] == 1.0


async def test_a_wrong_reply_earns_nothing(environment: Environment) -> None:
    stop = await stop_of(environment)
    for reply in ([stop], [3, stop], [5, 5, 5, stop]):
        episode = await environment.run(await environment.task(1), saying(reply))
        assert (episode.score.reward, episode.error) == (0.0, "")


async def test_an_episode_holds_prompt_and_reply_with_the_engines_logprobs_and_versions(
    environment: Environment,
) -> None:
    task, stop = await environment.task(2), await stop_of(environment)
    prompt = await environment.prompt(task)
    seen: list[list[int]] = []
    answer = saying([4, stop])

    async def policy(shown: Sequence[int], turn: int) -> Completion:
        seen.append(list(shown))
        return await answer(shown, turn)

    (branch,) = (await environment.run(task, policy)).branches
    assert seen == [prompt]
    assert branch.token_ids == [*prompt, 4, stop]
    assert branch.sampled == [False] * len(prompt) + [True, True]
    assert branch.logprobs == [0.0] * len(prompt) + [-0.5, -1.5]
    assert (branch.policy_first, branch.policy_last, branch.finish) == (3, 4, "stop")


async def test_a_score_recomputed_from_tokens_is_the_score_of_the_run(
    environment: Environment,
) -> None:
    task, stop = await environment.task(0), await stop_of(environment)
    shown = await shown_reply(environment, task)
    for reply, finish in ((shown, "stop"), ([6, stop], "stop"), ([6, 7], "length")):
        episode = await environment.run(task, saying(reply, finish=finish))
        assert await environment.score(task, episode.branches) == episode.score


async def test_the_claimed_logprobs_and_versions_do_not_touch_the_score(
    environment: Environment,
) -> None:
    (branch,) = await play_first_task(environment)
    forged = replace(branch, logprobs=[0.0] * len(branch.logprobs), policy_first=0)
    assert (await environment.score(await environment.task(0), [forged])).reward == 1.0


async def test_tokens_of_another_task_are_refused(environment: Environment) -> None:
    prompt = await environment.prompt(await environment.task(0))
    tasks = [await environment.task(index) for index in range(1, 100)]
    others = [task for task in tasks if await environment.prompt(task) != prompt]
    with pytest.raises(ScoreMismatch):
        await environment.score(others[0], await play_first_task(environment))


async def test_a_forged_prompt_is_refused(environment: Environment) -> None:
    (branch,) = await play_first_task(environment)
    forged = replace(branch, token_ids=[*branch.token_ids[:1], 9, *branch.token_ids[2:]])
    with pytest.raises(ScoreMismatch):
        await environment.score(await environment.task(0), [forged])


async def test_an_answer_smuggled_into_the_prompt_is_refused(environment: Environment) -> None:
    (branch,) = await play_first_task(environment)
    end = branch.sampled.index(True)
    claimed = [*branch.sampled[:end], False, *branch.sampled[end + 1 :]]
    with pytest.raises(ScoreMismatch):
        await environment.score(await environment.task(0), [replace(branch, sampled=claimed)])


@pytest.mark.parametrize("count", [0, 2])
async def test_missing_and_repeated_branches_are_refused(
    environment: Environment, count: int
) -> None:
    branches = await play_first_task(environment)
    with pytest.raises(ScoreMismatch):
        await environment.score(await environment.task(0), branches * count)


async def test_malformed_branches_are_refused(environment: Environment) -> None:
    (branch,) = await play_first_task(environment)
    cut = branch.sampled.index(True)
    for bad in (
        replace(branch, logprobs=branch.logprobs[1:]),
        replace(branch, sampled=[True] * len(branch.sampled)),
        replace(branch, sampled=[False] * len(branch.sampled)),
        replace(branch, token_ids=[], sampled=[], logprobs=[]),
        replace(branch, finish="length"),
        Branch(branch.token_ids[:cut], [False] * cut, [0.0] * cut, 0, 0, "stop"),
    ):
        with pytest.raises(ScoreMismatch):
            await environment.score(await environment.task(0), [bad])


async def test_a_reply_that_goes_on_after_its_end_is_no_completion(
    environment: Environment,
) -> None:
    task, stop = await environment.task(0), await stop_of(environment)
    reply = [5, stop, 5, stop]
    assert "stop token" in (await environment.run(task, saying(reply))).error
    prompt = await environment.prompt(task)
    forged = Branch(
        token_ids=[*prompt, *reply],
        sampled=[False] * len(prompt) + [True] * 4,
        logprobs=[0.0] * (len(prompt) + 4),
        policy_first=0,
        policy_last=0,
        finish="stop",
    )
    with pytest.raises(ScoreMismatch, match="stop token"):
        await environment.score(task, [forged])


async def test_a_reply_longer_than_the_contract_allows_is_an_error(
    environment: Environment,
) -> None:
    episode = await environment.run(await environment.task(0), saying([5] * 500, finish="length"))
    assert episode.branches == []
    assert "tokens in one completion" in episode.error


async def test_a_task_with_other_content_is_refused(environment: Environment) -> None:
    branches = await play_first_task(environment)
    foreign = replace(await environment.task(0), digest=bytes(32))
    with pytest.raises(ScoreMismatch, match="other content"):
        await environment.score(foreign, branches)
    assert "other content" in (await environment.run(foreign, saying([STOP]))).error


async def test_what_the_policy_raises_comes_through(environment: Environment) -> None:
    class EngineDied(Exception):
        pass

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        raise EngineDied

    with pytest.raises(EngineDied):
        await environment.run(await environment.task(0), policy)
