"""The trail: what each stage says of the states that it sent, 8 bytes a token, on its way round the ring.

Boundary by boundary: every stage but the last adds the fingerprints of its rows that lead to drawn tokens, in
row order; stage 0 gets all of them back with the tokens. It holds bytes of strangers: only sizes are looked at.
"""

from collections.abc import Sequence

ROW = 8
"""Bytes of one state's fingerprint (node/fingerprints/fingerprint.py)."""


class BadTrail(Exception):
    """A trail of another size than the rows and boundaries that it is of."""


def append(trail: bytes, own: bytes) -> bytes:
    """The trail with this stage's fingerprints: `own` holds ROW bytes for each row, none for no row."""
    if len(own) % ROW:
        raise ValueError(f"{len(own)} bytes are no rows of {ROW}: a bug of this stage")
    return trail + own


def split(trail: bytes, rows: int, count: int) -> list[tuple[bytes, ...]]:
    """Of each row, its fingerprint at each of `count` boundaries. Raises BadTrail."""
    check(trail, rows, count)
    starts = range(0, rows * ROW, ROW)
    parts = [trail[at : at + rows * ROW] for at in range(0, len(trail), rows * ROW or 1)]
    return [tuple(part[at : at + ROW] for part in parts) for at in starts]


def latest(trail: bytes, rows: int, count: int) -> bytes:
    """What the last one of `count` stages so far says of its rows. Raises BadTrail."""
    check(trail, rows, count)
    return trail[len(trail) - rows * ROW :]


def check(trail: bytes, rows: int, count: int) -> None:
    """Raise BadTrail for one that is not of `rows` rows at `count` boundaries."""
    if len(trail) != rows * count * ROW:
        raise BadTrail(f"{len(trail)} bytes of fingerprints for {rows} rows at {count} boundaries")


class Crossings:
    """The fingerprints of one request's tokens, where its tokens are gathered."""

    def __init__(self) -> None:
        self._parts: list[tuple[bytes, ...]] = []

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._parts)

    def add(self, parts: Sequence[bytes]) -> None:
        """One more token, with its fingerprint at each boundary."""
        self._parts.append(tuple(parts))

    def cut(self, tokens: int) -> None:
        """Forget what is beyond the first `tokens`."""
        del self._parts[tokens:]

    @property
    def boundaries(self) -> tuple[bytes, ...]:
        """Of each boundary the fingerprints of all tokens; nothing where their number changed on the way."""
        counts = {len(parts) for parts in self._parts}
        if len(counts) != 1:
            return ()
        return tuple(b"".join(column) for column in zip(*self._parts, strict=True))
