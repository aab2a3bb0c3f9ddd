"""Drawing from the likeliest tokens only: temperature 0, top_k, top_p."""

import numpy as np
import pytest
import torch

from primerl.node.errors import EngineError
from primerl.node.inference.engine import GenerateRequest, check_request, narrowing
from primerl.node.inference.sampler import (
    MOST_MARGIN,
    Limits,
    Narrowed,
    SampledTokens,
    draw,
    weigh,
)
from primerl.node.inference.vllm_sampling import Recorder, SampledStep
from primerl.node.models.support import pack_support
from primerl.protocol.rollouts import cut_support

torch.set_num_threads(1)
ROWS, VOCABULARY = 400, 12


def column(*values: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def many(
    logits: torch.Tensor, narrowed: Narrowed | None, *, temperature: float = 1.0
) -> SampledTokens:
    """One row of logits drawn from with ROWS seeds."""
    return draw(
        logits.expand(ROWS, -1),
        torch.full((ROWS,), temperature),
        torch.arange(ROWS),
        torch.zeros(ROWS, dtype=torch.int64),
        narrowed,
    )


def everywhere(*, top_k: int = 0, top_p: float = 1.0) -> Narrowed:
    return Narrowed(torch.arange(ROWS), torch.full((ROWS,), top_k), torch.full((ROWS,), top_p))


LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.1, 0.2, 0.15, 0.1]))


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 4}, {1, 2, 3, 4}),  # of the two with 0.1 the lower id
        ({"top_k": 99}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.7}, {1, 3, 4}),
        ({"top_p": 1e-6}, {1}),
        ({"top_k": 2, "top_p": 0.66}, {1}),  # 0.4 of the 0.6 that top_k leaves: two thirds
        ({"top_k": 2, "top_p": 0.67}, {1, 3}),
    ],
)
def test_nothing_but_the_likeliest_tokens_is_drawn_and_all_of_them_are(
    limits: dict[str, float], wanted: set[int]
) -> None:
    narrowed = everywhere(top_k=int(limits.get("top_k", 0)), top_p=limits.get("top_p", 1.0))
    assert set(many(LOGITS, narrowed).tokens.tolist()) == wanted


def test_the_tokens_left_by_the_limits_are_sampled_with_the_noise_of_all() -> None:
    """A token that the whole draw takes and that is allowed is the narrowed draw's, too."""
    free = many(LOGITS, None)
    narrow = many(LOGITS, everywhere(top_k=3))
    allowed = torch.isin(free.tokens, column(1, 3, 4))
    assert 0 < int((~allowed).sum()) < ROWS
    assert torch.equal(narrow.tokens[allowed], free.tokens[allowed])


def test_logprobs_are_of_the_whole_vocabulary_at_the_temperature() -> None:
    drawn = many(LOGITS, everywhere(top_k=2), temperature=0.5)
    whole = torch.log_softmax(LOGITS / 0.5, -1)
    assert torch.allclose(drawn.logprobs, whole[drawn.tokens], atol=1e-6)


def test_rows_that_may_draw_anything_are_those_of_a_draw_without_the_others() -> None:
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    arguments = (logits, torch.ones(6), torch.arange(6), torch.arange(6))
    free = draw(*arguments)
    mixed = draw(
        *arguments, Narrowed(column(1, 4), column(1, 2), column(1, 0.9, dtype=torch.float32))
    )
    for name in ("tokens", "logprobs", "scores", "logsumexp"):
        kept = [0, 2, 3, 5]
        assert torch.equal(getattr(mixed, name)[kept], getattr(free, name)[kept]), name
    assert int(mixed.tokens[1]) == int(logits[1].argmax())


def test_many_rows_are_sampled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from primerl.node.inference import sampler

    whole = many(LOGITS, everywhere(top_k=3))
    monkeypatch.setattr(sampler, "chunk", lambda device: 3 * len(LOGITS))  # pyright: ignore
    parts = many(LOGITS, everywhere(top_k=3))
    assert torch.equal(parts.tokens, whole.tokens)
    assert torch.allclose(parts.logprobs, whole.logprobs)


def margins(
    logits: torch.Tensor, drawn: torch.Tensor, limits: Limits, temperature: float = 0.7
) -> torch.Tensor:
    """Margins of a token per row of logits, whose seed is the row's number."""
    rows = torch.arange(len(logits))
    heat = torch.full((len(logits),), temperature)
    return weigh(lambda part: logits[part], 64, heat, rows, rows, drawn, limits=limits)[0]


def drawn_with(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    rows = torch.arange(len(logits))
    narrowed = Narrowed(rows, torch.full_like(rows, top_k), torch.full((len(logits),), top_p))
    return draw(logits, torch.full((len(logits),), 0.7), rows, rows, narrowed).tokens


LIMITED = [(0, 0.9), (0, 0.3), (3, 1.0), (9, 0.8), (50, 0.95), (0, 0.999), (0, 1e-3)]


@pytest.mark.parametrize(("top_k", "top_p"), LIMITED)
@pytest.mark.parametrize("ties", [False, True])
def test_a_margin_is_at_most_the_noise_of_the_logits(top_k: int, top_p: float, ties: bool) -> None:
    """At the edge of the limits, too: of equally likely tokens noise leaves now one, now another."""
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(ROWS, 40, generator=generator) * torch.linspace(0.1, 4, ROWS)[:, None]
    logits = logits.round() if ties else logits
    limits = Limits(np.full(ROWS, top_k), np.full(ROWS, top_p, np.float32))
    changed = 0
    for noise in (0.0, 0.01, 0.3, 2.0):
        off = (torch.rand(logits.shape, generator=generator) - 0.5) * noise
        drawn = drawn_with(logits + 0.7 * off, top_k, top_p)
        found = margins(logits, drawn, limits)
        assert float(found.max()) <= noise * (1 + 1e-5) + 1e-5 * (noise > 0)
        changed += int((found > 0).sum())
    assert changed


@pytest.mark.parametrize(("top_k", "top_p"), LIMITED[:5])
def test_draws_from_more_tokens_or_from_fewer_have_margins(top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, 400, generator=generator) * 2
    limits = Limits(np.full(ROWS, top_k), np.full(ROWS, top_p, np.float32))
    wide = margins(logits, drawn_with(logits, 0, 1.0), limits)
    fewer = max(1, top_k * 2 // 3) if top_k else 0, 0.75 * top_p
    narrow = margins(logits, drawn_with(logits, *fewer), limits)
    for found in (wide, narrow):  # in honest ones of bfloat16 it is 0.001
        assert float(found.clamp_max(1).mean()) > 0.01
        assert float(found.max()) > 0.3


def test_rows_without_limits_have_the_margins_of_a_free_draw_beside_others() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(ROWS, 40, generator=generator)
    drawn = torch.randint(40, (ROWS,), generator=generator)
    free = Limits(np.zeros(ROWS, np.int64), np.ones(ROWS, np.float32))
    mixed = Limits(np.arange(ROWS) % 2 * 3, np.ones(ROWS, np.float32))
    alone, found = margins(logits, drawn, free), margins(logits, drawn, mixed)
    assert torch.equal(found[::2], alone[::2])
    assert not torch.equal(found[1::2], alone[1::2])
    assert float(found.max()) <= MOST_MARGIN


def test_logits_that_are_not_numbers_are_infinitely_far_off_under_limits_too() -> None:
    logits = torch.randn(4, 40).index_fill(0, torch.tensor([2]), torch.nan)
    limits = Limits(np.full(4, 3), np.full(4, 0.9, np.float32))
    found = margins(logits, torch.zeros(4, dtype=torch.int64), limits)
    assert found.isinf().tolist() == [False, False, True, False]


def test_temperature_0_is_the_likeliest_token_at_temperature_1() -> None:
    assert narrowing(GenerateRequest((1,), 1, 0.0, 1, (), top_k=5, top_p=0.5)) == (1.0, 1, 1.0)
    assert narrowing(GenerateRequest((1,), 1, 0.7, 1, (), top_k=5, top_p=0.5)) == (0.7, 5, 0.5)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    asked = {"temperature": 1.0, "seed": 1, "stop_token_ids": ()} | wrong
    with pytest.raises(EngineError, match=next(iter(wrong))):
        check_request(GenerateRequest((1,), 1, **asked), 10, 10)  # pyright: ignore


def test_vllms_worker_narrows_the_rows_that_ask_for_it() -> None:
    recorder = Recorder(
        torch.device("cpu"),
        width=4,
        dtype=torch.float32,
        fingerprint="",
        requests=1,  # the slots grow
        length=8,
    )
    recorder.admit("free", 3, 1, 11, 1.0)
    recorder.admit("greedy", 3, 2, 11, *narrowing(GenerateRequest((1,), 1, 0.0, 1, ())))
    recorder.admit("few", 3, 3, 11, 0.8, 2, 0.9)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    names = ["few", "free", "greedy"]
    positions = column(3, 3, 3).numpy()
    recorder.begin(SampledStep(names, positions, positions > 0, torch.zeros(3, 4), positions * 0))
    tokens = recorder.draw(logits)
    recorder.end()
    narrowed = Narrowed(column(0, 2), column(2, 1), column(0.9, 1.0, dtype=torch.float32))
    temperatures = column(0.8, 1.0, 1.0, dtype=torch.float32)
    wanted = draw(logits, temperatures, column(11, 11, 11), column(3, 3, 3), narrowed)
    assert torch.equal(tokens, wanted.tokens)
    assert int(tokens[2]) == int(logits[2].argmax())


def test_vllms_worker_records_the_supports_of_the_requests_that_ask_for_them() -> None:
    recorder = Recorder(
        torch.device("cpu"), width=4, dtype=torch.float32, fingerprint="", requests=1, length=8
    )
    recorder.admit("free", 3, 1, 11, 1.0)
    recorder.admit("silent", 3, 2, 12, 0.8, 0, 0.7)
    recorder.admit("few", 3, 3, 13, 0.8, 0, 0.7, supported=True)
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randn(3, VOCABULARY, generator=generator) for _ in range(4)]
    drawn: list[SampledTokens] = []
    names = ["few", "free", "silent"]
    for number, logits in enumerate(steps):
        at = column(3, 3, 3).numpy() + number
        recorder.begin(SampledStep(names, at, at > 0, torch.zeros(3, 4), at * 0))
        recorder.draw(logits)
        recorder.end()
        narrowed = Narrowed(column(0, 2), column(0, 0), column(0.7, 0.7, dtype=torch.float32))
        heat = column(0.8, 1.0, 0.8, dtype=torch.float32)
        drawn.append(draw(logits, heat, column(13, 11, 12), torch.from_numpy(at), narrowed))
    free, silent, few = recorder.collect([[1, 4], [2, 4], [3, 4]], [])
    assert (free[4], silent[4]) == (b"", b"")
    for row, record in enumerate((few, free, silent)):
        over = "support_logprobs" if record is few else "logprobs"
        wanted = [float(getattr(one, over)[row]) for one in drawn]
        assert np.frombuffer(record[1], np.float32).tolist() == wanted
    tokens = [int(one.tokens[0]) for one in drawn]
    left = [one.support[0] for one in drawn if one.support is not None]
    assert few[4] == pack_support(torch.stack(left).numpy(), tokens)
    assert len({len(set(row.tolist())) for row in left}) > 1
    # an answer for fewer tokens, then a slot that is used again
    [short] = recorder.collect([[3, 2]], [1, 2])
    assert short[4] == cut_support(few[4], 4, 2)
    recorder.collect([], [3])
    recorder.admit("few", 3, 4, 13, 0.8, 0, 0.7)
    at = column(3).numpy()
    recorder.begin(SampledStep(["few"], at, at > 0, torch.zeros(1, 4), at * 0))
    recorder.draw(steps[0][:1])
    recorder.end()
    assert recorder.collect([[4, 1]], [])[0][4] == b""


def test_supports_of_drafts_that_were_wrong_are_not_recorded() -> None:
    recorder = Recorder(
        torch.device("cpu"),
        width=4,
        dtype=torch.float32,
        fingerprint="",
        requests=1,
        length=8,
        drafts=2,
    )
    recorder.admit("few", 3, 1, 13, 0.8, 0, 0.7, supported=True)
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(2))
    narrowed = Narrowed(torch.arange(3), torch.zeros(3).long(), torch.full((3,), 0.7))
    kept: list[torch.Tensor] = []
    tokens: list[int] = []
    for first, accepted in ((0, 2), (2, 3)):
        part = logits[first : first + 3]
        at = np.arange(3 + first, 6 + first)
        seeds = torch.full((3,), 13)
        wanted = draw(part, torch.full((3,), 0.8), seeds, torch.from_numpy(at), narrowed)
        drafts = wanted.tokens[:2].clone()
        if accepted == 2:
            drafts[1] = (drafts[1] + 1) % VOCABULARY
        none = torch.zeros(3, 4)
        recorder.begin(SampledStep(["few"] * 3, at, at > 0, none, np.arange(3)))
        told = recorder.verify(part, torch.arange(2), drafts)
        recorder.end()
        assert (told >= 0).sum() == accepted
        assert wanted.support is not None
        kept.append(wanted.support[:accepted])
        tokens += wanted.tokens[:accepted].tolist()
    [record] = recorder.collect([[1, 5]], [])
    assert record[4] == pack_support(torch.cat(kept).numpy(), tokens)


def test_a_batch_without_limits_is_not_narrowed() -> None:
    recorder = Recorder(
        torch.device("cpu"), width=4, dtype=torch.float32, fingerprint="", requests=2, length=8
    )
    recorder.admit("a", 3, 1, 11, 1.0)
    at = column(3).numpy()
    recorder.begin(SampledStep(["a"], at, at > 0, torch.zeros(1, 4), at * 0))
    assert recorder._batch is not None  # pyright: ignore[reportPrivateUsage]
    assert recorder._batch.narrowed is None  # pyright: ignore[reportPrivateUsage]
