"""Judge honest engines that nobody measured, and cheats, by an envelope of readings in float32.

    bash scripts/bench/gpu.sh gpu_strangers --model DIR | --shape 0.6b|4b [--trained] [--rollouts 5120]
        [--slow-rollouts 1024] [--reply 64] [--reply-long 300] [--minutes 6] [--quick] [--json FILE]
        [--recorded FILE]
    python scripts/bench/gpu_strangers.py --model DIR --record FILE [--rollouts 1024]    (vLLM's CPU build)
    python scripts/bench/gpu_strangers.py --rejudge FILE

The auditor is vLLM as a trainer has it. A float32 reading of the first 64 rollouts, measured by this auditor,
makes the bounds (node/verification/envelope.py); they judge honest engines of many kinds, on one GPU and its
host: vLLM compiled, eager, with its older runner, batch-invariant, with other kernels of attention, with
prompts in small parts and over two GPUs where there are two, and the embedded engine on GPU and CPU. --recorded
adds the rollouts that --record drew on another machine with the vLLM that is installed there. A kind that does
not start is printed with its reason. Two kinds also draw replies of --reply-long, judged by readings of short
ones and by renewed readings. Cheats draw with the kernels of the auditor, which is best for them, or with those
of --cheats-by, and claim to be a class that nobody knows.

All rollouts are compared with the version before, one step of lr 1e-6 away. Groups of eight share a prompt of
37 to 64 tokens: questions in the model's chat template with --model, text of a small language with --trained,
else random tokens. Several kinds run at once (--at-once), each with an engine in its own process. What the time
does not suffice for is left out. --json keeps all measures: --rejudge prints the tables of such a file by the
bounds of today, on any machine. --quick is for a machine without a GPU, to check that this runs.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.auditor_cases import compared, make_run
from support.exact_cases import (
    Text,
    Weights,
    altered,
    claiming,
    play,
    requests,
    shifted,
    stepped,
)
from support.protocol_cases import played_otherwise

from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.errors import NodeError, UsageError, first_cause, named_line
from primerl.node.inference.build import ALONE
from primerl.node.inference.engine import Engine, GenerateRequest
from primerl.node.inference.engine_replica import PROGRAM, EngineTimeouts
from primerl.node.inference.fingerprint import Projection
from primerl.node.inference.hosted import HostedEngine
from primerl.node.inference.numerics import numerics_of
from primerl.node.inference.vllm_arguments import head_size, is_installed, kv_heads, read_shape
from primerl.node.memory_plan.memory import UNCHECKED
from primerl.node.models import huggingface
from primerl.node.models.model_files import layer_count
from primerl.node.process.threads import share_python
from primerl.node.verification.auditor import (
    AuditItem,
    Auditor,
    Measured,
    SampledSpan,
    Unreadable,
)
from primerl.node.verification.bounds import FEWEST, SUSPECT, proof_contract
from primerl.node.verification.class_bounds import ENOUGH, Reference
from primerl.node.verification.envelope import NoiseEnvelope, envelope_bounds
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.verification.judgement import first_above, judge
from primerl.node.verification.vllm_auditor import VllmAuditor
from primerl.node.weights.adapters import changes
from primerl.node.weights.state import State
from primerl.node.weights.state_history import StateHistory
from primerl.protocol.manifests import ProofContract, RunManifest
from primerl.protocol.numerics import ClassBounds, MeanBounds
from primerl.protocol.reputation import (
    Audited,
    Reputation,
    ban_test,
    outcome_of,
)
from primerl.protocol.rollouts import Evidence
from primerl.scripts.bench.cheats import EXPECTED_AUDITS
from primerl.scripts.bench.gpu_audit import (
    BEFORE,
    BEGAN,
    CUDA,
    DEVICE,
    OTHER,
    OWN,
    SLACK,
    Model,
    evidences,
    make_policies,
    say,
    small,
)
from primerl.scripts.bench.models import SHAPES
from primerl.scripts.bench.report import Goal, at_least, at_most, conclude, make_parser

MEASURES = (
    "fingerprint",
    "sampling",
    "sampling_max",
    "logprob",
    "logprob_max",
    "other_policy",
)
"""Those of models without experts; a row of a file has the tokens before them."""
SHORTEST, LONGEST = 37, 64
"""Tokens of a prompt."""
SLOW = "hf on the CPU"
SHORT, LONG, FAR = "short", "long", "beside lr 1e-5"
"""Names of readings."""
READINGS = 256
"""Rollouts of the first kind that are read; the first 64 make the bounds, all of them the table."""
CHEATED = 256
"""Rollouts of each cheat."""
LONG_SHARE = 0.1
"""Part of --rollouts that is drawn with long replies."""
FEWER = {"4b": 1536, "8b": 1024, "moe": 1536}
"""Default of --rollouts for large models; 5,120 for others."""
LARGE = 2e9
"""Parameters from which two engines run at once beside the first, not four."""
START_S = 300.0
"""Time for the start of an engine."""
CLOSING_S = 25.0
"""Time to measure the cost of a reading, and to end all processes."""
GRACE_S = 8.0
"""Time after the end of the work within which engines have to be closed."""
LEAST_S = 15.0
"""Time for the work of a kind, beside its start."""
SLOW_LEAST = 256
"""Rollouts after which the CPU stops when all other kinds are done."""
ORDERS, AUDITS = 41, 25_000
"""Orders of a kind's rollouts in which the sequential tests see them, the drawn one first: so many at most, and
fewer where that takes more audits."""
PRECISION = 5
"""Significant digits of a measure in a file."""
LAST_LAYERS = 8
"""One in so many layers is drawn anew in another model."""
SEEN = {
    "another model": 16,
    "another seed": 16,
    "logprobs 0.3 nats off": 16,
    "logprobs 0.05 nats off": 64,
    "4-bit weights, groups of 128": 64,
    "FP8 weights": 64,
    "weights 1 % off": 64,
    "temperature 1.03": 64,
    "the version before, lr 1e-5": 64,
}
"""Cheat -> rollouts within which it has to be banned; other cheats are measured, but have no goal."""


# -- kinds of honest engines ---------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One way to run an honest engine."""

    name: str
    engine: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings of its EngineConfig, beside vLLM's."""
    vllm: Mapping[str, Any] = field(default_factory=dict[str, Any])
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables of its process."""
    batch: int = 256
    """Most sequences at a time."""
    portion: int = 1280
    """Rollouts between two looks at the clock."""
    draws_long: bool = False

    def config(self, directory: Path, length: int, tokens: int) -> EngineConfig:
        """Make the config of an engine for sequences of `length`, most of which have `tokens`."""
        vllm = dict(self.vllm)
        hosted = self.engine.get("type", "vllm") == "vllm"
        if CUDA and hosted:
            cache = max(length, self.batch * tokens) * token_bytes(directory)
            vllm |= {"gpu_memory_utilization": UNCHECKED, "kv_cache_memory_bytes": cache}
        told = {"type": "vllm", "dtype": "bfloat16", "max_batch": self.batch, **self.engine}
        return EngineConfig.model_validate({**told, "max_model_len": length, "vllm": vllm})

    def build(self, config: EngineConfig) -> Engine:
        """Make the engine, not started."""
        told = [f"{name}={value}" for name, value in self.variables.items()]
        program = ("env", *told, *PROGRAM) if told else PROGRAM
        alone = config.model_copy(update=ALONE) if config.type == "hf" else config
        return HostedEngine(alone, program, EngineTimeouts(start_s=START_S))


EAGER = {"enforce_eager": True}
PARTS = {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}
EMBEDDED = {"type": "hf"}
ON_GPU = (
    Kind("vllm", draws_long=True),
    Kind("vllm, eager", vllm=EAGER, batch=512, draws_long=True),
    Kind("vllm, V1 runner", variables={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    Kind("hf on the GPU", EMBEDDED, batch=512, portion=512),
    Kind("vllm, batch-invariant", {"batch_invariant": True}),
    Kind("vllm, attention TRITON_ATTN", vllm={"attention_backend": "TRITON_ATTN"}),
    Kind("vllm, eager, prompts in parts", vllm=EAGER | PARTS, batch=128, portion=256),
    Kind(
        "vllm, eager, attention FLEX_ATTENTION",
        vllm=EAGER | {"attention_backend": "FLEX_ATTENTION"},
        portion=256,
    ),
    Kind("vllm, attention FLASHINFER", vllm={"attention_backend": "FLASHINFER"}),
    Kind("vllm, tp 2", {"tp": 2}),
)
"""The first one makes the envelope, and cheats use its kernels."""
ON_CPU = Kind(
    SLOW, {**EMBEDDED, "device": "cpu"}, variables={"OMP_NUM_THREADS": "6"}, batch=64, portion=64
)
"""Runs beside the others."""


def quick_kinds() -> tuple[Kind, ...]:
    """Return kinds for a machine without a GPU."""
    hf, alone = {**EMBEDDED, "device": "cpu"}, {"OMP_NUM_THREADS": "1"}
    embedded = (
        Kind("hf", hf, variables=alone, batch=64, portion=16, draws_long=True),
        Kind("hf, batches of 4", hf, variables=alone, batch=4, portion=16),
    )
    if not is_installed():
        return (*embedded, Kind("vllm", vllm=EAGER))
    hosted = (
        Kind("vllm", batch=64, portion=16, draws_long=True),
        Kind("vllm, prompts in parts", vllm=PARTS, batch=16, portion=16),
    )
    return (*hosted, embedded[0])


def gpu_kinds(directory: Path) -> tuple[Kind, ...]:
    """Return the kinds that this machine can run: tensor parallelism needs GPUs, and heads to divide."""
    shape = read_shape(directory)
    heads = (kv_heads(shape), int(shape["num_attention_heads"]))

    def runs(kind: Kind) -> bool:
        tp = int(kind.engine.get("tp", 1))
        return tp <= torch.cuda.device_count() and all(count % tp == 0 for count in heads)

    return tuple(kind for kind in ON_GPU if runs(kind))


def token_bytes(directory: Path) -> int:
    """Return the bytes of a token's keys and values."""
    shape = read_shape(directory)
    return 4 * int(shape["num_hidden_layers"]) * kv_heads(shape) * head_size(shape)


# -- what was measured ---------------------------------------------------------------------------


@dataclass
class Study:
    """Evidence of one model: what a file keeps."""

    model: str
    contract: ProofContract
    readings: dict[str, list[Evidence]] = field(default_factory=dict[str, list[Evidence]])
    honest: dict[str, list[Evidence]] = field(default_factory=dict[str, list[Evidence]])
    cheats: dict[str, list[Evidence]] = field(default_factory=dict[str, list[Evidence]])
    classes: dict[str, str] = field(default_factory=dict[str, str])
    """Numerics class that each kind has."""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """Kinds and cheats without results -> reason."""
    costs: dict[str, float] = field(default_factory=dict[str, float])
    _known: "dict[tuple[str, str, int, int], Verdicts]" = field(
        default_factory=dict[tuple[str, str, int, int], Any], repr=False
    )

    def bounds(self, readings: str = SHORT, count: int = ENOUGH) -> ClassBounds:
        """Return the envelope of the first `count` of these readings."""
        return bounds_of(self.readings[readings][:count], self.contract)

    def applied(self, readings: str = SHORT, count: int = ENOUGH) -> ProofContract:
        """Return the contract that judges by this envelope."""
        return self.bounds(readings, count).applied(self.contract)

    def verdicts(self, name: str, readings: str = SHORT, count: int = ENOUGH) -> "Verdicts":
        """Judge a kind or a cheat by the envelope of the first `count` of these readings."""
        seen = self.honest.get(name) or self.cheats[name]
        key = name, readings, count, len(seen)
        if key not in self._known:
            means = self.bounds(readings, count).means
            self._known[key] = verdicts(seen, self.applied(readings, count), means)
        return self._known[key]

    def save(self, path: Path, **more: Any) -> None:
        """Write all evidence, in place of an earlier file."""
        found = {
            "model": self.model,
            "contract": msgspec.to_builtins(self.contract),
            "measures": ["tokens", *MEASURES],
            "classes": self.classes,
            "missing": self.missing,
            "costs": self.costs,
            **more,
        }
        for name in ("readings", "honest", "cheats"):
            kinds: dict[str, list[Evidence]] = getattr(self, name)
            found[name] = {kind: [row_of(one) for one in seen] for kind, seen in kinds.items()}
        path.write_text(json.dumps(found, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Study":
        """Read a file that save() wrote."""
        found = json.loads(path.read_text())
        samples = {
            name: {kind: [evidence_of(row) for row in rows] for kind, rows in found[name].items()}
            for name in ("readings", "honest", "cheats")
        }
        contract = msgspec.convert(found["contract"], ProofContract)
        same = {name: found[name] for name in ("classes", "missing", "costs")}
        return cls(found["model"], contract, **samples, **same)


def bounds_of(readings: Sequence[Evidence], contract: ProofContract) -> ClassBounds:
    """Make the envelope of readings."""
    return envelope_bounds([Reference(b"", OWN, one) for one in readings], contract)


def row_of(one: Evidence) -> list[float]:
    """Return the tokens, measures and signed means of a rollout, rounded."""
    values = (*(getattr(one, name) for name in MEASURES), *one.means)
    return [one.tokens, *(float(f"{value:.{PRECISION}g}") for value in values)]


def evidence_of(row: Sequence[float]) -> Evidence:
    """Read row_of()."""
    tokens, *values = row
    measures, means = values[: len(MEASURES)], tuple(values[len(MEASURES) :])
    return Evidence(0, 0, int(tokens), *measures, means=means)


def column(seen: Sequence[Evidence], name: str) -> NDArray[np.float64]:
    """Return one measure of all rollouts."""
    return np.array([getattr(one, name) for one in seen], np.float64)


# -- judging -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdicts:
    """What becomes of a worker that sends such rollouts, all of which are audited."""

    rollouts: int
    rejected: int
    suspect: int
    """Rollouts that are suspect, the rejected ones included."""
    by: str
    """Measures that are above their bounds to suspect, the first of each rollout."""
    banned: float
    """Share of the orders of these rollouts in which the sequential tests ban."""
    until: float
    """Median number of rollouts until the ban; infinite if most orders have none."""


def verdicts(
    seen: Sequence[Evidence], contract: ProofContract, means: MeanBounds | None
) -> Verdicts:
    """Judge rollouts by a contract, and their means by `means`."""
    judged = [judge(one, contract) for one in seen]
    audited = [
        Audited(outcome, one.other_policy, means=(*one.means, one.fingerprint) if one.means else ())
        for one, verdict in zip(seen, judged, strict=True)
        if (outcome := outcome_of(verdict.reason, verdict.suspect)) is not None
    ]
    above = Counter(first_above(one, contract.suspect) for one in seen)
    del above[""]
    bans = list(bans_of(audited, contract, means))
    return Verdicts(
        rollouts=len(seen),
        rejected=sum(one.reason is not None for one in judged),
        suspect=sum(one.suspect for one in judged),
        by=", ".join(f"{name} {count}" for name, count in above.most_common()) or "-",
        banned=sum(isfinite(one) for one in bans) / len(bans),
        until=median(bans),
    )


def bans_of(
    audited: Sequence[Audited], contract: ProofContract, means: MeanBounds | None
) -> Iterator[float]:
    """Count the rollouts until the ban in several orders; infinite without one."""
    test, chance = replace(ban_test(contract, EXPECTED_AUDITS), means=means), random.Random(1)
    order = list(audited)
    for _ in range(min(ORDERS, max(3, AUDITS // max(1, len(order))))):
        reputation, banned = Reputation(), inf
        for number, one in enumerate(order, 1):
            reputation.observe([one], test)
            if reputation.banned:
                banned = number
                break
        yield banned
        chance.shuffle(order)


# -- tables --------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    print("\n| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")
    sys.stdout.flush()


def show_readings(study: Study) -> None:
    """Print what the readings measure, and the bounds of them."""
    rows: list[list[object]] = []
    for name, seen in study.readings.items():
        values = [column(seen, measure) for measure in MEASURES]
        cells = [f"{v.mean():.3g} / {np.quantile(v, 0.99):.3g} / {v.max():.3g}" for v in values]
        rows.append([f"{name}: mean / 99 % / max of {len(seen)}", *cells])
        for count in (FEWEST, ENOUGH):
            parts = [seen[at : at + count] for at in range(0, len(seen) - count + 1, count)]
            made = [bounds_of(part, study.contract) for part in parts]
            for kind in ("reject", "suspect") if made else ():
                found = [getattr(one, kind) for one in made]
                cells = [spread([getattr(one, measure) for one in found]) for measure in MEASURES]
                rows.append([f"{name}: {kind} by {count} readings, {len(made)} times", *cells])
    table([f"readings of {study.model}", *MEASURES], rows)
    for name in study.readings:
        scales = [study.bounds(name, count).other_scale for count in (FEWEST, ENOUGH)]
        print(
            f"{name}: other_scale {scales[0]:.3g} by {FEWEST} readings, {scales[1]:.3g} by {ENOUGH}"
        )


def spread(values: Sequence[float]) -> str:
    """Return the first of some numbers, and their range if they are several."""
    [first, *_] = values
    return f"{first:.3g}" + (f" ({min(values):.3g} to {max(values):.3g})" if values[1:] else "")


def ratios(study: Study, kind: str) -> list[object]:
    """Return the noise of a kind in units of the readings', and of their bounds."""
    readings = readings_of(kind)
    seen, read, bounds = study.honest[kind], study.readings[readings], study.bounds(readings)
    cells: list[object] = [kind, len(seen)]
    for measure in MEASURES:
        values, bound = column(seen, measure), getattr(bounds.reject, measure)
        apart = float(values.mean()) / max(float(column(read, measure).mean()), 1e-12)
        first = f"{apart:.2f}"
        if measure == "other_policy":  # it has a sign, and no bound to reject
            first, bound = f"{values.mean():.3g}", bounds.suspect.other_policy
        most = float(values.max()) / max(bound, 1e-12)
        cells.append(f"{first} / {np.quantile(values, 0.999):.3g} / {most:.2f}")
    return cells


RATIOS = (
    "honest: mean over the readings' mean / 99.9 % / max over the bound",
    "rollouts",
    *MEASURES[:-1],
    "other_policy: mean / 99.9 % / max over the bound to suspect",
)
HONEST = (
    "honest",
    "rollouts",
    *(
        f"by {count} readings: {what}"
        for count in (FEWEST, ENOUGH)
        for what in ("rejected", "suspect", "banned in")
    ),
    "suspect by",
)
CHEATS = (
    "cheat",
    "rollouts",
    "rejected",
    "suspect",
    "rollouts until the ban",
    "banned in",
    "suspect by",
    "median over the readings' mean: fingerprint, sampling, logprob",
    "median of other_policy",
)


def readings_of(name: str) -> str:
    """Return the readings by which a kind or cheat is judged."""
    return FAR if "lr 1e-5" in name else SHORT


def honest_row(study: Study, kind: str, readings: str) -> list[object]:
    """Return the verdicts of a kind by first bounds and by later ones."""
    cells: list[object] = [kind if readings != LONG else f"{kind}, by renewed readings"]
    by = ""
    for count in (FEWEST, ENOUGH):
        found = study.verdicts(kind, readings, count)
        share = f"{found.suspect} ({found.suspect / found.rollouts:.2%})"
        cells += [found.rejected, share, f"{found.banned:.0%}"]
        by = found.by
    return [cells[0], len(study.honest[kind]), *cells[1:], by]


def honest_pairs(study: Study) -> list[tuple[str, str]]:
    """List (kind, readings) to judge: long replies by readings of short and of long ones."""
    pairs: list[tuple[str, str]] = []
    for kind in study.honest:
        if not study.honest[kind] or readings_of(kind) not in study.readings:
            continue
        pairs.append((kind, readings_of(kind)))
        if kind.endswith(LONG) and LONG in study.readings:
            pairs.append((kind, LONG))
    return pairs


def cheat_row(study: Study, cheat: str) -> list[object]:
    """Return the verdicts of a cheat."""
    seen, read = study.cheats[cheat], study.readings[readings_of(cheat)]
    found = study.verdicts(cheat, readings_of(cheat))
    apart = [
        f"{np.median(column(seen, name)) / max(column(read, name).mean(), 1e-12):.3g}"
        for name in ("fingerprint", "sampling", "logprob")
    ]
    return [
        cheat,
        found.rollouts,
        f"{found.rejected / found.rollouts:.1%}",
        f"{found.suspect / found.rollouts:.1%}",
        f"{found.until:.0f}" if isfinite(found.until) else "not seen",
        f"{found.banned:.0%}",
        found.by,
        ", ".join(apart),
        f"{np.median(column(seen, 'other_policy')):.3g}",
    ]


def show(study: Study) -> None:
    """Print all tables."""
    print(f"\n# {study.model}")
    show_readings(study)
    pairs = honest_pairs(study)
    table(RATIOS, [ratios(study, kind) for kind in dict.fromkeys(kind for kind, _ in pairs)])
    table(HONEST, [honest_row(study, *pair) for pair in pairs])
    table(CHEATS, [cheat_row(study, name) for name, seen in study.cheats.items() if seen])
    for name, numerics in study.classes.items():
        print(f"{name}: {numerics}")
    for name, why in study.missing.items():
        print(f"{name}: MISSING: {why}")
    for name, value in study.costs.items():
        print(f"{name:52} {value:12.4g}")
    sys.stdout.flush()


def figures(study: Study) -> list[dict[str, Any]]:
    """Return the verdicts as rows of a report."""
    rows: list[dict[str, Any]] = []
    for kind, readings in honest_pairs(study):
        for count in (FEWEST, ENOUGH):
            found = study.verdicts(kind, readings, count)
            rows.append({"honest": kind, "readings": f"{count}, {readings}", **asdict(found)})
    for cheat, seen in study.cheats.items():
        if seen:
            found = study.verdicts(cheat, readings_of(cheat))
            rows.append({"cheat": cheat, "readings": f"{ENOUGH}", **asdict(found)})
    return rows


def goals_of(rows: Sequence[Mapping[str, Any]], *, quick: bool) -> list[Goal]:
    """Return the goals: honest workers lose nothing, and large cheats are banned soon."""
    goals: list[Goal] = []
    for count in (FEWEST, ENOUGH):
        honest = [
            one for one in rows if "honest" in one and one["readings"].startswith(f"{count},")
        ]
        by = f"by {count} readings"
        goals += [
            at_most(f"honest rollouts rejected {by}", sum(one["rejected"] for one in honest), 0),
            at_most(f"honest kinds banned {by}", sum(one["banned"] > 0 for one in honest), 0),
        ]
        if not quick:
            shares = [one["suspect"] / one["rollouts"] for one in honest]
            name = f"largest share of suspects of a kind {by}"
            goals.append(at_most(name, max(shares, default=1.0), SLACK * SUSPECT))
    kinds = {one["honest"] for one in rows if "honest" in one}
    goals.append(at_least("honest kinds judged", len(kinds), 3 if quick else 6))
    if quick:
        return goals
    return goals + [
        at_most(f"{one['cheat']}: rollouts until the ban", one["until"], SEEN[one["cheat"]])
        for one in rows
        if one.get("cheat") in SEEN
    ]


# -- prompts -------------------------------------------------------------------------------------

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas")
THINGS = ("apples", "books", "stones", "coins", "stamps", "pencils", "shells", "tickets", "nuts")
PLACES = (
    "under the old bridge",
    "on the roof of the school",
    "behind the green door",
    "into the boat of a neighbour",
    "beside the road to the next town",
    "near the market",
    "in front of the closed museum",
)
EVENTS = (
    "waited until the rain began",
    "wrote a letter about it that was never sent",
    "walked home along the lake",
    "did not tell anybody for the whole winter",
    "asked for fresh bread in the morning",
    "missed the last train",
    "sang to a small bird",
)


def questions(chance: random.Random, *, long: bool) -> Iterator[str]:
    """Yield parts of a question, of which each asks for more."""
    one, other = chance.sample(NAMES, 2)
    most, fewer = sorted(chance.sample(range(3, 98), 2), reverse=True)
    thing = chance.choice(THINGS)
    sentence = f"{one} put {fewer} {thing} {chance.choice(PLACES)} and {chance.choice(EVENTS)}."
    if long:
        yield f"Write a long story that begins like this: {sentence}"
        yield f"{other} should be in it."
    elif chance.random() < 0.5:
        yield f"{one} has {most} {thing} and gives {fewer} of them to {other}. How many are left?"
        yield f"And what is {most} plus {fewer}?"
    else:
        yield f"Rewrite this in other words: {sentence}"
        yield f"Then do it with {other}."
    while True:
        yield f"Then tell me what {chance.randint(3, 98)} minus {chance.randint(1, 3)} is."


def chat_text(directory: Path, *, long: bool) -> Text:
    """Return a maker of prompts in the chat template of a model."""
    tokenizer: Any = huggingface.load_tokenizer(directory)

    def encoded(question: str, system: str) -> list[int]:
        said = f"Question: {question}\nAnswer:"
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": question}]
            if system:
                turns = [{"role": "system", "content": system}, *turns]
            said = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(said, add_special_tokens=False)["input_ids"])

    def grown(chance: random.Random) -> list[int]:
        question, least = "", chance.randint(SHORTEST, LONGEST - 12)
        system = chance.choice(("", "Answer well."))  # a template may have a long one of its own
        tokens: list[int] = []
        for part in questions(chance, long=long):
            question = f"{question} {part}".strip()
            tokens = encoded(question, system)
            if len(tokens) >= least:
                break
        return tokens

    def text(seed: Sequence[int], _: int) -> list[int]:
        chance = random.Random(repr(tuple(seed)))
        for _ in range(1000):
            if SHORTEST <= len(tokens := grown(chance)) <= LONGEST:
                return tokens
        raise UsageError(f"the chat template of {directory.name} leaves no room for a question")

    return text


def other_text(model: Model) -> Text:
    """Return a maker of prompts in a trained model's language, or of random tokens."""
    corpus = model.corpus
    vocabulary = model.states[OWN]["model.embed_tokens.weight"].shape[0]

    def text(seed: Sequence[int], _: int) -> list[int]:
        chance = np.random.default_rng([17, *seed])
        count = int(chance.integers(SHORTEST, LONGEST + 1))
        if corpus is not None:
            return corpus.text(seed, count)
        return chance.integers(0, vocabulary, count).tolist()

    return text


# -- cheats --------------------------------------------------------------------------------------


def int4(group: int) -> Weights:
    """Round to 4 bits, symmetrically, with one scale for `group` inputs of an output."""

    def change(weights: torch.Tensor, _: torch.Generator) -> torch.Tensor:
        outputs, inputs = weights.shape
        padded = torch.nn.functional.pad(weights, (0, ceil(inputs / group) * group - inputs))
        blocks = padded.reshape(outputs, -1, group)
        scales = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 7
        found = (blocks / scales).round().clamp(-7, 7) * scales
        return found.reshape(outputs, -1)[:, :inputs]

    return change


def fp8(weights: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    """Round to FP8 (e4m3), with one scale for each output."""
    kind = torch.float8_e4m3fn
    scales = weights.abs().amax(-1, keepdim=True).clamp_min(1e-30) / torch.finfo(kind).max
    return (weights / scales).to(kind).float() * scales


def noisy(share: float) -> Weights:
    """Add noise of this share of the norm."""

    def change(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = torch.randn(weights.shape, generator=generator, device=weights.device)
        return weights + noise * (share * weights.norm() / noise.norm())

    return change


def redrawn(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw random weights of the same size."""
    noise = torch.randn(weights.shape, generator=generator, device=weights.device)
    return noise * weights.std()


def another_model(state: State, layers: int) -> State:
    """Return a state whose last layers are random."""
    last = range(layers - ceil(layers / LAST_LAYERS), layers)
    marks = tuple(f"layers.{number}." for number in last)
    some = {name: one for name, one in state.items() if any(mark in name for mark in marks)}
    return {**state, **altered(some, redrawn, DEVICE)}


def other_weights(own: State, before: State, layers: int) -> dict[str, Callable[[], State]]:
    """Return the makers of the weights that cheats compute with, those first that matter most."""

    def made(change: Weights) -> Callable[[], State]:
        return lambda: altered(own, change, DEVICE)

    return {
        "4-bit weights, groups of 128": made(int4(128)),
        "FP8 weights": made(fp8),
        "weights 1 % off": made(noisy(0.01)),
        "the version before, lr 1e-5": made(stepped(1e-5)),
        "the version before, lr 1e-6": lambda: before,
        "another model": lambda: another_model(own, layers),
        "weights 0.3 % off": made(noisy(0.003)),
        "weights 3 % off": made(noisy(0.03)),
        "4-bit weights, groups of 32": made(int4(32)),
    }


def reseeded(items: Sequence[AuditItem]) -> list[AuditItem]:
    """Make copies of items that claim other seeds than they were drawn with."""
    return [
        replace(one, replies=[replace(reply, seed=reply.seed + 10**9) for reply in one.replies])
        for one in items
    ]


# -- measuring -----------------------------------------------------------------------------------


class Bench:
    """One model, its auditor and reader, and what they measured so far."""

    def __init__(self, model: Model, kinds: Sequence[Kind], options: argparse.Namespace) -> None:
        self.model, self.kinds, self.options = model, kinds, options
        self._length = LONGEST + max(options.reply, options.reply_long) + 64
        self._tokens = LONGEST + options.reply + 32
        [first, *_] = kinds
        config = first.config(model.directory, self._length, self._tokens)
        told = {"engine": config.model_dump(), "verification": {"numerics": "calibrated"}}
        run = played_otherwise(make_run("bfloat16"), temperature=1.0)
        self.run: RunManifest = structs.replace(
            run,
            proofs=proof_contract(RunConfig.model_validate(told)),
            limits=structs.replace(run.limits, max_model_len=self._length),
        )
        self.study = Study(options.name, self.run.proofs)
        threads = 0 if CUDA else 1
        self._auditor: Auditor = (
            VllmAuditor(config, timeout_s=240.0)
            if config.type == "vllm"
            else HfAuditor(config, timeout_s=240.0, threads=threads)
        )
        self._reader = HfAuditor(config, timeout_s=240.0, threads=threads, dtype="float32")
        self._envelope = NoiseEnvelope(self._auditor, self._reader)
        self._texts = self._make_texts()
        self._stops: tuple[int, ...] = ()
        if options.model:
            self._stops = huggingface.stop_token_ids(model.directory)
        self._is_read = asyncio.Event()
        self._room = asyncio.Semaphore(options.at_once)
        self._shortest_start = START_S
        self._busy = len(kinds)
        """Kinds that are not done, beside the one on the CPU."""
        self._items: list[AuditItem] = []
        """Rollouts of the first kind that are read."""

    def _make_texts(self) -> dict[bool, Text]:
        """Return the makers of prompts, for short replies and for long ones."""
        if not self.options.model:
            text = other_text(self.model)
            return {False: text, True: text}
        return {long: chat_text(self.model.directory, long=long) for long in (False, True)}

    @property
    def left_s(self) -> float:
        """Seconds left for kinds and cheats."""
        return 60 * self.options.minutes - (time.monotonic() - BEGAN) - CLOSING_S

    def requests(self, count: int, portion: int, *, long: bool = False) -> list[GenerateRequest]:
        """Return requests that share prompts in groups of eight."""
        reply = self.options.reply_long if long else self.options.reply
        made = requests(count, LONGEST, reply, 0, portion=portion, text=self._texts[long])
        return [replace(one, stop_token_ids=self._stops) for one in made]

    async def audit(
        self, items: Sequence[AuditItem], states: Mapping[int, State] | None = None
    ) -> list[Evidence]:
        """Measure rollouts of OWN beside the version before."""
        items = compared(items, {OWN: [BEFORE]})
        return seen(await self._auditor.audit(items, states or self.model.states))

    async def read(
        self, items: Sequence[AuditItem], states: Mapping[int, State] | None = None
    ) -> list[Evidence]:
        """Measure a float32 reading of rollouts, beside the version before."""
        items = compared(items, {OWN: [BEFORE]})
        return seen(await self._envelope.measure(items, states or self.model.states))

    def save(self, **more: Any) -> None:
        """Write the evidence so far, with --json."""
        if self.options.json:
            self.study.save(self.options.json, **more)

    async def measure(self) -> None:
        """Measure all kinds and cheats, then the cost of a reading."""
        await asyncio.gather(
            self._auditor.start(self.model.directory, self.run),
            self._reader.start(self.model.directory, self.run),
        )
        try:
            try:
                async with asyncio.timeout(self.left_s + GRACE_S), asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._warm_up())
                    tasks.create_task(self._measure_first())
                    if CUDA and self.options.slow_rollouts:
                        tasks.create_task(self._measure_slow())
                    for number, kind in enumerate(self.kinds[1:], 1):
                        tasks.create_task(self._measure_in_turn(number, kind))
                    if self.options.recorded:
                        tasks.create_task(self._measure_recorded(self.options.recorded))
            except TimeoutError:
                say("the time is up: what is not done is left out")
                self._miss_the_rest()
                return
            await self._measure_costs()
        finally:
            await asyncio.gather(self._auditor.close(), self._reader.close())

    async def _warm_up(self) -> None:
        """Start the processes that audit and read, beside the engines."""
        width = int(read_shape(self.model.directory)["hidden_size"])
        states = np.random.default_rng(0).normal(size=(4, width)).astype(np.float32)
        proof = Projection().make(states)
        spans, versions = [SampledSpan(4, 8, 1)], [OWN] * 4
        one = AuditItem(list(range(8)), spans, [-1.0] * 4, versions, proof, others=[BEFORE])
        began = time.monotonic()
        await asyncio.gather(
            self._auditor.audit([one], self.model.states),
            self._reader.read([one], self.model.states),
        )
        say(f"auditor and reader: started in {time.monotonic() - began:.0f} s")

    # -- honest kinds ----------------------------------------------------------------------------

    async def _measure_in_turn(self, number: int, kind: Kind) -> None:
        async with self._room:
            await self._measure_kind(number, kind, self.options.rollouts)
        self._busy -= 1

    async def _measure_slow(self) -> None:
        await self._measure_kind(90, ON_CPU, self.options.slow_rollouts)

    async def _measure_kind(self, number: int, kind: Kind, count: int) -> None:
        """Measure `count` honest rollouts of a kind, and long ones if it draws them."""
        least = self._shortest_start if self._shortest_start < START_S else 0.0
        if self.left_s < least + LEAST_S:
            self._miss(kind.name, "no time was left")
            return
        engine: Engine | None = None
        try:
            engine, _ = await self.start(kind)
            await self._draw(engine, number, kind, count)
            await self._draw_long(engine, number, kind)
            if self.options.cheats_by == kind.name:
                await self._is_read.wait()
                await self._measure_cheats(engine)
        except (NodeError, TimeoutError) as error:
            self._miss(kind.name, named_line(error))
        finally:
            if engine is not None:
                await engine.close()
        await self._is_read.wait()
        self._show_kind(kind.name)

    async def _measure_recorded(self, path: Path) -> None:
        """Measure the rollouts that --record wrote."""
        await self._is_read.wait()
        recorded = msgspec.msgpack.decode(await asyncio.to_thread(path.read_bytes), type=Recorded)
        self.study.classes[recorded.name] = recorded.numerics
        evidence = self.study.honest.setdefault(recorded.name, [])
        for at in range(0, len(recorded.items), RECORDED.batch):
            evidence += await self.audit(recorded.items[at : at + RECORDED.batch])
        say(f"{recorded.name}: {len(evidence)} rollouts are audited")
        self.save()
        self._show_kind(recorded.name)

    async def start(self, kind: Kind) -> tuple[Engine, str]:
        """Start an engine with OWN; return it and its numerics class. Raises NodeError, TimeoutError."""
        began = time.monotonic()
        config = kind.config(self.model.directory, self._length, self._tokens)
        numerics = str(await asyncio.to_thread(numerics_of, config))
        self.study.classes[kind.name] = numerics
        engine = kind.build(config)
        try:
            async with asyncio.timeout(min(START_S, max(1.0, self.left_s))):
                await engine.start(self.model.directory, fingerprint="projection")
                await engine.load(OWN, self.model.states[OWN])
        except BaseException:  # also when cancelled: its processes would stay
            await engine.close()
            raise
        took = time.monotonic() - began
        self._shortest_start = min(self._shortest_start, took)
        say(f"{kind.name}: started in {took:.0f} s")
        return engine, numerics

    async def _draw(
        self, engine: Engine, number: int, kind: Kind, count: int, *, long: bool = False
    ) -> list[AuditItem]:
        """Draw and measure honest rollouts, portion by portion; return those of the first portion."""
        name = f"{kind.name}, {LONG}" if long else kind.name
        found = self.study.honest.setdefault(name, [])
        first: list[AuditItem] = []
        portion, longest, drawing, auditing = 1000 * (2 * number + long), 0.0, 0.0, 0.0
        while len(found) < count:
            alone = kind is ON_CPU and not self._busy and len(found) >= SLOW_LEAST
            if alone or self.left_s < 1.3 * longest:
                say(f"{name}: left out: {count - len(found)} of {count} rollouts")
                break
            began, portion = time.monotonic(), portion + 1
            wanted = self.requests(min(kind.portion, count - len(found)), portion, long=long)
            items = await play(engine, wanted)
            drawn = time.monotonic()
            found += await self.audit(items)
            ended = time.monotonic()
            longest = max(longest, ended - began)
            drawing, auditing = drawing + drawn - began, auditing + ended - drawn
            first = first or items
        tokens = sum(one.tokens for one in found)
        say(
            f"{name}: {len(found)} rollouts of {tokens / max(1, len(found)):.0f} tokens in {drawing:.1f} s, "
            f"audited in {auditing:.1f} s"
        )
        self.save()
        return first

    async def _draw_long(self, engine: Engine, number: int, kind: Kind) -> list[AuditItem]:
        if not (kind.draws_long and self.options.reply_long):
            return []
        count = max(FEWEST, ceil(LONG_SHARE * self.options.rollouts))
        return await self._draw(engine, number, kind, count, long=True)

    def _miss_the_rest(self) -> None:
        kinds = [kind.name for kind in self.kinds if not self.study.honest.get(kind.name)]
        cheats = [name for name in self._cheats() if name not in self.study.cheats]
        for name in (*kinds, *cheats):
            if name not in self.study.missing:
                self._miss(name, "no time was left")

    def _cheats(self) -> dict[str, Callable[[], State]]:
        states = self.model.states
        return other_weights(states[OWN], states[BEFORE], layer_count(self.model.directory))

    def _miss(self, name: str, why: str) -> None:
        self.study.missing[name] = why
        say(f"{name}: MISSING: {why}")

    def _show_kind(self, kind: str) -> None:
        for name in (kind, f"{kind}, {LONG}"):
            if self.study.honest.get(name):
                found = self.study.verdicts(name)
                say(
                    f"{name}: {found.rejected} of {found.rollouts} rejected, {found.suspect} suspect "
                    f"({found.by}), banned in {found.banned:.0%} of the orders"
                )
                say(" | ".join(map(str, ratios(self.study, name))))

    # -- the first kind: readings and cheats -----------------------------------------------------

    async def _measure_first(self) -> None:
        """Measure the kind of the auditor: readings, honest rollouts, cheats. Raises NodeError."""
        [kind, *_] = self.kinds
        engine, _ = await self.start(kind)
        try:
            self._items = await play(engine, self.requests(self.options.readings, 0))
            self.study.readings[SHORT] = await self.read(self._items)
            self._is_read.set()
            say(f"{len(self._items)} rollouts of {kind.name} are read")
            self.save()
            show_readings(self.study)
            await self._draw(engine, 0, kind, self.options.rollouts)
            if items := await self._draw_long(engine, 0, kind):
                self.study.readings[LONG] = await self.read(items[: self.options.readings])
            self._show_kind(kind.name)
            if self.options.cheats_by in ("", kind.name):
                await self._measure_cheats(engine)
        except (NodeError, TimeoutError) as error:
            if not self._is_read.is_set():
                raise
            self._miss(f"{kind.name} and cheats", named_line(error))
        finally:
            await engine.close()
            self._busy -= 1

    async def _measure_cheats(self, engine: Engine) -> None:
        count = self.options.cheated
        few = self._items[:count]
        await self._judge("another seed", reseeded(few))
        for nats in (0.3, 0.1, 0.05):  # downwards, as a logprob above zero is refused unaudited
            await self._judge(f"logprobs {nats} nats off", shifted(few, -nats))
        wanted = self.requests(count, 900)
        for warmer in (1.1, 1.03):
            hot = await play(engine, [replace(one, temperature=warmer) for one in wanted])
            await self._judge(f"temperature {warmer}", hot)
        makers = self._cheats()
        names, longest = list(makers), 0.0
        coming = asyncio.create_task(asyncio.to_thread(makers[names[0]]))
        for number, name in enumerate(names):
            if self.left_s < max(5.0, 1.3 * longest):
                self._miss(name, "no time was left")
                continue
            began, other = time.monotonic(), await coming
            if number + 1 < len(names):  # is made while this one draws
                coming = asyncio.create_task(asyncio.to_thread(makers[names[number + 1]]))
            await engine.load(OTHER + number, other)
            items = claiming(await play(engine, wanted), OWN)
            await self._judge(name, items, other if readings_of(name) == FAR else None)
            longest = max(longest, time.monotonic() - began)

    async def _judge(
        self, name: str, items: Sequence[AuditItem], before: State | None = None
    ) -> None:
        """Measure and judge a cheat's rollouts; with `before` they and honest ones are compared with it."""
        states = self.model.states
        if before is not None:
            states = {BEFORE: before, OWN: states[OWN]}
            kind = self.kinds[0].name
            self.study.readings[FAR] = await self.read(self._items[:ENOUGH], states)
            self.study.honest[f"{kind}, {FAR}"] = await self.audit(self._items, states)
        self.study.cheats[name] = await self.audit(items, states)
        say(" | ".join(map(str, cheat_row(self.study, name))))
        self.save()

    # -- cost ------------------------------------------------------------------------------------

    async def _measure_costs(self) -> None:
        """Time a reading of rollouts, and an audit of the same ones; nothing else runs then."""
        items, states, one = self._items[:ENOUGH], self.model.states, self._items[:1]
        tokens = sum(len(item.token_ids) for item in items)
        await self._reader.read(one, states)
        await self._auditor.audit(claiming(one, BEFORE), states)  # empties the cache of prefixes
        await self._auditor.audit(one, states)
        began = time.perf_counter()
        await self._reader.read(items, states)
        read = time.perf_counter()
        await self._auditor.audit(items, states)
        audited = time.perf_counter()
        self.study.costs |= {
            f"reading {len(items)} rollouts in float32, s": read - began,
            f"auditing the same {len(items)}, s": audited - read,
            "read in float32, tokens of text/s": tokens / (read - began),
            "audited, tokens of text/s": tokens / (audited - read),
        }
        self.save()


def seen(answers: Sequence[Measured | Unreadable]) -> list[Evidence]:
    """Return the evidence of rollouts that could be measured; report the others."""
    faults = [one.detail for one in answers if isinstance(one, Unreadable)]
    if faults:
        say(f"{len(faults)} rollouts cannot be measured: {faults[0]}")
    return evidences([one for one in answers if isinstance(one, Measured)])


# -- the model -----------------------------------------------------------------------------------


def load_policies(directory: Path) -> Model:
    """Read a checkpoint, and make the version before."""
    own = huggingface.policy_state(huggingface.load_model(directory), view=True)
    before = altered(own, stepped(1e-6), DEVICE)
    states = StateHistory(2)
    states.add(BEFORE, before)
    states.add(OWN, own, changes(before, own))
    if CUDA:
        torch.cuda.empty_cache()
    return Model(directory, states)


RECORDED = Kind("vllm", vllm=EAGER, batch=64)
"""The engine of --record; the release and the device are in its name."""


class Recorded(msgspec.Struct):
    """Rollouts of a kind that were drawn on another machine."""

    name: str
    numerics: str
    items: list[AuditItem]


async def record(model: Model, options: argparse.Namespace) -> None:
    """Draw rollouts with the engine that is installed here, and write them to options.record."""
    bench = Bench(model, (RECORDED,), options)
    engine, numerics = await bench.start(RECORDED)
    items: list[AuditItem] = []
    try:
        while len(items) < options.rollouts:
            count = min(RECORDED.batch, options.rollouts - len(items))
            items += await play(engine, bench.requests(count, 80_000 + len(items)))
            say(f"{len(items)} of {options.rollouts} rollouts are drawn")
            drawn = Recorded(f"recorded: {numerics}", numerics, items)
            options.record.write_bytes(msgspec.msgpack.encode(drawn))
    finally:
        await engine.close()


async def run(options: argparse.Namespace) -> Study | None:
    """Measure one model; None if its rollouts were drawn for another machine."""
    with tempfile.TemporaryDirectory() as name:
        model: Model
        if options.model:
            model = await asyncio.to_thread(load_policies, options.model)
        else:
            model = await asyncio.to_thread(make_policies, Path(name), options)
        parameters = sum(tensor.data.size for tensor in model.states[OWN].values())
        options.at_once = options.at_once or (4 if parameters < LARGE else 2)
        say(f"{options.name}: {parameters / 1e9:.2f} G parameters, {DEVICE}")
        if options.record:
            await record(model, options)
            return None
        kinds = quick_kinds() if options.quick else gpu_kinds(model.directory)
        bench = Bench(model, kinds, options)
        try:
            await bench.measure()
        finally:
            bench.save()
        return bench.study


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__, "a small model on the CPU, to see that this runs")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b", help="of random weights")
    parser.add_argument("--trained", action="store_true", help="train the random weights first")
    parser.add_argument("--train-seconds", type=float, default=45.0)
    parser.add_argument("--rollouts", type=int, help="of each kind")
    parser.add_argument("--slow-rollouts", type=int, default=1024, help="of hf on the CPU")
    parser.add_argument("--reply", type=int, default=64, help="tokens of each, at most")
    parser.add_argument("--reply-long", type=int, default=300, help="0 draws no long replies")
    parser.add_argument("--minutes", type=float, help="6, and 3 with --quick")
    parser.add_argument("--at-once", type=int, default=0, help="engines beside the first")
    parser.add_argument("--cheats-by", default="", metavar="KIND", help="the first by default")
    parser.add_argument("--record", type=Path, metavar="FILE", help="draw rollouts, and write them")
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="rollouts of another machine")
    parser.add_argument("--rejudge", type=Path, metavar="FILE", help="measure nothing")
    options = parser.parse_args()
    options.readings, options.cheated = READINGS, CHEATED
    options.name = options.model.name if options.model else options.shape
    if options.trained:
        options.name += ", trained"
    options.rollouts = options.rollouts or FEWER.get(options.shape, 5120)
    options.honest, options.cheats = 0, True  # make_policies() then makes the version before
    options.minutes = options.minutes or (3.0 if options.quick else 6.0)
    if options.quick:
        SHAPES["quick"], options.shape = small(options.shape) | {"num_hidden_layers": 4}, "quick"
        options.rollouts, options.cheated, options.readings = 32, 16, 64
        options.reply, options.reply_long, options.at_once = 16, min(40, options.reply_long), 1
    return options


def main() -> int:
    """Measure or read, print, and return exit code 0 if every goal was met."""
    options = arguments()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message).300s", level=logging.WARNING)
    share_python()  # as a node does
    try:
        study = Study.load(options.rejudge) if options.rejudge else asyncio.run(run(options))
    except NodeError as error:
        raise SystemExit(f"{error}") from error
    except ExceptionGroup as group:
        if isinstance(cause := first_cause(group), NodeError):
            raise SystemExit(f"{cause}") from group
        raise
    if study is None:
        return 0
    show(study)
    rows = figures(study)
    goals = goals_of(rows, quick=options.quick)
    met = conclude(rows, goals, None)
    if options.json:
        study.save(options.json, rows=rows, goals=goals)
    return met


if __name__ == "__main__":
    sys.exit(main())
