"""Environments that reach out of their process: memory, processes, sockets, files. Each costs its rollout.

Both sandboxes hold all of that, but `limits` no files.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support import fake_environment_process as fake
from support.counting_environment import STOP

from primerl.node.config.run import EnvironmentConfig, JoinConfig
from primerl.node.config.sandbox import SandboxConfig, SandboxType, WorkerSandboxConfig
from primerl.node.environments.hosted import HostedEnvironment
from primerl.node.environments.sandbox import Sandbox, choose
from primerl.node.inference.engine import Completion
from primerl.node.ops.errors import UsageError

PROGRAM = (sys.executable, fake.__file__)
DEADLINE_S = 120.0
OPEN_FILES = "files are not confined"


@cache
def made(kind: SandboxType) -> Sandbox:
    """A worker's sandbox of that type; skips the test where bubblewrap does not work."""
    try:
        return choose(WorkerSandboxConfig(type=kind))
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["limits", "bubblewrap"])
def kind(request: pytest.FixtureRequest) -> SandboxType:
    """Each type of sandbox in turn, if it works here."""
    sandbox = made(request.param)
    if gaps := [gap for gap in sandbox.gaps() if OPEN_FILES not in gap]:
        pytest.skip(gaps[0])
    return request.param


@asynccontextmanager
async def hosted(
    moods: str, sandbox: Sandbox, **options: float
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
    """Whether every process of an environment ends within seconds, also if it has another parent by now."""
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


async def played(moods: str, sandbox: Sandbox, **options: float) -> tuple[dict[str, str], int]:
    """The error of one rollout of each mood, played at once with a good one; and how often it was restarted."""
    async with hosted(f"{moods} good", sandbox, **options) as environment:
        names = moods.split()
        tasks = [await environment.task(index) for index in range(len(names) + 1)]
        *bad, good = await asyncio.gather(*(environment.run(task, says) for task in tasks))
        assert (good.error, good.score.reward) == ("", 1.0)
        again = await environment.run(tasks[-1], says)
        assert (again.error, again.score.reward) == ("", 1.0)
        errors = {name: one.error for name, one in zip(names, bad, strict=True)}
        return errors, environment.restarts


async def test_what_a_worker_refuses_costs_its_rollout_and_nothing_else(
    kind: SandboxType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_PARENT_PID", str(os.getppid()))  # of a node that `rl` started
    monkeypatch.setenv("HF_TOKEN", "secret")
    refused = "runs bombs hides connects asks kills strangles reads memfds tells"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        monkeypatch.setenv("HOSTILE_PORT", str(server.getsockname()[1]))
        errors, restarts = await played(f"{refused} allocates", made(kind))
        with pytest.raises(TimeoutError):
            server.accept()
    assert "MemoryError" in errors.pop("allocates")
    assert {name: error for name, error in errors.items() if "PermissionError" not in error} == {}
    assert restarts == 0


@pytest.mark.slow
async def test_what_takes_its_process_along_costs_its_rollout_and_the_process_comes_back(
    kind: SandboxType,
) -> None:
    errors, restarts = await played("exits dies spins hangs", made(kind), timeout_s=1.5)
    assert "ended with exit code 3" in errors["exits"]
    assert "crashed (SIGSEGV)" in errors["dies"]
    assert "did not return within 0:00:01.5" in errors["spins"]
    assert "no result within 1.5 s" in errors["hangs"]
    assert restarts == 3


@pytest.mark.slow
async def test_too_many_processes_and_too_much_memory_cost_their_rollouts(
    kind: SandboxType,
) -> None:
    sandbox = choose(SandboxConfig(type=kind, processes=16, memory_gib=0.5))
    errors, restarts = await played("runs holds forks bombs hoards shares", sandbox)
    assert (errors["runs"], errors["holds"], errors["forks"]) == ("", "", "")
    assert "more than 16 processes running" in errors["bombs"]
    assert "hold more than 0.5 GiB" in errors["hoards"]
    assert "hold more than 0.5 GiB" in errors["shares"]
    assert restarts == 3


async def test_what_is_allowed_works_and_ends_with_the_environment(
    kind: SandboxType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = choose(SandboxConfig(type=kind, processes=16))
    assert "sockets are allowed" in str(sandbox)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HOSTILE_PORT", str(server.getsockname()[1]))
        monkeypatch.setenv("HF_TOKEN", "for the hub")
        async with hosted("connects asks tells hides", sandbox) as environment:
            for index in range(4):
                assert (await environment.run(await environment.task(index), says)).error == ""
            server.accept()[0].close()
            assert len([one for one in processes() if "bwrap" not in one.name()]) == 2


# -- files -------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's key in its data directory, which an environment is after."""
    path = tmp_path / "node" / "node.key"
    path.parent.mkdir()
    path.write_text("secret")
    monkeypatch.setenv("HOSTILE_FILE", str(path))
    return path


async def test_bubblewrap_shows_no_key_and_no_other_process_and_takes_no_file(secret: Path) -> None:
    made("bubblewrap")
    errors, restarts = await played("steals writes looks fills", made("bubblewrap"))
    assert "FileNotFoundError" in errors["steals"]
    assert "FileNotFoundError" in errors["writes"]
    assert "nobody else is there" in errors["looks"]
    assert "no room anywhere" in errors["fills"]
    assert restarts == 0
    assert [path.name for path in secret.parent.iterdir()] == ["node.key"]


async def test_what_is_readable_stays_as_it_is_and_a_node_in_it_is_hidden(
    secret: Path,
) -> None:
    made("bubblewrap")
    around = secret.parent.parent
    config = WorkerSandboxConfig(type="bubblewrap", readable=[around])
    errors, _ = await played("steals writes", choose(config))
    assert errors["steals"] == ""
    assert "Read-only file system" in errors["writes"]
    errors, _ = await played("steals writes", choose(config, [secret.parent]))
    assert "FileNotFoundError" in errors["steals"]
    assert "Read-only file system" in errors["writes"]
    assert [path.name for path in secret.parent.iterdir()] == ["node.key"]


async def test_limits_alone_leave_files_open_and_say_so(secret: Path) -> None:
    sandbox = choose(WorkerSandboxConfig(type="limits"))
    assert await played("steals writes", sandbox) == ({"steals": "", "writes": ""}, 0)
    assert OPEN_FILES in str(sandbox)


@pytest.mark.parametrize("readable", ["/", str(Path.home()), "/tmp", "/nowhere"])
def test_what_would_show_a_home_or_is_not_there_is_refused(readable: str) -> None:
    with pytest.raises(UsageError, match=r"sandbox\.readable: "):
        choose(WorkerSandboxConfig(readable=[Path(readable)]))


# -- the choice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("", "bubblewrap is not installed: install it"),
        ("echo bwrap: No permissions to create new namespace >&2; exit 1", "No permissions"),
        ("echo bwrap: Unknown option --size >&2; exit 1", "it needs release 0.7 or newer"),
    ],
)
def test_without_a_bubblewrap_that_works_it_is_limits_unless_it_was_asked_for_by_name(
    program: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = choose(WorkerSandboxConfig())
    assert found.name == "limits"
    assert reason in str(found)
    with pytest.raises(UsageError, match=reason):
        choose(WorkerSandboxConfig(type="bubblewrap"))


PARENT = """
import asyncio, sys
sys.path[:0] = {path!r}
from attacks.test_sandbox import hosted, made, says

async def main():
    async with hosted("blocks", made({kind!r})) as environment:
        task = await environment.task(0)
        print("playing", flush=True)
        await environment.run(task, says)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_code_that_never_returns_ends_with_a_node_that_is_killed(kind: SandboxType) -> None:
    tests = str(Path(__file__).parent.parent)
    source = PARENT.format(path=[tests, *sys.path], kind=kind)
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    assert await node.stdout.readline() == b"playing\n"
    await asyncio.sleep(0.5)
    assert processes()
    node.kill()
    await node.wait()
    assert await gone()


def test_a_worker_opens_neither_sockets_nor_processes_unless_its_owner_says_so() -> None:
    told = JoinConfig().sandbox
    assert (told.type, told.network, told.processes, told.memory_gib) == ("auto", False, 0, 4.0)
    opened = JoinConfig.model_validate({"sandbox": {"network": True}}).sandbox
    assert (opened.network, opened.processes) == (True, 0)
