"""What the HTTP servers of a node have in common: which callers are on this machine, and what replies tell."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..config.serving import is_loopback

if TYPE_CHECKING:
    from aiohttp import web


def is_local(host: str) -> bool:
    """Return whether a Host header names this machine; a foreign page's name may lead here (DNS rebinding)."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


async def hide_libraries(request: "web.Request", response: "web.StreamResponse") -> None:
    """Replace the Server header, which names libraries and their versions."""
    response.headers["Server"] = "primerl-node"
