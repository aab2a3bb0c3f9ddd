"""Projected states on a GPU: by the kernel as by torch, and nobody waits."""

import pytest
import torch
from support.gpu_cases import no_waiting

from primerl.node.inference.boundary_states import LIMIT, agrees, evened, pack_projected, project
from primerl.node.inference.fingerprint import signs
from primerl.node.inference.kernels import project_on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def states(rows: int, width: int, dtype: torch.dtype, massive: float = 300.0) -> torch.Tensor:
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    drawn[:, 1] += massive
    return drawn.to(dtype)


@pytest.mark.parametrize("width", [64, 700, 1024, 5120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 37, 512])
def test_the_kernel_projects_as_torch_does(width: int, dtype: torch.dtype, rows: int) -> None:
    drawn, matrix = states(rows, width, dtype), torch.from_numpy(signs(width))
    found = project_on_gpu(drawn.cuda(), matrix.cuda(), LIMIT).cpu()
    wanted = evened(drawn) @ matrix
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    assert agrees(pack_projected(wanted), found.numpy())


def test_rows_of_a_larger_tensor_are_taken_as_they_lie() -> None:
    wide = states(8, 2048, torch.bfloat16).cuda()
    assert torch.equal(project(wide[::2, :1024]), project(wide[::2, :1024].contiguous()))
    assert project(wide[:0]).shape == (0, 7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_of_what_is_not_finite_nothing_finite_is_made(value: float) -> None:
    drawn = states(3, 1024, torch.bfloat16).cuda()
    drawn[1, 7] = value
    assert project(drawn).isfinite().all(1).tolist() == [True, False, True]


def test_nobody_waits_for_the_device() -> None:
    drawn = states(64, 1024, torch.bfloat16).cuda()
    project(drawn)
    with no_waiting():
        project(drawn)
