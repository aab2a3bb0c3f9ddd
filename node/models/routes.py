"""Encode routes of a mixture of experts as bytes: the experts of each token, layer by layer.

No torch. A layer's experts are in the order of the router's choice. Routes from the network are untrusted:
check them with route_fault() before use.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import RouteShape


def pack_routes(routes: NDArray[Any], shape: RouteShape) -> bytes:
    """Pack routes [S, layers, top_k] for transport."""
    return routes.astype(shape.dtype).tobytes()


def unpack_routes(data: bytes | NDArray[np.uint8], shape: RouteShape) -> NDArray[np.int16]:
    """Unpack routes to int16 [S, layers, top_k]."""
    values = np.frombuffer(data, shape.dtype)
    return values.reshape(-1, shape.layers, shape.top_k).astype(np.int16)


def route_columns(shape: RouteShape) -> int:
    """Return the number of 4-byte columns that hold a token's route."""
    return -(-shape.token_bytes // 4)


def route_fault(data: bytes, tokens: int, shape: RouteShape) -> str:
    """Return why `data` are not valid routes of `tokens` tokens; "" if they are.

    Every expert must exist, and occur once per token and layer.
    """
    if len(data) != tokens * shape.token_bytes:
        return f"{len(data)} bytes of routes for {tokens} tokens of {shape.token_bytes} bytes"
    ordered = np.sort(np.frombuffer(data, shape.dtype).reshape(-1, shape.top_k), axis=1)
    if int(ordered[:, -1].max(initial=0)) >= shape.experts:
        return f"expert {int(ordered[:, -1].max())} of {shape.experts} does not exist"
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "an expert occurs twice for a token"
    return ""
