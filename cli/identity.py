"""`primerl-node id`: who this node is."""

import json
import os
import sys
from typing import TYPE_CHECKING

import typer

from .init import PASSPHRASE, key_path
from .target import AsJson, DataDir

if TYPE_CHECKING:
    from pathlib import Path

    from ..crypto.keys import SecretKey

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def run(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show this node's id, as this program, its peers and libp2p spell it."""
    from ..crypto.hashing import short
    from ..node.p2p.discovery import peer_id_of

    key = open_key(key_path(data_dir))
    names = {
        "id": key.node_id.hex(),
        "short": short(key.node_id),
        "libp2p": base58(peer_id_of(key.node_id)),
    }
    if as_json:
        typer.echo(json.dumps(names))
        return
    for name, value in names.items():
        typer.echo(f"{name + ':':<8}{value}")


def open_key(path: "Path") -> "SecretKey":
    """The key at `path`, asking for its passphrase where it has one. Raises KeyFileError."""
    from ..crypto.keys import KeyFileError, SecretKey

    passphrase = os.environ.get(PASSPHRASE) or None
    try:
        return SecretKey.load(path, passphrase)
    except KeyFileError:
        if passphrase or not sys.stdin.isatty() or not _is_locked(path):
            raise
    return SecretKey.load(path, typer.prompt("Passphrase", hide_input=True, err=True))


def _is_locked(path: "Path") -> bool:
    """Whether a key file that could not be opened wants a passphrase."""
    try:
        return b"ENCRYPTED" in path.read_bytes()
    except OSError:
        return False


def base58(data: bytes) -> str:
    """Bitcoin's base 58, in which libp2p writes peer ids; leading zero bytes become 1s."""
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, len(BASE58))
        digits = BASE58[digit] + digits
    return BASE58[0] * (len(data) - len(data.lstrip(b"\0"))) + digits
