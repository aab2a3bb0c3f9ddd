"""Frames between a node and its own processes: msgpack behind its length, 4 bytes, little-endian.

A length is checked before anything is read: neither end trusts the other one's sizes.
"""

import msgspec

HEAD_BYTES = 4


def frame(message: msgspec.Struct, most: int) -> bytes:
    """The bytes of a message. Raises ValueError for one longer than `most`."""
    body = msgspec.msgpack.encode(message)
    return _checked(len(body), most).to_bytes(HEAD_BYTES, "little") + body


def body_length(head: bytes, most: int) -> int:
    """Bytes that follow a frame's head. Raises ValueError for more than `most`."""
    return _checked(int.from_bytes(head, "little"), most)


def _checked(length: int, most: int) -> int:
    if length > most:
        raise ValueError(f"a frame of {length} bytes, at most {most} are allowed")
    return length
