"""Configuration of models behind OpenAI-compatible APIs, judges among them. Same rules as run.py."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_config import BaseConfig

from .engine import Positive


def _check_url(text: str) -> str:
    """The base URL of an API, without a slash at its end. Raises ValueError."""
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and url.hostname and not (url.query or url.fragment)
        named = good and url.username is None and (url.port is None or url.port > 0)
    except ValueError:
        named = False
    if not named or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(
            "an endpoint is http(s)://HOST/v1, without a key or a password: name its variable in key_variable"
        )
    return text.rstrip("/")


Url = Annotated[str, AfterValidator(_check_url)]


def _check_url_or_none(text: str) -> str:
    """Check a URL as _check_url(); empty stays empty."""
    return _check_url(text) if text else ""


class ChatApiConfig(BaseConfig):
    """A model behind an OpenAI-compatible API."""

    url: Url
    """Base URL; /chat/completions is added to it."""
    model: str
    """The model's name at the API."""
    key_variable: str = ""
    """The environment variable that holds the key; empty sends none."""
    concurrency: Positive = 16
    """Requests at a time."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time for one reply."""
    retries: Annotated[int, Field(ge=0)] = 7
    """Further attempts after no answer or an error of the server, after 0.5, 1, 2, 4, 8, 8, .. seconds."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The API's field for the limit of a reply."""
    proxy: bool = False
    """Go through the proxy that HTTP_PROXY and HTTPS_PROXY name."""
    options: dict[str, Any] = {}
    """Laid over the body of every request."""


class JudgeConfig(ChatApiConfig):
    """The model that an environment's rewards ask. The trainer alone asks it: workers get no URL and no key."""

    url: Annotated[str, AfterValidator(_check_url_or_none)] = ""
    """Base URL; /chat/completions is added to it."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Time for one answer."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Further attempts, after 0.5, 1, 2, .. seconds, before the judge counts as down. It is asked again for as
    long as that takes; rollouts wait for it."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Temperature, in place of the one in the environment's code; 0 takes the likeliest token."""
    max_tokens: Positive = 1024
    """Most tokens of an answer."""

    def published(self) -> "JudgeConfig":
        """Return what every node of a run may know: not how it is reached."""
        return JudgeConfig(
            model=self.model, temperature=self.temperature, max_tokens=self.max_tokens
        )
