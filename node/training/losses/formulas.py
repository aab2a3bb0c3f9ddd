"""The formulas of the losses, per token. Imports torch: import this file lazily.

A formula knows neither batch nor rank: it gives each token its loss, and whoever calls it adds and divides.
Throughout, log pi is the trainer's and log mu the sampler's logprob of a token, r = exp(log pi - log mu) the
importance ratio, d = pi - mu what the token's probability has moved by, and A its advantage.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...config.training import LossConfig

MAX_LOG_RATIO = 20.0
"""Beyond e**20 a ratio is a lie or a broken sampler: the clamp keeps exp() finite and its gradient is 0,
so that such a token changes no weight. Honest tokens never come near."""


@dataclass(frozen=True)
class TokenInputs:
    """N trained tokens, float32, flat: only tokens with a mask. Nothing here is ever written to."""

    logprobs: Tensor
    """log pi: the trainer's, with gradient."""
    behaviour: Tensor
    """log mu: the sampler's."""
    advantages: Tensor
    entropy: Tensor
    """Of the trainer's distribution, nats, without gradient; reported only."""
    sequences: Tensor
    """int64: which sequence a token is of, counted from 0 within these tokens' micro-batch."""
    reference: Tensor | None = None
    """log of a frozen reference policy; only where the loss asks for it (LossConfig.needs_reference)."""

    @property
    def log_ratio(self) -> Tensor:
        """log r, clamped to +-MAX_LOG_RATIO (gradient 0 outside)."""
        return (self.logprobs - self.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def moved(self) -> Tensor:
        """d = pi - mu, without gradient."""
        return self.logprobs.detach().exp() - self.behaviour.exp()

    @property
    def reference_gap(self) -> Tensor:
        """log reference - log pi, clamped like log_ratio, without gradient. Raises ValueError."""
        if self.reference is None:
            raise ValueError(
                "this loss compares with a reference policy: give its logprobs (TokenInputs.reference)"
            )
        gap = self.reference - self.logprobs.detach()
        return gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True)
class TokenLoss:
    """Loss per token [N], not yet normalised, and which tokens the trust region took out, by side."""

    values: Tensor
    masked_low: Tensor
    """bool [N]: their probability or ratio fell too far."""
    masked_high: Tensor

    @classmethod
    def unmasked(cls, values: Tensor) -> "TokenLoss":
        """A loss without a trust region."""
        nothing = torch.zeros_like(values, dtype=torch.bool)
        return cls(values, nothing, nothing)


def dppo_kl(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """DPPO with a squared-log-ratio pull, prime-rl's default (`trainer/rl/loss.py: default_loss_fn`; DPPO:
    arXiv 2602.04879, the pull: arXiv 2602.02276).

        masked = d > dppo_mask_high if A > 0 else d < -dppo_mask_low
        loss   = -[not masked] * adv_tau * A * r + kl_tau * (log r)**2

    The pull acts on masked tokens too; r is not clipped (see MAX_LOG_RATIO for its guard).
    """
    high = (inputs.advantages > 0) & (inputs.moved > config.dppo_mask_high)
    low = (inputs.advantages <= 0) & (inputs.moved < -config.dppo_mask_low)
    return _masked_gain(config, inputs, low, high)


def ipo(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """DPPO's loss with a symmetric trust region, whatever the sign of A (prime-rl's `ipo_loss_fn`).

    masked = |d| > ipo_threshold
    loss   = -[not masked] * adv_tau * A * r + kl_tau * (log r)**2
    """
    high = inputs.moved > config.ipo_threshold
    low = inputs.moved < -config.ipo_threshold
    return _masked_gain(config, inputs, low, high)


def grpo_two_sided(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Clipped GRPO whose ratio is also bounded where the advantage is negative (INTELLECT-2, arXiv
    2505.07291).

    With c1 = min(r, clip_ratio_max), c2 = clamp(c1, 1 - clip_low, 1 + clip_high):
        loss = max(-c1 * A, -c2 * A)
    Plain GRPO leaves r unbounded for A < 0. clip_high > clip_low is DAPO's asymmetric clip.
    """
    low, high = config.clip_low, config.clip_high
    return _clipped(inputs.log_ratio.exp(), inputs.advantages, low, high, config.clip_ratio_max)


def gspo(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """One ratio for a whole sequence, clipped (GSPO, arXiv 2507.18071).

    With s = exp(mean of log r over the sequence's trained tokens), the length-normalised ratio of the
    sequence's likelihoods, c1 = min(s, clip_ratio_max), c2 = clamp(c1, 1 - sequence_clip_low,
    1 + sequence_clip_high):
        loss = max(-c1 * A, -c2 * A)   for each of its tokens
    The gradient flows through the mean: inside the clip every token of the sequence gets -A * s.
    Two things differ from the paper: a sequence weighs by its tokens, as in every loss here, and s is capped
    for A < 0 as in grpo_two_sided.
    """
    log_ratio, sequences = inputs.log_ratio, inputs.sequences
    count = int(sequences.max()) + 1
    lengths = torch.bincount(sequences, minlength=count).clamp(min=1)
    totals = log_ratio.new_zeros(count).index_add(0, sequences, log_ratio)
    ratio = (totals / lengths).exp()[sequences]
    low, high = config.sequence_clip_low, config.sequence_clip_high
    return _clipped(ratio, inputs.advantages, low, high, config.clip_ratio_max)


def reverse_kl(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """KL(pi || reference) as a policy gradient, prime-rl's `ref_kl_loss_fn` (on-policy distillation).

        masked = d < -ref_kl_mask_low
        loss   = -[not masked] * (log reference - log pi) * r + kl_tau * (log r)**2

    The gap to the reference has no gradient: it stands where A stands in the others, and A is not read.
    """
    low = inputs.moved < -config.ref_kl_mask_low
    values = _pull(config, inputs) + reference_term(config, inputs)
    return TokenLoss(values, masked_low=low, masked_high=torch.zeros_like(low))


def reference_term(config: LossConfig, inputs: TokenInputs) -> Tensor:
    """reverse_kl without the pull: what `ref_kl_tau` times is added to any other loss, per token.

    Raises ValueError without a reference.
    """
    low = inputs.moved < -config.ref_kl_mask_low
    return -(inputs.reference_gap * inputs.log_ratio.exp()).masked_fill(low, 0.0)


def negative_log_likelihood(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Cross entropy: -log pi. Reads neither sampler nor advantage."""
    return TokenLoss.unmasked(-inputs.logprobs)


def _masked_gain(config: LossConfig, inputs: TokenInputs, low: Tensor, high: Tensor) -> TokenLoss:
    gain = config.adv_tau * inputs.advantages * inputs.log_ratio.exp()
    values = _pull(config, inputs) - gain.masked_fill(low | high, 0.0)
    return TokenLoss(values, masked_low=low, masked_high=high)


def _pull(config: LossConfig, inputs: TokenInputs) -> Tensor:
    """Towards the sampler: kl_tau * (log r)**2, on every token."""
    return config.kl_tau * inputs.log_ratio.square()


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, cap: float) -> TokenLoss:
    """max(-c1 A, -c2 A); masked is where its gradient is 0 although A is not."""
    bounded = ratio.clamp(max=cap)
    clipped = bounded.clamp(1 - low, 1 + high)
    values = torch.maximum(-bounded * advantages, -clipped * advantages)
    fixed = ratio.detach()
    fell = (advantages < 0) & (fixed < 1 - low)
    runaway = (advantages < 0) & (fixed > cap)
    return TokenLoss(values, fell, ((advantages > 0) & (fixed > 1 + high)) | runaway)
