"""Where strings end a text, and what of a text that still grows is sure."""

from collections.abc import Sequence

from ..environments.chat import UNREADABLE


def whole(text: str) -> str:
    """`text` without the half of a character at its end."""
    return text.rstrip(UNREADABLE)


def may_begin(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `stops`."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def find_stop(text: str, stops: Sequence[str], past: int = 0) -> tuple[int, str] | None:
    """Where the first of `stops` begins that ends beyond `past` characters of `text`; of several there the
    longest."""
    starts = [max(0, past - len(stop) + 1) for stop in stops]
    found = [(text.find(stop, start), stop) for stop, start in zip(stops, starts, strict=True)]
    places = [one for one in found if one[0] >= 0]
    return min(places, key=lambda one: (one[0], -len(one[1]))) if places else None
