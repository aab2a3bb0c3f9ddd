"""`primerl-node status`: how a running node is doing, on one screen."""

from typing import Any

from .peers import Watch
from .target import AsJson, DataDir, find_node


def run(data_dir: DataDir = None, as_json: AsJson = False, watch: Watch = False) -> None:
    """Show how a running node is doing: phase, step, policy version, rollouts, bytes."""
    import msgspec

    from ..node.ops.control import Status
    from .screen import listing
    from .tables import status_table

    def draw(answer: Any, width: int | None) -> Any:
        del width  # its lines are folded
        return status_table(msgspec.convert(answer, Status))

    listing(find_node(data_dir), "status", draw, as_json=as_json, watch=watch)
