"""The config of `primerl-node inference`: the policy to serve, the address, the key, the limits."""

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_config import BaseConfig

from .run import NodeConfig, Port, Positive, Seconds


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class ServedModelConfig(BaseConfig):
    """The policy of a server that follows no run."""

    name: str = ""
    """A directory (also weights/step_N of a run, and LoRA adapters) or a hub id."""
    base: str = ""
    """Base of LoRA adapters: a directory or a hub id; else the one in their adapter_config.json."""


class ApiConfig(BaseConfig):
    """The OpenAI-compatible HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs a key."""
    port: Port = 8000
    """TCP port; 0 takes a free one."""
    key_variable: str = ""
    """Name of the environment variable that holds the key; with one, every request but /health has to bring it
    (Authorization: Bearer KEY)."""
    served_name: str = ""
    """Id of the model in requests and in /v1/models; else model.name, or the name of the run."""
    max_body_mib: Annotated[float, Field(gt=0, le=256)] = 8.0
    """Largest request."""
    max_choices: Positive = 128
    """Most completions of one request: n times its prompts."""
    max_inflight: Positive = 1024
    """Most completions at once; further requests are told to come back (429)."""
    max_stop_strings: Positive = 16
    """Most stop strings of one request; vLLM's own routes take any number."""
    timeout_s: Seconds = 600.0
    """Longest time for one request; then it is given up (504)."""
    stream_tokens: Positive = 32
    """Most tokens of one piece of a stream, the first pieces are shorter; vLLM's own come token by token."""
    tool_call_parser: str = "auto"
    """With vLLM: its parser of the model's tool calls (`hermes`, `qwen3_coder`), or `none`; `auto` finds it by
    the chat template."""
    reasoning_parser: str = "auto"
    """The same for reasoning (`qwen3`, `deepseek_r1`)."""

    @model_validator(mode="before")
    @classmethod
    def _names_what_replaced_it(cls, given: Any) -> Any:
        if isinstance(given, dict) and "reply_form" in given:
            raise ValueError(
                "api.reply_form is gone: with engine.type = vllm set api.tool_call_parser and "
                "api.reasoning_parser to vLLM's names, or leave them auto"
            )
        return given

    @model_validator(mode="after")
    def _is_closed_to_strangers(self) -> Self:
        if not is_loopback(self.host) and not self.key_variable:
            raise ValueError(
                f"api.host {self.host} can be reached by others: set api.key_variable to the name of the "
                "environment variable that holds the key, or keep 127.0.0.1"
            )
        return self


class ServeConfig(NodeConfig):
    """`primerl-node inference`."""

    ticket: str = ""
    """The join ticket of a run: serve its newest policy."""
    model: ServedModelConfig = ServedModelConfig()
    api: ApiConfig = ApiConfig()

    @property
    def directory(self) -> Path:
        """Directory of this node's key, and of the weights of a run that it follows."""
        return self.data_dir or Path.home() / ".primerl" / "inference"

    @model_validator(mode="after")
    def _serves_one_policy(self) -> Self:
        if self.ticket and self.model.name:
            raise ValueError("give either model.name or a ticket: one server serves one policy")
        return self
