"""Sockets at paths longer than a kernel accepts."""

import asyncio
import os
import resource
import socket
import stat
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from primerl.node.errors import BusyError
from primerl.node.ops.control import ControlServer, ask
from primerl.node.process.unix_sockets import (
    LONGEST,
    NO_MEMORY_S,
    explain_lack,
    short,
    start_server,
)
from primerl.node.storage.run_files import socket_path

RETRY_S, TRIES = 0.02, 5


def deep(below: Path) -> Path:
    """A folder whose path alone is too long."""
    made = below / ("d" * 60) / ("e" * 60)
    made.mkdir(parents=True)
    return made


def test_a_short_path_is_left_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="prl") as folder:
        path = Path(folder, "s")
        with short(path) as name:
            assert name == str(path)


def test_what_is_bound_at_a_long_path_lies_there_and_is_reached(tmp_path: Path) -> None:
    path = deep(tmp_path) / "s"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with short(path) as name:
            assert len(os.fsencode(name)) <= LONGEST
            server.bind(name)
        server.listen()
        assert path.is_socket()
        with short(path) as name:
            client.connect(name)
        assert not Path(name).parent.exists(), "nothing is left of the way there"
        server.accept()[0].close()


def test_a_relative_path_is_met_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(deep(tmp_path))
    path = Path("f" * 100)
    path.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        with short(path / "s") as name:
            server.bind(name)
        assert (path / "s").is_socket()


async def test_a_node_in_a_deep_directory_answers_and_is_found_busy(tmp_path: Path) -> None:
    async def status() -> str:
        return "well"

    folder = deep(tmp_path)
    server = ControlServer(folder, {"status": status})
    await server.start()
    try:
        assert await asyncio.to_thread(ask, folder, "status") == "well"
        with pytest.raises(BusyError):
            await ControlServer(folder, {}).start()
    finally:
        await server.close()
    assert list(folder.iterdir()) == []


async def test_a_control_socket_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    server, before = ControlServer(folder, {}), os.umask(0)
    try:
        await server.start()
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (socket_path(folder), folder)]
    finally:
        os.umask(before)
        await server.close()
    assert modes == [0o600, 0o700]


async def test_a_node_without_a_file_left_says_so_once_for_a_try_and_accepts_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by a limit on a worker's files: asyncio planned 100 tries for each that failed, and each of these
    100 more; in 20 s there were 90,000 lines of tracebacks."""
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", RETRY_S)
    loop, accepted = asyncio.get_running_loop(), asyncio.Event()
    failures: list[dict[str, Any]] = []

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        failures.append(context)
        explain_lack(loop, context)
        if len(failures) == 1:
            loop.call_later(TRIES * RETRY_S, resource.setrlimit, resource.RLIMIT_NOFILE, limit)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        accepted.set()

    loop.set_exception_handler(handle)
    server = await start_server(accept, tmp_path / "s")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as client, socket.socket(socket.AF_UNIX) as spare:
        highest = spare.fileno()
        client.connect(str(tmp_path / "s"))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, limit[1]))
            async with asyncio.timeout(20.0):
                await accepted.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    server.close()
    assert 1 <= len(failures) <= TRIES + 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(failures)
    assert all("raise `ulimit -n`" in line for line in lines)


async def test_a_callback_without_memory_is_named_in_a_line_and_waits_before_it_is_called_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found by a limit on a worker's memory: asyncio reads a pipe again at once, with a traceback each time."""
    loop, times = asyncio.get_running_loop(), list[float]()
    done = asyncio.Event()

    def read() -> None:
        times.append(time.monotonic())
        if len(times) < TRIES:
            raise MemoryError
        loop.remove_reader(near)
        done.set()

    loop.set_exception_handler(explain_lack)
    near, far = socket.socketpair()
    with near, far:
        loop.add_reader(near, read)
        far.send(b"x")
        async with asyncio.timeout(20.0):
            await done.wait()
    assert min(b - a for a, b in pairwise(times)) >= NO_MEMORY_S
    assert [record.exc_info for record in caplog.records] == [None] * (TRIES - 1)
    assert all("no memory is left" in record.getMessage() for record in caplog.records)
