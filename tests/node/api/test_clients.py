"""Third-party clients against a small real model: OpenAI's, and the train client of `verifiers`."""

import asyncio
import importlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.api_cases import KEY, NAME, api
from support.engine_cases import FP32, STOP, make_qwen3, reference_logprobs, request, started
from support.late_imports import imported_late

from primerl.node.api.server import ApiLimits
from primerl.node.inference.hf import HfEngine
from primerl.node.weights.state import State

if TYPE_CHECKING:
    import openai
    import verifiers.v1 as vf
    from verifiers.v1.clients.client import Client

late_imports = imported_late(globals(), openai="openai", vf="verifiers.v1")

USER, ASSISTANT = 259, 260
PROMPT = [USER, *b"abc", STOP, ASSISTANT]
MESSAGES: list[Any] = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    import torch

    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    return directory, make_qwen3(directory, 3)


@pytest.fixture
async def engine(model: tuple[Path, State]) -> AsyncIterator[HfEngine]:
    engine = HfEngine(FP32)
    try:
        await started(engine, *model)
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def url(
    engine: HfEngine, model: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[str]:
    monkeypatch.setenv("API_KEY", KEY)
    async with api(
        engine, model[0], key_variable="API_KEY", limits=ApiLimits(stream_tokens=8)
    ) as client:
        yield f"{client.url}/v1"


@pytest.fixture
async def client(url: str) -> "AsyncIterator[openai.AsyncOpenAI]":
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


async def test_openais_client_chats_and_gets_what_the_engine_draws(
    client: "openai.AsyncOpenAI", engine: HfEngine
) -> None:
    answer = await client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        seed=11,
        n=2,
        max_completion_tokens=20,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    prompt = tuple(PROMPT)
    for number, choice in enumerate(answer.choices):
        seed = 11 + number
        drawn = await engine.generate(replace(request(max_tokens=20, seed=seed), prompt=prompt))
        assert choice.model_extra is not None
        assert choice.model_extra["token_ids"] == drawn.token_ids
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        told = [row.logprob for row in choice.logprobs.content]
        assert told == pytest.approx(drawn.logprobs, abs=1e-5)
        assert choice.finish_reason == drawn.finish
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


async def test_a_stream_of_openais_client_is_the_answer_in_one_piece(
    client: "openai.AsyncOpenAI",
) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "seed": 4, "max_tokens": 40}
    asked["extra_body"] = {"ignore_eos": True, "skip_special_tokens": False}
    whole = await client.chat.completions.create(**asked)
    text, usage = "", None
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(**asked, stream=True, stream_options=options)
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == 40


async def test_greedy_completions_repeat_themselves_whatever_the_seed(
    client: "openai.AsyncOpenAI",
) -> None:
    async def ask(**fields: Any) -> str:
        made = await client.completions.create(
            model=NAME, prompt=["abc", "q"], max_tokens=8, **fields
        )
        return "|".join(choice.text for choice in made.choices)

    assert await ask(temperature=0, seed=1) == await ask(temperature=0, seed=2)
    assert await ask(temperature=1, seed=1) != await ask(temperature=1, seed=2)
    greedy = await ask(temperature=0)
    assert await ask(temperature=1.3, extra_body={"top_k": 1}) == greedy
    assert await ask(temperature=1.3, top_p=1e-6) == greedy


async def test_openais_client_knows_our_errors(client: "openai.AsyncOpenAI", url: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match=r"engine\.type = vllm") as caught:
        await client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[tool])
    assert caught.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=MESSAGES)
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    found = await client.models.list()
    assert [one.id for one in found.data] == [NAME]


# -- the train client of `verifiers`, which renders chats itself and talks in token ids ------------


def train_client(url: str, model_dir: Path) -> "vf.TrainClientConfig":
    return vf.TrainClientConfig(
        base_url=url, api_key_var="API_KEY", renderer_model_name=str(model_dir), multiplex=1
    )


@pytest.fixture
async def trainer(url: str, model: tuple[Path, State]) -> "AsyncIterator[Client]":
    from verifiers.v1.clients.client import resolve_client

    found = resolve_client(train_client(url, model[0]))
    yield found
    await found.close()


async def ask(trainer: "Client", text: str, **sampling: Any) -> Any:
    from verifiers.v1.dialects import ChatDialect

    body = {"model": NAME, "messages": [{"role": "user", "content": text}]}
    return await trainer.get_response(ChatDialect(), body, vf.SamplingConfig(**sampling))


async def test_it_gets_the_tokens_and_the_logprobs_that_a_trainer_learns_from(
    trainer: "Client", model: tuple[Path, State]
) -> None:
    response = await ask(trainer, "abc", temperature=0.7, top_p=1.0, max_tokens=12, seed=3)
    tokens = response.tokens
    assert tokens.prompt_ids == PROMPT
    assert 0 < len(tokens.completion_ids) <= 12
    whole = [*PROMPT, *tokens.completion_ids]
    wanted = reference_logprobs(*model, whole, 0.7)[len(PROMPT) :]
    assert tokens.completion_logprobs == pytest.approx(wanted, abs=1e-5)
    assert response.finish_reason in ("stop", "length")
    again = await ask(trainer, "abc", temperature=0.7, max_tokens=12, seed=3)
    assert again.tokens.completion_ids == tokens.completion_ids


async def test_what_it_must_not_send_twice_is_an_error_that_it_knows(trainer: "Client") -> None:
    from verifiers.v1.errors import ProviderError

    with pytest.raises(ProviderError, match="maximum context length"):
        await ask(trainer, "x" * 300, max_tokens=4)
    with pytest.raises(vf.RolloutError, match="repetition_penalty"):
        await ask(trainer, "abc", max_tokens=4, repetition_penalty=0.0)


TASKS = '''
"""A few words to talk about."""
import verifiers.v1 as vf


class Again(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        for text in ("abc", "q", "xyz"):
            yield vf.Task(vf.TaskData(idx=0, name=text, prompt=text), self.config.task)


__all__ = ["Again"]
'''
HARNESS = '''
"""A chat loop in this process, over the interception server."""
import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult


class InProcess(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if reply.status_code != 200:
                    return ProgramResult(1, "", reply.text)
                said = reply.json()["choices"][0]["message"]
                messages += [{"role": "assistant", "content": said["content"] or ""}]
                messages += [{"role": "user", "content": "again"}]
        return ProgramResult(0, "", "")


__all__ = ["InProcess"]
'''


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_rollout_of_two_turns_is_tokens_and_logprobs_of_the_policy(
    tmp_path: Path, url: str, model: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "api_again.py").write_text(TASKS)
    (tmp_path / "api_in_process.py").write_text(HARNESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    importlib.invalidate_caches()
    agent = {"harness": {"id": "api_in_process"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    settings: Any = {"taskset": {"id": "api_again"}, "agent": agent}
    env: Any = vf.load_environment(vf.resolve_env_config(settings))
    context = vf.ModelContext(
        model=NAME,
        client=train_client(url, model[0]),
        sampling=vf.SamplingConfig(temperature=0.8, max_tokens=6),
    )
    async with env.serving():
        limit = asyncio.Semaphore(4)
        episodes = await asyncio.gather(
            *(env.run_slot(env.slots(task)[0], context, limit) for task in env.taskset)
        )
    assert len(episodes) == 3
    for episode in episodes:
        [trace] = episode.traces
        assert episode.ok, [error.message for error in (*episode.errors, *trace.errors)]
        assert trace.num_turns == 2
        for branch in trace.branches:
            wanted = reference_logprobs(*model, branch.token_ids, 0.8)
            pairs = zip(wanted, branch.logprobs, branch.sampled_mask, strict=True)
            drawn = [(own, told) for own, told, sampled in pairs if sampled]
            assert drawn
            assert [told for _, told in drawn] == pytest.approx([own for own, _ in drawn], abs=1e-5)
