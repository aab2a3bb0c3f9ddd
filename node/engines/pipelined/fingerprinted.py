"""Which fingerprints a pipeline can make, those that its plan names, and what of the last stage's is none."""

import numpy as np
from numpy.typing import NDArray

from ...errors import EngineError
from ...fingerprints.fingerprint import decode_rows
from ...pipeline.place import Place

ROUNDING = 1e-3
"""A logprob is at most 0; so much is put down to rounding."""


def check_fingerprint(name: str, place: Place) -> None:
    """Raise EngineError unless the stages of `place` make the fingerprint `name`, or none is asked for."""
    if name and name != place.shape.fingerprint:
        made = place.shape.fingerprint or "none"
        raise EngineError(
            f"the run wants fingerprints by {name!r}, and this pipeline makes {made}: "
            "a run whose workers may share a model takes 'projection'"
        )


def check_numbers(logprobs: NDArray[np.float32], proofs: bytes = b"") -> None:
    """Raise EngineError for what no sampler gives: stage 0 signs for what the last stage says.

    `logprobs` [n] may hold NaN and infinities, which are the policy's; `proofs` are n packed rows, or none.
    """
    if (logprobs > ROUNDING).any():
        raise EngineError("the last stage sent a logprob above 0: it is no sampler's")
    if proofs and not decode_rows(proofs)[1].all():
        raise EngineError("the last stage sent a fingerprint that stands for no state")
