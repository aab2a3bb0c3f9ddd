"""A policy of 4 billion weights from the GPU to the bytes of a delta: run by hand, prints a short table.

    python tests/gpu/measure_encode.py [SCALE]

Shapes of a Qwen3 of 4B parameters, random weights, real AdamW steps at lr 1e-6 on random gradients. Needs
torch; with CUDA 80 GB on the device and 40 GB on the host. SCALE (say 0.01) takes a share of the rows.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from primerl.crypto.hashing import digest_parts
from primerl.node.training.backend import Snapshot
from primerl.node.training.export import PolicyExporter, compare, fetch, parts
from primerl.node.training.world import World
from primerl.node.weights.codec import encode_delta
from primerl.node.weights.encoders import Encoders
from primerl.node.weights.state import State, state_bytes, tensor_digest

ALONE = World.alone(torch.device("cpu"))

T = TypeVar("T")
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD, INNER, WORDS = 36, 2560, 32, 8, 128, 9728, 151936
LR, STEPS, GOAL_S = 1e-6, 5, 1.0
STEP_S = 4.0
"""Waited in every step: a real one takes at least as long, and the host copies the last state meanwhile."""
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CORES = os.cpu_count() or 1


def shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """Name -> shape, as in the checkpoint; the output layer is tied to the embedding."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (int(WORDS * scale), HIDDEN)}
    matrices = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    norms |= {"self_attn.q_norm": HEAD, "self_attn.k_norm": HEAD}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {f"{at}{n}.weight": (int(r * scale), c) for n, (r, c) in matrices.items()}
        found |= {f"{at}{name}.weight": (size,) for name, size in norms.items()}
    return found | {"model.norm.weight": (HIDDEN,)}


def weights(scale: float) -> dict[str, torch.Tensor]:
    """fp32 masters that are bf16 to begin with, as those of a loaded model."""
    torch.manual_seed(0)
    return {
        name: (torch.randn(shape, device=DEVICE) * (0.02 if len(shape) > 1 else 1.0))
        .to(torch.bfloat16)
        .float()
        for name, shape in shapes(scale).items()
    }


def learn(named: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """One step on random gradients."""
    for tensor in named.values():
        tensor.grad = torch.randn_like(tensor)
    optimizer.step()
    for tensor in named.values():
        tensor.grad = None


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its seconds until the device is idle."""
    if CUDA:
        torch.cuda.synchronize()
    started = time.perf_counter()
    done = work()
    if CUDA:
        torch.cuda.synchronize()
    return done, time.perf_counter() - started


def device_part(named: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> int:
    """Compare, compact and bring to the host, without what the host does then; bytes that crossed."""
    crossed = 0
    for name, tensor in named.items():
        flat = tensor.reshape(-1)
        for part in parts(flat.numel()):
            piece = compare(held[name][part], flat[part].to(torch.bfloat16).view(torch.int16))
            if piece is not None:
                fetch(piece.bits) if piece.index is None else fetch(piece.index, piece.bits)
                crossed += piece.nbytes
    return crossed


def payload(base: State, found: Snapshot, encoders: Encoders) -> list[bytes]:
    """The delta that the trainer publishes."""
    return list(encoders.encode_delta(base, found.state, found.changed_since(base)))


def by_threads(base: State, found: Snapshot, threads: int, *, hinted: bool = True) -> list[bytes]:
    """The same without processes."""
    changed = found.changed_since(base) if hinted else None
    return list(encode_delta(base, found.state, changed=changed, threads=threads))


def hash_all(state: State) -> None:
    """The digests that a manifest needs, on all cores."""
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(tensor_digest, state.values()))


class Table:
    """Rows of seconds over several steps."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """One more measurement."""
        self._rows.setdefault(name, []).append(seconds)

    def print(self) -> None:
        """Median, best and worst of each row."""
        print(f"{'':44} {'median':>8} {'best':>8} {'worst':>8}  ms")
        for name, all_of in self._rows.items():
            figures = (statistics.median(all_of), min(all_of), max(all_of))
            print(f"{name:44} " + " ".join(f"{1e3 * one:8.1f}" for one in figures))


def main() -> None:
    """Print the table."""
    with Encoders() as encoders:
        measure(encoders)


def measure(encoders: Encoders) -> None:
    """All steps, then the parts on their own."""
    named = weights(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
    count = sum(tensor.numel() for tensor in named.values())
    optimizer = torch.optim.AdamW(list(named.values()), lr=LR, fused=CUDA)
    exporter = PolicyExporter(ALONE, ahead=True)
    before, first = timed(lambda: exporter.snapshot(named))
    print(
        f"{count / 1e9:.3f} billion weights on {DEVICE}, {CORES} cores; whole export {first:.2f} s"
    )
    table, last = Table(), before
    for step in range(1, STEPS + 1):
        held = {n: t.reshape(-1).to(torch.bfloat16).view(torch.int16) for n, t in named.items()}
        learn(named, optimizer)
        time.sleep(STEP_S)
        crossed, seconds = timed(lambda held=held: device_part(named, held))
        if step > 1:
            table.add("compare, compact, to the host", seconds)
        del held
        found, exported = timed(lambda: exporter.snapshot(named))
        coded, encoded = timed(lambda b=before, f=found: payload(b.state, f, encoders))
        size = sum(map(len, coded))
        if step > 1:  # the first one pays for page-locked memory
            table.add("export: all that, and the next host state", exported)
            table.add(f"encode, {CORES} processes", encoded)
            table.add("export and encode", exported + encoded)
        changed = sum(t.size for t in found.changed.values() if t is not None)
        full = state_bytes(found.state)
        print(
            f"step {step}: {changed / count:.2%} changed, {crossed / 1e6:.0f} MB crossed, "
            f"delta {size / 1e6:.1f} MB ({full / size:.0f}x smaller than {full / 1e9:.2f} GB), "
            f"{exported + encoded:.3f} s"
        )
        last, before = before, found
    coded = payload(last.state, before, encoders)
    for processes in (1, 2, 4, 8):
        with Encoders(processes) as fewer:
            fewer.start()
            timed(lambda few=fewer: payload(last.state, before, few))
            _, seconds = timed(lambda few=fewer: payload(last.state, before, few))
        table.add(f"encode, {processes} processes", seconds)
    for threads in (1, 4, 16):
        _, seconds = timed(lambda n=threads: by_threads(last.state, before, n))
        table.add(f"encode, {threads} threads", seconds)
    plain, seconds = timed(lambda: by_threads(last.state, before, CORES, hinted=False))
    table.add(f"encode, {CORES} threads, compared on the host", seconds)
    table.add(f"hash the state, {CORES} threads", timed(lambda: hash_all(before.state))[1])
    same = digest_parts(plain) == digest_parts(coded)
    table.print()
    print(f"bytes equal those of a comparison on the host: {'yes' if same else 'NO'}")
    print(f"goal: export and encode <= {GOAL_S:.1f} s")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
