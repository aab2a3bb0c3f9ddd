"""Sums of squared residuals that one absurd token cannot drown.

The same weight counts for every policy, so no weight favours one; what it leaves of a single token is bounded.
Plain sums would be a matched filter for noise that is alike everywhere. Real noise is not (a token may carry
three times that of its neighbour), and a cheat could send a few tokens far off on purpose, so that the rest
say nothing. Weights 1 / (softness * median + residual) are those of Student-t noise: simulated on 64 tokens
of 7 numbers they cost 3 % of the separation where all tokens are alike, and triple it where their noise is
spread by a factor e (log-normal).
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LEAST = 1e-9
"""Below this a median residual is rounding only (residuals are relative, squared)."""


def weighed_sums(squares: Floats, softness: float) -> Floats:
    """Sum over the last axis of `squares` [policies, n] by weights that the mean over policies gives.

    The weights are relative: where no residual stands out, they are about 1.
    """
    if not squares.shape[1]:
        return np.zeros(len(squares))
    mean = squares.mean(axis=0)
    typical = max(float(np.median(mean)), _LEAST)
    weights = (softness + 1) * typical / (softness * typical + mean)
    return np.sum(squares * weights, axis=1)
