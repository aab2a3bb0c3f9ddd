"""Fingerprints of the states sent between pipeline stages, projected on their device.

A residual stream is not normed, and in trained models a few of its channels outweigh all others together: a
plain projection would show little else. Channels are clipped at LIMIT mean magnitudes, and the state is then
rescaled to its old length, so that the clipped part still shows in the length. Seven numbers do not determine a
state: docs/proofs.md says how a stage could exploit that freedom.
"""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...protocol.rollouts import FINGERPRINT_NUMBERS
from ..errors import EngineError
from ..models.device import compiles, upload
from .fingerprint import ProofFailed, decode_rows, pack, signs

LIMIT = 6.0
"""Clipping limit in mean magnitudes; 1 in 600,000 normally distributed numbers exceeds it."""
NEAR = 0.02
"""Relative tolerance: a receiver's projection of the same states differs by the order of
sums and by rounded codes."""


def project(states: Tensor) -> Tensor:
    """Project states [rows, width] to [rows, 7] fp32 on their device, without waiting for it."""
    plus_minus = _signs(states.shape[1], states.device)
    if compiles(states):
        from .kernels import project_on_gpu

        return project_on_gpu(states, plus_minus, LIMIT)
    return evened(states) @ plus_minus


def evened(states: Tensor) -> Tensor:
    """Clip the channels of states [rows, width] at LIMIT mean magnitudes; returns fp32.

    Each row keeps its length.
    """
    states = states.float()
    most = LIMIT * states.abs().mean(1, keepdim=True)
    cut = states.clamp(-most, most)
    length = torch.linalg.vector_norm(states, dim=1, keepdim=True)
    cut_length = torch.linalg.vector_norm(cut, dim=1, keepdim=True)
    return cut * (length / cut_length.clamp_min(torch.finfo(torch.float32).tiny))


def pack_projected(projected: Tensor) -> bytes:
    """Encode the result of project(), 8 bytes a row; waits for the device.

    Raises EngineError unless it is finite.
    """
    if not len(projected):
        return b""
    try:
        return pack(projected.cpu().numpy())
    except ProofFailed as error:
        raise EngineError(f"no fingerprint can be made of a stage's states ({error})") from error


def agrees(claimed: bytes, projected: NDArray[np.float32]) -> bool:
    """Return whether `claimed` are the fingerprints of the states behind `projected` [rows, 7].

    `projected` is the result of project(). The receiver of both calls this: otherwise a stage could state
    correct fingerprints and send other states.
    """
    if len(claimed) != len(projected) * (FINGERPRINT_NUMBERS + 1):
        return False
    decoded, proper = decode_rows(claimed)
    own = projected.astype(np.float64)
    apart = np.linalg.norm(decoded - own, axis=1)
    return bool(proper.all() and (apart <= NEAR * np.linalg.norm(own, axis=1) + 1e-30).all())


@lru_cache(8)
def _signs(width: int, device: torch.device) -> Tensor:
    return upload(torch.from_numpy(signs(width)), device)
