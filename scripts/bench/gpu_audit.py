"""vLLM as the auditor: honest noise, cheats, and cost, with calibrated numerics and with exact ones.

    bash scripts/bench/gpu.sh gpu_audit [--shape 0.6b|4b|8b|moe] [--hidden N --layers N] [--rollouts 256]
        [--reply 64] [--numerics exact calibrated] [--eager] [--minutes 4.7] [--small]
        [--trained [--train-seconds 60]] [--honest N [--cheats]]

One engine generates and one audits, on one GPU; random weights, sharp enough that distributions are not flat.
Groups of eight rollouts share a prompt. A table is printed: honest noise (mean, largest of a rollout, and how
many have equal bits); how many rollouts of each cheat are rejected by the bounds of a run with these numerics,
and how far they are above the largest honest one; tokens/s of audits beside the roofline (2 x parameters x
tokens / peak) and of generation; and the seconds of a swap between two versions. Compare both numerics: the
difference in generation is what exact mode costs. VLLM_USE_V2_MODEL_RUNNER=0 measures vLLM's older runner.

--honest judges so many honest rollouts by bounds that --rollouts of them have made (honest.py); speeds and
cheats follow with --cheats only. --trained trains the model first, on text of a small language, so that
distributions are as peaked as a real model's. --small is for a machine without a GPU, to see that this runs; a
mixture of experts is then computed by the embedded engine. What the time does not allow is left out.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from audit_bench import (  # pyright: ignore
    BEFORE,
    BEGAN,
    CUDA,
    DEVICE,
    HONEST,
    OTHER,
    OWN,
    Bench,
    Model,
    calibrate,
    honest_row,
    is_embedded,
    make_bench,
    make_policies,
    rejections,
    say,
)
from goals import judge_goals, show_goals  # pyright: ignore
from honest import JUDGED, honest_goals, judge_honest  # pyright: ignore
from shapes import SHAPES  # pyright: ignore
from support.exact_cases import (
    altered,
    claiming,
    low_rank,
    near_ties,
    play,
    shifted,
    stepped,
)

from primerl.node.ops.errors import NodeError
from primerl.node.verification.auditor import AuditItem, Measured
from primerl.node.weights.adapters import changes

SPEEDS_S = 60.0
"""Speeds take about so long."""
CHEATED = 64
"""Rollouts of each cheat."""
SEEN = {
    **dict.fromkeys(
        ("temperature 1.03", "logprobs + 0.075", "low rank, 1 %", "a step of lr 1e-6"), CHEATED
    ),
    "top-p 0.98": CHEATED // 2,
}
"""Rollouts of each cheat that have to be suspect at least: all, but a reply with no token that top-p would cut
is honest. What is smaller is measured, not promised."""
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
SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


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
    wanted = bench.requests(len(items))
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
    vocabulary = bench.states[OWN]["model.embed_tokens.weight"].shape[0]
    apart = [replace(one, token_ids=list(one.token_ids)) for one in items]
    for number, other in enumerate(
        apart
    ):  # prompts that nobody shares; what they measure is of no interest
        other.token_ids[0] = number % vocabulary  # type: ignore[index]
        other.token_ids[1] = number // vocabulary  # type: ignore[index]
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


async def cheats(bench: Bench, items: list[AuditItem]) -> dict[str, list[Measured]]:
    """The measures of some rollouts of each cheat."""
    own, few = bench.states[OWN], items[:CHEATED]
    wanted = bench.requests(CHEATED)
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
            bench.auditor, few[:16], bench.model.directory, own, dtype="bfloat16", device=DEVICE
        )
        found["nearest tie of 64 picked"] = await bench.audit(tied)
    return found


async def show_noise(
    bench: Bench, items: list[AuditItem], numerics: str
) -> tuple[dict[str, float], list[Measured]]:
    """Rows of honest rollouts, of which half make the bounds if they are calibrated, and their measures."""
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
    return {HONEST: float(rejected)}, honest


async def measure(bench: Bench, numerics: str) -> dict[str, float]:
    """Everything of one kind of numerics."""
    options = bench.options
    began = time.perf_counter()
    await asyncio.gather(
        bench.engine.start(bench.model.directory, fingerprint="projection"),
        bench.auditor.start(bench.model.directory, bench.run),
    )
    try:
        await bench.engine.load(OWN, bench.states[OWN])
        items = await play(bench.engine, bench.requests(options.rollouts))
        say(
            f"{numerics}: the engine that generates is warm after {time.perf_counter() - began:.0f} s"
        )
        began = time.perf_counter()
        await bench.audit(items[:8])
        say(f"{numerics}: that which audits after {time.perf_counter() - began:.0f} s more")
        if options.honest:
            result, honest = await judge_honest(bench, items, numerics)
        else:
            result, honest = await show_noise(bench, items, numerics)
        if options.honest and (not options.cheats or bench.left_s < SPEEDS_S):
            return result
        speeds = await show_speeds(bench, items)
        for name, value in speeds.items():
            say(f"{numerics}: {name:44} {value:12.4g}")
        result |= speeds
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
        model: Model = await asyncio.to_thread(make_policies, directory, options)
        parameters = sum(tensor.data.size for tensor in model.states[OWN].values())
        say(f"{options.shape}: {parameters / 1e9:.2f} G parameters, {DEVICE}")
        for numerics in options.numerics:
            if found and 60 * options.minutes - (time.monotonic() - BEGAN) < 75:
                say(f"left out: {numerics} numerics")
                continue
            bench = make_bench(model, numerics, options)
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
    parser.add_argument(
        "--rollouts", type=int, default=256, help="with --honest: that make the bounds"
    )
    parser.add_argument("--reply", type=int, default=64, help="tokens of each")
    parser.add_argument(
        "--numerics", nargs="+", choices=["exact", "calibrated"], default=["exact", "calibrated"]
    )
    parser.add_argument("--eager", action="store_true", help="compile nothing, in both engines")
    parser.add_argument("--honest", type=int, default=0, metavar="N", help="rollouts to judge")
    parser.add_argument(
        "--cheats", action="store_true", help="with --honest: speeds and cheats, too"
    )
    parser.add_argument("--trained", action="store_true", help="train the model first")
    parser.add_argument("--train-seconds", type=float, default=60.0)
    parser.add_argument("--minutes", type=float, default=4.7)
    parser.add_argument("--small", action="store_true", help="for a machine without a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all measures there")
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message).160s", level=logging.INFO)
    options.cheats = options.cheats or not options.honest
    if options.small:
        SHAPES["small"], options.shape = small(options.shape), "small"
    sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers}
    SHAPES[options.shape] = SHAPES[options.shape] | {k: v for k, v in sizes.items() if v}
    if is_embedded(options.shape):
        options.numerics = ["calibrated"]
        say(
            "the embedded engine generates and audits: vLLM without a GPU has no mixtures of experts"
        )
    try:
        found = asyncio.run(run(options))
    except NodeError as error:
        raise SystemExit(f"{error}") from error
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
            for name, goal, at_least in goals_of(options, found[numerics])
        ],
    )
    show_goals(goals)
    if options.json:
        named = [{"name": name, "value": value} for name, value in rows.items()]
        options.json.write_text(json.dumps({"rows": named, "goals": goals}, indent=2) + "\n")
    complete = found.keys() == set(options.numerics)
    return 0 if complete and all(goal["ok"] for goal in goals) else 1


def small(shape: str) -> dict[str, int]:
    """A small model with experts, or with a head of its own, where that shape has them."""
    wanted = SHAPES[shape]
    head = {"tie_word_embeddings": wanted.get("tie_word_embeddings", True)}
    return SMALL | head | (SMALL_EXPERTS if wanted.get("num_experts") else {})


def goals_of(options: argparse.Namespace, rows: dict[str, float]) -> list[tuple[str, float, bool]]:
    """Nobody honest rejected, every cheat seen, and what it costs."""
    return [
        *(honest_goals(options.honest, rows) if JUDGED in rows else [(HONEST, 0.0, False)]),
        *((f"{name}: suspect", float(least), True) for name, least in SEEN.items()),
        ("audited / roofline", 0.6, True),
        ("audited / generated", 12.0 if options.shape in ("4b", "8b") else 8.0, True),
        ("swap and one rollout, s", 1.0, False),
    ]


if __name__ == "__main__":
    sys.exit(main())
