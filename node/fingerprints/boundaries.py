"""How far what was stated of a boundary is from a validator's own states there.

Every token counts by its own length: a residual stream is not normed, and one long state would drown the rest.
What is no fingerprint at all is as far off as can be: who wrote it is somebody else than who passed it on.
"""

import numpy as np
from numpy.typing import NDArray

from .projection import FURTHEST, NUMBERS, decode_rows, rounded

LENGTH = NUMBERS
"""Column of own states: |state| / sqrt(width), behind the NUMBERS projections."""
COLUMNS = NUMBERS + 1


def token_distances(stated: bytes, own: NDArray[np.float32]) -> NDArray[np.float64]:
    """Relative distances [tokens] of `stated` from `own` [tokens, COLUMNS]: 0 is equal, at most FURTHEST.

    `stated` has as many tokens; `own` is finite. It is rounded like what was stated.
    """
    decoded, proper = decode_rows(stated)
    apart = ((decoded - rounded(own[:, :NUMBERS])) ** 2).mean(axis=1)
    length = own[:, LENGTH].astype(np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        found = np.sqrt(apart) / np.where(length > 0, length, 1)
    found[(length == 0) & (apart > 0)] = FURTHEST
    return np.where(proper, np.minimum(found, FURTHEST), FURTHEST)
