"""A taskset of the library in a process of its own: an ordinary endless one, as anybody writes it."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support import fake_environment_process as fake
from support.chat_model import IM_END, make_chat_model
from support.waiting import until

from primerl.node.app.startup import demonstrations
from primerl.node.config.run import EnvironmentConfig
from primerl.node.config.sandbox import WorkerSandboxConfig
from primerl.node.environments import hosted
from primerl.node.environments.environment import Environment
from primerl.node.environments.hosted import PROGRAM, HostedEnvironment
from primerl.node.environments.sandbox import choose, cpu_clock
from primerl.node.inference.engine import Completion

TASKSETS = Path(__file__).parent / "tasksets"


async def says(environment: Environment, text: str, index: int = 0) -> float | str:
    """The reward of a reply, which the recomputed score equals; or why there is none."""
    ids = [*text.encode(), IM_END]

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        return Completion(ids, [-1.0] * len(ids), "stop", 0, 0)

    task = await environment.task(index)
    episode = await environment.run(task, policy)
    if episode.error:
        return episode.error
    assert await environment.score(task, episode.branches) == episode.score
    return episode.score.reward


@pytest.mark.parametrize("tokenizer", [True, False], ids=["tokens", "characters"])
async def test_the_strings_that_end_replies_are_found_outside_of_the_process(
    tmp_path: Path, tokenizer: bool
) -> None:
    environment = HostedEnvironment(
        EnvironmentConfig(id="moody", args={"moods": "good"}, stop=["</b>"]),
        model_dir=make_chat_model(tmp_path) if tokenizer else None,
        seed=0,
        max_tokens=16,
        temperature=1.0,
        program=(sys.executable, fake.__file__),
    )
    try:
        await environment.start()
        assert environment.stops is not None
        assert environment.stops.end([*b"<b>4</b>, or 5"]) == len("<b>4</b>")
    finally:
        await environment.close()


def moody() -> HostedEnvironment:
    """An environment of the fake process, in a good mood."""
    return HostedEnvironment(
        EnvironmentConfig(id="moody", args={"moods": "good"}),
        model_dir=None,
        seed=0,
        max_tokens=16,
        temperature=1.0,
        program=(sys.executable, fake.__file__),
    )


async def test_a_request_that_comes_while_the_process_starts_waits_for_it(tmp_path: Path) -> None:
    environment = moody()
    starting = asyncio.create_task(environment.start())
    try:
        await asyncio.sleep(0)
        assert (await environment.task(0)).index == 0
        assert starting.done()
    finally:
        await starting
        await environment.close()


@pytest.mark.slow
async def test_an_ordinary_endless_taskset_is_played_warmed_up_and_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without task_at, a warm-up on it once read five million tasks and ended in a traceback."""
    monkeypatch.syspath_prepend(TASKSETS)
    environment = HostedEnvironment(
        EnvironmentConfig(id="sort-digits", args={"digits": 6}, timeout_s=3.0),
        model_dir=make_chat_model(tmp_path),
        seed=0,
        max_tokens=16,
        temperature=1.0,
        sandbox=choose(WorkerSandboxConfig()),
    )
    try:
        async with asyncio.timeout(300.0):
            await environment.start()
            prompt = bytes((await environment.prompt(await environment.task(0)))[1:7]).decode()
            assert await says(environment, "".join(sorted(prompt))) == 1.0
            assert await says(environment, "no") == 0.0
            trained = {(await environment.task(index)).digest for index in range(200)}
            held_out = {(await environment.task(index, "eval")).digest for index in range(20)}
            shown: list[bytes] = []
            async with aclosing(demonstrations([environment])) as examples:
                async for question, reply in examples:
                    assert sorted(question[1:7]) == reply[:6]
                    shown.append(bytes(question[1:7]))
                    if len(shown) == 200:
                        break
            assert (len(trained), len(held_out)) == (200, 20)
            assert not trained & held_out
            (process,) = (
                child
                for child in psutil.Process().children(recursive=True)
                if PROGRAM[-1] in child.cmdline() and "bwrap" not in child.name()
            )
            assert not [one.path for one in process.memory_maps() if "libtorch" in one.path]
            stuck = await says(environment, "spin", 1)
            assert isinstance(stuck, str)
            assert "in exact, sort_digits.py" in stuck
            assert await says(environment, "no", 1) == 0.0
    finally:
        await environment.close()


async def test_a_process_that_nobody_needs_ends_until_the_next_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosted, "REST_S", 0.01)
    monkeypatch.setattr(hosted, "REST_STARTS", 0.0)
    environment = moody()
    try:
        await environment.start()
        first = psutil.Process().children()
        await until(lambda: not any(process.is_running() for process in first))
        assert (await environment.task(7)).index == 7
        assert environment.restarts == 0
        assert not environment.status
        assert not caplog.records
    finally:
        await environment.close()


async def test_processes_that_do_not_run_are_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked, looked = 1.0, 0, 0
    overrun = hosted.Sandbox.overrun

    def cpu_clock(pid: int) -> float:
        nonlocal asked
        asked += 1
        return clock

    def noted(sandbox: hosted.Sandbox, family: Sequence[int]) -> str:
        nonlocal looked
        looked += 1
        return overrun(sandbox, family)

    monkeypatch.setattr(hosted, "GUARD_S", 0.01)
    monkeypatch.setattr(hosted, "cpu_clock", cpu_clock)
    monkeypatch.setattr(hosted.Sandbox, "overrun", noted)
    environment = moody()
    try:
        await environment.start()
        for expected in (1, 2, 3):
            before = asked
            await until(lambda before=before: asked >= before + 20)
            assert looked == expected
            clock += 0.25  # it ran
            await until(lambda before=looked: looked > before)
    finally:
        await environment.close()


def test_the_clock_of_a_process_advances_while_it_runs_alone_and_is_unknown_afterwards() -> None:
    program = "print(0, flush=True); input(); sum(range(3_000_000)); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        waits = psutil.Process(process.pid)
        while waits.status() != psutil.STATUS_SLEEPING:
            pass
        before = cpu_clock(process.pid)
        assert cpu_clock(process.pid) == before > 0.0
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "1\n"
        assert cpu_clock(process.pid) > before
        process.kill()
    assert cpu_clock(process.pid) != cpu_clock(
        process.pid
    )  # nan: whoever compares looks for himself


IMPORTS = """
import sys
from primerl.node.environments.verifiers import _import_player
_import_player()
packages = {name.partition(".")[0] for name in sys.modules}
assert packages.isdisjoint({"anthropic", "mcp", "sympy"})
from verifiers.v1.utils import score
assert score.verify_boxed_math_answer(r"so \\boxed{0.5}", "1/2") == 1.0
assert score.verify_boxed_math_answer(r"so \\boxed{x}", "1/2") == 0.0
from math_verify.errors import TimeoutException
assert score.MathVerifyTimeout is TimeoutException
"""


def test_verifiers_loads_no_package_that_most_tasksets_never_use_and_one_that_uses_it_gets_it() -> (
    None
):
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
