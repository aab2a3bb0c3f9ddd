"""Kernels by Triton's interpreter, without a GPU; see gpu/test_boundary_gpu.py and gpu/test_adapters_gpu.py."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.nightly

PROJECTION = """
import torch
from primerl.node.inference.kernels import launch_project
from primerl.node.inference.boundary_states import LIMIT, evened
from primerl.node.inference.fingerprint import signs

for width in (64, 512, 700, 1536):
    for dtype in (torch.float32, torch.bfloat16):
        states = torch.randn(6, width, generator=torch.Generator().manual_seed(width)).to(dtype)
        states[1, 3], states[2] = 500.0, 0.0
        states[3, 0], states[4, 1] = torch.nan, torch.inf
        matrix, found = torch.from_numpy(signs(width)), torch.full((6, 7), 9.0)
        launch_project(states, matrix, LIMIT, found, (6,), width)
        wanted = evened(states) @ matrix
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert not found[2].any() and found[[3, 4]].isnan().all()
print("the same")
"""


ADAPTERS = """
import torch
from primerl.node.inference import kernels

kernels.MERGING_PROGRAMS = 3
for rows, columns, rank in ((20, 300, 4), (9, 257, 16), (64, 700, 1)):
    weight, a, b = (torch.randn(shape) for shape in ((rows, columns), (rank, columns), (rows, rank)))
    found, scale = torch.full_like(weight, 9.0), torch.tensor([0.37], dtype=torch.float64)
    kernels.launch_add_product(weight, a, b, scale, found)
    wanted = weight.double() + 0.37 * (b.double() @ a.double())  # bf16 is what the interpreter cannot round
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)
print("the same")
"""


def test_states_are_projected_as_torch_does() -> None:
    run(PROJECTION)


def test_adapters_are_added_to_every_tile_of_a_matrix() -> None:
    run(ADAPTERS)


def run(program: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "the same\n", done.stderr
