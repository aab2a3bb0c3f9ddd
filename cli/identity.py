"""`primerl-node init` and `id`: make and show this node's key."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..node.config.paths import expand_home
from .command import AsJson, OwnDataDir, default_data_dir

if TYPE_CHECKING:
    from ..crypto.keys import SecretKey

KEY_FILE = "key.pem"
PASSPHRASE = "PRIMERL_PASSPHRASE"
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def init(
    data_dir: OwnDataDir = None,
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase",
            help="Encrypt the key; asked for, or taken from PRIMERL_PASSPHRASE, which a node that starts "
            "with this key needs too.",
        ),
    ] = False,
) -> None:
    """Make a key for this node. Nodes without one make it when they start.

    The key is the node's identity everywhere: keep key.pem, and keep it to yourself.
    """
    from ..crypto.keys import SecretKey
    from ..node.ops.errors import BusyError

    path = _key_path(data_dir)
    if path.exists():
        raise BusyError(
            f"{path} exists already: `primerl-node id` shows it, another --data-dir spares it"
        )
    secret = None
    if passphrase:
        secret = os.environ.get(PASSPHRASE) or typer.prompt(
            "Passphrase", hide_input=True, confirmation_prompt=True, err=True
        )
    key = SecretKey.generate()
    try:
        key.save(path, secret)
    except FileExistsError as error:
        raise BusyError(f"another program made {path} at this moment") from error
    typer.echo(f"key: {path}\nid:  {key.node_id.hex()}")


def show(data_dir: OwnDataDir = None, as_json: AsJson = False) -> None:
    """Show this node's id, as this program, its peers and libp2p spell it."""
    from ..crypto.hashing import short
    from ..node.p2p.discovery import peer_id_of

    node = _open_key(_key_path(data_dir)).node_id
    names = {"id": node.hex(), "short": short(node), "libp2p": base58(peer_id_of(node))}
    if as_json:
        typer.echo(json.dumps(names))
        return
    for name, value in names.items():
        typer.echo(f"{name + ':':<8}{value}")


def _key_path(data_dir: Path | None) -> Path:
    return expand_home(data_dir or default_data_dir()) / KEY_FILE


def _open_key(path: Path) -> "SecretKey":
    """Read the key at `path`, asking for its passphrase if it has one. Raises KeyFileError."""
    from ..crypto.keys import KeyFileError, SecretKey

    passphrase = os.environ.get(PASSPHRASE) or None
    try:
        return SecretKey.load(path, passphrase)
    except KeyFileError:
        locked = path.is_file() and b"ENCRYPTED" in path.read_bytes()
        if passphrase or not sys.stdin.isatty() or not locked:
            raise
    return SecretKey.load(path, typer.prompt("Passphrase", hide_input=True, err=True))


def base58(data: bytes) -> str:
    """Encode in Bitcoin's base 58, as libp2p writes peer ids; leading zero bytes become 1s."""
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, len(BASE58))
        digits = BASE58[digit] + digits
    return BASE58[0] * (len(data) - len(data.lstrip(b"\0"))) + digits
