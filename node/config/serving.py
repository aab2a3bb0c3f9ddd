"""Configuration of `primerl-node inference`: policy, address, key, limits."""

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import model_validator

from .base import BaseConfig
from .paths import home_directory
from .run import NodeConfig, Port, Seconds


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class ServedModelConfig(BaseConfig):
    """The policy of a server that does not follow a run."""

    name: str = ""
    """A directory (also weights/step_N of a run, and LoRA adapters) or a hub id."""
    base: str = ""
    """Base model of LoRA adapters, a directory or a hub id; default: the one in their adapter_config.json."""


class ApiConfig(BaseConfig):
    """The OpenAI-compatible HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines can reach needs a key."""
    port: Port = 8000
    """TCP port; 0 takes a free one."""
    key_variable: str = ""
    """Environment variable that holds the API key; if set, every request except /health must send it
    (Authorization: Bearer KEY)."""
    served_name: str = ""
    """Id of the model in requests and in /v1/models; default: model.name, or the run's name."""
    timeout_s: Seconds = 600.0
    """Timeout of one request (504)."""
    tool_call_parser: str = "auto"
    """With vLLM: its tool call parser (`hermes`, `qwen3_coder`), or `none`; `auto` detects it from the chat
    template."""
    reasoning_parser: str = "auto"
    """The same for reasoning (`qwen3`, `deepseek_r1`)."""

    @model_validator(mode="after")
    def _is_closed_to_strangers(self) -> Self:
        if not is_loopback(self.host) and not self.key_variable:
            raise ValueError(
                f"api.host {self.host} can be reached by other machines: set api.key_variable to the name of "
                "the environment variable that holds the key, or use 127.0.0.1"
            )
        return self


class ServeConfig(NodeConfig):
    """`primerl-node inference`."""

    ticket: str = ""
    """Join ticket of a run: always serve its newest policy."""
    model: ServedModelConfig = ServedModelConfig()
    api: ApiConfig = ApiConfig()

    @property
    def directory(self) -> Path:
        """Directory of this node's key, and of the weights of a run that it follows."""
        return self.data_dir or home_directory() / ".primerl" / "inference"

    @model_validator(mode="after")
    def _serves_one_policy(self) -> Self:
        if self.ticket and self.model.name:
            raise ValueError("give either model.name or a ticket: one server serves one policy")
        return self
