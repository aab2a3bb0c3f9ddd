import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support import loss_cases
from support.loss_cases import CASES, UNMASKED, Case, exchange
from torch import Tensor

from primerl.node.config.training import LossConfig
from primerl.node.errors import UsageError
from primerl.node.training.losses import (
    FIGURES,
    PEAKS,
    LossSums,
    TokenInputs,
    bound_by_second_moment,
    cross_entropy,
    formula,
    policy_loss,
    sft,
)

torch.set_num_threads(1)

DPPO = LossConfig(type="dppo_kl", kl_tau=0.01, adv_tau=2.0)
CLIPPED = LossConfig(type="grpo_two_sided", clip_low=0.2, clip_high=0.28, clip_ratio_max=4.0)
ENDPOINT = {"url": "http://127.0.0.1:8000/v1", "model": "teacher"}
NOT_CE = [case for case in CASES if case.name != "ce"]


def inputs(rows: list[tuple[float, float, float]]) -> TokenInputs:
    """Rows of (pi, mu, advantage), probabilities."""
    columns = torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)
    logprobs = columns[:, 0].log().requires_grad_()
    count = len(columns)
    return TokenInputs(
        logprobs,
        columns[:, 1].log(),
        columns[:, 2],
        torch.zeros(count),
        torch.arange(count),
        torch.full((count,), math.log(0.5)),
    )


def gradient(
    config: LossConfig, rows: list[tuple[float, float, float]], tokens: int
) -> list[float]:
    given = inputs(rows)
    loss, _ = policy_loss(config, given, tokens)
    (found,) = torch.autograd.grad(loss, given.logprobs)
    return found.tolist()


@pytest.mark.parametrize(
    ("move", "kept"), [(0.15, True), (0.25, False), (-0.05, True), (-0.15, False)]
)
def test_dppo_has_a_threshold_for_each_side(move: float, kept: bool) -> None:
    config = LossConfig(dppo_mask_low=0.1, dppo_mask_high=0.2, kl_tau=0.0)
    pi, advantage = 0.5 + move, math.copysign(1.0, move)
    expected = -advantage * pi / 0.5 if kept else 0.0
    assert gradient(config, [(pi, 0.5, advantage)], 1) == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),  # DAPO's upper clip
        (0.5, 1.0, -0.5, -0.5),
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.5),  # one-sided clipping leaves this branch open
        (9.0, -1.0, 4.0, 0.0),  # the second side closes it
        (1.0, 0.0, 0.0, 0.0),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_two_sided_clip_is_its_formula(
    ratio: float, advantage: float, loss: float, slope: float
) -> None:
    row = (0.1 * ratio, 0.1, advantage)
    found, sums = policy_loss(CLIPPED, inputs([row]), 1)
    assert found.item() == pytest.approx(loss, rel=1e-5)
    assert gradient(CLIPPED, [row], 1) == pytest.approx([slope], rel=1e-5)
    flat = advantage != 0.0 and slope == 0.0
    assert sums.metrics()["is_masked/mean"] == float(flat)


@pytest.mark.parametrize("seed", [90, 1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_loss_and_its_gradient_are_the_closed_form(case: Case, seed: int) -> None:
    given = loss_cases.tokens(seed)
    values, slopes = case.expected(given)
    tokens = given.inputs()
    loss, sums = policy_loss(case.config, tokens, 20)
    (found,) = torch.autograd.grad(loss, tokens.logprobs)
    assert loss.item() == pytest.approx(values.sum() / 20, rel=1e-12)
    assert found.numpy() == pytest.approx(slopes / 20, rel=1e-9, abs=1e-15)
    assert sums.metrics()["loss/mean"] == pytest.approx(values.mean(), rel=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cases_try_both_sides_of_every_trust_region(case: Case) -> None:
    given = loss_cases.tokens()
    metrics = policy_loss(case.config, given.inputs(), len(given))[1].metrics()
    assert (metrics["is_masked_low/mean"] > 0) is (case.name not in UNMASKED)
    assert (metrics["is_masked_high/mean"] > 0) is (case.name not in (*UNMASKED, "reverse_kl"))
    assert metrics["is_masked/mean"] < 0.9


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_with_unequal_token_counts_add_up_to_one(case: Case, ranks: int) -> None:
    whole = loss_cases.tokens()
    weights = torch.linspace(
        -0.5, 0.5, 4, dtype=torch.float64
    )  # shared by all tokens, as a model is
    features = torch.from_numpy(np.random.default_rng(1).normal(size=(len(whole), 4)))

    def of(rank: int, ranks: int) -> tuple[float, Tensor, LossSums]:
        own = np.isin(whole.sequence, loss_cases.share(rank, ranks))
        leaf = weights.clone().requires_grad_()
        tokens = whole.of(loss_cases.share(rank, ranks))
        lifted = features[torch.from_numpy(own)] @ leaf * 0.01
        logprobs = torch.from_numpy(np.log(tokens.pi)) + lifted
        loss, sums = policy_loss(case.config, tokens.inputs(logprobs), len(whole))
        loss.backward()
        assert leaf.grad is not None
        return loss.item(), leaf.grad, sums

    loss, gradient, sums = of(0, 1)
    parts = [of(rank, ranks) for rank in range(ranks)]
    assert len({part[2].tokens for part in parts}) == ranks
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12)
    added = torch.stack([part[1] for part in parts]).sum(0)
    assert added.numpy() == pytest.approx(gradient.numpy(), rel=1e-9, abs=1e-15)
    for reduced in exchange([part[2] for part in parts]):
        assert reduced.metrics() == pytest.approx(sums.metrics(), rel=1e-12)


@pytest.mark.parametrize("case", NOT_CE, ids=lambda case: case.name)
@pytest.mark.parametrize("lie", [-1000.0, -math.inf, math.inf])
def test_an_absurd_ratio_gives_finite_numbers_and_moves_nothing(case: Case, lie: float) -> None:
    for advantage in (1.0, -1.0):
        logprobs = torch.tensor([-0.1], requires_grad=True)
        one = torch.zeros(1)
        given = TokenInputs(
            logprobs, torch.tensor([lie]), one + advantage, one, one.long(), one - 0.1
        )
        loss, sums = policy_loss(case.config, given, 1)
        (slope,) = torch.autograd.grad(loss, logprobs)
        assert slope.item() == 0.0
        assert all(math.isfinite(value) for value in sums.metrics().values())


SEQUENCE_TIS = LossConfig(type="reinforce", kl_tau=0.0, importance="sequence", importance_max=2.0)


def slopes_of_sequence(log_ratio: Sequence[float]) -> list[float]:
    """By log pi of each token of one sequence whose advantage is 1, undivided."""
    logprobs = torch.full((len(log_ratio),), -0.7, requires_grad=True)
    one = torch.ones(len(log_ratio))
    given = TokenInputs(logprobs, -0.7 - torch.tensor(log_ratio), one, one, 0 * one.long())
    loss, _ = policy_loss(SEQUENCE_TIS, given, len(log_ratio))
    (slopes,) = torch.autograd.grad(loss, logprobs)
    return (slopes * len(log_ratio)).tolist()


@pytest.mark.parametrize(("drift", "weight"), [(0.009, 2.0), (0.011, 2.0), (-0.011, 0.0)])
def test_a_long_sequence_is_weighed_by_its_bounds_however_far_it_drifted(
    drift: float, weight: float
) -> None:
    """2000 honest tokens: their ratios' product goes beyond what is a lie for one token."""
    assert slopes_of_sequence([drift] * 2000) == pytest.approx([-weight] * 2000, abs=1e-6)


@pytest.mark.parametrize("lie", [-1000.0, 1000.0, math.inf])
def test_a_lie_about_one_token_of_a_sequence_does_not_move_it(lie: float) -> None:
    """Also where others take the sum back inside the guard; their own weight is bounded."""
    slopes = slopes_of_sequence([lie, math.copysign(0.5, -lie), 0.0])
    assert slopes[0] == 0.0
    assert all(-2.0 <= slope <= 0.0 for slope in slopes)


@pytest.mark.parametrize("lie", [-1000.0, -math.inf])
def test_a_reference_that_rules_a_token_out_lowers_it_by_a_bounded_step(lie: float) -> None:
    config = LossConfig(type="reverse_kl", kl_tau=0.0)
    given = replace(inputs([(0.5, 0.5, 0.0)]), reference=torch.tensor([lie]))
    loss, sums = policy_loss(config, given, 1)
    (slope,) = torch.autograd.grad(loss, given.logprobs)
    assert slope.item() == pytest.approx(20.0)
    assert all(math.isfinite(value) for value in sums.metrics().values())


@pytest.mark.parametrize("case", NOT_CE, ids=lambda case: case.name)
def test_what_is_no_number_is_never_made_one(case: Case) -> None:
    """A step of it is skipped: that is for the learner to see, so the loss must not hide it."""
    given = loss_cases.tokens()
    given.mu[4] = math.nan
    loss, sums = policy_loss(case.config, given.inputs(), len(given))
    assert math.isnan(loss.item())
    assert math.isnan(sums.read().sums["loss/mean"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_rank_without_tokens_adds_nothing_and_can_go_backward(case: Case) -> None:
    weight = torch.ones(3, requires_grad=True)
    tokens = loss_cases.tokens().of([])
    loss, sums = policy_loss(case.config, tokens.inputs(weight[:0].double() * 2), 5)
    assert loss.item() == 0.0
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0, 0.0, 0.0]
    assert (sums.tokens, sums.metrics()) == (0, {})


@pytest.mark.parametrize("kind", ["reverse_kl", "ce"])
def test_a_distilled_token_is_not_weighted_by_its_advantage(kind: str) -> None:
    config = LossConfig.model_validate({"type": kind})
    assert not config.reads_advantages
    rows = [(0.3, 0.25, 1.0)]
    assert gradient(config, rows, 1) == gradient(config, [(0.3, 0.25, -9.0)], 1)


@pytest.mark.parametrize("config", [LossConfig(type="reverse_kl"), LossConfig(ref_kl_tau=0.1)])
def test_a_reference_that_is_not_there_is_an_error_on_every_rank(config: LossConfig) -> None:
    assert config.needs_reference
    whole = loss_cases.tokens()
    for tokens in (whole, whole.of([])):
        with pytest.raises(ValueError, match=r"give TokenInputs\.reference"):
            policy_loss(config, tokens.inputs(reference=False), 20)


def test_reverse_kl_in_expectation_is_the_kls_gradient() -> None:
    """Summed over a whole vocabulary with mu = pi it is what autograd says of the KL itself."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    config = LossConfig(type="reverse_kl", kl_tau=0.0)
    found = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        row = logprobs[token : token + 1]
        given = TokenInputs(
            row,
            row.detach(),
            torch.zeros(1),
            torch.zeros(1),
            torch.zeros(1).long(),
            reference[token : token + 1],
        )
        loss, _ = policy_loss(config, given, 1)
        (slope,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += row.detach().exp() * slope
    assert found.numpy() == pytest.approx(expected.numpy(), rel=1e-9)


def test_gspo_does_not_mind_gaps_or_the_order_of_tokens() -> None:
    config = CASES[3].config
    given = loss_cases.tokens()
    plain = given.inputs()
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(2))
    columns = {
        name: getattr(plain, name).detach()[order]
        for name in ("logprobs", "behaviour", "advantages", "entropy")
    }
    mixed = TokenInputs(**columns, sequences=plain.sequences[order] * 3 + 1)
    expected = policy_loss(config, plain, 15)[0].item()
    assert policy_loss(config, mixed, 15)[0].item() == pytest.approx(expected, rel=1e-12)


def test_cross_entropy_reads_and_reports_nothing_of_a_sampler() -> None:
    given = loss_cases.tokens()
    given.mu[:] = math.nan
    given.advantage[:] = math.nan
    tokens = given.inputs(reference=False)
    loss, sums = cross_entropy(tokens, 30)
    (slope,) = torch.autograd.grad(loss, tokens.logprobs)
    assert loss.item() == pytest.approx(-np.log(given.pi).sum() / 30, rel=1e-12)
    assert slope.tolist() == [-1 / 30] * 15
    names = {"loss/mean", "entropy/all/mean", "entropy/all/max", "tokens"}
    assert set(sums.metrics()) == names
    (alone,) = exchange([sums])
    assert set(alone.metrics()) == names
    empty, _ = cross_entropy(given.of([]).inputs(), 30)
    assert empty.requires_grad
    assert empty.item() == 0.0


def test_columns_of_different_lengths_are_refused() -> None:
    given = inputs([(0.5, 0.5, 1.0)] * 3)
    for name in ("behaviour", "advantages", "entropy", "sequences", "reference"):
        short = replace(given, **{name: getattr(given, name)[:2]})
        with pytest.raises(ValueError, match="one length"):
            policy_loss(DPPO, short, 3)
    with pytest.raises(ValueError, match="flat"):
        policy_loss(DPPO, replace(given, logprobs=given.logprobs[None]), 3)


def test_a_token_count_of_one_rank_only_is_refused() -> None:
    with pytest.raises(ValueError, match="whole step"):
        policy_loss(DPPO, inputs([(0.5, 0.5, 1.0)] * 3), 2)


def measured(sequences: list[int], *, reference: bool = False) -> LossSums:
    tokens = loss_cases.tokens().of(sequences).inputs(reference=reference)
    return policy_loss(loss_cases.DPPO, tokens, 15)[1]


def test_micro_batches_add_up_to_one() -> None:
    sums = LossSums()
    for part in ([0, 1], [2], [], [3, 4]):
        sums.add(measured(part, reference=True))
    whole = measured([0, 1, 2, 3, 4], reference=True)
    assert sums.tokens == 15
    assert sums.metrics() == pytest.approx(whole.metrics(), rel=1e-12)


def test_every_rank_sends_as_many_numbers_whatever_it_saw() -> None:
    sizes: set[tuple[int, ...]] = set()
    for sums in (LossSums(), measured([]), measured([2]), measured([0, 1], reference=True)):
        sent: list[int] = []

        def note(values: list[float], sent: list[int] = sent) -> list[float]:
            sent.append(len(values))
            return values

        sums.reduce(note, note)
        sizes.add(tuple(sent))
    assert sizes == {(2 * len(FIGURES), len(PEAKS))}


def test_ranks_agree_when_one_is_empty_and_one_has_nothing_masked() -> None:
    ranks = [LossSums(), measured([0, 4], reference=True), measured([1, 2, 3], reference=True)]
    expected = measured([0, 1, 2, 3, 4], reference=True).metrics()
    assert {"masked_mismatch_kl/mean", "ref_kl/all/mean"} <= set(expected)
    for reduced in exchange(ranks):
        assert reduced.metrics() == pytest.approx(expected, rel=1e-12)
        assert reduced.tokens == 15


def test_all_ranks_empty_is_an_empty_step() -> None:
    assert [one.metrics() for one in exchange([LossSums(), LossSums()])] == [{}, {}]


def test_each_figure_is_what_its_name_says() -> None:
    given = loss_cases.tokens()
    ratio = given.pi / given.mu
    k3 = ratio - [math.log(one) for one in ratio] - 1
    moved = given.pi - given.mu
    high = (given.advantage > 0) & (moved > 0.2)
    low = (given.advantage <= 0) & (moved < -0.1)
    toward = given.reference / given.pi
    metrics = measured([0, 1, 2, 3, 4], reference=True).metrics()
    entropy = -sum(math.log(one) for one in given.pi) / 15  # what the cases give for it
    assert metrics == pytest.approx(
        {
            "loss/mean": loss_cases.dppo(given)[0].mean(),
            "entropy/all/mean": entropy,
            "entropy/all/max": -math.log(given.pi.min()),
            "mismatch_kl/all/mean": k3.mean(),
            "mismatch_kl/all/max": k3.max(),
            "kl_ent_ratio/mean": k3.mean() / entropy,
            "importance_ratio/mean": ratio.mean(),
            "importance_ratio/max": ratio.max(),
            "is_masked/mean": (high | low).mean(),
            "is_masked_low/mean": low.mean(),
            "is_masked_high/mean": high.mean(),
            "masked_mismatch_kl/mean": k3[high | low].mean(),
            "unmasked_mismatch_kl/mean": k3[~(high | low)].mean(),
            "ref_kl/all/mean": (toward - [math.log(one) for one in toward] - 1).mean(),
            "tokens": 15.0,
        },
        rel=1e-9,
    )


def test_what_no_token_has_is_not_reported_as_zero() -> None:
    tokens = replace(loss_cases.tokens().inputs(reference=False), entropy=torch.zeros(15))
    metrics = policy_loss(LossConfig(dppo_mask_low=2.0, dppo_mask_high=2.0), tokens, 15)[
        1
    ].metrics()
    absent = {"masked_mismatch_kl/mean", "ref_kl/all/mean", "kl_ent_ratio/mean"}
    assert absent & set(metrics) == set()
    assert metrics["is_masked/mean"] == 0.0


M2PO = LossConfig(rejection="second_moment")


def second_moments(*ranks: list[int]) -> list[LossConfig]:
    """The bounds that each rank finds, each in a thread that meets the others at every exchange."""
    meeting = Barrier(len(ranks))
    sent: dict[int, list[float]] = {}

    def find(rank: int) -> LossConfig:
        def exchange(
            fold: Callable[[Sequence[float]], float],
        ) -> Callable[[list[float]], list[float]]:
            def exchanged(values: list[float]) -> list[float]:
                meeting.wait(30)
                sent[rank] = values
                meeting.wait(30)
                return [fold(column) for column in zip(*sent.values(), strict=True)]

            return exchanged

        squares = loss_cases.tokens().of(ranks[rank]).inputs().log_ratio.square()
        return bound_by_second_moment(M2PO, squares, exchange(math.fsum), exchange(max))

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(find, range(len(ranks))))


def test_m2po_leaves_out_the_farthest_tokens_until_the_mean_of_the_rest_is_small() -> None:
    given = loss_cases.tokens()
    squares = np.sort(np.log(given.pi / given.mu) ** 2)
    small = np.cumsum(squares) / np.arange(1, 16) <= 0.04
    assert 3 < small.sum() < 12
    (config,) = second_moments([0, 1, 2, 3, 4])
    assert config.rejection == "token"
    ratio = given.pi / given.mu
    out = np.log(ratio) ** 2 >= squares[small.sum()]
    metrics = policy_loss(config, given.inputs(), 15)[1].metrics()
    unbounded = policy_loss(LossConfig(), given.inputs(), 15)[1].metrics()
    assert metrics["is_masked/mean"] >= out.mean() > unbounded["is_masked/mean"]
    slopes = torch.autograd.grad(
        policy_loss(config, tokens := given.inputs(), 15)[0], tokens.logprobs
    )
    assert not slopes[0].numpy()[out].any()
    assert slopes[0].numpy()[~out].any()


def test_m2po_finds_the_same_bounds_on_all_ranks_as_on_one() -> None:
    (alone,) = second_moments([0, 1, 2, 3, 4])
    for config in second_moments([0, 1, 4], [2], [3], []):
        assert config == alone


def test_m2po_leaves_out_nothing_of_a_batch_that_is_near_its_sampler() -> None:
    near = torch.full((7,), 0.03)
    config = bound_by_second_moment(M2PO, near, list, list)
    assert config.rejection_high > math.exp(0.03**0.5)
    far = torch.full((7,), 0.05)
    assert bound_by_second_moment(M2PO, far, list, list).rejection_high < math.exp(0.05**0.5)


def test_m2po_is_refused_without_the_bounds_of_a_step() -> None:
    with pytest.raises(ValueError, match="bound_by_second_moment"):
        policy_loss(M2PO, loss_cases.tokens().inputs(), 15)


SOURCE = """
from primerl.node.training.losses import TokenInputs, TokenLoss

IMPORTED = []
NOT_A_FUNCTION = 3


def reinforce(inputs: TokenInputs, scale: float = 1.0) -> TokenLoss:
    IMPORTED.append(len(inputs.logprobs))
    return TokenLoss.unmasked(-scale * inputs.advantages * inputs.logprobs)


def tensor_only(inputs):
    return -inputs.logprobs


def total(inputs):
    return TokenLoss.unmasked(-inputs.logprobs.sum())


def short(inputs):
    return TokenLoss.unmasked(-inputs.logprobs[1:])


def detached(inputs):
    return TokenLoss.unmasked(-inputs.logprobs.detach())


def infinite(inputs):
    return TokenLoss.unmasked(-inputs.logprobs * 1e308 * 1e10)


def half_masked(inputs):
    return TokenLoss(-inputs.logprobs, inputs.logprobs < -1, inputs.logprobs * 0)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of the operator's own, on the path."""
    folder = tmp_path / "own_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "losses.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def loss(:\n")
    (folder / "needy.py").write_text("import no_such_library_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_package.losses"
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_package"]:
        del sys.modules[name]


def custom(path: str, **arguments: object) -> LossConfig:
    return LossConfig(type="custom", custom=path, custom_args=arguments)


def test_a_loss_of_ones_own_is_divided_and_measured_like_any(package: str) -> None:
    given = loss_cases.tokens()
    tokens = given.inputs()
    loss, sums = policy_loss(custom(f"{package}:reinforce", scale=2.0), tokens, 30)
    (slope,) = torch.autograd.grad(loss, tokens.logprobs)
    assert slope.numpy() == pytest.approx(-2.0 * given.advantage / 30)
    assert sums.metrics()["loss/mean"] == pytest.approx(loss.item() * 2)
    assert sums.metrics()["is_masked/mean"] == 0.0


def test_a_loss_of_ones_own_takes_the_reference_term(package: str) -> None:
    given = loss_cases.tokens()
    plain = custom(f"{package}:reinforce")
    both = plain.model_copy(update={"ref_kl_tau": 0.5})
    term = policy_loss(both, given.inputs(), 15)[0] - policy_loss(plain, given.inputs(), 15)[0]
    kl = LossConfig(type="reverse_kl", kl_tau=0.0)
    expected = policy_loss(kl, given.inputs(), 15)[0].item()
    assert term.item() == pytest.approx(0.5 * expected, rel=1e-9)


def test_its_module_is_run_once_and_it_is_not_called_without_tokens(package: str) -> None:
    config = custom(f"{package}:reinforce")
    for _ in range(2):
        policy_loss(config, loss_cases.tokens().inputs(), 15)
    loss, _ = policy_loss(config, loss_cases.tokens().of([]).inputs(), 15)
    loss.backward()
    assert sys.modules[package].IMPORTED == [15, 15]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_package:loss", "does not import.*no_such_package.*PYTHONPATH"),
        ("own_package.nowhere:loss", "does not import"),
        ("own_package.broken:loss", "does not import"),
        ("own_package.needy:loss", "no_such_library_at_all"),
        ("own_package.losses:misspelt", "no 'misspelt'"),
        ("own_package.losses:NOT_A_FUNCTION", "not a function"),
    ],
)
@pytest.mark.usefixtures("package")
def test_a_path_that_leads_nowhere_says_so_before_the_first_step(path: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        formula(custom(path))


def test_arguments_that_it_does_not_take_are_refused_before_the_first_step(package: str) -> None:
    with pytest.raises(UsageError, match=r"custom_args.*'scael'"):
        formula(custom(f"{package}:reinforce", scael=1.0))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tensor_only", "returned Tensor: return a TokenLoss"),
        ("total", "returned values of Tensor: one number per token"),
        ("short", r"returned values of \[14\]"),
        ("detached", "without gradient"),
        ("infinite", "15 values that are not finite"),
        ("half_masked", "not torch.bool"),
    ],
)
def test_what_is_no_loss_per_token_is_refused(package: str, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{says}"):
        policy_loss(custom(f"{package}:{name}"), loss_cases.tokens().inputs(), 15)


def test_it_is_not_blamed_for_what_it_was_given(package: str) -> None:
    given = loss_cases.tokens()
    given.advantage[2] = float("nan")
    loss, _ = policy_loss(custom(f"{package}:reinforce"), given.inputs(), 15)
    assert not torch.isfinite(loss)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": "custom"}, "needs custom"),
        ({"type": "custom", "custom": "own_package.losses"}, "package.module:function"),
        ({"type": "custom", "custom": "/tmp/x.py:loss"}, "package.module:function"),
        ({"type": "custom", "custom": "a:b.c"}, "package.module:function"),
        ({"type": "custom", "custom": "..a:b"}, "package.module:function"),
        ({"custom": "a:b"}, "custom_args need type"),
        ({"custom_args": {"scale": 2}}, "custom_args need type"),
        ({"type": "reverse_kl", "ref_kl_tau": 0.1}, "leave ref_kl_tau out"),
        ({"reference": "teacher"}, "reference needs type"),
        ({"hint": "{demonstration}"}, "teacher and hint need type"),
        ({"endpoint": ENDPOINT}, "endpoint needs type"),
        ({"type": "reverse_kl", "endpoint": ENDPOINT, "reference": "teacher"}, "one teacher"),
        ({"type": "reverse_kl", "teacher": "policy"}, "needs a hint"),
        ({"type": "reverse_kl", "hint": "the answer"}, "has no"),
        ({"type": "grpo_two_sided", "clip_high": 3.5}, "clip_ratio_max"),
        ({"type": "gspo", "clip_low": 1.0}, "less than 1"),
        ({"ref_kl_tau": float("nan")}, "greater than or equal"),
        ({"type": "dpo"}, "Input should be"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_at_load(
    fields: dict[str, object], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        LossConfig.model_validate(fields)


# -- ECHO -------------------------------------------------------------------------------------------

HEARD = np.isin(np.arange(15), [2, 6, 7, 13])
"""The environment's tokens among those of loss_cases: one of them in a sequence of two."""


def with_echo(logprobs: Tensor | None = None) -> TokenInputs:
    return replace(loss_cases.tokens().inputs(logprobs), echo=torch.from_numpy(HEARD.copy()))


@pytest.mark.parametrize("case", NOT_CE, ids=lambda case: case.name)
def test_echo_adds_the_mean_cross_entropy_of_the_environments_tokens(case: Case) -> None:
    """loss = sum of the drawn tokens' losses / their count + alpha x mean of -log pi of the others."""
    whole = loss_cases.tokens()
    drawn = loss_cases.Tokens(
        whole.pi[~HEARD],
        whole.mu[~HEARD],
        whole.advantage[~HEARD],
        whole.reference[~HEARD],
        whole.sequence[~HEARD],
    )
    values, slopes = case.expected(drawn)
    given = with_echo()
    loss, sums = policy_loss(
        case.config.model_copy(update={"echo_alpha": 0.3}), given, 20, echo_tokens=8
    )
    (found,) = torch.autograd.grad(loss, given.logprobs)
    heard = np.log(whole.pi[HEARD])
    assert loss.item() == pytest.approx(values.sum() / 20 - 0.3 * heard.sum() / 8, rel=1e-12)
    assert found.numpy()[~HEARD] == pytest.approx(slopes / 20, rel=1e-9, abs=1e-15)
    assert found.numpy()[HEARD] == pytest.approx(-0.3 / 8, rel=1e-12)
    metrics = sums.metrics()
    assert metrics["nll/mean"] == pytest.approx(-heard.mean(), rel=1e-12)
    assert (metrics["tokens"], metrics["nll/tokens"]) == (11, 4)
    assert metrics["loss/mean"] == pytest.approx(values.mean(), rel=1e-12)


def test_echo_tokens_of_ranks_add_up_to_one_also_where_a_rank_has_no_other() -> None:
    config = LossConfig(echo_alpha=0.1)
    loss, sums = policy_loss(config, with_echo(), 11, 4)
    parts = [
        policy_loss(config, one, 11, 4)
        for one in (replace(with_echo().drawn(), echo=None), only_heard(), only_heard(0))
    ]
    assert sum(part[0].item() for part in parts) == pytest.approx(loss.item(), rel=1e-12)
    for part in parts:
        part[0].backward()
    for reduced in exchange([part[1] for part in parts]):
        assert reduced.metrics() == pytest.approx(sums.metrics(), rel=1e-12)


def only_heard(count: int = 4) -> TokenInputs:
    heard = with_echo().observed()
    cut = {
        name: getattr(heard, name)[:count]
        for name in ("logprobs", "behaviour", "advantages", "entropy", "sequences", "reference")
    }
    return replace(heard, **cut, echo=torch.ones(count, dtype=torch.bool))


def test_a_step_of_the_environments_tokens_alone_is_reported() -> None:
    loss, sums = policy_loss(LossConfig(echo_alpha=0.1), only_heard(), 0, 4)
    assert set(sums.metrics()) == {"nll/mean", "nll/tokens", "tokens"}
    assert loss.item() == pytest.approx(0.1 * sums.metrics()["nll/mean"])


# -- SFT beside rollouts ------------------------------------------------------------------------------

GIVEN = np.isin(np.arange(15), [0, 3, 8, 14])
"""Tokens of demonstrations among those of loss_cases; none of them is in HEARD."""


def test_a_demonstration_adds_its_own_weighted_mean_and_nothing_else_sees_its_tokens() -> None:
    """The gradient is slope / drawn, -alpha / heard and -weight / given."""
    inputs = replace(with_echo(), given=torch.from_numpy(GIVEN.copy()))
    config = LossConfig(type="reinforce", importance="none", kl_tau=0.0, echo_alpha=0.3)
    loss, sums = policy_loss(config, inputs, 9, echo_tokens=5)
    taught, more = sft(0.25, inputs, 6)
    (found,) = torch.autograd.grad(loss + taught, inputs.logprobs)
    drawn = ~(HEARD | GIVEN)
    assert found.numpy()[drawn] == pytest.approx(
        -loss_cases.tokens().advantage[drawn] / 9, rel=1e-6
    )
    assert found.numpy()[HEARD] == pytest.approx(-0.3 / 5, rel=1e-12)
    assert found.numpy()[GIVEN] == pytest.approx(-0.25 / 6, rel=1e-12)
    nats = -np.log(loss_cases.tokens().pi[GIVEN])
    assert taught.item() == pytest.approx(0.25 * nats.sum() / 6, rel=1e-12)
    sums.add(more)
    figures = sums.metrics()
    assert figures["sft_loss/mean"] == pytest.approx(nats.mean(), rel=1e-12)
    assert [figures[n] for n in ("tokens", "nll/tokens", "sft_loss/tokens")] == [7, 4, 4]
