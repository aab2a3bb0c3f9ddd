"""Compare tokens/s of vLLM with and without speculative decoding, on repetitive replies.

    bash scripts/bench/gpu.sh speculation [--shape tiny|0.6b|4b] [--draft ngram|mtp] [--sequences N ...]
        [--chance P] [--drafts N] [--rounds N] [--invariant] [--quick] [--json FILE]

Two engines with this package's sampler and proofs are up all the time and take turns; each round sends both the
same requests. The model's layers compute as usual but add nothing to the residual stream; its head follows
cycles of 16 tokens, with the given chance at each token, and the prompt contains all cycles. n-grams of 2 to 4
tokens are looked up. The figures say nothing about a model whose replies never repeat. With --draft mtp the
model is a glm4_moe, whose MTP head gives the next token of the cycle another chance (--head-chance): as many
drafts are right as if its distribution were that far from a model's that never repeats. The last column counts
replies that are the same, token by token: all of them on a CPU and with --invariant; otherwise kernels for
several rows of a sequence round differently from those for one row, which may flip a near tie. Each number of
sequences is requested as single requests, which the goal is for, and as one group of a lease, whose samples
wait for the earlier ones.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.engine_cases import log_odds, repeating, write_draft_head
from support.family_cases import random_family

from primerl.node.config.run import EngineConfig
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models import huggingface
from primerl.node.models.created_model import created_config
from primerl.node.weights.state import State
from primerl.scripts.bench.models import SHAPES
from primerl.scripts.bench.report import at_least, conclude, make_parser

FASTER = 1.3
CIRCLES = 64
PERIOD = 16
MEMORY = 0.4
"""Share of the GPU's memory for each of the two engines."""


def requests(sequences: int, tokens: int, seed: int, group: bytes) -> list[GenerateRequest]:
    """Make requests of one prompt that contains all cycles."""
    prompt = tuple(range(CIRCLES))
    return [GenerateRequest(prompt, tokens, 1.0, seed + one, (), group) for one in range(sequences)]


class Drafting:
    """The two engines."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        """`directory`: of the model, made by start()."""
        self._model, self._base = directory / "model", directory / "base"
        drafts = {"method": options.draft, "num_speculative_tokens": options.drafts}
        if options.draft == "mtp":
            drafts |= {"model": str(self._base)}
        else:
            drafts |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        memory: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20}
        if options.cuda:
            memory = {"gpu_memory_utilization": MEMORY}
        config = EngineConfig(
            type="vllm",
            dtype="bfloat16" if options.cuda else "float32",
            max_batch=max(options.sequences),
            max_model_len=CIRCLES + options.tokens,
            batch_invariant=options.invariant,
            vllm=memory,
        )
        speculative = config.model_copy(update={"vllm": memory | {"speculative_config": drafts}})
        self.plain, self.drafting = HostedEngine(config), HostedEngine(speculative)
        self._options = options

    def _make(self) -> State:
        """Write the model without weights and, for an MTP head, its checkpoint; return the policy."""
        options, directory = self._options, self._model
        shape = dict(SHAPES[options.shape])
        if options.shape == "tiny":
            shape["head_dim"] = 32
        made = shape | {"tie_word_embeddings": False}
        if options.draft == "mtp":
            sizes = created_config(made)
            sizes |= {
                # experts in the last layer and in the head, with as much work for a token as the others
                "first_k_dense_replace": sizes["num_hidden_layers"] - 1,
                "moe_intermediate_size": sizes["intermediate_size"] // 2,
                "num_experts_per_tok": 1,
            }
            del sizes["rope_theta"], sizes["model_type"]
            with torch.device("cuda" if options.cuda else "cpu"):
                model = random_family("glm4_moe", directory, **sizes)
            state = huggingface.policy_state(model)
            del model
            if options.cuda:
                torch.cuda.empty_cache()
        else:
            huggingface.create(directory, made, 0)
            state = huggingface.policy_state(huggingface.load_model(directory))
        state = repeating(state, CIRCLES, options.chance, PERIOD)
        if options.draft == "mtp":
            sharpness = log_odds(CIRCLES, options.head_chance) / log_odds(CIRCLES, options.chance)
            write_draft_head(self._base, directory, state, sharpness)
        return state

    async def start(self) -> None:
        """Start the engines one after the other: vLLM measures free memory while it starts."""
        directory, state = self._model, self._make()
        for engine in (self.plain, self.drafting):
            began = time.perf_counter()
            await engine.start(directory, fingerprint="projection")
            await engine.load(0, state)
            print(f"an engine was ready after {time.perf_counter() - began:.0f} s", flush=True)

    async def close(self) -> None:
        """Close both engines."""
        await asyncio.gather(self.plain.close(), self.drafting.close())

    async def measure(self, sequences: int, *, grouped: bool) -> dict[str, Any]:
        """Return medians of the rounds after one uncounted round."""
        speeds: dict[HostedEngine, list[float]] = {self.plain: [], self.drafting: []}
        same = replies = 0
        before = self.drafting.stats()
        for number in range(1 + self._options.rounds):
            group = b"%d" % number if grouped else b""
            wanted = requests(sequences, self._options.tokens, 1000 * number, group)
            found: list[list[Completion]] = []
            for engine, spoken in speeds.items():
                began = time.perf_counter()
                found.append(await asyncio.gather(*map(engine.generate, wanted)))
                seconds = time.perf_counter() - began
                spoken.append(sum(len(one.token_ids) for one in found[-1]) / seconds)
            pairs = list(zip(*found, strict=True))
            same += sum(one.token_ids == other.token_ids for one, other in pairs)
            replies += len(pairs)
        await asyncio.sleep(0.5)  # statistics arrive a little later
        after = self.drafting.stats()
        drafted = after.drafted_tokens - before.drafted_tokens
        ratios = [
            one / other
            for one, other in zip(speeds[self.drafting], speeds[self.plain], strict=True)
        ]
        return {
            "sequences": sequences,
            "asked": "one group" if grouped else "single",
            "plain": median(speeds[self.plain][1:]),
            "drafts": median(speeds[self.drafting][1:]),
            "ratio": median(ratios[1:]),
            "accepted": (after.accepted_tokens - before.accepted_tokens) / max(1, drafted),
            "same": same / replies,
        }


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of sequences."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        drafting = Drafting(options, Path(name))
        try:
            await drafting.start()
            print("sequences             tokens/s  with drafts   ratio  accepted  same replies")
            asked = [(one, grouped) for one in options.sequences for grouped in (False, one > 1)]
            for sequences, grouped in dict.fromkeys(asked):
                row = await drafting.measure(sequences, grouped=grouped)
                print(
                    f"{sequences:9} {row['asked']:9} {row['plain']:10,.0f} {row['drafts']:12,.0f} "
                    f"{row['ratio']:7.2f} {row['accepted']:9.1%} {row['same']:13.1%}",
                    flush=True,
                )
                rows.append(row)
        finally:
            await drafting.close()
    return rows


def parse() -> argparse.Namespace:
    """Parse the options; defaults depend on this machine's hardware."""
    cuda = torch.cuda.is_available()
    parser = make_parser(__doc__, "two short rounds of a tiny model")
    parser.add_argument("--shape", default="0.6b" if cuda else "50m", choices=list(SHAPES))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--chance", type=float, default=0.9, help="of the next in the circle")
    parser.add_argument("--draft", default="ngram", choices=["ngram", "mtp"], help="method")
    parser.add_argument(
        "--head-chance",
        type=float,
        default=0.8,
        help="that the MTP head gives the next in the circle",
    )
    parser.add_argument("--drafts", type=int, help="num_speculative_tokens; 4, with mtp 2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=512 if cuda else 128, help="of a reply")
    parser.add_argument("--invariant", action="store_true", help="engine.batch_invariant")
    options = parser.parse_args()
    options.cuda = cuda
    options.drafts = options.drafts or (2 if options.draft == "mtp" else 4)
    if options.quick:
        options.rounds, options.tokens = 2, min(options.tokens, 96)
        options.shape = options.shape if cuda else "tiny"
    return options


def main() -> int:
    """Measure, print, and return exit code 0 if every goal was met."""
    options = parse()
    logging.basicConfig(level=logging.WARNING)
    where = torch.cuda.get_device_name() if options.cuda else "the CPU"
    print(
        f"shape {options.shape} on {where}, {options.drafts} drafts by {options.draft}, chance "
        f"{options.chance}, replies of {options.tokens} tokens"
    )
    rows = asyncio.run(run(options))
    goals = [
        at_least(f"with drafts / without, {one['sequences']} sequences", one["ratio"], FASTER, "x")
        for one in rows
        if one["asked"] == "single"
    ]
    if options.invariant or not options.cuda:
        goals.append(at_least("same replies", min(one["same"] for one in rows), 1.0))
    return conclude(rows, goals, options.json)


if __name__ == "__main__":
    sys.exit(main())
