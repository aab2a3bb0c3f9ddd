"""Find local models to evaluate (directories, hub ids, steps of a run); read their weights.

A model is identified by its files' contents, never by its name: the same name with other weights is another
one.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...crypto.hashing import digest_parts
from ..config.evaluation import EvalConfig
from ..config.paths import expand_home
from ..errors import UsageError
from ..models.json_files import read_json
from ..models.model_files import contract_files, read_state
from ..models.tensors import bf16_state, to_torch
from ..weights.adapters import merge
from ..weights.state import State

ADAPTER_CONFIG = "adapter_config.json"
STEP = "step_"
PIECE = 1 << 24
THREADS = 8


@dataclass(frozen=True)
class Candidate:
    """A model on this machine."""

    name: str
    """Name in the results."""
    directory: Path
    """Weights, tokenizer and config."""
    base: Path | None = None
    """The base model, if the weights are adapters."""
    step: int | None = None

    @property
    def model_dir(self) -> Path:
        """Directory from which an engine reads config and tokenizer."""
        return self.base or self.directory


@dataclass(frozen=True)
class Adapters:
    """The supported fields of PEFT's adapter_config.json."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


# -- finding --------------------------------------------------------------------------------------


def candidates(config: EvalConfig) -> list[Candidate]:
    """List the models that `config` names, a run's base before its steps.

    Downloads from the hub. Raises UsageError, EngineError.
    """
    listed = [candidate(name, _resolve(name)) for name in config.models]
    if config.weights_dir is not None:
        if config.eval_base:
            listed.append(candidate("base", _base(config.weights_dir)))
        listed.extend(_steps(config, config.weights_dir))
    names = [model.name for model in listed]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models have the name {name}: list each once in models")
    return listed


def run_config(weights_dir: Path) -> dict[str, Any]:
    """Read the config of the run that wrote `weights_dir`; empty if it cannot be read.

    Raises UsageError if the directory does not exist.
    """
    if not weights_dir.is_dir():
        raise UsageError(
            f"there is no directory {weights_dir}: give the weights of a run, such as outputs/RUN/weights"
        )
    try:
        config = json.loads((weights_dir.absolute().parent / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def candidate(name: str, directory: Path, step: int | None = None, base: str = "") -> Candidate:
    """Describe the model in `directory`. Raises UsageError.

    Adapters belong to `base`, by default the model named in their config.
    """
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        return Candidate(name, directory, step=step)
    base = base or str(read_json(path).get("base_model_name_or_path") or "")
    if not base:
        raise UsageError(f"{path} does not name its base model: add base_model_name_or_path")
    trainer_model = (
        directory.absolute().parent.parent / "trainer" / "model"
    )  # if the run directory was moved
    moved = not expand_home(base).is_dir() and (trainer_model / "config.json").is_file()
    return Candidate(name, directory, trainer_model if moved else _resolve(base), step)


def _resolve(name: str) -> Path:
    from ..models import huggingface

    return huggingface.resolve(name)


def _base(weights_dir: Path) -> Path:
    model = run_config(weights_dir).get("model") or {}
    own_model = weights_dir.absolute().parent / "model"
    if model.get("create") and (own_model / "config.json").is_file():
        return own_model
    if not model.get("name") or model.get("create"):
        raise UsageError(
            f"{weights_dir.parent} does not say which model its run began with: set --no-eval-base, and give "
            "it as --models"
        )
    return _resolve(model["name"])


def _steps(config: EvalConfig, weights_dir: Path) -> Iterator[Candidate]:
    there = {
        int(path.name.removeprefix(STEP)): path
        for path in weights_dir.glob(f"{STEP}*")
        if path.name.removeprefix(STEP).isdigit()
    }
    wanted = sorted(set(config.steps)) or sorted(there)
    for step in wanted:
        if step not in there:
            steps = ", ".join(map(str, sorted(there))) or "none"
            raise UsageError(
                f"{weights_dir} has no weights of step {step}, only {steps}: set "
                "checkpoint.weights_interval for a run to keep more"
            )
        yield candidate(f"{STEP}{step}", there[step], step)


# -- reading --------------------------------------------------------------------------------------


def identity(candidate: Candidate) -> str:
    """Digest all files that determine the model's answers, weights included; hex."""
    parts: list[bytes] = []
    for directory in (candidate.directory, *([candidate.base] if candidate.base else [])):
        weights = sorted(path.name for path in directory.glob("*.safetensors"))
        names = [*contract_files(directory), *weights]
        if candidate.base and directory == candidate.directory:
            names.append(ADAPTER_CONFIG)
        for name in names:
            parts.extend([name.encode(), digest_parts(_pieces(directory / name))])
    return digest_parts(parts).hex()


def contract(candidate: Candidate) -> str:
    """Digest the files that an engine starts with; hex.

    Models with equal digests can share an engine.
    """
    directory = candidate.model_dir
    names = contract_files(directory)
    files = [digest_parts([name.encode(), (directory / name).read_bytes()]) for name in names]
    return digest_parts(files).hex()


def read(candidate: Candidate) -> State:
    """Read the weights in bf16, adapters merged into their base. Raises EngineError."""
    from ..models import huggingface

    base = huggingface.policy_state(huggingface.load_model(candidate.model_dir, dtype="bfloat16"))
    if candidate.base is None:
        return base
    stored = read_state(candidate.directory)
    adapters = bf16_state((name, to_torch(tensor)) for name, tensor in stored.items())
    threads = min(THREADS, os.cpu_count() or 1)
    return merge(base, adapters, _adapters(candidate.directory), threads=threads)


def _adapters(directory: Path) -> Adapters:
    """Read adapter_config.json.

    Raises UsageError for adapters other than W + alpha / rank x B A.
    """
    path = directory / ADAPTER_CONFIG
    config = read_json(path)
    odd = [name for name in ("use_rslora", "use_dora", "fan_in_fan_out") if config.get(name)]
    if config.get("bias", "none") != "none" or config.get("modules_to_save"):
        odd.append("bias or modules_to_save")
    targets = config.get("target_modules")
    if odd or not isinstance(targets, list) or not isinstance(config.get("r"), int):
        raise UsageError(
            f"{path} describes unsupported adapters ({', '.join(odd) or 'no list of target_modules'}): "
            "merge them with PEFT, and evaluate the merged directory"
        )
    return Adapters(config["r"], float(config.get("lora_alpha", config["r"])), tuple(targets))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece
