"""Tell the service manager that started this program (systemd) whether it is ready, alive or stopping.

The manager's socket is taken out of the environment at the first look, so that no child speaks for its parent.
Without a manager nothing is sent; one that does not listen is no error.
"""

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping
from functools import cache

from ...crypto.keys import KeyFileError

logger = logging.getLogger(__name__)

MAX_PASSPHRASE = 4096
"""Characters."""


class ServiceManager:
    """The manager that `environ` names."""

    def __init__(self, environ: MutableMapping[str, str], pid: int) -> None:
        """`pid` is that of this process: the watchdog may be meant for another one."""
        self._address = environ.pop("NOTIFY_SOCKET", "")
        limit_us, meant = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", str(pid))
        watched = bool(self._address) and limit_us.isdecimal() and meant == str(pid)
        self.pause_s = int(limit_us) / 3e6 if watched else 0.0
        """Pause between two signs of life: a third of what the manager waits for; 0: none are due."""

    def tell(self, *lines: str) -> None:
        """Send lines such as `READY=1`."""
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):  # an abstract name
            address = "\0" + address[1:]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            logger.debug("the service manager does not listen: %s", error)

    async def keep_alive(self) -> None:
        """Send signs of life for as long as the event loop runs; returns at once where none are due."""
        while self.pause_s > 0:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.pause_s)


@cache
def service_manager() -> ServiceManager:
    """Return the manager of this process."""
    return ServiceManager(os.environ, os.getpid())


def passphrase() -> str | None:
    """Return the passphrase of the key: PRIMERL_PASSPHRASE, or what the file PRIMERL_PASSPHRASE_FILE holds.

    None without either. Raises KeyFileError: a node whose passphrase is lost must not go on without one.
    """
    path = os.environ.get("PRIMERL_PASSPHRASE_FILE", "")
    if (given := os.environ.get("PRIMERL_PASSPHRASE")) or not path:
        return given or None
    try:
        with open(path, encoding="utf-8") as file:
            secret = file.read(MAX_PASSPHRASE).rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise KeyFileError(f"no passphrase can be read from {path}: {error}") from error
    if not secret:
        raise KeyFileError(f"{path} holds no passphrase: PRIMERL_PASSPHRASE_FILE names it")
    return secret
