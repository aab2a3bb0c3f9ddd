"""Measure the cost of checkpoints: staging, writing, reading, and concurrent steps.

    python scripts/bench/checkpoints.py [--shape tiny|50m|0.6b|4b] [--tokens N] [--directory DIR] [--quick]
        [--json FILE]

A learner as in a run, with random weights, is saved synchronously (`save`), and by `stage` and a write in a
thread while steps are timed beside it. GB are those of the files: 12 bytes a parameter.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch

from primerl.node.config.training import TrainingConfig
from primerl.node.training.backend import TrainBatch
from primerl.node.training.checkpoint import sync_tree
from primerl.node.training.learner import Learner
from primerl.scripts.bench.models import SHAPES, fake_batch, make_model
from primerl.scripts.bench.report import conclude, make_parser

ON_CUDA = torch.cuda.is_available()
WARM_STEPS, STEPS = 3, 5
CHECKED = 8
"""Tensors compared with their saved values."""


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of `work`, until the device is done as well."""
    began = time.perf_counter()
    work()
    if ON_CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def measure(learner: Learner, tokens: int, directory: Path) -> dict[str, float]:
    """Return seconds by operation."""
    number = iter(range(1, 1 << 20))

    def step() -> None:
        at = next(number)
        learner.step(TrainBatch(at, fake_batch([tokens], learner.vocabulary, seed=at)))

    for _ in range(WARM_STEPS):
        step()
    found = {"step": median(timed(step) for _ in range(STEPS))}
    found["save"] = timed(lambda: learner.save(directory / "at once"))
    found["first stage"] = timed(learner.stage)
    found["stage"] = timed(learner.stage)
    kept = [one.data.cpu().clone() for one in learner.saved().cut().slices[:CHECKED]]
    learner.stage()
    with ThreadPoolExecutor(1) as writer:
        writing = writer.submit(lambda: timed(lambda: learner.write_staged(directory / "beside")))
        beside = [timed(step)]
        while not writing.done():
            beside.append(timed(step))
        found["write beside steps"] = writing.result()
    found["step beside the write"] = median(beside)
    found["sync"] = timed(lambda: sync_tree(directory / "beside"))
    found["load"] = timed(lambda: learner.load(directory / "beside"))
    back = [one.data.cpu() for one in learner.saved().cut().slices[:CHECKED]]
    assert all(torch.equal(one, other) for one, other in zip(kept, back, strict=True))
    return found


def main() -> int:
    """Measure and print a table."""
    parser = make_parser(__doc__, "a tiny model")
    parser.add_argument("--shape", default="0.6b" if ON_CUDA else "tiny", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=int, default=16384 if ON_CUDA else 256)
    parser.add_argument("--directory", type=Path, default=None, help="where to write")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.shape, chosen.tokens = "tiny", 256
    home = Path(tempfile.mkdtemp(dir=chosen.directory))
    try:
        model_dir = home / "model"
        make_model(model_dir, chosen.shape)
        config = TrainingConfig(seq_len=chosen.tokens, threads=0 if ON_CUDA else 1)
        learner = Learner.build(model_dir, config, max_steps=1000, seed=0, temperature=1.0)
        found = measure(learner, chosen.tokens, home)
        size = sum(file.stat().st_size for file in (home / "beside").iterdir()) / 1e9
        learner.close()
    finally:
        shutil.rmtree(home)
    print(f"{chosen.shape}, {chosen.tokens} tokens a step, {size:.2f} GB")
    for name, seconds in found.items():
        rate = f"{size / seconds:8.2f} GB/s" if not name.startswith("step") else ""
        print(f"{name:24}{seconds:9.3f} s{rate}")
    return conclude(found, [], chosen.json)


if __name__ == "__main__":
    sys.exit(main())
