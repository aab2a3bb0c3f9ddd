"""The kernel that projects states, by Triton's interpreter: it needs no GPU; see gpu/test_boundary_gpu.py."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = pytest.mark.nightly

PROGRAM = """
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


def test_it_projects_as_torch_does() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "the same\n", done.stderr
