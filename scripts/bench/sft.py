"""Measure `primerl-node sft` as a user runs it: tokens/s, MFU, memory, and data loading.

    python scripts/bench/sft.py                 0.6B at 16,384 and 65,536 tokens a step, on one GPU
    python scripts/bench/sft.py --quick         the same at toy size, on a CPU
    python scripts/bench/sft.py -- --training.activation-checkpointing full

The model has the shape's config with random weights; rows of about 2,000 tokens are made by the taskset
reverse-text. The first steps, in which kernels are compiled and tuned, are left out; figures are medians of the
rest. All files are written below --work.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from primerl.scripts.bench.models import SHAPES
from primerl.scripts.bench.report import conclude, make_parser

COLUMNS = ("perf/throughput", "perf/mfu", "perf/peak_memory", "time/step", "time/load_data")


def command(work: Path, name: str, tokens: int, options: argparse.Namespace) -> list[str]:
    """Return the command line of one run of `primerl-node sft`."""
    shortest, longest = (20, 24) if options.quick else (950, 1000)
    shape = SHAPES["tiny" if options.quick else "0.6b"] | {"max_position_embeddings": 65536}
    model = [
        part
        for field, value in shape.items()
        for part in (f"--model.create.{field.replace('_', '-')}", str(value))
    ]
    return [
        *(sys.executable, "-m", "primerl.cli.main", "sft", "--clean"),
        *("--output-dir", str(work), "--name", name, "--no-fsync"),
        *model,
        *("--data.environment.id", "reverse-text"),
        *("--data.environment.args.min-len", str(shortest)),
        *("--data.environment.args.max-len", str(longest)),
        *("--validation.rows", "8", "--validation.interval", "1000000"),
        *("--checkpoint.interval", "1000000", "--max-steps", str(options.steps)),
        *("--batch-tokens", str(tokens), "--training.seq-len", str(tokens)),
        *options.more,
    ]


def row(work: Path, name: str, skip: int) -> dict[str, float]:
    """Return medians over the steps after the first `skip`."""
    lines = [json.loads(line) for line in (work / name / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["step"] > skip]
    found = {"loss": float(measured[-1]["loss/mean"])}
    for column in COLUMNS:
        if values := [line[column] for line in measured if column in line]:
            found[column] = statistics.median(values)
    return found


def main() -> int:
    """Run and print one line per size."""
    parser = make_parser(__doc__, "at toy size, on a CPU")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench-sft"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=6)
    parser.add_argument("--tokens", type=int, nargs="+", default=[])
    parser.add_argument("more", nargs="*", help="further flags of sft, after --")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("  ".join(["run", "loss", *COLUMNS]))
    for tokens in options.tokens or ([512] if options.quick else [16384, 65536]):
        name = f"{'tiny' if options.quick else '0.6b'}-{tokens}"
        done = subprocess.run(
            command(options.work, name, tokens, options), capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(
                f"{name} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-3000:]}"
            )
        found = row(options.work, name, options.skip)
        print("  ".join([name, *(f"{one:,.4g}" for one in found.values())]), flush=True)
        rows.append({"run": name, **found})
    return conclude(rows, [], options.json)


if __name__ == "__main__":
    sys.exit(main())
