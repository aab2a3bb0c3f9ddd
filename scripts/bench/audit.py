"""What it costs to verify a token, against what it costs to generate it.

    python scripts/bench/audit.py [--shape tiny|50m|0.6b] [--requests N] [--quick] [--json FILE]
        [--vllm-tokens-per-second N]

The embedded engine generates for `--requests` requests at once, with proofs; then an auditor measures all of
it in the same process, on the same device, with as many threads: once under the version that is claimed, and
once beside the version before, as a trainer does. On a CPU seconds are CPU seconds of the process, so that
neighbours on the machine do not count; on a GPU they are those of the clock, and torch's profiler says how
much of them the GPU worked, and on what. The parts of an audit are measured apart: the packed prefill (and
of it the products, attention, and what lies between), the head's logits, and the noise of all tokens of the
vocabulary. At last the same audit through the process that a node uses.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from update import PROMPT, SHAPES, make_model, moved

from primerl.crypto.hashing import digest
from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.model import build_network
from primerl.node.inference.sampler import draw
from primerl.node.verification.auditor import MEASURES, AuditItem, Auditor, Measured, SampledSpan
from primerl.node.verification.bounds import proof_contract
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.verification.replay import BATCH_TOKENS
from primerl.node.weights.state import State
from primerl.protocol.manifests import (
    EnvironmentContract,
    ModelContract,
    RunLimits,
    RunManifest,
    SamplingContract,
)
from primerl.tests.support.prefill_core import PrefillCore

GOAL = 20.0
"""Verified tokens per second over generated ones."""
OWN, BEFORE = 1, 0
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "products": ("nvjet", "gemm", "cutlass", "aten::mm", "aten::addmm"),
    "draws": ("_score", "_choose"),
    "copies": ("memcpy", "memset"),
}
"""Words in the names of kernels or operations; whatever has none of them is "between"."""


@dataclass(frozen=True)
class Bench:
    """A model and how it is used."""

    config: EngineConfig
    run: RunManifest
    model_dir: Path
    states: dict[int, State]
    threads: int


def make_bench(directory: Path, options: argparse.Namespace) -> Bench:
    """The model of `--shape`, and its version before."""
    cuda = torch.cuda.is_available()
    state = make_model(directory, options.shape)
    before, _ = moved(state, 0.01)
    config = EngineConfig(
        dtype="bfloat16" if cuda else "float32",
        max_batch=options.requests,
        max_model_len=len(PROMPT) + options.length,
    )
    vocabulary = state["model.embed_tokens.weight"].shape[0]
    none = digest(b"")
    run = RunManifest(
        name="bench",
        created=0,
        software="",
        trainer=none,
        model=ModelContract("bench", (), none, vocabulary, ()),
        environment=EnvironmentContract("bench", b"", 0, ""),
        sampling=SamplingContract(1.0, options.length),
        limits=RunLimits(2, 8, 1, config.max_model_len),
        proofs=proof_contract(RunConfig(engine=config), none.hex()),
        max_steps=1,
        nonce=none,
    )
    return Bench(config, run, directory, {OWN: state, BEFORE: before}, options.threads)


def clock() -> float:
    """Seconds of the clock on a GPU, of the CPU elsewhere."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


async def seconds(work: Callable[[], Awaitable[Any]]) -> float:
    """What `work` takes the second time: kernels are chosen and compiled, memory is there."""
    await work()
    began = clock()
    await work()
    return clock() - began


# -- generating ------------------------------------------------------------------------------------


async def generate(bench: Bench, requests: int, length: int) -> tuple[list[AuditItem], float]:
    """Branches with proofs, and the seconds that they took."""
    engine = HfEngine(bench.config)
    items: list[AuditItem] = []

    async def one(number: int) -> None:
        done = await engine.generate(GenerateRequest(PROMPT, length, 1.0, number, ()))
        start, end = len(PROMPT), len(PROMPT) + len(done.token_ids)
        items.append(
            AuditItem(
                token_ids=[*PROMPT, *done.token_ids],
                replies=[SampledSpan(start, end, number)],
                logprobs=done.logprobs,
                versions=[OWN] * (end - start),
                proof=done.proof,
            )
        )

    async def batch() -> None:
        items.clear()
        await asyncio.gather(*map(one, range(requests)))

    try:
        await engine.start(bench.model_dir, fingerprint=bench.run.proofs.fingerprint)
        await engine.load(OWN, bench.states[OWN])
        return items, await seconds(batch)
    finally:
        await engine.close()


# -- verifying -------------------------------------------------------------------------------------


async def audited(bench: Bench, auditor: Auditor, items: list[AuditItem]) -> dict[str, float]:
    """Seconds of an audit alone and beside another version, and what it found of the honest branches."""

    async def audit(others: dict[int, list[int]]) -> list[Measured]:
        found = await auditor.audit(items, bench.states, others)
        return [one for one in found if isinstance(one, Measured)]

    try:
        await auditor.start(bench.model_dir, bench.run)
        alone = await seconds(lambda: audit({}))
        beside = await seconds(lambda: audit({OWN: [BEFORE]}))
        found = await audit({OWN: [BEFORE]})
        busy = await busy_seconds(lambda: audit({})) if torch.cuda.is_available() else {}
    finally:
        await auditor.close()
    assert len(found) == len(items), "an honest branch could not be measured"
    worst = {name: max(getattr(one, name) for one in found) for name in MEASURES}
    shares = {f"busy with {kind}, share of the audit": s / alone for kind, s in busy.items()}
    whole = {"GPU busy, share of the audit": sum(busy.values()) / alone} if busy else {}
    return {"alone": alone, "beside": beside} | worst | whole | shares


async def busy_seconds(work: Callable[[], Awaitable[Any]]) -> dict[str, float]:
    """Seconds that a GPU's kernels take, or a CPU's operations, by kind."""
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        await work()
        clock()
    found: dict[str, float] = {}
    rows: Any = seen.key_averages()
    for row in rows:
        spent = row.self_device_time_total if cuda else row.self_cpu_time_total
        name = row.key.lower()
        kinds = (kind for kind, words in KINDS.items() if any(word in name for word in words))
        kind = next(kinds, "between")
        found[kind] = found.get(kind, 0.0) + spent / 1e6
    return found


async def parts(bench: Bench, items: list[AuditItem], rows: int = 256) -> dict[str, float]:
    """Microseconds a token of the parts of an audit, of `rows` logits at a time."""
    network = build_network(
        bench.model_dir, bench.states[OWN], dtype=bench.config.dtype, device="auto"
    )
    limit = BATCH_TOKENS[network.device.type]
    batch = [one.token_ids for one in items[: max(1, limit // len(items[0].token_ids))]]
    lengths = [len(one) for one in batch]
    tokens = torch.tensor([token for one in batch for token in one], device=network.device)

    def timed(work: Callable[[], Any], count: int) -> float:
        work()
        began, rounds = clock(), 0
        while clock() - began < 0.5:
            work()
            rounds += 1
        return 1e6 * (clock() - began) / rounds / count

    with torch.inference_mode():
        hidden = network.packed(tokens, lengths)[:rows]
        logits = network.logits(hidden)
        column = torch.arange(len(hidden), device=network.device)
        ones = torch.ones(len(hidden), device=network.device)
        prefill = timed(lambda: network.packed(tokens, lengths), tokens.numel())

        async def once() -> None:
            network.packed(tokens, lengths)

        busy = await busy_seconds(once)
        each = {
            f"of which {kind}, share": spent / sum(busy.values()) for kind, spent in busy.items()
        }
        return {
            "packed prefill, us a token of the branch": prefill,
            **each,
            "logits, us": timed(lambda: network.logits(hidden), len(hidden)),
            "noise and draw, us": timed(lambda: draw(logits, ones, column, column), len(hidden)),
        }


async def run(options: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        bench = make_bench(Path(name), options)
        items, took = await generate(bench, options.requests, options.length)
        tokens = sum(len(one.logprobs) for one in items)
        mine = await audited(bench, PrefillCore(bench.config), items)
        began = time.perf_counter()
        child = HfAuditor(bench.config, timeout_s=600.0, threads=options.threads)
        await audited(bench, child, items)
        whole = time.perf_counter() - began
        apart = await parts(bench, items)
    found = {
        "elements": sum(tensor.data.size for tensor in bench.states[OWN].values()),
        "requests at once": options.requests,
        "tokens": tokens,
        "generated, tokens/s": tokens / took,
        "verified, tokens/s": tokens / mine["alone"],
        "verified beside another version, tokens/s": tokens / mine["beside"],
        "share audited of a proven worker": bench.run.proofs.audit_rate,
        "generation / audits of a proven worker": took
        / mine["beside"]
        / bench.run.proofs.audit_rate,
        **{key: value for key, value in mine.items() if "busy" in key},
        **apart,
        "five audits in a process and its start, s": whole,
        **{f"honest, most: {key}": mine[key] for key in MEASURES},
    }
    if options.vllm_tokens_per_second:
        found["generated by vLLM, tokens/s"] = options.vllm_tokens_per_second
    return found


def judge(found: dict[str, float]) -> list[dict[str, Any]]:
    """The goals with what was reached."""
    verified = found["verified, tokens/s"]
    goals = [("verified / generated", verified / found["generated, tokens/s"])]
    beside = found["verified beside another version, tokens/s"]
    goals.append(
        ("verified beside another version / generated", beside / found["generated, tokens/s"])
    )
    if vllm := found.get("generated by vLLM, tokens/s"):
        goals.append(("verified / generated by vLLM", verified / vllm))
    return [{"name": n, "value": v, "goal": GOAL, "ok": v >= GOAL} for n, v in goals]


def main() -> int:
    """Measure, print, and say by the exit code whether every goal was met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--requests", type=int, default=32, help="that are generated at once")
    parser.add_argument("--length", type=int, default=256, help="tokens of a completion")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--vllm-tokens-per-second", type=float, metavar="N", help="as measured")
    parser.add_argument("--quick", action="store_true", help="few requests, short ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.length = 4, 48
    found = asyncio.run(run(options))
    goals = judge(found)
    for name, value in found.items():
        print(f"{name:42} {value:14.6g}")
    for goal in goals:
        mark = "ok  " if goal["ok"] else "MISS"
        print(f"{mark} {goal['name']}: {goal['value']:.4g} (goal {goal['goal']:g})")
    if options.json:
        options.json.write_text(json.dumps({"rows": found, "goals": goals}, indent=2) + "\n")
    return 0 if all(goal["ok"] for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
