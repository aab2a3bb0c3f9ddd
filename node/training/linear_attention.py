"""Layers with a recurrent state (gated linear attention) on packed rows.

Imports torch: import lazily. transformers' modules treat a row as one sequence: state and convolution would
leak from each sequence into the next. Here every sequence of a row starts from an empty state, as in a sampler.
The layers are causal, so padding on the right changes nothing.

transformers computes the recurrence with flash-linear-attention, a part of the extra `flash`, where that is
installed. Here its kernels read all sequences of a row in one call, if that gives what one call per sequence
gives; otherwise they are not used.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from .attention import HALF, sequence_by_sequence
from .attention_kernels import CHECKED, Layout, agree

KIND = "linear_attention"
"""Layer type in config.json."""
LAYER = "linear_attn"
"""Attribute of transformers' decoder layers that holds a module of that kind."""
RULE = "torch_chunk_gated_delta_rule"
"""Function of transformers' that calls the kernels where they are installed, and wraps its own code."""
CHOSEN = "chunk_gated_delta_rule"
"""Attribute of a module that is the kernel where there is one (transformers 5.0 to 5.15)."""


def reset_between_sequences(causal: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Make every such module of `causal` read each sequence of a row separately.

    `device` and `dtype` are where and in what the model will compute.
    """
    modules = [getattr(module, LAYER) for module in causal.modules() if hasattr(module, LAYER)]
    packed = False
    if modules and find_spec("fla") is not None:
        suits = device.type == "cuda" and dtype in HALF
        packed = suits and reads_packed_rows(modules[0], device, dtype)
        if not packed:
            _compute_without_kernels(modules)
    for module in modules:
        forward: Any = in_one_call(module) if packed else sequence_for_sequence(module)
        module.forward = torch.compiler.disable(forward)  # reads the layout in Python


def _compute_without_kernels(modules: Sequence[Any]) -> None:
    """Let transformers compute these modules by its own code, and others of their kind in this process.

    Kernels may refuse: flash-linear-attention 0.6 does on a CPU, and in backward on Hopper with Triton 3.4 to
    3.7.0, which compile it wrongly.
    """
    code = sys.modules[type(modules[0]).__module__]
    plain = inspect.unwrap(getattr(code, RULE))
    setattr(code, RULE, plain)
    for module in modules:
        if hasattr(module, CHOSEN):
            setattr(module, CHOSEN, plain)


@torch.enable_grad()
def reads_packed_rows(module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether one call of `module` for a packed row gives the results of one call per sequence.

    Compares outputs and gradients of a copy. transformers' own code, which is used without kernels, mixes the
    sequences, or refuses them.
    """
    copied: Any = copy.deepcopy(module).to(device, dtype).requires_grad_(False)
    rng = torch.Generator(device).manual_seed(0)
    shape = (sum(CHECKED), copied.out_proj.out_features)
    row, grad = (torch.randn(shape, generator=rng, device=device).to(dtype) for _ in range(2))
    read = in_one_call(copied)

    def results(row: Tensor, grad: Tensor) -> Tensor:
        lengths = CHECKED if len(row) == sum(CHECKED) else [len(row)]
        given = row[None].requires_grad_(True)
        out = read(given, sequence_offsets=Layout.of(lengths, device).offsets)
        (of_row,) = torch.autograd.grad(out, given, grad[None])
        return torch.cat([out.detach(), of_row])

    def compute() -> tuple[Tensor, Tensor]:
        parts = zip(row.split(CHECKED), grad.split(CHECKED), strict=True)
        return results(row, grad), torch.cat([results(*part) for part in parts], 1)

    return agree("flash-linear-attention", "packed rows are %.2g off", compute)


def sequence_for_sequence(module: Any) -> Callable[..., Tensor]:
    """Return a module's forward [S, L, d] -> [S, L, d] as a function of a packed row [1, T, d]."""
    inner = module.forward

    def read(rows: list[Tensor]) -> Tensor:
        return inner(hidden_states=rows[0])

    def forward(hidden_states: Tensor, *, sequence_ends: Tensor, **_: Any) -> Tensor:
        return sequence_by_sequence(read, [hidden_states[0]], sequence_ends)[None]

    return forward


def in_one_call(module: Any) -> Callable[..., Tensor]:
    """Return a module's forward as a function of a packed row [1, T, d], which kernels read as it is.

    The kernels start each sequence from an empty state. The convolution knows nothing of sequences: each ends
    with as many zeros as it reads of earlier tokens. What these add to the state of a sequence, no token reads.
    """
    inner, zeros = module.forward, int(module.conv_kernel_size) - 1

    def forward(hidden_states: Tensor, *, sequence_offsets: Tensor, **_: Any) -> Tensor:
        row = hidden_states[0]
        spread = _spread(sequence_offsets, len(row), zeros)
        padded = row.new_zeros(spread.size, row.shape[1]).index_copy(0, spread.places, row)
        return inner(hidden_states=padded[None], cu_seq_lens_q=spread.offsets)[:, spread.places]

    return forward


@dataclass(frozen=True)
class _Spread:
    """A packed row of T tokens with zeros after each of its S sequences."""

    size: int
    """Tokens and zeros."""
    places: Tensor
    """int64 [T]: where each token lies."""
    offsets: Tensor
    """int32 [S + 1]: where each sequence starts, and the end."""


# all layers read the same row, and flash-linear-attention waits for the device when offsets are new
@lru_cache(maxsize=1)
def _spread(offsets: Tensor, tokens: int, zeros: int) -> _Spread:
    """Place `zeros` after each sequence of a row of `tokens`; `offsets` [S + 1] are its starts and its end."""
    position = torch.arange(tokens, device=offsets.device)
    sequence = torch.bucketize(position, offsets[1:], right=True)
    added = zeros * torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
    size = tokens + zeros * (len(offsets) - 1)
    return _Spread(size, position + zeros * sequence, offsets + added)
