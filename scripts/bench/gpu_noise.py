"""Compare a draw on this GPU with torch's own functions.

bash scripts/bench/gpu.sh gpu_noise [--quick] [--json FILE]
"""

import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from primerl.node.inference.sampler import draw, draw_eager
from primerl.scripts.bench.report import conclude, make_parser

VOCABULARY = 151_936


def milliseconds(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the milliseconds of device and host for each call."""
    for _ in range(5):
        run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    started = time.perf_counter()
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    return first.elapsed_time(last) / repeats, host * 1000 / repeats


def by_multinomial(logits: torch.Tensor) -> torch.Tensor:
    """Draw one token per row with torch; return its logprob."""
    logprobs = torch.log_softmax(logits.float(), -1)
    return logprobs.gather(1, torch.multinomial(logprobs.exp(), 1))


def main() -> int:
    """Measure and print a table."""
    options = make_parser(__doc__, "few calls").parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", version("triton"))
    print("rows dtype | draw (host) | draw_eager | argmax | log_softmax+multinomial, ms a call")
    found: list[dict[str, Any]] = []
    for rows in (256, 512):
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.randn(rows, VOCABULARY, device="cuda", dtype=dtype)
            seeds = torch.arange(rows, device="cuda")
            rest = torch.ones(rows, device="cuda"), seeds, seeds + 100
            ways: list[Callable[[], object]] = [
                lambda logits=logits, rest=rest: draw(logits, *rest),
                lambda logits=logits, rest=rest: draw_eager(logits, *rest),
                lambda logits=logits: logits.argmax(-1),
                lambda logits=logits: by_multinomial(logits),
            ]
            took = [milliseconds(way, 5 if options.quick else 50) for way in ways]
            (device, host), *others = took
            cells = [f"{device:.3f} ({host:.3f})", *(f"{one:.3f}" for one, _ in others)]
            name = str(dtype).removeprefix("torch.")
            print(rows, name, "|", " | ".join(cells), flush=True)
            names = ("draw", "draw_eager", "argmax", "multinomial")
            figures = {f"{way}_ms": one for way, (one, _) in zip(names, took, strict=True)}
            found.append({"rows": rows, "dtype": name, "draw_host_ms": host, **figures})
    return conclude(found, [], options.json)


if __name__ == "__main__":
    sys.exit(main())
