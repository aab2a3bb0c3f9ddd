"""What a request asks for, whatever its route: how to draw, how much, how to answer. Checked before anything
is computed."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...crypto.hashing import derive
from ..engines.adjustment import Adjustment
from ..serve_config import ApiConfig
from .adjustments import read_adjustment
from .errors import ApiError, bad, too_long
from .fields import Fields
from .replies import Tool

MAX_TOKENS = 1 << 31
MAX_STOP_IDS = 1024
LONGEST_STOP = 1024
SEEDS = 1 << 63
HOTTEST = 100.0


@dataclass(frozen=True)
class Served:
    """The model as requests see it."""

    name: str
    vocab_size: int
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    api: ApiConfig


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn and cut."""

    n: int
    max_tokens: int | None
    """None: as many as there is room for."""
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    """Leave a stop string, or the text of a stop token, in the text."""
    special: bool
    """Show special tokens in the text."""
    top: int = 0
    """Tell so many of the likeliest tokens beside each."""
    adjustment: Adjustment | None = None
    """How logits are changed before; None: not at all."""

    @property
    def least(self) -> int:
        """Tokens in which nothing can end a completion."""
        return self.adjustment.min_tokens if self.adjustment else 0


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    token_ids: bool
    """Give token ids, too."""
    names_as_ids: bool
    """Call tokens `token_id:N` in logprobs."""
    request_id: str
    tools: tuple[Tool, ...] = ()
    """That a reply may call; of a chat."""
    one_call: bool = False
    """Of several calls the first counts."""


def check_model(fields: Fields, served: Served) -> None:
    """Raise ApiError (404) where the field `model` names another one."""
    name = fields.take("model")
    if name is not None:
        check_name(name, served)


def check_name(name: Any, served: Served) -> None:
    """Raise ApiError (404) for the name of another model."""
    if name != served.name:
        raise ApiError(
            404,
            f"The model `{str(name)[:200]}` does not exist: this server has `{served.name}`",
            param="model",
            code="model_not_found",
        )


def read_sampling(
    fields: Fields, served: Served, *, default_tokens: int | None, lengths: Sequence[str]
) -> Sampling:
    """Take the fields that say how to draw; `lengths` are the names of the field for the most tokens."""
    max_tokens = default_tokens
    for name in lengths:
        max_tokens = fields.integer(name, max_tokens or 0, 1, MAX_TOKENS) or max_tokens
    seed = fields.integer("seed", secrets.randbits(63), -SEEDS, SEEDS * 2 - 1) % SEEDS
    stop_ids = _stop_ids(fields, served.vocab_size)
    all_ends = tuple(dict.fromkeys((*served.stop_token_ids, *stop_ids)))
    return Sampling(
        n=fields.integer("n", 1, 1, served.api.max_choices),
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, 0.0, HOTTEST),
        top_p=_top_p(fields),
        top_k=max(0, fields.integer("top_k", 0, -1, MAX_TOKENS - 1)),
        seed=seed,
        stops=_stops(fields, served.api.max_stop_strings),
        stop_token_ids=stop_ids if fields.switch("ignore_eos") else all_ends,
        include_stop=fields.switch("include_stop_str_in_output"),
        special=not fields.switch("skip_special_tokens", True),
        adjustment=read_adjustment(
            fields, vocab_size=served.vocab_size, ends=all_ends, most=max_tokens
        ),
    )


def read_stream(fields: Fields) -> tuple[bool, bool]:
    """(stream, usage in the stream)."""
    stream = fields.switch("stream")
    options = fields.section("stream_options")
    usage = options.switch("include_usage")
    options.switch("include_obfuscation")  # padding against listeners: allowed, and not needed
    options.finish()
    return stream, usage


def check_prompt(prompt: tuple[int, ...], served: Served, param: str) -> tuple[int, ...]:
    """The prompt, if the model can read it and there is room for one token more. Raises ApiError."""
    if not prompt:
        raise bad(param, "the prompt is empty: give at least one token")
    if len(prompt) >= served.max_model_len:
        raise too_long(len(prompt), served.max_model_len, param)
    if min(prompt) < 0 or max(prompt) >= served.vocab_size:
        raise bad(param, f"token ids are 0 to {served.vocab_size - 1}")
    return prompt


def token_list(value: Any, param: str) -> tuple[int, ...]:
    """A list of token ids. Raises ApiError."""
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise bad(param, "give a list of token ids")
    return tuple(value)


def seed_of(seed: int, choice: int) -> int:
    """The seed of one choice of a request: the first has the request's own."""
    if choice == 0:
        return seed
    own = derive("api choice", seed.to_bytes(8, "big"), choice.to_bytes(4, "big"))
    return int.from_bytes(own[:8], "big") >> 1


def _top_p(fields: Fields) -> float:
    value = fields.number("top_p", 1.0, 0.0, 1.0)
    if value == 0:
        raise bad(fields.name("top_p"), "give a number above 0 and at most 1")
    return value


def _stops(fields: Fields, most: int) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [value] if isinstance(value, str) else value or []
    good = isinstance(stops, list) and all(isinstance(one, str) and one for one in stops)
    if not good or len(stops) > most or max(map(len, stops), default=0) > LONGEST_STOP:
        raise bad(
            fields.name("stop"), f"give up to {most} strings of 1 to {LONGEST_STOP} characters"
        )
    return tuple(dict.fromkeys(stops))


def _stop_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    value = fields.take("stop_token_ids")
    param = fields.name("stop_token_ids")
    found = token_list(value or [], param)
    if len(found) > MAX_STOP_IDS or any(not 0 <= one < vocab_size for one in found):
        raise bad(param, f"give up to {MAX_STOP_IDS} token ids of 0 to {vocab_size - 1}")
    return tuple(dict.fromkeys(found))
