"""The server: authentication, limits, timeouts, health and metrics."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import pytest
from support.api_cases import KEY, SayingEngine, api, chat_dir
from support.waiting import until

from primerl.node.api.server import ApiLimits
from primerl.node.config.serving import ApiConfig
from primerl.node.errors import BusyError, EngineError, EngineLost, UsageError
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_dir(tmp_path_factory.mktemp("model"))


# -- authorization ----------------------------------------------------------------------------------


async def test_with_a_key_nobody_without_it_gets_more_than_the_health(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", KEY)
    engine = SayingEngine("ok")
    async with api(engine, model_dir, key_variable="API_KEY") as client:
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            reply = await client.get(path)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
            assert reply.headers["WWW-Authenticate"] == "Bearer"
        for given in ("", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer \u00e9"):
            body = {"prompt": "ab"}
            reply = await client.post("/v1/completions", body, Authorization=given)
            assert reply.status == 401
        assert engine.requests == []
        assert (await client.get("/health")).status == 200
        right = f"Bearer {KEY}"
        reply = await client.post("/v1/completions", {"prompt": "ab"}, Authorization=right)
        assert reply.status == 200
        named = await client.get("/v1/models", Authorization=right, Host="api.example.org")
        assert named.status == 200


@pytest.mark.parametrize("held", ["", " x", "a\nb", "\u00e9"])
async def test_a_variable_that_holds_no_key_is_an_error_at_the_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setenv("API_KEY", held)
    with pytest.raises(UsageError, match="API_KEY, which holds no key"):
        async with api(SayingEngine(), model_dir, key_variable="API_KEY"):
            pass


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ValueError, match=r"set api\.key_variable"):
        ApiConfig(host=host)
    assert ApiConfig(host=host, key_variable="API_KEY").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_alone_needs_none(host: str) -> None:
    assert ApiConfig(host=host).key_variable == ""


async def test_a_name_that_a_web_page_points_at_this_machine_is_refused(model_dir: Path) -> None:
    async with api(SayingEngine(), model_dir) as client:
        reply = await client.get("/v1/models", Host="evil.example.org:8000")
        assert reply.status == 403
        assert (await client.get("/v1/models", Host="localhost:1")).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_what_a_foreign_page_may_send_without_asking_is_not_read(
    model_dir: Path, kind: str
) -> None:
    engine = SayingEngine()
    async with api(engine, model_dir) as client:
        reply = await client.post("/v1/completions", {"prompt": "a"}, Content_Type=kind)
    assert reply.status == 415
    assert engine.requests == []
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]


# -- how much ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"temperature": NaN, "prompt": "a"}',
        b"[" * 100_000,
        b'{"prompt":' * 5000,
    ],
    ids=lambda body: repr(body[:20]),
)
async def test_what_is_no_json_object_is_refused(model_dir: Path, body: bytes) -> None:
    async with api(SayingEngine(), model_dir) as client:
        reply = await client.post("/v1/completions", body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large_is_refused(model_dir: Path) -> None:
    async with api(SayingEngine(), model_dir, limits=ApiLimits(max_body_mib=0.1)) as client:
        reply = await client.complete(prompt="x" * 200_000)
        packed = await client.post("/v1/completions", b"x", Content_Encoding="gzip")
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert packed.status in (400, 415)


@dataclass
class HeldEngine(SayingEngine):
    """Generates nothing until released."""

    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        await self.go.wait()
        return completion


async def test_requests_beyond_the_queue_are_refused_as_busy(model_dir: Path) -> None:
    engine = HeldEngine("ok")
    async with api(engine, model_dir, limits=ApiLimits(max_inflight=3)) as client:
        first = asyncio.create_task(client.complete(n=2))
        await until(lambda: len(engine.requests) == 2)
        refused = await client.complete(n=2)
        streamed = await client.complete(n=2, stream=True)
        fits = asyncio.create_task(client.complete())
        await until(lambda: len(engine.requests) == 3)
        engine.go.set()
        assert (await first).status == (await fits).status == 200
        for reply in (refused, streamed):
            assert (reply.status, reply.error["code"]) == (429, "rate_limit_exceeded")
            assert int(reply.headers["Retry-After"]) >= 1
        assert (await client.complete(n=3)).status == 200  # and there is room again


async def test_a_request_beyond_its_deadline_is_given_up(model_dir: Path) -> None:
    engine = SayingEngine("ok", delay_s=30.0)
    async with api(engine, model_dir, timeout_s=1.0) as client:
        whole = await client.complete()
        assert whole.status == 504
        events = (await client.complete(stream=True)).events
        assert "not finished in 1 s" in events[-1]["error"]["message"]
    assert engine.cancelled == 2


async def test_nothing_is_generated_for_a_client_that_has_gone(model_dir: Path) -> None:
    engine = SayingEngine("ok", delay_s=30.0)
    async with api(engine, model_dir) as client:
        for stream in (False, True):
            asking = asyncio.create_task(client.complete(n=2, stream=stream))
            await until(lambda: len(engine.requests) == 2)
            asking.cancel()
            await asyncio.wait([asking])
            await until(lambda: engine.cancelled == 2)
            engine.requests.clear()
            engine.cancelled = 0
        assert "primerl_inflight" in (await client.get("/metrics")).text
        reply = await client.get("/metrics")
    assert 'primerl_inflight{model_name="tiny"} 0' in reply.text


# -- when the engine cannot ----------------------------------------------------------------------------


async def test_before_there_is_a_policy_everybody_waits(model_dir: Path) -> None:
    engine = SayingEngine("ok", version=-1)
    async with api(engine, model_dir) as client:
        reply, health = await client.complete(), await client.get("/health")
        assert (reply.status, health.status) == (503, 503)
        assert health.json["status"] == "loading"
        engine.version = 4
        assert (await client.complete()).status == 200
        assert (await client.get("/health")).json == {"status": "ok", "policy_version": 4}


async def test_an_engine_that_is_started_again_is_worth_waiting_for(model_dir: Path) -> None:
    engine = SayingEngine(error=EngineLost("vLLM died"), now=EngineStats(fault="vLLM died"))
    async with api(engine, model_dir) as client:
        reply, health = await client.complete(n=2), await client.get("/health")
        assert (reply.status, health.json["status"]) == (503, "failed")
        assert int(reply.headers["Retry-After"]) > 1
        assert 'primerl_engine_up{model_name="tiny"} 0' in (await client.get("/metrics")).text


async def test_an_engine_that_fails_is_an_error_of_the_server(model_dir: Path) -> None:
    async with api(SayingEngine(error=EngineError("no memory")), model_dir) as client:
        reply = await client.chat()
        assert (reply.status, reply.error["type"]) == (500, "server_error")
        events = (await client.chat(stream=True)).events
    assert events[-1]["error"]["message"] == "no memory"


async def test_a_bug_of_ours_is_an_answer_and_a_line_in_the_log(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with api(SayingEngine(error=RuntimeError("oops")), model_dir) as client:
        reply = await client.chat()
    assert (reply.status, reply.error["message"]) == (500, "internal error: see the server's log")
    assert "oops" in caplog.text


# -- what it says of itself ----------------------------------------------------------------------------


async def test_models_version_and_unknown_routes(model_dir: Path) -> None:
    async with api(SayingEngine(), model_dir) as client:
        [card] = (await client.get("/v1/models")).json["data"]
        version = await client.get("/version")
        lost, other = await client.get("/v1/nothing"), await client.get("/v1/completions")
    assert (card["id"], card["max_model_len"], card["policy_version"]) == ("tiny", 256, 7)
    assert version.json["version"]
    assert (lost.status, other.status) == (404, 405)
    assert lost.error["message"]
    assert other.error["message"]
    assert other.headers["Allow"] == "POST"
    assert lost.headers["Server"] == "primerl-node"


@pytest.mark.parametrize("name", ["tiny", "maker/tiny-1b", "my model: 2"])
async def test_a_model_answers_for_its_own_id_and_for_no_other(model_dir: Path, name: str) -> None:
    async with api(SayingEngine(), model_dir, name=name) as client:
        [card] = (await client.get("/v1/models")).json["data"]
        for path in {name, quote(name), quote(name, safe="")}:
            found = await client.get(f"/v1/models/{path}")
            assert (found.status, found.json) == (200, card)
        other = await client.get("/v1/models/other")
    assert (other.status, other.error["code"]) == (404, "model_not_found")


async def test_metrics_count_what_was_served_in_prometheus_words(model_dir: Path) -> None:
    stats = EngineStats(
        running=3,
        waiting=2,
        kv_use=0.25,
        preemptions=4,
        restarts=1,
        drafted_tokens=9,
        accepted_tokens=5,
    )
    async with api(SayingEngine("ok", now=stats), model_dir) as client:
        await client.complete(n=2)
        await client.complete(max_tokens=1)
        await client.chat(n=0)
        reply = await client.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    rows = dict(line.rsplit(" ", 1) for line in reply.text.splitlines() if line[0] != "#")
    told = {
        name.replace('model_name="tiny"', "").replace("{,", "{").replace("{}", ""): float(value)
        for name, value in rows.items()
    }
    assert told["vllm:num_requests_running"] == 3
    assert told["vllm:num_requests_waiting"] == 2
    assert told["vllm:kv_cache_usage_perc"] == 0.25
    assert told["vllm:num_preemptions_total"] == 4
    assert told["vllm:prompt_tokens_total"] == 4
    assert told["vllm:generation_tokens_total"] == 7
    assert told["vllm:spec_decode_num_draft_tokens_total"] == 9
    assert told["vllm:spec_decode_num_accepted_tokens_total"] == 5
    assert told['vllm:request_success_total{finished_reason="stop"}'] == 2
    assert told['vllm:request_success_total{finished_reason="length"}'] == 1
    assert told['primerl_http_requests_total{route="/v1/completions",code="200"}'] == 2
    assert told['primerl_http_requests_total{route="/v1/chat/completions",code="400"}'] == 1
    assert told["primerl_policy_version"] == 7
    assert told["primerl_engine_restarts_total"] == 1


async def test_a_port_that_is_taken_is_said_and_a_free_one_is_freed(model_dir: Path) -> None:
    async with api(SayingEngine(), model_dir) as client:
        port = int(client.url.rsplit(":", 1)[1])
        with pytest.raises(BusyError, match=r"choose another --api\.port"):
            async with api(SayingEngine(), model_dir, port=port):
                pass
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
