"""How ranks are started: the daemon's own call of torchrun, and the one that the trainer's other machines make.

A rank that is to be the only one is started as it is, without torchrun. The daemon's machine is node 0, so that
rank 0 is beside the daemon: with several machines that is what a static rendezvous is for.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from ...config.training import TrainingConfig
from ...ops.errors import UsageError

TORCHRUN = ("-m", "torch.distributed.run")
SHUTDOWN_S = 2
"""How long torchrun lets ranks end after SIGTERM."""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0"}
"""What torchrun would say to the only rank."""


def is_alone(config: TrainingConfig, ranks: int) -> bool:
    """Whether `ranks` on this machine are one, and there are no other machines."""
    return ranks * config.fsdp.nodes == 1


def command(
    config: TrainingConfig, ranks: int, program: Sequence[str], *, here: bool = False
) -> "Command":
    """The call for this machine, or, not `here`, for another one: there NODE stands for its number, from 1.

    Of `program` itself for a rank alone.

    Raises UsageError for several machines without an address to meet at.
    """
    fsdp = config.fsdp
    if is_alone(config, ranks):
        return Command([sys.executable, "-P", *program])
    places = ["--nproc-per-node", str(ranks), "--max-restarts", "0"]
    if fsdp.nodes == 1:
        places += ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        host, port = _meeting(fsdp.rendezvous)
        places += ["--nnodes", str(fsdp.nodes), "--node-rank", "0" if here else "NODE"]
        places += ["--master-addr", host, "--master-port", port]
        places += ["--rdzv-conf", f"timeout={int(fsdp.start_timeout_s)}"]
    python = [sys.executable, "-P"] if here else ["python"]
    return Command([*python, *TORCHRUN, *places, *program])


class Command(list[str]):
    """A command line that prints as a shell would read it."""

    def __str__(self) -> str:
        return shlex.join(self)


def environment(inherited: Mapping[str, str], config: TrainingConfig, ranks: int) -> dict[str, str]:
    """The environment of torchrun and its ranks, or of a rank alone."""
    if is_alone(config, ranks):
        return {**inherited, **ALONE, "PYTHONSAFEPATH": "1"}
    threads = config.threads or max(1, (os.cpu_count() or 1) // ranks)
    alone = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {
        "OMP_NUM_THREADS": str(threads),
        **(alone if config.fsdp.nodes == 1 else {}),  # no other machine has to reach the ranks
        **inherited,
        "PYTHONSAFEPATH": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
    }


def _meeting(rendezvous: str) -> tuple[str, str]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            "training.fsdp.rendezvous must be host:port of this machine where fsdp.nodes > 1, "
            "e.g. 10.0.0.1:29500"
        )
    return host.strip("[]"), port
