"""One step is what torch's AdamW and clipping make of the same gradients, to the bit."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from primerl.node.config.run import TrainingConfig
from primerl.node.errors import UsageError
from primerl.node.training import optimizer as module
from primerl.node.training.optimizer import Optimizer, learning_rate

CONFIG = TrainingConfig(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, max_norm=0.5)
SHAPES = {"matrix": (7, 5), "vector": (9,), "one": (1,), "frozen": (4,)}
RATES = [1e-2, 0.0, 3e-3, 1e-4]


def parameters() -> dict[str, nn.Parameter]:
    rng = torch.Generator().manual_seed(1)
    made = {name: nn.Parameter(torch.randn(shape, generator=rng)) for name, shape in SHAPES.items()}
    made["frozen"].requires_grad_(False)
    return made


def pull(held: Mapping[str, Tensor], step: int, size: float = 1.0) -> None:
    """Give every parameter that learns the gradient of this step."""
    rng = torch.Generator().manual_seed(100 + step)
    for one in held.values():
        if one.requires_grad:
            one.grad = torch.randn(one.shape, generator=rng) * size


def plain(held: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    learned = [one for one in held.values() if one.requires_grad]
    return torch.optim.AdamW(learned, betas=CONFIG.betas, weight_decay=CONFIG.weight_decay)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("offload", [False, True])
def test_steps_are_those_of_torch_to_the_bit(size: float, offload: bool) -> None:
    """Of a large gradient that is clipped and of a small one; without a GPU there is nothing to offload."""
    mine, wanted = parameters(), parameters()
    ours = Optimizer(mine, CONFIG.model_copy(update={"optimizer_offload": offload}))
    theirs = plain(wanted)
    for step, lr in enumerate(RATES):
        pull(mine, step, size)
        pull(wanted, step, size)
        learned = [one for one in wanted.values() if one.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(learned, CONFIG.max_norm)
        assert ours.clip() == float(norm)
        assert (float(norm) > CONFIG.max_norm) == (size == 1.0)
        theirs.param_groups[0]["lr"] = lr
        ours.step(lr)
        theirs.step()
        assert same(mine, wanted)
    assert same({"frozen": mine["frozen"]}, {"frozen": parameters()["frozen"]})


def test_buckets_hold_each_parameter_once_in_order() -> None:
    sizes = [3, 1, 0, 5, 2, 2, 9]
    held = [torch.empty(size) for size in sizes]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "BUCKET", 4)
        cut: Any = module
        buckets = [[len(one) for one in bucket] for bucket in cut._buckets(held)]
    assert buckets == [[3, 1], [0, 5], [2, 2], [9]]


def test_moments_go_on_in_another_optimizer() -> None:
    mine = parameters()
    first = Optimizer(mine, CONFIG)
    assert first.moments() == {}
    for step in range(2):
        pull(mine, step)
        first.clip()
        first.step(1e-2)
    other = {name: nn.Parameter(one.detach().clone()) for name, one in mine.items()}
    other["frozen"].requires_grad_(False)
    second = Optimizer(other, CONFIG)
    pull(other, 9)
    second.clip()  # moments of its own, which set_moments() replaces
    second.set_moments({name: one.clone() for name, one in first.moments().items()})
    assert set(second.moments()) == {
        f"{name}:{key}"
        for name in ("matrix", "vector", "one")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }
    for held, one in ((mine, first), (other, second)):
        pull(held, 2)
        one.clip()
        one.step(1e-2)
    assert same(mine, other)
    assert same(first.moments(), second.moments())
    second.set_moments({})
    assert second.moments() == {}


def test_forgotten_gradients_change_nothing() -> None:
    mine = parameters()
    ours = Optimizer(mine, CONFIG)
    pull(mine, 0)
    ours.zero_grad()
    before = {name: one.detach().clone() for name, one in mine.items()}
    assert ours.clip() == 0.0
    ours.step(1.0)
    assert same(mine, before)


def test_a_gradient_that_is_no_number_shows_in_the_norm() -> None:
    mine = parameters()
    ours = Optimizer(mine, CONFIG)
    pull(mine, 0)
    grad = mine["vector"].grad
    assert grad is not None
    grad[3] = torch.nan
    assert ours.clip() != ours.clip()


def test_a_step_of_a_gradient_that_is_not_finite_changes_nothing() -> None:
    mine = parameters()
    ours = Optimizer(mine, CONFIG)
    for step, finite in enumerate([True, False, True]):
        pull(mine, step)
        norm = ours.clip()
        before = {
            name: one.detach().clone() for name, one in [*mine.items(), *ours.moments().items()]
        }
        ours.step(1e-2, norm.isfinite() & finite)
        assert same(before, {**mine, **ours.moments()}) is not finite


def test_torch_s_fused_adamw_changes_nothing_where_it_gets_infinities() -> None:
    """As on a GPU, where no test of this suite runs: the kernel reads it, and the host need not wait."""
    mine = nn.Parameter(torch.ones(3))
    theirs: Any = torch.optim.AdamW([mine], lr=0.1, fused=True)
    for found, moves in ((1.0, False), (0.0, True)):
        mine.grad = torch.full((3,), 0.0 if moves else torch.nan) + 1
        theirs.found_inf = torch.tensor(found)
        theirs.step()
        assert mine.isfinite().all()
        assert (mine < 1).all() == moves
        assert theirs.state[mine]["step"] == float(moves)


def test_betas_and_decay_may_be_others_than_the_config_s() -> None:
    mine, wanted = parameters(), parameters()
    ours = Optimizer(mine, CONFIG, betas=(0.5, 0.6), weight_decay=0.0)
    learned = [one for one in wanted.values() if one.requires_grad]
    theirs = torch.optim.AdamW(learned, lr=0.1, betas=(0.5, 0.6), weight_decay=0.0)
    for step in range(2):
        pull(mine, step, 1e-3)
        pull(wanted, step, 1e-3)
        ours.clip()
        ours.step(0.1)
        theirs.step()
    assert same(mine, wanted)


MUON = CONFIG.model_copy(update={"optimizer": "muon", "muon_momentum": 0.9})


def with_embeddings() -> dict[str, nn.Parameter]:
    rng = torch.Generator().manual_seed(4)
    return parameters() | {
        "model.embed_tokens.weight": nn.Parameter(torch.randn(11, 5, generator=rng)),
        "experts": nn.Parameter(torch.randn(2, 3, 5, generator=rng)),
    }


def test_muon_is_torch_s_for_hidden_matrices_and_adamw_for_the_rest() -> None:
    mine, wanted = with_embeddings(), with_embeddings()
    ours = Optimizer(mine, MUON)
    muon = torch.optim.Muon(
        [wanted["matrix"]], momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    rest = [one for name, one in wanted.items() if name not in ("matrix", "frozen")]
    adamw = torch.optim.AdamW(rest, betas=MUON.betas, weight_decay=0.1)
    for step, lr in enumerate(RATES):
        pull(mine, step)
        pull(wanted, step)
        torch.nn.utils.clip_grad_norm_([wanted["matrix"], *rest], MUON.max_norm)
        ours.clip()
        ours.step(lr)
        for theirs in (muon, adamw):
            theirs.param_groups[0]["lr"] = lr
            theirs.step()
        assert same(mine, wanted)


def test_muon_goes_on_from_its_moments_and_from_no_other_optimizer_s() -> None:
    mine = with_embeddings()
    first = Optimizer(mine, MUON)
    pull(mine, 0)
    first.clip()
    first.step(1e-2)
    saved = {name: one.clone() for name, one in first.moments().items()}
    assert "matrix:momentum_buffer" in saved
    other = {name: nn.Parameter(one.detach().clone()) for name, one in mine.items()}
    other["frozen"].requires_grad_(False)
    second = Optimizer(other, MUON)
    second.set_moments(saved)
    for held, one in ((mine, first), (other, second)):
        pull(held, 1)
        one.clip()
        one.step(1e-2)
    assert same(mine, other)
    adamw = Optimizer(other, CONFIG)
    with pytest.raises(UsageError, match=r"another optimizer's than training\.optimizer"):
        adamw.set_moments(saved)
    assert adamw.moments() == {}


def test_muon_alone_has_matrices_only() -> None:
    held = {"a.lora_A": nn.Parameter(torch.ones(2, 5))}
    ours = Optimizer(held, MUON)
    pull(held, 0)
    ours.clip()
    ours.step(1e-2)
    assert set(ours.moments()) == {"a.lora_A:momentum_buffer"}


def test_muon_is_refused_for_more_than_one_rank() -> None:
    with pytest.raises(ValidationError, match=r"set fsdp\.ranks to 1"):
        TrainingConfig.model_validate({"optimizer": "muon", "fsdp": {"ranks": 2}})


LINEAR = TrainingConfig(lr=1.0, scheduler="linear", warmup_steps=10, min_lr_ratio=0.1)


def test_linear_rises_then_falls_to_its_floor_at_the_last_step() -> None:
    rates = [learning_rate(LINEAR, step, 110) for step in (1, 5, 10, 60, 110, 200)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1, 0.1])


def test_constant_stays_after_its_warmup() -> None:
    config = TrainingConfig(lr=2.0, warmup_steps=2)
    assert [learning_rate(config, step, 3) for step in (1, 2, 3, 9)] == [1.0, 2.0, 2.0, 2.0]


def test_a_run_shorter_than_its_warmup_still_has_a_rate() -> None:
    assert 0 < learning_rate(LINEAR, 3, 3) <= 1.0
    assert learning_rate(LINEAR, 11, 5) == pytest.approx(0.1)


def test_there_is_no_step_zero() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(LINEAR, 0, 10)


def test_cosine_falls_in_half_a_period_and_stays_at_its_floor() -> None:
    config = LINEAR.model_copy(update={"scheduler": "cosine"})
    rates = [learning_rate(config, step, 110) for step in (1, 10, 35, 60, 85, 110, 200)]
    middle, swing = 0.55, 0.45
    slope = swing * math.cos(math.pi / 4)
    wanted = [0.1, 1.0, middle + slope, middle, middle - slope, 0.1, 0.1]
    assert rates == pytest.approx(wanted)
    falling = [learning_rate(config, step, 110) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)
