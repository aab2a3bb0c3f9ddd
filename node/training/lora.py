"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) inside a transformers model.

Imports torch: import lazily. Call attach() before sharding and compiling. Parameters of the base keep their
names and never change again; the adapters have PEFT's names, so that PEFT, vLLM and others can read an export.
"""

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...crypto.hashing import derive
from ..config.training import LoraConfig
from ..errors import EngineError
from ..models import model_files
from ..models.tensors import bf16_state, to_torch
from ..storage.partial import whole_directory
from ..storage.run_files import written_to_model
from ..weights.adapters import PREFIX, merge
from ..weights.checkpoint import write_checkpoint
from ..weights.state import State

if TYPE_CHECKING:
    from ..models.huggingface import PreTrainedModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS, MERGED = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "merged",
)
FUSED = {"gate_up_proj": {"gate_proj", "up_proj", "gate_up_proj"}}
"""transformers' names of fused expert weights, with the checkpoint names of their parts."""


class LoraLinear(nn.Linear):
    """x W^T + bias + scale (x A^T) B^T, with `weight` and `bias` of the replaced layer."""

    def __init__(self, base: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = _empty(base.in_features, config.rank)
        self.lora_B = _empty(config.rank, base.out_features)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.lora_B.weight)
        self.to(base.weight.device)
        self._scale = config.alpha / config.rank

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in] to [..., out], in the dtype of `input`."""
        down, up = (adapter.weight.to(input.dtype) for adapter in (self.lora_A, self.lora_B))
        return super().forward(input) + F.linear(F.linear(input, down), up) * self._scale


def _empty(columns: int, rows: int) -> nn.Linear:
    """Make an uninitialised layer of fp32 masters, without drawing from the global generator."""
    layer = nn.Linear(columns, rows, bias=False, dtype=torch.float32, device="meta")
    return layer.to_empty(device="cpu")


def attach(
    model: "PreTrainedModel", config: LoraConfig, seed: int, *, dtype: torch.dtype | None = None
) -> None:
    """Give every targeted linear layer adapters, in place, and freeze everything else.

    The same seed gives the same adapters on every rank. The base is rounded to bf16, as other nodes have it,
    and kept in `dtype` (None: its own): bf16 saves memory if the forward pass is in bf16 anyway. Raises
    EngineError for targets that are not linear layers of the model.
    """
    targets = _targets(model, config)
    model.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            rounded = parameter.data.to(torch.bfloat16)
            parameter.data = rounded.to(dtype or parameter.dtype)
    for name, layer in targets.items():
        # not the global generator, whose state may differ between ranks and after restarts
        own = derive("lora", seed.to_bytes(8, "big", signed=True), name.encode())
        generator = torch.Generator().manual_seed(int.from_bytes(own[:8], "big") >> 1)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, LoraLinear(layer, config, generator))


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters under their file names, on their devices, whole or sharded."""
    return {
        f"{PREFIX}{name}.{part}.weight": getattr(layer, part).weight
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLinear)
        for part in ("lora_A", "lora_B")
    }


def export(adapters: State, config: LoraConfig, model_dir: Path, directory: Path) -> None:
    """Write adapters as PEFT does, with the tokenizer and config of the base `model_dir`.

    `directory` is whole or absent. With `config.export_merged` the merged model follows, in `merged`. Raises
    StorageError.
    """
    with whole_directory(directory, written_to_model) as partial:
        for name in model_files.contract_files(model_dir):
            shutil.copyfile(model_dir / name, partial / name)
        write_checkpoint(partial / ADAPTER_WEIGHTS, adapters, metadata={"format": "pt"})
        described = json.dumps(peft_config(config, model_dir), indent=2)
        (partial / ADAPTER_CONFIG).write_text(described + "\n")
        if config.export_merged:
            whole = merge(_read_base(model_dir), adapters, config)
            model_files.export(whole, model_dir, partial / MERGED)


def peft_config(config: LoraConfig, model_dir: Path) -> dict[str, Any]:
    """Return adapter_config.json's fields needed for merging; PEFT defaults the others."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha.is_integer() else config.alpha,
        "target_modules": list(config.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _read_base(model_dir: Path) -> State:
    state = model_files.read_state(model_dir)
    return bf16_state((name, to_torch(tensor)) for name, tensor in state.items())


def _targets(model: "PreTrainedModel", config: LoraConfig) -> dict[str, nn.Linear]:
    """Return the layers that get adapters, by name."""
    wanted = set(config.target_modules)
    stacked = [
        name.rpartition(".")[2]
        for name, parameter in model.named_parameters()
        if parameter.ndim > 2
    ]
    if fused := {target for name in stacked for target in FUSED.get(name, {name})} & wanted:
        raise EngineError(
            f"the weights of all experts are one tensor each ({', '.join(sorted(set(stacked)))}), which cannot "
            f"have adapters: take {', '.join(sorted(fused))} out of training.lora.target_modules"
        )
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    targets = {name: layer for name, layer in linear.items() if name.rpartition(".")[2] in wanted}
    head = model.get_output_embeddings()
    if any(layer is head for layer in targets.values()):
        raise EngineError(
            "the head cannot have adapters: take it out of training.lora.target_modules"
        )
    if lost := wanted - {name.rpartition(".")[2] for name in targets}:
        known = sorted(
            {name.rpartition(".")[2] for name, layer in linear.items() if layer is not head}
        )
        raise EngineError(
            f"the model has no linear layers {', '.join(sorted(lost))}, but {', '.join(known)}: correct "
            "training.lora.target_modules"
        )
    return targets
