"""The same file over shardcast (PyPI), for comparison: an origin, clients, and perhaps middle nodes between.

Its defaults hold but for the poll intervals. It is a dependency of this benchmark alone, in a venv of its own.
"""

import asyncio
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_links import Star
from swarm_programs import START_S, Failed, Meter, Program, Version, launcher

REQUIREMENT = "shardcast==0.3.2"
SCRIPT = Path(__file__).with_name("swarm_shardcast_node.py")
LEAD_S = 0.5
SHARD_BYTES = 50_000_000
"""Its default."""

Row = dict[str, Any]


class Missing(Exception):
    """shardcast cannot be had here; the message says why."""


@dataclass(frozen=True)
class Tree:
    """A way to set it up."""

    clients: int
    middles: int
    shard: int = SHARD_BYTES

    @property
    def name(self) -> str:
        """What to call it in the table."""
        above = f"{self.middles} middle nodes" if self.middles else "origin only"
        cut = "" if self.shard == SHARD_BYTES else ", small shards"
        return f"shardcast, {above}{cut}"


def find_python(venv: Path) -> Path:
    """A Python that has shardcast: that of `venv`, which is made if need be. Raises Missing."""
    if shutil.which("wget") is None:
        raise Missing("shardcast downloads with wget, which is not installed")
    python = venv / "bin" / "python"
    if python.exists() and _imports(python):
        return python
    print(f"making {venv} with {REQUIREMENT}", flush=True)
    try:
        _run(sys.executable, "-m", "venv", str(venv))
        _run(str(python), "-m", "pip", "install", "--quiet", REQUIREMENT)
    except subprocess.CalledProcessError as error:
        raise Missing(f"{REQUIREMENT} could not be installed: {error.stderr.strip()}") from error
    return python


def _imports(python: Path) -> bool:
    check = [str(python), "-c", "import shardcast.client_node"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def measure(
    star: Star, folder: Path, python: Path, version: Version, tree: Tree, deadline: float
) -> Row:
    """One row; a run that takes longer than `deadline` has `late` clients, and counts as so long.

    Node 0 is the origin, then come the middle nodes, then the clients.
    """
    roles = ["origin"] + ["middle"] * tree.middles + ["client"] * tree.clients
    first_client = 1 + tree.middles
    async with launcher(star, folder) as programs:
        for index, role in enumerate(roles):
            command = [role, _upstream(star, role, tree.middles)]
            node = await programs.start([*_private(python, folder, index), *command])
            await node.hear(START_S)  # it probes its servers: they must be up, and not busy
        nodes = programs.started
        meter = Meter(star)
        at = time.monotonic() + LEAD_S
        order = nodes[0].ask(deadline, file=str(version.file), shard=tree.shard, at=at)
        waiting = [_fetch(node, at, deadline) for node in nodes[first_client:]]
        published, ends = await asyncio.gather(order, asyncio.gather(*waiting))
        figures = meter.read(version.size, range(first_client, len(nodes)))
    times = [end - published["done"] for end in ends if end is not None]
    late = len(ends) - len(times)
    return {
        "system": tree.name,
        "file": version.name,
        "workers": tree.clients,
        "bytes": version.size,
        "first_s": min(times, default=deadline),
        "last_s": deadline if late else max(times),
        "late": late,
        **figures,
    }


async def _fetch(node: Program, at: float, deadline: float) -> float | None:
    """When the client had the file; None if that was not before the deadline, or it gave up."""
    try:
        answer = await node.ask(deadline, version="v1", at=at)
    except Failed as failure:
        lines = str(failure).splitlines()
        print(f"  shardcast client: {lines[0]}; its log ends: {lines[-1]}", file=sys.stderr)
        return None
    return answer["done"]


def _upstream(star: Star, role: str, middles: int) -> str:
    if role == "client" and middles:
        return ",".join(star.address(1 + index) for index in range(middles))
    return star.address(0)


def _private(python: Path, folder: Path, index: int) -> list[str]:
    """A Python whose shardcast package lies in a folder of this node alone.

    Its clients keep a temporary file beside the package: two of one machine would take each other's.
    """
    own = folder / "packages" / str(index)
    installed = _run(str(python), "-c", "import shardcast; print(shardcast.__path__[0])").strip()
    shutil.copytree(installed, own / "shardcast", ignore=shutil.ignore_patterns("__pycache__"))
    return ["env", f"PYTHONPATH={own}", "PYTHONDONTWRITEBYTECODE=1", str(python), str(SCRIPT)]
