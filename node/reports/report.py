"""Draw the reward curve of a finished run: a picture, and the same curve for a terminal.

Reads only the summary (see docs for its keys); a key that is absent costs that part of the picture.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]

INK, FAINT, LINE, ACCENT = "#22272e", "#c9d1d9", "#1f6feb", "#d9480f"
SMOOTHING = 0.85
"""Weight of the past in the drawn moving average."""


def write_picture(summary: Mapping[str, Any], path: Path) -> None:
    """Draw `reward_curve` [[step, reward]] to a PNG.

    Exact match before and after is at its ends if the run evaluated, the staleness below it if the summary has
    `staleness_curve` [[step, versions]]. Raises OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stale = points(summary.get("staleness_curve"))
    figure = Figure(figsize=(9, 5.4 if stale else 4.6), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    axes = _axes(figure, two=bool(stale))
    _draw_reward(axes[0], summary)
    if stale:
        _draw_staleness(axes[1], stale)
    axes[-1].set_xlabel("optimizer step", color=INK)
    axes[0].set_title(_title(summary), loc="left", color=INK, fontsize=12, y=1.0, pad=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    # fixed margins: for a tight box everything is drawn twice
    figure.subplots_adjust(left=0.09, right=0.98, top=0.92, bottom=0.11)
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def terminal_curve(curve: Points, width: int, height: int) -> str:
    """Draw a curve in characters, `width` x `height` cells, no colours; "" for fewer than two points."""
    curve = [point for point in curve if math.isfinite(point[1])]
    if len(curve) < 2:
        return ""
    import plotext

    # plotext has one global figure: it is cleared before and after.
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(max(width, 24), max(height, 6))
    signal = figure.signal([step for step, _ in curve], [value for _, value in curve])
    signal.lines()
    figure.draw(signal)
    figure.ruler("x").ticks(_whole_steps(curve[0][0], curve[-1][0], max(2, width // 12)))
    figure.label("step", "x")
    text = str(figure.build().string(colorless=True))
    figure.clear()
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


def points(raw: object) -> list[tuple[float, float]]:
    """Read [[step, value], ...] of a summary as pairs; drop values that are not finite."""
    pairs: list[tuple[float, float]] = []
    for step, value in raw if isinstance(raw, list | tuple) else ():
        if value is not None and math.isfinite(value):
            pairs.append((float(step), float(value)))
    return pairs


def smooth(curve: Points) -> list[tuple[float, float]]:
    """Take an exponential moving average, corrected for its empty past (Adam's bias correction)."""
    result: list[tuple[float, float]] = []
    mean = 0.0
    for index, (step, value) in enumerate(curve, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        result.append((step, mean / (1 - SMOOTHING**index)))
    return result


def _whole_steps(first: float, last: float, count: int) -> list[int]:
    """Choose about `count` whole numbers from first to last, both included."""
    return sorted({round(first + (last - first) * i / (count - 1)) for i in range(count)})


def _axes(figure: "Figure", *, two: bool) -> "list[Axes]":
    if two:
        grid = figure.add_gridspec(2, 1, height_ratios=[4, 1], hspace=0.12)
        upper = figure.add_subplot(grid[0])
        axes = [upper, figure.add_subplot(grid[1], sharex=upper)]
        upper.tick_params(labelbottom=False)
    else:
        axes = [figure.add_subplot()]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(FAINT)
        each.tick_params(colors=INK, length=0)
        each.grid(axis="y", color=FAINT, linewidth=0.6, alpha=0.7)
        each.set_axisbelow(True)
    return axes


def _draw_reward(axes: "Axes", summary: Mapping[str, Any]) -> None:
    curve = points(summary.get("reward_curve"))
    axes.set_ylabel("mean reward", color=INK)
    if curve:
        steps, rewards = zip(*curve, strict=True)
        _, means = zip(*smooth(curve), strict=True)
        axes.plot(steps, rewards, color=LINE, linewidth=1, alpha=0.3)
        axes.plot(steps, means, color=LINE, linewidth=2.2, label="mean reward of a batch")
    first = curve[0][0] if curve else 0.0
    last = curve[-1][0] if curve else float(summary.get("steps") or 1)
    for key, step, offset, side in (
        ("exact_match_before", first, (8, -14), "left"),
        ("exact_match_after", last, (-8, 8), "right"),
    ):
        value = summary.get(key)
        if value is None or summary.get("eval_prompts") == 0:
            continue
        label = "exact match on held-out prompts" if side == "left" else None
        axes.plot([step], [value], "o", color=ACCENT, markersize=8, zorder=5, label=label)
        axes.annotate(
            f"{value:.2f}",
            (step, value),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            color=ACCENT,
            fontweight="bold",
        )
    axes.margins(x=0.02, y=0.12)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", frameon=False, labelcolor=INK)


def _draw_staleness(axes: "Axes", curve: Points) -> None:
    steps, values = zip(*curve, strict=True)
    axes.fill_between(steps, values, color=FAINT, step="mid", linewidth=0)
    axes.set_ylabel("staleness", color=INK)
    axes.set_ylim(bottom=0)


def _title(summary: Mapping[str, Any]) -> str:
    parts = [str(summary.get("run") or "run")]
    if summary.get("seed") is not None:
        parts.append(f"seed {summary['seed']}")
    if summary.get("steps") is not None:
        parts.append(f"{summary['steps']} steps")
    if summary.get("accepted") is not None:
        parts.append(f"{summary['accepted']:,} rollouts learned from")
    return "  |  ".join(parts)
