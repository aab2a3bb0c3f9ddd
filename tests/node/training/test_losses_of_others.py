"""Our losses with the settings of docs/algorithms.md against TRL's own code, and rules of verl and prime-rl.

Those of TRL are skipped where it is not installed: `pip install --no-deps trl==1.16.0 accelerate` is enough.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from primerl.node.config.prime_rl import LOSSES, NEWER_LOSS
from primerl.node.config.training import LossConfig
from primerl.node.training.losses import TokenInputs, policy_loss, rejected

SEQUENCES, LENGTH = 7, 11
ROUNDING = 1e-5


@dataclass(frozen=True)
class Batch:
    """Sequences of unequal length, padded, with ratios from 1/20 to 20."""

    logprobs: Tensor
    behaviour: Tensor
    mask: Tensor
    advantages: Tensor

    @classmethod
    def drawn(cls, seed: int) -> "Batch":
        generator = torch.Generator().manual_seed(seed)
        shape = (SEQUENCES, LENGTH)
        logprobs = -torch.rand(shape, generator=generator) * 4
        lengths = torch.randint(1, LENGTH + 1, (SEQUENCES, 1), generator=generator)
        return cls(
            logprobs,
            (logprobs + torch.randn(shape, generator=generator)).clamp(max=0.0),
            (torch.arange(LENGTH) < lengths).float(),
            torch.randn(SEQUENCES, generator=generator),
        )

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    def ours(self, config: LossConfig) -> tuple[float, Tensor]:
        """Loss and gradient [sequences, length] of our code."""
        logprobs = self.logprobs.clone().requires_grad_()
        where = self.mask.bool()
        rows = torch.arange(SEQUENCES)[:, None].expand_as(where)
        inputs = TokenInputs(
            logprobs[where],
            self.behaviour[where],
            self.advantages[:, None].expand_as(where)[where],
            torch.zeros(self.tokens),
            rows[where],
        )
        loss, _ = policy_loss(config, inputs, self.tokens)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        return float(loss.detach()), gradient

    def trls(
        self, *, on_policy: bool = False, ratio: Tensor | None = None, **options: Any
    ) -> tuple[float, Tensor]:
        """Loss and gradient of TRL's GRPOTrainer with these options, PPO's old policy being the sampler.

        `on_policy`: it is pi, and `ratio` corrects for the sampler.
        """
        trainer = pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError).GRPOTrainer
        logprobs = self.logprobs.clone().requires_grad_()
        settings = {"loss_type": "grpo", "importance_sampling_level": "token", "delta": None}
        settings |= {"epsilon_low": 0.2, "epsilon_high": 0.28} | options
        stub = SimpleNamespace(
            **settings,
            args=SimpleNamespace(delta=settings["delta"], steps_per_generation=1),
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(num_processes=1, gather=_as_it_is, reduce=_as_it_is),
            _get_per_token_logps_and_entropies=partial(_measured, logprobs),
            _metrics={"train": defaultdict[str, list[float]](list)},
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            beta=0.0,
            use_vllm=ratio is not None,
            vllm_importance_sampling_correction=True,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            aux_loss_enabled=False,
        )
        ids = torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones(SEQUENCES, 1),
            "completion_ids": ids,
            "completion_mask": self.mask,
            "advantages": self.advantages,
            "old_per_token_logps": self.logprobs if on_policy else self.behaviour,
            "num_items_in_batch": torch.tensor(float(self.tokens)),
            "importance_sampling_ratio": ratio,
        }
        loss = trainer._compute_loss(stub, None, inputs)
        (gradient,) = torch.autograd.grad(loss, logprobs)
        return float(loss.detach()), gradient


def _as_it_is(value: Tensor, **_: Any) -> Tensor:
    return value


def _measured(logprobs: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
    return logprobs, torch.zeros_like(logprobs), None


CLIPPED = LossConfig(type="grpo_two_sided", clip_low=0.2, clip_high=0.28, clip_ratio_max=4.0)
SEQUENCE = LossConfig(type="gspo", clip_low=0.2, clip_high=0.28, clip_ratio_max=4.0)
CISPO = LossConfig(type="reinforce", importance_max=1.28, kl_tau=0.0)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CLIPPED, {"loss_type": "dapo", "delta": 4.0}),
        (CLIPPED, {"loss_type": "bnpo", "delta": 4.0}),
        (SEQUENCE, {"loss_type": "dapo", "delta": 4.0, "importance_sampling_level": "sequence"}),
        (CISPO, {"loss_type": "cispo", "epsilon_high": 1.28}),
    ],
)
def test_a_loss_with_these_settings_is_that_of_trl(
    config: LossConfig, options: dict[str, Any]
) -> None:
    for seed in range(20):
        batch = Batch.drawn(seed)
        loss, gradient = batch.ours(config)
        other, slope = batch.trls(**options)
        assert loss == pytest.approx(other, abs=ROUNDING)
        assert float((gradient - slope).abs().max()) < ROUNDING


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (CLIPPED, {"loss_type": "grpo", "delta": 4.0}),  # a mean of sequences' means
        (SEQUENCE, {"loss_type": "grpo", "delta": 4.0, "importance_sampling_level": "sequence"}),
        (LossConfig(type="reinforce", importance_max=1.28), {"loss_type": "cispo", "epsilon_high": 1.28}),
    ],
)  # fmt: skip
def test_other_settings_are_another_loss_than_trls(
    config: LossConfig, options: dict[str, Any]
) -> None:
    batch = Batch.drawn(0)
    _, gradient = batch.ours(config)
    _, slope = batch.trls(**options)
    assert float((gradient - slope).abs().max()) * batch.tokens > 1e-3


@pytest.mark.parametrize(
    ("mode", "config"),
    [
        ("token_truncate", {"importance": "token", "importance_max": 2.0}),
        ("sequence_truncate", {"importance": "sequence", "importance_max": 2.0}),
        ("token_mask",
         {"importance": "token", "importance_max": 100.0, "rejection": "token", "rejection_low": 0.0}),
        ("sequence_mask",
         {"importance": "sequence", "importance_max": 100.0, "rejection": "sequence", "rejection_low": 0.0}),
    ],
)  # fmt: skip
def test_a_correction_of_trl_has_the_gradient_of_ours_without_a_pull(
    mode: str, config: dict[str, Any]
) -> None:
    for seed in range(20):
        batch = Batch.drawn(seed)
        difference = (batch.logprobs - batch.behaviour) * batch.mask
        if mode.startswith("sequence"):
            difference = difference.sum(-1, keepdim=True)
        ratio = (
            difference.exp()
        )  # as _generate_and_score_completions() makes it, with its maximum of 2
        ratio = (
            ratio.clamp(max=2.0) if mode.endswith("truncate") else ratio.masked_fill(ratio > 2, 0.0)
        )
        _, slope = batch.trls(on_policy=True, ratio=ratio, loss_type="dapo")
        _, gradient = batch.ours(LossConfig(type="reinforce", kl_tau=0.0, **config))
        assert float((gradient - slope).abs().max()) < ROUNDING


@pytest.mark.parametrize(
    ("rule", "low", "high", "level"),
    [
        ("token_k1", 0.5, 5.0, "token"),
        ("seq_sum_k1", 0.5, 5.0, "sequence"),
        ("seq_mean_k1", 0.99, 1.002, "geometric"),
    ],
)
def test_bounds_of_verls_k1_are_inverted_here(
    rule: str, low: float, high: float, level: Any
) -> None:
    """verl bounds exp(k1), k1 = log mu - log pi (`rollout_corr_helper.py`), where we bound r = pi / mu."""
    assert rule.endswith("k1")
    kept = same = 0
    for seed in range(20):
        batch = Batch.drawn(seed)
        near = batch.logprobs + (batch.behaviour - batch.logprobs) * (
            0.02 if level == "geometric" else 1.0
        )
        k1 = (near - batch.logprobs) * batch.mask
        totals, counts = k1.sum(-1, keepdim=True), batch.mask.sum(-1, keepdim=True)
        k1 = {"token": k1, "sequence": totals, "geometric": totals / counts}[level].expand_as(k1)
        inside = ((k1 >= math.log(low)) & (k1 <= math.log(high)))[batch.mask.bool()]
        where = batch.mask.bool()
        inputs = TokenInputs(
            batch.logprobs[where],
            near[where],
            torch.ones(batch.tokens),
            torch.zeros(batch.tokens),
            torch.arange(SEQUENCES)[:, None].expand_as(where)[where],
        )
        inverted = LossConfig(rejection=level, rejection_low=1 / high, rejection_high=1 / low)
        fell, rose = rejected(inverted, inputs)
        assert bool((~(fell | rose) == inside).all())
        kept += int(inside.sum())
        unchanged = LossConfig(rejection=level, rejection_low=low, rejection_high=high)
        fell, rose = rejected(unchanged, inputs)
        same += int((~(fell | rose) == inside).sum())
    total = sum(Batch.drawn(seed).tokens for seed in range(20))
    assert 0 < kept < total
    assert same < total


def _prime_rls(name: str, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Loss of a token in prime-rl after 0.8, by its documentation; `log_ratio` has the gradient."""
    ratio = log_ratio.exp()
    match name:
        case "icepop":
            return -((ratio >= 0.2) & (ratio <= 5.0)).float() * advantages * ratio
        case "ppo":
            return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        case "cispo":
            return -ratio.detach().clamp(0.0, 5.0) * advantages * log_ratio
        case _:
            raise AssertionError(name)


@pytest.mark.parametrize("name", ["icepop", "ppo", "cispo"])
def test_a_loss_of_prime_rl_is_imported_as_one_with_its_gradient(name: str) -> None:
    config = LossConfig.model_validate(LOSSES[name])
    for seed in range(20):
        batch = Batch.drawn(seed)
        logprobs = batch.logprobs.clone().requires_grad_()
        values = _prime_rls(name, logprobs - batch.behaviour, batch.advantages[:, None])
        (slope,) = torch.autograd.grad((values * batch.mask).sum() / batch.tokens, logprobs)
        _, gradient = batch.ours(config)
        assert float((gradient - slope).abs().max()) < ROUNDING


def test_the_default_loss_after_prime_rl_0_8_is_ipo_without_a_pull() -> None:
    config = LossConfig.model_validate(NEWER_LOSS)
    batch = Batch.drawn(0)
    logprobs = batch.logprobs.clone().requires_grad_()
    near = ((logprobs.exp() - batch.behaviour.exp()).abs().detach() <= 0.3).float()
    values = -near * batch.advantages[:, None] * (logprobs - batch.behaviour).exp()
    (slope,) = torch.autograd.grad((values * batch.mask).sum() / batch.tokens, logprobs)
    _, gradient = batch.ours(config)
    assert float((gradient - slope).abs().max()) < ROUNDING
    assert 0 < int((near * batch.mask).sum()) < batch.tokens
