"""`primerl-node init`, `id`, `retire` and `key`: make, show, end, copy and change this node's key."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..crypto.keys import KEY_FILE
from ..node.config.paths import expand_home
from ..node.ops.strict_json import to_json
from .command import AsJson, OwnDataDir, default_data_dir, find_node

if TYPE_CHECKING:
    from ..crypto.keys import SecretKey

PASSPHRASE = "PRIMERL_PASSPHRASE"

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="""Copy this node's key to a file, restore it from one, or change it for a new one.

`init` makes a key, `id` shows it, `retire` ends it for ever.

\b
Examples:
  primerl-node key export worker-key.pem -d worker
  primerl-node key import worker-key.pem -d worker      on the machine that replaces this one
  primerl-node key rotate -d worker
""",
)
Ticket = Annotated[
    str,
    typer.Option(
        "--ticket", help="Also notify the trainer of this run, besides those joined from here."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


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
    secret = new_passphrase() if passphrase else None
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
    node = open_key(path)[0].node_id
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
    ticket: Ticket = "",
    statement: Annotated[
        Path | None,
        typer.Option(
            "--statement", help="Hand in this file for its owner: -d names the trainer's directory."
        ),
    ] = None,
    yes: Yes = False,
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
    from ..protocol.retirement import retire as sign

    path = _key_path(data_dir)
    key, _ = open_key(path)
    _confirm("retire", f"End the key {key.node_id.hex()[:10]} of {path} for ever?", yes=yes)
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
    """Give a retirement, or a rotation, to the trainer that runs here."""
    from ..node.app import retirement
    from ..node.ops.control import ask

    sealed = retirement.read(expand_home(statement))
    answer = ask(find_node(data_dir), "retire", sealed=sealed.hex())
    typer.echo(to_json(answer) if as_json else f"retired {answer['node'][:10]}")


@app.command("export", short_help="Write the key into a file, encrypted.")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that is not there yet.")],
    data_dir: OwnDataDir = None,
) -> None:
    """Write this node's key into a file that only its passphrase opens.

    The passphrase is asked for, or taken from PRIMERL_PASSPHRASE. Keep the file where the machine is not: it
    restores the key of a lost machine (`key import`), or ends it (`retire`).
    """
    from ..node.errors import BusyError

    key, _ = open_key(_key_path(data_dir))
    target = expand_home(file)
    if os.path.lexists(target):
        raise BusyError(f"{target} exists already: choose another name")
    try:
        key.save(target, new_passphrase())
    except FileExistsError as error:
        raise BusyError(f"another program made {target} at this moment") from error
    typer.echo(f"key {key.node_id.hex()[:10]} is in {target}, encrypted")


@app.command("import", short_help="Take the key from an exported file.")
def import_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `key export` wrote.")],
    data_dir: OwnDataDir = None,
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase",
            help="Keep it encrypted here too; a node that starts needs PRIMERL_PASSPHRASE then.",
        ),
    ] = False,
) -> None:
    """Put an exported key, or a copy of key.pem, into the data directory.

    A key that is there is never replaced. Stop the node that worked with this key first: one key works on one
    machine at a time.
    """
    from ..node.app.retirement import retired_file
    from ..node.errors import BusyError, UsageError

    key, secret = open_key(expand_home(file))
    path = _key_path(data_dir)
    if (retired := retired_file(path.parent)).exists():
        raise UsageError(
            f"a key was retired in {path.parent} ({retired}): choose another --data-dir"
        )
    name = key.node_id.hex()[:10]
    if os.path.lexists(path):
        there = open_key(path)[0].node_id
        if there != key.node_id:
            raise BusyError(
                f"{path} holds another key, {there.hex()[:10]}: choose another --data-dir"
            )
        typer.echo(f"key {name} is in {path} already")
        return
    try:
        key.save(path, (secret or new_passphrase()) if passphrase else None)
    except FileExistsError as error:
        raise BusyError(f"another program made {path} at this moment") from error
    typer.echo(f"key {name} is in {path}")


@app.command("rotate", short_help="Change the key for a new one that has its standing.")
def rotate(
    data_dir: OwnDataDir = None,
    ticket: Ticket = "",
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Change it although no trainer was told; it begins anew with those."
        ),
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make a new key that takes the place of this one, and end this one for ever.

    Trainers that are told give the new key the old one's admission, accepted work, trust and bans; nothing is
    shed by it. Both keys sign the statement, which is kept beside the key. The trainers of the runs that were
    joined from here are told first: if none of them takes it nothing changes, and the command may be run again.
    One that was not told can be handed the statement by `primerl-node retire --statement`. Stop the node first.
    """
    from ..node.app import retirement
    from ..node.errors import NetworkError

    path = _key_path(data_dir)
    retirement.check_may_rotate(path.parent)
    key, secret = open_key(path)
    _confirm(
        "key rotate", f"End the key {key.node_id.hex()[:10]} of {path} for a new one?", yes=yes
    )
    rotation = retirement.begin_rotation(path.parent, key, secret)
    tickets = retirement.known_tickets(path.parent, ticket)
    answers = asyncio.run(retirement.tell(tickets, rotation.sealed)) if tickets else {}
    untold = {trainer: fault for trainer, fault in answers.items() if fault}
    if answers and len(untold) == len(answers) and not force:
        raise NetworkError(
            f"no trainer took the new key ({next(iter(untold.values()))}), and nothing was changed: run this "
            "again later, or with --force"
        )
    for warning in retirement.finish_rotation(path.parent, rotation):
        typer.echo(warning, err=True)
    new = rotation.successor.hex()
    if as_json:
        shown = {"id": new, "previous": key.node_id.hex(), "statement": str(rotation.statement)}
        typer.echo(to_json({**shown, "trainers": answers}))
    else:
        typer.echo(f"new key: {new}\nstatement: {rotation.statement}")
        for trainer, fault in answers.items():
            typer.echo(f"trainer {trainer[:10]}: {fault or 'told'}")
    if untold:
        raise NetworkError(
            f"the key is changed, but {len(untold)} trainer(s) were not told: send {rotation.statement} to "
            "their operators for `primerl-node retire --statement`"
        )


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


def _confirm(command: str, question: str, *, yes: bool) -> None:
    """Ask at a terminal unless `yes`; no ends the command. Raises UsageError without a terminal."""
    from ..node.errors import UsageError

    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                f"`{command}` ends a key for ever and asks at a terminal: give --yes in a script"
            )
        typer.confirm(question, abort=True, err=True)


def new_passphrase() -> str:
    """Return the passphrase for a file to be written: from the environment, or asked for twice."""
    from ..node.errors import UsageError
    from ..node.ops.service_manager import passphrase

    if given := passphrase():
        return given
    if not sys.stdin.isatty():
        raise UsageError(f"a passphrase is asked for at a terminal: set {PASSPHRASE} in a script")
    return typer.prompt("Passphrase", hide_input=True, confirmation_prompt=True, err=True)


def open_key(path: Path) -> "tuple[SecretKey, str | None]":
    """Read the key at `path`, asking for its passphrase if it has one; return both. Raises KeyFileError."""
    from ..crypto.keys import SecretKey
    from ..node.ops.service_manager import passphrase

    try:
        locked = path.is_file() and b"ENCRYPTED" in path.read_bytes()
    except OSError:  # load() says why
        locked = False
    secret = passphrase() if locked else None
    if locked and not secret and sys.stdin.isatty():
        secret = str(typer.prompt("Passphrase", hide_input=True, err=True))
    return SecretKey.load(path, secret), secret
