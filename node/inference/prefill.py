"""Requests to an engine to read a text and measure what it would have drawn at some places of it.

A place is a position of the text; what led to it are all tokens before it. Of each place the engine gives the
hidden state, projected as in a fingerprint, and on request the margin and the logprob of a token claimed there.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from .fingerprint import NUMBERS

PREFILL = "primerl_prefill"
"""Key of SamplingParams.extra_args: [key of the request, temperature, claims as bytes]."""
MARGIN, LOGPROB, PROJECTED = 0, 1, 2
"""Columns of an answer: the last is the first of NUMBERS."""
COLUMNS = PROJECTED + NUMBERS
CLAIM_FIELDS = 4

Claims = NDArray[np.int64]
"""[4, N]: places, seeds, claimed tokens, and 1 where margin and logprob are wanted, else 0."""


class PrefillRequest(msgspec.Struct, frozen=True, array_like=True):
    """A text to read, with the places to measure in it."""

    token_ids: list[int]
    """One or more, all of the model's vocabulary: what leads to the last place."""
    claims: bytes
    """See make_claims(); places are 1 to len(token_ids)."""
    temperature: float
    """Of the run; 0 measures against the likeliest token."""
    salt: str = ""
    """Not empty: no keys and values of other requests are used, so every place is measured."""


def make_claims(places: Claims, seeds: Claims, tokens: Claims, drawn: NDArray[np.bool_]) -> bytes:
    """Encode claims [N] each."""
    columns = np.concatenate([places, seeds, tokens, drawn])
    return columns.astype("<i8", copy=False).tobytes()


def read_claims(claims: bytes) -> Claims:
    """Decode make_claims()."""
    return np.frombuffer(claims, "<i8").reshape(CLAIM_FIELDS, -1)


def read_rows(rows: bytes) -> NDArray[np.float32]:
    """Decode what an engine measured: [N, COLUMNS].

    A row is NaN where its place was not computed, because the keys and values of another request were there;
    margin and logprob are where they were not wanted.
    """
    return np.frombuffer(rows, np.float32).reshape(-1, COLUMNS)


def not_computed(rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows were not computed [N]."""
    missing = np.isnan(rows[:, PROJECTED])
    if missing.any():
        missing &= np.logical_and.reduce(np.isnan(rows[:, PROJECTED:]), axis=1)
    return missing
