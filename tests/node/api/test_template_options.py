"""What a request may say to the model's chat template, and what it may not."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from api_cases import NAME, Client, Reply, SayingEngine, api
from chat_model import COMPACT, make_chat_model

from primerl.node.environments.chat import ChatFormat

THINKING = (
    "{%- set ns = namespace(mark='<think>') -%}"
    "{%- for m in messages[:range(9)|length] -%}<|{{ m.role }}|>{{ m.content }}<|im_end|>{%- endfor -%}"
    "{%- if reasoning_effort is defined -%}<|system|>{{ reasoning_effort }}<|im_end|>{%- endif -%}"
    "{%- if add_generation_prompt -%}<|assistant|>"
    "{%- if enable_thinking is defined and enable_thinking is false -%}<think></think>{%- endif -%}"
    "{%- endif -%}"
)


@pytest.fixture
def engine() -> SayingEngine:
    return SayingEngine()


@pytest.fixture
async def client(engine: SayingEngine, tmp_path: Path) -> AsyncIterator[Client]:
    async with api(engine, make_chat_model(tmp_path, THINKING), max_length=1024) as client:
        yield client


def prompt(engine: SayingEngine) -> str:
    """What the engine was asked with last."""
    return bytes(token for token in engine.requests[-1].prompt if token < 256).decode()


def test_a_template_says_what_it_asks_for(tmp_path: Path) -> None:
    assert ChatFormat.load(make_chat_model(tmp_path / "a", THINKING)).options == {
        "enable_thinking",
        "reasoning_effort",
    }
    assert ChatFormat.load(make_chat_model(tmp_path / "b", COMPACT)).options == frozenset()


async def test_an_option_changes_the_prompt_and_nothing_else(
    engine: SayingEngine, client: Client
) -> None:
    assert (await client.chat()).status == 200
    assert prompt(engine) == "hi"
    assert (await client.chat(chat_template_kwargs={"enable_thinking": False})).status == 200
    assert prompt(engine) == "hi<think></think>"
    for same in ({"enable_thinking": True}, {"enable_thinking": None}, {}, None):
        assert (await client.chat(chat_template_kwargs=same)).status == 200
        assert prompt(engine) == "hi"


async def test_reasoning_effort_is_told_to_a_template_that_asks_for_it(
    engine: SayingEngine, client: Client
) -> None:
    assert (await client.chat(reasoning_effort="high")).status == 200
    assert prompt(engine) == "hihigh"
    both: dict[str, Any] = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert (await client.chat(reasoning_effort="high", **both)).status == 200
    assert prompt(engine) == "hilow"


async def test_the_openai_client_says_it_by_extra_body(
    engine: SayingEngine, client: Client
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none") as user:
        await user.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "hi"}],
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    assert prompt(engine) == "hi<think></think>"


REFUSED: list[tuple[Any, str]] = [
    ({"thinking": True}, "chat_template_kwargs"),
    ({"messages": "others"}, "chat_template_kwargs"),
    ({"add_generation_prompt": False}, "chat_template_kwargs"),
    ({"eos_token": "x"}, "chat_template_kwargs"),
    ({"namespace": "x"}, "chat_template_kwargs"),
    ({"enable_thinking": []}, "chat_template_kwargs.enable_thinking"),
    ({"enable_thinking": {"a": 1}}, "chat_template_kwargs.enable_thinking"),
    ({"enable_thinking": "x" * 5000}, "chat_template_kwargs.enable_thinking"),
    ([["enable_thinking", False]], "chat_template_kwargs"),
    ({str(number): 1 for number in range(99)}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("value", "param"), REFUSED, ids=lambda one: str(one)[:30])
async def test_what_the_template_does_not_ask_for_is_refused(
    engine: SayingEngine, client: Client, value: Any, param: str
) -> None:
    reply: Reply = await client.chat(chat_template_kwargs=value)
    assert reply.status == 400
    assert reply.error["param"] == param
    assert engine.requests == []


async def test_a_completion_has_no_template(engine: SayingEngine, client: Client) -> None:
    for field in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
    ):
        reply = await client.complete(**field)
        assert reply.status == 400
        assert "only chats" in reply.error["message"]
    assert engine.requests == []
