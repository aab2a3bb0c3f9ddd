"""Routes of a mixture of experts as bytes: which experts read a token, layer by layer. No torch.

The experts of a layer stand in the order in which its router chose them. Routes come from the network: nothing
may use them before route_fault() has found none.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...protocol.manifests import RouteShape


def pack_routes(routes: NDArray[Any], shape: RouteShape) -> bytes:
    """Pack routes [S, layers, top_k] as they travel."""
    return routes.astype(shape.dtype).tobytes()


def unpack_routes(data: bytes | NDArray[np.uint8], shape: RouteShape) -> NDArray[np.int16]:
    """Unpack routes [S, layers, top_k]."""
    values = np.frombuffer(data, shape.dtype)
    return values.reshape(-1, shape.layers, shape.top_k).astype(np.int16)


def route_columns(shape: RouteShape) -> int:
    """Numbers of 4 bytes that hold a route."""
    return -(-shape.token_bytes // 4)


def route_fault(data: bytes, tokens: int, shape: RouteShape) -> str:
    """Why `data` are no routes of `tokens` tokens; empty if they are.

    Each expert exists, and none reads a token twice.
    """
    if len(data) != tokens * shape.token_bytes:
        return f"{len(data)} bytes of routes for {tokens} tokens of {shape.token_bytes} bytes"
    ordered = np.sort(np.frombuffer(data, shape.dtype).reshape(-1, shape.top_k), axis=1)
    if int(ordered[:, -1].max(initial=0)) >= shape.experts:
        return f"expert {int(ordered[:, -1].max())}, where there are {shape.experts}"
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "an expert that reads a token twice"
    return ""
