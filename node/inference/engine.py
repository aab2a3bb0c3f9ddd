"""The engine seam: token ids in, token ids and the sampler's own logprobs out.

The engine stamps the policy version at generation time, first and last per completion: a load() that
lands while a completion runs is seen in its stamp. Batching is the engine's business: callers call
generate() concurrently. Requests of one group begin in the order in which they were asked for and draw in step,
so that at a load() none has drawn more tokens than one that began before it and still goes on: the trainer
checks it (proofs/checks.py, late_samples), and a sample that breaks it is given up.
Implementations: scripted.py (fake), hf.py, vllm.py.
Suite: tests/conformance/engine.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ..weights.state import Changed, State


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to sample.

    Tokens are drawn from softmax(logits / temperature), by the noise that `seed` (0 <= seed < 2**63) fixes
    for every position and token id (sampling.py): the same seed, prompt and weights give the same tokens in
    every engine, whatever else is in the batch. A drawn stop token is part of the completion.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    """0 takes the likeliest token, with its logprob at temperature 1; no lease asks for that."""
    seed: int
    stop_token_ids: tuple[int, ...]
    group: bytes = b""
    """Requests of one group share a prompt: they go to one engine where there are several."""
    top_k: int = 0
    """Draw from the so many likeliest tokens only; 0 is all. No lease asks for it."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that hold this probability together (at least one). No lease
    asks for it."""


@dataclass(frozen=True)
class Completion:
    """What was sampled: `logprobs[i]` is the log-probability of `token_ids[i]` under
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
    on, 8 bytes a token (pipeline/boundaries.py). Empty is allowed: nobody but stage 0 answers for it then."""
    plan: bytes = b""
    """The sealed plan that these stages worked by; without boundaries only the last of several."""


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
