"""Node identity: one Ed25519 key signs, names the node, and is its iroh and libp2p identity.

A SecretKey never appears in a repr, a log line or a message. `cryptography` loads with the first
key: most child processes have none.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_FILE = "key.pem"
"""A node's key in its data directory."""
NODE_ID_BYTES = 32
SIGNATURE_BYTES = 64
PEER_ID_PREFIX = bytes.fromhex("002408011220")
"""What a node's id follows in its libp2p peer id: identity multihash (00, 36 bytes) of a protobuf
PublicKey{Type = Ed25519, Data = 32 bytes}."""

NodeId = Annotated[bytes, msgspec.Meta(min_length=NODE_ID_BYTES, max_length=NODE_ID_BYTES)]
"""The node's raw Ed25519 public key, 32 bytes."""

Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


class KeyFileError(Exception):
    """A key file cannot be read or written: absent, malformed, readable by others, locked by a passphrase."""


class SecretKey:
    """An Ed25519 private key."""

    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key
        self.node_id: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> "SecretKey":
        """A fresh key from the operating system's randomness."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "SecretKey":
        """The key of a 32-byte seed."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    def seed(self) -> bytes:
        """The 32 secret bytes, for the two transports that must hold the same key."""
        return self._key.private_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `message` (RFC 8032)."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"SecretKey(node_id={self.node_id[:5].hex()}..)"

    def save(self, path: Path, passphrase: str | None = None) -> None:
        """Write the key as PKCS#8 PEM with mode 0600; never over an existing file, and whole or not at all.

        Raises:
            FileExistsError: something is there.
            KeyFileError: it cannot be written.
        """
        from cryptography.hazmat.primitives import serialization

        encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase:
            encryption = serialization.BestAvailableEncryption(passphrase.encode())
        pem = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise KeyFileError(
                f"cannot write {path}: {error.strerror}: {path.parent} has to be a directory of yours"
            ) from error
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise KeyFileError(f"cannot write {path}: {error.strerror}") from error
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # half a key would be taken for a damaged one by the next start
            path.unlink(missing_ok=True)
            raise KeyFileError(f"cannot write {path}: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path, passphrase: str | None = None) -> "SecretKey":
        """Read a key file.

        Raises:
            KeyFileError: absent, readable by other users, malformed, or a wrong passphrase.
        """
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            if path.is_dir():
                raise KeyFileError(f"{path} is a directory: move it away")
            if path.stat().st_mode & 0o077:
                raise KeyFileError(f"{path} is readable by others: run `chmod 600 {path}`")
            pem = path.read_bytes()
        except FileNotFoundError as error:
            if path.is_symlink():
                raise KeyFileError(f"{path} is a link to nothing: remove it") from error
            raise KeyFileError(
                f"no key at {path}: `primerl-node init --data-dir {path.parent}` makes one"
            ) from error
        except OSError as error:
            raise KeyFileError(f"cannot read {path}: {error.strerror}") from error
        try:
            key = serialization.load_pem_private_key(
                pem, passphrase.encode() if passphrase else None
            )
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            if b"PRIVATE KEY" not in pem:
                raise KeyFileError(
                    f"{path} holds no key: put your copy of the key back, or move the file away for a new one"
                ) from error
            raise KeyFileError(f"cannot open {path}: {error}") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise KeyFileError(f"{path} holds no Ed25519 key")
        return cls(key)


def peer_id_text(node_id: bytes) -> str:
    """Write the libp2p peer id of a node, as multiaddrs have it."""
    import base58

    return base58.b58encode(PEER_ID_PREFIX + node_id).decode()


def verify(node_id: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` is `node_id`'s over exactly `message`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(node_id).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
