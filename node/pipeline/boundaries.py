"""The trail: what each stage says of the states that it sent, 8 bytes a token, on its way round the ring.

Boundary by boundary: every stage but the last adds the fingerprints of its rows that lead to drawn tokens, in
row order; stage 0 gets all of them back with the tokens. It holds bytes of strangers: only sizes are looked at.
"""

ROW = 8
"""Bytes of one state's fingerprint (node/inference/fingerprint.py)."""


class BadTrail(Exception):
    """A trail of another size than the rows and boundaries that it is of."""


def append(trail: bytes, own: bytes) -> bytes:
    """The trail with this stage's fingerprints: `own` holds ROW bytes for each row, none for no row."""
    if len(own) % ROW:
        raise ValueError(f"{len(own)} bytes are no rows of {ROW}: a bug of this stage")
    return trail + own


def latest(trail: bytes, rows: int, count: int) -> bytes:
    """What the last one of `count` stages so far says of its rows. Raises BadTrail."""
    check(trail, rows, count)
    return trail[len(trail) - rows * ROW :]


def check(trail: bytes, rows: int, count: int) -> None:
    """Raise BadTrail for one that is not of `rows` rows at `count` boundaries."""
    if len(trail) != rows * count * ROW:
        raise BadTrail(f"{len(trail)} bytes of fingerprints for {rows} rows at {count} boundaries")
