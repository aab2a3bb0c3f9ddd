"""Counter-based sampling: the hash, its distribution, and its independence of company."""

import pytest
import torch

from primerl.node.engines.sampling import gumbel, hash_bits, sample, uniform

M64, M32 = 2**64 - 1, 2**32 - 1

GOLDEN = [
    [0x103EE100, 0xFEBA55E7, 0x472C139C, 0x48D003E9],
    [0xB8FA4120, 0xFB961F1D, 0x5BD698C5, 0xAFD7F493],
    [0x9556AEA8, 0xDD0CB702, 0xAEAC0B43, 0x0802C23F],
]
GOLDEN_TOKENS = [56, 63, 28, 52, 61, 39, 59, 59, 60, 60, 45, 19]


def mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & M64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & M64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & M64
    return value ^ value >> 31


def mix32(value: int) -> int:
    value = ((value ^ value >> 16) * 0x85EBCA6B) & M32
    value = ((value ^ value >> 13) * 0xC2B2AE35) & M32
    return value ^ value >> 16


def plain_hash(seed: int, position: int, token: int) -> int:
    """The definition in unbounded integers."""
    key = mix64((mix64(seed) + position) & M64)
    return mix32(mix32((token * 0x9E3779B9 + key) & M32) ^ key >> 32)


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_splitmix64_is_the_published_one() -> None:
    assert mix64(0) == 0xE220A8397B1DCDAF


def test_the_hash_is_its_definition_in_plain_integers() -> None:
    seeds, positions = (0, 1, 123456789, 2**63 - 1), (0, 1, 17, 4095)
    found = hash_bits(column(*seeds), column(*positions), 300)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        wanted = [plain_hash(seed, position, token) for token in range(300)]
        assert [value & M32 for value in found[row].tolist()] == wanted


def test_golden_hashes_never_change() -> None:
    found = hash_bits(column(0, 42, 2**63 - 1), column(0, 7, 1000), 4)
    assert found.long().bitwise_and(M32).tolist() == GOLDEN


def test_golden_tokens_never_change() -> None:
    logits = torch.linspace(-2, 2, 64).expand(12, 64)
    seeds = torch.arange(12)
    tokens, _ = sample(logits, torch.full((12,), 0.9), seeds, 10 + seeds)
    assert tokens.tolist() == GOLDEN_TOKENS


def test_uniform_values_stay_strictly_between_0_and_1_and_noise_is_finite() -> None:
    seeds = torch.arange(64)
    values = uniform(seeds, seeds, 10_000)
    assert 0 < float(values.min()) < 1e-4
    assert 1 - 1e-4 < float(values.max()) < 1
    assert bool(gumbel(seeds, seeds, 10_000).isfinite().all())


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = gumbel(torch.arange(100), torch.arange(100), 10_000).double()
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.005)  # Euler's constant
    assert float(noise.var()) == pytest.approx(1.6449341, abs=0.015)  # pi^2 / 6


@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_frequencies_are_the_softmax_over_20k_draws(vary: str) -> None:
    draws, temperature = 20_000, 0.7
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.1])
    wanted = torch.softmax(logits / temperature, -1)
    counter, fixed = torch.arange(draws), torch.full((draws,), 3)
    seeds, positions = (counter, fixed) if vary == "seeds" else (fixed, counter)
    tokens, logprobs = sample(
        logits.expand(draws, 8), torch.full((draws,), temperature), seeds, positions
    )
    counts = torch.bincount(tokens, minlength=8).double()
    chi_square = float(((counts - draws * wanted) ** 2 / (draws * wanted)).sum())
    assert chi_square < 24.3  # 99.9 % point at 7 degrees of freedom; the seeds are fixed
    assert torch.allclose(logprobs, wanted.log()[tokens], atol=1e-6)


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated() -> None:
    values = torch.stack(
        [uniform(torch.full((64,), seed), torch.arange(64), 256) for seed in range(64)]
    )
    values = (values - 0.5) * 12**0.5
    for axis in range(3):
        size = values.shape[axis] - 1
        shifted = values.narrow(axis, 1, size) * values.narrow(axis, 0, size)
        assert abs(float(shifted.mean())) < 0.005  # 5 standard errors of a million products


def test_a_row_draws_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 50, generator=generator)
    temperatures, seeds = torch.rand(9, generator=generator) + 0.5, torch.arange(9) * 977
    positions = torch.arange(9) % 4
    tokens, logprobs = sample(logits, temperatures, seeds, positions)
    order = torch.randperm(9, generator=generator)
    again = sample(logits[order], temperatures[order], seeds[order], positions[order])
    assert again[0].equal(tokens[order])
    assert again[1].equal(logprobs[order])
    alone = sample(logits[4:5], temperatures[4:5], seeds[4:5], positions[4:5])
    assert alone[0].equal(tokens[4:5])


def test_low_precision_logits_are_sampled_in_fp32() -> None:
    logits = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    ones, counter = torch.ones(4), torch.arange(4)
    tokens, logprobs = sample(logits, ones, counter, counter)
    assert logprobs.dtype == torch.float32
    assert logprobs.equal(torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])[:, 0])
