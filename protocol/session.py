"""Frames: a big-endian u32 length and that many bytes of MessagePack, sans I/O.

The length is checked against the limit for the expected message before anything is allocated.
"""

from typing import TypeVar

import msgspec

from .errors import LocalProtocolError, Reason, RemoteProtocolError
from .version import MAX_MESSAGE

HEADER_BYTES = 4

T = TypeVar("T")


def frame(message: msgspec.Struct, limit: int = MAX_MESSAGE) -> bytes:
    """Encode a message as a frame. Raises LocalProtocolError above `limit`."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > limit:
        raise LocalProtocolError(
            f"{type(message).__name__} of {len(payload)} bytes exceeds {limit}"
        )
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def payload_size(header: bytes, limit: int = MAX_MESSAGE) -> int:
    """Read how many bytes follow `header`. Raises RemoteProtocolError(TOO_LARGE) above `limit`."""
    size = int.from_bytes(header, "big")
    if size > limit:
        raise RemoteProtocolError(Reason.TOO_LARGE, f"frame of {size} bytes, at most {limit} here")
    return size


def decode(payload: bytes | memoryview, kind: type[T]) -> T:
    """Decode `payload` as a `kind` (a Struct or a union of tagged Structs).

    Raises:
        RemoteProtocolError: MALFORMED for anything that is not exactly one valid `kind`.
    """
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(Reason.MALFORMED, str(error)[:200]) from error
    except RecursionError as error:
        raise RemoteProtocolError(Reason.MALFORMED, "nested too deeply") from error
