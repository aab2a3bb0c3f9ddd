# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""Noise and draws on a GPU: the same bits as on a CPU, by torch and by the kernel, and no waiting."""

import pytest
import torch
from support.gpu_cases import no_waiting

from primerl.node.inference.kernels import BLOCK, WARPS, _gumbel, tl, triton
from primerl.node.inference.noise import gumbel
from primerl.node.inference.sampler import SampledTokens, draw, draw_eager

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

VOCABULARY = 151_936
SHAPES = [(1, 5), (7, 4095), (5, 4097), (64, VOCABULARY)]


def arguments(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperatures, seeds and positions that differ."""
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(0, 2**62, (rows,), generator=generator)
    temperatures = torch.rand(rows, generator=generator) + 0.3
    return temperatures, seeds, torch.randint(0, 40_000, (rows,), generator=generator)


Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def on_gpu(columns: Columns) -> Columns:
    temperatures, seeds, positions = columns
    return temperatures.cuda(), seeds.cuda(), positions.cuda()


def random_logits(rows: int, vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    return (torch.randn(rows, vocabulary, generator=generator) * 3).to(dtype)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().view(torch.int32)


@triton.jit
def _dump(noise, vocabulary, seeds, positions, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    value = _gumbel(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(noise + row * vocabulary + tokens, value, mask=tokens < vocabulary)


def gumbel_of_kernel(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The noise of all tokens as the kernels compute it, which store only the draws."""
    values = torch.empty(len(seeds), vocabulary, device=seeds.device)
    _dump[(len(seeds), triton.cdiv(vocabulary, BLOCK))](
        *(values, vocabulary, seeds, positions),
        BLOCK=BLOCK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    return values


@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_noise_has_the_same_bits_on_every_device(rows: int, vocabulary: int) -> None:
    _, seeds, positions = arguments(rows)
    wanted = bits(gumbel(seeds, positions, vocabulary))
    there = (seeds.cuda(), positions.cuda(), vocabulary)
    assert bits(gumbel(*there)).equal(wanted)
    assert bits(gumbel_of_kernel(*there)).equal(wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), SHAPES)
def test_draws_are_the_same_on_every_device(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits = random_logits(rows, vocabulary, dtype)
    there, columns = logits.cuda(), on_gpu(arguments(rows))
    wanted = draw(logits, *arguments(rows))
    for found in (draw(there, *columns), draw_eager(there, *columns)):
        assert_same(found, wanted)


def assert_same(found: SampledTokens, wanted: SampledTokens) -> None:
    assert found.tokens.dtype == torch.int64
    assert found.tokens.cpu().equal(wanted.tokens)
    assert bits(found.scores).equal(bits(wanted.scores))
    assert torch.allclose(found.logprobs.cpu(), wanted.logprobs, atol=2e-5)
    assert torch.allclose(found.logsumexp.cpu(), wanted.logsumexp, atol=2e-5)


def test_rows_of_a_wider_tensor_and_masked_tokens_are_sampled_alike() -> None:
    """vLLM pads the vocabulary, and a mask may leave a block without any token."""
    wide = random_logits(6, 12_000, torch.float32)
    wide[1, 50:11_000] = -torch.inf
    wide[2, :9_000] = -torch.inf
    wide[2] -= 300.0
    there = on_gpu(arguments(6))
    assert_same(draw(wide.cuda()[:, :10_001], *there), draw(wide[:, :10_001], *arguments(6)))
    turned = wide.t().contiguous().t()
    assert_same(draw(turned.cuda(), *there), draw(wide, *arguments(6)))


def test_logits_that_are_not_numbers_show_and_lead_nowhere() -> None:
    logits = torch.zeros(5, 9_000, device="cuda")
    logits[0, 3], logits[1, 8_999], logits[2], logits[3] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    drawn = draw(logits, *on_gpu(arguments(5)))
    assert drawn.logprobs.isfinite().tolist() == [False] * 4 + [True]
    assert 0 <= int(drawn.tokens.min()) <= int(drawn.tokens.max()) < 9_000


def test_a_draw_never_waits_for_the_device() -> None:
    logits, columns = random_logits(8, 4_000, torch.bfloat16).cuda(), on_gpu(arguments(8))
    draw(logits, *columns)  # compiles
    with no_waiting():
        draw(logits, *columns)
        draw_eager(logits, *columns)
