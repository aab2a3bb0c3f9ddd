"""vLLM as the auditor: honest noise, cheats, and cost, with calibrated numerics and with exact ones.

    bash scripts/bench/gpu.sh gpu_audit [--shape 0.6b|4b] [--hidden N --layers N] [--rollouts 256] [--reply 64]
        [--numerics exact calibrated] [--eager] [--minutes 4.7] [--small]

One engine generates and one audits, on one GPU; random weights, sharp enough that distributions are not flat.
Groups of eight rollouts share a prompt. A table is printed: honest noise (mean, largest of a rollout, and how
many have equal bits); how many rollouts of each cheat are rejected by the bounds of a run with these numerics,
and how far they are above the largest honest one; tokens/s of audits beside the roofline (2 x parameters x
tokens / peak) and of generation; and the seconds of a swap between two versions. Compare both numerics: the
difference in generation is what exact mode costs. VLLM_USE_V2_MODEL_RUNNER=0 measures vLLM's older runner.
--small is for a machine without a GPU, to see that this runs. What the time does not allow is left out.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from goals import judge_goals, show_goals  # pyright: ignore
from msgspec import structs
from shapes import SHAPES  # pyright: ignore
from update import make_model  # pyright: ignore

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.auditor_cases import make_run, measured
from support.exact_cases import (
    altered,
    claiming,
    low_rank,
    near_ties,
    play,
    requests,
    shifted,
    stepped,
)

from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.inference.hosted import HostedEngine
from primerl.node.inference.numerics import numerics_of
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.ops.errors import NodeError
from primerl.node.verification.auditor import MEASURES, AuditItem, Measured, evidence
from primerl.node.verification.bounds import proof_contract
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.judge import judge
from primerl.node.verification.self_calibration import Reference, make_bounds
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.node.weights.adapters import changes
from primerl.node.weights.state import State
from primerl.protocol.manifests import ProofContract, RunManifest
from primerl.protocol.rollouts import Evidence

OWN, BEFORE, OTHER = 1, 0, 9
PROMPT = 64
SEQUENCES = 256
CHEATED = 64
"""Rollouts of each cheat."""
HONEST = "honest rollouts that are rejected"
SEEN = {
    **dict.fromkeys(
        ("temperature 1.03", "logprobs + 0.075", "low rank, 1 %", "a step of lr 1e-6"), CHEATED
    ),
    "top-p 0.98": CHEATED // 2,
}
"""Rollouts of each cheat that have to be suspect at least: all, but a reply with no token that top-p would cut
is honest. What is smaller is measured, not promised."""
GAIN = 2.0
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""bf16, dense."""
SMALL = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
}
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BEGAN = time.monotonic()


def say(line: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {line}", flush=True)


@dataclass
class Bench:
    """Two engines over one model."""

    directory: Path
    states: dict[int, State]
    run: RunManifest
    contract: ProofContract
    """The bounds that judge."""
    config: EngineConfig
    engine: HostedEngine
    auditor: VllmAuditor
    options: argparse.Namespace

    @property
    def vocabulary(self) -> int:
        """Tokens."""
        return self.states[OWN]["model.embed_tokens.weight"].shape[0]

    @property
    def left_s(self) -> float:
        """Of the time that was given."""
        return 60 * self.options.minutes - (time.monotonic() - BEGAN)

    async def audit(self, items: Sequence[AuditItem], *, beside: bool = False) -> list[Measured]:
        """Measure rollouts of OWN."""
        others = {OWN: [BEFORE]} if beside else {}
        return measured(await self.auditor.audit(items, self.states, others))


def make_bench(directory: Path, states: dict[int, State], numerics: str, options: Any) -> Bench:
    """Engines that are not started."""
    vllm: dict[str, Any] = {"enforce_eager": True} if options.eager else {}
    if CUDA:
        vllm["gpu_memory_utilization"] = 0.45
    exact, length = numerics == "exact", PROMPT + options.reply + 64
    config = EngineConfig(
        type="vllm",
        dtype="bfloat16",
        max_batch=SEQUENCES,
        max_model_len=length,
        batch_invariant=exact,
        vllm=vllm,
    )
    told = {"engine": config.model_dump(), "verification": {"numerics": numerics}}
    run = make_run("bfloat16")
    run = structs.replace(
        run,
        proofs=proof_contract(RunConfig.model_validate(told), ""),
        sampling=structs.replace(run.sampling, temperature=1.0),
        limits=structs.replace(run.limits, max_model_len=length),
    )
    engine, auditor = HostedEngine(config), VllmAuditor(config, timeout_s=240.0)
    return Bench(directory, states, run, run.proofs, config, engine, auditor, options)


def make_states(directory: Path, options: argparse.Namespace) -> dict[int, State]:
    """The policy, that before it, and two that cheats use."""
    made = make_model(directory, options.shape)
    own = {
        name: from_torch((to_torch(one).to(DEVICE) * GAIN).cpu()) if len(one.shape) == 2 else one
        for name, one in made.items()
    }
    return {OWN: own, BEFORE: altered(own, stepped(1e-6), DEVICE)}


async def seconds(work: Callable[[], Awaitable[Any]], rounds: int = 2) -> float:
    """The quickest of some rounds."""
    took: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        took.append(time.perf_counter() - began)
    return min(took)


# -- what is measured ------------------------------------------------------------------------------


async def show_speeds(bench: Bench, items: Sequence[AuditItem]) -> dict[str, float]:
    """Tokens/s of generation and of audits, with and without shared prompts, and a swap."""
    wanted = requests(len(items), PROMPT, bench.options.reply, bench.vocabulary)
    tokens = sum(len(one.logprobs) for one in items)
    read = sum(len(one.token_ids) for one in items)
    drawn = await seconds(lambda: play(bench.engine, wanted))
    # each round under the other version first, which empties the cache of prefixes
    alone: list[float] = []
    swaps: list[float] = []
    [one, *_] = items
    for _ in range(3):
        old = claiming([one], BEFORE)
        await bench.auditor.audit(old, bench.states, {})
        began = time.perf_counter()
        await bench.audit([one])
        swaps.append(time.perf_counter() - began)
        began = time.perf_counter()
        await bench.audit(items)
        alone.append(time.perf_counter() - began)
    beside = await seconds(lambda: bench.audit(items, beside=True))
    apart = [replace(one, token_ids=list(one.token_ids)) for one in items]
    for number, other in enumerate(
        apart
    ):  # prompts that nobody shares; what they measure is of no interest
        other.token_ids[0] = number % bench.vocabulary  # type: ignore[index]
        other.token_ids[1] = number // bench.vocabulary  # type: ignore[index]
    await bench.auditor.audit(claiming([one], BEFORE), bench.states, {})
    await bench.audit([one])
    began = time.perf_counter()
    await bench.audit(apart)
    unshared = time.perf_counter() - began
    parameters = sum(tensor.data.size for tensor in bench.states[OWN].values())
    found = {
        "generated at 256 sequences, tokens/s": tokens / drawn,
        "audited, shared prompts, tokens/s": tokens / min(alone),
        "audited, own prompts, tokens/s": tokens / unshared,
        "audited beside another version, tokens/s": tokens / beside,
        "audited / generated": drawn / min(alone),
        "swap and one rollout, s": min(swaps),
    }
    if CUDA:
        name = torch.cuda.get_device_name()
        peak = next((flops for word, flops in PEAK_FLOPS.items() if word in name), 989e12)
        floor = 2 * parameters * read / peak
        found["roofline of own prompts, tokens/s"] = tokens / floor
        found["audited / roofline"] = floor / unshared
    return found


def honest_row(found: Sequence[Measured]) -> str:
    """Mean and largest of each measure; rollouts whose states are equal to the last bit."""
    equal = sum(one.fingerprint == 0 for one in found) / len(found)
    parts = [
        f"{name} {sum(getattr(one, name) for one in found) / len(found):.2e}"
        f"/{max(getattr(one, name) for one in found):.2e}"
        for name in MEASURES
    ]
    return f"{', '.join(parts)}; rollouts with equal bits {equal:.1%}"


def evidences(found: Sequence[Measured]) -> list[Evidence]:
    """One of each rollout."""
    return [evidence(CheckedRollout(0, 0, [], 0.0), [one]) for one in found]


def calibrate(bench: Bench, honest: Sequence[Measured]) -> None:
    """Judge by bounds that are measured on these rollouts, as a run does."""
    numerics = numerics_of(bench.config)
    seen = [Reference(b"", OWN, one) for one in evidences(honest)]
    bounds = make_bounds(numerics, seen, bench.run.proofs, number=1, term=0)
    say(f"bounds of {numerics}: suspect {bounds.suspect}, reject {bounds.reject}")
    bench.contract = bounds.applied(bench.run.proofs)


def rejections(bench: Bench, found: Sequence[Measured]) -> tuple[int, int]:
    """How many are rejected, and how many are suspect."""
    judged = [judge(seen, bench.contract) for seen in evidences(found)]
    return sum(one.reason is not None for one in judged), sum(one.suspect for one in judged)


async def cheats(bench: Bench, items: list[AuditItem]) -> dict[str, list[Measured]]:
    """The measures of some rollouts of each cheat."""
    own, few = bench.states[OWN], items[:CHEATED]
    wanted = requests(CHEATED, PROMPT, bench.options.reply, bench.vocabulary)
    found: dict[str, list[Measured]] = {}
    for warmer in (1.003, 1.01, 1.03):
        hot = await play(bench.engine, [replace(one, temperature=warmer) for one in wanted])
        found[f"temperature {warmer}"] = await bench.audit(hot)
    cut = await play(bench.engine, [replace(one, top_p=0.98) for one in wanted])
    found["top-p 0.98"] = await bench.audit(cut)
    for shift in (0.001, 0.01, 0.03, 0.075):
        found[f"logprobs + {shift}"] = await bench.audit(shifted(few, shift))
    changes_of = {f"low rank, {100 * share:g} %": low_rank(share) for share in (0.001, 0.003, 0.01)}
    for name, change in [("a step of lr 1e-6", stepped(1e-6)), *changes_of.items()]:
        if bench.left_s < 30:
            say(f"left out: {name}")
            continue
        first = name.startswith("a step")
        other = bench.states[BEFORE] if first else altered(own, change, DEVICE)
        apart = changes(own, other)  # the same positions there and back
        await bench.engine.update(OTHER, other, apart)
        bad = claiming(await play(bench.engine, wanted), OWN)
        await bench.engine.update(OWN, own, apart)
        found[name] = await bench.audit(bad, beside=first)
    if bench.left_s > 30:
        tied = await near_ties(
            bench.auditor, few[:16], bench.directory, own, dtype="bfloat16", device=DEVICE
        )
        found["nearest tie of 64 picked"] = await bench.audit(tied)
    return found


async def measure(bench: Bench, numerics: str) -> dict[str, float]:
    """Everything of one kind of numerics."""
    options = bench.options
    began = time.perf_counter()
    await asyncio.gather(
        bench.engine.start(bench.directory, fingerprint="projection"),
        bench.auditor.start(bench.directory, bench.run),
    )
    try:
        await bench.engine.load(OWN, bench.states[OWN])
        items = await play(
            bench.engine, requests(options.rollouts, PROMPT, options.reply, bench.vocabulary)
        )
        say(
            f"{numerics}: the engine that generates is warm after {time.perf_counter() - began:.0f} s"
        )
        began = time.perf_counter()
        await bench.audit(items[:8])
        say(f"{numerics}: that which audits after {time.perf_counter() - began:.0f} s more")
        honest = await bench.audit(items, beside=True)
        if numerics != "exact":
            half = len(honest) // 2
            calibrate(bench, honest[:half])
            honest = honest[half:]
        rejected, suspected = rejections(bench, honest)
        say(f"{numerics}: honest, {len(honest)} rollouts, mean/largest: {honest_row(honest)}")
        say(f"{numerics}: honest: {rejected} rejected, {suspected} suspect")
        alone = [(await bench.audit([one]))[0] for one in items[:8]]
        say(f"{numerics}: honest, audited one by one: {honest_row(alone)}")
        speeds = await show_speeds(bench, items)
        for name, value in speeds.items():
            say(f"{numerics}: {name:44} {value:12.4g}")
        result = {HONEST: float(rejected), **speeds}
        for name, found in (await cheats(bench, items)).items():
            rejected, suspected = rejections(bench, found)
            ratios = ", ".join(
                f"{each} {_middle(found, each) / max(_largest(honest, each), 1e-9):.3g}x"
                for each in ("fingerprint", "sampling", "sampling_max", "logprob")
            )
            say(
                f"{numerics}: {name:26} {rejected} of {len(found)} rejected, {suspected} suspect; median over "
                f"the largest honest: {ratios}"
            )
            result |= {f"{name}: rejected": rejected, f"{name}: suspect": suspected}
        return result
    finally:
        await bench.engine.close()
        await bench.auditor.close()


def _largest(found: Sequence[Measured], name: str) -> float:
    return max(getattr(one, name) for one in found)


def _middle(found: Sequence[Measured], name: str) -> float:
    return sorted(getattr(one, name) for one in found)[len(found) // 2]


async def run(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All numerics that were asked for, each with engines of its own."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        states = await asyncio.to_thread(make_states, directory, options)
        parameters = sum(tensor.data.size for tensor in states[OWN].values())
        say(f"{options.shape}: {parameters / 1e9:.2f} G parameters, {DEVICE}")
        for numerics in options.numerics:
            if found and 60 * options.minutes - (time.monotonic() - BEGAN) < 75:
                say(f"left out: {numerics} numerics")
                continue
            bench = make_bench(directory, states, numerics, options)
            say(f"{numerics}: {bench.run.proofs.engine_class or 'any engine'}")
            try:
                found[numerics] = await measure(bench, numerics)
            except NodeError as error:
                say(f"{numerics}: FAILED: {error}")
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--hidden", type=int, help="width, in place of the shape's")
    parser.add_argument("--layers", type=int, help="in place of the shape's")
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--reply", type=int, default=64, help="tokens of each")
    parser.add_argument(
        "--numerics", nargs="+", choices=["exact", "calibrated"], default=["exact", "calibrated"]
    )
    parser.add_argument("--eager", action="store_true", help="compile nothing, in both engines")
    parser.add_argument("--minutes", type=float, default=4.7)
    parser.add_argument("--small", action="store_true", help="for a machine without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all measures there")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message).160s", level=logging.INFO)
    if options.small:
        SHAPES["small"], options.shape = SMALL, "small"
    sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers}
    SHAPES[options.shape] = SHAPES[options.shape] | {k: v for k, v in sizes.items() if v}
    found = asyncio.run(run(options))
    rows = {
        f"{numerics}: {name}": value
        for numerics, of_one in found.items()
        for name, value in of_one.items()
    }
    goals = judge_goals(
        rows,
        [
            (f"{numerics}: {name}", goal, at_least)
            for numerics in found
            for name, goal, at_least in goals_of(options.shape)
        ],
    )
    show_goals(goals)
    if options.json:
        named = [{"name": name, "value": value} for name, value in rows.items()]
        options.json.write_text(json.dumps({"rows": named, "goals": goals}, indent=2) + "\n")
    complete = found.keys() == set(options.numerics)
    return 0 if complete and all(goal["ok"] for goal in goals) else 1


def goals_of(shape: str) -> list[tuple[str, float, bool]]:
    """Nobody honest rejected, every cheat seen, and what it costs."""
    return [
        (HONEST, 0.0, False),
        *((f"{name}: suspect", float(least), True) for name, least in SEEN.items()),
        ("audited / roofline", 0.6, True),
        ("audited / generated", 12.0 if shape == "4b" else 8.0, True),
        ("swap and one rollout, s", 1.0, False),
    ]


if __name__ == "__main__":
    sys.exit(main())
