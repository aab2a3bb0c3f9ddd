"""Ways in which a file is damaged: by a disk, a full disk, a wrong copy, a hand."""

import random
from collections.abc import Iterator
from pathlib import Path

FLIPS = 3
WAYS = {
    "a byte": "one byte changed, at several places",
    "cut": "the first half of it",
    "empty": "nothing in it",
    "doubled": "twice one behind the other",
    "another's": "the same file of another run",
    "gone": "not there",
    "a directory": "a directory in its place",
}
"""What is done to a file, and how the docs say it."""


def damages(
    data: bytes, other: bytes, seed: str, flips: int = FLIPS
) -> Iterator[tuple[str, bytes | None]]:
    """Yield (way, damaged bytes) of a file; None: it is removed. Ways that change nothing are left out."""
    chance = random.Random(seed)
    for _ in range(flips if data else 0):
        place = chance.randrange(len(data))
        changed = bytes([data[place] ^ 1 << chance.randrange(8)])
        yield "a byte", data[:place] + changed + data[place + 1 :]
    whole = {"cut": data[: len(data) // 2], "empty": b"", "doubled": data * 2, "another's": other}
    for way, damaged in whole.items():
        if damaged != data:
            yield way, damaged
    yield "gone", None
    yield "a directory", None


def damage(path: Path, way: str, data: bytes | None) -> None:
    """Put damaged bytes, or nothing, or a directory into the place of a file; its mode stays."""
    mode = path.stat().st_mode
    path.unlink()
    if way == "a directory":
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)
        path.chmod(mode)
