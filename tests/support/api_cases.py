"""An API server over a scripted engine, and a raw HTTP client."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from support.chat_model import IM_END, make_chat_model

from primerl.node.api.completions import EngineRoutes
from primerl.node.api.server import ApiLimits, HttpServer, Served, serving
from primerl.node.api.vllm_proxy import ProxyTargets, VllmProxy
from primerl.node.config.serving import ApiConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.inference.engine import Completion, Engine, EngineStats, GenerateRequest
from primerl.node.models import huggingface
from primerl.node.weights.state import Changed, State

VOCABULARY = 288
MAX_LENGTH = 256
NAME = "tiny"
KEY = "sesame-open"


@dataclass
class SayingEngine:
    """Generates the bytes of `says` after every prompt of `after` tokens, then the end token.

    What was said already is part of the prompt when a completion is asked for in pieces: so `after` has to
    be the length of the test's own prompt; None is whatever the first request has.
    """

    says: str = "hello"
    after: int | None = None
    delay_s: float = 0.0
    error: Exception | None = None
    version: int = 7
    requests: list[GenerateRequest] = field(default_factory=list[GenerateRequest])
    cancelled: int = 0
    now: EngineStats = field(default_factory=EngineStats)
    on_request: Callable[["SayingEngine"], None] = lambda engine: None
    token_ids: list[int] = field(default_factory=list[int])
    """What it says instead, end token included."""

    @property
    def policy_version(self) -> int:
        return self.version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        pass

    async def load(self, version: int, state: State) -> None:
        self.version = version

    async def update(self, version: int, state: State, changed: Changed) -> None:
        self.version = version

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        self.on_request(self)
        first = self.version
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        self.after = len(request.prompt) if self.after is None else self.after
        said = self.token_ids or [*self.says.encode(), IM_END]
        tokens = said[len(request.prompt) - self.after :][: request.max_tokens]
        ends = [index for index, token in enumerate(tokens) if token in request.stop_token_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        logprobs = [-(token % 7) / 8 for token in tokens]
        finish = "stop" if ends else "length"
        return Completion(tokens, logprobs, finish, first, first)

    def stats(self) -> EngineStats:
        return self.now

    async def close(self) -> None:
        pass


@dataclass
class Reply:
    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """Return the reply's error object; check that it has all of OpenAI's fields."""
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Any]:
        """Return the events of a stream; check that it ends with [DONE]."""
        parts = self.text.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@dataclass
class Client:
    """A raw HTTP client."""

    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        sent = {"Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers=sent) as reply:
            return Reply(reply.status, reply.headers, await reply.text())

    async def get(self, path: str, **headers: str) -> Reply:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.get(self.url + path, headers=sent) as reply:
            return Reply(reply.status, reply.headers, await reply.text())

    async def chat(self, **fields: Any) -> Reply:
        body = {"messages": [{"role": "user", "content": "hi"}]} | fields
        return await self.post("/v1/chat/completions", body)

    async def complete(self, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"prompt": "ab", "max_tokens": 99} | fields)

    async def generate(self, token_ids: list[int], **fields: Any) -> Reply:
        drawing = fields.pop("sampling_params", {"max_tokens": 99})
        body = {"token_ids": token_ids, "sampling_params": drawing} | fields
        return await self.post("/inference/v1/generate", body)


LIMITS = ApiLimits()


@asynccontextmanager
async def api(
    engine: Engine,
    model_dir: Path,
    *,
    max_length: int = MAX_LENGTH,
    name: str = NAME,
    proxied: ProxyTargets | None = None,
    limits: ApiLimits = LIMITS,
    **settings: Any,
) -> AsyncGenerator[Client]:
    """Run a server; yield a client of it."""
    chat = ChatFormat.load(model_dir, needs_template=False)
    config = ApiConfig.model_validate({"port": 0, **settings})
    served = Served(name, VOCABULARY, max_length, config, limits)
    own = EngineRoutes(engine, chat, served)
    routes = (VllmProxy(proxied), own) if proxied else (own,)
    async with serving(HttpServer(engine, served, routes)) as url:
        async with aiohttp.ClientSession() as http:
            yield Client(url, http)


def chat_dir(directory: Path, **made: Any) -> Path:
    """Write the files of a model with a chat template."""
    return make_chat_model(directory, **made)


SHAPE = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 272}
TEMPLATE = """
{%- if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>{% endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
{%- for c in m.tool_calls or [] -%}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is there.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def tool_dir(directory: Path, template: str = TEMPLATE) -> Path:
    """Write the files of a model of SHAPE, including weights."""
    huggingface.create(directory, SHAPE, 3)
    (directory / "chat_template.jinja").write_text(template)
    return directory
