"""The command line in this process, in an empty directory, with no node of the real user in sight."""

import asyncio
import io
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.fake_nvml import install_nvml

from primerl.cli.main import execute
from primerl.node import gpus
from primerl.node.environments import sandbox
from primerl.node.environments.sandbox import Sandbox
from primerl.node.ops import metrics
from primerl.node.ops.control import Command, ControlServer


@dataclass
class Ran:
    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> None:
        """Assert that it ended with one line on stderr that has these words."""
        assert self.code == code, self.err
        assert self.err.startswith("primerl-node: error: ")
        assert self.err.count("\n") == 1
        for word in words:
            assert word in self.err


Cli = Callable[..., Ran]
Ask = Callable[..., Awaitable[Ran]]
Serve = Callable[..., Awaitable[Path]]


class Terminal(io.StringIO):
    """A person who types this."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="session")
def working() -> set[tuple[type[Sandbox], str]]:
    """Kinds of sandboxes that were seen to work here, with their config."""
    return set()


@pytest.fixture(scope="module", autouse=True)
def probed_once(working: set[tuple[type[Sandbox], str]]) -> Iterator[None]:
    """Start a process in each kind of sandbox once: every command does, to see whether it works here."""
    probe: Callable[[Sandbox], str] = vars(sandbox)["_failure"]

    def failure(confined: Sandbox) -> str:
        kind = type(confined), confined.config.model_dump_json()
        if kind not in working and (reason := probe(confined)):
            return reason
        working.add(kind)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_failure", failure)
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and working directory, and an environment without our variables.

    Nothing is said of an event loop that a busy machine keeps waiting.
    """
    monkeypatch.setattr(metrics, "STILL_S", 300.0)
    for name in list(os.environ):
        if name.startswith("PRIMERL_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def torch_is(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that another torch is installed."""

    def version(name: str) -> str:
        return release

    monkeypatch.setattr(gpus, "version", version)


@pytest.fixture
def gpus_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make a machine of so many GPUs, whose memory is not known."""

    def make(count: int) -> None:
        install_nvml(monkeypatch, [f"GPU-{index}" for index in range(count)], total=0)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        torch_is("2.13.0+cu130", monkeypatch)

    return make


@pytest.fixture
def cli(home: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """primerl-node, as `cli("status", "--json")`."""
    log = logging.getLogger()
    before, level = log.handlers[:], log.level

    def run(*args: str) -> Ran:
        code = execute(list(args))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    yield run
    for handler in set(log.handlers) - set(before):  # a node's own log, on a stderr that ends here
        log.removeHandler(handler)
        handler.close()
    log.setLevel(level)


@pytest.fixture
def ask(cli: Cli) -> Ask:
    """primerl-node in a thread, for commands that ask a node of this process."""

    async def run(*args: str) -> Ran:
        return await asyncio.to_thread(cli, *args)

    return run


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="prl") as path:
        yield Path(path)


@pytest.fixture
async def serve(short_dir: Path) -> AsyncIterator[Serve]:
    """Start a control socket with these answers (an exception is raised); returns its data directory."""
    async with AsyncExitStack() as stack:

        async def start(name: str = "node", **answers: object) -> Path:
            server = ControlServer(short_dir / name, {k: _answer(v) for k, v in answers.items()})
            await server.start()
            stack.push_async_callback(server.close)
            return short_dir / name

        yield start


def _answer(value: object) -> Command:
    async def answer(**arguments: object) -> object:
        del arguments
        if callable(value):
            return value()
        if isinstance(value, Exception):
            raise value
        return value

    return answer
