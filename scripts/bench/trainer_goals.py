"""What the rows of the trainer's table have to reach."""

from typing import Any

SCALING = {2: 1.85, 4: 3.5, 8: 6.8}
"""Least speed of so many GPUs, each with as many tokens as the one GPU that they are compared with."""
KEPT_WHOLE = "weights kept whole"
PACKED = "packed, 16 sequences"
RATIOS = [
    ("ours / tuned plain loop, 16,384", "none", "plain loop, tuned", 1.05),
    ("16 x 1,024: FlashAttention-4 / torch's", PACKED, f"{PACKED}, torch's flash kernel", 1.25),
]


def judge(rows: list[dict[str, Any]], apart: float | None, *, cuda: bool) -> list[dict[str, Any]]:
    """The goals that these rows can say something of."""
    by = {(one["row"], one["tokens"], one["ranks"]): one for one in rows if "failed" not in one}
    goals: list[dict[str, Any]] = []

    def goal(
        name: str, value: float | None, bound: float, unit: str, *, most: bool = False
    ) -> None:
        if value is not None:
            ok = value <= bound if most else value >= bound
            goals.append({"name": name, "value": value, "goal": bound, "unit": unit, "ok": ok})

    def figure(row: str, tokens: int, name: str, ranks: int = 1) -> float | None:
        return by.get((row, tokens, ranks), {}).get(name)

    if cuda:
        goal("RL 16,384, no recompute", figure("none", 16384, "tokens_per_s"), 42e3, "tok/s")
        goal("RL 16,384, no recompute", figure("none", 16384, "mfu"), 39, "% MFU")
        goal(
            "RL 16,384, full recompute",
            figure("full recompute", 16384, "tokens_per_s"),
            33e3,
            "tok/s",
        )
        best = [one["mfu"] for key, one in by.items() if key[1] == 65536 and "plain" not in key[0]]
        goal("RL 65,536, best row", max(best, default=None), 54, "% MFU")
        goal("SFT 16,384", figure("sft", 16384, "mfu"), 42, "% MFU")
        goal(
            "outside forward, backward, optimizer",
            _percent(figure("none", 16384, "overhead")),
            5,
            "%",
            most=True,
        )
        for name, ours, other, bound in RATIOS:
            one, two = (figure(row, 16384, "tokens_per_s") for row in (ours, other))
            if one and two:
                goal(name, one / two, bound, "x")
    for (name, tokens, ranks), many in by.items() if cuda else ():
        one = figure("none" if name == KEPT_WHOLE else name, tokens, "tokens_per_s")
        if one and ranks in SCALING:
            title = f"{ranks} GPUs / 1, weak scaling, {name}, {tokens:,}"
            goal(title, many["tokens_per_s"] / one, SCALING[ranks], "x")
    if apart is not None:
        # bf16 keeps 8 bits: a logit of about 4 is known to 1/64, and many differences add up
        goal("packed and alone differ by", apart, 0.2 if cuda else 1e-4, "nats", most=True)
    return goals


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
