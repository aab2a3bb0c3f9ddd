"""Configuration of the sandbox for the code of environments. Same rules as run.py."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from .base import BaseConfig

Processes = Annotated[int, Field(ge=0, le=4096)]
Gibibytes = Annotated[float, Field(gt=0)]
SandboxType = Literal["auto", "bubblewrap", "landlock", "limits"]


class SandboxConfig(BaseConfig):
    """Permissions of an environment's code on this machine; set by the node, not by the run."""

    type: SandboxType = "auto"
    """Confinement: `bubblewrap` and `landlock` also shut files; `limits` are process limits, which do not;
    `auto`: the first of these that works, but limits only for bundled environments."""
    readable: list[Path] = []
    """Files and directories that are readable where files are shut, beside Python, the packages on its path,
    the run's tokenizer and cached data sets."""
    network: bool = True
    """Allow sockets: to judges, to a hub of data sets, also to other programs of this machine."""
    processes: Processes = 64
    """Most child processes at a time; 0: none."""
    memory_gib: Gibibytes = 4.0
    """Limit of the memory that each of its processes may allocate, and that all of them together may hold."""


class WorkerSandboxConfig(SandboxConfig):
    """Permissions of the code of a run's environment on this machine."""

    network: bool = False
    """Allow sockets: to judges, to a hub of data sets, also to other programs of this machine."""
    processes: Processes = 0
    """Most child processes at a time; 0: none."""
