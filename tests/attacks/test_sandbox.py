"""Environments that reach out of their process: memory, processes, sockets, others. Each costs its rollout."""

import asyncio
import socket
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support import fake_environment_process as fake
from support.counting_environment import STOP

from primerl.node.config.run import EnvironmentConfig, JoinConfig
from primerl.node.config.sandbox import SandboxConfig, WorkerSandboxConfig
from primerl.node.environments.hosted import HostedEnvironment
from primerl.node.environments.sandbox import holds
from primerl.node.inference.engine import Completion

PROGRAM = (sys.executable, fake.__file__)
DEADLINE_S = 120.0
CLOSED = WorkerSandboxConfig()
pytestmark = pytest.mark.skipif(bool(holds()), reason=holds())


@asynccontextmanager
async def hosted(
    moods: str, sandbox: SandboxConfig, **options: float
) -> AsyncGenerator[HostedEnvironment]:
    """A running environment whose task i is scored as word i of `moods` says; nothing is left of it."""
    config = EnvironmentConfig.model_validate({"id": "moody", "args": {"moods": moods}, **options})
    environment = HostedEnvironment(
        config,
        model_dir=Path(),
        seed=0,
        max_tokens=4,
        temperature=1.0,
        sandbox=sandbox,
        program=PROGRAM,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            await environment.start()
            yield environment
    finally:
        await environment.close()
        assert await gone()


async def gone() -> bool:
    """Whether every process of an environment ends within seconds, whoever its parent is now."""
    for _ in range(100):
        if not processes():
            return True
        await asyncio.sleep(0.05)
    return False


def processes() -> list[psutil.Process]:
    """All processes of these environments that run, children of this one or not."""
    found: list[psutil.Process] = []
    for one in psutil.process_iter():
        try:
            if fake.__file__ in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.Error:
            continue
    return found


async def says(prompt: Sequence[int], turn: int) -> Completion:
    return Completion([40, STOP], [-1.0, -1.0], "stop", 0, 0)


async def played(moods: str, sandbox: SandboxConfig) -> tuple[list[str], int]:
    """The error of one rollout of each mood, played at once with a good one; and how often it was restarted."""
    async with hosted(f"{moods} good", sandbox) as environment:
        tasks = [await environment.task(index) for index in range(len(moods.split()) + 1)]
        *bad, good = await asyncio.gather(*(environment.run(task, says) for task in tasks))
        assert (good.error, good.score.reward) == ("", 1.0)
        return [one.error for one in bad], environment.restarts


@pytest.mark.parametrize("sandbox", [CLOSED, SandboxConfig()], ids=["worker", "trainer"])
async def test_four_gigabytes_cost_their_rollout_and_nothing_else(sandbox: SandboxConfig) -> None:
    errors, restarts = await played("allocates", sandbox)
    assert "MemoryError" in errors[0]
    assert restarts == 0


async def test_memory_within_the_limit_is_there() -> None:
    errors, _ = await played("allocates", SandboxConfig(memory_gib=6.0))
    assert errors == [""]


async def test_a_worker_starts_no_process_for_an_environment() -> None:
    errors, restarts = await played("runs bombs hides", CLOSED)
    assert all("PermissionError" in error for error in errors)
    assert restarts == 0


async def test_a_fork_bomb_costs_its_rollout_where_processes_are_allowed() -> None:
    before = time.monotonic()
    errors, restarts = await played("bombs", SandboxConfig(processes=16))
    assert "more than 16 processes running" in errors[0]
    assert restarts == 1
    assert time.monotonic() - before < DEADLINE_S / 2


async def test_processes_within_the_limit_run() -> None:
    errors, restarts = await played("runs", SandboxConfig(processes=16))
    assert (errors, restarts) == ([""], 0)


async def test_memory_of_all_processes_together_is_limited() -> None:
    errors, restarts = await played("hoards", SandboxConfig(processes=16, memory_gib=1.0))
    assert "hold more than 1 GiB" in errors[0]
    assert restarts == 1


async def test_what_hides_from_its_parent_ends_with_the_environment() -> None:
    async with hosted("hides", SandboxConfig(processes=16)) as environment:
        assert (await environment.run(await environment.task(0), says)).error == ""
        assert len(processes()) == 2


@pytest.mark.parametrize("allowed", [False, True])
async def test_a_socket_is_had_only_where_the_network_is_allowed(
    allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        monkeypatch.setenv("HOSTILE_PORT", str(server.getsockname()[1]))
        errors, restarts = await played("connects asks", WorkerSandboxConfig(network=allowed))
        assert ["" if allowed else "PermissionError"] * 2 == [
            error and "PermissionError" for error in errors
        ]
        assert restarts == 0
        if allowed:
            server.accept()[0].close()
        else:
            with pytest.raises(TimeoutError):
                server.accept()


async def test_no_other_program_is_signalled_limited_or_read() -> None:
    errors, restarts = await played("kills strangles reads", CLOSED)
    assert all("PermissionError" in error for error in errors)
    assert restarts == 0


async def test_the_deadline_that_ends_a_process_holds_inside_the_sandbox() -> None:
    async with hosted("spins good", CLOSED, timeout_s=1.0) as environment:
        spun = await environment.run(await environment.task(0), says)
        assert "did not return within" in spun.error
        episode = await environment.run(await environment.task(1), says)
        assert (episode.error, environment.restarts) == ("", 1)


def test_a_worker_opens_neither_sockets_nor_processes_unless_its_owner_says_so() -> None:
    told = JoinConfig().sandbox
    assert (told.network, told.processes, told.memory_gib) == (False, 0, 4.0)
    opened = JoinConfig.model_validate({"sandbox": {"network": True}}).sandbox
    assert (opened.network, opened.processes) == (True, 0)
