"""Layers that carry a state along a sequence (gated linear attention), on packed rows. Imports torch lazily.

transformers' modules take a row for one sequence: state and convolution would run from each into the next. Here
every sequence of a row starts from nothing, as in a sampler. No token sees what comes later, so padding on the
right changes nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attention import sequence_by_sequence

KIND = "linear_attention"
"""Of a layer, in config.json."""
LAYER = "linear_attn"
"""What decoder layers of transformers call their module of that kind."""


def reset_between_sequences(causal: nn.Module) -> None:
    """Have every such module of `causal` read each sequence of a row by itself."""
    for module in [getattr(one, LAYER) for one in causal.modules() if hasattr(one, LAYER)]:
        module.forward = _apart(module.forward)


def _apart(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`inner` [S, L, d] -> [S, L, d] as a function of a packed row [1, T, d]."""

    def forward(hidden_states: Tensor, *, sequence_ends: Tensor, **_: Any) -> Tensor:
        def read(rows: list[Tensor]) -> Tensor:
            return inner(hidden_states=rows[0])

        return sequence_by_sequence(read, [hidden_states[0]], sequence_ends)[None]

    disable: Any = torch.compiler.disable  # the layout is asked for in Python
    return disable(forward)
