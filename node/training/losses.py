"""Losses by name, as one rank's share of a step. Imports torch: import this file lazily.

Every loss is a sum divided by the token count of the whole step over all ranks (an argument), so that
adding the ranks' losses or gradients gives exactly what one rank would have computed.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..config.training import LossConfig
from ..ops.errors import UsageError

TOKENS = "loss/mean"
"""The figure that every trained token has: its count is the number of tokens."""

ECHO = "nll/mean"
"""The figure of the environment's tokens, where they are trained."""

SFT = "sft_loss/mean"
"""The figure of the tokens of demonstrations, where they are trained."""

FIGURES = (
    TOKENS,
    "entropy/all/mean",
    "mismatch_kl/all/mean",
    "importance_ratio/mean",
    "is_masked/mean",
    "is_masked_low/mean",
    "is_masked_high/mean",
    "masked_mismatch_kl/mean",
    "unmasked_mismatch_kl/mean",
    "ref_kl/all/mean",
    ECHO,
    SFT,
)
"""Every mean that there can be, in the order in which ranks exchange them. A step may lack some: those of
the sampler under cross entropy, those of a reference that is not there, those of no masked token."""

PEAKS = ("entropy/all/max", "mismatch_kl/all/max", "importance_ratio/max")
"""Largest values, in the order in which ranks exchange them; none is ever negative."""

Fold = Callable[[list[float]], list[float]]
"""From one rank's values to those of all ranks, place by place."""


@dataclass
class LossSums:
    """Sums over tokens and how many tokens each was taken over; add() micro-batches, reduce() ranks."""

    sums: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, float] = field(default_factory=dict[str, float])
    peaks: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def tokens(self) -> int:
        """Trained tokens in these sums."""
        return int(self.counts.get(TOKENS, 0.0))

    def add(self, other: "LossSums") -> None:
        """Fold another micro-batch in."""
        for mine, theirs in ((self.sums, other.sums), (self.counts, other.counts)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value
        for name, value in other.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, 0.0), value)

    def reduce(self, total: Fold, largest: Fold) -> "LossSums":
        """The same of all ranks together: `total` adds, `largest` takes the maximum, place by place.

        Every rank sends 2 x len(FIGURES) and len(PEAKS) numbers whatever it saw, also one without a token,
        so that all take part in both collectives. They want float64: counts exceed what float32 can tell.
        """
        mine = [held.get(name, 0.0) for held in (self.sums, self.counts) for name in FIGURES]
        added = total(mine)
        highest = largest([self.peaks.get(name, 0.0) for name in PEAKS])
        counts = _seen(FIGURES, added[len(FIGURES) :])
        sums = zip(FIGURES, added[: len(FIGURES)], strict=True)
        peaks = zip(PEAKS, highest, strict=True)
        return LossSums(
            {name: value for name, value in sums if name in counts},
            counts,
            {name: value for name, value in peaks if mean_of(name) in counts},
        )

    def metrics(self) -> dict[str, float]:
        """Means and largest values by name, and `tokens`; nothing for an empty step."""
        if not self.counts:
            return {}
        means = {name: value / self.counts[name] for name, value in self.sums.items()}
        figures = {**self.peaks, "tokens": float(self.tokens)}
        for name in (ECHO, SFT):
            if name in self.counts:
                figures[name.replace("mean", "tokens")] = self.counts[name]
        entropy, mismatch = means.get("entropy/all/mean"), means.get("mismatch_kl/all/mean")
        if entropy and mismatch is not None:
            figures["kl_ent_ratio/mean"] = mismatch / entropy
        return means | figures


def _seen(names: tuple[str, ...], counts: list[float]) -> dict[str, float]:
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def mean_of(peak: str) -> str:
    """The figure whose largest value a peak is."""
    return peak.removesuffix("max") + "mean"


MAX_LOG_RATIO = 20.0
"""Beyond e**20 a ratio is a lie or a broken sampler: the clamp keeps exp() finite and its gradient is 0,
so that such a token changes no weight. Honest tokens never come near."""
HALVINGS = 50
"""Of an interval of 800 until it is less than the spacing of float32 values of 1e-5."""


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
    """log of a reference policy, without gradient; only where LossConfig.needs_reference."""
    echo: Tensor | None = None
    """bool: tokens that the environment said, which only echo() reads; None where there is none."""
    given: Tensor | None = None
    """bool: tokens of demonstrations, which only sft() reads; None where there is none."""

    def of(self, where: Tensor) -> "TokenInputs":
        """The tokens `where`, bool [N], of all three kinds."""
        echo, given = (None if one is None else one[where] for one in (self.echo, self.given))
        return replace(self._only(where), echo=echo, given=given)

    def drawn(self) -> "TokenInputs":
        """Those that the model drew: what losses are given."""
        others = [one for one in (self.echo, self.given) if one is not None]
        return self._only(~torch.stack(others).any(0)) if others else self

    def observed(self) -> "TokenInputs":
        """Those that the environment said."""
        return self._only(self._none if self.echo is None else self.echo)

    def demonstrated(self) -> "TokenInputs":
        """Those of demonstrations."""
        return self._only(self._none if self.given is None else self.given)

    @property
    def _none(self) -> Tensor:
        return torch.zeros_like(self.logprobs, dtype=torch.bool)

    def _only(self, where: Tensor) -> "TokenInputs":
        reference = None if self.reference is None else self.reference[where]
        return TokenInputs(
            self.logprobs[where],
            self.behaviour[where],
            self.advantages[where],
            self.entropy[where],
            self.sequences[where],
            reference,
        )

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
    ratio = _log_ratio_of(inputs, "geometric").exp()
    low, high = config.sequence_clip_low, config.sequence_clip_high
    return _clipped(ratio, inputs.advantages, low, high, config.clip_ratio_max)


def reinforce(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Policy gradient with importance weights R, the ratio of the token or the product over its sequence.

        w    = clamp(R, importance_min, importance_max), without gradient; 1 with importance "none"
        loss = -adv_tau * w * A * log pi + kl_tau * (log r)**2

    An upper bound alone is truncated importance sampling (TIS, Ionides 2008; between sampler and trainer: Yao
    et al. 2025, verl's `rollout_is`). With one close to 1 it is CISPO (MiniMax-M1, arXiv 2506.13585), whose
    formula has a lower bound, too, that the paper does not use.
    A batch is learned from in one step, so that the old policy of PPO is pi itself: decoupled PPO (AReaL, arXiv
    2505.24298) with that as its proximal policy is this loss, too. A token whose own ratio is at the guard
    (MAX_LOG_RATIO) has no weight; a product beyond it, as of long sequences, is cut to its bounds like any.
    """
    lied = inputs.log_ratio.detach().abs() >= MAX_LOG_RATIO
    gain = (config.adv_tau * inputs.advantages * inputs.logprobs).masked_fill(lied, 0.0)
    if config.importance != "none":
        ratio = _log_ratio_of(inputs, config.importance).detach().exp()
        gain = gain * ratio.clamp(config.importance_min, config.importance_max)
    return TokenLoss.unmasked(_pull(config, inputs) - gain)


def rejected(config: LossConfig, inputs: TokenInputs) -> tuple[Tensor, Tensor]:
    """Which tokens `rejection` leaves out, bool [N] each: below its lower bound, and above its upper one.

    By token it is masked importance sampling (MIS, verl's `rollout_rs`), with bounds of 0.5 and 5 IcePop
    (Ring-1T, arXiv 2510.18855); by the geometric mean of a sequence the mask that verl and SkyRL have for long
    replies, whose product of ratios says nothing any more. For "second_moment": bound_by_second_moment().
    """
    log_ratio = _log_ratio_of(inputs, config.rejection).detach()
    low = math.log(config.rejection_low) if config.rejection_low else -math.inf
    return log_ratio < low, log_ratio > math.log(config.rejection_high)


def bound_by_second_moment(
    config: LossConfig, squares: Tensor, total: Fold, largest: Fold
) -> LossConfig:
    """Turn rejection "second_moment" into bounds of the token's ratio for one step; collective over its ranks.

    `squares` are (log r)**2 of all tokens of the step that are this rank's. M2PO (arXiv 2510.01161, AReaL's
    `m2_threshold`) leaves out the tokens that have the largest, until the mean of the rest is at most
    m2_threshold. The mean rises with the bound, so halving the interval finds it without exchanging the tokens;
    the bound is put halfway between the last token that is kept and the first one that is not.
    """
    squares = squares.detach().double()
    low, high = 0.0, MAX_LOG_RATIO**2 * 2
    for _ in range(HALVINGS):
        bound = (low + high) / 2
        kept = squares <= bound
        moment, count = total([float(squares[kept].sum()), float(kept.sum())])
        low, high = (bound, high) if moment <= config.m2_threshold * count else (low, bound)
    kept = squares <= low
    edges = [float(squares[kept].max()) if bool(kept.any()) else 0.0]
    edges.append(-float(squares[~kept].min()) if not bool(kept.all()) else -high)
    inside, outside = largest(edges)
    log_ratio = math.sqrt((inside - outside) / 2)
    bounds = {"rejection_low": math.exp(-log_ratio), "rejection_high": math.exp(log_ratio)}
    return config.model_copy(update={"rejection": "token", **bounds})


def _log_ratio_of(inputs: TokenInputs, level: str) -> Tensor:
    """log r of each token: its own, the sum over its sequence (clamped like it), or the mean ("geometric")."""
    log_ratio, sequences = inputs.log_ratio, inputs.sequences
    if level == "token":
        return log_ratio
    count = int(sequences.max()) + 1
    totals = log_ratio.new_zeros(count).index_add(0, sequences, log_ratio)
    if level == "sequence":
        return totals.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[sequences]
    lengths = torch.bincount(sequences, minlength=count).clamp(min=1)
    return (totals / lengths)[sequences]


def reverse_kl(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """KL(pi || reference) as a policy gradient, prime-rl's `ref_kl_loss_fn` (on-policy distillation).

        masked = d < -ref_kl_mask_low
        loss   = -[not masked] * (log reference - log pi) * r + kl_tau * (log r)**2

    The gap to the reference has no gradient: it stands where A stands in the others, and A is not read. The
    reference is the model that the run began with, the teacher that `reference` names, or the policy itself;
    with a `hint` it reads a demonstration first (OPSD, arXiv 2601.18734, 2601.19897; prime-rl's `opsd.py`).
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


def echo(config: LossConfig, inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """ECHO: cross entropy of the environment's tokens after the first reply (arXiv 2605.24517), as in prime-rl.

        loss = echo_alpha * sum(-log pi) / tokens

    over the inputs' observed tokens; `tokens` is their own number in the step, over all ranks, so that they and
    the drawn ones do not dilute each other. Returns it as policy_loss() does, with the unweighted sum.
    """
    return _weighted_nll(config.echo_alpha, inputs.observed(), tokens, ECHO)


def sft(weight: float, inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """Cross entropy of demonstrations beside a loss of rollouts: PPO-ptx of InstructGPT (arXiv 2203.02155,
    equation 2), with demonstrations in place of pretraining text and per token.

        loss = weight * sum(-log pi) / tokens

    over the inputs' given tokens; `tokens` is their own number in the step, over all ranks. Else as echo().
    """
    return _weighted_nll(weight, inputs.demonstrated(), tokens, SFT)


def _weighted_nll(
    weight: float, inputs: TokenInputs, tokens: int, figure: str
) -> tuple[Tensor, LossSums]:
    values = -inputs.logprobs
    if not values.numel():
        return values.sum(), LossSums()
    sums = LossSums({figure: float(values.detach().double().sum())}, {figure: float(len(values))})
    return weight * values.sum() / tokens, sums


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


def load_custom(path: str, arguments: dict[str, Any]) -> Callable[[TokenInputs], TokenLoss]:
    """The function that `path` ("package.module:function") names, given `arguments` at each call.

        function(inputs: TokenInputs, **arguments) -> TokenLoss

    Its values [N] need the gradient of inputs.logprobs. It is not called where there is no token. Raises
    UsageError if it cannot be had, and at a call whose result does not fit.
    """
    function = _find(path)
    try:
        inspect.signature(function).bind(None, **arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"training.loss.custom = {path!r} cannot be called with the inputs and custom_args "
            f"{sorted(arguments)}: {error}"
        ) from error

    def checked(inputs: TokenInputs) -> TokenLoss:
        result = function(inputs, **arguments)
        if fault := _fault(result, inputs):
            raise UsageError(f"training.loss.custom = {path!r} {fault}")
        return result

    return checked


def _find(path: str) -> Callable[..., Any]:
    name, _, attribute = path.partition(":")
    try:
        module = import_module(name)  # once: later calls find it in sys.modules
    except (ImportError, SyntaxError) as error:
        raise UsageError(
            f"training.loss.custom = {path!r} does not import ({error}): install the package, or name "
            "its folder in PYTHONPATH of this node and of its ranks"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise UsageError(f"training.loss.custom = {path!r}: {name} has no {attribute!r}; define it")
    if not callable(found):
        raise UsageError(f"training.loss.custom = {path!r} is not a function: name one")
    return found


def _fault(result: object, inputs: TokenInputs) -> str | None:
    """Return the error in a custom loss's result, or None."""
    if not isinstance(result, TokenLoss):
        return f"returned {type(result).__name__}: return a TokenLoss (TokenLoss.unmasked(values))"
    shape = inputs.logprobs.shape
    for name in ("values", "masked_low", "masked_high"):
        tensor = getattr(result, name)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            found = list(getattr(tensor, "shape", ())) or type(tensor).__name__
            return f"returned {name} of {found}: one number per token is wanted, {list(shape)}"
    if result.masked_low.dtype != torch.bool or result.masked_high.dtype != torch.bool:
        return (
            "returned masks that are not torch.bool: use comparisons or TokenLoss.unmasked(values)"
        )
    if (
        inputs.logprobs.requires_grad
        and torch.is_grad_enabled()
        and not result.values.requires_grad
    ):
        return "returned values without gradient: compute them from inputs.logprobs, not detached"
    if _finite(result.values):
        return None
    if not _finite(inputs.logprobs, inputs.behaviour, inputs.advantages):
        return None  # not its fault, and the learner skips a step that is not finite
    count = int((~result.values.detach().isfinite()).sum())
    return f"returned {count} values that are not finite from finite inputs: clamp log ratios"


def _finite(*tensors: torch.Tensor) -> bool:
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)


Formula = Callable[[TokenInputs], TokenLoss]


def formula(config: LossConfig) -> Formula:
    """The loss per token that `config` names, with its reference term and without what it rejects.

    Raises UsageError if a custom loss cannot be had: ask for it once before the first step.
    """
    found = _by_name(config)

    def with_the_rest(inputs: TokenInputs) -> TokenLoss:
        token_loss = found(inputs)
        if config.ref_kl_tau:
            term = config.ref_kl_tau * reference_term(config, inputs)
            token_loss = replace(token_loss, values=token_loss.values + term)
        if config.rejection == "none":
            return token_loss
        low, high = rejected(config, inputs)
        return TokenLoss(
            token_loss.values.masked_fill(low | high, 0.0),
            token_loss.masked_low | low,
            token_loss.masked_high | high,
        )

    return with_the_rest


def _by_name(config: LossConfig) -> Formula:
    match config.type:
        case "dppo_kl":
            named = dppo_kl
        case "ipo":
            named = ipo
        case "grpo_two_sided":
            named = grpo_two_sided
        case "gspo":
            named = gspo
        case "reinforce":
            named = reinforce
        case "reverse_kl":
            named = reverse_kl
        case "ce":
            named = negative_log_likelihood
        case "custom":
            return load_custom(config.custom, config.custom_args)
    return partial(named, config)


def policy_loss(
    config: LossConfig, inputs: TokenInputs, tokens: int, echo_tokens: int = 0
) -> tuple[Tensor, LossSums]:
    """Loss of these tokens as their share of a step of `tokens` drawn and `echo_tokens` observed ones over all
    ranks.

    Returns the scalar to call backward() on and the detached sums for the metrics. Sequences are whole:
    all trained tokens of one are in `inputs` (but under context parallelism, where gspo is refused). A rank
    without tokens gets 0 with a gradient of 0, so that its backward() takes part in the others' collectives.
    A number that is not finite makes the loss so: nothing is repaired here, the caller skips such a step.

    Raises ValueError for columns that do not agree, a count that is too small, a reference or bounds that are
    missing; UsageError for a custom loss (load_custom).
    """
    _check(inputs)
    drawn = inputs.drawn()
    _check_count(drawn, tokens)
    if config.needs_reference and inputs.reference is None:
        raise ValueError(
            f"loss {config.type!r} with ref_kl_tau {config.ref_kl_tau:g} compares with a reference policy: "
            "give TokenInputs.reference"
        )
    if config.rejection == "second_moment":
        raise ValueError("its bounds are those of a whole step: ask bound_by_second_moment() first")
    loss, sums = _share(formula(config), drawn, tokens, sampled=True)
    if inputs.echo is not None:
        observed, more = echo(config, inputs, echo_tokens)
        loss = loss + observed
        sums.add(more)
    return loss, sums


def cross_entropy(inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """-sum(log pi) / tokens, where tokens were not sampled but given (objective "ce").

    Sampler, advantages and reference are not read and nothing is reported of them. Like policy_loss() else.
    """
    _check(inputs)
    _check_count(inputs, tokens)
    nll = partial(negative_log_likelihood, LossConfig(type="ce"))
    return _share(nll, inputs, tokens, sampled=False)


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


def _share(
    loss_of: Formula, inputs: TokenInputs, tokens: int, *, sampled: bool
) -> tuple[Tensor, LossSums]:
    if not inputs.logprobs.numel():
        return inputs.logprobs.sum(), LossSums()  # 0, and still a function of the weights
    token_loss = loss_of(inputs)
    return token_loss.values.sum() / tokens, _measure(inputs, token_loss, sampled)


def _check(inputs: TokenInputs) -> None:
    shape = inputs.logprobs.shape
    columns = [inputs.behaviour, inputs.advantages, inputs.entropy, inputs.sequences]
    optional = (inputs.reference, inputs.echo, inputs.given)
    columns += [one for one in optional if one is not None]
    if len(shape) != 1 or any(column.shape != shape for column in columns):
        found = [list(column.shape) for column in (inputs.logprobs, *columns)]
        raise ValueError(f"columns must be flat and of one length, one entry per token: {found}")


def _check_count(inputs: TokenInputs, tokens: int) -> None:
    if tokens < inputs.logprobs.numel():
        raise ValueError("tokens counts the whole step: it cannot be less than this part of it")


@torch.no_grad()
def _measure(inputs: TokenInputs, token_loss: TokenLoss, sampled: bool) -> LossSums:
    """The figures of one micro-batch, brought to the host at once."""
    everywhere = torch.ones_like(token_loss.values, dtype=torch.bool)
    figures = {
        "loss/mean": (token_loss.values, everywhere),
        "entropy/all/mean": (inputs.entropy, everywhere),
    }
    if sampled:
        figures |= _of_sampler(inputs, token_loss, everywhere)
    if sampled and inputs.reference is not None:
        figures["ref_kl/all/mean"] = (_k3(inputs.reference_gap), everywhere)
    peaks = [peak for peak in PEAKS if mean_of(peak) in figures]
    found = torch.stack(
        [values.double().masked_fill(~where, 0.0).sum() for values, where in figures.values()]
        + [where.sum().double() for _, where in figures.values()]
        + [figures[mean_of(peak)][0].max().double() for peak in peaks]
    ).tolist()
    n = len(figures)
    counts = dict(zip(figures, found[n : 2 * n], strict=True))
    sums = {name: value for name, value in zip(figures, found[:n], strict=True) if counts[name]}
    return LossSums(
        sums,
        {name: count for name, count in counts.items() if count},
        dict(zip(peaks, found[2 * n :], strict=True)),
    )


def _of_sampler(
    inputs: TokenInputs, token_loss: TokenLoss, everywhere: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Comparisons of trainer and sampler: (values, mask of tokens) by name.

    mismatch_kl estimates KL(mu || pi) from tokens that mu drew.
    """
    mismatch = _k3(inputs.log_ratio)
    masked = token_loss.masked_low | token_loss.masked_high
    return {
        "mismatch_kl/all/mean": (mismatch, everywhere),
        "importance_ratio/mean": (inputs.log_ratio.exp(), everywhere),
        "is_masked/mean": (masked, everywhere),
        "is_masked_low/mean": (token_loss.masked_low, everywhere),
        "is_masked_high/mean": (token_loss.masked_high, everywhere),
        "masked_mismatch_kl/mean": (mismatch, masked),
        "unmasked_mismatch_kl/mean": (mismatch, ~masked),
    }


def _k3(log_ratio: Tensor) -> Tensor:
    """r - log r - 1: a KL from samples, without bias and never negative."""
    return log_ratio.exp() - log_ratio - 1
