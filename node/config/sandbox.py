"""Configuration of the sandbox in which a node runs the code of environments. Same rules as run.py."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic_config import BaseConfig

Processes = Annotated[int, Field(ge=0, le=4096)]
Gibibytes = Annotated[float, Field(gt=0)]
SandboxType = Literal["auto", "bubblewrap", "limits"]


class SandboxConfig(BaseConfig):
    """Limits on the code of an environment on this machine; a setting of the node, not of the run."""

    type: SandboxType = "auto"
    """The method: `bubblewrap`, a program that also hides files; `limits` of the process, which do not;
    `auto`: bubblewrap where it is installed and works, else limits."""
    readable: list[Path] = []
    """Files and directories that it may read in bubblewrap, beside Python, the packages on its path, the run's
    tokenizer and cached data sets."""
    network: bool = True
    """Whether it may open sockets: to judges, to a hub of data sets, also to other programs of this machine."""
    processes: Processes = 64
    """Most processes of it at a time; 0: none."""
    memory_gib: Gibibytes = 4.0
    """Most memory that one process of it may allocate, and all of its processes together may hold."""


class WorkerSandboxConfig(SandboxConfig):
    """Limits on the code of a run's environment on this machine."""

    network: bool = False
    """Whether it may open sockets: to judges, to a hub of data sets, also to other programs of this machine."""
    processes: Processes = 0
    """Most processes of it at a time; 0: none."""
