"""Closed forms of the losses in numpy, and tokens to test them on, in one or several processes.

Values and slopes are float64 and per token, not yet divided. Tokens come in whole sequences of unequal lengths;
share() deals these to ranks, and a rank may get none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from primerl.node.config.training import LossConfig
from primerl.node.training.losses import LossSums, TokenInputs

Column = NDArray[np.float64]
LENGTHS = (3, 1, 5, 2, 4)
"""Of the sequences: 15 tokens."""


@dataclass(frozen=True)
class Tokens:
    """Columns as the trainer gets them; `sequence` counts over the whole step."""

    pi: Column
    mu: Column
    advantage: Column
    reference: Column
    sequence: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.pi)

    def of(self, sequences: Sequence[int]) -> "Tokens":
        """Select the tokens of some sequences, in order."""
        own = np.isin(self.sequence, sequences)
        return Tokens(
            pi=self.pi[own],
            mu=self.mu[own],
            advantage=self.advantage[own],
            reference=self.reference[own],
            sequence=self.sequence[own],
        )

    def inputs(
        self, logprobs: torch.Tensor | None = None, *, reference: bool = True
    ) -> TokenInputs:
        """Make a loss's inputs, float64; `logprobs` replaces log pi if given."""
        own = torch.from_numpy(np.log(self.pi)).requires_grad_() if logprobs is None else logprobs
        _, local = np.unique(self.sequence, return_inverse=True)
        return TokenInputs(
            logprobs=own,
            behaviour=torch.from_numpy(np.log(self.mu)),
            advantages=torch.from_numpy(self.advantage.copy()),
            entropy=torch.from_numpy(-np.log(self.pi)),
            sequences=torch.from_numpy(local.astype(np.int64)),
            reference=torch.from_numpy(np.log(self.reference)) if reference else None,
        )


ClosedForm = Callable[[Tokens], tuple[Column, Column]]
"""(loss per token, slope of the sum of all losses by each token's log pi)."""


@dataclass(frozen=True)
class Case:
    """A loss by name, and its expected values."""

    name: str
    config: LossConfig
    expected: ClosedForm


def tokens(seed: int = 90) -> Tokens:
    """Probabilities that moved a little and a lot, both ways; one advantage per sequence, both signs, one 0."""
    rng = np.random.default_rng(seed)
    sequence = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    mu = rng.uniform(0.05, 0.9, len(sequence))
    shift = np.where(rng.random(len(sequence)) < 0.5, 0.02, 1.2)
    pi = np.clip(mu * np.exp(rng.normal(0.0, 1.0, len(sequence)) * shift), 0.01, 0.98)
    reference = rng.uniform(0.05, 0.9, len(sequence))
    advantage = np.array([1.0, -0.7, -1.3, 0.0, 0.4])[sequence]
    return Tokens(pi, mu, advantage, reference, sequence)


def share(rank: int, ranks: int) -> list[int]:
    """The sequences of a rank; the counts of their tokens differ, and with more than four one has none."""
    if ranks == 1:
        return list(range(len(LENGTHS)))
    return [[0, 1, 4], [2], [3]][rank] if rank < 3 else []


def exchange(ranks: Sequence[LossSums]) -> list[LossSums]:
    """Return reduce()'s result on each rank; ranks with different sizes fail as collectives do."""
    sent: list[tuple[list[float], list[float]]] = []
    for one in ranks:
        log: list[list[float]] = []

        def note(values: list[float], log: list[list[float]] = log) -> list[float]:
            log.append(values)
            return values

        one.reduce(note, note)
        sent.append((log[0], log[1]))
    added = [sum(column) for column in zip(*(one[0] for one in sent), strict=True)]
    highest = [max(column) for column in zip(*(one[1] for one in sent), strict=True)]
    return [one.reduce(lambda _: list(added), lambda _: list(highest)) for one in ranks]


def _pull(given: Tokens, tau: float) -> tuple[Column, Column]:
    log_ratio = np.log(given.pi / given.mu)
    return tau * log_ratio**2, 2 * tau * log_ratio


def dppo(given: Tokens) -> tuple[Column, Column]:
    """adv_tau 2, kl_tau 0.01, masks 0.2 up and 0.1 down."""
    moved = given.pi - given.mu
    masked = np.where(given.advantage > 0, moved > 0.2, moved < -0.1)
    gain = np.where(masked, 0.0, 2.0 * given.advantage * given.pi / given.mu)
    value, slope = _pull(given, 0.01)
    return value - gain, slope - gain


def ipo(given: Tokens) -> tuple[Column, Column]:
    """adv_tau 1, kl_tau 0.02, threshold 0.1."""
    masked = np.abs(given.pi - given.mu) > 0.1
    gain = np.where(masked, 0.0, given.advantage * given.pi / given.mu)
    value, slope = _pull(given, 0.02)
    return value - gain, slope - gain


def _clip(
    ratio: Column, advantage: Column, low: float, high: float, cap: float
) -> tuple[Column, Column]:
    """(loss, its slope by log ratio) of the two-sided clip, case by case."""
    rises = (advantage > 0) & (ratio <= high)
    falls = (advantage < 0) & (ratio >= low) & (ratio <= cap)
    at = np.where(advantage > 0, np.minimum(ratio, high), np.clip(ratio, low, cap))
    return -at * advantage, np.where(rises | falls, -ratio * advantage, 0.0)


def two_sided(given: Tokens) -> tuple[Column, Column]:
    """clip 0.2 down, 0.28 up, cap 2."""
    return _clip(given.pi / given.mu, given.advantage, 0.8, 1.28, 2.0)


def gspo(given: Tokens) -> tuple[Column, Column]:
    """clip 0.1 down, 0.15 up, cap 2."""
    value, slope = np.empty(len(given)), np.empty(len(given))
    for one in np.unique(given.sequence):
        own = given.sequence == one
        ratio = np.prod(given.pi[own] / given.mu[own]) ** (1 / own.sum())
        ratios = np.full(int(own.sum()), ratio)
        value[own], by_ratio = _clip(ratios, given.advantage[own], 0.9, 1.15, 2.0)
        slope[own] = by_ratio.sum() / own.sum()
    return value, slope


def _by_sequence(given: Tokens) -> tuple[Column, Column]:
    """The product of a token's sequence's ratios, and their geometric mean."""
    product, mean = np.empty(len(given)), np.empty(len(given))
    for one in np.unique(given.sequence):
        own = given.sequence == one
        product[own] = np.prod(given.pi[own] / given.mu[own])
        mean[own] = product[own] ** (1 / own.sum())
    return product, mean


def _policy_gradient(given: Tokens, weight: Column) -> tuple[Column, Column]:
    """kl_tau 0.01, adv_tau 2."""
    value, slope = _pull(given, 0.01)
    return value - 2 * weight * given.advantage * np.log(
        given.pi
    ), slope - 2 * weight * given.advantage


def truncated(given: Tokens) -> tuple[Column, Column]:
    """Weights of at most 1.1."""
    return _policy_gradient(given, np.minimum(given.pi / given.mu, 1.1))


def by_sequence(given: Tokens) -> tuple[Column, Column]:
    """Weights of 0.5 to 1.2."""
    return _policy_gradient(given, np.clip(_by_sequence(given)[0], 0.5, 1.2))


def unweighted(given: Tokens) -> tuple[Column, Column]:
    return _policy_gradient(given, np.ones(len(given)))


def masked_by_token(given: Tokens) -> tuple[Column, Column]:
    """Weights are ratios of 0.7 to 1.3, others are left out."""
    ratio = given.pi / given.mu
    value, slope = _policy_gradient(given, ratio)
    kept = (ratio >= 0.7) & (ratio <= 1.3)
    return np.where(kept, value, 0.0), np.where(kept, slope, 0.0)


def cispo(given: Tokens) -> tuple[Column, Column]:
    """sg(min(r, 1.28)) A log pi (arXiv 2506.13585, equation 4, without a lower bound)."""
    weight = np.minimum(given.pi / given.mu, 1.28)
    return -weight * given.advantage * np.log(given.pi), -weight * given.advantage


def icepop(given: Tokens) -> tuple[Column, Column]:
    """The policy gradient by ratios within 0.5 and 1.5, nothing of others: arXiv 2510.18855, with 1.5 for 5."""
    ratio = given.pi / given.mu
    weight = np.where((ratio >= 0.5) & (ratio <= 1.5), ratio, 0.0)
    return -weight * given.advantage * np.log(given.pi), -weight * given.advantage


def decoupled_ppo(given: Tokens) -> tuple[Column, Column]:
    """Slopes of prox / mu * min(u A, clip(u, 0.8, 1.2) A), u = pi / prox, where prox is pi: arXiv 2505.24298.

    Its value differs from that of the loss here, whose weight has no gradient: values are the loss's.
    """
    weight = given.pi / given.mu
    step = 1e-6
    u = np.exp(np.array([[-step], [step]]))
    surrogate = weight * np.minimum(u * given.advantage, np.clip(u, 0.8, 1.2) * given.advantage)
    slope = -(surrogate[1] - surrogate[0]) / (2 * step)
    return -weight * given.advantage * np.log(given.pi), slope


def masked_by_mean(given: Tokens) -> tuple[Column, Column]:
    """dppo() where the geometric mean is 0.8 to 1.1."""
    value, slope = dppo(given)
    mean = _by_sequence(given)[1]
    kept = (mean >= 0.8) & (mean <= 1.1)
    return np.where(kept, value, 0.0), np.where(kept, slope, 0.0)


def masked_by_product(given: Tokens) -> tuple[Column, Column]:
    """ipo() where the product is 0.6 to 1.5."""
    value, slope = ipo(given)
    product = _by_sequence(given)[0]
    kept = (product >= 0.6) & (product <= 1.5)
    return np.where(kept, value, 0.0), np.where(kept, slope, 0.0)


def _reference(given: Tokens) -> Column:
    gap = np.log(given.reference / given.pi)
    kept = given.pi - given.mu >= -0.2
    return -np.where(kept, gap * given.pi / given.mu, 0.0)


def reverse_kl(given: Tokens) -> tuple[Column, Column]:
    """kl_tau 0.005, mask 0.2."""
    value, slope = _pull(given, 0.005)
    term = _reference(given)
    return value + term, slope + term


def dppo_with_reference(given: Tokens) -> tuple[Column, Column]:
    """dppo() and 0.3 of the reference term."""
    value, slope = dppo(given)
    term = 0.3 * _reference(given)
    return value + term, slope + term


def ce(given: Tokens) -> tuple[Column, Column]:
    """-log pi."""
    return -np.log(given.pi), np.full(len(given), -1.0)


DPPO = LossConfig(type="dppo_kl", adv_tau=2.0, kl_tau=0.01, dppo_mask_low=0.1, dppo_mask_high=0.2)
REINFORCE = LossConfig(type="reinforce", adv_tau=2.0, kl_tau=0.01)
PLAIN = LossConfig(type="reinforce", kl_tau=0.0, importance_max=100.0)
UNMASKED = ("ce", "tis", "sequence tis", "no weights", "cispo", "decoupled ppo")
"""Cases whose loss leaves no token out."""
CASES = [
    Case("dppo_kl", DPPO, dppo),
    Case("ipo", LossConfig(type="ipo", kl_tau=0.02, ipo_threshold=0.1), ipo),
    Case(
        "grpo_two_sided",
        LossConfig(type="grpo_two_sided", clip_low=0.2, clip_high=0.28, clip_ratio_max=2.0),
        two_sided,
    ),
    Case(
        "gspo",
        LossConfig(type="gspo", clip_low=0.1, clip_high=0.15, clip_ratio_max=2.0),
        gspo,
    ),
    Case("reverse_kl", LossConfig(type="reverse_kl", kl_tau=0.005), reverse_kl),
    Case(
        "dppo_kl+ref",
        DPPO.model_copy(update={"ref_kl_tau": 0.3}),
        dppo_with_reference,
    ),
    Case("tis", REINFORCE.model_copy(update={"importance_max": 1.1}), truncated),
    Case(
        "sequence tis",
        REINFORCE.model_copy(
            update={"importance": "sequence", "importance_min": 0.5, "importance_max": 1.2}
        ),
        by_sequence,
    ),
    Case("no weights", REINFORCE.model_copy(update={"importance": "none"}), unweighted),
    Case(
        "mis",
        REINFORCE.model_copy(
            update={
                "importance_max": 100.0,
                "rejection": "token",
                "rejection_low": 0.7,
                "rejection_high": 1.3,
            }
        ),
        masked_by_token,
    ),
    Case("cispo", PLAIN.model_copy(update={"importance_max": 1.28}), cispo),
    Case(
        "icepop",
        PLAIN.model_copy(
            update={"rejection": "token", "rejection_low": 0.5, "rejection_high": 1.5}
        ),
        icepop,
    ),
    Case("decoupled ppo", PLAIN, decoupled_ppo),
    Case(
        "dppo_kl, geometric mask",
        DPPO.model_copy(
            update={"rejection": "geometric", "rejection_low": 0.8, "rejection_high": 1.1}
        ),
        masked_by_mean,
    ),
    Case(
        "ipo, sequence mask",
        LossConfig(
            type="ipo",
            kl_tau=0.02,
            ipo_threshold=0.1,
            rejection="sequence",
            rejection_low=0.6,
            rejection_high=1.5,
        ),
        masked_by_product,
    ),
    Case("ce", LossConfig(type="ce"), ce),
]
"""Every loss but the custom one."""
