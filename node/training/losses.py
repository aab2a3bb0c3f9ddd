"""Policy-gradient losses per token, by name. Imports torch: import this file lazily.

Every loss is a sum divided by the token count of the whole step over all ranks (an argument), so that
adding the ranks' losses or gradients gives exactly what one rank would have computed.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import LossConfig

MAX_LOG_RATIO = 20.0
"""Beyond e**20 a ratio is a lie or a broken sampler: the clamp keeps exp() finite and its gradient is 0,
so that such a token changes no weight. Honest tokens never come near."""


@dataclass(frozen=True)
class TokenInputs:
    """N trained tokens, float32, flat: only tokens with a mask."""

    logprobs: Tensor
    """log pi: the trainer's, with gradient."""
    behaviour: Tensor
    """log mu: the sampler's."""
    advantages: Tensor
    entropy: Tensor
    """Of the trainer's distribution, nats, without gradient; reported only."""


@dataclass(frozen=True)
class TokenLoss:
    """Loss per token (N, not yet normalised) and which tokens the trust region took out, by side."""

    values: Tensor
    masked_low: Tensor
    masked_high: Tensor


@dataclass
class LossSums:
    """Sums over tokens; add() ranks and micro-batches, then metrics()."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict[str, float])
    ratio_max: float = 0.0

    def add(self, other: "LossSums") -> None:
        """Fold another micro-batch or rank in."""
        self.tokens += other.tokens
        self.ratio_max = max(self.ratio_max, other.ratio_max)
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Means per token under prime-rl's names; nothing for an empty step."""
        if not self.tokens:
            return {}
        means = {name: value / self.tokens for name, value in self.sums.items()}
        figures = {"importance_ratio/max": self.ratio_max, "tokens": float(self.tokens)}
        if entropy := means.get("entropy/all/mean"):
            figures["kl_ent_ratio/mean"] = means["mismatch_kl/all/mean"] / entropy
        return means | figures


def policy_loss(config: LossConfig, inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """Loss of these tokens as their share of a step of `tokens` trained tokens over all ranks.

    Returns the scalar to call backward() on and the detached sums for the metrics.
    """
    if tokens < inputs.logprobs.numel():
        raise ValueError("tokens counts the whole step: it cannot be less than this part of it")
    match config.type:
        case "dppo_kl":
            token_loss = dppo_kl(config, inputs)
        case "grpo_two_sided":
            token_loss = grpo_two_sided(config, inputs)
    loss = token_loss.values.sum() / tokens
    return loss, _sums(inputs, token_loss)


def dppo_kl(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """DPPO with a squared-log-ratio pull, prime-rl's default (`trainer/rl/loss.py: default_loss_fn`).

    With r = exp(log pi - log mu) and d = pi - mu (a difference of probabilities):
        masked = d > dppo_mask_high if A > 0 else d < -dppo_mask_low
        loss   = -[not masked] * adv_tau * A * r + kl_tau * (log pi - log mu)**2
    The pull acts on masked tokens too; r is not clipped (see MAX_LOG_RATIO for its guard).
    """
    log_ratio = _log_ratio(inputs)
    with torch.no_grad():
        moved = inputs.logprobs.exp() - inputs.behaviour.exp()
        high = (inputs.advantages > 0) & (moved > config.dppo_mask_high)
        low = (inputs.advantages <= 0) & (moved < -config.dppo_mask_low)
    gain = config.adv_tau * inputs.advantages * log_ratio.exp()
    values = config.kl_tau * log_ratio.square() - gain.masked_fill(high | low, 0.0)
    return TokenLoss(values, masked_low=low, masked_high=high)


def grpo_two_sided(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Clipped GRPO whose ratio is also bounded where the advantage is negative (INTELLECT-2, arXiv
    2505.07291).

    With r as above, c1 = min(r, clip_ratio_max), c2 = clamp(c1, 1 - clip_low, 1 + clip_high):
        loss = max(-c1 * A, -c2 * A)
    Plain GRPO leaves r unbounded for A < 0. clip_high > clip_low is DAPO's asymmetric clip.
    """
    ratio = _log_ratio(inputs).exp()
    bounded = ratio.clamp(max=config.clip_ratio_max)
    clipped = bounded.clamp(1 - config.clip_low, 1 + config.clip_high)
    values = torch.maximum(-bounded * inputs.advantages, -clipped * inputs.advantages)
    with torch.no_grad():
        low = (inputs.advantages < 0) & (ratio < 1 - config.clip_low)
        runaway = (inputs.advantages < 0) & (ratio > config.clip_ratio_max)
        high = ((inputs.advantages > 0) & (ratio > 1 + config.clip_high)) | runaway
    return TokenLoss(values, masked_low=low, masked_high=high)


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature) of `targets`, and the entropy; logits [N, V], float32 inside.

    The entropy (nats per token) carries no gradient.
    """
    scaled = logits.float() / temperature
    log_z = scaled.logsumexp(-1)
    chosen = scaled.gather(-1, targets[:, None])[:, 0] - log_z
    with torch.no_grad():
        entropy = log_z - (scaled.softmax(-1) * scaled).sum(-1)
    return chosen, entropy


def _log_ratio(inputs: TokenInputs) -> Tensor:
    """log pi - log mu, clamped to +-MAX_LOG_RATIO (gradient 0 outside)."""
    return (inputs.logprobs - inputs.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


@torch.no_grad()
def _sums(inputs: TokenInputs, token_loss: TokenLoss) -> LossSums:
    """The figures of one micro-batch. mismatch_kl is the k3 estimator r - log r - 1 (never negative)."""
    if not inputs.logprobs.numel():
        return LossSums()
    log_ratio = _log_ratio(inputs)
    ratio = log_ratio.exp()
    columns = {
        "loss/mean": token_loss.values,
        "mismatch_kl/all/mean": ratio - log_ratio - 1,
        "entropy/all/mean": inputs.entropy,
        "importance_ratio/mean": ratio,
        "is_masked/mean": token_loss.masked_low | token_loss.masked_high,
        "is_masked_low/mean": token_loss.masked_low,
        "is_masked_high/mean": token_loss.masked_high,
    }
    totals = torch.stack([column.double().sum() for column in columns.values()]).tolist()
    return LossSums(ratio.numel(), dict(zip(columns, totals, strict=True)), float(ratio.max()))
