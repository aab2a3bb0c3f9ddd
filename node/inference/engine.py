"""The engine seam: token ids in, token ids and the sampler's own logprobs out.

The engine stamps the policy version at generation time, first and last per completion: a load() that
lands while a completion runs is seen in its stamp. Batching is the engine's business: callers call
generate() concurrently. Requests of one group begin in the order in which they were asked for and draw in step,
so that at a load() none has drawn more tokens than one that began before it and still goes on: the trainer
checks it (verification/checks.py, late_samples), and a sample that breaks it is given up.
Implementations: HfEngine (hf.py), HostedEngine (hosted.py), AdaptedEngine (adapted.py).
Suite: tests/conformance/test_engine.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import numpy as np

from ..ops.errors import EngineError
from ..weights.state import Changed, State
from .fingerprint import Projection


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to sample.

    Tokens are drawn from softmax(logits / temperature), by the noise that `seed` (0 <= seed < 2**63) fixes
    for every position and token id (sampler.py): the same seed, prompt and weights give the same tokens in
    every engine, whatever else is in the batch. A drawn stop token is part of the completion.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    """0 takes the likeliest token, with its logprob at temperature 1."""
    seed: int
    stop_token_ids: tuple[int, ...]
    group: bytes = b""
    """Requests of one group share a prompt: they go to one engine where there are several."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens only; 0 is all. No lease asks for it."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this probability together (at least one). No lease
    asks for it."""


@dataclass(frozen=True)
class Completion:
    """One sampled reply: `logprobs[i]` is the log-probability of `token_ids[i]` under
    softmax(logits / temperature) over the whole vocabulary, whatever top_k and top_p left out."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]
    policy_first: int
    policy_last: int
    spans: tuple[tuple[int, int], ...] = ()
    """(index of a token, version that drew from it on), ascending; empty if one version drew them all."""
    proof: bytes = b""
    """Fingerprint of the hidden states that led to the tokens; empty if none was asked for at start()."""
    boundaries: tuple[bytes, ...] = ()
    """Where stages of a pipeline computed it: of each one but the last, fingerprints of the states that it sent
    on, 8 bytes a token (pipeline/trails.py). Empty is allowed: then stage 0 alone is accountable."""
    plan: bytes = b""
    """The sealed plan that these stages worked by; without boundaries only the last of several."""
    routes: bytes = b""
    """As in BranchRecord, of a mixture of experts with engine.enable_return_routed_experts; else empty."""


@dataclass(frozen=True)
class EngineStats:
    """How busy an engine is; sums over all of its processes."""

    running: int = 0
    """Sequences that are being generated."""
    waiting: int = 0
    """Requests that wait for room."""
    kv_use: float = 0.0
    """Share of the cache for keys and values that is in use, 0 to 1; 0 where there is no such bound."""
    kv_tokens: int = 0
    """Tokens that this cache holds; 0 where there is no such bound."""
    preemptions: int = 0
    """Sequences thrown out of the cache and computed again, since the start."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    """Both since the start."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Tokens that were drafted (speculative decoding), and those of them that were drawn, since the start."""
    restarts: int = 0
    """Times that a process of it was started again."""
    fault: str = ""
    """Why it cannot generate just now (it is being started again), in words for the operator; else empty."""


class Engine(Protocol):
    """Generates under the policy version that was loaded last."""

    @property
    def policy_version(self) -> int:
        """The loaded version; -1 before the first load()."""
        ...

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Read config and tokenizer files from `model_dir` (no weights there). Raises EngineError.

        With the name of a fingerprint (node/fingerprints) every completion brings its proof: one that
        cannot be made is an EngineError, never an empty proof.
        """
        ...

    async def load(self, version: int, state: State) -> None:
        """Replace the weights. The caller has already proved the state's digest.

        Completions in flight finish, either on the old weights or across both; their stamp says which.
        """
        ...

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """As load(), told that only `changed` differs from the version that is loaded now.

        An engine that cannot write in place, or that holds no weights, does what load() does.
        """
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Raises EngineError if the engine died or holds no weights, EngineLost if
        it died and is being started again: the same request can be made once more, later."""
        ...

    def stats(self) -> EngineStats:
        """How busy it is, as far as it is known now; never waits."""
        ...

    async def close(self) -> None:
        """Free everything; pending generate() calls raise EngineError."""
        ...


class WeightsFault(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """The fault of a file of weights; an empty `fault` if there is none."""

    fault: str
    placeless: list[str] = []
    """Tensors that can only be written whole; reported with a whole state."""


class Written(msgspec.Struct, frozen=True, array_like=True, tag="wrote"):
    """Seconds in which no step ran, and those of them that writing took."""

    paused_s: float
    writing_s: float


class Replica(Protocol):
    """Takes files of weights (handover.py). Every method raises EngineLost once it is of no use any more."""

    async def check(self, path: str) -> WeightsFault:
        """Whether a whole state fits; changes nothing."""
        ...

    async def load(self, version: int, path: str) -> Written:
        """Replace all weights by a state that check() found right."""
        ...

    async def stage(self, path: str) -> WeightsFault:
        """Get an update ready beside generation."""
        ...

    async def write(self, version: int) -> Written:
        """Write the update that is ready."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""
        ...


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
