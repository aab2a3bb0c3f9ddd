"""Every implementation of the port seam, by name, for the suite test_port.py.

To add one: write a context manager that takes a directory and yields two ports that talk to each other.
"""

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from support import ring_cases
from support.ring_cases import SHAPE

from primerl.node.pipeline.frames import FrameLimits
from primerl.node.pipeline.ports import Port, SocketOutlet, SocketPort, SplitPort

Factory = Callable[[Path], AbstractContextManager[tuple[Port, Port]]]


@contextmanager
def memory(directory: Path) -> Generator[tuple[Port, Port]]:
    """Yield two ports in memory."""
    near, far = ring_cases.pair(depth=4)
    yield near, far
    near.close()
    far.close()


def socket_port(path: str, limits: FrameLimits) -> Port:
    """Yield two SocketPorts."""
    return SocketPort(path, limits, behind=3)


def split_port(path: str, limits: FrameLimits) -> Port:
    """Make a SplitPort whose outlet is in this process."""
    return SplitPort(path, limits, SocketOutlet(limits))


def sockets(directory: Path) -> AbstractContextManager[tuple[Port, Port]]:
    """Yield the two ports of connected processes."""
    return spliced(directory, socket_port)


def split(directory: Path) -> AbstractContextManager[tuple[Port, Port]]:
    """Yield two SplitPorts."""
    return spliced(directory, split_port)


@contextmanager
def spliced(
    directory: Path, made: Callable[[str, FrameLimits], Port]
) -> Generator[tuple[Port, Port]]:
    """Yield two Unix sockets with a relay between them, like a node."""
    path = directory / "port.sock"
    limits = FrameLimits.of(SHAPE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()
        near = made(str(path), limits)
        first, _ = server.accept()
        far = made(str(path), limits)
        second, _ = server.accept()
    splices = [
        threading.Thread(target=splice, args=ends) for ends in ((first, second), (second, first))
    ]
    for thread in splices:
        thread.start()
    yield near, far
    near.close()
    far.close()
    for thread in splices:
        thread.join(5)
    first.close()
    second.close()


def splice(source: socket.socket, target: socket.socket) -> None:
    """Relay bytes until one side ends, then end the other."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


FACTORIES: dict[str, Factory] = {"memory": memory, "socket": sockets, "split": split}
