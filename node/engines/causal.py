"""The general network: any causal language model of transformers, through its own forward.

It relies on nothing but the calling convention of transformers' models, which it gets ready made.
"""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..tensors import to_torch
from ..weights.state import Changed, State
from .placement import write

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CausalNetwork:
    """A Network around a model in eval mode that was just made of `state`."""

    def __init__(self, model: "PreTrainedModel", state: State) -> None:
        self._model: Any = model
        self._shapes = {name: tensor.shape for name, tensor in state.items()}
        self._places = _places(model, state)
        # models with relative position encodings of their own do not take positions
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding."""
        return self._model.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._model.device

    def prefill(self, tokens: Tensor, mask: Tensor) -> tuple["CausalSession", Tensor]:
        """See Network."""
        session = CausalSession(self, mask)
        return session, session.extend(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """See Network."""
        return self._model(input_ids=tokens, use_cache=False).logits

    def update(self, state: State, changed: Changed) -> bool:
        """See Network. A model that keeps a tensor in another layout has no place for it."""
        if {name: tensor.shape for name, tensor in state.items()} != self._shapes:
            return False  # making another network says what is wrong
        if not changed.keys() <= self._places.keys():
            return False
        for name, positions in changed.items():
            write(self._places[name], state[name], positions)
        return True

    def run(self, tokens: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Append `tokens` [B, N] to `cache` under `mask` [B, all]: last logits [B, V] and cache."""
        extra: dict[str, Any] = {}
        if self._takes_positions:
            positions = (mask.long().cumsum(1) - 1).clamp_min(0)
            extra["position_ids"] = positions[:, -tokens.shape[1] :]
        output = self._model(
            input_ids=tokens,
            attention_mask=mask.long(),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **extra,
        )
        return output.logits[:, -1], output.past_key_values


class CausalSession:
    """A Session around the cache object that the model made."""

    def __init__(self, network: CausalNetwork, mask: Tensor) -> None:
        self._network = network
        self._mask = mask
        self._cache: Any = None

    def extend(self, tokens: Tensor) -> Tensor:
        """Append `tokens` [B, N], already counted in the mask."""
        logits, self._cache = self._network.run(tokens, self._mask, self._cache)
        return logits

    def select(self, rows: Tensor) -> None:
        """See Session."""
        self._mask = self._mask[rows]
        self._cache.batch_select_indices(rows)

    def step(self, tokens: Tensor) -> Tensor:
        """See Session."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        return self.extend(tokens[:, None])


def _places(model: "PreTrainedModel", state: State) -> dict[str, Tensor]:
    """Checkpoint name -> its elements in the model, flat, where they are kept one by one.

    transformers may keep a checkpoint's tensor under another name, turned, or fused with others:
    the parameter of the same name counts only if it holds the same elements in the same order.
    """
    places: dict[str, Tensor] = {}
    for name, own in model.state_dict().items():
        tensor = state.get(name)
        if tensor is None or tensor.shape != own.shape or not own.is_contiguous():
            continue
        if own.equal(to_torch(tensor, own.device, own.dtype)):
            places[name] = own.view(-1)
    return places
