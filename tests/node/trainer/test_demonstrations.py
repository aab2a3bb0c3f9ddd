"""Teachers: what one reads of a task's right reply, and what one behind an endpoint says of tokens."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.chat_model import make_chat_model
from support.counting_environment import CountingEnvironment
from support.openai_server import Server, openai_server, refused
from support.training_cases import group

from primerl.node.config.chat_api import ChatApiConfig
from primerl.node.config.run import EnvironmentConfig
from primerl.node.config.training import TrainingConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.environments.chat_api import open_api
from primerl.node.environments.environment import Task
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.errors import RunFailed, UsageError
from primerl.node.trainer.demonstrations import Demonstrations, Hints, Teacher
from primerl.node.training.advantages import credit
from primerl.node.training.backend import Sample

TEMPLATE = "The answer is {demonstration}. Say {it} yourself."


class Answerless(CountingEnvironment):
    """Nobody knows its answers."""

    async def demonstration(self, task: Task) -> None:
        """See Environment."""
        return None


async def test_samples_get_the_right_reply_of_their_own_task_as_a_system_message(
    tmp_path: Path,
) -> None:
    model_dir = make_chat_model(tmp_path)
    environment = VerifiersEnvironment(
        EnvironmentConfig(id="reverse-text"),
        model_dir=model_dir,
        seed=0,
        max_tokens=16,
        temperature=1.0,
    )
    await environment.start()
    chat = ChatFormat.load(model_dir)
    hints = Hints(TEMPLATE, chat, {"reverse-text": environment})
    await hints.check()
    groups = [
        replace(group([0.0, 1.0], task=task.digest), task_index=index)
        for index, task in [(n, await environment.task(n)) for n in (3, 8)]
    ]
    for one in groups:  # every branch has a list of its own, as where it is received
        one.rollouts[:] = [
            replace(r, branches=[replace(b, token_ids=[*b.token_ids]) for b in r.branches])
            for r in one.rollouts
        ]
    samples = credit(groups, TrainingConfig()).samples
    found = await Demonstrations(hints=hints).added_to(samples, groups)
    for number, index in enumerate((3, 8)):
        text = bytes((await environment.prompt(await environment.task(index)))[1:-2]).decode()
        wanted = f"<|system|>The answer is {text[::-1]}. Say {{it}} yourself.<|im_end|>"
        for one in found[2 * number : 2 * number + 2]:
            assert chat.shown(one.hint, special=True) == wanted
    assert [replace(one, hint=[]) for one in found] == samples

    other = replace(groups[0], task=bytes(32))  # a task that is another one here
    assert await hints.of(other) == []
    await environment.close()


async def test_an_environment_without_right_replies_is_named_at_the_start(tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path))
    hints = Hints(TEMPLATE, chat, {"mine": Answerless()})
    with pytest.raises(UsageError, match="'mine' have no right reply"):
        await hints.check()
    assert await hints.of(replace(group([0.0, 1.0]), environment="mine", task_index=0)) == []


# -- a teacher behind an endpoint ------------------------------------------------------------------

Scores = Callable[[list[int]], list[Any] | None]


def logprob(token: int) -> float:
    return -token / 1000


def scores_of(tokens: list[int]) -> list[Any]:
    """As vLLM gives them, of a vocabulary of bytes: nothing for the first token."""
    found = [{str(one): {"logprob": logprob(one), "decoded_token": chr(one)}} for one in tokens]
    return [None, *found[1:]]


@asynccontextmanager
async def teacher(
    scores: Scores = scores_of, down: int = 0, of: str = "sums"
) -> AsyncGenerator[tuple[Teacher, Server]]:
    """A teacher of the samples of one environment; its server fails `down` times first."""
    left = [down]

    def answer(body: dict[str, Any]) -> web.Response:
        if left[0]:
            left[0] -= 1
            return refused(503, "loading")
        return web.json_response({"choices": [{"prompt_logprobs": scores(body["prompt"])}]})

    async with openai_server(answer) as server:
        config = ChatApiConfig(url=server.url, model="big", retries=0, concurrency=2)
        async with open_api(config, "") as api:
            yield Teacher(config, api, {of}, pauses_s=(0.001,)), server


def drawn(*tokens: int, environment: str = "sums") -> Sample:
    mask = [False, *[True] * (len(tokens) - 1)]
    return Sample([*tokens], mask, [0.0] * len(tokens), 0.0, environment=environment)


async def test_a_teacher_says_the_logprobs_of_the_tokens_that_were_drawn_once_it_is_up() -> None:
    samples = [drawn(5, 6, 7), drawn(9, 8), drawn(3, 4, environment="words")]
    async with teacher(down=3) as (subject, server):
        found = await Demonstrations(teachers=[subject]).added_to(samples, [])
    assert [one.reference for one in found] == [[0.0, -0.006, -0.007], [0.0, -0.008], []]
    assert [replace(one, reference=[]) for one in found] == samples
    asked = {"model": "big", "prompt_logprobs": 0, "max_tokens": 1}
    assert all({k: v for k, v in one.items() if k != "prompt"} == asked for one in server.bodies)
    assert server.most <= 2


async def test_each_environment_is_taught_by_its_own_teacher() -> None:
    samples = [drawn(5, 6), drawn(3, 4, environment="words"), drawn(7, 8, environment="games")]
    async with teacher() as (one, first), teacher(of="words") as (other, second):
        found = await Demonstrations(teachers=[one, other]).added_to(samples, [])
    assert [it.reference for it in found] == [[0.0, -0.006], [0.0, -0.004], []]
    assert [it["prompt"] for it in first.bodies] == [[5, 6]]
    assert [it["prompt"] for it in second.bodies] == [[3, 4]]


def entries(*scores: tuple[int, object]) -> list[Any]:
    return [None, *[{str(token): {"logprob": score}} for token, score in scores]]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (entries((6, -1.0)), "scores 2 tokens of 3"),
        (entries((1, -1.0), (7, -1.0)), "no valid logprob of token 6"),
        (entries((6, -1.0), (7, 0.5)), "no valid logprob of token 7"),
        (entries((6, "x"), (7, -1.0)), "another form than vLLM's"),
        (None, "serve the model by vLLM"),
    ],
)
async def test_a_teacher_that_says_something_else_ends_the_run(
    found: list[Any] | None, said: str
) -> None:
    async with teacher(lambda _: found) as (subject, _):
        with pytest.raises(RunFailed, match=said):
            await subject.scored([drawn(5, 6, 7)])


async def test_a_teacher_of_other_tokens_is_refused_at_the_start(tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path))
    async with teacher() as (subject, _):
        await subject.check(chat)

    def shifted(tokens: list[int]) -> list[Any]:
        return [
            None,
            *[{str(t): {"logprob": -1.0, "decoded_token": chr(t + 1)}} for t in tokens[1:]],
        ]

    async with teacher(shifted) as (subject, _):
        with pytest.raises(UsageError, match=r"tokens of the teacher at .* differ"):
            await subject.check(chat)
    async with teacher(down=1) as (subject, _):
        with pytest.raises(UsageError, match="503"):
            await subject.check(chat)
