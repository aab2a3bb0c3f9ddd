"""A local OpenAI-compatible server with scripted answers."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], web.StreamResponse]


def chat_completion(
    text: str | None, finish: str = "stop", *, prompt: int = 7, completion: int = 3
) -> web.Response:
    """A chat completion."""
    message = {"role": "assistant", "content": text}
    return web.json_response(
        {
            "id": "x",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
        }
    )


def refused(status: int, message: str, **headers: str) -> web.Response:
    """Make an error reply in OpenAI's format."""
    error = {"error": {"message": message, "type": "x", "code": None}}
    return web.json_response(error, status=status, headers=headers)


@dataclass
class Server:
    """Recorded requests and keys."""

    answer: Answer
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: set[str] = field(default_factory=set[str])
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Of the last request, names in lower case."""
    running: int = 0
    most: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions, /v1/completions."""
        body = await request.json()
        self.bodies.append(body)
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        self.keys.add(request.headers.get("Authorization", ""))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        return self.answer(body)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        self.keys.add(request.headers.get("Authorization", ""))
        return web.json_response({"object": "list", "data": [{"id": "served", "object": "model"}]})


@asynccontextmanager
async def openai_server(answer: Answer) -> AsyncGenerator[Server]:
    """A server that answers with `answer(body)` while the block lasts."""
    server = Server(answer)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    app.router.add_post("/v1/completions", server.handle)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        server.url = f"http://127.0.0.1:{port}/v1"
        yield server
    finally:
        await runner.cleanup()
