"""Watches running nodes over their control sockets, for a live view.

Only asks; a node that does not answer keeps its last row, and nothing here may end a run.
"""

import asyncio
import math
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from .control import PeerRow, Status, ask
from .errors import NodeError

Row = TypeVar("Row")
T = TypeVar("T")


@dataclass
class NodeState:
    """What is known of one node."""

    name: str
    data_dir: Path
    note: str = "starting"
    """What its process does, as whoever started it knows."""
    status: Status | None = None
    """Its last answer."""
    peers: list[PeerRow] = field(default_factory=list[PeerRow])


class View(Protocol):
    """Shows nodes to a person."""

    def show(self, nodes: Mapping[str, NodeState]) -> None:
        """Draw what is known now; called about twice a second."""
        ...

    def say(self, text: str) -> None:
        """One line that stays."""
        ...


async def watched(
    nodes: Mapping[str, NodeState], view: View, work: Coroutine[Any, Any, T], *, pace_s: float
) -> T:
    """What `work` comes to, with these nodes in the view meanwhile."""
    watching = asyncio.create_task(follow(nodes, view, pace_s=pace_s), name="live view")
    try:
        return await work
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def follow(nodes: Mapping[str, NodeState], view: View, *, pace_s: float) -> None:
    """Ask every node and show what they say, until cancelled. `nodes` may grow meanwhile; with an infinite
    pace nobody is asked."""
    while not math.isinf(pace_s):
        await asyncio.gather(*(refresh(node) for node in list(nodes.values())))
        view.show(nodes)
        await asyncio.sleep(pace_s)


async def refresh(node: NodeState) -> None:
    """Ask one node for its status and peers; silence changes nothing."""
    status = await asyncio.to_thread(_ask, node.data_dir, "status", Status)
    if status is None:
        return
    node.status = status
    peers = await asyncio.to_thread(_ask, node.data_dir, "peers", list[PeerRow])
    node.peers = node.peers if peers is None else peers


def _ask(data_dir: Path, command: str, kind: type[Row]) -> Row | None:
    try:
        answer: Any = ask(data_dir, command)
        return msgspec.convert(answer, kind)
    except (NodeError, ValueError):
        return None  # not up yet, gone, too busy to answer, or cut off in the middle of its answer
