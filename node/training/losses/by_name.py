"""Losses by name, as one rank's share of a step. Imports torch: import this file lazily.

Every loss is a sum divided by the token count of the whole step over all ranks (an argument), so that
adding the ranks' losses or gradients gives exactly what one rank would have computed. The formulas are in
formulas.py.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...config.training import LossConfig
from . import formulas as policy_losses
from .custom import load_custom
from .formulas import TokenInputs, TokenLoss
from .sums import PEAKS, LossSums, mean_of

Formula = Callable[[TokenInputs], TokenLoss]


def formula(config: LossConfig) -> Formula:
    """The loss per token that `config` names, with its reference term.

    Raises UsageError if a custom loss cannot be had: ask for it once before the first step.
    """
    found = _by_name(config)
    if not config.ref_kl_tau:
        return found

    def with_reference(inputs: TokenInputs) -> TokenLoss:
        token_loss = found(inputs)
        term = config.ref_kl_tau * policy_losses.reference_term(config, inputs)
        return replace(token_loss, values=token_loss.values + term)

    return with_reference


def _by_name(config: LossConfig) -> Formula:
    match config.type:
        case "dppo_kl":
            named = policy_losses.dppo_kl
        case "ipo":
            named = policy_losses.ipo
        case "grpo_two_sided":
            named = policy_losses.grpo_two_sided
        case "gspo":
            named = policy_losses.gspo
        case "reverse_kl":
            named = policy_losses.reverse_kl
        case "ce":
            named = policy_losses.negative_log_likelihood
        case "custom":
            return load_custom(config.custom, config.custom_args)
    return partial(named, config)


def policy_loss(config: LossConfig, inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """Loss of these tokens as their share of a step of `tokens` trained tokens over all ranks.

    Returns the scalar to call backward() on and the detached sums for the metrics. Sequences are whole:
    all trained tokens of one are in `inputs` (but under context parallelism, where gspo is refused). A rank
    without tokens gets 0 with a gradient of 0, so that its backward() takes part in the others' collectives.
    A number that is not finite makes the loss so: nothing is repaired here, the caller skips such a step.

    Raises ValueError for columns that do not agree, a count that is too small, or a reference that is
    missing; UsageError for a custom loss (load_custom).
    """
    _check(inputs, tokens)
    if config.needs_reference and inputs.reference is None:
        raise ValueError(
            f"loss {config.type!r} with ref_kl_tau {config.ref_kl_tau:g} compares with a reference policy: "
            "give TokenInputs.reference"
        )
    return _share(formula(config), inputs, tokens, sampled=True)


def cross_entropy(inputs: TokenInputs, tokens: int) -> tuple[Tensor, LossSums]:
    """-sum(log pi) / tokens, where tokens were not sampled but given (objective "ce").

    Sampler, advantages and reference are not read and nothing is reported of them. Like policy_loss() else.
    """
    _check(inputs, tokens)
    nll = partial(policy_losses.negative_log_likelihood, LossConfig(type="ce"))
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


def _check(inputs: TokenInputs, tokens: int) -> None:
    shape = inputs.logprobs.shape
    columns = [inputs.behaviour, inputs.advantages, inputs.entropy, inputs.sequences]
    if inputs.reference is not None:
        columns.append(inputs.reference)
    if len(shape) != 1 or any(column.shape != shape for column in columns):
        found = [list(column.shape) for column in (inputs.logprobs, *columns)]
        raise ValueError(f"columns must be flat and of one length, one entry per token: {found}")
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
    """What compares trainer and sampler: (values, of which tokens) by name.

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
