"""What a service manager is told, over a real socket, and the passphrase that it hands over."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from primerl.crypto.keys import KeyFileError
from primerl.node.ops.service_manager import ServiceManager, passphrase

PID = 4242


def listener(address: str) -> socket.socket:
    """A service manager's socket."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(address)
    manager.setblocking(False)
    return manager


@pytest.mark.parametrize("abstract", [False, True])
def test_a_manager_is_told_and_its_socket_is_kept_from_children(
    tmp_path: Path, abstract: bool
) -> None:
    name = f"primerl-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    environ = {"NOTIFY_SOCKET": f"@{name}" if abstract else name, "PATH": "/bin"}
    with listener(f"\0{name}" if abstract else name) as manager:
        service = ServiceManager(environ, PID)
        assert environ == {"PATH": "/bin"}
        service.tell("READY=1", "STATUS=up")
        assert manager.recv(100) == b"READY=1\nSTATUS=up"
        assert service.pause_s == 0


async def test_signs_of_life_come_while_the_event_loop_runs(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with listener(address) as manager:
        environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000", "WATCHDOG_PID": str(PID)}
        beating = asyncio.create_task(ServiceManager(environ, PID).keep_alive())
        for _ in range(3):
            assert await asyncio.get_running_loop().sock_recv(manager, 100) == b"WATCHDOG=1"
        beating.cancel()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere/notify"},
        {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "3000", "WATCHDOG_PID": "1"},
        {"WATCHDOG_USEC": "3000"},
    ],
)
async def test_without_a_manager_or_with_another_ones_watchdog_nothing_is_due(
    environ: dict[str, str],
) -> None:
    service = ServiceManager(dict(environ), PID)
    service.tell("READY=1")  # no error
    async with asyncio.timeout(60.0):
        await service.keep_alive()


def test_a_passphrase_comes_from_a_variable_or_a_file_and_is_never_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("from the file\n")
    monkeypatch.delenv("PRIMERL_PASSPHRASE", raising=False)
    monkeypatch.delenv("PRIMERL_PASSPHRASE_FILE", raising=False)
    assert passphrase() is None
    monkeypatch.setenv("PRIMERL_PASSPHRASE_FILE", str(secret))
    assert passphrase() == "from the file"
    monkeypatch.setenv("PRIMERL_PASSPHRASE", "given")
    assert passphrase() == "given"
    monkeypatch.delenv("PRIMERL_PASSPHRASE")
    for text in ("", "\n", None):
        secret.write_text(text) if text is not None else secret.unlink()
        with pytest.raises(KeyFileError, match="passphrase"):
            passphrase()
