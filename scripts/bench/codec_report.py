"""The table and the goals of codec.py."""

from collections.abc import Sequence
from typing import Any

COLUMNS = (
    ("bytes", "bytes", "{:,}"),
    ("bits/changed", "bits_per_changed", "{:.2f}"),
    ("x smaller", "ratio", "{:.2f}"),
    ("enc GB/s", "encode_gbps", "{:.2f}"),
    ("per cpu-s", "encode_cpu_gbps", "{:.2f}"),
    ("dec GB/s", "decode_gbps", "{:.2f}"),
    ("per cpu-s", "decode_cpu_gbps", "{:.2f}"),
    ("memcpy", "copy_gbps", "{:.2f}"),
    ("enc MiB", "encode_peak_mib", "{:.0f}"),
    ("dec MiB", "decode_peak_mib", "{:.0f}"),
)
MIB = 256
"""What encoding and decoding may take beyond twice the largest tensor."""

Goal = dict[str, Any]


def show(rows: Sequence[Any]) -> None:
    """The formats on one pair, for people."""
    first = rows[0]
    print(
        f"\n{first.pair}: {first.changed:.2%} changed, bound {first.bound_bits:.2f} bits per changed"
        f" weight, largest tensor {first.largest_mib:.0f} MiB"
    )
    print(f"  {'':27}" + "".join(f"{title:>14}" for title, _, _ in COLUMNS))
    for row in rows:
        cells = (f"{form.format(getattr(row, name)):>14}" for _, name, form in COLUMNS)
        print(f"  {row.format:27}" + "".join(cells), flush=True)


def judge(rows: Sequence[Any], threads: int) -> list[Goal]:
    """Every goal with what was reached, printed and returned. Rows come in fives: ours is the first."""
    groups = [rows[at : at + 5] for at in range(0, len(rows), 5)]
    goals: list[Goal] = []

    def add(name: str, value: float, goal: float, unit: str, most: bool) -> None:
        ok = value <= goal if most else value >= goal
        goals.append({"name": name, "value": value, "goal": goal, "unit": unit, "ok": ok})
        sign = "<=" if most else ">="
        print(f"{'ok  ' if ok else 'MISS'} {name}: {value:.3g} {unit} (goal {sign} {goal:g})")

    print()
    for ours, anchor, full, xor, sparse in groups:
        over = 100 * (ours.bits_per_changed / ours.bound_bits - 1)
        add(
            f"{ours.pair}: above the entropy bound",
            over,
            5 if ours.changed < 0.1 else 10,
            "%",
            True,
        )
        if ours.changed < 0.1:
            gain = sparse.bytes / ours.bytes
            add(f"{ours.pair}: smaller than {sparse.format}", gain, 2, "x", False)
        least = min(anchor.bytes, full.bytes, xor.bytes) / ours.bytes
        add(f"{ours.pair}: smaller than xor, full and raw", least, 1, "x", False)
        peak = max(ours.encode_peak_mib, ours.decode_peak_mib)
        add(f"{ours.pair}: peak memory", peak, 2 * ours.largest_mib + MIB, "MiB", True)
    by_share = {group[0].share: group[0] for group in groups}
    add("1.5 %: size", by_share[0.015].bits_per_changed, 9.7, "bits per changed weight", True)
    row = by_share[0.015]
    times = "x memcpy of the same bytes"
    add(f"1.5 %: encode, {threads} threads", row.encode_gbps / row.copy_gbps, 0.5, times, False)
    name = f"1.5 %: decode, apply and digest, {threads} threads"
    add(name, row.decode_gbps / row.copy_gbps, 0.3, times, False)
    return goals
