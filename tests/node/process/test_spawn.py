"""Logged processes, the rotation of their logs, and children whose parent ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support.machine import DEADLINE_S, fill, gone, small_disk

from primerl.node.process.spawn import LoggedProcess, kill_group, signal_process, without_secrets


async def test_stopping_a_child_ends_its_own_children(tmp_path: Path) -> None:
    child = LoggedProcess(
        "c", ["sh", "-c", "sleep 600 & echo $!; wait"], tmp_path / "c.log", os.environ
    )
    await child.start()
    async with asyncio.timeout(DEADLINE_S):
        while not child.last_lines(1):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await child.stop(5.0)
    assert child.ended
    await gone(int(child.last_lines(1)[0]))


async def test_a_child_that_ignores_its_end_is_killed_after_its_parent() -> None:
    child = (
        "import os, time\nfrom primerl.node.process.spawn import leave_with_parent\n"
        "leave_with_parent(os.environ, poll_s=0.05, grace_s=0.2)\nprint(os.getpid(), flush=True)\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        "env = {**os.environ, 'PRIMERL_PARENT_PID': str(os.getpid())}\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], env=env, start_new_session=True)\n"
        "time.sleep(60)"
    )
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE
    )
    assert launcher.stdout is not None
    pid = int(await launcher.stdout.readline())
    assert psutil.pid_exists(pid)
    launcher.kill()
    await launcher.communicate()
    await gone(pid)


def test_signals_to_a_process_that_has_gone_are_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    gone.wait()
    signal_process(gone.pid, signal.SIGTERM)
    kill_group(gone.pid)


def test_a_large_log_of_a_process_is_put_aside_while_it_writes_on(tmp_path: Path) -> None:
    child = LoggedProcess("c", ["true"], tmp_path / "c.log", os.environ)
    child.put_log_aside(100, 2)  # there is none yet
    with child.log.open("ab", buffering=0) as log:
        for text in (b"a", b"b", b"c", b"d"):
            log.write(text * 101)
            child.put_log_aside(100, 2)
        log.write(b"e" * 100)
        child.put_log_aside(100, 2)
    held = {path.name: path.read_bytes()[:1] for path in tmp_path.iterdir()}
    assert held == {"c.log": b"e", "c.log.1": b"d", "c.log.2": b"c"}
    assert child.log.stat().st_size == 100


def test_a_log_that_cannot_be_put_aside_is_kept_as_it_is(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        child = LoggedProcess("c", ["true"], disk / "c.log", os.environ)
        child.log.write_bytes(b"x" * 101)
        fill(disk)
        with pytest.raises(OSError, match="No space"):
            child.put_log_aside(100, 2)
        assert child.log.stat().st_size == 101
        assert not (disk / ".c.log.partial").exists()


def test_credentials_are_no_variables_of_a_process_that_asks_no_service() -> None:
    given = {
        "PATH": "/bin",
        "PRIMERL_PASSPHRASE_FILE": "/k",
        "HF_TOKEN": "t",
        "TOKENIZERS": "0",
        "key": "k",
    }
    assert without_secrets(given) == {"PATH": "/bin", "TOKENIZERS": "0"}
