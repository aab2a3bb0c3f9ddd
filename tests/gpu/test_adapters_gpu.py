"""Adapters merged by a GPU have the bits that a CPU gives them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from primerl.node.inference.handover import AdapterBase
from primerl.node.inference.policy_file import KeptBase, PolicyFile
from primerl.node.models.tensors import from_torch
from primerl.node.training.lora import LoraConfig
from primerl.node.weights.adapters import PREFIX, A, B, merge
from primerl.node.weights.checkpoint import write_checkpoint
from primerl.node.weights.state import Tensor, digests
from primerl.node.weights.state_history import layout

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu

RANK = 16
SHAPES = {
    "layers.0.q_proj": (2560, 4096),
    "layers.0.up_proj": (777, 300),
    "layers.1.q_proj": (1, 5),
}
SPECIAL = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x7F7F], "<u2")
"""Zeros, infinities, the smallest and the largest number."""


def random_tensor(rng: np.random.Generator, shape: tuple[int, int], size: float) -> Tensor:
    values = torch.from_numpy(rng.normal(0, size, shape)).bfloat16()
    return from_torch(values)


@pytest.mark.parametrize("kept", [True, False])
def test_a_gpu_merges_adapters_to_the_bits_of_numpy(tmp_path: Path, kept: bool) -> None:
    rng = np.random.default_rng(0)
    base = {f"{name}.weight": random_tensor(rng, shape, 0.02) for name, shape in SHAPES.items()}
    for tensor in base.values():
        count = min(len(SPECIAL), tensor.data.size)
        tensor.data[rng.choice(tensor.data.size, count, replace=False)] = SPECIAL[:count]
    adapters: dict[str, Tensor] = {}
    for name, (rows, columns) in SHAPES.items():
        adapters[PREFIX + name + A] = random_tensor(rng, (RANK, columns), 0.01)
        adapters[PREFIX + name + B] = random_tensor(rng, (rows, RANK), 1e-3)
    contract = LoraConfig(rank=RANK, alpha=11.0, target_modules=("q_proj", "up_proj"))
    directory = tmp_path / "model"
    directory.mkdir()
    write_checkpoint(directory / "model.safetensors", base)
    told = AdapterBase(directory, contract, layout(base))
    write_checkpoint(tmp_path / "adapters.safetensors", adapters, metadata=told.metadata)
    device = torch.device("cuda")
    memory = KeptBase(1 << 30) if kept else None
    policy = PolicyFile(str(tmp_path / "adapters.safetensors"), memory)
    wanted = digests(merge(base, adapters, contract))
    for _ in range(2):
        found = {name: from_torch(tensor) for name, tensor in policy.tensors(device)}
        assert digests(found) == wanted
