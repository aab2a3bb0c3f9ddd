"""`primerl-node sft` as a user runs it: tokens/s, MFU, memory, and what the data cost.

    python scripts/bench/sft.py                 0.6B at 16,384 and 65,536 tokens a step, on one GPU
    python scripts/bench/sft.py --toy           the same at toy size, on a CPU
    python scripts/bench/sft.py -- --training.activation-checkpointing full

Model by shape with random weights, rows of about 2,000 tokens made by the taskset reverse-text. The first
steps, in which kernels are compiled and tuned, are left out; the rest is a median. Everything lands below
--work.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SHAPES = {
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936),
    "toy": (64, 2, 4, 2, 16, 128, 512),
}
"""hidden_size, layers, heads, key-value heads, head_dim, intermediate_size, vocabulary (Qwen3)."""
FIELDS = (
    "hidden-size",
    "num-hidden-layers",
    "num-attention-heads",
    "num-key-value-heads",
    "head-dim",
    "intermediate-size",
    "vocab-size",
)
COLUMNS = ("perf/throughput", "perf/mfu", "perf/peak_memory", "time/step", "time/load_data")


def command(work: Path, name: str, shape: str, tokens: int, args: argparse.Namespace) -> list[str]:
    """One run of `primerl-node sft`."""
    toy = shape == "toy"
    shortest, longest = (20, 24) if toy else (950, 1000)
    model = [
        part
        for field, value in zip(FIELDS, SHAPES[shape], strict=True)
        for part in (f"--model.create.{field}", str(value))
    ]
    return [
        *(sys.executable, "-m", "primerl.cli.main", "sft", "--clean"),
        *("--output-dir", str(work), "--name", name, "--no-fsync"),
        *model,
        *("--model.create.max-position-embeddings", "65536"),
        *("--data.environment.id", "reverse-text"),
        *("--data.environment.args.min-len", str(shortest)),
        *("--data.environment.args.max-len", str(longest)),
        *("--validation.rows", "8", "--validation.interval", "1000000"),
        *("--checkpoint.interval", "1000000", "--max-steps", str(args.steps)),
        *("--batch-tokens", str(tokens), "--training.seq-len", str(tokens)),
        *args.more,
    ]


def row(work: Path, name: str, skip: int) -> list[str]:
    """Medians over the steps after the first `skip`."""
    lines = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["step"] > skip]
    cells = [name, f"{measured[-1]['loss/mean']:.3f}"]
    for column in COLUMNS:
        values = [line[column] for line in measured if column in line]
        cells.append(f"{statistics.median(values):,.4g}" if values else "-")
    return cells


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print one line a size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/bench-sft"))
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=6)
    parser.add_argument("--tokens", type=int, nargs="+", default=[])
    parser.add_argument("more", nargs="*", help="further flags of sft, after --")
    args = parser.parse_args(argv)
    shape = "toy" if args.toy else "0.6B"
    sizes = args.tokens or ([512] if args.toy else [16384, 65536])
    print("  ".join(["run", "loss", *COLUMNS]))
    for tokens in sizes:
        name = f"{shape}-{tokens}"
        done = subprocess.run(
            command(args.work, name, shape, tokens, args), capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(
                f"{name} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-3000:]}"
            )
        print("  ".join(row(args.work, name, args.skip)), flush=True)


if __name__ == "__main__":
    main()
