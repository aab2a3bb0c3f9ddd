"""Environments whose code hangs, spins or crashes: it costs the rollout, never the node or another rollout."""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support import fake_environment_process as fake
from support.counting_environment import STOP

from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments.environment import EnvironmentFailed, EnvironmentStuck
from primerl.node.environments.hosted import HostedEnvironment
from primerl.node.inference.engine import Completion

PROGRAM = (sys.executable, fake.__file__)
DEADLINE_S = 120.0


@asynccontextmanager
async def hosted(
    moods: str, *, timeout_s: float = 60.0, **options: float
) -> AsyncGenerator[HostedEnvironment]:
    """A running environment whose task i is scored as word i of `moods` says; no process is left of it."""
    config = EnvironmentConfig.model_validate(
        {"id": "moody", "args": {"moods": moods}, "timeout_s": timeout_s, **options}
    )
    environment = HostedEnvironment(
        config, model_dir=Path(), seed=0, max_tokens=4, temperature=1.0, program=PROGRAM
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            await environment.start()
            yield environment
    finally:
        await environment.close()
        assert hosts() == []


def hosts() -> list[psutil.Process]:
    """Processes of environments that this one has started."""
    return [
        one
        for one in psutil.Process().children(recursive=True)
        if fake.__file__ in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE
    ]


class Asked:
    """A policy that always says the same, and counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self, prompt: Sequence[int], turn: int) -> Completion:
        self.count += 1
        return Completion([40, STOP], [-1.0, -1.0], "stop", 0, 0)


async def test_code_that_spins_costs_its_rollout_and_the_node_goes_on() -> None:
    async with hosted("spins waits good", timeout_s=1.0) as environment:
        tasks = [await environment.task(index) for index in range(3)]
        asked = [Asked() for _ in tasks]
        playing = asyncio.gather(
            *(environment.run(task, one) for task, one in zip(tasks, asked, strict=True))
        )
        turns = 0
        while not playing.done():
            turns += 1
            await asyncio.sleep(0.01)
        assert turns > 20  # the event loop of the node never stood still
        spun, *others = await playing
        assert "task 0: the environment's code did not return within" in spun.error
        assert "in spin, fake_environment_process.py" in spun.error
        assert "within 0:00:01" in spun.error
        assert [(one.error, one.score.reward) for one in others] == [("", 1.0)] * 2
        assert [one.count for one in asked] == [1, 1, 1]  # begun again, not asked again
        assert environment.restarts == 1
        assert "did not return within" in environment.status


async def test_code_that_takes_its_process_along_costs_its_rollout() -> None:
    reasons = {
        "regex": "did not return within",  # holds the interpreter: no thread of Python runs
        "dies": "process crashed (SIGSEGV)",
        "exits": "ended with exit code 3",
    }
    async with hosted(" ".join([*reasons, "good"]), timeout_s=1.0) as environment:
        good = await environment.task(len(reasons))
        fine = await environment.run(good, Asked())
        for index, reason in enumerate(reasons.values()):
            bad = await environment.task(index)
            assert reason in (await environment.run(bad, Asked())).error
            assert await environment.run(good, Asked()) == fine
        assert (fine.error, fine.score.reward) == ("", 1.0)
        with pytest.raises(EnvironmentStuck, match=re.escape(reasons["dies"])):
            await environment.score(await environment.task(1), fine.branches)


async def test_code_that_waits_for_ever_ends_at_its_deadline_and_raising_is_an_error() -> None:
    async with hosted("hangs yields raises good", timeout_s=1.0) as environment:
        tasks = [await environment.task(index) for index in range(4)]
        played = await asyncio.gather(*(environment.run(task, Asked()) for task in tasks))
        assert "no result within 1 s" in played[0].error
        assert "no result within 1 s" in played[1].error
        assert "no such thing" in played[2].error
        assert (played[3].error, environment.restarts) == ("", 0)
        for task in tasks[:3]:
            with pytest.raises(EnvironmentFailed):
                await environment.score(task, played[3].branches)


async def test_a_rollouts_deadline_does_not_count_the_code_of_others() -> None:
    async with hosted("heavy", timeout_s=1.0) as environment:
        task = await environment.task(0)
        played = await asyncio.gather(*(environment.run(task, Asked()) for _ in range(12)))
        assert [one.error for one in played] == [""] * 12  # 1.2 s of code, one after the other
        assert environment.restarts == 0


async def test_an_environment_that_blocks_is_closed_at_once_and_sees_no_passphrase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "secret")
    monkeypatch.setenv("WANDB_SERVICE", "1-unix-socket")
    async with hosted("blocks", timeout_s=3600.0) as environment:
        playing = asyncio.ensure_future(environment.run(await environment.task(0), Asked()))
        await asyncio.sleep(0.5)
        assert not playing.done()
        playing.cancel()
        (process,) = hosts()
        assert {"PRIMERL_PASSPHRASE", "WANDB_SERVICE"}.isdisjoint(process.environ())


async def test_a_task_that_is_never_made_ends_by_its_own_deadline() -> None:
    async with hosted("good unloadable", start_timeout_s=1.0) as environment:
        await environment.task(0)
        with pytest.raises(EnvironmentFailed, match=r"in spin, fake_environment_process\.py"):
            await environment.task(1, "train")
        assert (await environment.run(await environment.task(0), Asked())).error == ""


async def test_an_environment_that_waits_as_it_starts_is_refused_after_its_deadline() -> None:
    """It once held a worker for ever: only code that keeps the processor had a deadline there."""
    with pytest.raises(
        EnvironmentFailed, match=r"did not (start within 1 s|return within 0:00:01)"
    ):
        async with hosted("waits-at-start", start_timeout_s=1.0):
            pass


async def test_a_process_that_is_killed_again_and_again_is_given_up() -> None:
    async with hosted("good") as environment:
        task = await environment.task(0)
        error = ""
        while not error:
            for process in hosts():
                process.kill()
                process.wait()
            try:
                await environment.task(environment.restarts + 1)
            except EnvironmentFailed as failed:
                error = str(failed)
        assert "given up" in error
        with pytest.raises(EnvironmentFailed, match="given up"):
            await environment.run(task, Asked())
        assert "given up" in environment.status


async def test_a_caller_that_gives_up_during_a_restart_cancels_no_other() -> None:
    async with hosted("good") as environment:
        task = await environment.task(0)
        (process,) = hosts()
        process.kill()
        process.wait()
        async with asyncio.timeout(DEADLINE_S):
            while not environment.restarts:
                hasty = asyncio.ensure_future(environment.run(task, Asked()))
                await asyncio.wait([hasty], timeout=0.1)
                hasty.cancel()
                await asyncio.wait([hasty])
                if (await environment.run(task, Asked())).error == "":
                    break
        assert (await environment.run(task, Asked())).error == ""
