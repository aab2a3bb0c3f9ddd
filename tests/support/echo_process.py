"""A child process for tests of the process layer: executes the commands in request bodies.

Run as a program; it has no torch and starts at once. With the argument `socket` it connects to a socket,
else it uses pipes.
"""

import asyncio
import os
import signal
import sys
import time

import msgspec

from primerl.node.process.frames import HEAD_BYTES, ProcessMessage
from primerl.node.process.serve import Outbox, ParentGone, ParentSocket, serve_parent

MAX_FRAME = 4096
CONNECT_S = 30.0


MESSAGES: msgspec.msgpack.Decoder[ProcessMessage[str]] = msgspec.msgpack.Decoder(
    ProcessMessage[str]
)
"""Of either end."""


class Echo:
    """Echoes request bodies, except commands."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._write = outbox._write  # pyright: ignore[reportPrivateUsage]
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, request: ProcessMessage[str]) -> None:
        """Begin to answer a request."""
        self._tasks[request.number] = asyncio.create_task(self._answer(request))

    async def close(self) -> None:
        """Report that the end was seen."""
        print("closed in peace", file=sys.stderr, flush=True)

    async def _answer(self, request: ProcessMessage[str]) -> None:
        command, _, argument = request.body.partition(" ")
        match command:
            case "wait":  # others are answered meanwhile
                await asyncio.sleep(float(argument))
            case "hang":  # nobody is
                time.sleep(600)  # noqa: ASYNC251
            case "die":
                print("I was told to die", file=sys.stderr, flush=True)
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), getattr(signal, argument))
            case "print":  # on the standard output, as a library might
                print(argument, flush=True)
            case "descend":
                process = await asyncio.create_subprocess_exec("sleep", "600")
                self._outbox.put(request.number, str(process.pid))
                await process.wait()
            case "garbage":
                self._write((5).to_bytes(HEAD_BYTES, "little") + b"hello")
            case "huge":
                self._write(b"\xff" * HEAD_BYTES)
            case _:
                pass
        self._outbox.put(request.number, request.body)


def answer_at_socket() -> None:
    """Serve like Echo over a socket, one request at a time."""
    parent = ParentSocket.open(os.environ, CONNECT_S, MAX_FRAME)
    try:
        while True:
            if (body := parent.next(0.05)) is None:
                continue
            request = MESSAGES.decode(body)
            if request.body == "end":
                parent.end()
                return
            if request.body == "hang":
                time.sleep(600)
            parent.reply(request.number, request.body)
    except ParentGone:
        parent.abandon()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["socket"]:
            answer_at_socket()
        case ["unconnected"]:
            print("no such device", file=sys.stderr)
            sys.exit(4)
        case _:
            serve_parent(MESSAGES.decode, Echo, max_frame=MAX_FRAME)
