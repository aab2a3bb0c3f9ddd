"""Environments that reach out of their process: memory, processes, sockets, files. Each costs its rollout.

All sandboxes hold all of that, but `limits` no files.
"""

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support import fake_environment_process as fake
from support import sandbox_probes
from support.chat_model import IM_END, make_chat_model
from support.counting_environment import STOP
from support.sandbox_probes import CALLS, FILES, MEMORY, shared_file
from support.waiting import until

from primerl.node.config.run import EnvironmentConfig, JoinConfig
from primerl.node.config.sandbox import SandboxConfig, SandboxType, WorkerSandboxConfig
from primerl.node.environments import confine
from primerl.node.environments.allowed import find_package
from primerl.node.environments.confine import landlock_version
from primerl.node.environments.environment import EnvironmentFailed, Episode
from primerl.node.environments.hosted import HostedEnvironment
from primerl.node.environments.sandbox import SCRATCH_PREFIX, Sandbox, Scratch, choose
from primerl.node.errors import UsageError
from primerl.node.inference.engine import Completion

OWNER = f"--of-{os.getpid()}"
PROGRAM = (sys.executable, fake.__file__, OWNER)
"""Tests in other processes start the same program."""
DEADLINE_S = 120.0
OPEN_FILES = "files are not confined"


@cache
def made(kind: SandboxType) -> Sandbox:
    """A worker's sandbox of that type; skips the test where bubblewrap does not work."""
    try:
        return choose(WorkerSandboxConfig(type=kind))
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["limits", "landlock", "bubblewrap"])
def kind(request: pytest.FixtureRequest) -> SandboxType:
    """Each type of sandbox in turn, if it works here."""
    if not any("sockets" in held for held in made(request.param).confined()):
        pytest.skip("system calls are filtered on Linux on x86_64 and aarch64 only")
    return request.param


@pytest.fixture(params=["landlock", "bubblewrap"])
def shut(request: pytest.FixtureRequest) -> SandboxType:
    """Each type of sandbox that confines files, if it works here."""
    made(request.param)
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
            if OWNER in one.cmdline() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except psutil.Error:
            continue
    return found


async def says(prompt: Sequence[int], turn: int) -> Completion:
    return Completion([40, STOP], [-1.0, -1.0], "stop", 0, 0)


async def errors_of_moods(
    moods: str, sandbox: Sandbox, **options: float
) -> tuple[dict[str, str], int]:
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
        errors, restarts = await errors_of_moods(f"{refused} allocates", made(kind))
        with pytest.raises(TimeoutError):
            server.accept()
    assert "MemoryError" in errors.pop("allocates")
    assert {name: error for name, error in errors.items() if "PermissionError" not in error} == {}
    assert restarts == 0


@pytest.mark.slow
async def test_what_takes_its_process_along_costs_its_rollout_and_the_process_comes_back(
    kind: SandboxType,
) -> None:
    errors, restarts = await errors_of_moods("exits dies spins hangs", made(kind), timeout_s=1.5)
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
    errors, restarts = await errors_of_moods("runs holds forks bombs hoards shares", sandbox)
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
        async with hosted("connects tells hides asks", sandbox) as environment:
            *errors, asked = [
                (await environment.run(await environment.task(index), says)).error
                for index in range(4)
            ]
            assert errors == ["", "", ""]
            # where sockets of other programs could be seen, none of that kind is made
            assert ("PermissionError" in asked) == (kind == "landlock")
            server.accept()[0].close()
            assert len([one for one in processes() if "bwrap" not in one.name()]) == 2


# -- files -------------------------------------------------------------------------------------------


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node's key in its data directory, which an environment is after; beside it a file and a socket."""
    with tempfile.TemporaryDirectory() as top:  # pytest's are for one user only
        os.chmod(top, 0o755)
        with _machine(Path(top), monkeypatch) as path:
            yield path
    shared_file(os.getpid()).unlink(missing_ok=True)


@contextmanager
def _machine(top: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    path = top / "machine" / "node" / "node.key"
    path.parent.mkdir(parents=True)
    path.write_text("secret")
    path.chmod(0o600)
    path.with_name("beside").write_text("beside")
    home = top / "home"
    home.mkdir()
    (home / "notes").write_text("of the owner")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path.with_name("socket")))
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("HOSTILE_HOME", str(home))
        monkeypatch.setenv("HOSTILE_FILE", str(path))
        monkeypatch.setenv("HOSTILE_SOCKET", str(path.with_name("socket")))
        monkeypatch.setenv("HOSTILE_NODE", str(os.getpid()))
        yield path


def untouched(secret: Path) -> bool:
    """Whether all is as the fixture left it."""
    files = {path.name: path.read_text() for path in secret.parent.iterdir() if path.is_file()}
    return (
        files == {"node.key": "secret", "beside": "beside"}
        and secret.stat().st_mode & 0o777 == 0o600
        and secret.stat().st_mtime > 1.0
        and not shared_file(os.getpid()).exists()
    )


def got_through(errors: Mapping[str, str]) -> dict[str, str]:
    """The probes that the system did not refuse."""
    refused = (
        "PermissionError",
        "FileNotFoundError",
        "ProcessLookupError",
        "Read-only file system",
        "Invalid cross-device link",
    )
    return {name: error for name, error in errors.items() if not any(it in error for it in refused)}


async def test_no_sandbox_lets_an_environment_reach_its_node_or_the_kernel(
    kind: SandboxType, secret: Path
) -> None:
    errors, restarts = await errors_of_moods(
        " ".join(["works", *MEMORY, *CALLS, "ends"]), made(kind)
    )
    assert errors.pop("works") == ""
    assert got_through(errors) == {}
    assert restarts == 0


async def test_what_confines_files_shows_no_key_and_takes_no_file(
    shut: SandboxType, secret: Path
) -> None:
    errors, restarts = await errors_of_moods(
        " ".join(["works", "changes-modes", *FILES]), made(shut)
    )
    assert errors.pop("works") == ""
    errors.pop("changes-modes")  # refused, or without effect
    if shut == "bubblewrap":
        assert errors.pop("shares-memory") == ""  # in memory of its own
    assert got_through(errors) == {}
    assert restarts == 0
    assert untouched(secret)


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as a plain user already")
@pytest.mark.parametrize("shuts", [False, True], ids=["limits", "landlock"])
async def test_a_plain_users_environment_reaches_nothing_either(shuts: bool, secret: Path) -> None:
    """Among equals the kernel lets one debug the other; only root has capabilities to lose."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if python is None:
        pytest.skip("the system has no Python that a plain user may run")
    if shuts and not landlock_version():
        pytest.skip("this kernel has no Landlock")
    code = secret.parents[2] / "code"
    code.mkdir()
    for path in (confine.__file__, sandbox_probes.__file__):
        shutil.copy(path, code)
    os.mkdir(code / "scratch")
    for path in (secret.parents[2], *secret.parents[2].rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    names = [*MEMORY, *CALLS, *(FILES if shuts else ["eases-its-end"]), "ends"]
    node = await asyncio.create_subprocess_exec(
        python,
        *("-B", "-c", PLAIN, str(code), json.dumps(names), str(int(shuts))),
        stdout=asyncio.subprocess.PIPE,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    said, _ = await node.communicate()
    errors: dict[str, str] = json.loads(said)
    assert list(errors) == names
    assert got_through(errors) == {}
    assert untouched(secret)


@pytest.mark.slow
async def test_bundled_environments_play_in_every_sandbox(kind: SandboxType, secret: Path) -> None:
    """Each imports what scores it and reads what it needs: math-verify, a data set of the owner."""
    model_dir = make_chat_model(secret.parents[1])
    rows = Path.home() / ".primerl" / "datasets" / "me" / "rows" / "train.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text('{"question": "1+2", "answer": "3"}\n')
    options = {"math-env": {"dataset_name": "me/rows"}}
    names = [name for name in ("reverse-text", "word-game", "math", "math-env") if playable(name)]

    async def answers(prompt: Sequence[int], turn: int) -> Completion:
        ids = [*b"\\boxed{3}", IM_END]
        return Completion(ids, [-1.0] * len(ids), "stop", 0, 0)

    async def plays(name: str) -> Episode:
        environment = HostedEnvironment(
            EnvironmentConfig(id=name, args=options.get(name, {})),
            model_dir=model_dir,
            seed=0,
            max_tokens=64,
            temperature=1.0,
            sandbox=made(kind),
        )
        try:
            await environment.start()
            return await environment.run(await environment.task(0), answers)
        finally:
            await environment.close()

    episodes = {name: await plays(name) for name in names}
    assert {name: one.error for name, one in episodes.items()} == dict.fromkeys(names, "")
    if "math-env" in episodes:
        assert episodes["math-env"].score.reward == 1.0


def playable(name: str) -> bool:
    """Whether what a bundled environment needs is installed."""
    try:
        find_package(name)
    except UsageError:
        return False
    return True


async def test_bubblewrap_shows_no_other_process_and_limits_what_is_written(secret: Path) -> None:
    errors, restarts = await errors_of_moods("looks fills", made("bubblewrap"))
    assert "nobody else is there" in errors["looks"]
    assert "no room anywhere" in errors["fills"]
    assert restarts == 0


async def test_landlock_limits_what_is_written_and_leaves_nothing_of_it(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(secret.parents[1]))
    monkeypatch.setattr("tempfile.tempdir", None)
    left = secret.parents[1] / f"{SCRATCH_PREFIX}of-a-killed-node"
    (left / "deep").mkdir(parents=True)
    errors, restarts = await errors_of_moods("pours", made("landlock"))
    assert "more than 512 MiB" in errors["pours"]
    assert restarts == 1
    assert not [path.name for path in secret.parents[1].glob(f"{SCRATCH_PREFIX}*")]


def test_a_scratch_directory_outlives_other_nodes_and_not_its_own(tmp_path: Path) -> None:
    ours = Scratch(tmp_path)
    theirs = Scratch(tmp_path)
    for number in range(4):
        (theirs.path / str(number)).touch()
    assert (theirs.overrun(5), theirs.overrun(4)[:15]) == ("", "the environment")
    (ours.path / "shut").mkdir(mode=0)
    (ours.path / "away").symlink_to(tmp_path)
    assert ours.path.is_dir()
    ours.close()
    assert list(tmp_path.iterdir()) == [theirs.path]
    theirs.close()


async def test_what_is_readable_stays_as_it_is_and_a_node_in_it_is_hidden(
    shut: SandboxType, secret: Path
) -> None:
    config = WorkerSandboxConfig(type=shut, readable=[secret.parents[1]])
    errors, _ = await errors_of_moods("steals writes removes", choose(config))
    assert list(got_through(errors)) == ["steals"]
    errors, _ = await errors_of_moods("steals writes", choose(config, [secret.parent]))
    assert got_through(errors) == {}
    assert untouched(secret)


async def test_limits_alone_leave_files_open_and_say_so(secret: Path) -> None:
    sandbox = choose(WorkerSandboxConfig(type="limits"))
    assert await errors_of_moods("steals writes", sandbox) == ({"steals": "", "writes": ""}, 0)
    assert OPEN_FILES in str(sandbox)


@pytest.mark.parametrize("readable", ["/", str(Path.home()), "/tmp", "/nowhere"])
def test_what_would_show_a_home_or_is_not_there_is_refused(readable: str) -> None:
    with pytest.raises(UsageError, match=r"sandbox\.readable: "):
        choose(WorkerSandboxConfig(readable=[Path(readable)]))


# -- the choice --------------------------------------------------------------------------------------


BROKEN_BUBBLEWRAPS = pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("", "bubblewrap is not installed: install it"),
        ("echo bwrap: No permissions to create new namespace >&2; exit 1", "No permissions"),
        ("echo bwrap: Unknown option --size >&2; exit 1", "it needs release 0.7 or newer"),
    ],
)


@pytest.fixture
def broken(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this program is found as bubblewrap."""
    if program:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@BROKEN_BUBBLEWRAPS
def test_without_a_bubblewrap_that_works_it_is_landlock_unless_it_was_asked_for_by_name(
    program: str, reason: str, broken: None
) -> None:
    made("landlock")
    sandbox = choose(WorkerSandboxConfig())
    assert sandbox.name == "landlock"
    assert not sandbox.missing
    assert reason in str(sandbox)
    with pytest.raises(UsageError, match=reason):
        choose(WorkerSandboxConfig(type="bubblewrap"))


@BROKEN_BUBBLEWRAPS
async def test_with_neither_only_bundled_environments_run_unless_the_owner_says_limits(
    program: str, reason: str, broken: None
) -> None:
    sandbox = choose(WorkerSandboxConfig(), landlock=0)
    assert sandbox.name == "limits"
    assert reason in str(sandbox)
    with pytest.raises(EnvironmentFailed, match=r'let sandbox\.type be "limits"'):
        async with hosted("good", sandbox):
            pytest.fail("it was started")
    assert not sandbox.refusal("reverse-text")
    by_name = choose(WorkerSandboxConfig(type="limits"), landlock=0)
    assert await errors_of_moods("", by_name) == ({}, 0)
    with pytest.raises(UsageError, match="this kernel has no Landlock"):
        choose(WorkerSandboxConfig(type="landlock"), landlock=0)


@pytest.mark.parametrize("version", [1, 3, 6])
async def test_each_version_of_landlock_shuts_files(version: int, secret: Path) -> None:
    """What a newer one confines besides is asked of it alone."""
    if version > landlock_version():
        pytest.skip(f"this kernel has Landlock {landlock_version()}")
    sandbox = choose(WorkerSandboxConfig(type="landlock", processes=4), landlock=version)
    assert ("can signal other programs" in str(sandbox)) == (version < 6)
    errors, _ = await errors_of_moods(" ".join(["works", "runs", *FILES]), sandbox)
    assert (errors.pop("works"), errors.pop("runs")) == ("", "")
    assert got_through(errors) == {}
    assert untouched(secret)


PARENT = """
import asyncio, sys
sys.path[:0] = {path!r}
from attacks import test_sandbox

test_sandbox.PROGRAM = {program!r}

async def main():
    sandbox = test_sandbox.made({kind!r})
    async with test_sandbox.hosted("blocks", sandbox) as environment:
        task = await environment.task(0)
        print("playing", flush=True)
        await environment.run(task, test_sandbox.says)

asyncio.run(main())
"""


PLAIN = """
import json, os, subprocess, sys
code, names, shuts = sys.argv[1:]
sys.path.insert(0, code)
import confine

confine.protect_node()
settings = {"network": False, "processes": 0, "memory_gib": 4}
read = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", code]
files = {"read": read, "write": [code + "/scratch"], "list": []}
if int(shuts):
    settings |= {"landlock": confine.landlock_version(), "files": files, "file_bytes": 1 << 20}
probes = '''
import json, sys
sys.path.insert(0, sys.argv[1])
import sandbox_probes
errors = {}
for name in json.loads(sys.argv[2]):
    errors[name] = ""
    try:
        sandbox_probes.PROBES[name]()
    except OSError as error:
        errors[name] = f"{type(error).__name__} {error}"
print(json.dumps(errors))
'''
program = [sys.executable, "-B", "-c", probes, code, names]
environ = {**os.environ, confine.SETTINGS_VARIABLE: json.dumps(settings)}
environ["HOSTILE_NODE"] = str(os.getpid())
program = [sys.executable, "-I", "-S", code + "/confine.py", *program]
subprocess.run(program, env=environ, check=True)
"""
"""A node of a plain user, and in its child the probes of an environment; Python's library is enough."""
NOBODY = 65534


@pytest.mark.slow
async def test_code_that_never_returns_ends_with_a_node_that_is_killed(kind: SandboxType) -> None:
    tests = str(Path(__file__).parent.parent)
    source = PARENT.format(path=[tests, *sys.path], kind=kind, program=PROGRAM)
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    assert await node.stdout.readline() == b"playing\n"
    await until(processes)
    node.kill()
    await node.wait()
    assert await gone()


def test_a_worker_opens_neither_sockets_nor_processes_unless_its_owner_says_so() -> None:
    told = JoinConfig().sandbox
    assert (told.type, told.network, told.processes, told.memory_gib) == ("auto", False, 0, 4.0)
    opened = JoinConfig.model_validate({"sandbox": {"network": True}}).sandbox
    assert (opened.network, opened.processes) == (True, 0)
