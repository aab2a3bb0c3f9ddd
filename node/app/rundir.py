"""A run's directory: its lock, its layout and the documents of a new run."""

import asyncio
import json
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from ... import __version__
from ...crypto.keys import SecretKey
from ...protocol.envelope import Purpose, seal, unseal, utc
from ...protocol.errors import RemoteProtocolError
from ...protocol.manifests import (
    AdapterContract,
    ChunkRef,
    EnvironmentContract,
    FileRef,
    ModelContract,
    RouteShape,
    RunLimits,
    RunManifest,
    encode,
    run_id,
)
from ...protocol.messages import MAX_SEALED
from ...protocol.trust import AdmittedHead
from ...protocol.version import CLOCK_SKEW_S, KIB
from ..config.run import RunConfig, SamplingConfig
from ..config.training import LoraConfig
from ..environments.allowed import environment_contracts
from ..models.model_files import position_count
from ..ops.errors import StorageError, UsageError
from ..storage.chunk_store import Store
from ..storage.ledger import MANIFEST, Ledger
from ..storage.run_files import (
    CHECKPOINTS,
    CONFIG,
    check_kinds,
    clean,
    make_directory,
    write_private,
)
from ..training.checkpoint import Checkpoints
from ..verification.bounds import proof_contract
from ..weights.replica import prove
from . import base_weights

logger = logging.getLogger(__name__)

MANIFEST_TTL_S = 10 * 365 * 86400
MAX_RUN = MAX_SEALED - KIB
"""Bytes of a manifest: it travels sealed."""


@dataclass(frozen=True)
class RunDocuments:
    """The sealed manifest of a run and what it says."""

    run_id: bytes
    sealed: bytes
    manifest: RunManifest


def prepare(config: RunConfig) -> Path:
    """Make the run directory, or check that this one may be used.

    Raises:
        UsageError: another run is in it and neither resume nor clean was asked for; or the checkpoint that
            was asked for is not there.
        BusyError: it is to be cleaned, and a node still runs in it.
        StorageError: something else is where its files belong, or it cannot be written.
    """
    directory = config.run_dir
    traces = ("trainer/ledger.db", "metrics.jsonl", CHECKPOINTS)
    used = any((directory / name).exists() for name in traces)
    _check_checkpoint(config)
    if used and config.clean and not config.goes_on:
        clean(directory)
        used = False
    check_kinds(directory)
    if used and not config.goes_on:
        how = "--resume without a dir" if config.resume else "--resume"
        raise UsageError(f"{directory} holds a run: add {how}, --clean, or another --name")
    elif config.goes_on and not used:
        raise UsageError(f"nothing to resume in {directory}")
    make_directory(directory)
    # it may hold the passwords of seeds
    write_private(directory / CONFIG, config.model_dump_json(indent=2))
    return directory


async def prepare_model(config: RunConfig, directory: Path) -> Path:
    """The Hugging Face directory of the run's model, made or found."""
    from ..models import huggingface

    if config.model.create is None:
        return await asyncio.to_thread(huggingface.resolve, config.model.name)
    if not (directory / "config.json").exists():
        await asyncio.to_thread(huggingface.create, directory, config.model.create, config.seed)
    return directory


async def documents(
    config: RunConfig, key: SecretKey, ledger: Ledger, store: Store, model_dir: Path
) -> RunDocuments:
    """The run's manifest: the one in the ledger, or a new one; model files go into the store."""
    known = ledger.get(MANIFEST)
    contract = await asyncio.to_thread(_model_contract, config, store, model_dir)
    lora = config.training.lora
    if known is not None:
        found = _known_documents(known, key.node_id)
        _check_adapters(lora, found.manifest.adapters)
        _check_routes(config.training.enable_router_replay, found.manifest)
        _check_environments(config, found.manifest)
        return found
    adapters = None
    if lora is not None:
        base, adapters = await asyncio.to_thread(
            base_weights.publish, lora, store, model_dir, config.weights.chunk_mib
        )
        contract = structs.replace(contract, base_state=base)
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
    return read_documents(sealed, key.node_id)


def read_documents(sealed: bytes, trainer: bytes, run: bytes | None = None) -> RunDocuments:
    """Check a sealed run manifest. Raises RemoteProtocolError, also when it is not that of `run`."""
    opened = unseal(sealed, Purpose.RUN, RunManifest, now=int(time.time()), run=run, signer=trainer)
    name = run_id(opened.payload)
    # The run id is the digest of the manifest: an envelope that says otherwise is refused here.
    unseal(sealed, Purpose.RUN, RunManifest, now=0, run=name, signer=trainer)
    return RunDocuments(name, sealed, opened.body)


def _known_documents(sealed: bytes, trainer: bytes) -> RunDocuments:
    """Read the manifest that a run began with. Raises StorageError for one of another version."""
    try:
        return read_documents(sealed, trainer)
    except RemoteProtocolError as error:
        raise StorageError(
            f"this version cannot go on with the run ({error}): begin another from its checkpoint, --name NEW "
            "--resume.dir DIRECTORY"
        ) from error


def _check_environments(config: RunConfig, run: RunManifest) -> None:
    """A run goes on with the environments that it began with: leases name them by place. Raises UsageError."""
    wanted = [f"{one.name} ({one.id})" for one in config.mixture]
    begun = [f"{one.name} ({one.id})" for one in run.environments]
    if wanted != begun:
        raise UsageError(
            f"this run began with the environments {', '.join(begun)}, now they are {', '.join(wanted)}: "
            "change them back, or begin another run from its checkpoint, --name NEW --resume.dir DIRECTORY"
        )
    for own, one in zip(config.mixture, run.environments, strict=True):
        told = config.sampling_of(own)
        signed = told.model_copy(update=structs.asdict(one.sampling))
        if (
            told != signed
        ):  # workers sample by the manifest: the trainer's logprobs would be of another policy
            raise UsageError(
                f"this run samples {one.name} with {_said(signed)}, now it is {_said(told)}: change it back, "
                "or begin another run from its checkpoint, --name NEW --resume.dir DIRECTORY"
            )


def _said(sampling: SamplingConfig) -> str:
    return f"temperature {sampling.temperature:g} and max_tokens {sampling.max_tokens}"


def check_clock(run: RunManifest, newest: AdmittedHead | None, now: int) -> None:
    """Refuse to go on with a clock that lies before what this run has signed: all that it signs next would be
    out of order, or expired, for everybody else.

    Raises UsageError.
    """
    made = max(run.created, newest.head.created if newest else 0)
    if made > now + CLOCK_SKEW_S:
        raise UsageError(
            f"the clock of this machine says {utc(now)}, but this run signed its newest version at "
            f"{utc(made)}: set the clock, then start again"
        )


def write_model_files(run: RunManifest, store: Store, directory: Path) -> Path:
    """Write the model contract's files (already in the store) where an engine can read them."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in run.model.files:
        data = store.get(file.chunk.digest)
        if data is None:
            raise StorageError(f"{file.name} was lost from the store")
        (directory / file.name).write_bytes(data)
    return directory


def pinned(run: RunManifest, store: Store) -> set[bytes]:
    """Chunks that the run needs as long as it lives: the model's files, and its base if policies lack it."""
    base = base_weights.chunks(run, store)
    return {chunk.digest for chunk in (*(file.chunk for file in run.model.files), *base)}


def trained_model(run: RunManifest, store: Store, model_dir: Path, directory: Path) -> Path:
    """Where a trainer's parts read the model: `model_dir` or, for adapters, the base that workers have, too.

    That is written to `directory`. Raises StorageError, RemoteProtocolError.
    """
    if run.adapters is None:
        return model_dir
    return base_weights.write(run, store, write_model_files(run, store, directory))


def _check_checkpoint(config: RunConfig) -> None:
    """That what to go on from is there and of this model, as far as files tell. Raises UsageError."""
    if config.resume is None:
        return
    source, wanted = config.resume.dir or config.run_dir, config.resume.step
    steps = Checkpoints(source / CHECKPOINTS, keep_last=1).steps()
    if wanted is not None and wanted not in steps:
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        raise UsageError(f"{source} has no checkpoint of step {wanted}: {there}")
    if config.goes_on:
        return
    if not steps:
        raise UsageError(f"{source} has no checkpoint to begin from: name a run's own directory")
    if config.training.lora is not None and _base(config.model_dump(mode="json")) != _base(
        _read_config(source)
    ):
        raise UsageError(
            f"adapters fit only the model that they were made for: begin with the model and seed of {source}"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    """The config that a run was started with. Raises UsageError."""
    try:
        return json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{directory} has no readable config.json ({error})") from error


def _base(config: dict[str, Any]) -> tuple[Any, Any]:
    """What names the weights below the adapters."""
    model = config.get("model", {})
    return model, config.get("seed") if model.get("create") else None


def _check_adapters(config: LoraConfig | None, run: AdapterContract | None) -> None:
    """A run goes on as it began. Raises UsageError."""
    wanted, begun = (
        one and (one.rank, one.alpha, tuple(one.target_modules)) for one in (config, run)
    )
    if wanted != begun:
        raise UsageError(
            f"this run began with training.lora {begun}, now it is {wanted}: change it back, or begin "
            "another run"
        )


def _check_routes(wanted: bool, run: RunManifest) -> None:
    """A run goes on as it began. Raises UsageError."""
    if wanted != (run.routes is not None):
        raise UsageError(
            f"this run began with training.enable_router_replay = {str(not wanted).lower()}: change it back, "
            "or begin another run"
        )


def _routes(config: RunConfig, model_dir: Path) -> RouteShape | None:
    """The routes that workers send. Raises UsageError where there can be none."""
    if not config.training.enable_router_replay:
        return None
    from ..models.routers import route_shape

    shape = route_shape(model_dir)
    if shape is None:
        raise UsageError(
            f"{config.model.name} has no experts: remove training.enable_router_replay"
        )
    return shape


def _model_contract(config: RunConfig, store: Store, model_dir: Path) -> ModelContract:
    from ..models import huggingface, tensors

    files = tuple(
        FileRef(name, ChunkRef(store.put(data), len(data)))
        for name in huggingface.contract_files(model_dir)
        if (data := (model_dir / name).read_bytes())
    )
    weights = ((name, tensors.to_torch(t)) for name, t in huggingface.read_state(model_dir).items())
    base = prove(0, tensors.bf16_state(weights))
    return ModelContract(
        name=config.model.name,
        files=files,
        base_state=base.digest,
        vocab_size=huggingface.vocab_size(model_dir),
        stop_token_ids=huggingface.stop_token_ids(model_dir),
    )


def longest_sequence(config: RunConfig, positions: int) -> int:
    """Compute the most tokens of a sequence of a run, prompt and replies; every worker serves this length.

    A sequence has to fit into a row of training, where several are packed, into the model's `positions` (0:
    not known) and into engine.max_model_len, if that was set. Raises UsageError where no reply fits.
    """
    longest = min(config.training.seq_len, positions or config.training.seq_len)
    if "max_model_len" in config.engine.model_fields_set:
        longest = min(longest, config.engine.max_model_len)
    most = max(one.sampling.max_tokens for one in config.mixture)
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
        proofs=proof_contract(config, _config_digest(model)),
        max_steps=config.max_steps,
        nonce=secrets.token_bytes(32),
    )


def _config_digest(model: ModelContract) -> str:
    """Which model a calibration is of: the digest of its config.json."""
    return next((f.chunk.digest.hex() for f in model.files if f.name == "config.json"), "")
