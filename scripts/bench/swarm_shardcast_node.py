"""One node of a shardcast tree for swarm.py; imports nothing of this project.

    python swarm_shardcast_node.py origin|middle|client UPSTREAM,...

Run by the Python that has shardcast. Commands and events are JSON lines on stdin and stdout, as in children.py.
The benchmark gives each node its own copy of the files that shardcast would share between all nodes of one
machine (a file beside its package, /tmp).
"""

import json
import sys
import time
import urllib.request
from pathlib import Path

POLL_S = 0.25
"""Poll interval of middle nodes and clients. shardcast's middle nodes poll every 30 s and the loader of
INTELLECT-2 every 5 s."""
ASK_S = 30.0
PORT = 8000
PROBE_BYTES = 65_536
"""Size of the file that every client fetches at its start to probe a server."""


def say(event: str, **more: object) -> None:
    """Print one event for the benchmark."""
    print(json.dumps({"event": event, **more}), flush=True)


def servable(folder: Path) -> str:
    """Return `folder` with the files that clients look for at their start."""
    folder.mkdir(exist_ok=True)
    (folder / "data1.bin").write_bytes(bytes(PROBE_BYTES))
    return str(folder)


def origin() -> None:
    """Publish a file when told."""
    from shardcast.origin_server import OriginServer  # pyright: ignore[reportMissingImports]

    server = OriginServer(servable(Path("data")), PORT)
    say("up")
    for line in sys.stdin:
        command = json.loads(line)
        time.sleep(max(0.0, command["at"] - time.monotonic()))
        server.broadcast(command["file"], command["shard"])
        say("answer", done=time.monotonic())


def middle(upstream: list[str]) -> None:
    """Fetch and serve all versions."""
    from shardcast.middle_node import MiddleNode  # pyright: ignore[reportMissingImports]

    MiddleNode(upstream, servable(Path("data")), PORT, check_interval=POLL_S)
    say("up")
    for _ in sys.stdin:
        pass


def client(upstream: list[str]) -> None:
    """Fetch a version when told, as soon as all servers list it."""
    from shardcast.client_node import ClientNode  # pyright: ignore[reportMissingImports]

    node = ClientNode(upstream, "downloads")
    say("up")
    for line in sys.stdin:
        command = json.loads(line)
        time.sleep(max(0.0, command["at"] - time.monotonic()))
        while not all(lists(server, command["version"]) for server in upstream):
            time.sleep(POLL_S)
        while node.download_version(command["version"]) is None:
            time.sleep(POLL_S)
        say("answer", done=time.monotonic())


def lists(server: str, version: str) -> bool:
    """Return whether a server lists a version.

    While two servers disagree on that, a client of both may look endlessly for shards that do not exist. So
    this client begins when all servers agree, and all clients finish.
    """
    try:
        with urllib.request.urlopen(f"{server}/distribution.txt", timeout=ASK_S) as reply:
            return f"{version}:" in reply.read().decode()
    except OSError:
        return False


def main() -> None:
    """Run one node until stdin ends."""
    role, upstream = sys.argv[1], [f"http://{host}:{PORT}" for host in sys.argv[2].split(",")]
    if role == "origin":
        origin()
    elif role == "middle":
        middle(upstream)
    else:
        client(upstream)


if __name__ == "__main__":
    main()
