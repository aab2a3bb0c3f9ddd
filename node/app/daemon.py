"""The daemon: what a node process does before its role begins: key, logs, run directory.

The `*_node.py` files build the parts of a role; only they and this file know the roles.
"""

import os
from collections.abc import Callable
from pathlib import Path

from ...crypto.keys import SecretKey
from ..config.run import JoinConfig, RunConfig
from ..config.serving import ServeConfig
from ..ops.logs import configure
from ..process.threads import share_python

KEY_FILE = "key.pem"
PASSPHRASE = "PRIMERL_PASSPHRASE"


def load_key(data_dir: Path) -> SecretKey:
    """The node's key, made at the first start. Raises KeyFileError."""
    path = data_dir / KEY_FILE
    passphrase = os.environ.get(PASSPHRASE) or None
    if not os.path.lexists(path):
        SecretKey.generate().save(path, passphrase)
    return SecretKey.load(path, passphrase)


async def train(config: RunConfig, *, announce: Callable[[str], None]) -> Path:
    """Run a trainer to the end of its run; returns the run directory.

    `announce` is called once with the join ticket. Raises NodeError, KeyFileError.
    """
    from . import rundir
    from .trainer import TrainerNode

    directory = rundir.prepare(config)
    data_dir = config.data_dir or directory / "trainer"
    configure(config.log, directory / "logs" / "trainer.jsonl")
    share_python()
    node = TrainerNode(config, load_key(data_dir), data_dir, announce)
    await node.run()
    return directory


async def join(config: JoinConfig) -> str:
    """Run a worker or a validator until the run ends or it is stopped; returns why it left, if the run ended.

    Raises NodeError, KeyFileError.
    """
    from .validator import ValidatorNode
    from .worker import WorkerNode

    data_dir = config.data_dir or Path.home() / ".primerl"
    name = "validator" if config.role == "validator" else "worker"
    configure(config.log, data_dir / "logs" / f"{name}.jsonl")
    share_python()
    made = ValidatorNode if config.role == "validator" else WorkerNode
    node = made(config, load_key(data_dir), data_dir)
    await node.run()
    return node.farewell


async def serve(config: ServeConfig, *, announce: Callable[[str, str], None]) -> None:
    """Serve a policy over HTTP until it is stopped. Raises NodeError, KeyFileError.

    `announce` is called with (base URL, name of the model) once there is a policy.
    """
    from .inference import FollowedPolicy, OwnPolicy

    data_dir = config.directory
    configure(config.log, data_dir / "logs" / "inference.jsonl")
    share_python()
    node = FollowedPolicy if config.ticket else OwnPolicy
    await node(config, load_key(data_dir), announce).run()
