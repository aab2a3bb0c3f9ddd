"""Measure size and speed of the codec, of deltas and of full states.

    python scripts/bench/codec.py [--quick] [--threads N] [--synthetic] [--json FILE]
    python scripts/bench/codec.py --stages SHAPE [--quick] [--json FILE] [--before COMMIT]

Deltas are synthetic, of several densities, and those of real optimizer steps: bf16 bits before and after one
step. Decoding ends with the BLAKE3 digest of every tensor that was written and of the state; decoded tensors
are compared bit by bit. GB/s count the bf16 bytes of the whole model in wall time and, as that is less
sensitive to other load on the machine, per CPU second of all threads and processes. Speeds are judged as ratios
to copying the same bytes with as many threads (memcpy into previously written memory), before and after the
measured calls. The bound is the order-0 entropy of the gaps between changed weights plus that of the sizes of
their changes.

--stages measures the CPU stages of one version instead, from the trainer's snapshot to the worker's engine, for
steps of Adam's size: with one and two threads, and with two beside a thread of plain Python, as a node's event
loop is one: each stage then waits for the lock of the interpreter, and that thread for the stage. Its remaining
speed is the last column. With --before this tree and the commit are measured in turns, twice, and the least
of each compared.
"""

import argparse
import asyncio
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import starmap
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from primerl.crypto.hashing import NO_DIGEST
from primerl.node.config.run import TrainingConfig
from primerl.node.inference.handover import make_delta, shared_file
from primerl.node.models.huggingface import create, load_model, policy_state
from primerl.node.process.threads import share_python
from primerl.node.storage.chunk_store import FileStore
from primerl.node.training.snapshot import HostPiece, HostState, TensorDiff
from primerl.node.weights.artifacts import STORED_AT_ONCE
from primerl.node.weights.blocks import BLOCK, measure
from primerl.node.weights.codec import CODEC, encode_delta, encode_full
from primerl.node.weights.payload import cut, ordered
from primerl.node.weights.replica import Policy, WeightReplica, prove
from primerl.node.weights.state import (
    Changed,
    State,
    Tensor,
    floats,
)
from primerl.node.weights.state_history import StateHistory, state_bytes
from primerl.protocol.manifests import Artifact, PolicyManifest, TensorInfo
from primerl.scripts.bench.models import SHAPES, random_policy
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser
from primerl.scripts.bench.soak import unpack

DEVIATION = 0.02
"""Standard deviation of synthetic weights, as in a newly initialised model."""
TENSOR = 4 << 20
"""Elements of a synthetic tensor."""
SHARES = (0.001, 0.01, 0.015, 0.05, 0.30, 1.0)

DEMO = {"hidden_size": 96, "num_hidden_layers": 2}
"""As in configs/demo.toml."""
DEMO_LR = 8e-4
MIDDLE = SHAPES["50m"] | {"num_hidden_layers": 16, "vocab_size": 8192}
"""54.5M parameters."""
RATES = (1e-6, 3e-6, 1e-5)
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
"""MiB that encoding and decoding may take beyond twice the largest tensor."""

Bits = NDArray[np.uint16]
T = TypeVar("T")


# -- pairs of states ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A model before and after a step."""

    name: str
    base: State
    new: State
    share: float | None = None
    """Share of elements that a synthetic step was made to change."""


@dataclass(frozen=True)
class Training:
    """Training settings of a model: fp32 masters, cross-entropy."""

    shape: Mapping[str, Any]
    length: int
    batch: int
    warm_steps: int
    """Steps at `warm_rate`, so that the weights differ from their initial distribution."""
    warm_rate: float
    steps: int
    """Steps at each of the rates, with a fresh optimizer; the last one is the delta."""


def synthetic(elements: int) -> Iterator[Pair]:
    """Yield normal weights before and after a normal step that changes a given share."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, DEVIATION, elements).astype(np.float32)
    base = _as_state(to_bf16(weights))
    for share in SHARES:
        yield Pair(f"synthetic {share:.1%}", base, _as_state(moved(weights, share, rng)), share)


def optimizer_steps(quick: bool) -> Iterator[Pair]:
    """Yield steps of the demo's model, and of one of 54.5M parameters at rates of real runs.

    At the first of these rates also by Muon.
    """
    demo = Training(DEMO, 24, 64, 20 if quick else 60, 3e-3, 5 if quick else 10)
    middle = Training(MIDDLE, 64, 6, 1 if quick else 12, 5e-4, 2 if quick else 8)
    yield from _trained("demo", demo, [DEMO_LR])
    yield from _trained("54.5M", middle, RATES)
    yield from _trained("54.5M muon", middle, RATES[:1], "muon")


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest even, as a trainer's cast does."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def moved(
    weights: NDArray[np.float32], share: float, rng: np.random.Generator
) -> NDArray[np.uint16]:
    """Return the bf16 bits of `weights` after a step that changes `share` of them."""
    before = to_bf16(weights)
    direction = rng.standard_normal(weights.size, dtype=np.float32)
    sample = slice(0, 1 << 20)

    def step(part: slice, size: float) -> NDArray[np.uint16]:
        return to_bf16((weights[part] + size * direction[part]).astype(np.float32))

    if share == 1:
        # No step changes every bit pattern: take a large one and flip a bit of the rest.
        after = step(slice(None), 1e-3)
        after[after == before] ^= 1
        return after
    low, high = 1e-9, 1e-2
    for _ in range(30):
        size = (low * high) ** 0.5
        few = np.mean(step(sample, size) != before[sample]) < share
        low, high = (size, high) if few else (low, size)
    return step(slice(None), high)


def _as_state(bits: NDArray[np.uint16]) -> State:
    """Return `bits` as a model of a few matrices."""
    parts = [bits[at : at + TENSOR] for at in range(0, bits.size, TENSOR)]
    return {
        f"layers.{at:02}.weight": Tensor("BF16", (part.size,), part)
        for at, part in enumerate(parts)
    }


# -- real steps ------------------------------------------------------------------------------------


def _trained(
    name: str,
    training: Training,
    rates: tuple[float, ...] | list[float],
    kind: Literal["adamw", "muon"] = "adamw",
) -> Iterator[Pair]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        create(Path(directory), training.shape, seed=0)
        model = load_model(Path(directory), dtype="float32", device="cpu")
    model.train()
    rng = np.random.default_rng(1)
    _steps(model, training, training.warm_rate, training.warm_steps, rng, kind)
    warm = {key: value.detach().clone() for key, value in model.named_parameters()}
    for rate in rates:
        with torch.no_grad():
            for key, value in model.named_parameters():
                value.copy_(warm[key])
        optimizer = _steps(model, training, rate, training.steps - 1, rng, kind)
        base = policy_state(model)
        _step(model, optimizer, training, rate, rng)
        del optimizer  # the peak memory measured next must be the codec's own
        gc.collect()
        yield Pair(f"{name} lr {rate:g}", base, policy_state(model))


def _steps(
    model: Any, training: Training, rate: float, count: int, rng: np.random.Generator, kind: str
) -> Any:
    """Make `count` steps with a fresh optimizer, and return it."""
    from primerl.node.training.optimizer import Optimizer

    config = TrainingConfig.model_validate({"optimizer": kind, "betas": (0.9, 0.95)})
    optimizer = Optimizer(dict(model.named_parameters()), config)
    for _ in range(count):
        _step(model, optimizer, training, rate, rng)
    return optimizer


def _step(
    model: Any, optimizer: Any, training: Training, rate: float, rng: np.random.Generator
) -> None:
    """Make one step on sequences whose second half reverses the first one."""
    import torch

    half = rng.integers(0, training.shape["vocab_size"], (training.batch, training.length // 2))
    tokens = torch.from_numpy(np.concatenate([half, half[:, ::-1]], axis=1))
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.clip()
    optimizer.step(rate)


# -- formats --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A way to send a new state to a node that holds a base."""

    name: str
    encode: Callable[[Policy, Policy, int], Iterable[bytes]]
    """Arguments: base, new, threads."""
    decode: Callable[[Policy, Policy, list[bytes], int], State]
    """Arguments: base, target (layout and digests), payload, threads. Decodes, applies and hashes."""


def _manifest(
    new: Policy, kind: Any, base: Policy | None, payload: list[bytes]
) -> tuple[PolicyManifest, Artifact]:
    infos = tuple(
        TensorInfo(name, tensor.dtype, tensor.shape, new.digests[name])
        for name, tensor in new.state.items()
    )
    held = (base.version, base.digest) if base else (-1, NO_DIGEST)
    artifact = Artifact(kind, *held, CODEC, sum(map(len, payload)), ())
    return PolicyManifest(NO_DIGEST, new.version, new.digest, infos, (artifact,)), artifact


def _encode_ours(base: Policy, new: Policy, threads: int) -> Iterator[bytes]:
    return encode_delta(base.state, new.state, threads=threads)


def _decode_ours(base: Policy, new: Policy, payload: list[bytes], threads: int) -> State:
    manifest, artifact = _manifest(new, "delta", base, payload)
    return WeightReplica(base, threads=threads).prepare(manifest, artifact, payload).policy.state


def _encode_anchor(_base: Policy, new: Policy, threads: int) -> Iterator[bytes]:
    return encode_full(new.state, threads=threads)


def _decode_anchor(base: Policy, new: Policy, payload: list[bytes], threads: int) -> State:
    manifest, artifact = _manifest(new, "anchor", None, payload)
    return WeightReplica(base, threads=threads).prepare(manifest, artifact, payload).policy.state


OURS = Format(CODEC, _encode_ours, _decode_ours)
ANCHOR = Format(f"{CODEC} full", _encode_anchor, _decode_anchor)


# -- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One format on one pair of states."""

    pair: str
    format: str
    share: float | None
    """Share of elements that was to change in a synthetic pair."""
    changed: float
    bytes: int
    bits_per_changed: float
    bound_bits: float
    ratio: float
    """Full bf16 bytes over payload bytes."""
    encode_gbps: float
    decode_gbps: float
    copy_gbps: float
    """Speed of copying the new state, measured around these calls."""
    encode_cpu_gbps: float
    decode_cpu_gbps: float
    encode_peak_mib: float
    """Peak memory beyond the two states."""
    decode_peak_mib: float
    """Peak memory beyond base, payload and result."""
    largest_mib: float


@dataclass(frozen=True)
class Spent:
    """Seconds of the fastest of some calls."""

    wall: float
    cpu: float


def entropy_bits(counts: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> float:
    """Return the bits of all symbols coded by their frequencies; `counts` per part of a state."""
    width = max((count.size for count in counts), default=0)
    total = np.zeros(width)
    for count in counts:
        total[: count.size] += count
    total = total[total > 0]
    return float(-(total * np.log2(total / total.sum())).sum())


def measure_bound(pair: Pair) -> tuple[int, float]:
    """Return the number of changed elements, and the bound in bits.

    The bound is the order-0 entropy of gaps and moves over the whole state.
    """
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


def best(function: Callable[[], T], repeats: int) -> tuple[T, Spent]:
    """Return the result and the least seconds of `repeats` calls."""
    wall = cpu = float("inf")
    while True:
        started, used = time.perf_counter(), time.process_time()
        result = function()
        wall = min(wall, time.perf_counter() - started)
        cpu = min(cpu, time.process_time() - used)
        repeats -= 1
        if repeats <= 0:
            return result, Spent(wall, cpu)
        del result


def copying(state: State, threads: int) -> Callable[[], None]:
    """Return a call that copies `state` with `threads` threads into previously written memory."""
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
    """Return the peak memory of `function` beyond `keeps` bytes, numpy's included, in MiB."""
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
    """Make a payload and discard it."""
    for _ in pieces:
        pass


def written(base: State, state: State) -> int:
    """Return the bytes of the tensors of `state` that are not the same objects as in `base`."""
    return state_bytes({name: one for name, one in state.items() if one is not base.get(name)})


def run(
    pair: Pair, base: Policy, new: Policy, form: Format, bound: tuple[int, float], options: Any
) -> Row:
    """Measure one row, after checking that the format is lossless."""
    threads, repeats = options.threads, options.repeats
    copy = copying(new.state, threads)
    _, before = best(copy, repeats)
    payload, encoding = best(lambda: list(form.encode(base, new, threads)), repeats)
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


def show(rows: Sequence[Row]) -> None:
    """Print the formats' rows of one pair."""
    first = rows[0]
    print(
        f"\n{first.pair}: {first.changed:.2%} changed, bound {first.bound_bits:.2f} bits per changed"
        f" weight, largest tensor {first.largest_mib:.0f} MiB"
    )
    print(f"  {'':27}" + "".join(f"{title:>14}" for title, _, _ in COLUMNS))
    for row in rows:
        cells = (f"{form.format(getattr(row, name)):>14}" for _, name, form in COLUMNS)
        print(f"  {row.format:27}" + "".join(cells), flush=True)


def judge(rows: Sequence[Row], threads: int) -> list[Goal]:
    """Return every goal with the value reached. Rows come in pairs: a delta, then the full state."""
    groups = list(zip(rows[::2], rows[1::2], strict=True))
    goals: list[Goal] = []
    for ours, anchor in groups:
        over = 100 * (ours.bits_per_changed / ours.bound_bits - 1)
        most = 5 if ours.changed < 0.1 else 10
        goals.append(at_most(f"{ours.pair}: above the entropy bound", over, most, "%"))
        gain = anchor.bytes / ours.bytes
        goals.append(at_least(f"{ours.pair}: smaller than a full state", gain, 1, "x"))
        peak = max(ours.encode_peak_mib, ours.decode_peak_mib)
        room = 2 * ours.largest_mib + MIB
        goals.append(at_most(f"{ours.pair}: peak memory", peak, room, "MiB"))
    row = next(group[0] for group in groups if group[0].share == 0.015)
    times = "x memcpy of the same bytes"
    encode, decode = row.encode_gbps / row.copy_gbps, row.decode_gbps / row.copy_gbps
    return [
        *goals,
        at_most("1.5 %: size", row.bits_per_changed, 9.7, "bits per changed weight"),
        at_least(f"1.5 %: encode, {threads} threads", encode, 0.5, times),
        at_least(f"1.5 %: decode, apply and digest, {threads} threads", decode, 0.3, times),
    ]


# -- stages of a version ------------------------------------------------------------------------------

STAGE_RATES = (1e-6, 3e-6, 1e-5)
ANNOUNCED_S, LOADED_S = 0.25, 0.2
"""Goals for both halves of the way, on a host with a GPU; these stages are not all of it."""
TIMES = {"cpu_s", "alone_s", "threads_s", "beside_s"}
"""Fields that --before compares."""

Stage = Callable[[int], object]
"""Argument: threads."""


class Busy:
    """A thread of plain Python that counts its turns while a block runs."""

    def __enter__(self) -> "Busy":
        self.turns, self._ends = 0, False
        self._thread = threading.Thread(target=self._run)
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()
        self.speed = self.turns / (time.perf_counter() - self._began)

    def _run(self) -> None:
        while not self._ends:
            sum(range(500))
            self.turns += 1


@dataclass
class StageRow:
    """Seconds of one stage, the least of some calls."""

    rate: float
    changed: float
    stage: str
    cpu_s: float
    """CPU time with one thread."""
    alone_s: float
    """Wall time with one thread."""
    threads_s: float
    """With two."""
    beside_s: float
    """With two, beside a thread of plain Python."""
    left: float
    """Share of its speed that is left to that thread."""


def adam_step(
    state: State, rate: float, rng: np.random.Generator
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return `state`, of fp32 masters that round to about its values, before and after a step of `rate`."""
    before: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {}
    for name, tensor in state.items():
        size = tensor.data.size
        masters = floats(tensor) * (1 + rng.uniform(-(2**-9), 2**-9, size)).astype(np.float32)
        moves = np.float32(rate) * np.clip(rng.standard_normal(size, np.float32), -1, 1)
        before[name] = Tensor(tensor.dtype, tensor.shape, to_bf16(masters))
        after[name] = Tensor(
            tensor.dtype, tensor.shape, to_bf16((masters + moves).astype(np.float32))
        )
    return before, after


def stages_of(base: Policy, new: Policy, changed: Changed, directory: Path) -> dict[str, Stage]:
    """Return each stage, in order."""
    chunks = list(cut(encode_delta(base.state, new.state, changed=changed)))
    manifest, artifact = _manifest(new, "delta", base, chunks)
    numbers = iter(range(10**6))

    def encode(threads: int) -> object:
        return list(cut(encode_delta(base.state, new.state, threads=threads, changed=changed)))

    def store(_threads: int) -> object:
        files = FileStore(directory / f"{next(numbers)}", max_bytes=1 << 40)
        return list(ordered(files.put, ((chunk,) for chunk in chunks), STORED_AT_ONCE))

    def hold(_threads: int) -> object:
        history = StateHistory(2)
        history.add(0, base.state)
        history.add(1, new.state, changed)
        return history

    def hand_over(_threads: int) -> object:
        async def write() -> None:
            delta = make_delta(new.state, dict(changed), ())
            async with shared_file(delta.tensors, delta.metadata):
                pass

        return asyncio.run(write())

    return {
        "trainer: hash": lambda threads: prove(1, new.state, known=base, threads=threads),
        "trainer: encode": encode,
        "trainer: store": store,
        "trainer: hold for audits": hold,
        "worker: decode and prove": lambda threads: (
            WeightReplica(base, threads=threads).prepare(manifest, artifact, iter(chunks)).policy
        ),
        "worker: file for the engine": hand_over,
    }


def step_of(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> tuple[Policy, Policy, Changed]:
    """Return both policies as a trainer's backend gives them, and where the second one changed."""
    host = HostState()

    def whole(name: str, tensor: Tensor) -> TensorDiff:
        return TensorDiff(name, tensor.dtype, tensor.shape, True, [HostPiece(0, None, tensor.data)])

    def change(name: str, tensor: Tensor) -> TensorDiff:
        index = np.flatnonzero(before[name].data != tensor.data).astype(np.int32)
        pieces = [HostPiece(0, index, tensor.data[index])] if index.size else []
        return TensorDiff(name, tensor.dtype, tensor.shape, False, pieces)

    base = prove(0, host.build(starmap(whole, before.items())).state)
    snapshot = host.build(starmap(change, after.items()))
    return base, prove(1, snapshot.state, known=base), snapshot.changed


def measure_stages(options: argparse.Namespace) -> Iterator[StageRow]:
    """Yield every stage at each rate."""
    share_python()  # as a node
    repeats = 3 if options.quick else 9
    with tempfile.TemporaryDirectory() as name:
        state = random_policy(Path(name), options.stages)
        for rate in STAGE_RATES[-1:] if options.quick else STAGE_RATES:
            base, new, changed = step_of(*adam_step(state, rate, np.random.default_rng(0)))
            count = sum(positions.size for positions in changed.values() if positions is not None)
            share = 2 * count / state_bytes(base.state)
            for stage, call in stages_of(base, new, changed, Path(name)).items():
                alone, _ = measure_stage(call, 1, False, repeats)
                threads, _ = measure_stage(call, 2, False, repeats)
                beside, left = measure_stage(call, 2, True, repeats)
                walls = (alone.wall, threads.wall, beside.wall)
                yield StageRow(rate, share, stage, alone.cpu, *walls, left)


def measure_stage(call: Stage, threads: int, busy: bool, repeats: int) -> tuple[Spent, float]:
    """Return the least time of some calls, and the share of its speed that is left to a `busy` thread."""
    result = call(threads)  # warms up
    spent: list[Spent] = []
    speeds: list[float] = []
    for _ in range(repeats):
        with Busy() as undisturbed:
            time.sleep(0.02)
        with Busy() if busy else nullcontext() as beside:
            result, least = best(lambda: call(threads), 1)
            spent.append(least)
        if beside is not None:
            speeds.append(beside.speed / undisturbed.speed)
    del result
    least = Spent(min(each.wall for each in spent), min(each.cpu for each in spent))
    return least, median(speeds) if speeds else 1.0


def run_stages(options: argparse.Namespace) -> int:
    """Measure, print and judge the stages."""
    rows: list[StageRow] = []
    for row in measure_stages(options):
        if not rows or rows[-1].rate != row.rate:
            print(f"\n{options.stages}, lr {row.rate:g}: {row.changed:.1%} changed")
            titles = ("CPU", "1 thread", "2 threads", "beside", "left to it")
            print(f"{'s':30}" + "".join(f"{title:>12}" for title in titles))
        rows.append(row)
        seconds = (row.cpu_s, row.alone_s, row.threads_s, row.beside_s)
        print(
            f"{row.stage:30}{''.join(f'{each:12.3f}' for each in seconds)}{row.left:12.0%}",
            flush=True,
        )
    last = [row for row in rows if row.rate == rows[-1].rate]
    goals = [
        at_most(
            f"{side}, lr {last[0].rate:g}, beside a busy thread",
            sum(row.beside_s for row in last if row.stage.startswith(side)),
            goal,
            "s",
        )
        for side, goal in (("trainer", ANNOUNCED_S), ("worker", LOADED_S))
    ]
    return conclude([asdict(row) for row in rows], goals, options.json)


def compare_stages(options: argparse.Namespace) -> int:
    """Measure the stages of a commit and of this tree in turns; print the least of each and their ratio."""
    times: dict[tuple[str, float, str], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        trees = {"before": unpack(options.before, Path(name)), "now": unpack("", Path(name))}
        for tree, folder in [*trees.items()] * 2:
            for row in stages_in(folder, options):
                least = times.setdefault((tree, row["rate"], row["stage"]), {})
                for field in TIMES & row.keys():
                    least[field] = min(row[field], least.get(field, math.inf))
    print(f"{'s, before and now':40}" + "".join(f"{field:>26}" for field in sorted(TIMES)))
    for (tree, rate, stage), now in times.items():
        if tree == "now" and (before := times.get(("before", rate, stage))):
            ratios = (
                f"{before[field]:.3f} {now[field]:.3f} {before[field] / now[field]:.2f}x"
                if field in before
                else ""
                for field in sorted(TIMES)
            )
            print(f"{f'{stage}, lr {rate:g}':40}" + "".join(f"{each:>26}" for each in ratios))
    return 0


def stages_in(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the stages with the code in `folder`; return the rows."""
    package = folder / "build/primerl"
    if not package.exists():
        package.parent.mkdir(exist_ok=True)
        package.symlink_to("..")
    report = folder / "stages.json"
    command = [sys.executable, str(folder / "scripts/bench/codec.py"), "--json", str(report)]
    command += ["--stages", options.stages, *(["--quick"] if options.quick else [])]
    environment = {**os.environ, "PYTHONPATH": str(folder / "build")}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    return json.loads(report.read_text())["rows"]


def pairs(options: argparse.Namespace) -> Iterator[Pair]:
    """Yield all pairs to measure."""
    yield from synthetic((8 if options.quick else 64) << 20)
    if not options.synthetic:
        yield from optimizer_steps(options.quick)


def main() -> int:
    """Measure, print, write the report, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "small models, once: about a minute")
    parser.add_argument(
        "--synthetic", action="store_true", help="no training: synthetic deltas only"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--stages", choices=sorted(SHAPES), help="measure the stages of a version of this shape"
    )
    parser.add_argument(
        "--before", default="", metavar="COMMIT", help="with --stages: compare with this commit"
    )
    options = parser.parse_args()
    if options.stages:
        return compare_stages(options) if options.before else run_stages(options)
    options.repeats = 1 if options.quick else 3
    rows: list[Row] = []
    for pair in pairs(options):
        base, new = prove(0, pair.base), prove(1, pair.new)
        bound = measure_bound(pair)
        for form in (OURS, ANCHOR):
            rows.append(run(pair, base, new, form, bound, options))
        show(rows[-2:])
    return conclude([asdict(row) for row in rows], judge(rows, options.threads), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
