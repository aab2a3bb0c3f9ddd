"""A run's directory: who may use it, what is in it, and the documents that a new run begins with."""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..crypto.keys import SecretKey
from ..protocol.envelope import Purpose, seal, unseal
from ..protocol.manifests import (
    ChunkRef,
    EnvironmentContract,
    FileRef,
    ModelContract,
    RunLimits,
    RunManifest,
    SamplingContract,
    encode,
    run_id,
)
from .config import RunConfig
from .errors import StorageError, UsageError
from .ledger import MANIFEST, Ledger
from .proofs.thresholds import check_bounds, proof_contract
from .run_files import clean
from .store import Store
from .weights.mirror import prove

logger = logging.getLogger(__name__)

MANIFEST_TTL_S = 10 * 365 * 86400


@dataclass(frozen=True)
class RunDocuments:
    """The sealed manifest of a run and what it says."""

    run_id: bytes
    sealed: bytes
    manifest: RunManifest


def prepare(config: RunConfig) -> Path:
    """Make the run directory, or check that this one may be used.

    Raises:
        UsageError: another run is in it and neither resume nor clean was asked for.
        BusyError: it is to be cleaned, and a node still runs in it.
    """
    directory = config.run_dir
    used = (directory / "trainer" / "ledger.db").exists() or (directory / "metrics.jsonl").exists()
    if used and config.clean and not config.resume:
        clean(directory)
    elif used and not config.resume:
        raise UsageError(f"{directory} holds a run: add --resume, --clean, or another --name")
    elif config.resume and not used:
        raise UsageError(f"nothing to resume in {directory}")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config.model_dump_json(indent=2))
    return directory


async def prepare_model(config: RunConfig, directory: Path) -> Path:
    """The Hugging Face directory of the run's model, made or found."""
    from . import models

    if config.model.create is None:
        return await asyncio.to_thread(models.resolve, config.model.name)
    if not (directory / "config.json").exists():
        await asyncio.to_thread(models.create, directory, config.model.create, config.seed)
    return directory


async def documents(
    config: RunConfig, key: SecretKey, ledger: Ledger, store: Store, model_dir: Path
) -> RunDocuments:
    """The run's manifest: the one in the ledger, or a new one; model files go into the store."""
    known = ledger.get(MANIFEST)
    contract = await asyncio.to_thread(_model_contract, config, store, model_dir)
    if known is not None:
        return read_documents(known, key.node_id)
    manifest = encode(_new_manifest(config, key, contract))
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


def write_model_files(run: RunManifest, store: Store, directory: Path) -> Path:
    """Write the model contract's files (already in the store) where an engine can read them."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in run.model.files:
        data = store.get(file.chunk.digest)
        if data is None:
            raise StorageError(f"{file.name} was lost from the store")
        (directory / file.name).write_bytes(data)
    return directory


def _model_contract(config: RunConfig, store: Store, model_dir: Path) -> ModelContract:
    from . import models, tensors

    files = tuple(
        FileRef(name, ChunkRef(store.put(data), len(data)))
        for name in models.contract_files(model_dir)
        if (data := (model_dir / name).read_bytes())
    )
    weights = ((name, tensors.to_torch(t)) for name, t in models.read_state(model_dir).items())
    base = prove(0, tensors.bf16_state(weights))
    return ModelContract(
        name=config.model.name,
        files=files,
        base_state=base.digest,
        vocab_size=models.vocab_size(model_dir),
        stop_token_ids=models.stop_token_ids(model_dir),
    )


def _new_manifest(config: RunConfig, key: SecretKey, model: ModelContract) -> RunManifest:
    from importlib.metadata import version

    check_bounds(config)
    return RunManifest(
        name=config.name,
        created=int(time.time()),
        software=__version__,
        trainer=key.node_id,
        model=model,
        environment=EnvironmentContract(
            id=config.environment.id,
            config=config.environment.model_dump_json().encode(),
            seed=config.seed,
            version=f"verifiers {version('verifiers')}",
        ),
        sampling=SamplingContract(config.sampling.temperature, config.sampling.max_tokens),
        limits=RunLimits(
            max_off_policy_steps=config.rollouts.max_off_policy_steps,
            group_size=config.rollouts.group_size,
            max_turns=config.environment.max_turns,
            max_model_len=config.training.seq_len,
        ),
        proofs=proof_contract(config, _config_digest(model)),
        max_steps=config.max_steps,
        nonce=secrets.token_bytes(32),
    )


def _config_digest(model: ModelContract) -> str:
    """Which model a calibration is of: the digest of its config.json."""
    return next((f.chunk.digest.hex() for f in model.files if f.name == "config.json"), "")
