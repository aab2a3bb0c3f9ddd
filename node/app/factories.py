"""The parts that a node is composed of, as factories: the real ones by default, fakes in tests.

Nothing heavy is imported before a factory is called.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ...crypto.keys import SecretKey
from ...protocol.leases import LEASED_PROMPTS
from ...protocol.version import ALPN_BLOBS, ALPN_CONTROL, ALPN_PIPELINE, SPOKEN, WireRange
from ..config.paths import home_directory
from ..config.run import EngineConfig, EnvironmentConfig, JoinConfig, NetworkConfig, RunConfig
from ..config.sft import SftConfig
from ..config.training import TrainingConfig
from ..environments.environment import Environment, EnvironmentFailed
from ..environments.hosted import HostedEnvironment
from ..environments.judge_model import Judges
from ..environments.leased_prompts import LeasedPrompts
from ..environments.pool import EnvironmentPool, most_processes
from ..environments.sandbox import Sandbox, choose
from ..errors import UsageError
from ..gpus import usable
from ..inference.build import build_engine
from ..inference.engine import Engine
from ..inference.engine_replica import EngineChild
from ..inference.place import StagePlace
from ..p2p.discovery import Discovery
from ..p2p.transport import Transport
from ..pipeline.hosted_stage import HeadEngine, HostedHead, HostedStage
from ..storage.ledger import Ledger
from ..training.backend import SampleTerms, TrainBackend, resolve_backend
from ..training.rounds import LearnerSettings
from ..verification.auditor import Auditor
from ..verification.envelope import Reader

logger = logging.getLogger(__name__)


MakeTransport = Callable[[NetworkConfig, SecretKey, int], Awaitable[Transport]]
"""Starts the transport of a key at a port; 0 for any."""


async def start_iroh(network: NetworkConfig, key: SecretKey, port: int) -> Transport:
    """Start an iroh endpoint. Raises AddressInUse."""
    from ..p2p.iroh import IrohTransport

    transport = IrohTransport(
        key,
        host=network.host,
        port=port,
        alpns=(ALPN_CONTROL, ALPN_BLOBS, ALPN_PIPELINE),
        relay_urls=network.relay_urls,
    )
    await transport.start()
    return transport


async def start_libp2p(
    network: NetworkConfig, key: SecretKey, run_id: bytes, bootstrap: Sequence[str]
) -> Discovery | None:
    """Start libp2p discovery; None where it is off or not installed. Raises AddressInUse."""
    if not network.libp2p:
        return None
    from ..p2p.libp2p import INSTALL, Libp2pDiscovery, is_installed

    if not is_installed():
        logger.warning(
            "libp2p is not installed, so peers are found through the trainer alone: `%s`, or say "
            "--network.libp2p false",
            INSTALL,
        )
        return None
    discovery = Libp2pDiscovery(key, run_id=run_id, host=network.host, port=network.port)
    await discovery.start(bootstrap)
    return discovery


def make_environment(
    config: EnvironmentConfig,
    model_dir: Path,
    seed: int,
    max_tokens: int,
    temperature: float,
    *,
    sandbox: Sandbox | None = None,
    judges: Judges | None = None,
) -> Environment:
    """Make the environment of a run, not started; where cores are spare, in as many processes as it keeps busy.

    By default a process has the default limits, and one that has a judge is played and not scored.
    """
    if config.id == LEASED_PROMPTS:
        return LeasedPrompts()
    make = partial(
        HostedEnvironment,
        config,
        model_dir=model_dir,
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
        sandbox=sandbox,
        judges=judges,
    )
    # a judge answers slowly, and counts its questions by itself
    most = 1 if config.judge else most_processes()
    return EnvironmentPool(make, most) if most > 1 else make()


def make_backend(
    config: RunConfig | SftConfig, gpus: Callable[[], Sequence[str]] = usable
) -> TrainBackend:
    """Make the trainer backend of a run, not started; `gpus` names those that it may use. Raises UsageError."""
    temperature, own, steps = 1.0, dict[str, SampleTerms](), config.max_steps
    if isinstance(config, RunConfig):
        temperature, own = config.sampling.temperature, sample_terms(config)
        steps = config.optimizer_steps
    return learning_backend(config.training, steps, config.seed, temperature, own, gpus)


def learning_backend(
    config: TrainingConfig,
    max_steps: int,
    seed: int,
    temperature: float,
    own: Mapping[str, SampleTerms],
    gpus: Callable[[], Sequence[str]] = usable,
) -> TrainBackend:
    """Make a backend for `max_steps` optimizer steps. Raises UsageError."""
    training = resolve_backend(config, gpus)
    if training.backend == "fsdp":
        from ..training.fsdp_backend import FsdpBackend

        kind = FsdpBackend
    else:
        from ..training.local_backend import LocalBackend

        kind = LocalBackend
    return kind(training, max_steps=max_steps, seed=seed, temperature=temperature, own=own)


def make_learner(config: TrainingConfig, settings: LearnerSettings) -> TrainBackend:
    """Make the backend of a learner, not started. Raises UsageError."""
    terms = settings.temperature, settings.own
    return learning_backend(config, settings.max_steps, settings.seed, *terms)


def sample_terms(config: RunConfig) -> dict[str, SampleTerms]:
    """Map the environments that differ from the run in temperature or loss to their own, by name."""
    training = config.training_on()
    terms_of = {
        environment.name: SampleTerms(
            config.sampling_of(environment).temperature,
            training[environment.name].loss.model_dump_json(),
        )
        for environment in config.mixture
    }
    runs = SampleTerms(config.sampling.temperature, config.training.loss.model_dump_json())
    return {name: terms for name, terms in terms_of.items() if terms != runs}


def make_evaluation_engine(config: EngineConfig) -> Engine:
    """Make the trainer's own engine for evaluation: always the embedded one, also where workers use vLLM."""
    return build_engine(config.model_copy(update={"type": "hf"}))


def auditing(config: RunConfig) -> EngineConfig:
    """Return the config of an engine of the type that audits here."""
    from ..inference.vllm_arguments import is_installed

    missing = config.may_replace_auditor and not is_installed()
    return config.engine.model_copy(update={"type": "hf" if missing else config.auditor})


def make_auditor(
    config: EngineConfig, timeout_s: float, *, ahead: EngineChild | None = None
) -> Auditor:
    """Make the auditor that `config.type` names, not started; an audit takes at most `timeout_s`.

    `ahead` is a process of begun_ahead().
    """
    from ..verification.hf_auditor import HfAuditor

    if config.type == "hf":
        return HfAuditor(config, timeout_s=timeout_s, ahead=True)
    from ..verification.local_audits import RoutedAuditor
    from ..verification.vllm_auditor import VllmAuditor

    embedded = HfAuditor(config, timeout_s=timeout_s)  # of pipelines' work: most runs have none
    whole = VllmAuditor(config, timeout_s=timeout_s, ahead=ahead)
    return RoutedAuditor(whole, embedded, embedded.begin)


def make_reader(config: EngineConfig, timeout_s: float) -> Reader | None:
    """Make the reader of texts in float32, not started, on the device of `config`.

    The first verdicts of a run wait for it, so it begins with the run.
    """
    from ..verification.hf_auditor import HfAuditor

    return HfAuditor(config, timeout_s=timeout_s, dtype="float32", ahead=True)


class MakeLedger(Protocol):
    """Opens a ledger."""

    def __call__(self, path: Path, *, fsync: bool) -> Ledger:
        """Raises BusyError, StorageError."""
        ...


@dataclass(frozen=True)
class NodeTimeouts:
    """Deadlines between a node and others, seconds."""

    connect_s: float = 10.0
    """Longest wait for a connection to a peer."""
    audit_s: float = 120.0
    """Longest audit: after it the audit process is killed and restarted."""
    ticket_s: float = 7 * 86400.0
    """Life of a ticket, unless `ticket --expires` says otherwise; the trainer's own is renewed."""
    stall_s: float = 20.0
    """Time without an answer after which a stage of a pipeline counts as lost."""


@dataclass(frozen=True)
class Factories:
    """Factories of everything that touches the world."""

    transport: MakeTransport = start_iroh
    discovery: Callable[
        [NetworkConfig, SecretKey, bytes, Sequence[str]], Awaitable[Discovery | None]
    ] = start_libp2p
    environment: Callable[[EnvironmentConfig, Path, int, int, float], Environment] = (
        make_environment
    )
    engine: Callable[[EngineConfig], Engine] = build_engine
    pipeline_head: Callable[[EngineConfig, StagePlace], HeadEngine] = HostedHead
    pipeline_stage: Callable[[EngineConfig, StagePlace], Engine] = HostedStage
    evaluation_engine: Callable[[EngineConfig], Engine] = make_evaluation_engine
    auditor: Callable[[EngineConfig, float], Auditor] = make_auditor
    reader: Callable[[EngineConfig, float], Reader | None] = make_reader
    """None: nothing reads texts in float32, and a run has no envelope."""
    backend: Callable[[RunConfig], TrainBackend] = make_backend
    learner: Callable[[TrainingConfig, LearnerSettings], TrainBackend] = make_learner
    ledger: MakeLedger = Ledger
    timeouts: NodeTimeouts = NodeTimeouts()
    wire: WireRange = SPOKEN
    """Wire versions that the node speaks."""

    def mixture(self, config: RunConfig, model_dir: Path) -> list[Environment]:
        """Make the environments that a run trains on, in its order, not started."""
        return [
            self.environment(
                environment.options(),
                model_dir,
                config.seed,
                environment.sampling.max_tokens,
                config.sampling_of(environment).temperature,
            )
            for environment in config.mixture
        ]


def sandboxed(config: RunConfig | JoinConfig, *, judged: bool = False) -> Factories:
    """Make the real factories of a node; its environments run in its own sandbox.

    `judged`: their judges are asked, which only the trainer does. Raises UsageError, also for want of a key.
    """
    if isinstance(config, JoinConfig) and config.role != "inference":
        return Factories()  # plays nothing
    judges = None
    if judged and isinstance(config, RunConfig):
        judges = Judges([*config.mixture, *config.evaluation.environments], config.run_dir)
    return Factories(
        environment=partial(make_environment, sandbox=own_sandbox(config), judges=judges)
    )


def own_sandbox(config: RunConfig | JoinConfig) -> Sandbox:
    """Choose the sandbox of a node's environments, which never shows its own directories. Raises UsageError."""
    sandbox = choose(config.sandbox, _own_directories(config))
    logger.log(
        logging.WARNING if sandbox.missing else logging.INFO, "environments run in %s", sandbox
    )
    return sandbox


def _own_directories(config: RunConfig | JoinConfig) -> list[Path]:
    own = [config.data_dir or home_directory() / ".primerl"]
    return [*own, config.run_dir] if isinstance(config, RunConfig) else own


async def try_environments(config: RunConfig) -> None:
    """Start each environment of a run in its sandbox, and close it: its options and code are sound.

    Characters are its tokens, so no model is needed. Raises UsageError for one that does not start.
    """
    sandbox = choose(config.sandbox, _own_directories(config))
    sampling = config.sampling

    evaluated = config.evaluation.environments if config.evaluation.is_online else []
    tried: list[tuple[str, EnvironmentConfig]] = [
        (repr(environment.name), environment) for environment in config.mixture
    ]
    tried += [(f"{environment.title!r} of [evaluation]", environment) for environment in evaluated]
    for name, options in tried:
        if options.id == LEASED_PROMPTS:
            continue
        environment = HostedEnvironment(
            options,
            model_dir=None,
            seed=config.seed,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            sandbox=sandbox,
        )
        try:
            await environment.start()
        except EnvironmentFailed as error:
            raise UsageError(f"the environment {name} does not start: {error}") from error
        finally:
            await environment.close()
