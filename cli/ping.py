"""`primerl-node ping`: measure the round trip from a running node to one of its peers."""

import time
from typing import Annotated, Any

import typer

from ..node.ops.strict_json import to_json
from .command import AsJson, DataDir, find_node


def run(
    peer: Annotated[
        str,
        typer.Argument(
            metavar="PEER", help="Its name, its id as `peers` shows it, or the first digits."
        ),
    ],
    count: Annotated[
        int, typer.Option("--count", "-c", min=1, max=1000, help="Number of tries.")
    ] = 4,
    interval_s: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, max=60, help="Seconds between two tries.")
    ] = 1.0,
    wait_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=8, help="Seconds to wait for each reply.")
    ] = 5.0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Ask a peer of the running node for an answer, and time it.

    A line a try: the time to the reply of its program, how it is reached (direct or over a relay, always QUIC
    over UDP), and the round trip of that path as the transport measures it, which leaves the program out.
    Exit code 0 if a reply came, 6 if none did.

    \b
    Examples:
      primerl-node ping 1f0c2a
      primerl-node ping anna -c 20 -i 0.5 -d outputs/demo
    """
    import msgspec

    from ..node.errors import NetworkError
    from ..node.ops.control import ask
    from ..node.ops.figures import PingRow

    node, rows = find_node(data_dir), list[PingRow]()
    for number in range(count):
        if number:
            time.sleep(interval_s)
        rows.append(msgspec.convert(ask(node, "ping", peer=peer, wait_s=wait_s), PingRow))
        if not as_json:
            typer.echo(line(rows[-1]))
    times = [row.rtt_ms for row in rows if row.rtt_ms is not None]
    summary: dict[str, Any] = {"tries": len(rows), "replies": len(times)}
    if times:
        summary |= {"min_ms": min(times), "mean_ms": sum(times) / len(times), "max_ms": max(times)}
    if as_json:
        typer.echo(to_json({**summary, "rows": msgspec.to_builtins(rows)}))
    elif times:
        spread = " / ".join(f"{summary[name]:.1f}" for name in ("min_ms", "mean_ms", "max_ms"))
        typer.echo(f"{len(times)} of {len(rows)} answered, shortest / mean / longest {spread} ms")
    if not times:
        raise NetworkError(f"{rows[-1].short} did not answer in {len(rows)} tries: {rows[-1].why}")


def line(row: Any) -> str:
    """Describe one try."""
    who = f"{row.short} ({', '.join(filter(None, (row.role, row.name)))})"
    if row.rtt_ms is None:
        return f"nothing from {who}: {row.why}"
    where = f" {row.remote}" if row.remote else ""
    path = "" if row.path_rtt_ms is None else f", path {row.path_rtt_ms:.1f} ms"
    connected = f", connected in {row.connect_ms:.1f} ms" if row.connect_ms >= 1 else ""
    refusal = f" (it refused: {row.why})" if row.why else ""
    return f"reply from {who} in {row.rtt_ms:.1f} ms: {row.path}{where}{path}{connected}{refusal}"
