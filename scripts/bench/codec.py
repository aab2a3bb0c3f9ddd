"""How small and how fast the delta codec is, beside what others move weights in, on the same tensors.

    python scripts/bench/codec.py [--quick] [--threads N] [--synthetic] [--json FILE]

Synthetic deltas of several densities, and deltas of real optimizer steps (codec_deltas.py); formats in
codec_formats.py. GB/s count the bf16 bytes of the whole model in wall time, and, as other work on the
machine shows less in it, per second of CPU of all threads and processes. Speeds are judged as ratios to
copying the same bytes with as many threads (memcpy into memory that was written before), before and after
the calls that are measured. Decoding includes the digests of tensors and state. The bound is the order-0
entropy of the gaps between changed weights plus that of how far each moved.
"""

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from codec_deltas import Pair, optimizer_steps, synthetic
from codec_formats import ANCHOR, FULL, SPARSE, XOR, Format, ours
from codec_report import judge, show

from primerl.node.weights.blocks import BLOCK, measure
from primerl.node.weights.encoders import Encoders
from primerl.node.weights.payload import ordered
from primerl.node.weights.replica import Policy, prove
from primerl.node.weights.state import State, state_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One format on one pair of states."""

    pair: str
    format: str
    share: float | None
    """Of a synthetic pair: the share of elements that was to change."""
    changed: float
    bytes: int
    bits_per_changed: float
    bound_bits: float
    ratio: float
    """Full bf16 bytes by payload bytes."""
    encode_gbps: float
    decode_gbps: float
    copy_gbps: float
    """Copying the new state, beside these calls."""
    encode_cpu_gbps: float
    decode_cpu_gbps: float
    encode_peak_mib: float
    """Beyond the two states."""
    decode_peak_mib: float
    """Beyond base, payload and result."""
    largest_mib: float


@dataclass(frozen=True)
class Spent:
    """Seconds of the fastest of some calls."""

    wall: float
    cpu: float


def entropy_bits(counts: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> float:
    """Bits of all symbols, coded by their own frequencies; `counts` per part of the state."""
    width = max((count.size for count in counts), default=0)
    total = np.zeros(width)
    for count in counts:
        total[: count.size] += count
    total = total[total > 0]
    return float(-(total * np.log2(total / total.sum())).sum())


def measure_bound(pair: Pair) -> tuple[int, float]:
    """Changed elements, and the order-0 entropy of gaps and moves over the whole state, in bits."""
    gaps: list[Any] = []
    moves: list[Any] = []
    changed = 0
    for name, tensor in pair.base.items():
        old, new = tensor.data, pair.new[name].data
        index = np.flatnonzero(old != new)
        changed += index.size
        gaps.append(np.bincount(np.diff(index, prepend=-1) - 1))
        moves.append(np.bincount(measure(old[index], new[index], tensor.dtype)))
    return changed, entropy_bits(gaps) + entropy_bits(moves)


def cpu_seconds(processes: Sequence[int]) -> float:
    """CPU time of this process and of others, by id: their clocks are numbered as Linux does it."""
    return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in processes)


def best(function: Callable[[], T], repeats: int, processes: Sequence[int] = ()) -> tuple[T, Spent]:
    """The result, and the least seconds of `repeats` calls, with what `processes` did for them."""
    wall = cpu = float("inf")
    while True:
        started, used = time.perf_counter(), cpu_seconds(processes)
        result = function()
        wall = min(wall, time.perf_counter() - started)
        cpu = min(cpu, cpu_seconds(processes) - used)
        repeats -= 1
        if repeats <= 0:
            return result, Spent(wall, cpu)
        del result


def copying(state: State, threads: int) -> Callable[[], None]:
    """A call that copies `state` with so many threads into memory that was written before."""
    parts = [
        (out[at : at + BLOCK], tensor.data[at : at + BLOCK])
        for tensor in state.values()
        for out in (tensor.data.copy(),)
        for at in range(0, tensor.data.size, BLOCK)
    ]

    def copy() -> None:
        for _ in ordered(np.copyto, parts, threads):
            pass

    return copy


def peak_mib(function: Callable[[], object], keeps: int) -> float:
    """Most memory that `function` held at once beyond `keeps` bytes, numpy's included, in MiB."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        result = function()
        peak = tracemalloc.get_traced_memory()[1]
        del result
    finally:
        tracemalloc.stop()
    return (peak - before - keeps) / 2**20


def drain(pieces: Iterator[bytes]) -> None:
    """Make a payload and forget it."""
    for _ in pieces:
        pass


def written(base: State, state: State) -> int:
    """Bytes of the tensors of `state` that are not the very ones of `base`."""
    return state_bytes({name: one for name, one in state.items() if one is not base.get(name)})


def run(
    pair: Pair, base: Policy, new: Policy, form: Format, bound: tuple[int, float], options: Any
) -> Row:
    """One row, after checking that the format is lossless."""
    threads, repeats = options.threads, options.repeats
    copy = copying(new.state, threads)
    _, before = best(copy, repeats)
    payload, encoding = best(
        lambda: list(form.encode(base, new, threads)), repeats, options.encoders.pids
    )
    state, decoding = best(lambda: form.decode(base, new, payload, threads), repeats)
    _, after = best(copy, repeats)
    if any(state[name].data.tobytes() != one.data.tobytes() for name, one in pair.new.items()):
        raise SystemExit(f"{form.name} is not lossless on {pair.name}")
    keeps = written(pair.base, state)
    del state
    changed, bound_bits = bound
    full, size = state_bytes(pair.new), sum(map(len, payload))
    elements = sum(tensor.data.size for tensor in pair.new.values())
    return Row(
        pair=pair.name,
        format=form.name,
        share=pair.share,
        changed=changed / elements,
        bytes=size,
        bits_per_changed=8 * size / changed,
        bound_bits=bound_bits / changed,
        ratio=full / size,
        encode_gbps=full / 1e9 / encoding.wall,
        decode_gbps=full / 1e9 / decoding.wall,
        copy_gbps=full / 1e9 / min(before.wall, after.wall),
        encode_cpu_gbps=full / 1e9 / encoding.cpu,
        decode_cpu_gbps=full / 1e9 / decoding.cpu,
        encode_peak_mib=peak_mib(lambda: drain(iter(form.encode(base, new, threads))), 0),
        decode_peak_mib=peak_mib(lambda: form.decode(base, new, payload, threads), keeps),
        largest_mib=max(tensor.data.nbytes for tensor in pair.new.values()) / 2**20,
    )


def pairs(options: argparse.Namespace) -> Iterator[Pair]:
    """All that is measured."""
    yield from synthetic((8 if options.quick else 64) << 20)
    if not options.synthetic:
        yield from optimizer_steps(options.quick)


def main() -> int:
    """Measure, print, write the report, and say by the exit code whether every goal was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="small models, once: about a minute")
    parser.add_argument(
        "--synthetic", action="store_true", help="no training: synthetic deltas only"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    options.repeats = 1 if options.quick else 3
    rows: list[Row] = []
    with Encoders(options.threads) as options.encoders:
        for pair in pairs(options):
            base, new = prove(0, pair.base), prove(1, pair.new)
            bound = measure_bound(pair)
            for form in (ours(options.encoders), ANCHOR, FULL, XOR, SPARSE):
                rows.append(run(pair, base, new, form, bound, options))
            show(rows[-5:])
    goals = judge(rows, options.threads)
    if options.json:
        report = {"rows": [asdict(row) for row in rows], "goals": goals}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
