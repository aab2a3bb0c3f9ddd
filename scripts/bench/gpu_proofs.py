"""Measure the cost of seeded sampling and proofs in vLLM on a GPU.

    bash scripts/bench/gpu.sh gpu_proofs [--sequences 256,512] [--repeats 3] [--quick] [--json FILE]

Engines of one shape run side by side on one GPU and take turns, so that ratios are of one run: bare vLLM (plain
sampling, with logprobs, with its own seeds and logprobs), and this package's engine without a proof and with
proofs. "burst": all sequences at once, of one length; "steady": as many at any time, of different lengths, so
that requests come and go in most steps. The host is the bottleneck of vLLM at this size and its speed
fluctuates by some per cent, so ratios are taken within a round. With VLLM_USE_V2_MODEL_RUNNER=0 it measures
vLLM's older runner.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.node.inference.vllm_arguments import engine_arguments, read_shape
from primerl.node.inference.vllm_sampling import Recorder, SampledStep
from primerl.scripts.bench.models import SHAPES, random_policy
from primerl.scripts.bench.report import conclude, make_parser

PROMPT, TOKENS = 64, 256
LENGTH = 512
VLLM: dict[str, Any] = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, *range(32, 513, 32)],
    },
    "max_num_batched_tokens": 16384,
    "enable_prefix_caching": False,
    # per engine; as much must be free when an engine starts, even while others start
    "kv_cache_memory_bytes": 16 << 30,
    "gpu_memory_utilization": 0.1,
}
Generate = Callable[[int, int], Awaitable[int]]
"""(seed, tokens) -> number of tokens generated."""


def prompt(seed: int) -> tuple[int, ...]:
    """Make a prompt of PROMPT tokens."""
    return tuple((31 * seed + 7 * place) % 997 + 3 for place in range(PROMPT))


def config(most: int) -> EngineConfig:
    """Configure vLLM for at most `most` sequences."""
    return EngineConfig(
        type="vllm",
        dtype="bfloat16",
        max_batch=most,
        max_model_len=LENGTH,
        vllm=VLLM,
    )


# -- engines ---------------------------------------------------------------------------------------


def start_bare(directory: Path, most: int) -> Any:
    """Start stock vLLM with our arguments except the worker extension; random weights."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore

    arguments = engine_arguments(config(most), directory, read_shape(directory), cpu=False)
    del arguments["worker_extension_cls"]
    arguments["logprobs_mode"] = "processed_logprobs"
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def bare(llm: Any, **options: Any) -> Generate:
    """Sample by vLLM itself; with `seeded`, with a seed for each request."""
    from vllm import SamplingParams  # pyright: ignore
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore

    seeded = options.pop("seeded", False)

    async def generate(seed: int, tokens: int) -> int:
        generate.number += 1  # type: ignore[attr-defined]
        parameters = SamplingParams(
            max_tokens=tokens,
            temperature=1.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            seed=seed if seeded else None,
            **options,
        )
        final: Any = None
        name = f"{id(generate)}-{generate.number}"  # type: ignore[attr-defined]
        async for output in llm.generate(
            {"prompt_token_ids": list(prompt(seed))}, parameters, name
        ):
            final = output
        return len(final.outputs[0].token_ids)

    generate.number = 0  # type: ignore[attr-defined]
    return generate


def ours(engine: HostedEngine) -> Generate:
    """Generate with a node's engine."""

    async def generate(seed: int, tokens: int) -> int:
        request = GenerateRequest(prompt(seed), tokens, 1.0, 2**62 + seed, ())
        return len((await engine.generate(request)).token_ids)

    return generate


# -- tokens per second -----------------------------------------------------------------------------


async def burst(generate: Generate, sequences: int) -> float:
    """Return tokens per second of `sequences` simultaneous requests of TOKENS tokens."""
    began = time.perf_counter()
    tokens = await asyncio.gather(*(generate(seed, TOKENS) for seed in range(sequences)))
    return sum(tokens) / (time.perf_counter() - began)


async def steady(generate: Generate, sequences: int) -> float:
    """Return tokens per second with `sequences` requests at any time, each of 64 to 256 tokens."""
    lengths = np.random.default_rng(0).integers(64, 257, 2 * sequences).tolist()
    pending = iter(enumerate(lengths))

    async def client() -> int:
        return sum([await generate(seed, length) for seed, length in pending])

    began = time.perf_counter()
    tokens = await asyncio.gather(*(client() for _ in range(sequences)))
    return sum(tokens) / (time.perf_counter() - began)


async def speeds(ways: dict[str, Generate], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every way in every round, in rotating order, for each load and size."""
    found: list[dict[str, Any]] = []
    for generate in ways.values():  # warms up
        await asyncio.gather(*(generate(seed, 40) for seed in range(max(options.sequences))))
    names = list(ways)
    for sequences in options.sequences:
        for load in (burst, steady) if sequences < options.steady_below else (burst,):
            rounds: list[dict[str, float]] = []
            for number in range(options.repeats):
                turn = number % len(names)
                rounds.append({})
                for name in names[turn:] + names[:turn]:
                    rounds[-1][name] = await load(ways[name], sequences)
            found.append({"sequences": sequences, "load": load.__name__, "rounds": rounds})
            print_speeds(found[-1], names)
    return found


def print_speeds(row: dict[str, Any], names: list[str]) -> None:
    """Print best tokens per second, and medians over the rounds of the ratios within a round."""
    print(
        f"\n{row['sequences']} sequences, {row['load']}, {len(row['rounds'])} rounds: tokens/s (best),"
    )
    print(
        "  % of plain, % of ours without proof (median of the ratios, standard error of their mean)"
    )
    for name in names:
        best = max(one[name] for one in row["rounds"])
        line = f"  {name:22} {best:8.0f}"
        for base in ("vllm plain", "ours, no proof"):
            ratios = [100 * one[name] / one[base] for one in row["rounds"]]
            error = np.std(ratios) / max(1, len(ratios) - 1) ** 0.5
            line += f" {np.median(ratios):9.1f} +- {error:.1f}"
        print(line, flush=True)


# -- cost of the recorder alone --------------------------------------------------------------------


def recorder_costs(width: int, vocabulary: int, sequences: list[int]) -> list[dict[str, Any]]:
    """Return the microseconds of a decoding step in the recorder, for the host and in total."""
    device, steps = torch.device("cuda"), 200
    found: list[dict[str, Any]] = []
    for count in sequences:
        hidden = torch.randn(count, width, device=device).to(torch.bfloat16)
        logits = torch.randn(count, vocabulary, device=device).to(torch.bfloat16)
        for fingerprint in ("", "projection"):
            with torch.inference_mode():
                recorder = Recorder(
                    device,
                    width=width,
                    dtype=hidden.dtype,
                    fingerprint=fingerprint,
                    requests=count,
                    length=LENGTH,
                )
                recorder.warm_up(logits, hidden)
                ids = [f"r{row}" for row in range(count)]
                for row, name in enumerate(ids):
                    recorder.admit(name, PROMPT, row, row, 1.0)
                hosts: list[float] = []
                began = 0.0
                for number in range(2 * steps):
                    if number in (16, steps):
                        torch.cuda.synchronize()
                        began, hosts = time.perf_counter(), []
                    one = time.perf_counter()
                    positions = np.full(count, PROMPT + number % 400, np.int64)
                    none = np.zeros(count, np.int64)
                    recorder.begin(
                        SampledStep(list(ids), positions, np.ones(count, bool), hidden, none)
                    )
                    recorder.draw(logits)
                    recorder.end()
                    hosts.append(time.perf_counter() - one)
                torch.cuda.synchronize()
                whole = (time.perf_counter() - began) / steps
            figures = {"host_us": 1e6 * float(np.median(hosts)), "whole_us": 1e6 * whole}
            found.append({"sequences": count, "fingerprint": fingerprint, **figures})
            print(f"recorder alone {count:4} {fingerprint or 'none':10}", figures, flush=True)
    return found


# -- all measurements ------------------------------------------------------------------------------


async def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Start every engine, then measure in turns."""
    state = random_policy(directory, options.shape)
    shape = SHAPES[options.shape]
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "date": time.strftime("%F")}
    if not options.speeds_only:
        report["recorder"] = recorder_costs(
            shape["hidden_size"], shape["vocab_size"], options.sequences
        )
    torch.cuda.empty_cache()
    names = ["", "projection"]
    most = max(options.sequences)
    began = time.perf_counter()
    engines = {name: HostedEngine(config(most)) for name in names}
    llm, *_ = await asyncio.gather(
        asyncio.to_thread(start_bare, directory, most),
        *(engine.start(directory, fingerprint=name) for name, engine in engines.items()),
    )
    try:
        for engine in engines.values():
            await engine.load(0, state)
        print(f"engines started in {time.perf_counter() - began:.0f} s", flush=True)
        labels = {"": "ours, no proof", "projection": "ours, projection"}
        ways = {
            "vllm plain": bare(llm),
            "vllm logprobs": bare(llm, logprobs=0, flat_logprobs=True),
            "vllm seeds, logprobs": bare(llm, logprobs=0, flat_logprobs=True, seeded=True),
        } | {labels[name]: ours(engine) for name, engine in engines.items()}
        if options.ways:
            ways = {name: ways[name] for name in options.ways.split(";")}
        report["speeds"] = await speeds(ways, options)
    finally:
        closing: list[Coroutine[Any, Any, Any]] = [one.close() for one in engines.values()]
        await asyncio.gather(asyncio.to_thread(llm.shutdown), *closing)
    return report


def main() -> int:
    """Print the tables."""
    parser = make_parser(__doc__, "few sequences, one round")
    parser.add_argument(
        "--sequences", type=lambda text: list(map(int, text.split(","))), default=[256, 512]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--shape", choices=[name for name in SHAPES if name != "tiny"], default="0.6b"
    )
    parser.add_argument("--speeds-only", action="store_true")
    parser.add_argument("--ways", default="", help="names of the table, between semicolons")
    parser.add_argument("--steady-below", type=int, default=1024)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 2
    if options.quick:
        options.sequences, options.repeats = [32], 1
    with tempfile.TemporaryDirectory() as name:
        report = asyncio.run(measure(Path(name), options))
    return conclude(report.pop("speeds"), [], options.json, **report)


if __name__ == "__main__":
    sys.exit(main())
