"""Counter-based sampling: the hash, the noise made of it, its distribution, and its independence of company."""

import struct

import pytest
import torch

from primerl.node.inference import noise
from primerl.node.inference.noise import gumbel, gumbel_at
from primerl.node.inference.sampler import SampledTokens, draw, weigh

M64, M32 = 2**64 - 1, 2**32 - 1

GOLDEN = [
    [0x103EE100, 0xFEBA55E7, 0x472C139C, 0x48D003E9],
    [0xB8FA4120, 0xFB961F1D, 0x5BD698C5, 0xAFD7F493],
    [0x9556AEA8, 0xDD0CB702, 0xAEAC0B43, 0x0802C23F],
]
GOLDEN_NOISE = [
    [0x402E6252, 0x3EB45492, 0x3F8F90FC, 0x3F8C1C50],
    [0xBED07518, 0x3EA25ECE, 0x3F4FAB32, 0xBF0463FC],
    [0xBF68FEA5, 0xBC442C91, 0xBF08258A, 0x405CB4B8],
]
GOLDEN_TOKENS = [35, 47, 41, 44, 58, 59, 61, 48, 57, 54, 61, 58]
ERROR = 1.2e-5
"""The most that noise.py claims between its noise and the exact one."""


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


def hash_bits(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The hashes [B, vocabulary] int32 that gumbel() makes noise of: they have no public function."""
    low, high = noise._keys(seeds, positions)  # pyright: ignore[reportPrivateUsage]
    tokens = torch.arange(vocabulary, dtype=torch.int32)
    return noise._hash(low[:, None], high[:, None], tokens)  # pyright: ignore[reportPrivateUsage]


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


def test_golden_noise_never_changes_by_a_bit() -> None:
    found = gumbel(column(0, 42, 2**63 - 1), column(0, 7, 1000), 4)
    assert found.view(torch.int32).long().bitwise_and(M32).tolist() == GOLDEN_NOISE


def test_golden_tokens_never_change() -> None:
    logits = torch.linspace(-2, 2, 64).expand(12, 64)
    seeds = torch.arange(12)
    tokens = draw(logits, torch.full((12,), 0.9), seeds, 10 + seeds).tokens
    assert tokens.tolist() == GOLDEN_TOKENS


def exact(bits: torch.Tensor) -> torch.Tensor:
    """-log(-log(v)) in float64 for the v that a hash means, see noise.gumbel()."""
    number = ((bits.long() & 0x7FFFFFFF).double() + 0.5) * 2.0**-32
    return -torch.log(torch.where(bits >= 0, -torch.log1p(-number), -torch.log(number)))


def test_noise_is_within_its_error_of_the_exact_one() -> None:
    seeds = torch.arange(64)
    bits = hash_bits(seeds, seeds, 10_000)
    error = (gumbel(seeds, seeds, 10_000) - exact(bits)).abs()
    assert float(error.max()) < ERROR


EDGES = [0, 1, 2, 2**23, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 2**30, 2**32 - 1]
"""Hashes on both sides of every seam of the formula; the least and the greatest noise among them."""


def as_noise(hashes: list[int]) -> torch.Tensor:
    """The noise of given hashes: the one step without a public function."""
    bits = torch.tensor(hashes, dtype=torch.int64).to(torch.int32)
    return noise._gumbel_of_(bits)  # pyright: ignore[reportPrivateUsage]


def test_the_extreme_hashes_make_finite_noise_that_is_right() -> None:
    found = as_noise(EDGES)
    wanted = exact(torch.tensor(EDGES, dtype=torch.int64).to(torch.int32))
    assert float((found - wanted).abs().max()) < ERROR
    assert float(found.max()) == pytest.approx(22.873857, abs=ERROR)
    assert float(found.min()) == pytest.approx(-3.129995, abs=ERROR)


def single(value: float) -> float:
    """Rounded to fp32: double arithmetic on two singles, rounded once, is fp32 arithmetic."""
    return struct.unpack("f", struct.pack("f", value))[0]


def raw(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]


def mantissa(bits: int) -> float:
    return struct.unpack("f", struct.pack("i", bits & 0x7FFFFF | 0x3F800000))[0]


def polynomial(factors: tuple[float, ...], x: float) -> float:
    value = 0.0
    for factor in factors:
        value = single(single(value * x) + factor)
    return value


def plain_noise(bits: int) -> float:
    """The definition, step by step, each rounded to fp32."""
    value = single(single(float(bits & 0x7FFFFFFF)) + 0.5)
    if bits < 2**31:
        rest, halvings = value * 2.0**-31, 0.0
    else:
        rest = 2.0 - mantissa(raw(value))
        halvings = single((158 - (raw(value) >> 23)) * noise.LN2)
    energy = single(single(polynomial(noise.HALF_LOG, rest) * rest) + halvings)
    line = single(single(float(raw(energy) - 0x3F800000)) * noise.SLOPE)
    return single(polynomial(noise.CURVE, mantissa(raw(energy))) + line)


def test_the_noise_is_its_definition_in_plain_arithmetic_to_the_last_bit() -> None:
    """So vector units, fused operations and reorderings have no part in it."""
    hashes = EDGES + [plain_hash(seed, 3, 5) for seed in range(2000)]
    assert as_noise(hashes).tolist() == [plain_noise(one) for one in hashes]


def test_single_tokens_have_the_noise_of_the_whole_vocabulary() -> None:
    seeds, positions = torch.arange(50) * 7919, torch.arange(50) % 9
    tokens = (torch.arange(50) * 131) % 1000
    whole = gumbel(seeds, positions, 1000)
    assert gumbel_at(seeds, positions, tokens).equal(whole.gather(1, tokens[:, None])[:, 0])


@pytest.mark.parametrize("size", [1, 64, 1000, 7777])
def test_the_size_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(2))
    ones, rows = torch.ones(7), torch.arange(7)
    wanted, whole = draw(logits, ones, rows, rows), gumbel(rows, rows, 300)
    monkeypatch.setitem(noise.CHUNK, "cpu", size)
    assert gumbel(rows, rows, 300).equal(whole)
    found = draw(logits, ones, rows, rows)
    for name in ("tokens", "logprobs", "scores", "logsumexp"):
        assert getattr(found, name).equal(getattr(wanted, name))


@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_frequencies_are_the_softmax_over_20k_draws(vary: str) -> None:
    draws, temperature = 20_000, 0.7
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.1])
    wanted = torch.softmax(logits / temperature, -1)
    counter, fixed = torch.arange(draws), torch.full((draws,), 3)
    seeds, positions = (counter, fixed) if vary == "seeds" else (fixed, counter)
    drawn = draw(logits.expand(draws, 8), torch.full((draws,), temperature), seeds, positions)
    counts = torch.bincount(drawn.tokens, minlength=8).double()
    chi_square = float(((counts - draws * wanted) ** 2 / (draws * wanted)).sum())
    assert chi_square < 24.3  # 99.9 % point at 7 degrees of freedom; the seeds are fixed
    assert torch.allclose(drawn.logprobs, wanted.log()[drawn.tokens], atol=1e-6)


def columns(drawn: SampledTokens) -> list[torch.Tensor]:
    return [drawn.tokens, drawn.logprobs, drawn.scores, drawn.logsumexp]


def test_a_row_draws_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 50, generator=generator)
    temperatures, seeds = torch.rand(9, generator=generator) + 0.5, torch.arange(9) * 977
    positions = torch.arange(9) % 4
    drawn = columns(draw(logits, temperatures, seeds, positions))
    order = torch.randperm(9, generator=generator)
    again = columns(draw(logits[order], temperatures[order], seeds[order], positions[order]))
    alone = columns(draw(logits[4:5], temperatures[4:5], seeds[4:5], positions[4:5]))
    for wanted, found, single_row in zip(drawn, again, alone, strict=True):
        assert found.equal(wanted[order])
        assert single_row.equal(wanted[4:5])


def test_the_sampled_token_has_the_greatest_of_scores_that_anyone_can_compute() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3)) * 4
    temperatures, rows = torch.linspace(0.5, 1.5, 5), torch.arange(5)
    drawn = draw(logits, temperatures, rows, rows + 9)
    scaled = logits * temperatures.reciprocal()[:, None]
    scores = scaled + gumbel(rows, rows + 9, 40)
    assert drawn.tokens.equal(scores.argmax(-1))
    assert drawn.scores.equal(scores.amax(-1))
    assert torch.allclose(drawn.logsumexp, scaled.logsumexp(-1))
    chosen = scaled.gather(1, drawn.tokens[:, None])[:, 0]
    assert torch.allclose(chosen - drawn.logsumexp, drawn.logprobs, atol=1e-5)


def test_logits_that_are_not_numbers_show_in_the_logprobs() -> None:
    logits = torch.zeros(4, 8)
    logits[0, 3], logits[1, 3], logits[2], logits[3, 3] = torch.nan, torch.inf, -torch.inf, -1e9
    ones, rows = torch.ones(4), torch.arange(4)
    assert draw(logits, ones, rows, rows).logprobs.isfinite().tolist() == [False] * 3 + [True]


def test_low_precision_logits_are_sampled_in_fp32() -> None:
    logits = torch.randn(4, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    ones, counter = torch.ones(4), torch.arange(4)
    drawn = draw(logits, ones, counter, counter)
    wanted = torch.log_softmax(logits.float(), -1).gather(1, drawn.tokens[:, None])[:, 0]
    assert drawn.logprobs.dtype == torch.float32
    assert drawn.logprobs.equal(wanted)


def test_at_temperature_0_the_likeliest_token_alone_has_no_margin_whatever_the_seed() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 50, generator=generator) * 3
    likeliest, other = logits.argmax(-1), logits.topk(2).indices[:, 1]
    seeds, places = column(*range(6)), column(*range(6))

    def weighed(tokens: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros(6)
        return weigh(lambda rows: logits[rows], 4, zero, seeds, places, tokens, greedy=True)

    margins, logprobs = weighed(likeliest)
    assert margins.tolist() == [0.0] * 6
    expected = torch.log_softmax(logits, -1)
    torch.testing.assert_close(logprobs, expected.gather(1, likeliest[:, None])[:, 0])
    margins, _ = weighed(other)
    gaps = logits.gather(1, likeliest[:, None]) - logits.gather(1, other[:, None])
    torch.testing.assert_close(margins, gaps[:, 0])
    sampled = weigh(lambda rows: logits[rows], 4, torch.ones(6), seeds, places, likeliest)
    assert (sampled[0] > 0).any()  # with noise it may be another that is drawn
