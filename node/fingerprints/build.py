"""From name to fingerprint: the only place that knows every fingerprint by name."""

from .fingerprint import Fingerprint
from .projection import Projection
from .toploc import Toploc

KNOWN: dict[str, type[Fingerprint]] = {"projection": Projection, "toploc": Toploc}


def find(name: str) -> Fingerprint:
    """The fingerprint of that name. Raises KeyError."""
    return KNOWN[name]()
