"""The figures of a loss as sums that add up over micro-batches and ranks. No torch.

A mean is taken once, at the end, from a sum and a count: a mean of means would weigh a small rank's tokens
more. Names are prime-rl's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

TOKENS = "loss/mean"
"""The figure that every trained token has: its count is the number of tokens."""

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
        if not self.tokens:
            return {}
        means = {name: value / self.counts[name] for name, value in self.sums.items()}
        figures = {**self.peaks, "tokens": float(self.tokens)}
        entropy, mismatch = means.get("entropy/all/mean"), means.get("mismatch_kl/all/mean")
        if entropy and mismatch is not None:
            figures["kl_ent_ratio/mean"] = mismatch / entropy
        return means | figures


def _seen(names: tuple[str, ...], counts: list[float]) -> dict[str, float]:
    return {name: count for name, count in zip(names, counts, strict=True) if count}


def mean_of(peak: str) -> str:
    """The figure whose largest value a peak is."""
    return peak.removesuffix("max") + "mean"
