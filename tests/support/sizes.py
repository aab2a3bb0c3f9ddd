"""Count what an object keeps."""

from collections.abc import Sized


def kept_by(holder: object) -> int:
    """Return the number of entries in all collections that an object has as attributes."""
    return sum(
        len(value)
        for value in vars(holder).values()
        if isinstance(value, Sized) and not isinstance(value, str | bytes)
    )
