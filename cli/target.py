"""Which running node a command means: --data-dir, else PRIMERL_DATA_DIR, else the one that runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        "-d",
        envvar="PRIMERL_DATA_DIR",
        help="The node's data directory; without it, the node that runs on this machine.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Exactly the data, as JSON.")]


def default_data_dir() -> Path:
    """Where a node keeps its things unless told otherwise."""
    return Path.home() / ".primerl"


def find_node(data_dir: Path | None) -> Path:
    """The data directory of the node to ask. Raises NetworkError when none runs."""
    from ..node.ops.control import socket_path
    from ..node.ops.errors import NetworkError
    from ..node.ops.registry import running

    if data_dir is not None:
        return data_dir.expanduser()
    entries = running()
    if not entries:
        if socket_path(default_data_dir()).exists():
            return default_data_dir()
        raise NetworkError(
            "no node of yours runs on this machine: start one (`primerl-node train @ demo`), or name its "
            "--data-dir"
        )
    trainers = [entry for entry in entries if entry.role == "trainer"]
    chosen = (trainers or entries)[0]
    if len(entries) > 1:
        print(
            f"asking the {chosen.role} in {_shortened(chosen.data_dir)} "
            f"({len(entries)} nodes run here: --data-dir)",
            file=sys.stderr,
        )
    return Path(chosen.data_dir)


def _shortened(directory: str) -> str:
    """As a person here would write it."""
    path = Path(directory)
    for base, prefix in ((Path.cwd(), Path()), (Path.home(), Path("~"))):
        if path.is_relative_to(base):
            return str(prefix / path.relative_to(base))
    return directory
