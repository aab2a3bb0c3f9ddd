"""Clients that call tools: the text client of `verifiers`, and a small model that has learned to call one."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
import verifiers.v1 as vf
from api_cases import NAME, SayingEngine, api
from engine_cases import FP32, started
from tool_cases import CALL, WEATHER, ids_of, tool_dir
from verifiers.v1.clients.client import resolve_client
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire

from primerl.node.api.text import Text
from primerl.node.engines.hf import HfEngine
from primerl.node.weights.state import State

QUESTION: dict[str, Any] = {"role": "user", "content": "Oslo?"}
THOUGHT = "<think>It has to be looked up.</think>"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_dir(tmp_path_factory.mktemp("model"))


async def test_the_text_client_of_verifiers_calls_a_tool_and_hears_the_answer(
    model_dir: Path,
) -> None:
    first, second = ids_of(model_dir, THOUGHT + CALL), ids_of(model_dir, "Rain, 8 degrees.")

    def choose(engine: SayingEngine) -> None:
        told = b"8 degrees" in bytes(one for one in engine.requests[-1].prompt if one < 256)
        engine.token_ids, engine.after = second if told else first, None

    async with api(SayingEngine(on_request=choose), model_dir, max_length=1024) as server:
        client = resolve_client(
            vf.EvalClientConfig(base_url=f"{server.url}/v1", api_key_var="NOBODY_SETS_THIS")
        )

        async def turn(messages: list[Any]) -> Any:
            body = {"model": NAME, "messages": messages, "tools": [WEATHER]}
            return await client.get_response(ChatDialect(), body, vf.SamplingConfig(max_tokens=200))

        called = await turn([QUESTION])
        [call] = called.message.tool_calls
        gave = {"role": "tool", "tool_call_id": call.id, "content": "8 degrees"}
        answered = await turn([QUESTION, message_to_wire(called.message), gave])
        await client.close()
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    assert called.finish_reason == "tool_calls"
    assert called.message.reasoning_content == "It has to be looked up."
    assert (answered.message.content, answered.finish_reason) == ("Rain, 8 degrees.", "stop")


def taught(model_dir: Path, prompt: list[int], reply: list[int]) -> State:
    """The weights of a model that has learned one reply to one prompt by heart."""
    import torch

    from primerl.node import models

    torch.set_num_threads(1)
    model: Any = models.load_model(model_dir).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor([[*prompt, *reply]])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    for _ in range(300):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        if loss < 0.02:
            return models.policy_state(model)
        loss.backward()
        optimizer.step()
    raise AssertionError("it learns nothing")


@pytest.mark.slow
async def test_a_model_that_has_learned_to_call_calls_through_the_embedded_engine(
    model_dir: Path,
) -> None:
    prompt = list(await Text.load(model_dir).prompt([QUESTION], [WEATHER]))
    state = taught(model_dir, prompt, ids_of(model_dir, THOUGHT + CALL))
    engine = await started(HfEngine(FP32.model_copy(update={"max_model_len": 512})), model_dir)
    try:
        await engine.load(0, state)
        async with api(engine, model_dir, max_length=512) as server:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
                asked: dict[str, Any] = {"messages": [QUESTION], "tools": [WEATHER]}
                made: Any = await client.chat.completions.create(model=NAME, temperature=0, **asked)
    finally:
        await engine.close()
    [choice] = made.choices
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert choice.finish_reason == "tool_calls"
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning"] == "It has to be looked up."
