"""Layers with a recurrent state (gated linear attention) on packed rows.

Imports torch: import lazily. transformers' modules treat a row as one sequence: state and convolution would
leak from each sequence into the next. Here every sequence of a row starts from an empty state, as in a sampler.
The layers are causal, so padding on the right changes nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .attention import sequence_by_sequence

KIND = "linear_attention"
"""Layer type in config.json."""
LAYER = "linear_attn"
"""Attribute of transformers' decoder layers that holds a module of that kind."""


def reset_between_sequences(causal: nn.Module) -> None:
    """Make every such module of `causal` read each sequence of a row separately."""
    for module in [getattr(one, LAYER) for one in causal.modules() if hasattr(one, LAYER)]:
        module.forward = _apart(module.forward)


def _apart(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `inner` [S, L, d] -> [S, L, d] as a function of a packed row [1, T, d]."""

    def forward(hidden_states: Tensor, *, sequence_ends: Tensor, **_: Any) -> Tensor:
        def read(rows: list[Tensor]) -> Tensor:
            return inner(hidden_states=rows[0])

        return sequence_by_sequence(read, [hidden_states[0]], sequence_ends)[None]

    disable: Any = torch.compiler.disable  # reads the layout in Python
    return disable(forward)
