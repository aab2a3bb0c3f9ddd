"""Losses by name, as one rank's share of a step. Imports torch: import this file lazily.

Every loss is a sum divided by the token count of the whole step over all ranks (an argument), so that the
ranks' losses or gradients add up to exactly those of a single rank.
"""

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor

from ..config.training import LossConfig
from ..errors import UsageError

TOKENS = "loss/mean"
"""Metric of every trained token: its count is the number of tokens."""

ECHO = "nll/mean"
"""Metric of the environment's tokens, if they are trained."""

SFT = "sft_loss/mean"
"""Metric of the demonstrations' tokens, if they are trained."""

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
"""All means, in the order in which ranks exchange them. A step may lack some: the sampler's under cross
entropy, the reference's without a reference, those of masked tokens without any."""

PEAKS = ("entropy/all/max", "mismatch_kl/all/max", "importance_ratio/max")
"""Largest values, in the order in which ranks exchange them; all are >= 0."""

Fold = Callable[[list[float]], list[float]]
"""Element-wise reduction of one rank's values over all ranks."""


@dataclass
class LossSums:
    """Sums over tokens and their token counts; add() micro-batches, read() them, reduce() ranks.

    Those of a loss are on its device until read(): the host launches the backward pass without waiting.
    """

    sums: dict[str, float] = field(default_factory=dict[str, float])
    counts: dict[str, float] = field(default_factory=dict[str, float])
    peaks: dict[str, float] = field(default_factory=dict[str, float])
    unread: list[tuple[Tensor, Sequence[str]]] = field(
        default_factory=list[tuple[Tensor, Sequence[str]]]
    )
    """Of each micro-batch its sums, counts and peaks [2 x names + peaks], and the names of the sums."""

    @property
    def tokens(self) -> int:
        """Trained tokens in these sums."""
        return int(self.read().counts.get(TOKENS, 0.0))

    def finite(self, device: torch.device) -> Tensor:
        """Return whether all sums are finite, bool [] on `device`, for which the host does not wait."""
        read = all(map(math.isfinite, self.sums.values()))
        finite = torch.full((), read, dtype=torch.bool, device=device)
        for numbers, names in self.unread:
            sums, counts = numbers[: 2 * len(names)].view(2, -1)
            finite = finite & (sums.isfinite() | (counts == 0)).all()
        return finite

    def read(self) -> Self:
        """Transfer all sums to the host, which waits for the device."""
        unread, self.unread = self.unread, []
        for numbers, names in unread:
            figures, n = numbers.tolist(), len(names)
            counts = {
                name: count for name, count in zip(names, figures[n : 2 * n], strict=True) if count
            }
            sums = {
                name: value
                for name, value in zip(names, figures[:n], strict=True)
                if name in counts
            }
            self.add(
                LossSums(sums, counts, dict(zip(_peaks(names), figures[2 * n :], strict=True)))
            )
        return self

    def add(self, other: "LossSums") -> None:
        """Add the sums of another micro-batch."""
        self.unread += other.unread
        for mine, theirs in ((self.sums, other.sums), (self.counts, other.counts)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value
        for name, value in other.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, 0.0), value)

    def reduce(self, total: Fold, largest: Fold) -> "LossSums":
        """Return the sums over all ranks; `total` adds, `largest` takes the maximum.

        Every rank sends 2 x len(FIGURES) and then len(PEAKS) numbers, even without a token, so that all take
        part in both collectives. Use float64: counts exceed the integers that float32 represents exactly.
        """
        self.read()
        mine = [column.get(name, 0.0) for column in (self.sums, self.counts) for name in FIGURES]
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
        """Return means and largest values by name, and `tokens`; empty for an empty step."""
        if not self.read().counts:
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
    """Return the name of the mean that belongs to a peak."""
    return peak.removesuffix("max") + "mean"


M2_THRESHOLD = 0.04
"""Largest mean of the squared log ratio over the tokens that M2PO keeps: the paper's."""
MAX_LOG_RATIO = 20.0
"""Clamp of log ratios. A ratio beyond e**20 is forged or comes from a broken sampler: the clamp keeps exp()
finite and has gradient 0, so that such a token changes no weight. Honest tokens never come near."""
REFERENCE_MASK_LOW = 0.2
"""How far a token's probability may fall before the term of the reference leaves it out; prime-rl's."""
HALVINGS = 50
"""Bisection steps: they shrink an interval of 800 below the spacing of float32 values near 1e-5."""


@dataclass(frozen=True)
class TokenInputs:
    """N trained tokens, float32, flat: only tokens with a mask. Never written to."""

    logprobs: Tensor
    """log pi: the trainer's, with gradient."""
    behaviour: Tensor
    """log mu: the sampler's."""
    advantages: Tensor
    entropy: Tensor
    """Entropy of the trainer's distribution, nats, without gradient; only reported."""
    sequences: Tensor
    """int64: index of each token's sequence within the micro-batch."""
    reference: Tensor | None = None
    """Logprobs of a reference policy, without gradient; only with LossConfig.needs_reference."""
    echo: Tensor | None = None
    """bool: the environment's tokens, read only by echo(); None if there are none."""
    given: Tensor | None = None
    """bool: the demonstrations' tokens, read only by sft(); None if there are none."""

    def of(self, where: Tensor) -> "TokenInputs":
        """Return the tokens `where`, bool [N], of all three kinds."""
        echo, given = (
            None if column is None else column[where] for column in (self.echo, self.given)
        )
        return replace(self._only(where), echo=echo, given=given)

    def drawn(self) -> "TokenInputs":
        """Return the tokens that the model sampled: the input of losses."""
        others = [flags for flags in (self.echo, self.given) if flags is not None]
        return self._only(~torch.stack(others).any(0)) if others else self

    def observed(self) -> "TokenInputs":
        """Return the environment's tokens."""
        return self._only(self._none if self.echo is None else self.echo)

    def demonstrated(self) -> "TokenInputs":
        """Return the demonstrations' tokens."""
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
    """Loss per token [N], not yet normalised, and the tokens that the trust region masks."""

    values: Tensor
    masked_low: Tensor
    """bool [N]: tokens whose probability or ratio fell too far."""
    masked_high: Tensor

    @classmethod
    def unmasked(cls, values: Tensor) -> "TokenLoss":
        """Make a loss without a trust region."""
        nothing = torch.zeros_like(values, dtype=torch.bool)
        return cls(values, nothing, nothing)


def dppo_kl(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Compute DPPO's loss with a squared-log-ratio pull: prime-rl's default.

    `trainer/rl/loss.py: default_loss_fn`; DPPO: arXiv 2602.04879, the pull: arXiv 2602.02276.

        masked = d > dppo_mask_high if A > 0 else d < -dppo_mask_low
        loss   = -[not masked] * adv_tau * A * r + kl_tau * (log r)**2

    The pull acts on masked tokens too; r is not clipped (MAX_LOG_RATIO guards it).
    """
    high = (inputs.advantages > 0) & (inputs.moved > config.dppo_mask_high)
    low = (inputs.advantages <= 0) & (inputs.moved < -config.dppo_mask_low)
    return _masked_gain(config, inputs, low, high)


def ipo(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Compute DPPO's loss with a symmetric trust region (prime-rl's `ipo_loss_fn`).

    The region does not depend on the sign of A:

        masked = |d| > ipo_threshold
        loss   = -[not masked] * adv_tau * A * r + kl_tau * (log r)**2
    """
    high = inputs.moved > config.ipo_threshold
    low = inputs.moved < -config.ipo_threshold
    return _masked_gain(config, inputs, low, high)


def grpo_two_sided(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Compute clipped GRPO with a ratio that is also bounded for negative advantages.

    INTELLECT-2, arXiv 2505.07291. With c1 = min(r, clip_ratio_max), c2 = clamp(c1, 1 - clip_low, 1 +
    clip_high):

        loss = max(-c1 * A, -c2 * A)

    Plain GRPO leaves r unbounded for A < 0. clip_high > clip_low is DAPO's asymmetric clip.
    """
    low, high = config.clips
    return _clipped(inputs.log_ratio.exp(), inputs.advantages, low, high, config.clip_ratio_max)


def gspo(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Compute the loss with one clipped ratio for a whole sequence (GSPO, arXiv 2507.18071).

    With s = exp(mean of log r over the sequence's trained tokens), the length-normalised ratio of the
    sequence's likelihoods, c1 = min(s, clip_ratio_max), c2 = clamp(c1, 1 - clip_low, 1 +
    clip_high):

        loss = max(-c1 * A, -c2 * A)   for each of its tokens

    The gradient flows through the mean: inside the clip every token of the sequence gets -A * s. Two things
    differ from the paper: a sequence is weighted by its token count, as in every loss here, and s is capped for
    A < 0 as in grpo_two_sided.
    """
    ratio = _log_ratio_of(inputs, "geometric").exp()
    low, high = config.clips
    return _clipped(ratio, inputs.advantages, low, high, config.clip_ratio_max)


def reinforce(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Compute the policy gradient with importance weights R of the token or its sequence.

    R is the ratio of the token or the product of ratios over its sequence.

        w    = clamp(R, importance_min, importance_max), without gradient; 1 with importance "none"
        loss = -adv_tau * w * A * log pi + kl_tau * (log r)**2

    With only an upper bound this is truncated importance sampling (TIS, Ionides 2008; between sampler and
    trainer: Yao et al. 2025, verl's `rollout_is`). With an upper bound close to 1 it is CISPO (MiniMax-M1,
    arXiv 2506.13585), whose formula also has a lower bound that the paper does not use. A batch is used for one
    step only, so PPO's old policy is pi itself; decoupled PPO (AReaL, arXiv 2505.24298) with pi as its proximal
    policy is therefore this loss, too. A token whose own ratio is at the guard (MAX_LOG_RATIO) has no weight; a
    product beyond the guard, as in long sequences, is clamped like any other.
    """
    lied = inputs.log_ratio.detach().abs() >= MAX_LOG_RATIO
    gain = (config.adv_tau * inputs.advantages * inputs.logprobs).masked_fill(lied, 0.0)
    if config.importance != "none":
        ratio = _log_ratio_of(inputs, config.importance).detach().exp()
        gain = gain * ratio.clamp(config.importance_min, config.importance_max)
    return TokenLoss.unmasked(_pull(config, inputs) - gain)


def rejected(config: LossConfig, inputs: TokenInputs) -> tuple[Tensor, Tensor]:
    """Return the tokens masked by `rejection`, bool [N] each: below and above its bounds.

    By token this is masked importance sampling (MIS, verl's `rollout_rs`), and with bounds of 0.5 and 5 IcePop
    (Ring-1T, arXiv 2510.18855). By the geometric mean of a sequence it is the mask of verl and SkyRL for long
    replies, for which the product of ratios is uninformative. For "second_moment" see bound_by_second_moment().
    """
    log_ratio = _log_ratio_of(inputs, config.rejection).detach()
    low = math.log(config.rejection_low) if config.rejection_low else -math.inf
    return log_ratio < low, log_ratio > math.log(config.rejection_high)


def bound_by_second_moment(
    config: LossConfig, squares: Tensor, total: Fold, largest: Fold
) -> LossConfig:
    """Turn rejection "second_moment" into bounds of the token's ratio for one step. Collective.

    `squares` are (log r)**2 of this rank's tokens of the step. M2PO (arXiv 2510.01161, AReaL's `m2_threshold`)
    masks the tokens with the largest values until the mean of the rest is at most M2_THRESHOLD. The mean rises
    with the bound, so bisection finds the bound without exchanging tokens; it is set halfway between the last
    kept and the first masked token.
    """
    squares = squares.detach().double()
    low, high = 0.0, MAX_LOG_RATIO**2 * 2
    for _ in range(HALVINGS):
        bound = (low + high) / 2
        inside_bound = squares <= bound
        moment, count = total([float(squares[inside_bound].sum()), float(inside_bound.sum())])
        low, high = (bound, high) if moment <= M2_THRESHOLD * count else (low, bound)
    inside_bound = squares <= low
    edges = [float(squares[inside_bound].max()) if bool(inside_bound.any()) else 0.0]
    edges.append(-float(squares[~inside_bound].min()) if not bool(inside_bound.all()) else -high)
    inside, outside = largest(edges)
    log_ratio = math.sqrt((inside - outside) / 2)
    bounds = {"rejection_low": math.exp(-log_ratio), "rejection_high": math.exp(log_ratio)}
    return config.model_copy(update={"rejection": "token", **bounds})


def _log_ratio_of(inputs: TokenInputs, level: str) -> Tensor:
    """Return log r at a level: the token's, the sum over its sequence (clamped), or the mean."""
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
    """Compute KL(pi || reference) as a policy gradient: prime-rl's `ref_kl_loss_fn`.

        masked = d < -0.2
        loss   = -[not masked] * (log reference - log pi) * r + kl_tau * (log r)**2

    On-policy distillation. The gap to the reference has no gradient: it replaces A, which is not read. The
    reference is the model that the run began with, the teacher named by `reference`, or the policy itself; with
    a `hint` it reads a demonstration first (OPSD, arXiv 2601.18734, 2601.19897; prime-rl's `opsd.py`).
    """
    low = inputs.moved < -REFERENCE_MASK_LOW
    values = _pull(config, inputs) + reference_term(config, inputs)
    return TokenLoss(values, masked_low=low, masked_high=torch.zeros_like(low))


def reference_term(config: LossConfig, inputs: TokenInputs) -> Tensor:
    """Compute reverse_kl without the pull, per token.

    Other losses add ref_kl_tau times this term. Raises ValueError without a reference.
    """
    low = inputs.moved < -REFERENCE_MASK_LOW
    return -(inputs.reference_gap * inputs.log_ratio.exp()).masked_fill(low, 0.0)


def echo(config: LossConfig, inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """Compute ECHO: cross entropy of the environment's tokens after the first reply.

    arXiv 2605.24517, as in prime-rl:

        loss = echo_alpha * sum(-log pi) / tokens

    over the inputs' observed tokens; `tokens` is their own number in the step, over all ranks, so that observed
    and sampled tokens do not dilute each other. Returns the loss as policy_loss() does, with the unweighted
    sum.
    """
    return _weighted_nll(config.echo_alpha, inputs.observed(), tokens, ECHO)


def sft(weight: float, inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """Compute the cross entropy of demonstrations that are trained beside rollouts.

    PPO-ptx of InstructGPT (arXiv 2203.02155, equation 2), with demonstrations in place of pretraining text and
    per token:

        loss = weight * sum(-log pi) / tokens

    over the inputs' demonstration tokens; `tokens` is their own number in the step, over all ranks. Returns the
    loss and sums as echo() does.
    """
    return _weighted_nll(weight, inputs.demonstrated(), tokens, SFT)


def _weighted_nll(
    weight: float, inputs: TokenInputs, tokens: int, figure: str
) -> tuple[Tensor, LossSums]:
    values = -inputs.logprobs
    if not values.numel():
        return values.sum(), LossSums()
    numbers = values.detach().double()
    sums = LossSums(
        unread=[(torch.stack([numbers.sum(), torch.ones_like(numbers).sum()]), [figure])]
    )
    return weight * values.sum() / tokens, sums


def negative_log_likelihood(config: LossConfig, inputs: TokenInputs) -> TokenLoss:
    """Compute the cross entropy -log pi. Reads neither sampler nor advantage."""
    return TokenLoss.unmasked(-inputs.logprobs)


def _masked_gain(config: LossConfig, inputs: TokenInputs, low: Tensor, high: Tensor) -> TokenLoss:
    gain = config.adv_tau * inputs.advantages * inputs.log_ratio.exp()
    values = _pull(config, inputs) - gain.masked_fill(low | high, 0.0)
    return TokenLoss(values, masked_low=low, masked_high=high)


def _pull(config: LossConfig, inputs: TokenInputs) -> Tensor:
    """Return the pull towards the sampler: kl_tau * (log r)**2, on every token."""
    return config.kl_tau * inputs.log_ratio.square()


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, cap: float) -> TokenLoss:
    """Compute max(-c1 A, -c2 A); a token is masked where the gradient is 0 although A is not."""
    bounded = ratio.clamp(max=cap)
    clipped = bounded.clamp(1 - low, 1 + high)
    values = torch.maximum(-bounded * advantages, -clipped * advantages)
    fixed = ratio.detach()
    fell = (advantages < 0) & (fixed < 1 - low)
    runaway = (advantages < 0) & (fixed > cap)
    return TokenLoss(values, fell, ((advantages > 0) & (fixed > 1 + high)) | runaway)


def load_custom(path: str, arguments: dict[str, Any]) -> Callable[[TokenInputs], TokenLoss]:
    """Load the function named by `path` ("package.module:function"), with `arguments` bound.

        function(inputs: TokenInputs, **arguments) -> TokenLoss

    Its values [N] need the gradient of inputs.logprobs. It is not called without tokens. Raises UsageError if
    it cannot be loaded, and in a call whose result does not fit.
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
        module = import_module(name)  # imported once: later calls find it in sys.modules
    except (ImportError, SyntaxError) as error:
        raise UsageError(
            f"training.loss.custom = {path!r} does not import ({error}): install the package, or name "
            "its folder in PYTHONPATH of this node and of its ranks"
        ) from error
    function = getattr(module, attribute, None)
    if function is None:
        raise UsageError(f"training.loss.custom = {path!r}: {name} has no {attribute!r}; define it")
    if not callable(function):
        raise UsageError(f"training.loss.custom = {path!r} is not a function: name one")
    return function


def _fault(result: object, inputs: TokenInputs) -> str | None:
    """Return the error in a custom loss's result, or None."""
    if not isinstance(result, TokenLoss):
        return f"returned {type(result).__name__}: return a TokenLoss (TokenLoss.unmasked(values))"
    shape = inputs.logprobs.shape
    for name in ("values", "masked_low", "masked_high"):
        tensor = getattr(result, name)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            shown = list(getattr(tensor, "shape", ())) or type(tensor).__name__
            return f"returned {name} of {shown}: one number per token is wanted, {list(shape)}"
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
        return None  # not the loss's fault; the learner skips a step that is not finite
    count = int((~result.values.detach().isfinite()).sum())
    return f"returned {count} values that are not finite from finite inputs: clamp log ratios"


def _finite(*tensors: torch.Tensor) -> bool:
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)


Formula = Callable[[TokenInputs], TokenLoss]


def formula(config: LossConfig) -> Formula:
    """Return the loss per token named by `config`, with its reference term and rejection mask.

    Raises UsageError if a custom loss cannot be loaded: call it once before the first step.
    """
    loss = _named_loss(config)

    def with_the_rest(inputs: TokenInputs) -> TokenLoss:
        token_loss = loss(inputs)
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


def _named_loss(config: LossConfig) -> Formula:
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
    """Compute the loss of these tokens as their share of a step over all ranks.

    The step has `tokens` sampled and `echo_tokens` observed tokens. Returns the scalar for backward() and the
    detached sums for the metrics. Sequences are whole: all trained tokens of a sequence are in `inputs` (except
    under context parallelism, where gspo is refused). A rank without tokens gets 0 with a gradient of 0, so
    that its backward() takes part in the others' collectives. An input that is not finite makes the loss not
    finite: nothing is repaired here, the caller skips such a step.

    Raises ValueError for columns that do not agree, a count that is too small, a missing reference or missing
    bounds; UsageError for a custom loss (load_custom).
    """
    _check(inputs)
    sampled = inputs.drawn()
    _check_count(sampled, tokens)
    if config.needs_reference and inputs.reference is None:
        raise ValueError(
            f"loss {config.type!r} with ref_kl_tau {config.ref_kl_tau:g} compares with a reference policy: "
            "give TokenInputs.reference"
        )
    if config.rejection == "second_moment":
        raise ValueError("its bounds are those of a whole step: ask bound_by_second_moment() first")
    loss, sums = _share(formula(config), sampled, tokens, sampled=True)
    if inputs.echo is not None:
        observed, more = echo(config, inputs, echo_tokens)
        loss = loss + observed
        sums.add(more)
    return loss, sums


def cross_entropy(inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """Compute -sum(log pi) / tokens of tokens that were given, not sampled (objective "ce").

    Does not read sampler, advantages and reference, nor report metrics of them; otherwise like policy_loss().
    """
    _check(inputs)
    _check_count(inputs, tokens)
    nll = partial(negative_log_likelihood, LossConfig(type="ce"))
    return _share(nll, inputs, tokens, sampled=False)


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
    columns += [column for column in optional if column is not None]
    if len(shape) != 1 or any(column.shape != shape for column in columns):
        shapes = [list(column.shape) for column in (inputs.logprobs, *columns)]
        raise ValueError(f"columns must be flat and of one length, one entry per token: {shapes}")


def _check_count(inputs: TokenInputs, tokens: int) -> None:
    if tokens < inputs.logprobs.numel():
        raise ValueError("tokens counts the whole step: it cannot be less than this part of it")


@torch.no_grad()
def _measure(inputs: TokenInputs, token_loss: TokenLoss, sampled: bool) -> LossSums:
    """Compute the metrics of one micro-batch, without a transfer to the host."""
    everywhere = torch.ones_like(token_loss.values, dtype=torch.bool)
    figures = {
        "loss/mean": (token_loss.values, everywhere),
        "entropy/all/mean": (inputs.entropy, everywhere),
    }
    if sampled:
        figures |= _of_sampler(inputs, token_loss, everywhere)
    if sampled and inputs.reference is not None:
        figures["ref_kl/all/mean"] = (_k3(inputs.reference_gap), everywhere)
    numbers = torch.stack(
        [values.double().masked_fill(~where, 0.0).sum() for values, where in figures.values()]
        + [where.sum().double() for _, where in figures.values()]
        + [figures[mean_of(peak)][0].max().double() for peak in _peaks(figures)]
    )
    return LossSums(unread=[(numbers, list(figures))])


def _peaks(names: Collection[str]) -> list[str]:
    """Return the largest values that belong to these means."""
    return [peak for peak in PEAKS if mean_of(peak) in names]


def _of_sampler(
    inputs: TokenInputs, token_loss: TokenLoss, everywhere: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the comparisons of trainer and sampler: (values, mask of tokens) by name.

    mismatch_kl estimates KL(mu || pi) from tokens sampled by mu.
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
    """Return r - log r - 1: an unbiased KL estimate from samples that is never negative."""
    return log_ratio.exp() - log_ratio - 1
