"""A relay for iroh over plain HTTP: as much of the protocol of iroh-relay (v1, v2) as tests need."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import blake3
from aiohttp import WSMsgType, web

from primerl.crypto.keys import NODE_ID_BYTES, verify

CONTEXT = "iroh-relay handshake v1 challenge signature"
PROTOCOLS = ("iroh-relay-v2", "iroh-relay-v1")
CHALLENGE, PROOF, WELCOME, PING, PONG = b"\x00", 1, b"\x02", 9, b"\x0a"
TO_PEER = (4, 5)
"""Frames that carry datagrams, by their first byte; the receiver gets them with that byte raised by two."""
SIGNATURE_AT = 2 + NODE_ID_BYTES
BACKLOG = 512
"""Frames that wait for a client; further ones are lost, as on any path."""


@dataclass
class Relay:
    """A relay that runs."""

    url: str = ""
    carried: int = 0
    """Frames that went from one client to another."""
    clients: dict[bytes, "asyncio.Queue[bytes]"] = field(
        default_factory=dict[bytes, "asyncio.Queue[bytes]"]
    )

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Carry the frames of one client."""
        offered = request.headers.get("Sec-WebSocket-Protocol", "")
        socket = web.WebSocketResponse(
            protocols=[name for name in PROTOCOLS if name in offered], compress=False
        )
        await socket.prepare(request)
        challenge = os.urandom(16)
        await socket.send_bytes(CHALLENGE + challenge)
        proof = bytes((await socket.receive(10)).data)
        node = proof[1 : 1 + NODE_ID_BYTES]
        signed = blake3.blake3(challenge, derive_key_context=CONTEXT).digest()
        if proof[0] != PROOF or not verify(node, proof[SIGNATURE_AT:], signed):
            return socket
        await socket.send_bytes(WELCOME)
        outgoing = self.clients[node] = asyncio.Queue(BACKLOG)
        sending = asyncio.create_task(self._send(socket, outgoing))
        try:
            async for message in socket:
                if message.type == WSMsgType.BINARY:
                    self._take(node, bytes(message.data), outgoing)
        finally:
            sending.cancel()
            if self.clients.get(node) is outgoing:
                del self.clients[node]
        return socket

    def _take(self, node: bytes, frame: bytes, outgoing: "asyncio.Queue[bytes]") -> None:
        kind, target = frame[0], frame[1 : 1 + NODE_ID_BYTES]
        if kind == PING:
            outgoing.put_nowait(PONG + frame[1:9])
        elif kind in TO_PEER and target in self.clients and not self.clients[target].full():
            self.carried += 1
            self.clients[target].put_nowait(bytes([kind + 2]) + node + frame[1 + NODE_ID_BYTES :])

    async def _send(self, socket: web.WebSocketResponse, outgoing: "asyncio.Queue[bytes]") -> None:
        while True:
            await socket.send_bytes(await outgoing.get())


@asynccontextmanager
async def relaying() -> AsyncGenerator[Relay]:
    """Run a relay on this machine while the block lasts."""
    relay, app = Relay(), web.Application()
    app.router.add_get("/relay", relay.serve)
    app.router.add_get("/ping", _answer)
    app.router.add_get("/generate_204", _answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    relay.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield relay
    finally:
        await runner.cleanup()


async def _answer(request: web.Request) -> web.Response:
    return web.Response(status=204)
