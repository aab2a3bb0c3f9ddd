"""The train client of `verifiers`, which renders chats itself and talks in token ids, on a small model."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from support.api_cases import KEY, NAME, api
from support.engine_cases import FP32, STOP, make_qwen3, reference_logprobs, started
from verifiers.v1.clients.client import Client, resolve_client
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError

from primerl.node.inference.hf import HfEngine
from primerl.node.weights.state import State

PROMPT = [259, *b"abc", STOP, 260]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    import torch

    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    return directory, make_qwen3(directory, 3)


@pytest.fixture
async def client(
    model: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Client]:
    monkeypatch.setenv("API_KEY", KEY)
    engine = await started(HfEngine(FP32), *model)
    try:
        async with api(engine, model[0], key_variable="API_KEY") as server:
            found = resolve_client(
                vf.TrainClientConfig(
                    base_url=f"{server.url}/v1",
                    api_key_var="API_KEY",
                    renderer_model_name=str(model[0]),
                    multiplex=1,
                )
            )
            yield found
            await found.close()
    finally:
        await engine.close()


async def ask(client: Client, text: str, **sampling: Any) -> Any:
    body = {"model": NAME, "messages": [{"role": "user", "content": text}]}
    return await client.get_response(ChatDialect(), body, vf.SamplingConfig(**sampling))


async def test_it_gets_the_tokens_and_the_logprobs_that_a_trainer_learns_from(
    client: Client, model: tuple[Path, State]
) -> None:
    response = await ask(client, "abc", temperature=0.7, top_p=1.0, max_tokens=12, seed=3)
    tokens = response.tokens
    assert tokens.prompt_ids == PROMPT
    assert 0 < len(tokens.completion_ids) <= 12
    whole = [*PROMPT, *tokens.completion_ids]
    wanted = reference_logprobs(*model, whole, 0.7)[len(PROMPT) :]
    assert tokens.completion_logprobs == pytest.approx(wanted, abs=1e-5)
    assert response.finish_reason in ("stop", "length")
    again = await ask(client, "abc", temperature=0.7, max_tokens=12, seed=3)
    assert again.tokens.completion_ids == tokens.completion_ids


async def test_what_it_must_not_send_twice_is_an_error_that_it_knows(client: Client) -> None:
    with pytest.raises(ProviderError, match="maximum context length"):
        await ask(client, "x" * 300, max_tokens=4)
    with pytest.raises(vf.RolloutError, match="repetition_penalty"):
        await ask(client, "abc", max_tokens=4, repetition_penalty=0.0)
