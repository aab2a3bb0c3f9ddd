"""Start a node process: check the engine, load the key, set up logs, run the role.

Roles are imported when they start: a dry run imports nothing heavy.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...crypto.keys import KEY_FILE, SecretKey
from ..config.judge import JudgeRunConfig
from ..config.paths import expand_home, home_directory
from ..config.reload import ConfigSource
from ..config.run import EngineConfig, JoinConfig, ModelConfig, RunConfig
from ..config.serving import ServeConfig
from ..errors import EngineError, UsageError
from ..gpus import check_device, torch_without_gpus
from ..inference.numerics import check_quantized
from ..inference.vllm_arguments import (
    NO_AUDITOR,
    NOT_INSTALLED,
    check_family,
    check_installed,
    check_names,
    check_overrides,
    check_parallel,
    installed_arguments,
    is_installed,
    read_shape,
)
from ..models.created_model import created_config
from ..ops.logs import configure
from ..ops.monitors import check_monitors
from ..ops.service_manager import passphrase
from ..process.spawn import PARENT_VARIABLE
from ..process.threads import share_python
from ..storage.run_files import claim, held

if TYPE_CHECKING:
    from .judge import JudgeAddress
    from .peer_node import PeerNode
    from .tickets import TicketPlace

RETIRED_FILE = "key.retired"
"""The sealed retirement of the key beside it."""


def load_key(data_dir: Path) -> SecretKey:
    """Load the node's key, or make it at the first start. Raises KeyFileError; UsageError if it was retired."""
    if (retired := data_dir / RETIRED_FILE).exists():
        raise UsageError(
            f"the key of {data_dir} was retired ({retired}), trainers do not answer it: choose another "
            "--data-dir, which gets a key of its own"
        )
    path = data_dir / KEY_FILE
    secret = passphrase()
    if not os.path.lexists(path):
        SecretKey.generate().save(path, secret)
    return SecretKey.load(path, secret)


async def train(
    config: RunConfig, *, announce: Callable[[str], None], source: ConfigSource | None = None
) -> Path:
    """Run a trainer to the end of its run; returns the run directory.

    `announce` is called once with the join ticket; `source` is where `config` is from. Raises NodeError,
    KeyFileError.
    """
    from ..inference.engine_replica import EngineTimeouts
    from ..inference.hosted import AUDITOR, begun_ahead
    from . import rundir
    from .factories import auditing, make_auditor, sandboxed
    from .trainer import TrainerNode

    check_monitors(config.monitors)
    # `rl` holds the lock for the trainer that it starts
    with nullcontext() if PARENT_VARIABLE in os.environ else held(config.run_dir):
        directory = rundir.prepare(config)
        data_dir = config.data_dir or directory / "trainer"
        configure(config.log, directory / "logs" / "trainer.jsonl")
        share_python()
        factories = sandboxed(config, judged=True)
        auditor = auditing(config).model_copy(
            update={"dp": 1, "batch_invariant": config.worker_engine.batch_invariant}
        )
        timeouts = EngineTimeouts(load_s=factories.timeouts.audit_s)
        async with begun_ahead(auditor, AUDITOR, timeouts) as ahead:
            factories = replace(factories, auditor=partial(make_auditor, ahead=ahead))
            node = TrainerNode(config, load_key(data_dir), data_dir, announce, factories)
            node.source = source
            await node.run()
    return directory


async def join(
    config: JoinConfig,
    ticket: Callable[[], Awaitable[str]] | None = None,
    source: ConfigSource | None = None,
    place: "TicketPlace | None" = None,
) -> "PeerNode":
    """Run a node that joins until the run ends, it is stopped, or it has to lead the run; return it.

    `ticket` waits for the ticket, where the config has none yet: what takes long to load is loaded meanwhile.
    `source` is where `config` is from, `place` where the ticket is. Raises NodeError, KeyFileError.
    """
    from ..inference.build import build_engine
    from ..inference.hosted import begun_ahead
    from .factories import sandboxed
    from .learner import LearnerNode
    from .standby import StandbyNode
    from .validator import ValidatorNode
    from .worker import WorkerNode

    check_monitors(config.monitors)
    is_worker = config.role == "inference"
    kinds = {
        "inference": WorkerNode,
        "validator": ValidatorNode,
        "standby": StandbyNode,
        "learner": LearnerNode,
    }
    data_dir = config.data_dir or home_directory() / ".primerl"
    configure(config.log, data_dir / "logs" / f"{'worker' if is_worker else config.role}.jsonl")
    share_python()
    factories = sandboxed(config)
    early = begun_ahead(config.engine) if ticket and is_worker else nullcontext()
    async with early as ahead:
        factories = replace(factories, engine=partial(build_engine, hosted=True, ahead=ahead))
        if ticket is not None:
            config = config.model_copy(update={"ticket": await ticket()})
        node = kinds[config.role](config, load_key(data_dir), data_dir, factories)
        node.source, node.ticket_place = source, place
        await node.run()
    return node


async def serve(
    config: ServeConfig, *, announce: Callable[[str, str], None], source: ConfigSource | None = None
) -> None:
    """Serve a policy over HTTP until it is stopped. Raises NodeError, KeyFileError.

    `announce` is called with (base URL, name of the model) once there is a policy; `source` is where `config`
    is from.
    """
    from .inference import FollowedPolicy, OwnPolicy

    data_dir = config.directory
    configure(config.log, data_dir / "logs" / "inference.jsonl")
    share_python()
    kind = FollowedPolicy if config.ticket else OwnPolicy
    node = kind(config, load_key(data_dir), announce)
    node.source = source
    await node.run()


async def judge(
    config: JudgeRunConfig,
    *,
    announce: "Callable[[JudgeAddress], None]",
    source: ConfigSource | None = None,
) -> None:
    """Serve a judge until it is stopped. Raises NodeError, KeyFileError.

    `announce` is called once it can be joined and asked; `source` is where `config` is from.
    """
    from .judge import JudgeNode

    data_dir = config.data_dir or config.run_dir
    claim(config.run_dir)  # before there are logs in it
    configure(config.log, config.run_dir / "logs" / "judge.jsonl")
    share_python()
    node = JudgeNode(config, load_key(data_dir), data_dir, announce)
    node.source = source
    await node.run()


def check_present(config: EngineConfig) -> None:
    """Raise UsageError or EngineError if the engine's GPU or library is not there: called before a node says
    hello."""
    check_device("engine.device", config.device)
    if config.type == "vllm" and not is_installed():
        raise EngineError(NOT_INSTALLED)


def check_auditor(config: RunConfig) -> None:
    """Raise EngineError if a trainer's audits need vLLM, and it is not there."""
    if config.auditor == "vllm" and not config.may_replace_auditor and not is_installed():
        raise EngineError(NO_AUDITOR)


def check_config(
    config: EngineConfig, model: ModelConfig | None = None, *, proven: bool = True
) -> None:
    """Raise UsageError or EngineError for an `[engine]` that is certain to fail.

    `model` is checked if it is made here or is a local directory.
    """
    if config.type != "vllm":
        if config.tp not in (1, "auto") or config.pp > 1 or config.replicas > 1:
            raise UsageError(
                "engine.tp, engine.pp and engine.dp are vLLM's: leave them out, or set engine.type to vllm"
            )
    else:
        check_overrides(config.vllm, proven=proven)
        check_names(config.vllm, installed_arguments())
        check_installed()
    if model is None or (config.type != "vllm" and config.quantization == "none"):
        return
    directory = expand_home(model.name)
    if model.create is not None:
        shape = created_config(model.create)
    elif (directory / "config.json").is_file():
        shape = read_shape(directory)
    else:
        return
    check_quantized(config, shape)
    if config.type != "vllm":
        return
    check_family(config, shape, cpu=torch_without_gpus())
    check_parallel(config, shape)
