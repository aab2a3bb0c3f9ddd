"""What every engine refuses before it computes or writes: whatever is refused has changed nothing."""

import numpy as np

from ..ops.errors import EngineError
from ..weights.state import Changed, State
from .engine import GenerateRequest
from .fingerprint import Projection


def check_request(request: GenerateRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise EngineError unless a model of `vocab_size` can answer within `max_model_len` tokens.

    A completion that would not fit is cut at `max_model_len`; a prompt that leaves no room for one
    token is refused.
    """
    prompt = request.prompt
    if not prompt:
        raise EngineError("the prompt is empty: give at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise EngineError(f"the prompt has tokens outside 0..{vocab_size - 1}: check the tokenizer")
    if len(prompt) >= max_model_len:
        raise EngineError(
            f"the prompt has {len(prompt)} tokens: raise engine.max_model_len ({max_model_len})"
        )
    if request.max_tokens < 1:
        raise EngineError(f"max_tokens is {request.max_tokens}: ask for one token or more")
    if not 0 <= request.temperature < float("inf"):
        raise EngineError(f"temperature is {request.temperature}: give 0 or a number above")
    if not 0 <= request.top_k < 2**31:
        raise EngineError(f"top_k is {request.top_k}: give the number of tokens, or 0 for all")
    if not 0 < request.top_p <= 1:
        raise EngineError(f"top_p is {request.top_p}: give a number above 0 and at most 1")
    if not 0 <= request.seed < 2**63:
        raise EngineError(f"seed {request.seed} is outside 0..2**63-1: reduce it")


def narrowing(request: GenerateRequest) -> tuple[float, int, float]:
    """(temperature, top_k, top_p) that a request is drawn by: temperature 0 is the likeliest token at 1."""
    if request.temperature == 0:
        return 1.0, 1, 1.0
    return request.temperature, request.top_k, request.top_p


def find_fingerprint(name: str) -> Projection:
    """The fingerprint that start() was asked for. Raises EngineError."""
    if name != Projection().name:
        raise EngineError(f"there is no fingerprint {name!r}: the only one is {Projection().name}")
    return Projection()


def check_update(state: State, changed: Changed) -> None:
    """Raise EngineError unless every position of `changed` is one of its tensor in `state`."""
    for name, positions in changed.items():
        if name not in state:
            raise EngineError(f"the update changes {name!r}, which the state lacks: load the state")
        if positions is None:
            continue
        if positions.dtype != np.int64 or positions.ndim != 1:
            raise EngineError(f"the positions of {name!r} are not flat int64: load the state")
        size = state[name].data.size
        if positions.size and not 0 <= positions.min() <= positions.max() < size:
            raise EngineError(
                f"the update changes positions of {name!r} outside 0..{size - 1}: load the state"
            )
