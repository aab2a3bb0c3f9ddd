"""Find the models to evaluate here, and read their weights: directories, hub ids, steps of a run.

A model is known by what its files hold, never by its name: the same name with other weights is another one.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...crypto.hashing import digest_parts
from ..config.evaluation import EvalConfig
from ..models.json_files import read_json
from ..models.model_files import contract_files, read_state
from ..models.tensors import bf16_state, to_torch
from ..ops.errors import UsageError
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
    """In the results."""
    directory: Path
    """Its weights, tokenizer and config."""
    base: Path | None = None
    """The model that its weights adapt; None if they are whole."""
    step: int | None = None

    @property
    def model_dir(self) -> Path:
        """Where an engine reads config and tokenizer."""
        return self.base or self.directory


@dataclass(frozen=True)
class Adapters:
    """PEFT's adapter_config.json, as far as it is computed here."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


# -- finding --------------------------------------------------------------------------------------


def candidates(config: EvalConfig) -> list[Candidate]:
    """List the models that `config` names, the base of a run before its steps. Downloads from the hub.

    Raises UsageError, EngineError.
    """
    found = [candidate(name, _resolve(name)) for name in config.models]
    if config.weights_dir is not None:
        if config.eval_base:
            found.append(candidate("base", _base(config, config.weights_dir)))
        found.extend(_steps(config, config.weights_dir))
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models are called {name}: name each once in models")
    return found


def run_config(weights_dir: Path) -> dict[str, Any]:
    """The config that the run of `weights_dir` was started with; empty where there is none to read.

    Raises UsageError where there is no such directory.
    """
    if not weights_dir.is_dir():
        raise UsageError(
            f"there is no directory {weights_dir}: name the weights of a run, as outputs/RUN/weights"
        )
    try:
        found = json.loads((weights_dir.absolute().parent / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def candidate(name: str, directory: Path, step: int | None = None, base: str = "") -> Candidate:
    """The model in `directory`; adapters are of `base`, else of what they name. Raises UsageError."""
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        return Candidate(name, directory, step=step)
    base = base or str(read_json(path).get("base_model_name_or_path") or "")
    if not base:
        raise UsageError(f"{path} does not name its model: add base_model_name_or_path")
    kept = directory.absolute().parent.parent / "trainer" / "model"  # of a run that was moved
    moved = not Path(base).expanduser().is_dir() and (kept / "config.json").is_file()
    return Candidate(name, directory, kept if moved else _resolve(base), step)


def _resolve(name: str) -> Path:
    from ..models import huggingface

    return huggingface.resolve(name)


def _base(config: EvalConfig, weights_dir: Path) -> Path:
    if config.base:
        return _resolve(config.base)
    model = run_config(weights_dir).get("model") or {}
    made = weights_dir.absolute().parent / "model"
    if model.get("create") and (made / "config.json").is_file():
        return made
    if not model.get("name") or model.get("create"):
        raise UsageError(
            f"{weights_dir.parent} does not say which model its run began with: name it with --base, or say "
            "--no-eval-base"
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
            held = ", ".join(map(str, sorted(there))) or "none"
            raise UsageError(
                f"{weights_dir} has no weights of step {step}, only {held}: a run keeps more of them with "
                "checkpoint.weights_interval"
            )
        yield candidate(f"{STEP}{step}", there[step], step)


# -- reading --------------------------------------------------------------------------------------


def identity(candidate: Candidate) -> str:
    """Hex digest of everything that the model's answers follow from. Reads all of its files."""
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
    """Hex digest of the files that an engine starts with: equal ones need one engine and new weights."""
    directory = candidate.model_dir
    names = contract_files(directory)
    files = [digest_parts([name.encode(), (directory / name).read_bytes()]) for name in names]
    return digest_parts(files).hex()


def read(candidate: Candidate) -> State:
    """Its weights as engines take them, adapters merged into their base. Raises EngineError."""
    from ..models import huggingface

    whole = huggingface.policy_state(huggingface.load_model(candidate.model_dir, dtype="bfloat16"))
    if candidate.base is None:
        return whole
    found = read_state(candidate.directory)
    adapters = bf16_state((name, to_torch(tensor)) for name, tensor in found.items())
    threads = min(THREADS, os.cpu_count() or 1)
    return merge(whole, adapters, _adapters(candidate.directory), threads=threads)


def _adapters(directory: Path) -> Adapters:
    """Raises UsageError for adapters that compute anything but W + alpha / rank x B A."""
    path = directory / ADAPTER_CONFIG
    told = read_json(path)
    odd = [name for name in ("use_rslora", "use_dora", "fan_in_fan_out") if told.get(name)]
    if told.get("bias", "none") != "none" or told.get("modules_to_save"):
        odd.append("bias or modules_to_save")
    targets = told.get("target_modules")
    if odd or not isinstance(targets, list) or not isinstance(told.get("r"), int):
        raise UsageError(
            f"{path} describes adapters that are not merged here ({', '.join(odd) or 'no list of targets'}): "
            "merge them with PEFT, and evaluate that directory"
        )
    return Adapters(told["r"], float(told.get("lora_alpha", told["r"])), tuple(targets))


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece
