"""Sockets at paths longer than a kernel accepts."""

import asyncio
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from primerl.node.errors import BusyError
from primerl.node.ops.control import ControlServer, ask
from primerl.node.process.unix_sockets import LONGEST, short
from primerl.node.storage.run_files import socket_path


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
