"""Networks: weights and a forward pass with a key-value cache, one thread, no asyncio.

A hidden state here is always what feeds the head, after the last norm: a fingerprint is of that.
Only update() changes a network, between sessions, and checks everything before it writes anything:
what is refused leaves the old weights whole. Implementations: qwen3.py (fast, dense Qwen3), causal.py
(any causal model of transformers).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..models import huggingface
from ..weights.state import Changed, State
from .output import Output
from .taps import Taps


class Session(Protocol):
    """The cache of B sequences that grow by one token a step."""

    def select(self, rows: Tensor) -> None:
        """Keep rows `rows` [N] int64 of the cache, in that order; a row may be taken repeatedly."""
        ...

    def step(self, tokens: Tensor) -> Output:
        """Append `tokens` [B] and read them."""
        ...


class Network(Protocol):
    """Call under torch.inference_mode(), from one thread at a time."""

    @property
    def vocab_size(self) -> int:
        """V; token ids are below it."""
        ...

    @property
    def device(self) -> torch.device:
        """Where token ids go in and logits come out."""
        ...

    def prefill(self, tokens: Tensor, mask: Tensor) -> tuple[Session, Output]:
        """Read prompts `tokens` [P, T], padded on the left where `mask` [P, T] is False.

        Returns the session of these P sequences and what comes after each prompt.
        """
        ...

    def hidden(self, tokens: Tensor) -> Tensor:
        """The states [B, T, d] that feed the head; padding on the right of `tokens` [B, T] needs no mask.

        Raises EngineError for an architecture that does not show them.
        """
        ...

    def packed(self, tokens: Tensor, lengths: Sequence[int], taps: Taps | None = None) -> Tensor:
        """The states [T, d] of sequences of these lengths, one after the other in `tokens` [T].

        None of them sees another one. On a GPU nothing here waits for it. Raises as hidden().
        `taps` look between the layers; only `qwen3` goes on with what they give back.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of such states [..., d], as the model makes them. Raises as hidden()."""
        ...

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of `tokens` [B, T]; padding on the right needs no mask."""
        ...

    def update(self, state: State, changed: Changed) -> bool:
        """Write those elements of `state` in place that `changed` names, see check_update().

        False, and nothing written, if one of them has no place of its own: build another network.
        Sessions must be over. Raises EngineError, and writes nothing, if `state` does not fit.
        """
        ...


class NetworkBuilder(Protocol):
    """How a state becomes a network, see build_network()."""

    def __call__(self, model_dir: Path, state: State, *, dtype: str, device: str) -> Network:
        """Raises EngineError."""
        ...


def build_network(model_dir: Path, state: State, *, dtype: str, device: str) -> Network:
    """The fastest network that computes `model_dir`'s architecture, holding the weights `state`.

    Raises EngineError if the tensors of `state` are not exactly those of the architecture.
    """
    from .causal import CausalNetwork
    from .qwen3 import Qwen3Network, computes

    config = huggingface.load_config(model_dir)
    place = pick_device(device)
    if computes(config):
        return Qwen3Network(config, state, dtype=dtype, device=place)
    model = huggingface.model_from_state(model_dir, state, dtype=dtype, device=place)
    return CausalNetwork(model, state)


def pick_device(device: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
