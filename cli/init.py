"""`primerl-node init`: make this node's key."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .target import DataDir, default_data_dir

KEY_FILE = "key.pem"
PASSPHRASE = "PRIMERL_PASSPHRASE"


def run(
    data_dir: DataDir = None,
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

    path = key_path(data_dir)
    if path.exists():
        raise BusyError(
            f"{path} exists already: `primerl-node id` shows it, another --data-dir spares it"
        )
    secret = _ask_passphrase() if passphrase else None
    key = SecretKey.generate()
    try:
        key.save(path, secret)
    except FileExistsError as error:
        raise BusyError(f"{path} was made this very moment by somebody else") from error
    typer.echo(f"key: {path}\nid:  {key.node_id.hex()}")


def key_path(data_dir: Path | None) -> Path:
    """Where the key of a data directory is."""
    return (data_dir or default_data_dir()).expanduser() / KEY_FILE


def _ask_passphrase() -> str:
    return os.environ.get(PASSPHRASE) or typer.prompt(
        "Passphrase", hide_input=True, confirmation_prompt=True, err=True
    )
