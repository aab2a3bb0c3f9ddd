"""Make the signed manifest of a new run, or check that the config of a resumed one fits it."""

import asyncio
import secrets
import time
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from ... import __version__
from ...crypto.hashing import short
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal, utc
from ...protocol.errors import RemoteProtocolError
from ...protocol.manifests import (
    AdapterContract,
    ChunkRef,
    EnvironmentContract,
    FileRef,
    LearnersContract,
    ModelContract,
    RouteShape,
    RunLimits,
    RunManifest,
    encode,
    run_id,
)
from ...protocol.messages import MAX_SEALED
from ...protocol.trust import AdmittedHead, RunDocuments, leaders_of, read_documents
from ...protocol.version import CLOCK_SKEW_S, KIB
from ..config.run import (
    EngineConfig,
    EnvironmentConfig,
    LearnersConfig,
    RunConfig,
    SamplingConfig,
)
from ..config.training import LoraConfig
from ..environments.allowed import environment_contracts, options_of
from ..environments.chat import DATE, dated
from ..errors import StorageError, UsageError
from ..inference.numerics import check_keeps, check_quantized
from ..inference.vllm_arguments import read_shape
from ..models import base_weights
from ..models.model_files import contract_files, position_count, view_state
from ..storage.chunk_store import Store
from ..storage.ledger import LEADERS, MANIFEST, Ledger
from ..verification.bounds import proof_contract
from ..weights.replica import prove
from ..weights.state import memory_threads

MANIFEST_TTL_S = 10 * 365 * 86400
MAX_RUN = MAX_SEALED - KIB
"""Maximum bytes of a manifest, which travels sealed."""
ANOTHER_RUN = "begin another run from its checkpoint, --name NEW --resume.dir DIRECTORY"
"""Advice where a config or a version no longer fits the run."""
SIGNED = (
    "args",
    "max_turns",
    "tool_call_parser",
    "chat_template_kwargs",
    "earlier_reasoning",
    "stop",
)
"""Options of an environment that cannot change when a run goes on."""


async def documents(
    config: RunConfig, key: SecretKey, ledger: Ledger, store: Store, model_dir: Path
) -> RunDocuments:
    """Return the run's manifest, from the ledger or new; put model files into the store."""
    signed = known_documents(ledger, key.node_id)
    files = await asyncio.to_thread(_model_files, store, model_dir)
    lora = config.training.lora
    if signed is not None:
        _check_root(config.checkpoint.root, signed.manifest)
        _check_learners(config, signed.manifest)
        _check_files(config, signed.manifest, files, model_dir)
        _check_adapters(lora, signed.manifest.adapters)
        _check_routes(config.training.enable_router_replay, signed.manifest)
        _check_environments(config, signed.manifest)
        _check_engine(config.engine, signed.manifest)
        return signed
    if config.engine.quantization != "none" or config.engine.keep_kv_cache:
        shape = await asyncio.to_thread(read_shape, model_dir)
        check_quantized(config.engine, shape)
        check_keeps(config.engine, shape)
    adapters = None
    if lora is None:
        base = await asyncio.to_thread(_base_digest, model_dir)
    else:
        base, adapters = await asyncio.to_thread(base_weights.publish, lora, store, model_dir)
    contract = await asyncio.to_thread(_model_contract, config, files, base, model_dir)
    if key.node_id.hex() in config.learners.nodes:
        raise UsageError("learners.nodes names this trainer, which always trains: leave it out")
    environments = await asyncio.to_thread(environment_contracts, config)
    longest = longest_sequence(config, position_count(model_dir))
    new = _new_manifest(config, key, contract, environments, longest)
    routes = await asyncio.to_thread(_routes, config, model_dir)
    manifest = encode(structs.replace(new, adapters=adapters, routes=routes))
    if len(manifest) > MAX_RUN:
        raise UsageError(
            f"the run's manifest has {len(manifest)} bytes, and at most {MAX_RUN} may travel: name fewer "
            "environments, or shorten their args"
        )
    expires = int(time.time()) + MANIFEST_TTL_S
    sealed = seal(key, Purpose.RUN, run_id(manifest), manifest, expires=expires)
    ledger.set(MANIFEST, sealed)
    return read_documents(sealed, now=int(time.time()))


Environments = TypeVar("Environments", bound=EnvironmentConfig)


def dated_config(
    config: RunConfig, trainer: bytes, ledger: Ledger, model_dir: Path, today: str
) -> RunConfig:
    """Return the config with the date that the model's chat template writes, if it does.

    It is that of the manifest if there is one, else `today`; the evaluations of a run have it, too.
    """
    known = known_documents(ledger, trainer)
    count = len(config.environments) or 1
    dates = [today] * count
    if known is not None:
        begun = known.manifest.environments
        dates = [
            str(options_of(environment).chat_template_kwargs.get(DATE, "")) for environment in begun
        ]
        dates += [""] * (count - len(dates))  # another mixture, which _check_environments() refuses

    def completed(environment: Environments, date: str) -> Environments:
        variables = dated(environment.chat_template_kwargs, model_dir, date)
        return environment.model_copy(update={"chat_template_kwargs": variables})

    evaluation = config.evaluation
    evaluated = [completed(environment, dates[0]) for environment in evaluation.environments]
    update = {"evaluation": evaluation.model_copy(update={"environments": evaluated})}
    if not config.environments:
        return config.model_copy(
            update={**update, "environment": completed(config.environment, dates[0])}
        )
    own = [
        completed(environment, date)
        for environment, date in zip(config.environments, dates, strict=False)
    ]
    return config.model_copy(update={**update, "environments": own})


def known_documents(ledger: Ledger, trainer: bytes) -> RunDocuments | None:
    """Read the manifest of an existing run, which `trainer` may lead; None if there is none yet.

    Raises StorageError for one of another version, or if another node leads the run.
    """
    sealed = ledger.get(MANIFEST)
    if sealed is None:
        return None
    try:
        documents = read_documents(sealed, now=int(time.time()))
        leaders = leaders_of(documents, ledger.get(LEADERS) or b"")
    except RemoteProtocolError as error:
        raise StorageError(
            f"this version cannot go on with the run ({error}): {ANOTHER_RUN}"
        ) from error
    if trainer not in leaders:
        began = short(documents.manifest.trainer)
        raise StorageError(
            f"key.pem is of node {short(trainer)}, but node {began} began this run, and workers believe no "
            "other that its root has not certified (`primerl-node root certify`): put that node's key.pem "
            f"back, or {ANOTHER_RUN}"
        )
    return documents


def _check_root(wanted: str, run: RunManifest) -> None:
    """Raise UsageError if the config names another root key than the run began with."""
    if wanted and bytes.fromhex(wanted) != run.root:
        begun = f"the root key {run.root.hex()}" if run.root else "no root key"
        raise UsageError(
            f"this run began with {begun}, now checkpoint.root is {wanted}: change it back, or {ANOTHER_RUN}"
        )


def _check_learners(config: RunConfig, run: RunManifest) -> None:
    """Raise UsageError if the config has other learners than the run began with."""
    if learners_contract(config.learners) != run.learners:
        raise UsageError(
            "this run began with other learners (nodes, inner_steps, outer_lr, outer_momentum of [learners]): "
            f"change them back, or {ANOTHER_RUN}"
        )


def _check_environments(config: RunConfig, run: RunManifest) -> None:
    """Raise UsageError unless the environments are those that the run began with.

    Leases identify environments by index.
    """
    wanted = [f"{environment.name} ({environment.id})" for environment in config.mixture]
    begun = [f"{environment.name} ({environment.id})" for environment in run.environments]
    if wanted != begun:
        raise UsageError(
            f"this run began with the environments {', '.join(begun)}, now they are {', '.join(wanted)}: "
            f"change them back, or {ANOTHER_RUN}"
        )
    for own, contract in zip(config.mixture, run.environments, strict=True):
        wanted_sampling = config.sampling_of(own)
        settings = {name: getattr(contract.sampling, name) for name in SamplingConfig.model_fields}
        signed = wanted_sampling.model_copy(update=settings)
        if wanted_sampling != signed:  # the trainer would compute logprobs of another policy
            raise UsageError(
                f"this run samples {contract.name} with {_described(signed)}, now it is "
                f"{_described(wanted_sampling)}: change it back, or {ANOTHER_RUN}"
            )
        options = options_of(contract)
        # workers play what the manifest says, and their rollouts would be refused
        begun = {key: getattr(options, key) for key in SIGNED} | {"seed": contract.seed}
        now = {key: getattr(own, key) for key in SIGNED} | {"seed": config.seed}
        for key, value in begun.items():
            if now[key] != value:
                raise UsageError(
                    f"this run began with another {key} of {contract.name} ({value!r}, now {now[key]!r}): "
                    f"change it back, or {ANOTHER_RUN}"
                )


def _described(sampling: SamplingConfig) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in sampling.model_dump().items())


def check_clock(run: RunManifest, newest: AdmittedHead | None, now: int) -> None:
    """Raise UsageError if the clock is behind the newest signature of this run.

    Peers would reject everything signed next as out of order or expired.
    """
    signed_at = max(run.created, newest.head.created if newest else 0)
    if signed_at > now + CLOCK_SKEW_S:
        raise UsageError(
            f"the clock of this machine says {utc(now)}, but this run signed its newest version at "
            f"{utc(signed_at)}: set the clock, then start again"
        )


def _check_adapters(config: LoraConfig | None, run: AdapterContract | None) -> None:
    """Raise UsageError unless training.lora is that of the run's beginning."""
    wanted, begun = (
        lora and (lora.rank, lora.alpha, tuple(lora.target_modules)) for lora in (config, run)
    )
    if wanted != begun:
        raise UsageError(
            f"this run began with training.lora {begun}, now it is {wanted}: change it back, or begin "
            "another run"
        )


def _check_routes(wanted: bool, run: RunManifest) -> None:
    """Raise UsageError unless enable_router_replay is that of the run's beginning."""
    if wanted != (run.routes is not None):
        raise UsageError(
            f"this run began with training.enable_router_replay = {str(not wanted).lower()}: change it back, "
            "or begin another run"
        )


def _check_engine(wanted: EngineConfig, run: RunManifest) -> None:
    """Raise UsageError unless the settings that all engines share are those of the run's beginning."""
    settings = {
        "quantization": (run.proofs.quantization, wanted.quantization),
        "keep_kv_cache": (run.proofs.kv_cache == "kept", wanted.keep_kv_cache),
    }
    for name, (begun, now) in settings.items():
        if now != begun:
            raise UsageError(
                f"this run began with engine.{name} = {str(begun).lower()}, now it is {str(now).lower()}: "
                "change it back, or begin another run"
            )


def _routes(config: RunConfig, model_dir: Path) -> RouteShape | None:
    """Return the shape of the routes that workers send; None without router replay.

    Raises UsageError for a model without experts.
    """
    if not config.training.enable_router_replay:
        return None
    from ..models.routers import route_shape

    shape = route_shape(model_dir)
    if shape is None:
        raise UsageError(
            f"{config.model.name} has no experts: remove training.enable_router_replay"
        )
    return shape


def _model_files(store: Store, model_dir: Path) -> tuple[FileRef, ...]:
    """Put the model's files but its weights into the store."""
    return tuple(
        FileRef(name, ChunkRef(store.put(data), len(data)))
        for name in contract_files(model_dir)
        if (data := (model_dir / name).read_bytes())
    )


class OtherModelFiles(StorageError):
    """The model's directory has other files than those that the run began with."""


def _check_files(
    config: RunConfig, run: RunManifest, files: tuple[FileRef, ...], model_dir: Path
) -> None:
    """Raise OtherModelFiles where the trainer would read other tokens or shapes than its workers."""
    changed = next((file.name for file in run.model.files if file not in files), "")
    if changed:
        mend = (
            "put it back"
            if config.model.create is None
            else f"remove {model_dir / 'config.json'}, and the model is made anew"
        )
        raise OtherModelFiles(
            f"{model_dir / changed} is not the file that this run began with: {mend}, or {ANOTHER_RUN}"
        )


def _base_digest(model_dir: Path) -> bytes:
    """Return the digest of the model's weights in bf16. Raises EngineError."""
    return prove(0, view_state(model_dir, bf16=True), threads=memory_threads()).digest


def _model_contract(
    config: RunConfig, files: tuple[FileRef, ...], base: bytes, model_dir: Path
) -> ModelContract:
    from ..models import huggingface

    return ModelContract(
        name=config.model.name,
        files=files,
        base_state=base,
        vocab_size=huggingface.vocab_size(model_dir),
        stop_token_ids=huggingface.stop_token_ids(model_dir),
    )


def longest_sequence(config: RunConfig, positions: int) -> int:
    """Return the maximum tokens of a sequence of a run, prompt and replies.

    Every worker serves this length. A sequence has to fit into a packed row of training, into the model's
    `positions` (0: unknown) and into engine.max_model_len, if set. Raises UsageError if no reply fits.
    """
    longest = min(config.training.seq_len, positions or config.training.seq_len)
    if "max_model_len" in config.engine.model_fields_set:
        longest = min(longest, config.engine.max_model_len)
    most = max(environment.sampling.max_tokens for environment in config.mixture)
    if most >= longest:
        raise UsageError(
            f"sampling.max_tokens is {most}, and a sequence of this run has at most "
            f"{longest} tokens (training.seq_len, the model's positions, engine.max_model_len): lower it"
        )
    return longest


def _new_manifest(
    config: RunConfig,
    key: SecretKey,
    model: ModelContract,
    environments: tuple[EnvironmentContract, ...],
    longest: int,
) -> RunManifest:
    return RunManifest(
        name=config.name,
        created=int(time.time()),
        software=__version__,
        trainer=key.node_id,
        model=model,
        environments=environments,
        limits=RunLimits(
            max_off_policy_steps=config.rollouts.max_off_policy_steps,
            max_model_len=longest,
        ),
        proofs=proof_contract(config),
        max_steps=config.max_steps,
        nonce=secrets.token_bytes(32),
        root=bytes.fromhex(config.checkpoint.root),
        learners=learners_contract(config.learners),
    )


def learners_contract(config: LearnersConfig) -> LearnersContract | None:
    """Return what the manifest says of the learners of a run; None if its trainer trains alone."""
    if not config.nodes:
        return None
    return LearnersContract(
        nodes=tuple(bytes.fromhex(node) for node in config.nodes),
        inner_steps=config.inner_steps,
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
    )
