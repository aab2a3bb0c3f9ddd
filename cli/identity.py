"""`primerl-node init`, `id` and `retire`: make, show and end this node's key."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..node.config.paths import expand_home
from ..node.ops.strict_json import to_json
from .command import AsJson, OwnDataDir, default_data_dir, find_node

if TYPE_CHECKING:
    from ..crypto.keys import SecretKey

KEY_FILE = "key.pem"
PASSPHRASE = "PRIMERL_PASSPHRASE"


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
    from ..node.errors import BusyError

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
    from ..crypto.keys import peer_id_text

    path = _key_path(data_dir)
    node = _open_key(path).node_id
    names = {"id": node.hex(), "short": short(node), "libp2p": peer_id_text(node)}
    for warning in _other_owners(path.parent, node):
        typer.echo(warning, err=True)
    if as_json:
        typer.echo(to_json(names))
        return
    for name, value in names.items():
        typer.echo(f"{name + ':':<8}{value}")


def retire(
    data_dir: OwnDataDir = None,
    ticket: Annotated[
        str,
        typer.Option(
            "--ticket", help="Also notify the trainer of this run, besides those joined from here."
        ),
    ] = "",
    statement: Annotated[
        Path | None,
        typer.Option(
            "--statement", help="Hand in this file for its owner: -d names the trainer's directory."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """End this node's key for ever: it is lost, or somebody else has it.

    Trainers that learn of it give the key no more work and take nothing from it; work that they took before
    stays. The signed statement is kept beside the key, as key.retired, and sent to the trainers of the runs
    that this directory joined. Without a network copy that file to a trainer's operator.

    \b
    Examples:
      primerl-node retire -d worker
      primerl-node retire --statement key.retired -d outputs/demo    on the trainer's machine
    """
    if statement is not None:
        _hand_in(statement, data_dir, as_json)
        return
    from ..node.app import retirement
    from ..node.errors import UsageError
    from ..protocol.retirement import retire as sign

    path = _key_path(data_dir)
    key = _open_key(path)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                "`retire` ends a key for ever and asks at a terminal: give --yes in a script"
            )
        typer.confirm(
            f"End the key {key.node_id.hex()[:10]} of {path} for ever?", abort=True, err=True
        )
    statement_path = retirement.retired_file(path.parent)
    # an earlier statement is sent again, as the first time counts
    sealed = (
        retirement.read(statement_path) if statement_path.exists() else sign(key, int(time.time()))
    )
    retirement.keep(path.parent, sealed)
    tickets = retirement.known_tickets(path.parent, ticket)
    answers = asyncio.run(retirement.tell(tickets, sealed)) if tickets else {}
    _report(answers, statement_path, as_json)


def _report(answers: dict[str, str], statement_path: Path, as_json: bool) -> None:
    """Print which trainers took a retirement. Raises NetworkError unless all did, and there was one."""
    from ..node.errors import NetworkError

    if as_json:
        typer.echo(to_json({"statement": str(statement_path), "trainers": answers}))
    else:
        typer.echo(f"retired: {statement_path}")
        for trainer, fault in answers.items():
            typer.echo(f"trainer {trainer[:10]}: {fault or 'told'}")
    if not answers or any(answers.values()):
        fault = "a trainer was not told" if answers else "no trainer is known here"
        raise NetworkError(
            f"the key is retired here, but {fault}: run this again (with --ticket), or send {statement_path} "
            "to its operator for `primerl-node retire --statement`"
        )


def _hand_in(statement: Path, data_dir: Path | None, as_json: bool) -> None:
    """Give a retirement to the trainer that runs here."""
    from ..node.app import retirement
    from ..node.ops.control import ask

    sealed = retirement.read(expand_home(statement))
    answer = ask(find_node(data_dir), "retire", sealed=sealed.hex())
    typer.echo(to_json(answer) if as_json else f"retired {answer['node'][:10]}")


def _other_owners(directory: Path, node: bytes) -> Iterator[str]:
    """Yield a line for each ledger in `directory` that was written by a node other than `node`."""
    from ..node.errors import StorageError
    from ..node.storage.ledger import OWNER, LedgerView, other_key

    for path in sorted([*directory.glob("ledger.db"), *directory.glob("runs/*/ledger.db")]):
        try:
            with closing(LedgerView(path)) as view:
                owner = view.get(OWNER)
        except StorageError:  # of another release, or damaged: the node itself reports that
            continue
        if owner is not None and owner != node:
            yield other_key(path, owner, node)


def _key_path(data_dir: Path | None) -> Path:
    return expand_home(data_dir or default_data_dir()) / KEY_FILE


def _open_key(path: Path) -> "SecretKey":
    """Read the key at `path`, asking for its passphrase if it has one. Raises KeyFileError."""
    from ..crypto.keys import KeyFileError, SecretKey
    from ..node.ops.service_manager import passphrase

    secret = passphrase()
    try:
        return SecretKey.load(path, secret)
    except KeyFileError:
        locked = path.is_file() and b"ENCRYPTED" in path.read_bytes()
        if secret or not sys.stdin.isatty() or not locked:
            raise
    return SecretKey.load(path, typer.prompt("Passphrase", hide_input=True, err=True))
