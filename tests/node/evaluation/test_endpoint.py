"""Models behind an API: played by real tasksets against a real server on this machine."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.openai_server import Answer, Server, chat_completion, openai_server, refused

from primerl.node.app.eval import evaluate
from primerl.node.config.evaluation import EndpointConfig, EvalConfig, EvalSamplingConfig
from primerl.node.environments.chat import CUT, END, Transcript
from primerl.node.environments.chat_api import MAX_BODY_BYTES
from primerl.node.environments.environment import EnvironmentFailed
from primerl.node.environments.policies import PlayFailed
from primerl.node.environments.stop_strings import StopStrings
from primerl.node.errors import NetworkError, UsageError
from primerl.node.evaluation.endpoint import EndpointPolicy, open_endpoint
from primerl.node.evaluation.eval_suite import EvalProgress
from primerl.node.evaluation.evaluator import TurnRequest

KEY = "sk-very-secret"


def asked(text: str = "hello", seed: int = 5) -> TurnRequest:
    prompt = Transcript().prompt([{"role": "user", "content": text}])
    return TurnRequest(tuple(prompt), seed, b"")


SOON = {"retry-after-ms": "1"}
"""Keeps the client from waiting."""


@asynccontextmanager
async def policy(
    answer: Answer, key: str = KEY, **settings: Any
) -> AsyncGenerator[tuple[EndpointPolicy, Server]]:
    """A client, and its server."""
    async with openai_server(answer) as server:
        config = EndpointConfig.model_validate({"url": server.url, "model": "m", **settings})
        sampling = EvalSamplingConfig(temperature=0.5, top_p=0.9, top_k=7)
        async with open_endpoint(config, sampling, 20, key) as opened:
            yield opened, server


async def test_a_reply_is_cut_at_the_strings_of_its_environment() -> None:
    stops = StopStrings(["</b>"], Transcript().piece)
    async with policy(lambda _: chat_completion("it is <b>4</b>, or 5", "length")) as (api, server):
        reply = await api.reply(replace(asked(), stops=stops))
    assert "stop" not in server.bodies[0]
    assert api.text(reply.completion.token_ids) == "it is <b>4</b>"
    assert reply.completion.finish == "stop"


async def test_a_conversation_is_asked_as_openai_asks_it() -> None:
    settings: dict[str, Any] = {
        "max_tokens_field": "max_completion_tokens",
        "options": {"reasoning_effort": "low", "top_k": 9},
    }
    async with policy(lambda _: chat_completion("good day"), **settings) as (api, server):
        reply = await api.reply(asked(seed=(1 << 40) + 5))
    assert server.bodies == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 9,
            "max_completion_tokens": 20,
            "seed": 5,
            "reasoning_effort": "low",
        }
    ]
    assert server.keys == {f"Bearer {KEY}"}
    assert api.text(reply.completion.token_ids) == "good day"
    assert (reply.prompt_tokens, reply.completion_tokens) == (7, 3)
    assert reply.completion.finish == "stop"


async def test_tools_are_described_in_words_and_their_results_are_the_users() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    prompt = Transcript().prompt(talk, [{"type": "function", "function": {"name": "add"}}])
    async with policy(lambda _: chat_completion("2")) as (api, server):
        await api.reply(TurnRequest(tuple(prompt), 5, b""))
    system, *rest = server.bodies[0]["messages"]
    assert (
        '<tools>\n{"type": "function", "function": {"name": "add"}}\n</tools>' in system["content"]
    )
    assert [it["role"] for it in rest] == ["user", "assistant", "user"]
    assert rest[1]["content"] == '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_a_reply_that_was_cut_is_truncated_even_if_it_is_empty() -> None:
    for text in ("half of", None):
        async with policy(lambda _, text=text: chat_completion(text, "length")) as (api, _):
            completion = (await api.reply(asked())).completion
        assert completion.finish == "length"
        assert completion.token_ids[-1] == CUT
        assert api.text(completion.token_ids) == (text or "")


async def test_nothing_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not another API's key, not what an operator set for it, not what machine this is."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-api")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-secret")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Secret: secret\nAuthorization: Bearer secret")
    for key in ("", KEY):
        async with policy(lambda _: chat_completion("a"), key) as (api, server):
            await api.reply(asked())
        ours = {"host", "accept", "accept-encoding", "connection", "content-length"}
        ours |= {"content-type", "user-agent"} | ({"authorization"} if key else set())
        assert server.headers.keys() == ours
        assert server.headers["user-agent"] == "primerl-node"
        assert server.keys == {f"Bearer {key}" if key else ""}


async def test_trouble_is_met_by_asking_again() -> None:
    answers = [
        refused(429, "slow down", **{"Retry-After": "0.2"}),
        refused(503, "overloaded", **SOON),
        web.Response(status=500, text="<html>oops</html>", headers=SOON),
        chat_completion("there"),
    ]
    began = time.monotonic()
    async with policy(lambda _: answers.pop(0)) as (api, server):
        await api.reply(asked())
    assert time.monotonic() - began >= 0.2
    assert len(server.bodies) == 4
    assert len({json.dumps(body) for body in server.bodies}) == 1


async def test_an_api_that_is_down_ends_the_evaluation_with_advice() -> None:
    def down(_: object) -> web.StreamResponse:
        return refused(503, f"overloaded, {KEY}", **SOON)

    async with policy(down, retries=2) as (api, server):
        with pytest.raises(
            NetworkError, match=r"does not work: it answers 503: overloaded, \(key\), 3 times"
        ) as raised:
            await api.reply(asked())
    assert raised.value.__context__ is None, "the package's error holds the key"
    assert len(server.bodies) == 3
    config = EndpointConfig(url=server.url, model="m", retries=0)
    async with open_endpoint(config, EvalSamplingConfig(), 20, KEY) as gone:
        with pytest.raises(NetworkError, match=r"cannot be reached \(ConnectError\), 1 times"):
            await gone.reply(asked())


async def test_an_api_that_never_answers_costs_its_deadline() -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = EndpointConfig(url=f"http://127.0.0.1:{port}/v1", model="m", timeout_s=0.1, retries=0)
    async with open_endpoint(config, EvalSamplingConfig(), 20, KEY) as api:
        with pytest.raises(NetworkError, match=r"no answer within 0\.1 s, 1 times"):
            await api.reply(asked())
    await ended.wait()
    server.close()
    await server.wait_closed()


async def test_a_body_without_an_end_is_not_read_to_it() -> None:
    for status in (200, 400):
        endless = web.Response(body=b" " * (MAX_BODY_BYTES + 1), status=status)
        async with policy(lambda _, endless=endless: endless) as (api, server):
            with pytest.raises(PlayFailed, match="sends more than"):
                await api.reply(asked())
        assert len(server.bodies) == 1


async def test_a_conversation_that_breaks_the_api_fails_alone_while_others_work() -> None:
    asked_for = asyncio.Event()

    def answer(body: dict[str, Any]) -> web.StreamResponse:
        poison = body["messages"][0]["content"] == "poison"
        asked_for.set()
        return (
            refused(500, "cannot", **{"retry-after-ms": "200"})
            if poison
            else chat_completion("fine")
        )

    async with policy(answer, retries=1) as (api, _):
        poisoned = asyncio.create_task(api.reply(asked("poison")))
        await asked_for.wait()
        await api.reply(asked())  # another conversation is answered meanwhile
        with pytest.raises(PlayFailed, match="500: cannot, 2 times"):
            await poisoned


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (
            refused(401, f"bad key {KEY}"),
            r"refuses the key in MY_KEY \(401: bad key \(key\)\).*key_variable",
        ),
        (refused(403, "no"), "refuses the key in MY_KEY"),
        (
            refused(404, "no model m"),
            r"knows no chat completions of the model 'm' \(404: no model m\)",
        ),
        (web.Response(status=302, headers={"Location": "http://x/"}), "usually ends with /v1"),
    ],
    ids=["key", "forbidden", "model", "redirect"],
)
async def test_errors_that_no_attempt_can_mend_are_raised_at_once(
    response: web.Response, message: str
) -> None:
    async with policy(lambda _: response, key_variable="MY_KEY") as (api, server):
        with pytest.raises(UsageError, match=message) as raised:
            await api.reply(asked())
    assert len(server.bodies) == 1
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (refused(400, "context too long"), "400: context too long"),
        (web.json_response({"choices": []}), "without a choice"),
        (web.json_response({"choices": [{"message": 3}]}), "another form"),
        (web.Response(text="hello"), "another form"),
        (chat_completion("x", "content_filter"), "content_filter"),
        (web.Response(body=b"[" * 100_000), "another form"),
    ],
    ids=["too long", "no choice", "no message", "no JSON", "filter", "nested"],
)
async def test_an_answer_that_is_none_fails_its_rollout(
    response: web.Response, message: str
) -> None:
    async with policy(lambda _: response) as (api, server):
        with pytest.raises(PlayFailed, match=message):
            await api.reply(asked())
    assert len(server.bodies) == 1


# -- whole evaluations ----------------------------------------------------------------------------


def reversing(body: dict[str, Any]) -> web.StreamResponse:
    """Reverses what it is told to; gives up at long words, and rambles about words with an `e`."""
    word = body["messages"][-1]["content"].split()[-1]
    if len(word) > 3:
        return refused(400, "too long a word")
    return chat_completion("e" * 30, "length") if "e" in word else chat_completion(word[::-1])


def config(directory: Path, server: Server, **settings: Any) -> EvalConfig:
    endpoint = {"url": server.url, "model": "m", "concurrency": 4, "key_variable": "MY_KEY"}
    environment = {
        "id": "reverse-text",
        "args": {"min_len": 3, "max_len": 4},  # short words come again, and count once
        "prompts": 20,
        "samples": 2,
    }
    return EvalConfig.model_validate(
        {
            "output_dir": directory,
            "endpoints": [endpoint],
            "environments": [environment],
            **settings,
        }
    )


@pytest.mark.slow
async def test_an_api_is_evaluated_and_not_asked_twice(tmp_path: Path) -> None:
    seen: list[EvalProgress] = []
    async with openai_server(reversing) as server:
        wanted = config(tmp_path, server)
        (cell,) = await evaluate(wanted, watch=seen.append, environ={"MY_KEY": KEY})
        again = await evaluate(wanted, watch=seen.append, environ={"MY_KEY": KEY})
        assert again == [cell]
        assert server.most <= 4
    told = cell.figures
    asked = 2 * told.prompts
    assert len(server.bodies) == asked
    assert (10 < told.prompts <= 20, told.samples) == (True, 2), (
        "a short word that comes again counts once"
    )
    assert 0 < told.failed < 1
    assert told.reasons == {
        "the API refuses the conversation, 400: too long a word": round(told.failed * asked)
    }
    rows = [
        json.loads(line) for line in (tmp_path / "eval" / cell.rollouts).read_text().splitlines()
    ]
    solved = [row for row in rows if row["metrics"].get("exact")]
    assert told.passes["1"].value == len(solved) / asked > 0
    assert all(row["completion_tokens"] == 3 for row in rows if not row["error"])
    assert told.truncated == sum(row["reply"].startswith("eee") for row in rows) / asked > 0
    assert [one.found for one in seen].count(True) == 1
    files = "".join(p.read_text() for p in (tmp_path / "eval").rglob("*") if p.is_file())
    assert KEY not in files


def guessing(body: dict[str, Any]) -> web.StreamResponse:
    """Counts up as long as it is told `higher`."""
    hints = [one["content"] for one in body["messages"] if one["role"] == "user"][1:]
    assert hints == ["higher"] * len(hints)
    said_before = [one["content"] for one in body["messages"] if one["role"] == "assistant"]
    assert said_before == [str(3 + number) for number in range(len(hints))]
    return chat_completion(str(3 + len(hints)))


@pytest.mark.slow
async def test_an_api_plays_games_of_several_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "environments" / "tasksets")
    game = {"id": "guess_game", "prompts": 2, "samples": 3}
    async with openai_server(guessing) as server:
        (cell,) = await evaluate(
            config(tmp_path, server, environments=[game]),
            watch=_nothing,
            environ={"MY_KEY": KEY},
        )
    assert cell.figures.reasons == {}
    assert cell.figures.passes["1"].value == 1.0
    assert cell.figures.metrics == {"guesses": 3.0, "solved": 1.0}
    assert cell.figures.completion_mean == 9.0
    assert cell.figures.prompts == 2, "all 30 games are there, as none is trained on"
    assert len(server.bodies) == 18


@pytest.mark.slow
async def test_an_evaluation_asks_the_judge_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "environments" / "tasksets")

    def answer(body: dict[str, Any]) -> web.StreamResponse:
        text = body["messages"][-1]["content"]
        if body["model"] == "grader":
            return chat_completion("yes" if text[-1] in "13579" else "no")
        return chat_completion(text)

    async with openai_server(answer) as server:
        judge = {"url": server.url, "model": "grader", "key_variable": "JUDGE_KEY"}
        graded = {"id": "graded", "prompts": 20, "samples": 1, "judge": judge}
        keys = {"MY_KEY": "sk-model", "JUDGE_KEY": KEY}
        wanted = config(tmp_path, server, environments=[graded])
        (cell,) = await evaluate(wanted, watch=_nothing, environ=keys)
    assert cell.figures.reasons == {}
    asked_for = [one["messages"][-1]["content"] for one in server.bodies if one["model"] == "m"]
    assert cell.figures.avg.value == sum(text[-1] in "13579" for text in asked_for) / 20 > 0
    assert server.keys == {"Bearer sk-model", f"Bearer {KEY}"}
    assert await asyncio.to_thread((tmp_path / "eval" / "judge.db").is_file)


@pytest.mark.slow
async def test_an_evaluation_that_broke_off_goes_on_where_it_was_and_anew_where_it_samples_otherwise(
    tmp_path: Path,
) -> None:
    down = False

    def answer(body: dict[str, Any]) -> web.StreamResponse:
        return refused(404, "gone") if down and body["model"] == "b" else reversing(body)

    async with openai_server(answer) as server:
        endpoints = [{"url": server.url, "model": name} for name in ("a", "b")]
        wanted = config(tmp_path, server, endpoints=endpoints)
        down = True
        with pytest.raises(UsageError, match="'b'"):
            await evaluate(wanted, watch=_nothing, environ={})
        results = json.loads((tmp_path / "eval" / "results.json").read_text())
        assert [cell["model"] for cell in results["cells"]] == ["a"]
        down, before = False, len(server.bodies)
        cells = await evaluate(wanted, watch=_nothing, environ={})
        assert [cell.model for cell in cells] == ["a", "b"]
        asked = 2 * cells[1].figures.prompts
        assert len(server.bodies) == before + asked
        other = config(tmp_path, server, endpoints=endpoints[:1], sampling={"temperature": 0.0})
        await evaluate(other, watch=_nothing, environ={})
    assert len(server.bodies) == before + 2 * asked


async def test_a_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with openai_server(reversing) as server:
        for environ in ({}, {"MY_KEY": ""}, {"MY_KEY": "two\nlines"}):
            with pytest.raises(UsageError, match="environment variable MY_KEY"):
                await evaluate(config(tmp_path, server), watch=_nothing, environ=environ)
    assert server.bodies == []


def _nothing(progress: EvalProgress) -> None:
    pass


@pytest.mark.parametrize(
    "url", ["ftp://x/v1", "http://user:pass@x/v1", "http://x/v1?key=1", "x/v1", "http://x:0/v1"]
)
def test_a_url_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="an endpoint is http"):
        EndpointConfig(url=url, model="m")


# -- transcripts ----------------------------------------------------------------------------------


def test_a_transcript_is_read_back_as_it_was_written() -> None:
    chat = Transcript()
    opening = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "h\u00e9 \U0001f600?"},
    ]
    prompt = chat.prompt(opening)
    assert chat.messages(prompt) == opening
    reply = chat.reply("yes")
    more = [{"role": "user", "content": ""}]
    longer = [*prompt, *reply, *chat.continuation(more, reply[-1])]
    assert chat.messages(longer) == [*opening, {"role": "assistant", "content": "yes"}, *more]
    cut: Sequence[int] = [*map(ord, "ye"), CUT]
    assert chat.messages([*prompt, *cut, *chat.continuation(more, CUT)])[2]["content"] == "ye"
    assert chat.text(reply) == "yes"
    assert chat.stop_token_ids == (END,)


def test_what_an_api_cannot_be_sent_is_refused() -> None:
    for message in ({"role": "oracle", "content": "x"}, {"role": "user", "content": [1]}):
        with pytest.raises(EnvironmentFailed, match="text messages"):
            Transcript().prompt([message])
