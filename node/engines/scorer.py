"""Recomputes the log-probabilities that a rollout claims, under the policy version it claims.

Exact dtype and hardware differ between nodes: compare with a tolerance, never with equality.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..config import EngineConfig
from ..errors import EngineError
from ..model_files import one_line
from ..weights.state import State
from .compute import ComputeThread

if TYPE_CHECKING:
    from .network import Network

LOGITS_LIMIT = 64 * 2**20
"""Most fp32 logits at a time (256 MiB); a single longer sequence is still scored whole."""


class Scorer(Protocol):
    """Log-probabilities of given tokens."""

    async def start(self, model_dir: Path) -> None:
        """Read the architecture from `model_dir` (no weights there). Raises EngineError."""
        ...

    async def logprobs(
        self, state: State, sequences: Sequence[Sequence[int]], temperature: float, *, key: int
    ) -> list[list[float]]:
        """For each sequence of T tokens, T numbers: log p(token i | tokens < i), 0.0 for the first.

        p is softmax(logits / temperature) under `state`. Equal `key` (the policy version) means
        equal `state`, which then is not loaded again.
        """
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


class HfScorer:
    """A Scorer over the networks of the embedded engine."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model_dir: Path | None = None
        self._thread: ComputeThread | None = None
        self._loaded: tuple[int, Network] | None = None
        self._closing = threading.Event()

    async def start(self, model_dir: Path) -> None:
        """See Scorer."""
        from .. import models

        if self._thread is not None:
            raise EngineError("the scorer was started before: make another one")
        self._thread = ComputeThread("hf-scorer")
        await self._thread.run(models.load_config, model_dir)
        self._model_dir = model_dir

    async def logprobs(
        self, state: State, sequences: Sequence[Sequence[int]], temperature: float, *, key: int
    ) -> list[list[float]]:
        """See Scorer. Raises EngineError for a state or tokens that do not fit the model."""
        if self._thread is None or self._model_dir is None or self._closing.is_set():
            raise EngineError("the scorer is not running: call start() first")
        try:
            return await self._thread.run(self._score, state, sequences, temperature, key)
        except RuntimeError as error:  # torch's own: no memory, no such device
            raise EngineError(
                f"scoring failed ({one_line(error)}): check engine.device and free memory"
            ) from error

    async def close(self) -> None:
        """See Scorer."""
        self._closing.set()
        if self._thread is not None:
            await self._thread.close()
        self._loaded = None

    # -- in the compute thread ---------------------------------------------------------------------

    def _score(
        self, state: State, sequences: Sequence[Sequence[int]], temperature: float, key: int
    ) -> list[list[float]]:
        import torch

        network = self._network(state, key)
        limit = network.vocab_size
        for sequence in sequences:
            if not sequence or min(sequence) < 0 or max(sequence) >= limit:
                raise EngineError(f"a sequence is empty or has tokens outside 0..{limit - 1}")
        scores: list[list[float]] = [[] for _ in sequences]
        with torch.inference_mode():
            for rows in _batches([len(sequence) for sequence in sequences], limit):
                if self._closing.is_set():
                    raise EngineError("the scorer was closed while it computed: start it again")
                found = _logprobs(network, [sequences[row] for row in rows], temperature)
                for row, values in zip(rows, found, strict=True):
                    scores[row] = values
        return scores

    def _network(self, state: State, key: int) -> "Network":
        from .network import build_network

        if self._loaded is not None and self._loaded[0] == key:
            return self._loaded[1]
        assert self._model_dir is not None  # start() sets it
        self._loaded = None  # the trainer's memory is short: never two networks at once
        config = self._config
        network = build_network(self._model_dir, state, dtype=config.dtype, device=config.device)
        self._loaded = (key, network)
        return network


def _batches(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    """Row numbers in batches of like length, each within LOGITS_LIMIT once padded."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        width = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * width * vocab_size <= LOGITS_LIMIT:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _logprobs(
    network: "Network", sequences: Sequence[Sequence[int]], temperature: float
) -> list[list[float]]:
    import torch

    width = max(map(len, sequences))
    padded = [[*sequence, *[0] * (width - len(sequence))] for sequence in sequences]
    tokens = torch.tensor(padded, dtype=torch.int64, device=network.device)
    logits = network.forward(tokens)[:, :-1].float() / temperature
    picked = logits.gather(-1, tokens[:, 1:, None])[..., 0] - logits.logsumexp(-1)
    return [
        [0.0, *row[: len(sequence) - 1]]
        for row, sequence in zip(picked.tolist(), sequences, strict=True)
    ]
