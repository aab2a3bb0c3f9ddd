"""Prepare a run's directory, its model and the checkpoint to begin from."""

import asyncio
import json
from pathlib import Path
from typing import Any

from ...protocol.manifests import (
    RunManifest,
)
from ..config.paths import expand_home
from ..config.run import RunConfig
from ..config.sft import SftConfig
from ..config.training import TrainingConfig
from ..errors import BAD_FILE, UsageError, file_error
from ..models import base_weights
from ..storage.chunk_store import Store, read_chunk
from ..storage.run_files import (
    CHECKPOINTS,
    CONFIG,
    check_kinds,
    claim,
    clean,
    holds_run,
    make_directory,
    write_private,
)
from ..training import parity
from ..training.checkpoint import Checkpoints


def prepare(config: RunConfig) -> Path:
    """Make the run directory, or check that this one may be used.

    Raises:
        UsageError: another run is in it and neither resume nor clean was asked for; it is none of a run and
            holds what a run would write over; or the checkpoint that was asked for is not there.
        BusyError: it is to be cleaned, and a node still runs in it.
        StorageError: something else is where its files belong, or it cannot be written.
    """
    directory = config.run_dir
    used = holds_run(directory)
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
    claim(directory, goes_on=config.goes_on)
    # it may hold the passwords of seeds
    write_private(directory / CONFIG, config.model_dump_json(indent=2))
    return directory


async def prepare_model(config: RunConfig | SftConfig, directory: Path) -> Path:
    """Make or find the Hugging Face directory of the run's model.

    One that was just downloaded is checked: commands check directories. Raises EngineError, StorageError.
    """
    from ..models import huggingface

    if config.model.create is None:
        model_dir = await asyncio.to_thread(huggingface.resolve, config.model.name)
        if not expand_home(config.model.name).is_dir():
            await asyncio.to_thread(parity.check_directory, model_dir, config.training.seq_len)
        return model_dir
    if not (directory / "config.json").exists():
        await asyncio.to_thread(huggingface.create, directory, config.model.create, config.seed)
    return directory


async def prepare_teacher(training: TrainingConfig) -> None:
    """Write the text model of the loss's teacher, if it is one that also reads images.

    Each rank looks for it: here it is made once, before they start. Raises EngineError, StorageError.
    """
    from ..models import huggingface

    teacher = training.loss.reference
    if teacher is not None:
        await asyncio.to_thread(huggingface.text_directory, teacher)


def write_model_files(run: RunManifest, store: Store, directory: Path) -> Path:
    """Write the model contract's files (already in the store) where an engine can read them.

    Raises LostChunk, StorageError.
    """
    make_directory(directory)
    for file in run.model.files:
        data = read_chunk(store, file.chunk.digest)
        try:
            (directory / file.name).write_bytes(data)
        except OSError as error:
            raise file_error(error, directory / file.name) from error
    return directory


def pinned(run: RunManifest, store: Store) -> set[bytes]:
    """List the chunks that the run always needs: the model's files, and its base if policies lack it."""
    base = base_weights.chunks(run, store)
    return {chunk.digest for chunk in (*(file.chunk for file in run.model.files), *base)}


def trained_model(run: RunManifest, store: Store, model_dir: Path, directory: Path) -> Path:
    """Return the model directory of a trainer: `model_dir` or, for adapters, `directory` with the same files.

    base_weights.write() brings the base that workers have into that, too. Raises StorageError.
    """
    return model_dir if run.adapters is None else write_model_files(run, store, directory)


def _check_checkpoint(config: RunConfig) -> None:
    """Check that the checkpoint to resume from exists and fits the model, as far as files tell. Raises
    UsageError."""
    if config.resume is None:
        return
    source = config.resume.dir or config.run_dir
    Checkpoints(source / CHECKPOINTS, keep_last=1).check(config.resume)
    if config.goes_on:
        return
    if config.training.lora is not None and _base(config.model_dump(mode="json")) != _base(
        _read_config(source)
    ):
        raise UsageError(
            f"adapters fit only the model that they were made for: begin with the model and seed of {source}"
        )


def _read_config(directory: Path) -> dict[str, Any]:
    """Read the config that a run was started with. Raises UsageError."""
    try:
        return json.loads((directory / "config.json").read_bytes())
    except BAD_FILE as error:
        raise UsageError(f"{directory} has no readable config.json ({error})") from error


def _base(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return the config values that determine the weights below the adapters."""
    model = config.get("model", {})
    return model, config.get("seed") if model.get("create") else None
