"""Configuration of models behind OpenAI-compatible APIs, including judges. Same rules as run.py."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from .base import BaseConfig
from .engine import Positive


def check_url(text: str) -> str:
    """Check an API's base URL; return it without a trailing slash. Raises ValueError."""
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and url.hostname and not (url.query or url.fragment)
        named = good and url.username is None and (url.port is None or url.port > 0)
    except ValueError:
        named = False
    if not named or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(
            "an endpoint is http(s)://HOST/v1, without a key or a password: put the key into an environment "
            "variable and name that in key_variable"
        )
    return text.rstrip("/")


Url = Annotated[str, AfterValidator(check_url)]


def _check_url_or_none(text: str) -> str:
    """Check a URL like check_url(), but allow an empty one."""
    return check_url(text) if text else ""


class ChatApiConfig(BaseConfig):
    """A model behind an OpenAI-compatible API."""

    url: Url
    """Base URL; /chat/completions is added to it."""
    model: str
    """Model name, as the API knows it."""
    key_variable: str = ""
    """Environment variable that holds the API key; empty: send none."""
    concurrency: Positive = 16
    """Most requests at a time."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Timeout of one reply, in seconds."""
    retries: Annotated[int, Field(ge=0)] = 7
    """Retries after a timeout, connection or server error, with delays of 0.5, 1, 2, 4, 8, 8, .. seconds."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The API's field for the token limit of a reply."""
    proxy: bool = False
    """Use the proxy in HTTP_PROXY and HTTPS_PROXY."""
    options: dict[str, Any] = {}
    """Fields merged into the body of every request."""


class JudgeConfig(ChatApiConfig):
    """The model that an environment's rewards query. Only the trainer queries it: workers get no URL or key."""

    url: Annotated[str, AfterValidator(_check_url_or_none)] = ""
    """Base URL; /chat/completions is added to it."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Timeout of one answer, in seconds."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Retries, with delays of 0.5, 1, 2, .. seconds, before the judge counts as down. It is then queried until
    it answers again; rollouts wait for it."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Overrides the temperature in the environment's code; 0 takes the most likely token."""
    max_tokens: Positive = 1024
    """Token limit of an answer."""

    def published(self) -> "JudgeConfig":
        """Return the part of the config that all nodes of a run may see: not its URL or key."""
        return JudgeConfig(
            model=self.model, temperature=self.temperature, max_tokens=self.max_tokens
        )
