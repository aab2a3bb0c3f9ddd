"""Forwarding to vLLM's routes: allowed requests, refusals, choice of the engine."""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.api_cases import KEY, Client, SayingEngine, api, chat_dir, tool_dir
from support.chat_model import COMPACT
from support.waiting import until

from primerl.node.api.server import ApiLimits
from primerl.node.api.vllm_proxy import PATHS, api_options, merge_metrics
from primerl.node.config.serving import ApiConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.errors import EngineLost
from primerl.node.inference.host_messages import ApiOptions

CHAT = "/v1/chat/completions"


@dataclass
class ScriptedUpstream:
    """Serves on a socket like vLLM; a request's field `do` selects the behaviour."""

    socket: Path
    lost: bool = False
    asked: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    gone: int = 0
    busy: int = 0

    def serve_api(self, options: ApiOptions) -> bool:
        return True

    @contextmanager
    def upstream(self) -> Generator[str]:
        if self.lost:
            raise EngineLost("vLLM died: it is being started again")
        self.busy += 1
        try:
            yield str(self.socket)
        finally:
            self.busy -= 1

    def upstreams(self) -> list[str]:
        return [str(self.socket), str(self.socket)]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response(text='# HELP a b\n# TYPE a gauge\na{engine="0"} 1.0\n')
        body = await request.json()
        self.asked.append((request.path, body))
        self.headers.append(dict(request.headers))
        versions = {"X-Policy-Version": "3-4", "Server": "uvicorn", "X-Secret": "1"}
        do = body.get("do")
        if do == "refuse":
            told = {"message": "no", "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response({"error": told}, status=400)
        if do == "hang":
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                self.gone += 1
                raise
        if not body.get("stream"):
            return web.json_response({"text": "\u00e9", "asked": body}, headers=versions)
        response = web.StreamResponse(headers=versions)
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for number in range(3):
            await response.write(f'data: {{"n": {number}}}\n\n'.encode())
            if do == "die":
                assert request.transport is not None
                request.transport.abort()
            if do == "stall":
                await asyncio.sleep(60.0)
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def upstream(tmp_path: Path) -> AsyncIterator[ScriptedUpstream]:
    made = ScriptedUpstream(tmp_path / "s")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(made.socket)).start()
    yield made
    await runner.cleanup()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def client(upstream: ScriptedUpstream, model_dir: Path) -> AsyncIterator[Client]:
    async with api(SayingEngine("ok"), model_dir, proxied=upstream, timeout_s=5.0) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
async def test_a_request_goes_through_as_it_came_and_its_answer_back(
    client: Client, upstream: ScriptedUpstream, path: str
) -> None:
    body = {"model": "tiny", "response_format": {"type": "json_object"}, "tools": [{}], "x": 1.5}
    reply = await client.post(path, body, Authorization="Bearer of-the-node", Cookie="a=b")
    assert reply.json == {"text": "\u00e9", "asked": body}
    assert reply.headers["X-Policy-Version"] == "3-4"
    assert reply.headers["Server"] == "primerl-node"
    assert "X-Secret" not in reply.headers
    assert upstream.asked == [(path, body)]
    assert {"Authorization", "Cookie"}.isdisjoint(upstream.headers[0])
    assert upstream.busy == 0


async def test_a_stream_comes_as_it_is_and_a_refusal_too(client: Client) -> None:
    reply = await client.chat(stream=True)
    assert reply.events == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert reply.headers["X-Policy-Version"] == "3-4"
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    refused = await client.chat(do="refuse")
    assert (refused.status, refused.error["message"]) == (400, "no")


@pytest.mark.parametrize(
    "path",
    [
        *("/pause", "/sleep", "/reset_prefix_cache", "/collective_rpc", "/update_weights"),
        *("/v1/load_lora_adapter", "/scale_elastic_ep", "/invocations", "/docs", "/openapi.json"),
        *("/v1/chat/../../pause", "/v1/completions/", "//v1/completions"),
    ],
)
async def test_no_other_route_of_vllm_is_reached(
    client: Client, upstream: ScriptedUpstream, path: str
) -> None:
    assert (await client.post(path, {})).status == 404
    assert (await client.get(path)).status == 404
    assert upstream.asked == []


async def test_the_checks_come_before_vllm(
    upstream: ScriptedUpstream, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", KEY)
    engine = SayingEngine()
    limits = ApiLimits(max_body_mib=0.01, max_choices=4)
    async with api(
        engine, model_dir, proxied=upstream, key_variable="API_KEY", limits=limits
    ) as client:
        key = {"Authorization": f"Bearer {KEY}"}
        assert (await client.post(CHAT, {})).status == 401
        assert (await client.post(CHAT, {}, Content_Type="text/plain", **key)).status == 415
        assert (await client.post(CHAT, b"[]", **key)).status == 400
        assert (await client.post(CHAT, {"x": "y" * 20_000}, **key)).status == 413
        assert (await client.post(CHAT, {"model": "other"}, **key)).status == 404
        assert (await client.post(CHAT, {"n": 5}, **key)).status == 400
        prompts = {"prompt": ["a", "b", "c"], "n": 2}
        assert (await client.post("/v1/completions", prompts, **key)).status == 400
        engine.version = -1
        assert (await client.post(CHAT, {}, **key)).status == 503
    assert upstream.asked == []


async def test_room_is_counted_while_vllm_answers(
    upstream: ScriptedUpstream, model_dir: Path
) -> None:
    async with api(
        SayingEngine(), model_dir, proxied=upstream, limits=ApiLimits(max_inflight=3)
    ) as client:
        first = asyncio.create_task(client.chat(n=3, do="hang"))
        await until(lambda: bool(upstream.asked))
        assert (await client.chat()).status == 429
        first.cancel()
        await asyncio.wait([first])
        # the client's leaving reaches the engine
        await until(lambda: bool(upstream.gone and not upstream.busy))
        assert (await client.chat()).status == 200


async def test_a_dead_engine_is_reported_whole_and_streamed(
    client: Client, upstream: ScriptedUpstream
) -> None:
    events = (await client.chat(stream=True, do="die")).events
    assert "vLLM ended" in events[-1]["error"]["message"]
    upstream.lost = True
    reply = await client.chat()
    assert (reply.status, reply.error["type"]) == (503, "server_error")
    assert int(reply.headers["Retry-After"]) > 1
    upstream.lost = False
    upstream.socket.unlink()
    assert (await client.chat()).status == 503


async def test_a_request_beyond_its_deadline_is_given_up(
    upstream: ScriptedUpstream, model_dir: Path
) -> None:
    async with api(SayingEngine(), model_dir, proxied=upstream, timeout_s=0.5) as client:
        assert (await client.chat(do="hang")).status == 504
        events = (await client.chat(stream=True, do="stall")).events
    assert events[0] == {"n": 0}
    assert "not finished in 0.5 s" in events[-1]["error"]["message"]
    assert upstream.busy == 0


async def test_token_ids_models_and_health_are_the_nodes_own(
    client: Client, upstream: ScriptedUpstream
) -> None:
    reply = await client.generate([1, 2])
    assert reply.json["choices"][0]["weight_versions"]
    assert (await client.get("/v1/models")).json["data"][0]["policy_version"] == 7
    assert (await client.get("/health")).json == {"status": "ok", "policy_version": 7}
    assert upstream.asked == []


async def test_metrics_are_those_of_all_engines_and_the_nodes_own(client: Client) -> None:
    text = (await client.get("/metrics")).text
    assert 'a{replica="0",engine="0"} 1.0\na{replica="1",engine="0"} 1.0\n' in text
    assert text.count("# TYPE a gauge") == 1
    assert 'primerl_policy_version{model_name="tiny"} 7' in text


def test_metrics_of_several_engines_keep_each_family_together() -> None:
    text = '# HELP a x\n# TYPE a counter\na 1\n# HELP b y\n# TYPE b histogram\nb_sum{le="1"} 2\n'
    assert merge_metrics([text, text.replace("1\n", "3\n", 1)]) == (
        '# HELP a x\n# TYPE a counter\na{replica="0"} 1\na{replica="1"} 3\n'
        '# HELP b y\n# TYPE b histogram\nb_sum{replica="0",le="1"} 2\nb_sum{replica="1",le="1"} 2\n'
    )
    assert merge_metrics([]) == ""


CALL = "{%- for c in m.tool_calls or [] %}"
FORMS = {
    "hermes": '<tool_call>\n{"name": "{{ c.function.name }}"}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function={{ c.function.name }}></function></tool_call>",
    "glm45": "<tool_call>{{ c.function.name }}\n</tool_call>",
    "deepseek_v3": "<\uff5ctool\u2581call\u2581begin\uff5c>function{{ c.function.name }}",
    "": "{{ c.function.name }}()",
}


@pytest.mark.parametrize("parser", FORMS)
def test_the_parser_of_calls_is_found_by_the_template(tmp_path: Path, parser: str) -> None:
    template = COMPACT.replace("<|im_end|>", CALL + FORMS[parser] + "{%- endfor %}<|im_end|>")
    chat = ChatFormat.load(chat_dir(tmp_path, template=template))
    options = api_options(ApiConfig(), chat, "tiny")
    assert options == ApiOptions("tiny", tool_call_parser=parser)
    none = ApiConfig(tool_call_parser="none", reasoning_parser="deepseek_r1")
    assert api_options(none, chat, "x") == ApiOptions("x", reasoning_parser="deepseek_r1")


def test_reasoning_is_parsed_where_its_mark_is_a_token(tmp_path: Path) -> None:
    chat = ChatFormat.load(tool_dir(tmp_path))
    assert api_options(ApiConfig(), chat, "t") == ApiOptions("t", "hermes", "qwen3")
