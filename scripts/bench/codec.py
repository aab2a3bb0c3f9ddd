"""How small and how fast the delta codec is, at several shares of changed weights.

    python scripts/bench/codec.py [--quick] [--threads N] [--json FILE]

Synthetic: normal weights, each moved by a normal step of the size that changes the wanted share of
their bf16 bits. GB/s count the bf16 bytes of the whole model, for one thread in its CPU time, so that
other work on the machine hardly shows; for more in wall time. Every result is checked to be lossless.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import zstandard
from numpy.typing import NDArray

from primerl.node.weights.codec import apply_delta, decode_full, encode_delta, encode_full
from primerl.node.weights.state import State, Tensor
from primerl.protocol.manifests import TensorInfo

SHARES = (0.001, 0.01, 0.05, 0.30, 1.0)
DEVIATION = 0.02
GOALS = {
    "ratio at 0.1 % changed": (0.001, "ratio", 800.0),
    "ratio at 1 % changed": (0.01, "ratio", 140.0),
    "ratio at 5 % changed": (0.05, "ratio", 36.0),
    "gain over full at 100 % changed": (1.0, "gain", 1.0),
    "encode at 1 % changed": (0.01, "encode_gbps", 1.0),
    "decode at 1 % changed": (0.01, "decode_gbps", 2.0),
}
"""Name -> share, column, and the least value."""

T = TypeVar("T")
Row = dict[str, float | str]


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even, as a trainer's cast does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def moved(
    weights: NDArray[np.float32], share: float, rng: np.random.Generator
) -> NDArray[np.uint16]:
    """The bf16 bits of `weights` after a step that changes `share` of them."""
    before = to_bf16(weights)
    direction = rng.standard_normal(weights.size, dtype=np.float32)
    sample = slice(0, 1 << 18)

    def step(part: slice, size: float) -> NDArray[np.float32]:
        return (weights[part] + size * direction[part]).astype(np.float32)

    low, high = 1e-9, 1e-2
    for _ in range(30):
        size = (low * high) ** 0.5
        after = to_bf16(step(sample, size))
        low, high = (size, high) if np.mean(after != before[sample]) < share else (low, size)
    # No step changes every bit pattern: at 100 % take a large one and nudge the rest.
    after = to_bf16(step(slice(None), 1e-3 if share == 1 else high))
    if share == 1:
        after[after == before] ^= 1
    return after


def best(function: Callable[[], T], repeats: int, clock: Callable[[], float]) -> tuple[T, float]:
    """The result, and the seconds of the fastest of `repeats` calls."""
    seconds = float("inf")
    for _ in range(repeats - 1):
        start = clock()
        function()
        seconds = min(seconds, clock() - start)
    start = clock()
    result = function()
    return result, min(seconds, clock() - start)


def as_state(bits: NDArray[np.uint16]) -> State:
    """`bits` as a model of one matrix."""
    return {"weight": Tensor("BF16", (bits.size,), bits)}


def measure(
    name: str,
    new: State,
    encode: Callable[[], bytes],
    decode: Callable[[bytes], State],
    repeats: int,
    clock: Callable[[], float],
) -> Row:
    """One row: size and speed of one payload, after checking that it is lossless."""
    payload, encoding = best(encode, repeats, clock)
    result, decoding = best(lambda: decode(payload), repeats, clock)
    data = new["weight"].data
    if result["weight"].data.tobytes() != data.tobytes():
        raise SystemExit(f"{name}: the codec is not lossless")
    return {
        "name": name,
        "bytes": len(payload),
        "ratio": data.nbytes / len(payload),
        "encode_gbps": data.nbytes / 1e9 / encoding,
        "decode_gbps": data.nbytes / 1e9 / decoding,
    }


def run(elements: int, repeats: int, threads: int) -> list[Row]:
    """The baseline, the full state, and a delta for every share."""
    clock = time.process_time if threads == 1 else time.perf_counter
    rng = np.random.default_rng(0)
    weights = rng.normal(0, DEVIATION, elements).astype(np.float32)
    base = as_state(to_bf16(weights))
    info = [TensorInfo("weight", "BF16", (elements,), bytes(32))]
    raw = base["weight"].data.tobytes()
    plain = len(zstandard.ZstdCompressor(level=1).compress(raw))
    rows: list[Row] = [{"name": "full, plain zstd-1", "bytes": plain, "ratio": len(raw) / plain}]

    def full() -> bytes:
        return b"".join(encode_full(base, threads=threads))

    rows.append(
        measure("full", base, full, lambda p: decode_full(p, info, threads=threads), repeats, clock)
    )
    for share in SHARES:
        bits = moved(weights, share, rng)
        new = as_state(bits)
        row = measure(
            f"delta {share:.1%}",
            new,
            lambda new=new: b"".join(encode_delta(base, new, threads=threads)),
            lambda p: apply_delta(base, p, info, threads=threads),
            repeats,
            clock,
        )
        changed = int(np.count_nonzero(bits != base["weight"].data))
        row |= {
            "share": share,
            "changed": changed / elements,
            "bits_per_changed": 8 * float(row["bytes"]) / changed,
            "gain": plain / float(row["bytes"]),
        }
        rows.append(row)
    return rows


def judge(rows: list[Row]) -> list[dict[str, object]]:
    """Every goal with what was reached."""
    goals: list[dict[str, object]] = []
    for name, (share, column, least) in GOALS.items():
        value = float(next(row[column] for row in rows if row.get("share") == share))
        unit = "GB/s" if column.endswith("gbps") else "x"
        goals.append(
            {"name": name, "value": value, "goal": least, "unit": unit, "ok": value >= least}
        )
    return goals


def show(rows: list[Row], goals: list[dict[str, object]]) -> None:
    """The same for people."""
    columns = (
        "changed",
        "bytes",
        "ratio",
        "gain",
        "bits_per_changed",
        "encode_gbps",
        "decode_gbps",
    )
    print(f"{'':20}" + "".join(f"{column:>17}" for column in columns))
    for row in rows:
        cells = (f"{row[c]:>17.4g}" if c in row else f"{'-':>17}" for c in columns)
        print(f"{row['name']:20}" + "".join(cells))
    for goal in goals:
        mark = "ok  " if goal["ok"] else "MISS"
        print(f"{mark} {goal['name']}: {goal['value']:.3g} {goal['unit']} (goal {goal['goal']:g})")


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="a small model, once")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    elements, repeats = (4 << 20, 1) if options.quick else (64 << 20, 3)
    rows = run(elements, repeats, options.threads)
    goals = judge(rows)
    show(rows, goals)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "goals": goals}, indent=2) + "\n")


if __name__ == "__main__":
    main()
