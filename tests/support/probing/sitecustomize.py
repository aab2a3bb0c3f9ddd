"""Probe what each process of a test may reach, as its interpreter starts: harmless, one file a process.

PROBED_INTO is a directory for the results, PROBED_NODE the id of the node's process, PROBED_FILES JSON of names
and paths to be read. Imported by every Python that has this directory on its path.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path


def _reaches_the_internet() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect(("192.0.2.1", 9))  # sends nothing


def _listens() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as end:
        end.bind(("127.0.0.1", 0))


def _probe(into: str) -> None:
    node = os.environ["PROBED_NODE"]
    files: dict[str, str] = json.loads(os.environ["PROBED_FILES"])
    probes: dict[str, Callable[[], object]] = {
        f"reads {name}": lambda path=path: Path(path).read_bytes() for name, path in files.items()
    }
    probes |= {
        "opens sockets to the internet": _reaches_the_internet,
        "opens sockets on loopback": _listens,
        "opens the node's memory": lambda: open(f"/proc/{node}/mem", "rb").close(),
        "reads the node's variables": lambda: Path(f"/proc/{node}/environ").read_bytes(),
        "signals the node": lambda: os.kill(int(node), 0),
        "starts programs": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    }
    may: dict[str, bool] = {}
    for name, probe in probes.items():
        try:
            probe()
            may[name] = True
        except OSError:
            may[name] = False
    result = {"program": sys.orig_argv, "variables": sorted(os.environ), "may": may}
    path = Path(into, f"{os.getpid()}.part")
    path.write_text(json.dumps(result))
    path.rename(path.with_suffix(".json"))


if (_into := os.environ.get("PROBED_INTO")) is not None:
    _probe(_into)
