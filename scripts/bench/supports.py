"""Measure training and audits of rollouts that state the supports of their truncated draws.

    python scripts/bench/supports.py [--model DIR] [--top-p P] [--sequences N] [--tokens N] [--sharp F]
        [--dtype D] [--trainer-dtype D] [--threads N] [--quick] [--json FILE]

The embedded engine draws from all tokens, and under top-p. The trainer computes the logprobs of both, over the
supports and over all tokens: mismatch KL, nats a token. Then the embedded auditor measures honest supports,
those of an engine of the other dtype, and supports of a larger and of a smaller top-p whose logprobs fit; the
built-in bounds judge them. Without --model it makes a random model whose matrices are --sharp times as large as
usual.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec import structs

from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.model import LanguageModel
from primerl.node.inference.sampler import Narrowed, draw
from primerl.node.models import huggingface
from primerl.node.models.support import pack_support, unpack_support
from primerl.node.verification.auditor import (
    AuditItem,
    AuditTerms,
    Measured,
    evidence,
)
from primerl.node.verification.bounds import BUILT_IN, proof_contract
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.judgement import judge
from primerl.node.verification.prefill_audit import PrefillAudit
from primerl.node.weights.state import State
from primerl.scripts.bench.calibrate_cheats import BATCH, WANTED, batches_caught, stated
from primerl.scripts.bench.replies import (
    Replies,
    make_sampling_parser,
    make_sharp_model,
    mismatch,
    running,
)
from primerl.scripts.bench.report import at_least, at_most, conclude

MOST = 1.2
"""Goal: mismatch KL over the supports, by that of draws from all tokens."""
CLOSER, WIDER = 0.5, 1.5
"""Factors on 1 - top_p of the cheats' supports."""
WARM_UP = 4
"""Tokens of a prompt."""
Dtype = Literal["float32", "bfloat16"]
OTHER: dict[Dtype, Dtype] = {"bfloat16": "float32", "float32": "bfloat16"}


def make_model(options: argparse.Namespace, directory: Path) -> State:
    """Make a random model in `directory`."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 512}
    return make_sharp_model(directory, shape, options.sharp, options.seed)


async def generate(
    options: argparse.Namespace, directory: Path, state: State, dtype: Dtype, *kinds: dict[str, Any]
) -> list[Replies]:
    """Draw replies of each of `kinds`, fields of a request, from the same prompts with the same seeds."""
    config = EngineConfig(
        dtype=dtype,
        device=options.device,
        max_model_len=WARM_UP + options.tokens,
        max_batch=options.sequences,
    )
    rng = np.random.default_rng(options.seed)
    first = huggingface.load_config(directory).bos_token_id or 0
    seeds = rng.integers(2**60, size=options.sequences).tolist()
    async with running(config, directory, state) as engine:
        begun = await Replies.of(
            engine, [GenerateRequest((first,), WARM_UP - 1, 1.0, seed, ()) for seed in seeds]
        )
        return [
            await Replies.of(
                engine,
                [
                    GenerateRequest(
                        (first, *reply.token_ids), options.tokens, 1.0, seed, (), **kind
                    )
                    for reply, seed in zip(begun.completions, seeds, strict=True)
                ],
            )
            for kind in kinds
        ]


def sizes(drawn: Replies) -> dict[str, float]:
    """Describe the supports and their bytes."""
    pairs = [(one.support, one.token_ids) for one in drawn.completions]
    counts = np.concatenate([(unpack_support(*pair) >= 0).sum(1) for pair in pairs])
    listed = counts[counts > 0]
    return {
        "tokens": len(counts),
        "mean size": float(listed.mean()),
        "median size": float(np.median(listed)),
        "of one token": float((listed == 1).mean()),
        "not stated": float((counts == 0).mean()),
        "bytes a token": sum(len(data) for data, _ in pairs) / len(counts),
    }


# -- audits ----------------------------------------------------------------------------------------


def forged(network: LanguageModel, item: AuditItem, top_p: float) -> AuditItem:
    """State the supports that another top_p leaves, the drawn token added, and the logprobs over them."""
    start, end = item.replies[0].start, item.replies[0].end
    tokens = list(item.token_ids[start:end])
    with torch.inference_mode():
        hidden = network.hidden(torch.tensor([item.token_ids], device=network.device))[0]
        logits = network.logits(hidden[start - 1 : end - 1]).float()
        rows, drawn = torch.arange(len(tokens)), torch.tensor(tokens)
        limits = torch.zeros_like(rows), torch.full((len(rows),), top_p)
        found = draw(logits, torch.ones(len(rows)), rows, rows, Narrowed(rows, *limits)).support
        support, logprobs = stated(logits, drawn, found)
    return replace(item, support=pack_support(support.numpy(), tokens), logprobs=logprobs.tolist())


def audited(
    options: argparse.Namespace, directory: Path, state: State, items: dict[str, list[AuditItem]]
) -> dict[str, dict[str, float]]:
    """Measure items of each kind, and judge them by the built-in bounds."""
    auditor = PrefillAudit(AuditTerms(str(directory), options.dtype, options.device))
    auditor.prepare(threads=options.threads)
    reject, suspect = BUILT_IN[options.dtype]
    plain = proof_contract(RunConfig())
    contract = structs.replace(plain, dtype=options.dtype, reject=reject, suspect=suspect)
    found: dict[str, dict[str, float]] = {}
    for name, some in items.items():
        measured = [one for one in auditor.measure(some, {0: state}) if isinstance(one, Measured)]
        if len(measured) < len(some):
            raise SystemExit(f"some of the items with {name} supports cannot be measured")
        seen = [evidence(CheckedRollout(0, 0, [], 0.0), [one]) for one in measured]
        judged = [judge(one, contract) for one in seen]
        rejected = sum(one.reason is not None for one in judged)
        suspected = sum(one.suspect for one in judged)
        found[name] = {
            "margin": float(np.mean([one.sampling for one in measured])),
            "margin_most": max(one.sampling for one in measured),
            "largest": max(one.sampling_max for one in measured),
            "rejected": rejected,
            "suspect": suspected,
            "of": len(some),
            "caught": batches_caught(len(some), rejected, max(suspected, rejected), BATCH),
        }
    return found


def parse() -> argparse.Namespace:
    """Parse the options; defaults depend on this machine's hardware."""
    parser = make_sampling_parser(
        __doc__, sequences=32, tokens=128, sharp=10.0, trainer_dtype="float32"
    )
    parser.add_argument("--top-p", type=float, default=0.9)
    options = parser.parse_args()
    options.device = "cpu"
    if options.quick:
        options.sequences, options.tokens = 6, 24
    return options


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Draw, train and audit."""
    with tempfile.TemporaryDirectory() as name:
        directory = options.model or Path(name)
        state = (
            huggingface.read_state(directory) if options.model else make_model(options, directory)
        )
        top_p, other = options.top_p, OTHER[options.dtype]
        limited = {"top_p": top_p, "supported": True}
        free, plain, drawn = await generate(
            options, directory, state, options.dtype, {}, {"top_p": top_p}, limited
        )
        [strange] = await generate(options, directory, state, other, limited)
        samples = {
            "drawn from all tokens": free.samples(),
            f"top-p {top_p:g}, over the supports": drawn.samples(supported=True),
            f"top-p {top_p:g}, over all tokens": plain.samples(),
            f"top-p {top_p:g}, the sampler's over the supports": drawn.samples(),
        }
        network = LanguageModel.build(directory, state, dtype=options.dtype, device=options.device)
        honest = drawn.items()
        cheats = {
            f"of top-p {share:g}": [forged(network, one, share) for one in honest]
            for share in (1 - CLOSER * (1 - top_p), 1 - WIDER * (1 - top_p))
        }
        kinds = {"honest": honest, f"honest, drawn in {other}": strange.items(), **cheats}
        return {
            "supports": sizes(drawn),
            "mismatch": mismatch(options, directory, samples, WARM_UP + options.tokens),
            "audit": audited(options, directory, state, kinds),
        }


def show(found: dict[str, Any]) -> None:
    """Print three tables."""
    print(
        "supports: " + ", ".join(f"{name} {value:.4g}" for name, value in found["supports"].items())
    )
    print(f"{'logprobs':44} mismatch KL   mean |difference|   largest")
    for name, row in found["mismatch"].items():
        print(f"{name:44} {row['mismatch_kl']:11.3g} {row['mean']:19.3g} {row['most']:9.3g}")
    print(f"{'supports':28} mean margin   most of a rollout   largest   rejected")
    for name, row in found["audit"].items():
        print(
            f"{name:28} {row['margin']:11.4f} {row['margin_most']:19.4f} {row['largest']:9.3f} "
            f"{row['rejected']:4.0f} of {row['of']:.0f}"
        )


def main() -> int:
    """Measure, print, and return exit code 0 if the goals were met."""
    logging.basicConfig(level=logging.WARNING)
    options = parse()
    found = asyncio.run(run(options))
    show(found)
    free, kept, *_ = found["mismatch"].values()
    honest, strange, *cheats = found["audit"].values()
    more = kept["mismatch_kl"] / free["mismatch_kl"]
    goals = [
        at_most("mismatch KL over supports, by that of draws from all", more, MOST, "x"),
        at_least("false supports are caught in 16", min(one["caught"] for one in cheats), WANTED),
        at_most("honest rollouts rejected", honest["rejected"] + strange["rejected"], 0),
    ]
    rows = [{"kind": name, **row} for name, row in (found["mismatch"] | found["audit"]).items()]
    return conclude(rows, goals, options.json, **found)


if __name__ == "__main__":
    sys.exit(main())
