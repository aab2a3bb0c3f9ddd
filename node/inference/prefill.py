"""Prefill requests: have an engine read a text and measure its own draws at given places.

A place is a position of the text; all tokens before it led to it. For each place the engine returns the hidden
state, projected as in a fingerprint. On request it adds the margin and the logprob of a token claimed there,
and how far a claimed route is from the experts that its routers choose for the token before.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...protocol.rollouts import FINGERPRINT_NUMBERS
from ..models.support import NO_SUPPORT, stack_supports

PREFILL = "primerl_prefill"
"""Key of SamplingParams.extra_args: [key of the request, temperature, top_k, top_p, claims as bytes, width]."""
MARGIN, LOGPROB, ROUTING, ROUTING_MARGIN, PROJECTED = range(5)
"""Columns of an answer; PROJECTED is the first of FINGERPRINT_NUMBERS."""
COLUMNS = PROJECTED + FINGERPRINT_NUMBERS

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Claims = NDArray[np.void]
"""Records [N] of claim_type()."""


class PrefillRequest(msgspec.Struct, frozen=True, array_like=True):
    """A text to read, with the places to measure in it."""

    token_ids: list[int]
    """One or more tokens of the model's vocabulary, which lead to the last place."""
    claims: bytes
    """Encoded Claims; places are 1 to len(token_ids)."""
    temperature: float
    """Temperature of the run; 0 measures against the likeliest token."""
    salt: str = ""
    """If not empty, no cached keys and values are shared, so every place is measured."""
    top_k: int = 0
    """top_k that the claimed tokens were drawn with; 0: all."""
    top_p: float = 1.0
    """Likewise."""
    width: int = 0
    """Most tokens of a support that a claim states; 0: none states one."""


def claim_type(route_bytes: int = 0, width: int = 0) -> np.dtype[np.void]:
    """Return the record type of a claim.

    `route_bytes`: bytes of a route per token, 0 in a run without routes; `width`: that of PrefillRequest.
    """
    fields = [("places", "<i8"), ("seeds", "<i8"), ("tokens", "<i8"), ("drawn", "?")]
    fields += [("routed", "?"), ("routes", "u1", (route_bytes,)), ("support", "<i4", (width,))]
    return np.dtype(fields)


def make_claims(
    places: Numbers, seeds: Numbers, tokens: Numbers, routes: NDArray[np.uint8] | None = None
) -> Claims:
    """Make claims [N] of drawn `tokens`.

    `routes` [N, bytes of one] belong to the tokens before them.
    """
    claims = np.zeros(len(places), claim_type(0 if routes is None else routes.shape[1]))
    claims["places"], claims["seeds"], claims["tokens"] = places, seeds, tokens
    claims["drawn"] = True
    if routes is not None:
        claims["routes"], claims["routed"] = routes, True
    return claims


def with_support(claims: Claims, support: NDArray[np.int32]) -> Claims:
    """Copy claims [N], which state the supports [N, W] (see sampler.weigh()) in the copy."""
    stated = np.zeros(len(claims), claim_type(claims.dtype["routes"].itemsize, support.shape[1]))
    for name in ("places", "seeds", "tokens", "drawn", "routed", "routes"):
        stated[name] = claims[name]
    stated["support"] = support
    return stated


def join_claims(parts: Sequence[Claims]) -> Claims:
    """Join the claims of several texts, which have routes of one size and supports of any."""
    support = stack_supports([(claims["support"], len(claims)) for claims in parts], NO_SUPPORT)
    if support is None:
        return np.concatenate(parts)
    return np.concatenate(
        [
            with_support(claims, rows)
            for claims, rows in zip(
                parts,
                np.split(support, np.cumsum([len(claims) for claims in parts])[:-1]),
                strict=True,
            )
        ]
    )


def read_claims(claims: bytes, route_bytes: int = 0, width: int = 0) -> Claims:
    """Decode PrefillRequest.claims.

    Margin and logprob are measured where `drawn`, and the two columns of the route where also `routed`.
    """
    return np.frombuffer(claims, claim_type(route_bytes, width))


def read_rows(rows: bytes) -> NDArray[np.float32]:
    """Decode the measurements of an engine: [N, COLUMNS].

    A row is NaN if its place was not computed, because the keys and values of another request were cached
    there. Columns before PROJECTED mean nothing where they were not requested.
    """
    return np.frombuffer(rows, np.float32).reshape(-1, COLUMNS)


def not_computed(rows: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return which rows were not computed [N]."""
    missing = np.isnan(rows[:, PROJECTED])
    if missing.any():
        missing &= np.logical_and.reduce(np.isnan(rows[:, PROJECTED:]), axis=1)
    return missing
