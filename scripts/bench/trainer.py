"""Measure the cost of a training step by option: tokens/s, MFU, memory, and scaling.

    python scripts/bench/trainer.py [--shape tiny|50m|0.6b|4b|8b|moe|hybrid] [--tokens N ...] [--rows NAME ...]
        [--ranks N ...] [--steps N] [--kernels N] [--quick] [--json FILE]

Fake data, random weights: the model has the shape's config, a step is one packed row of `--tokens` tokens a
rank (one sequence, or as many as a row says), and everything else is as in a run: the same learner, losses,
clipping, fp32 masters. For comparison the same run has a plain loop: transformers' model in bf16 with its own
AdamW, compiled per layer, chunked cross entropy, cuDNN attention. Rows with torch's flash kernel show training
without the extra `flash`.

    MFU = (6 N + 6 L S H D) x tokens/s / peak        as prime-rl's published figures (node/training/meter.py)

With `--kernels 20` one more step of each row is profiled, and its 20 longest kernels are printed, and where the
GPU was idle. With `--ranks 1 4` it starts itself under torchrun with one rank and with four, and compares: weak
scaling.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.family_cases import make_family

from primerl.node.config.training import FsdpConfig, TrainingConfig
from primerl.node.models import huggingface
from primerl.node.training import attention_kernels
from primerl.node.training.backend import Objective, TrainBatch
from primerl.node.training.learner import Learner
from primerl.node.training.meter import cost_of, peak_flops
from primerl.node.training.world import World
from primerl.scripts.bench.kernels import profiled, show_kernels
from primerl.scripts.bench.models import SHAPES, fake_batch, make_model
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

ON_CUDA = torch.cuda.is_available()
GIB = 1 << 30
HYBRID: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "max_position_embeddings": 131072,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
"""`hybrid`: the text model of Qwen3.5-0.8B."""
PLAIN = {
    "plain loop": {"recompute": False, "tuned": False},
    "plain loop, tuned": {"recompute": False, "tuned": True},
    "plain loop, full recompute": {"recompute": True, "tuned": False},
}


# -- rows -----------------------------------------------------------------------------------------

LONG_CONTEXT = 32768
"""Row length from which rows count as long: rows meant for short lengths are left out, and vice versa."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    objective: Objective = "policy"
    sequences: int = 1
    anywhere: bool = False
    """Whether it is also measured with long rows."""
    ranks: int = 1
    """Fewest ranks that it needs."""
    flash4: bool = True
    """Whether FlashAttention-4 may be used."""

    def lengths(self, tokens: int) -> list[int]:
        """Return the lengths of the sequences in a row of `tokens`."""
        return [tokens // self.sequences] * self.sequences

    def suits(self, tokens: int, ranks: int) -> bool:
        """Return whether the line is meaningful with this many tokens and ranks."""
        experts = self.options.get("expert_parallel", ranks)
        return (self.anywhere or tokens < LONG_CONTEXT) and ranks >= self.ranks and experts == ranks

    @property
    def mesh(self) -> tuple[int, int]:
        """Layout of the ranks: copies of the model, ranks that share a sequence."""
        fsdp = self.options.get("fsdp", FsdpConfig())
        return fsdp.replicas, self.options.get("context_parallel", 1)


ROWS = [
    Row("none", anywhere=True),
    Row("selective recompute", {"activation_checkpointing": "selective"}, anywhere=True),
    Row("full recompute", {"activation_checkpointing": "full"}, anywhere=True),
    Row("sft", objective="ce"),
    Row("packed, 16 sequences", sequences=16),
    Row("packed, 64 sequences", sequences=64),
    Row("none, torch's flash kernel", flash4=False, anywhere=True),
    Row("packed, 16 sequences, torch's flash kernel", sequences=16, flash4=False),
    Row("no compile", {"compile": False}),
    Row("optimizer offload", {"optimizer_offload": True}),
    Row("head chunk 1,024", {"head_chunk": 1024}),
    Row("weights kept whole", {"fsdp": FsdpConfig(reshard_after_forward=False)}, ranks=2),
    Row("two copies (HSDP)", {"fsdp": FsdpConfig(replicas=2)}, ranks=4),
    Row("context parallel, 2", {"context_parallel": 2}, anywhere=True, ranks=2),
    Row("context parallel, 4", {"context_parallel": 4}, anywhere=True, ranks=4),
    Row("expert parallel, 2", {"expert_parallel": 2}, ranks=2),
    Row("expert parallel, 4", {"expert_parallel": 4}, ranks=4),
]


# -- the plain loop -------------------------------------------------------------------------------

CHUNK = 8192


class PlainLoop:
    """The baseline: transformers' model in bf16, with the usual optimisations.

    Weights, gradients and AdamW's moments in bf16, torch.compile of each layer, cuDNN's attention, cross
    entropy in chunks of 8,192 tokens. `tuned` compiles the chunks' loss too and takes the fused AdamW. One
    sequence a step, cross entropy only: it cannot pack, learn from rollouts, or keep an update that is below
    bf16's last bit.
    """

    def __init__(self, model_dir: Path, *, recompute: bool, tuned: bool) -> None:
        device, dtype = ("cuda", "bfloat16") if ON_CUDA else ("cpu", "float32")
        self._model: Any = huggingface.load_model(model_dir, dtype=dtype, device=device).train()
        for layer in self._model.base_model.layers:
            forward: Callable[..., Any] = layer.forward
            if recompute:
                forward = partial(checkpoint, forward, use_reentrant=False)
            layer.forward = torch.compile(forward) if ON_CUDA else forward
        self.config = self._model.config
        self.parameters = sum(one.numel() for one in self._model.parameters())
        fused = True if tuned and ON_CUDA else None
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=fused)
        self._head_loss = torch.compile(_head_loss) if tuned and ON_CUDA else _head_loss

    def step(self, token_ids: list[int]) -> None:
        """Make one step of cross entropy, and wait for the device."""
        ids = torch.tensor([token_ids], device=self._model.device)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if ON_CUDA else nullcontext():
            hidden = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            weight = self._model.get_output_embeddings().weight
            total = torch.zeros((), device=ids.device)
            for at in range(0, len(token_ids) - 1, CHUNK):
                part = slice(at, min(at + CHUNK, len(token_ids) - 1))
                targets = ids[0, 1:][part]
                total = total + checkpoint(
                    self._head_loss, hidden[part], weight, targets, use_reentrant=False
                )
            (total / len(token_ids)).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if ON_CUDA:
            torch.cuda.synchronize()


def _head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


# -- measuring ------------------------------------------------------------------------------------


def measure(
    row: Row, model_dir: Path, tokens: int, steps: int, world: World | None, kernels: int = 0
) -> dict[str, Any]:
    """Measure one row of the table; every rank returns the same figures. `kernels`: how many to print."""
    lengths = row.lengths(tokens)
    changes: dict[str, Any] = {"seq_len": tokens, "threads": 0 if ON_CUDA else 1, **row.options}
    config = TrainingConfig().model_copy(update=changes)
    gc.collect()  # frees the previous row's layers, which are in reference cycles, before memory is measured
    if ON_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    agrees = attention_kernels.flash4_agrees
    if not row.flash4:
        attention_kernels.flash4_agrees = lambda *_: False
    learner = Learner.build(model_dir, config, max_steps=1000, seed=0, temperature=1.0, world=world)
    ranks = world.data_size if world else 1
    vocabulary = learner.vocabulary
    batches = [
        TrainBatch(step, fake_batch(lengths * ranks, vocabulary, seed=step), row.objective)
        for step in range(1, steps + 4)
    ]
    try:
        began = time.perf_counter()
        learner.step(batches[0])
        first = time.perf_counter() - began
        learner.step(batches[1])  # varying shapes are compiled once more
        found = [learner.step(batch).values for batch in batches[2:-1]]
        _profile(lambda: learner.step(batches[-1]), kernels)
    finally:
        learner.close(keep_world=world is not None)
        attention_kernels.flash4_agrees = agrees
    seconds = sorted(one["time/step"] for one in found)[len(found) // 2]
    busy = sorted(one["time/forward_backward"] + one["time/optimizer"] for one in found)[
        len(found) // 2
    ]
    return {
        "row": row.name,
        "tokens": tokens,
        "sequences": len(lengths),
        "ranks": world.size if world else 1,
        "step_ms": 1e3 * seconds,
        "tokens_per_s": sum(lengths) * ranks / seconds,
        "mfu": found[-1].get("perf/mfu", 0.0) * found[-1]["time/step"] / seconds,
        "peak_gib": found[-1].get("perf/peak_memory", 0.0),
        "overhead": 1 - busy / seconds,
        "first_s": first,
        "skipped": sum(one["optim/skipped"] for one in found),
    }


def measure_plain(
    name: str, model_dir: Path, tokens: int, steps: int, kernels: int
) -> dict[str, Any]:
    """Measure the plain loop. `kernels`: how many to print."""
    gc.collect()
    if ON_CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loop = PlainLoop(model_dir, **PLAIN[name])
    (sample,) = fake_batch([tokens], loop.config.vocab_size, seed=0)
    began = time.perf_counter()
    loop.step(sample.token_ids)
    first = time.perf_counter() - began
    loop.step(sample.token_ids)
    seconds = sorted(_timed(lambda: loop.step(sample.token_ids)) for _ in range(steps))[steps // 2]
    _profile(lambda: loop.step(sample.token_ids), kernels)
    cost = cost_of(loop.config, loop.parameters)
    peak = peak_flops(torch.cuda.get_device_name()) if ON_CUDA else None
    return {
        "row": name,
        "tokens": tokens,
        "sequences": 1,
        "ranks": 1,
        "step_ms": 1e3 * seconds,
        "tokens_per_s": tokens / seconds,
        "mfu": 100 * cost.flops([tokens]) / seconds / peak if peak else 0.0,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if ON_CUDA else 0.0,
        "overhead": 0.0,
        "first_s": first,
        "skipped": 0.0,
    }


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _profile(step: Callable[[], Any], most: int) -> None:
    if most:
        with profiled() as kernels:
            step()
        show_kernels(kernels, most)


def agreement(model_dir: Path) -> float:
    """Return the largest difference of a token's logprob between packed and separate rows, nats."""
    config = TrainingConfig(seq_len=4096, threads=0 if ON_CUDA else 1)
    learner = Learner.build(model_dir, config, max_steps=1, seed=0, temperature=1.0)
    try:
        samples = fake_batch(
            [512, 300, 200, 77, 33], learner.vocabulary, seed=9
        )  # in packing order
        apart = [value for one in samples for value in learner.packed_logprobs([one])]
        together = learner.packed_logprobs(samples)
        return max(abs(a - b) for a, b in zip(apart, together, strict=True))
    finally:
        learner.close()


def run_alone(options: argparse.Namespace, model_dir: Path) -> list[dict[str, Any]]:
    """Measure every row on one rank, and the plain loop."""
    found: list[dict[str, Any]] = []

    def add(name: str, tokens: int, work: Callable[[], dict[str, Any]]) -> None:
        found.append(_guarded(name, tokens, work))
        show(found[-1])

    steps, kernels = options.steps, options.kernels
    for tokens in options.tokens:
        for row in chosen(options.rows, tokens):
            add(row.name, tokens, partial(measure, row, model_dir, tokens, steps, None, kernels))
        for name in PLAIN:
            if not options.rows or name in options.rows:
                add(name, tokens, partial(measure_plain, name, model_dir, tokens, steps, kernels))
    return found


def _guarded(name: str, tokens: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `work`; return a row that says so if memory runs out."""
    try:
        return work()
    except torch.OutOfMemoryError:
        return {"row": name, "tokens": tokens, "failed": "out of memory"}


def run_ranks(options: argparse.Namespace, model_dir: Path) -> list[dict[str, Any]]:
    """Measure the rows under torchrun, for each number of ranks."""
    found: list[dict[str, Any]] = []
    for ranks, rows in groups(options):
        with tempfile.TemporaryDirectory() as name:
            report = Path(name, "rows.json")
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                f"--nproc-per-node={ranks}",
                __file__,
                f"--as-rank={model_dir}",
                f"--json={report}",
                f"--steps={options.steps}",
                "--tokens",
                *map(str, options.tokens),
                "--rows",
                *(row.name for row in rows),
            ]
            threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
            subprocess.run(command, check=True, timeout=540, env={**os.environ, **threads})
            found += json.loads(report.read_text())
    return found


def groups(options: argparse.Namespace) -> Iterator[tuple[int, list[Row]]]:
    """Yield the ranks and rows of each start: a process has one layout of ranks."""
    names = options.rows or ["none", "weights kept whole"]
    for ranks in options.ranks:
        layouts: dict[tuple[int, int], list[Row]] = {}
        for tokens in options.tokens:
            for row in chosen(names, tokens, ranks):
                rows = layouts.setdefault(row.mesh, [])
                rows += [row] if row not in rows else []
        for rows in layouts.values():
            yield ranks, rows


def run_as_rank(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the rows on one rank; the first rank prints them."""
    kind = "auto" if ON_CUDA else "cpu"
    # one rank is the local backend, which shards nothing: the baseline for several ranks
    alone = os.environ["WORLD_SIZE"] == "1"
    layout = next(row.options for row in ROWS if row.name in options.rows)
    world = (
        World.alone(torch.device("cuda" if ON_CUDA else "cpu"))
        if alone
        else World.join(TrainingConfig(device=kind).model_copy(update=layout))
    )
    found: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for row in chosen(options.rows, tokens, world.size):
            work = partial(measure, row, Path(options.as_rank), tokens, options.steps, world)
            # a rank of several that lacks memory leaves the others waiting: that ends the bench
            found.append(_guarded(row.name, tokens, work) if alone else work())
            if world.is_first:
                show(found[-1])
    first = world.is_first
    world.close()
    return found if first else []


def chosen(names: Sequence[str], tokens: int, ranks: int = 1) -> list[Row]:
    """Return the rows of these names, all if there are none, that are meaningful there."""
    wanted = [row for row in ROWS if not names or row.name in names]
    return [row for row in wanted if row.suits(tokens, ranks)]


def show(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    head = f"{row['row']:34} {row['tokens']:7,}"
    if "failed" in row:
        print(f"{head}  {row['failed']}", flush=True)
        return
    print(
        f"{head} x{row['ranks']}  {row['step_ms']:9.1f} ms {row['tokens_per_s']:9,.0f} tok/s"
        f"  MFU {row['mfu']:5.1f} %"
        f"  {row['peak_gib']:6.1f} GiB  outside {100 * row['overhead']:4.1f} %  first {row['first_s']:5.1f} s",
        flush=True,
    )


# -- goals ----------------------------------------------------------------------------------------

SCALING = {2: 1.85, 4: 3.5, 8: 6.8}
"""Lowest speedup of this many GPUs, each with as many tokens as the single GPU of the baseline."""
KEPT_WHOLE = "weights kept whole"
PACKED = "packed, 16 sequences"
RATIOS = [
    ("ours / tuned plain loop, 16,384", "none", "plain loop, tuned", 1.05),
    ("16 x 1,024: FlashAttention-4 / torch's", PACKED, f"{PACKED}, torch's flash kernel", 1.25),
]


def judge(rows: list[dict[str, Any]], apart: float | None) -> list[Goal]:
    """Return the goals that these rows allow to judge."""
    by = {(one["row"], one["tokens"], one["ranks"]): one for one in rows if "failed" not in one}
    goals = [*judge_speed(by)] if ON_CUDA else []
    if apart is not None:
        # bf16 keeps 8 bits: a logit of about 4 is known to 1/64, and many differences add up
        goals.append(at_most("packed and alone differ by", apart, 0.2 if ON_CUDA else 1e-4, "nats"))
    return goals


def judge_speed(by: dict[tuple[str, int, int], dict[str, Any]]) -> Iterator[Goal]:
    """Yield the goals of GPUs; rows by name, tokens and ranks."""

    def figure(row: str, name: str, tokens: int = 16384) -> float | None:
        return by.get((row, tokens, 1), {}).get(name)

    best = [one["mfu"] for key, one in by.items() if key[1] == 65536 and "plain" not in key[0]]
    for name, value, bound, unit in (
        ("RL 16,384, no recompute", figure("none", "tokens_per_s"), 42e3, "tok/s"),
        ("RL 16,384, no recompute", figure("none", "mfu"), 39, "% MFU"),
        ("RL 16,384, full recompute", figure("full recompute", "tokens_per_s"), 33e3, "tok/s"),
        ("RL 65,536, best row", max(best, default=None), 54, "% MFU"),
        ("SFT 16,384", figure("sft", "mfu"), 42, "% MFU"),
    ):
        if value is not None:
            yield at_least(name, value, bound, unit)
    if (share := figure("none", "overhead")) is not None:
        yield at_most("outside forward, backward, optimizer", 100 * share, 5, "%")
    for name, ours, other, bound in RATIOS:
        one, two = figure(ours, "tokens_per_s"), figure(other, "tokens_per_s")
        if one and two:
            yield at_least(name, one / two, bound, "x")
    for (name, tokens, ranks), many in by.items():
        one = figure("none" if name == KEPT_WHOLE else name, "tokens_per_s", tokens)
        if one and ranks in SCALING:
            title = f"{ranks} GPUs / 1, weak scaling, {name}, {tokens:,}"
            yield at_least(title, many["tokens_per_s"] / one, SCALING[ranks], "x")


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    parser = make_parser(__doc__, "few steps")
    parser.add_argument(
        "--shape", default="0.6b" if ON_CUDA else "tiny", choices=[*SHAPES, "hybrid"]
    )
    parser.add_argument("--tokens", type=int, nargs="+", help="tokens of a row")
    parser.add_argument(
        "--rows",
        nargs="*",
        default=[],
        help=f"some of: {'; '.join([*(row.name for row in ROWS), *PLAIN])}",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="longest ones to print")
    parser.add_argument("--as-rank", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokens = options.tokens or ([16384] if ON_CUDA else [512])
    options.steps = 2 if options.quick else options.steps
    if options.as_rank:
        rows = run_as_rank(options)
        if options.json and rows:
            options.json.write_text(json.dumps(rows))
        return 0
    with tempfile.TemporaryDirectory() as name:
        if options.shape == "hybrid":
            make_family("qwen3_5_text", Path(name), **HYBRID)
        else:
            make_model(Path(name), options.shape)
        alone = options.ranks == [1]
        device = torch.cuda.get_device_name() if ON_CUDA else "CPU"
        print(f"shape {options.shape}, {device}, torch {torch.__version__}")
        rows = run_alone(options, Path(name)) if alone else run_ranks(options, Path(name))
        goals = judge(rows, agreement(Path(name)) if alone else None)
    return conclude(rows, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
