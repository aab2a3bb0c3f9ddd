"""`primerl-node chat`: real models of this machine, and a server, asked the same."""

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.openai_server import Server, chat_completion, openai_server, refused
from support.run_weights import make_run

from .conftest import Ask, Cli


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with the weights of two steps, in an `outputs`."""
    return make_run(tmp_path_factory.mktemp("chat") / "outputs" / "run").parent


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server that says how often it was asked, and a control sequence of terminals."""
    async with openai_server(
        lambda body: chat_completion(f"\x1b[2J{len(body['messages'])} messages")
    ) as opened:
        yield opened


def replies(cli: Cli, *args: str) -> list[list[dict[str, Any]]]:
    """Run `chat --json`; return the replies of each prompt."""
    ran = cli("chat", "--json", *args)
    assert ran.code == 0, ran.err
    documents = json.JSONDecoder()
    answers: list[list[dict[str, Any]]] = []
    rest = ran.out.strip()
    while rest:
        document, end = documents.raw_decode(rest)
        answers.append(document["replies"])
        rest = rest[end:].strip()
    return answers


def test_a_run_replies_with_its_base_and_its_newest_weights_and_the_same_to_the_same_seed(
    cli: Cli, run_dir: Path
) -> None:
    given = (str(run_dir), "-p", "abcd", "-p", "abcd", "-p", "other")
    first, again, other = replies(cli, *given)
    assert [reply["model"] for reply in first] == ["base", "step_10"]
    assert first[0]["text"] != first[1]["text"]
    assert again == first
    assert other != first
    assert all(reply["cut"] or len(reply["text"]) < 4 for reply in first), "the run's max_tokens"
    assert replies(cli, *given[:3], "--seed", "7") != [first]
    (named,) = replies(cli, str(run_dir / "weights"), "--step", "5", "-p", "abcd")
    assert [reply["model"] for reply in named] == ["base", "step_5"]


@pytest.mark.slow
def test_a_task_of_the_run_is_played_with_both_and_its_reward_shown(
    cli: Cli, run_dir: Path
) -> None:
    ran = cli("chat", str(run_dir), "--task", "3")
    assert ran.code == 0, ran.err
    assert "<|user|>" in ran.out, "the prompt as the model saw it"
    assert "base  reward 0" in ran.out
    assert "step_10  reward 0" in ran.out


def test_lines_of_a_pipe_are_prompts_and_the_newest_run_here_is_the_default(
    cli: Cli, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_dir.parents[1])
    monkeypatch.setattr(sys, "stdin", io.StringIO("abcd\n\nother\n"))
    assert replies(cli) == replies(cli, str(run_dir), "-p", "abcd", "-p", "other")


async def test_a_server_is_asked_and_its_control_sequences_are_escaped(
    ask: Ask, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    given = ("chat", "--url", server.url, "--key-variable", "API_KEY", "--system", "be short")
    ran = await ask(*given, "-p", "hello", "-p", "again")
    assert ran.code == 0, ran.err
    assert ran.out.count("\\x1b[2J2 messages") == 2, "each prompt begins a conversation"
    assert "served" in ran.out
    assert server.keys == {"Bearer secret"}
    body = server.bodies[0]
    assert body["model"] == "served"
    assert [message["content"] for message in body["messages"]] == ["be short", "hello"]
    kept = await ask(*given, "--keep", "-p", "hello", "-p", "again")
    assert "2 messages" in kept.out
    assert "4 messages" in kept.out


async def test_a_terminal_is_asked_until_ctrl_d_and_an_error_costs_a_prompt(home: Path) -> None:
    answers = iter([chat_completion("one"), refused(400, "no"), chat_completion("three")])
    async with openai_server(lambda _: next(answers)) as server:
        ours, theirs = pty.openpty()
        with closing(os.fdopen(ours, "wb")) as keys, closing(os.fdopen(theirs, "rb")):
            keys.write(b"a\nb\n\nc\n\x04")  # an empty line asks nothing where there is no run
            keys.flush()
            program = [sys.executable, "-m", "primerl.cli.main", "chat", "--url", server.url]
            ran = await asyncio_run(program, theirs)
    assert ran.returncode == 0, ran.stderr
    assert "one" in ran.stdout
    assert "no" in ran.stdout
    assert "three" in ran.stdout
    assert ran.stdout.index("one") < ran.stdout.index("three")


async def asyncio_run(program: list[str], stdin: int) -> "subprocess.CompletedProcess[str]":
    """Run a program beside this event loop."""
    import asyncio

    def run() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            program, stdin=stdin, capture_output=True, text=True, timeout=60, check=False
        )

    return await asyncio.to_thread(run)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("nowhere", "-p", "a"), 7, "cannot download model 'nowhere'"),
        (("RUN", "--step", "7", "-p", "a"), 2, "has no weights of step 7, only 5, 10"),
        (("RUN/model", "--task", "0"), 2, "tasks are those of a run"),
        (("empty", "-p", "a"), 2, "empty has no weights yet"),
        (("--url", "http://127.0.0.1:9/v1", "-p", "a"), 6, "cannot be reached"),
        (("--url", "127.0.0.1:9", "-p", "a"), 2, "an endpoint is http(s)://HOST/v1"),
        (("-p", "a"), 2, "no run in outputs/ has weights"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(
    cli: Cli, home: Path, run_dir: Path, args: tuple[str, ...], code: int, message: str
) -> None:
    (home / "empty").mkdir()
    (home / "empty" / ".primerl-run").write_text("")
    cli("chat", *(arg.replace("RUN", str(run_dir)) for arg in args)).refused(code, message)
