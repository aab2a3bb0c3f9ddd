"""Requests to an engine to read a text and measure what it would have drawn at some places of it.

A place is a position of the text; what led to it are all tokens before it. Of each place the engine gives the
hidden state, projected as in a fingerprint, and on request the margin and the logprob of a token claimed there,
and how far a claimed route is from what its routers choose for the token before.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from .fingerprint import NUMBERS

PREFILL = "primerl_prefill"
"""Key of SamplingParams.extra_args: [key of the request, temperature, claims as bytes]."""
MARGIN, LOGPROB, ROUTING, ROUTING_MARGIN, PROJECTED = range(5)
"""Columns of an answer: the last is the first of NUMBERS."""
COLUMNS = PROJECTED + NUMBERS

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Claims = NDArray[np.void]
"""[N] records of claim_type()."""


class PrefillRequest(msgspec.Struct, frozen=True, array_like=True):
    """A text to read, with the places to measure in it."""

    token_ids: list[int]
    """One or more, all of the model's vocabulary: what leads to the last place."""
    claims: bytes
    """Claims; places are 1 to len(token_ids)."""
    temperature: float
    """Of the run; 0 measures against the likeliest token."""
    salt: str = ""
    """Not empty: no keys and values of other requests are used, so every place is measured."""


def claim_type(route_bytes: int = 0) -> np.dtype[np.void]:
    """A claim of a run whose routes have so many bytes a token, 0 in a run without."""
    fields = [("places", "<i8"), ("seeds", "<i8"), ("tokens", "<i8"), ("drawn", "?")]
    return np.dtype([*fields, ("routed", "?"), ("routes", "u1", (route_bytes,))])


def make_claims(
    places: Numbers, seeds: Numbers, tokens: Numbers, routes: NDArray[np.uint8] | None = None
) -> Claims:
    """Claims [N] of drawn `tokens`. `routes` [N, bytes of one] are those of the tokens before them."""
    claims = np.zeros(len(places), claim_type(0 if routes is None else routes.shape[1]))
    claims["places"], claims["seeds"], claims["tokens"] = places, seeds, tokens
    claims["drawn"] = True
    if routes is not None:
        claims["routes"], claims["routed"] = routes, True
    return claims


def read_claims(claims: bytes, route_bytes: int = 0) -> Claims:
    """Decode PrefillRequest.claims.

    Of each, margin and logprob are wanted where `drawn`, and beside them the two columns of its route where
    `routed`, too.
    """
    return np.frombuffer(claims, claim_type(route_bytes))


def read_rows(rows: bytes) -> NDArray[np.float32]:
    """Decode what an engine measured: [N, COLUMNS].

    A row is NaN where its place was not computed, because the keys and values of another request were there;
    the columns before PROJECTED mean nothing where they were not wanted.
    """
    return np.frombuffer(rows, np.float32).reshape(-1, COLUMNS)


def not_computed(rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which rows were not computed [N]."""
    missing = np.isnan(rows[:, PROJECTED])
    if missing.any():
        missing &= np.logical_and.reduce(np.isnan(rows[:, PROJECTED:]), axis=1)
    return missing
