"""Rewards that ask a model: a real server and the library's own Judge, well behaved and not."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from support import fake_environment_process as fake
from support.chat_model import IM_END, make_chat_model
from support.counting_environment import STOP
from support.openai_server import Answer, Server, chat_completion, openai_server, refused
from support.waiting import until

from primerl.node.config.chat_api import JudgeConfig
from primerl.node.config.run import EnvironmentConfig, RunConfig
from primerl.node.config.sandbox import SandboxConfig, WorkerSandboxConfig
from primerl.node.environments.allowed import environment_contracts, options_of
from primerl.node.environments.chat_api import MAX_BODY_BYTES
from primerl.node.environments.environment import Environment, EnvironmentFailed, Episode
from primerl.node.environments.hosted import MOST_QUESTIONS, HostedEnvironment
from primerl.node.environments.judge_model import (
    ANSWERS,
    MAX_REQUEST,
    PROBE,
    TRIES,
    JudgeModel,
    Judges,
)
from primerl.node.environments.policies import (
    EpisodeStuck,
    Exchange,
    JudgeRefused,
    episode_judge,
)
from primerl.node.environments.sandbox import Sandbox
from primerl.node.environments.trial import EnvironmentTrial, TrialOptions
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.errors import UsageError
from primerl.node.inference.engine import Completion

TASKSETS = Path(__file__).parent / "tasksets"
KEY = "sk-very-secret"


def request(text: str, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def answered(completion: bytes) -> str:
    return json.loads(completion)["choices"][0]["message"]["content"]


def asked(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


@asynccontextmanager
async def judge(
    directory: Path, answer: Answer, **settings: Any
) -> AsyncGenerator[tuple[JudgeModel, Server]]:
    async with openai_server(answer) as server:
        told = {"url": server.url, "model": "m", "retries": 0, "key_variable": "K", **settings}
        config = JudgeConfig.model_validate(told)
        model = JudgeModel(config, KEY, directory / ANSWERS, pauses_s=(0.01,))
        await model.start()
        try:
            yield model, server
        finally:
            await model.close()


async def test_the_environments_code_decides_the_messages_alone(tmp_path: Path) -> None:
    told = {"model": "gpt-dear", "temperature": 1.5, "n": 64, "user": "x", "seed": 3}
    schema = {"type": "json_object"}
    async with judge(tmp_path, lambda _: chat_completion("yes"), max_tokens=50) as (model, server):
        await model.ask(request("a", **told, response_format=schema, max_completion_tokens=9))
        await model.ask(request("b", max_tokens=10**9, stop=["."]))
    fixed = {"model": "m", "temperature": 0.0}
    assert server.bodies == [
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": schema,
            "max_tokens": 9,
            **fixed,
        },
        {
            "messages": [{"role": "user", "content": "b"}],
            "stop": ["."],
            "max_tokens": 50,
            **fixed,
        },
    ]
    assert server.keys == {f"Bearer {KEY}"}


async def test_equal_requests_get_equal_answers_also_after_a_restart(tmp_path: Path) -> None:
    count = iter(range(100))

    def fickle(_: object) -> web.StreamResponse:
        return chat_completion(f"answer {next(count)}")

    async with judge(tmp_path, fickle) as (model, server):
        same = await asyncio.gather(*(model.ask(request("a")) for _ in range(20)))
        assert {answered(one) for one in same} == {"answer 0"}
        assert answered(await model.ask(request("b"))) == "answer 1"
        assert len(server.bodies) == 2
    async with judge(tmp_path, fickle) as (model, server):
        assert answered(await model.ask(request("a"))) == "answer 0"
        assert server.bodies == []
    async with judge(tmp_path, fickle, model="another") as (model, server):
        assert answered(await model.ask(request("a"))) == "answer 2"
    kept = await asyncio.to_thread((tmp_path / ANSWERS).read_bytes)
    assert b"answer 2" in kept
    assert KEY.encode() not in kept


async def hangs(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60.0)
    return chat_completion("late")


@pytest.mark.parametrize(
    ("trouble", "shown"),
    [
        (refused(503, f"overloaded, {KEY}"), r"it answers 503: overloaded, \(key\)"),
        (refused(401, "no"), "refuses the key in K"),
        (refused(400, "no such parameter"), "400: no such parameter"),
        (web.Response(text="yes"), "another form than OpenAI's"),
        (web.json_response({"choices": []}), "without a choice"),
        (web.Response(body=b" " * (MAX_BODY_BYTES + 1)), f"more than {MAX_BODY_BYTES} bytes"),
        (None, r"no answer within 0\.2 s"),
    ],
    ids=["down", "key", "refuses", "garbage", "nothing", "endless", "hangs"],
)
async def test_a_judge_that_does_not_answer_is_waited_for_and_named(
    tmp_path: Path, trouble: web.Response | None, shown: str
) -> None:
    """However it fails: nothing is lost by it, and once it works all that waited is answered."""
    works = False
    async with openai_server(lambda _: chat_completion("yes")) as server:
        handle = server.handle

        async def handler(request: web.Request) -> web.StreamResponse:
            if works:
                return await handle(request)
            if trouble is None:
                return await hangs(request)
            body = trouble.body
            assert isinstance(body, bytes)
            await request.read()
            return web.Response(status=trouble.status, body=body)

        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        config = JudgeConfig(url=url, model="m", retries=0, timeout_s=0.2, key_variable="K")
        model = JudgeModel(config, KEY, tmp_path / ANSWERS, pauses_s=(0.01,))
        await model.start()
        try:
            waiting = [asyncio.create_task(model.ask(request(str(n)))) for n in range(5)]
            await until(lambda: model.fault)
            for _ in range(20):  # many more tries than a conversation has
                await asyncio.sleep(0.02)
            assert not any(task.done() for task in waiting)
            assert "rollouts wait for it: " in model.fault
            assert KEY not in model.fault
            assert re.search(shown, model.fault), model.fault
            works = True
            assert [answered(one) for one in await asyncio.gather(*waiting)] == ["yes"] * 5
            assert model.fault == ""
        finally:
            await model.close()
            await runner.cleanup()


async def test_a_conversation_that_breaks_the_judge_is_refused_and_holds_up_nothing(
    tmp_path: Path,
) -> None:
    def answer(body: dict[str, Any]) -> web.StreamResponse:
        return refused(500, "cannot") if asked(body) == "poison" else chat_completion("fine")

    async with judge(tmp_path, answer) as (model, server):
        with pytest.raises(JudgeRefused, match=f"failed {TRIES} times on this.*500: cannot"):
            await model.ask(request("poison"))
        assert answered(await model.ask(request("hello"))) == "fine"
        assert model.fault == ""
    assert [asked(body) for body in server.bodies].count("poison") == TRIES
    assert asked(server.bodies[1]) == PROBE[0]["content"]


async def test_a_judge_that_asks_for_patience_gets_it(tmp_path: Path) -> None:
    """A rate limit may hit one conversation many times while others get through: it is no refusal."""
    left = 3 * TRIES

    def answer(body: dict[str, Any]) -> web.StreamResponse:
        nonlocal left
        left -= asked(body) == "unlucky"
        return (
            refused(429, "slow") if asked(body) == "unlucky" and left else chat_completion("fine")
        )

    async with judge(tmp_path, answer) as (model, _):
        assert answered(await model.ask(request("unlucky"))) == "fine"


async def test_no_more_is_asked_at_a_time_than_the_config_says(tmp_path: Path) -> None:
    async with judge(tmp_path, lambda _: chat_completion("yes"), concurrency=3) as (model, server):
        await asyncio.gather(*(model.ask(request(str(number))) for number in range(30)))
    assert server.most == 3


@pytest.mark.parametrize(
    "hostile",
    [
        b"x" * (MAX_REQUEST + 1),
        b"{",
        b"[]",
        b"[" * 100_000,
        b'{"messages": 3}',
        request("a", stream=True),
    ],
    ids=["long", "cut", "list", "nested", "no messages", "stream"],
)
async def test_what_is_no_chat_completion_is_not_sent_on(tmp_path: Path, hostile: bytes) -> None:
    async with judge(tmp_path, lambda _: chat_completion("yes")) as (model, server):
        with pytest.raises(JudgeRefused):
            await model.ask(hostile)
    assert server.bodies == []


# -- environments that have one -------------------------------------------------------------------


async def test_waiting_for_the_judge_does_not_count_towards_a_deadline() -> None:
    async def slow(_: bytes) -> bytes:
        await asyncio.sleep(0.3)
        return b"{}"

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        raise NotImplementedError

    token = episode_judge.set(slow)
    exchange = Exchange(policy, max_tokens=1, stop_token_ids=(), deadline=0.1)
    episode_judge.reset(token)
    async with exchange.bounded():
        ask = episode_judge.get()
        assert ask is not None
        assert await ask(b"") == b"{}"
    with pytest.raises(EpisodeStuck):
        async with exchange.bounded():
            await asyncio.sleep(60.0)


async def plays(environment: Environment, text: str) -> Episode:
    ids = [*text.encode(), IM_END]

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        return Completion(ids, [-1.0] * len(ids), "stop", 0, 0)

    return await environment.run(await environment.task(0), policy)


@asynccontextmanager
async def moody(directory: Path, url: str, moods: str) -> AsyncGenerator[HostedEnvironment]:
    """A process whose task i is scored as word i of `moods` says, and its judge."""
    told = {"url": url, "model": "m", "retries": 0}
    config = EnvironmentConfig.model_validate(
        {"id": "moody", "args": {"moods": moods}, "judge": told, "timeout_s": 1.0}
    )
    environment = HostedEnvironment(
        config,
        model_dir=None,
        seed=0,
        max_tokens=4,
        temperature=1.0,
        judges=Judges([config], directory),
        program=(sys.executable, fake.__file__),
    )
    try:
        await environment.start()
        yield environment
    finally:
        await environment.close()


async def says_one(prompt: Sequence[int], turn: int) -> Completion:
    return Completion([40, STOP], [-1.0, -1.0], "stop", 0, 0)


async def test_a_rollout_waits_for_its_judge_beyond_the_deadline_of_its_code(
    tmp_path: Path,
) -> None:
    down = True

    def answer(_: object) -> web.StreamResponse:
        return refused(503, "overloaded") if down else chat_completion("yes")

    async with (
        openai_server(answer) as server,
        moody(tmp_path, server.url, "judged good") as environment,
    ):
        judged, good = [await environment.task(index) for index in range(2)]
        waiting = asyncio.create_task(environment.run(judged, says_one))
        await until(lambda: environment.judge_fault)
        await asyncio.sleep(1.5)
        assert "503: overloaded" in environment.status
        assert (await environment.run(good, says_one)).score.reward == 1.0
        assert not waiting.done()
        down = False
        assert (await waiting).score.reward == 1.0
        assert environment.status == environment.judge_fault == ""


async def test_code_that_floods_the_judge_costs_its_rollout_alone(tmp_path: Path) -> None:
    async with (
        openai_server(lambda _: chat_completion("yes")) as server,
        moody(tmp_path, server.url, "floods judged") as environment,
    ):
        flood, judged = [await environment.task(index) for index in range(2)]
        lost, won = await asyncio.gather(
            environment.run(flood, says_one), environment.run(judged, says_one)
        )
        assert f"{MOST_QUESTIONS} questions at a time at most" in lost.error
        assert (won.error, won.score.reward) == ("", 1.0)


@pytest.mark.slow
async def test_a_worker_plays_without_the_judge_and_the_trainer_scores_what_it_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setenv("MY_GRADER", KEY)
    down = True

    def answer(body: dict[str, Any]) -> web.StreamResponse:
        if down:
            return refused(503, "overloaded")
        told = {"hello": "yes", "go away": "no"}
        return chat_completion(
            told.get(asked(body).partition(" no. ")[2], "I would rather not say")
        )

    model_dir = make_chat_model(tmp_path / "model")
    async with openai_server(answer) as server:
        told = {"url": server.url, "model": "m", "key_variable": "MY_GRADER", "retries": 0}
        config = EnvironmentConfig.model_validate({"id": "graded", "judge": told})
        limits: dict[str, Any] = {"seed": 0, "max_tokens": 16, "temperature": 1.0}
        worker = VerifiersEnvironment(config.published(), model_dir=model_dir, **limits)
        await worker.start()
        played = {text: await plays(worker, text) for text in ("hello", "go away", "hm")}
        assert [(one.error, one.score.reward) for one in played.values()] == [("", 0.0)] * 3
        assert server.bodies == []
        sandbox = Sandbox(SandboxConfig(network=False, processes=0))
        trainer = HostedEnvironment(
            config,
            model_dir=model_dir,
            sandbox=sandbox,
            judges=Judges([config], tmp_path),
            **limits,
        )
        try:
            await trainer.start()
            task = await trainer.task(0)
            polite = asyncio.create_task(trainer.score(task, played["hello"].branches))
            await until(lambda: trainer.judge_fault)
            assert "503: overloaded" in trainer.status
            assert not polite.done()
            down = False
            assert (await polite).reward == 1.0
            assert trainer.status == trainer.judge_fault == ""
            rude = await trainer.score(task, played["go away"].branches)
            assert (rude.reward, rude.metrics) == (0.0, {"polite": 0.0})
            with pytest.raises(EnvironmentFailed, match="I would rather not say"):
                await trainer.score(task, played["hm"].branches)
            assert (await plays(trainer, "hello")).score.reward == 1.0, "evaluations are judged"
            assert (await plays(trainer, "$MY_GRADER")).score.reward == 0.0, "its code sees the key"
            assert (await plays(trainer, "$PATH")).score.reward == 1.0
        finally:
            await trainer.close()
    assert server.keys == {f"Bearer {KEY}"}


def test_a_manifest_names_the_judge_and_not_the_way_to_it() -> None:
    told = {"url": "http://judge.example/v1", "model": "grader-7b", "key_variable": "MY_KEY"}
    plain = RunConfig.model_validate({"environment": {"id": "reverse-text"}})
    config = RunConfig.model_validate({"environment": {"id": "reverse-text", "judge": told}})
    (contract,), (before,) = environment_contracts(config), environment_contracts(plain)
    assert (contract.rewards, before.rewards) == ("sampled", "recomputed")
    assert b"grader-7b" in contract.config
    assert b"judge" not in before.config
    for secret in (b"judge.example", b"MY_KEY"):
        assert secret not in contract.config
    options = options_of(contract)
    assert options.judge is not None
    assert (options.judge.model, options.judge.temperature) == ("grader-7b", 0.0)


def test_a_manifest_cannot_make_a_worker_send_a_variable_anywhere() -> None:
    config = RunConfig.model_validate({"environment": {"id": "reverse-text"}})
    (contract,) = environment_contracts(config)
    told = json.loads(contract.config)
    told["judge"] = {"url": "http://thief/v1", "model": "m", "key_variable": "AWS_SECRET_KEY"}
    hostile = msgspec.structs.replace(contract, config=json.dumps(told).encode())
    options = options_of(hostile)
    assert options.judge is not None
    assert (options.judge.url, options.judge.key_variable) == ("", "")


def test_a_judge_that_cannot_be_reached_is_an_error_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the judge of 'x' has no url: set environment"):
        RunConfig.model_validate({"environment": {"id": "x", "judge": {"model": "m"}}})
    told = {"url": "http://h/v1", "model": "m", "key_variable": "MY_KEY"}
    config = EnvironmentConfig.model_validate({"id": "x", "judge": told})
    with pytest.raises(UsageError, match="in the environment variable MY_KEY, which holds none"):
        Judges([config], tmp_path, {})


@pytest.mark.slow
async def test_what_the_judges_client_runs_is_no_fault_of_the_environment_that_is_tested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    async with openai_server(lambda _: chat_completion("yes")) as server:
        told = {"id": "graded", "judge": {"url": server.url, "model": "m"}}
        trial = EnvironmentTrial(
            TrialOptions(
                environment=EnvironmentConfig.model_validate(told),
                sandbox=WorkerSandboxConfig(),
                tasks=1,
                model=None,
                seed=0,
                limit_s=300.0,
                replies=("hello",),
            )
        )
        await trial.run()
    assert server.bodies
    assert [check.name for check in trial.checks if check.problem] == []
    assert [rollout.reward for rollout in trial.rollouts] == [1.0]
