"""FlashAttention-3 behind torch's flash operator, where its package is installed. Imports torch: import lazily.

torch knows how to put them there; it is asked once, and what it put there is compared with plain attention, for
packages and GPUs are many. FlashAttention-2 is what torch brings itself.
"""

import functools
import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from ...ops.errors import named_line
from . import attention

logger = logging.getLogger(__name__)

PACKAGE = "flash_attn_interface"
"""The module of FlashAttention-3."""
NAME = "FA3"
"""What torch calls it."""
HOPPER = 9
"""The generation of GPUs that it is for, as torch counts them."""
LENGTHS = (5, 130, 64)
SCALE = 0.125
TOLERANCE = 2e-2
"""bf16 numbers around 1 are 0.008 apart."""

Attend = Callable[[Tensor, Tensor, Tensor, attention.Layout], Tensor]

_FAULTS = (AttributeError, ImportError, RuntimeError, TypeError, ValueError)
"""What torch raises that lacks this, for a package that lacks it, or for a GPU that cannot."""


@functools.cache
def use_flash_attention_3(device: torch.device) -> bool:
    """Have the flash operator computed by the package from now on, if it is there and right."""
    if device.type != "cuda" or find_spec(PACKAGE) is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    return activate(_api("activate"), _api("restore"), lambda: agrees(device))


def activate(
    switch_on: Callable[[str], object], switch_off: Callable[[], object], right: Callable[[], bool]
) -> bool:
    """Switch it on and keep it if it is right; else everything is as before, and the log says so."""
    try:
        switch_on(NAME)
        if right():
            logger.info("attention is computed by FlashAttention-3")
            return True
        fault = "it computes something else than plain attention"
    except _FAULTS as error:
        fault = named_line(error)
    logger.warning("FlashAttention-3 is installed but not used: %s", fault)
    switch_off()
    return False


def agrees(device: torch.device) -> bool:
    """Whether the operator on `device` and plain attention give the same outputs and gradients."""
    layout = attention.Layout.of(list(LENGTHS), device)
    made = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (4, 2, 2)]
    given = [torch.randn(shape, generator=made).to(device, torch.bfloat16) for shape in shapes]

    def computed(attend: Attend) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in given]
        mixed = attend(leaves[0], leaves[1], leaves[2], layout)
        mixed.float().square().mean().backward()
        return [mixed.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return all(map(_near, computed(_packed), computed(_plain)))


def _plain(q: Tensor, k: Tensor, v: Tensor, layout: attention.Layout) -> Tensor:
    return attention.attend_plainly(q, k, v, layout.ends, SCALE)


def _packed(q: Tensor, k: Tensor, v: Tensor, layout: attention.Layout) -> Tensor:
    return torch.ops.primerl.packed_attention(q, k, v, layout.ends, layout.offsets, SCALE)[0]


def _near(one: Tensor, other: Tensor) -> bool:
    scale = other.float().abs().max().clamp(min=1e-6)
    return bool(((one.float() - other.float()).abs().max() / scale) < TOLERANCE)


def _api(what: str) -> Callable[..., object]:
    """torch.nn.attention's function of that kind; older releases have none."""
    import torch.nn.attention as known

    found = getattr(known, f"{what}_flash_attention_impl", None)

    def missing(*_: object) -> None:
        if what == "activate":
            raise AttributeError(f"torch {torch.__version__} cannot be told to use it")

    return found or missing
