"""`primerl-node root` and `handover`: which nodes may lead a run after its trainer, and when one does."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..crypto.keys import KEY_FILE
from ..node.config.paths import expand_home
from ..node.ops.strict_json import to_json
from .command import AsJson, DataDir, find_node
from .identity import open_key

if TYPE_CHECKING:
    from ..protocol.leaders import LeaderList

LEASE_S = 120
"""Default seconds of a leader's silence."""
HANDOVER_S = 330.0
"""Longest wait for a standby to fetch the rest of the run."""
app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    help="""Certify the standbys that may lead a run if its trainer is lost.

The root key signs the list of a run's leaders, in order. Keep it off the network: `root init` makes one, and
`train --checkpoint.root ID` begins a run that believes it. Without one the root is the key of the run's first
trainer.

\b
Examples:
  primerl-node root init root.pem
  primerl-node train @ run.toml --checkpoint.root ID
  primerl-node root certify STANDBY_ID -d outputs/NAME/trainer --key root.pem
  primerl-node root revoke STANDBY_ID -d outputs/NAME/trainer --key root.pem
""",
)
Ids = Annotated[
    list[str], typer.Argument(metavar="ID...", help="Node ids, as `primerl-node id` shows them.")
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--key", help="File of the root key; default: key.pem in --data-dir."),
]
Known = Annotated[
    Path | None,
    typer.Option(
        "--known", help="What `root show` printed, where no node of the run can be asked."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Write the signed list there, for `root publish`, and publish nothing."
    ),
]


@app.command("init", short_help="Make a root key.")
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that is not there yet.")],
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Encrypt it; asked for, or PRIMERL_PASSPHRASE.")
    ] = False,
) -> None:
    """Make a root key, which certifies the leaders of runs that name its id in checkpoint.root."""
    from ..crypto.keys import SecretKey
    from ..node.errors import BusyError
    from .identity import new_passphrase

    path = expand_home(file)
    key = SecretKey.generate()
    try:
        key.save(path, new_passphrase() if passphrase else None)
    except FileExistsError as error:
        raise BusyError(f"{path} exists already: choose another name") from error
    typer.echo(f"root key: {path}\nid:       {key.node_id.hex()}")


@app.command("certify", short_help="Let standbys lead a run after its trainer.")
def certify(
    ids: Ids,
    data_dir: DataDir = None,
    key: KeyFile = None,
    lease: Annotated[
        int | None,
        typer.Option(
            min=10,
            help=f"Seconds of a leader's silence after which the next takes over ({LEASE_S}).",
        ),
    ] = None,
    known: Known = None,
    out: Out = None,
) -> None:
    """Add standbys to the leaders of a run, in this order, after those that are there already.

    They get copies of all that the trainer has of the run, but its key, and the first of them leads the run
    when the trainer was silent for the lease; the second waits for two. Workers believe them by the root's
    signature.
    """
    from ..node.config.node_ids import read_nodes
    from ..protocol.leaders import extended

    nodes = read_nodes("ID", ids)
    _change(data_dir, key, known, out, partial(extended, new=nodes, lease_s=lease))


@app.command("revoke", short_help="Let nodes lead a run no more.")
def revoke(
    ids: Ids, data_dir: DataDir = None, key: KeyFile = None, known: Known = None, out: Out = None
) -> None:
    """Remove nodes from the leaders of a run, for ever: whatever they sign then counts for nobody who knows."""
    from ..node.config.node_ids import read_nodes
    from ..protocol.leaders import without

    nodes = read_nodes("ID", ids)
    _change(data_dir, key, known, out, partial(without, revoked=nodes))


@app.command("show", short_help="Show who may lead a run.")
def show(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show who leads the run of a running node, and who may after it. The JSON is what --known reads."""
    from ..node.ops.control import ask

    seen = ask(find_node(data_dir), "leaders")
    if as_json:
        typer.echo(to_json(seen))
        return
    listed = _listed(seen)
    typer.echo(f"root:   {seen['root']}\nlease:  {listed.lease_s} s")
    for place, node in enumerate(listed.leaders):
        mark = "leads" if node.hex() == seen["leader"] else "revoked" if not any(node) else ""
        typer.echo(f"{place:<7} {node.hex()} {mark}".rstrip())


@app.command("publish", short_help="Give a signed list to a running node.")
def publish(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What --out wrote.")],
    data_dir: DataDir = None,
) -> None:
    """Give a list that the root signed elsewhere to a node of the run, which passes it on."""
    from ..node.errors import file_error

    try:
        sealed = expand_home(file).read_text()
    except OSError as error:
        raise file_error(error, file) from error
    _publish(data_dir, sealed.strip())


def handover(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Hand a run over to its first standby; or, at a standby, lead the run of a trainer that was stopped.

    Training ends with a checkpoint, the standby fetches what it has not, and goes on as the run's trainer: no
    version and no rollout is lost, and workers follow it. The trainer of before ends.
    """
    from ..node.ops.control import ask

    answer = ask(find_node(data_dir), "handover", timeout_s=HANDOVER_S)
    typer.echo(to_json(answer) if as_json else f"{answer['node']} leads the run now")


def _change(
    data_dir: Path | None, key: Path | None, known: Path | None, out: Path | None, change: Any
) -> None:
    """Sign the list that follows the known one, and publish it or write it to `out`."""
    from ..node.errors import UsageError
    from ..node.ops.control import ask
    from ..node.storage.run_files import write
    from ..protocol.errors import LocalProtocolError
    from ..protocol.leaders import certify as sign

    directory = None if known is not None else find_node(data_dir)
    seen = ask(directory, "leaders") if directory is not None else _read_known(known)
    if key is None and directory is None:
        raise UsageError("give the file of the root key: --key FILE")
    root, _ = open_key(expand_home(key) if key is not None else directory / KEY_FILE)  # type: ignore[operator]
    if root.node_id.hex() != seen["root"]:
        raise UsageError(
            f"the root of this run is {seen['root']}, and this key is {root.node_id.hex()}: give --key FILE"
        )
    try:
        listed = change(_listed(seen))
    except LocalProtocolError as error:
        raise UsageError(str(error)) from error
    sealed = sign(root, bytes.fromhex(seen["run"]), listed).hex()
    if out is not None or directory is None:
        target = expand_home(out or Path("leaders.signed"))
        write(target, sealed + "\n")
        typer.echo(f"signed list {listed.number}: {target}, for `primerl-node root publish`")
    else:
        _publish(directory, sealed)


def _publish(data_dir: Path | None, sealed: str) -> None:
    from ..node.ops.control import ask

    seen = ask(find_node(data_dir), "leaders", sealed=sealed)
    listed = _listed(seen)
    successors = [node.hex()[:10] for node in listed.successors()]
    typer.echo(
        f"leaders of run {seen['run'][:10]}: {', '.join([seen['trainer'][:10], *successors])}"
    )


def _listed(seen: dict[str, Any]) -> "LeaderList":
    """Return the list that a node knows, or that of a run without one: its first trainer alone."""
    from ..protocol.envelope import Purpose, unseal
    from ..protocol.leaders import LeaderList

    if not seen["leaders"]:
        return LeaderList(0, (bytes.fromhex(seen["trainer"]),), LEASE_S)
    return unseal(bytes.fromhex(seen["leaders"]), Purpose.LEADERS, LeaderList, now=0).body


def _read_known(path: Path | None) -> dict[str, Any]:
    """Read what `root show --json` printed. Raises UsageError."""
    import json

    from ..node.errors import UsageError

    assert path is not None
    try:
        seen = json.loads(expand_home(path).read_text())
        for name in ("run", "trainer", "root", "leaders"):
            bytes.fromhex(seen[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not what `primerl-node root show --json` printed") from error
    return seen
