"""The client that people have, OpenAI's own, against a real small model."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from support.api_cases import KEY, NAME, api
from support.engine_cases import FP32, STOP, make_qwen3, request, started

from primerl.node.inference.hf import HfEngine
from primerl.node.weights.state import State

USER, ASSISTANT = 259, 260
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
    async with api(engine, model[0], key_variable="API_KEY", stream_tokens=8) as client:
        yield f"{client.url}/v1"


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


async def test_openais_client_chats_and_gets_what_the_engine_draws(
    client: openai.AsyncOpenAI, engine: HfEngine
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
    prompt = (USER, *b"abc", STOP, ASSISTANT)
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
    client: openai.AsyncOpenAI,
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
    client: openai.AsyncOpenAI,
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


async def test_openais_client_knows_our_errors(client: openai.AsyncOpenAI, url: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError, match="an engine of type vllm") as caught:
        await client.chat.completions.create(model=NAME, messages=MESSAGES, tools=[tool])
    assert caught.value.param == "tools"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=MESSAGES)
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    found = await client.models.list()
    assert [one.id for one in found.data] == [NAME]
