"""The iroh transport: QUIC between nodes named by their Ed25519 keys. Only this file imports iroh.

No IrohError leaves this package half: _cause() reads it once, and what goes up is a TransportError.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass
