"""Measure a draw on this GPU beside torch's own ways: `bash scripts/bench/gpu.sh gpu_noise`."""

import time
from collections.abc import Callable
from importlib.metadata import version

import torch

from primerl.node.inference.sampler import draw, draw_eager

VOCABULARY = 151_936
REPEATS = 50


def milliseconds(run: Callable[[], object]) -> tuple[float, float]:
    """Of the device and of the host, for each call."""
    for _ in range(5):
        run()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    started = time.perf_counter()
    first.record()
    for _ in range(REPEATS):
        run()
    last.record()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    return first.elapsed_time(last) / REPEATS, host * 1000 / REPEATS


def by_multinomial(logits: torch.Tensor) -> torch.Tensor:
    """One token a row and its logprob, as torch draws it."""
    logprobs = torch.log_softmax(logits.float(), -1)
    return logprobs.gather(1, torch.multinomial(logprobs.exp(), 1))


def main() -> None:
    """Print a table."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", version("triton"))
    print("rows dtype | draw (host) | draw_eager | argmax | log_softmax+multinomial, ms a call")
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
            (device, host), *others = map(milliseconds, ways)
            cells = [f"{device:.3f} ({host:.3f})", *(f"{one:.3f}" for one, _ in others)]
            print(rows, str(dtype).removeprefix("torch."), "|", " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
