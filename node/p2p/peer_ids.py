"""Node ids and libp2p peer ids: one Ed25519 key, two spellings, no look-up between them."""

from ...crypto.keys import NODE_ID_BYTES

PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""Identity multihash (00, 36 bytes) of a protobuf PublicKey{Type = Ed25519, Data = 32 bytes}."""


def peer_id_of(node_id: bytes) -> bytes:
    """The libp2p peer id, 38 bytes, of a node id. Raises ValueError for anything else."""
    if len(node_id) != NODE_ID_BYTES:
        raise ValueError(f"a node id has {NODE_ID_BYTES} bytes, not {len(node_id)}")
    return PEER_ID_PREFIX + node_id


def node_id_of(peer_id: bytes) -> bytes:
    """The node id inside a libp2p peer id. Raises ValueError unless it holds an Ed25519 key."""
    node_id = peer_id[len(PEER_ID_PREFIX) :]
    if not peer_id.startswith(PEER_ID_PREFIX) or len(node_id) != NODE_ID_BYTES:
        raise ValueError("not the peer id of an Ed25519 key: only such keys name nodes")
    return node_id
