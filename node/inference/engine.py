"""Interface of engines: token ids in, token ids and the sampler's own logprobs out.

The engine stamps each completion with the policy versions that drew its first and last token: a load() during a
completion shows in its stamp. Engines batch by themselves: callers call generate() concurrently. Requests of
one group begin in the order in which they were made and draw in step: when a load() happens, no running request
has drawn more tokens than a running one of its group that began before it. The trainer checks this
(late_samples() in verification/checks.py), and samples that violate it are withdrawn.
Implementations: HfEngine (hf.py), HostedEngine (hosted.py), AdaptedEngine (adapted.py).
Suite: tests/conformance/test_engine.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
from msgspec.structs import replace

from ..errors import EngineError
from ..ops.figures import EngineRow

if TYPE_CHECKING:  # numpy takes a third of the start of an environment's process
    from ..weights.state import Changed, State


@dataclass(frozen=True)
class GenerateRequest:
    """Request for one completion.

    Tokens are drawn from softmax(logits / temperature) with the noise that `seed` (0 <= seed < 2**63) fixes for
    every position and token id (sampler.py): the same seed, prompt and weights give the same tokens in every
    engine and in any batch. A drawn stop token is part of the completion.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    """0 takes the likeliest token, with its logprob at temperature 1."""
    seed: int
    stop_token_ids: tuple[int, ...]
    group: bytes = b""
    """Group of requests that share a prompt; they go to one replica if there are several."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0 is all."""
    top_p: float = 1.0
    """Probability of the likeliest tokens to draw from (at least one), of those that top_k leaves."""
    supported: bool = False
    """Whether the completion states the support of each token; only where top_k or top_p truncate."""


@dataclass(frozen=True)
class Completion:
    """One sampled reply.

    `logprobs[i]` is the log-probability of `token_ids[i]` under softmax(logits / temperature) over the whole
    vocabulary, regardless of top_k and top_p; over its support where that is stated.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish: Literal["stop", "length"]
    policy_first: int
    policy_last: int
    spans: tuple[tuple[int, int], ...] = ()
    """(token index, version that drew from it on), ascending; empty if one version drew all."""
    proof: bytes = b""
    """Fingerprint of the states that led to the tokens; empty unless requested at start()."""
    boundaries: tuple[bytes, ...] = ()
    """Boundary fingerprints of a pipeline: for each stage but the last, those of the states that
    it sent on, 8 bytes a token (pipeline/trails.py). May be empty: then stage 0 alone is accountable."""
    plan: bytes = b""
    """Sealed plan of these stages; if it changed meanwhile, the last one, without boundaries."""
    routes: bytes = b""
    """Routes as in BranchRecord, for a mixture of experts with
    engine.enable_return_routed_experts; else empty."""
    support: bytes = b""
    """Supports as in BranchRecord, of a request that asks for them; else empty, and from pipelines."""


def join_boundaries(parts: Sequence[Completion]) -> tuple[tuple[bytes, ...], bytes]:
    """Return (joined boundaries of all parts, plan); () and the last plan if they do not fit."""
    plans = {part.plan for part in parts}
    columns = [part.boundaries for part in parts]
    if len(plans) > 1 or not all(columns) or len({len(column) for column in columns}) > 1:
        return (), parts[-1].plan
    return tuple(b"".join(column) for column in zip(*columns, strict=True)), plans.pop()


def join_spans(parts: Sequence[Completion]) -> tuple[tuple[int, int], ...]:
    """List the policy changes among the tokens of all parts; empty if there were none."""
    spans: list[tuple[int, int]] = []
    before = 0
    for part in parts:
        for start, version in part.spans or ((0, part.policy_first),):
            if not spans or spans[-1][1] != version:
                spans.append((before + start, version))
        before += len(part.token_ids)
    return tuple(spans) if len(spans) > 1 else ()


class EngineStats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """Load of an engine; counts are sums over all of its processes.

    A process sends it to its node whenever it has changed.
    """

    running: int = 0
    """Sequences being generated."""
    waiting: int = 0
    """Requests waiting for room."""
    kv_use: float = 0.0
    """Share of the KV cache in use, 0 to 1; 0 if the cache has no bound."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds; 0 if it has no bound."""
    preemptions: int = 0
    """Sequences evicted from the cache and computed again, since the start."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    """Prompt and generated tokens, since the start."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Draft tokens (speculative decoding) since the start: proposed, and accepted."""
    restarts: int = 0
    """Restarts of its processes."""
    fault: str = ""
    """Reason why it cannot generate now (it is being restarted), for the operator; else empty."""
    lanes: int = 0
    """Micro-batches that stage 0 of a pipeline cuts its sequences into."""
    in_flight: int = 0
    """Micro-batches under way."""
    stall_share: float = 0.0
    """Share of its time that the slowest stage waits."""

    def row(self, kind: str, *, inflight: int, cap: int) -> EngineRow:
        """Describe an engine of the type `kind` for its operator."""
        return EngineRow(
            type=kind,
            inflight=inflight,
            cap=cap,
            running=self.running,
            waiting=self.waiting,
            kv_use=round(self.kv_use, 3),
            preemptions=self.preemptions,
            generated_tokens=self.generated_tokens,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            restarts=self.restarts,
            fault=self.fault,
        )

    def with_totals(self, *others: "EngineStats") -> "EngineStats":
        """Add the counts since the start of `others` to these."""
        sums = {name: sum(getattr(stats, name) for stats in (self, *others)) for name in COUNTS}
        return replace(self, **sums)


COUNTS = (
    "preemptions",
    "prompt_tokens",
    "generated_tokens",
    "drafted_tokens",
    "accepted_tokens",
)
"""Fields of EngineStats that count since a process's start."""


class Engine(Protocol):
    """Generator of completions under the policy version that was loaded last."""

    @property
    def policy_version(self) -> int:
        """The loaded version; -1 before the first load()."""
        ...

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """Read config and tokenizer files from `model_dir` (no weights there). Raises EngineError.

        With the name of a fingerprint (fingerprint.py) every completion carries its proof. A proof that cannot
        be made is an EngineError, never an empty proof.
        """
        ...

    async def load(self, version: int, state: "State") -> None:
        """Replace the weights. The caller has already proved the state's digest.

        Running completions finish, either on the old weights or across both; their stamp says which.
        """
        ...

    async def update(self, version: int, state: "State", changed: "Changed") -> None:
        """Load a state that differs from the loaded version only in `changed`.

        An engine that cannot write in place, or that holds no weights, does a load() instead.
        """
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises EngineError if the engine died or holds no weights; EngineLost if it died and is being restarted:
        the same request can then be made again later.
        """
        ...

    def stats(self) -> EngineStats:
        """Return how busy the engine is, as far as known; never waits."""
        ...

    async def close(self) -> None:
        """Free everything; pending generate() calls raise EngineError."""
        ...


class WeightsFault(msgspec.Struct, frozen=True, array_like=True, tag="checked"):
    """Result of checking or preparing a file of weights; `fault` is empty if there is none."""

    fault: str
    placeless: list[str] = []
    """Tensors that can only be written whole; reported for a whole state."""


class Written(msgspec.Struct, frozen=True, array_like=True, tag="wrote"):
    """Duration of a write: seconds without a step, and the part of them spent writing."""

    paused_s: float
    writing_s: float


class Replica(Protocol):
    """Receiver of weight files (handover.py). Methods raise EngineLost once it is unusable."""

    async def check(self, path: str) -> WeightsFault:
        """Check whether a whole state fits; changes nothing."""
        ...

    async def load(self, version: int, path: str) -> Written:
        """Replace all weights by a state that passed check()."""
        ...

    async def stage(self, path: str) -> WeightsFault:
        """Prepare an update while generation goes on."""
        ...

    async def write(self, version: int) -> Written:
        """Write the prepared update."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion."""
        ...


def check_request(request: GenerateRequest, vocab_size: int, max_model_len: int) -> None:
    """Raise EngineError unless a model of `vocab_size` can answer within `max_model_len` tokens.

    A longer completion is cut at `max_model_len`; a prompt that leaves no room for one token is refused.
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
    limited = request.temperature > 0 and (request.top_k > 0 or request.top_p < 1)
    if request.supported and not limited:
        raise EngineError("there is no support of tokens drawn from all: give top_k or top_p")
    if not 0 <= request.seed < 2**63:
        raise EngineError(f"seed {request.seed} is outside 0..2**63-1: reduce it")


def narrowing(request: GenerateRequest) -> tuple[float, int, float]:
    """Return (temperature, top_k, top_p) to draw with; temperature 0 gives (1, 1, 1)."""
    if request.temperature == 0:
        return 1.0, 1, 1.0
    return request.temperature, request.top_k, request.top_p
