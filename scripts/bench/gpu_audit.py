"""Measure vLLM as the auditor: honest noise, cheats, cost; calibrated and exact numerics.

    bash scripts/bench/gpu.sh gpu_audit [--shape 0.6b|4b|8b|moe] [--hidden N --layers N] [--rollouts 256]
        [--reply 64] [--numerics exact calibrated] [--eager] [--minutes 4.7] [--quick]
        [--trained [--train-seconds 60]] [--honest N [--cheats]]

One engine generates and one audits, on one GPU; random weights, sharp enough that distributions are not flat.
Groups of eight rollouts share a prompt. A table is printed: honest noise (mean, largest of a rollout, and the
share with equal bits); the rollouts of each cheat rejected by the bounds of a run with these numerics, and
their measures over the largest honest one; tokens/s of audits beside the roofline (2 x parameters x tokens /
peak) and of generation; and the seconds of a swap between two versions. Compare both numerics: the difference
in generation is the cost of exact mode. VLLM_USE_V2_MODEL_RUNNER=0 measures vLLM's older runner.

--honest judges N honest rollouts by bounds calibrated on --rollouts of them, as a run does; they are drawn
later, in portions that differ in prompts and seeds. Results are printed after each portion, so that nothing is
lost when the bench is stopped. Speeds and cheats follow with --cheats only. --trained trains the model first,
on text of a small language, so that distributions are as peaked as a real model's. --quick is for a machine
without a GPU, to check that this runs; a mixture of experts is then computed by the embedded engine. Parts for
which the time does not suffice are left out.
"""

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.auditor_cases import compared, make_run, measured
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
from support.protocol_cases import played_otherwise

from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.errors import NodeError, UsageError
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Engine, GenerateRequest
from primerl.node.inference.numerics import numerics_of
from primerl.node.memory_plan.memory import UNCHECKED
from primerl.node.models.model_files import export
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.process.threads import share_python
from primerl.node.verification.auditor import AuditItem, Auditor, Measured, evidence
from primerl.node.verification.bounds import SUSPECT, proof_contract
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.verification.judgement import judge
from primerl.node.verification.self_calibration import Reference, make_bounds
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.node.weights.adapters import changes
from primerl.node.weights.state import State, Tensor
from primerl.node.weights.state_history import StateHistory
from primerl.protocol.manifests import ProofContract, RunManifest
from primerl.protocol.rollouts import MEASURES, Evidence
from primerl.scripts.bench.models import SHAPES, random_policy
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser
from primerl.scripts.bench.trained_model import Corpus, Course, stop_token, train_for

OWN, BEFORE, OTHER = 1, 0, 9
PROMPT = 64
SEQUENCES = 256
HONEST = "honest rollouts that are rejected"
GAIN = 2.0
WORDS = 160
"""Words of the language that models are trained on."""
TRAINED_BYTES, TRAINED_SHARE = 18, 0.75
"""Bytes per parameter during training, and the share of a GPU's memory for all of them."""
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BEGAN = time.monotonic()
SPEEDS_S = 60.0
"""Approximate time of the speed measurements."""
CHEATED = 64
"""Rollouts of each cheat."""
SEEN = {
    **dict.fromkeys(
        ("temperature 1.03", "logprobs + 0.075", "low rank, 1 %", "a step of lr 1e-6"), CHEATED
    ),
    "top-p 0.98": CHEATED // 2,
}
"""Minimum number of suspect rollouts of each cheat: all, except that a reply with no token that top-p would cut
is honest. Smaller cheats are measured, but have no goal."""
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bf16 FLOP/s."""
SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
JUDGED = "honest rollouts judged"
SUSPECTED = "honest rollouts that are suspect"
PORTION = 512
SLACK = 2.0
"""Factor over SUSPECT: bounds of few rollouts are extrapolated."""
CLOSING_S = 10.0
"""Time to end both engines."""


def say(line: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {line}", flush=True)


@dataclass(frozen=True)
class Model:
    """A model directory without weights, its policies, and the language of a trained one."""

    directory: Path
    states: Mapping[int, State]
    corpus: Corpus | None = None


@dataclass
class Bench:
    """Two engines over one model."""

    model: Model
    run: RunManifest
    contract: ProofContract
    """The bounds that judge."""
    config: EngineConfig
    engine: Engine
    auditor: Auditor
    options: argparse.Namespace

    @property
    def states(self) -> Mapping[int, State]:
        """Policies by version."""
        return self.model.states

    @property
    def left_s(self) -> float:
        """Seconds left of --minutes."""
        return 60 * self.options.minutes - (time.monotonic() - BEGAN)

    def requests(self, count: int, portion: int = 0) -> list[GenerateRequest]:
        """Return requests that share prompts in groups: random tokens, or text of the language."""
        vocabulary = self.states[OWN]["model.embed_tokens.weight"].shape[0]
        text = None if self.model.corpus is None else self.model.corpus.text
        return requests(count, PROMPT, self.options.reply, vocabulary, portion=portion, text=text)

    async def audit(self, items: Sequence[AuditItem], *, beside: bool = False) -> list[Measured]:
        """Measure rollouts of OWN."""
        items = compared(items, {OWN: [BEFORE]} if beside else {})
        return measured(await self.auditor.audit(items, self.states))


def is_embedded(shape: str) -> bool:
    """Return whether the embedded engine is needed.

    vLLM without a GPU cannot be given the weights of experts.
    """
    return not CUDA and bool(SHAPES[shape].get("num_experts"))


def make_bench(model: Model, numerics: str, options: argparse.Namespace) -> Bench:
    """Make engines that are not started."""
    embedded, length = is_embedded(options.shape), PROMPT + options.reply + 64
    vllm: dict[str, Any] = {"enforce_eager": True} if options.eager and not embedded else {}
    if CUDA:
        vllm |= cache_of(options, length)
    config = EngineConfig(
        type="hf" if embedded else "vllm",
        dtype="bfloat16",
        max_batch=SEQUENCES,
        max_model_len=length,
        batch_invariant=numerics == "exact",
        vllm=vllm,
    )
    told = {"engine": config.model_dump(), "verification": {"numerics": numerics}}
    run = played_otherwise(make_run("bfloat16"), temperature=1.0)
    run = structs.replace(
        run,
        proofs=proof_contract(RunConfig.model_validate(told)),
        limits=structs.replace(run.limits, max_model_len=length),
    )
    auditor = (HfAuditor if embedded else VllmAuditor)(config, timeout_s=240.0)
    return Bench(model, run, run.proofs, config, build_engine(config), auditor, options)


def cache_of(options: argparse.Namespace, length: int) -> dict[str, Any]:
    """Return the memory settings of the generating engine, on a GPU.

    With --honest the bytes of keys and values are set explicitly. Otherwise vLLM takes the rest of a share and
    misses the memory that the other engine takes meanwhile, which is too much for two large models.
    """
    if not options.honest:
        return {"gpu_memory_utilization": 0.45}
    shape = SHAPES[options.shape]
    token = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    tokens = SEQUENCES * (length + 32)
    return {"gpu_memory_utilization": UNCHECKED, "kv_cache_memory_bytes": tokens * token}


# -- the model ---------------------------------------------------------------------------------------


def make_policies(directory: Path, options: argparse.Namespace) -> Model:
    """Return the policy, and the previous one if needed."""
    corpus, rope = None, {"rope_type": "default", "rope_theta": 10000.0}
    made = random_policy(
        directory, options.shape, **({"rope_parameters": rope} if options.trained else {})
    )
    own: State = made
    if options.trained:
        corpus = Corpus(WORDS, stop_token(directory))
        own = trained(directory, made, corpus, options)
    else:  # in place, as two large models may not fit
        for name, one in made.items():
            if len(one.shape) == 2:
                made[name] = from_torch((to_torch(one).to(DEVICE) * GAIN).cpu())
    states = StateHistory(2)
    if options.cheats:
        before = altered(own, stepped(1e-6), DEVICE)
        states.add(BEFORE, before)
        states.add(OWN, own, changes(before, own))  # a publisher knows them
    else:
        states.add(OWN, own)
    if CUDA:
        torch.cuda.empty_cache()
    return Model(directory, states, corpus)


def check_trainable(options: argparse.Namespace, parameters: int) -> None:
    """Raise UsageError for a model too large to be trained whole on one GPU with AdamW."""
    if not CUDA:
        return
    wanted = TRAINED_BYTES * parameters
    most = TRAINED_SHARE * torch.cuda.get_device_properties(0).total_memory
    if wanted > most:
        raise UsageError(
            f"--trained: {options.shape} takes {wanted / 1e9:.0f} GB of weights, gradients and moments, and at "
            f"most {most / 1e9:.0f} GB may go into them on this GPU: choose 0.6b or moe, or leave it out"
        )


def trained(
    directory: Path, made: dict[str, Tensor], corpus: Corpus, options: argparse.Namespace
) -> State:
    """Return the policy after --train-seconds of training."""
    check_trainable(options, sum(tensor.data.size for tensor in made.values()))
    wide = SHAPES[options.shape]["hidden_size"] >= 512
    rows, length = (64, 256) if CUDA else (16, 96)
    course = Course(options.train_seconds, rows, length, 1e-3 if wide else 4e-3, DEVICE)
    with tempfile.TemporaryDirectory() as name:
        export(made, directory, Path(name) / "model")
        made.clear()
        state = train_for(Path(name) / "model", corpus, course, say=say)
    gc.collect()
    return state


# -- judging -----------------------------------------------------------------------------------------


def honest_row(found: Sequence[Measured]) -> str:
    """Return mean and largest of each measure, and the share of rollouts with bit-equal states."""
    equal = sum(one.fingerprint == 0 for one in found) / len(found)
    parts = [
        f"{name} {sum(getattr(one, name) for one in found) / len(found):.2e}"
        f"/{max(getattr(one, name) for one in found):.2e}"
        for name in MEASURES
    ]
    return f"{', '.join(parts)}; rollouts with equal bits {equal:.1%}"


def evidences(found: Sequence[Measured]) -> list[Evidence]:
    """Return one evidence per rollout."""
    return [evidence(CheckedRollout(0, 0, [], 0.0), [one]) for one in found]


def calibrate(bench: Bench, honest: Sequence[Measured]) -> None:
    """Set bounds calibrated on these rollouts, as a run does."""
    numerics = numerics_of(bench.config)
    seen = [Reference(b"", OWN, one) for one in evidences(honest)]
    bounds = make_bounds(numerics, seen, bench.run.proofs, number=1, term=0)
    say(f"bounds of {numerics}: suspect {bounds.suspect}, reject {bounds.reject}")
    bench.contract = bounds.applied(bench.run.proofs)


def rejections(bench: Bench, found: Sequence[Measured]) -> tuple[int, int]:
    """Count rejected and suspect rollouts."""
    judged = [judge(seen, bench.contract) for seen in evidences(found)]
    return sum(one.reason is not None for one in judged), sum(one.suspect for one in judged)


# -- many honest rollouts -------------------------------------------------------------------------


class Tally:
    """Counts over the judged rollouts."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.judged = self.rejected = self.suspect = 0
        self.nearest = dict.fromkeys(MEASURES, 0.0)
        """Largest value of each measure over its bound to reject."""

    def add(self, found: Sequence[Measured]) -> None:
        """Judge and count rollouts."""
        contract = self._bench.contract
        for one in evidences(found):
            verdict = judge(one, contract)
            self.judged += 1
            self.rejected += verdict.reason is not None
            self.suspect += verdict.suspect
            if verdict.reason is not None:
                say(f"an honest rollout is rejected: {verdict.reason}: {verdict.detail}")
            for name in MEASURES:
                ratio = getattr(one, name) / max(getattr(contract.reject, name), 1e-12)
                self.nearest[name] = max(self.nearest[name], ratio)

    def row(self) -> str:
        """Return the counts so far, and the measure nearest to its bound."""
        name = max(self.nearest, key=self.nearest.__getitem__)
        return (
            f"{self.judged} honest rollouts judged: {self.rejected} rejected, {self.suspect} suspect; "
            f"nearest to its bound: {name}, {self.nearest[name]:.2f} of it"
        )


async def judge_honest(
    bench: Bench, items: Sequence[AuditItem], numerics: str
) -> tuple[dict[str, float], list[Measured]]:
    """Judge honest rollouts by bounds made of `items`.

    Returns the rows, and the measurements of `items`.
    """
    references = await bench.audit(items)
    if numerics != "exact":
        calibrate(bench, references)
    say(f"{numerics}: {len(items)} references, mean/largest: {honest_row(references)}")
    tally, portion, longest = Tally(bench), 0, 0.0
    while tally.judged < bench.options.honest:
        if bench.left_s < 1.5 * longest + CLOSING_S:
            say(f"{numerics}: left out: {bench.options.honest - tally.judged} honest rollouts")
            break
        began, portion = time.monotonic(), portion + 1
        wanted = bench.requests(min(PORTION, bench.options.honest - tally.judged), portion)
        drawn = await play(bench.engine, wanted)
        generated = time.monotonic()
        found = await bench.audit(drawn)
        ended = time.monotonic()
        tally.add(found)
        longest = max(longest, ended - began)
        say(
            f"{numerics}: {tally.row()}; {nats(drawn):.2f} nats a token, rollouts with equal bits "
            f"{sum(one.fingerprint == 0 for one in found) / len(found):.0%}, {generated - began:.1f} s to "
            f"generate, {ended - generated:.1f} s to audit"
        )
    rows = {
        JUDGED: float(tally.judged),
        HONEST: float(tally.rejected),
        SUSPECTED: float(tally.suspect),
        **{f"largest {name} over its bound": value for name, value in tally.nearest.items()},
    }
    return rows, references


def nats(items: Sequence[AuditItem]) -> float:
    """Return the mean -logprob of a drawn token: small for peaked distributions."""
    drawn = [value for one in items for value in one.logprobs]
    return -sum(drawn) / len(drawn)


# -- speeds and cheats ----------------------------------------------------------------------------


async def seconds(work: Callable[[], Awaitable[Any]], rounds: int = 2) -> float:
    """Return the shortest time of some rounds."""
    took: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        took.append(time.perf_counter() - began)
    return min(took)


async def show_speeds(bench: Bench, items: Sequence[AuditItem]) -> dict[str, float]:
    """Measure tokens/s of generation and of audits, with and without shared prompts, and a swap."""
    wanted = bench.requests(len(items))
    tokens = sum(len(one.logprobs) for one in items)
    read = sum(len(one.token_ids) for one in items)
    drawn = await seconds(lambda: play(bench.engine, wanted))
    # an audit of the other version before each round empties the cache of prefixes
    alone: list[float] = []
    swaps: list[float] = []
    [one, *_] = items
    for _ in range(3):
        old = claiming([one], BEFORE)
        await bench.auditor.audit(old, bench.states)
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
    ):  # unshared prompts; the measures themselves do not matter
        other.token_ids[0] = number % vocabulary  # type: ignore[index]
        other.token_ids[1] = number // vocabulary  # type: ignore[index]
    await bench.auditor.audit(claiming([one], BEFORE), bench.states)
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
    """Return the measures of some rollouts of each cheat."""
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
        apart = changes(own, other)  # the same positions in both directions
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
    """Return rows of honest rollouts, and their measures.

    With calibrated numerics half of the rollouts make the bounds.
    """
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
    """Measure everything of one kind of numerics."""
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
    """Measure all requested numerics, each with separate engines."""
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
    parser = make_parser(__doc__, "a small model, for a machine without a GPU")
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
    options = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message).160s", level=logging.INFO)
    share_python()  # as a node does
    options.cheats = options.cheats or not options.honest
    if options.quick:
        SHAPES["quick"], options.shape = small(options.shape), "quick"
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
    goals: list[Goal] = []
    for numerics, of_one in found.items():
        for goal in goals_of(options, of_one):
            goal["name"] = f"{numerics}: {goal['name']}"
            goals.append(goal)
    met = conclude(rows, goals, options.json)
    return met if found.keys() == set(options.numerics) else 1


def small(shape: str) -> dict[str, int]:
    """Return a small shape with experts, or with an untied head, if that shape has them."""
    wanted = SHAPES[shape]
    head = {"tie_word_embeddings": wanted.get("tie_word_embeddings", True)}
    return SHAPES["small"] | head | (SMALL_EXPERTS if wanted.get("num_experts") else {})


def goals_of(options: argparse.Namespace, rows: dict[str, float]) -> list[Goal]:
    """Return the goals for measured rows: no honest rejections, all cheats suspect, and costs.

    A few of many honest rollouts may be suspect: the sequential test expects some.
    """
    least = {
        JUDGED: float(options.honest),
        **{f"{name}: suspect": float(seen) for name, seen in SEEN.items()},
        "audited / roofline": 0.6,
        "audited / generated": 12.0 if options.shape in ("4b", "8b") else 8.0,
    }
    most = {HONEST: 0.0, "swap and one rollout, s": 1.0}
    if JUDGED in rows:
        most[SUSPECTED] = SLACK * SUSPECT * rows[JUDGED]
    return [
        *(at_least(name, rows[name], goal) for name, goal in least.items() if name in rows),
        *(at_most(name, rows[name], goal) for name, goal in most.items() if name in rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
