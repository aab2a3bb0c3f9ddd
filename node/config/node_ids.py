"""Node ids as an operator writes them."""

from collections.abc import Sequence

from ..errors import UsageError


def read_nodes(name: str, texts: Sequence[str]) -> list[bytes]:
    """Parse the node ids of the setting `name`, each once. Raises UsageError."""
    try:
        nodes = [bytes.fromhex(text) for text in texts]
    except ValueError:
        nodes = [b""]
    if any(len(node) != 32 for node in nodes):
        raise UsageError(f"{name} holds node ids of 64 hex digits: `primerl-node id` shows them")
    return list(dict.fromkeys(nodes))
