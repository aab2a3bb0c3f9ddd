"""The registry of running nodes, and a node that ends while it is asked something."""

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from primerl.node.errors import NetworkError
from primerl.node.ops.control import (
    ControlServer,
    ask,
    register,
    registry_directory,
    running,
    unregister,
)


def test_a_registered_node_is_found_until_it_unregisters(tmp_path: Path) -> None:
    where = tmp_path / "running"
    path = register(tmp_path / "d", "trainer", "ab", where=where)
    [entry] = running(where=where)
    assert (entry.pid, entry.data_dir) == (os.getpid(), str(tmp_path / "d"))
    assert (entry.role, entry.run) == ("trainer", "ab")
    unregister(path)
    unregister(path)
    assert running(where=where) == []


def test_two_nodes_of_one_process_are_two_entries_latest_first_that_only_the_owner_sees(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        register(tmp_path / name, "inference", "", where=tmp_path / "r")
    assert [Path(e.data_dir).name for e in running(where=tmp_path / "r")] == ["b", "a"]
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o700


def test_entries_of_dead_processes_and_recycled_pids_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for change in ({"pid": gone.pid}, {"birth": "12345"}):
        path = register(tmp_path, "trainer", "", where=tmp_path)
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        assert running(where=tmp_path) == []
        assert not path.exists()


def test_garbage_is_removed_and_does_no_harm(tmp_path: Path) -> None:
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"pid": 1}'), ("d", "\x00\xff")):
        (tmp_path / f"1-0000000{name}.json").write_text(text)
    mine = tmp_path / "mine.json"
    mine.write_text("{")
    good = register(tmp_path, "trainer", "", where=tmp_path)
    assert len(running(where=tmp_path)) == 1
    assert sorted(tmp_path.glob("*.json")) == sorted([good, mine]), "a user's file is none of ours"


def test_a_directory_that_cannot_be_written_costs_only_the_entry(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    unregister_me = register(tmp_path, "trainer", "", where=tmp_path / "file" / "below")
    assert not unregister_me.parent.exists()


def test_the_runtime_directory_goes_before_the_home(tmp_path: Path) -> None:
    assert registry_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "primerl"
    for environ in ({}, {"XDG_RUNTIME_DIR": str(tmp_path / "absent")}):
        assert registry_directory(environ) == Path.home() / ".primerl" / "running"


@pytest.mark.parametrize("reply", [b"", b'{"data": {"step"'])
def test_a_node_that_is_killed_while_it_answers_is_named(reply: bytes) -> None:
    """Found by a trainer that ran out of files: `status` ended in a traceback of a JSON decoder."""
    with (
        tempfile.TemporaryDirectory(prefix="prl") as folder,
        socket.socket(socket.AF_UNIX) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        server.bind(f"{folder}/control.sock")
        server.listen()
        asked = thread.submit(ask, Path(folder), "status")
        with server.accept()[0] as connection:
            connection.recv(1024)
            connection.sendall(reply)
        with pytest.raises(NetworkError, match="ended before it had answered"):
            asked.result(10.0)


def test_a_node_that_ends_while_it_answers_hangs_up_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a loop of its own, whose end would cancel what is left."""
    asked = asyncio.Event()

    async def never() -> Any:
        asked.set()
        await asyncio.Event().wait()

    async def run(directory: Path) -> None:
        server = ControlServer(directory, {"figures": never})
        await server.start()
        asking = asyncio.create_task(asyncio.to_thread(ask, directory, "figures"))
        await asked.wait()
        await server.close()
        with pytest.raises(NetworkError):
            await asking

    with tempfile.TemporaryDirectory(prefix="prl") as name:
        asyncio.run(run(Path(name)))
    assert not caplog.records
