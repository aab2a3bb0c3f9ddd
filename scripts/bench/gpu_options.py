"""Test `engine.vllm` and engine.tp, pp, dp options on GPUs, each in a separate engine.

    bash scripts/bench/gpu.sh gpu_options [ROW]... [--quick] [--json FILE]

Runs all rows that the visible GPUs allow, or the named ones; several of these programs may share a GPU. The
tokens of each row must agree with a forward pass of transformers, before and after an in-place update: the exit
code is 0 if all do. Needs vLLM. --quick is for a machine without GPUs, to check that this runs.
"""

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.engine_cases import blended, sharp

from primerl.node.config.run import EngineConfig
from primerl.node.errors import NodeError
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.models import huggingface
from primerl.node.weights.state import Changed, State
from primerl.scripts.bench.report import at_most, conclude, make_parser

DENSE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
EXPERTS = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
TINY = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "vocab_size": 320}
LENGTH, TOKENS, ROW_S = 1024, 64, 240.0
FAR, OFF = 0.05, 0.08
"""Maximum mean distance of proofs, and maximum mean difference of logprobs, from fp32."""
AS_FAR = 1.25
"""Alternative bound: this many times the error of transformers in the engine's dtype, since routers of experts
flip in bfloat16."""
CACHE = 4 << 30
"""Bytes of keys and values, set because vLLM cannot determine them beside another process that frees memory."""
BLOCKS = 8 * LENGTH // 16
"""Blocks of a cache that is too small for all prompts, so that keys and values have to be brought back."""


@dataclass(frozen=True)
class Row:
    """One way to start an engine."""

    name: str
    vllm: dict[str, Any] = field(default_factory=dict[str, Any])
    gpus: int = 1
    shape: dict[str, Any] = field(default_factory=dict[str, Any])
    experts: bool = False
    proven: bool = True


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}

ROWS = (
    Row("default"),
    Row("eager", {"enforce_eager": True}),
    Row("graphs", {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}),
    Row("no-prefixes", {"enable_prefix_caching": False}),
    Row("parts", {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}),
    Row("sync", {"async_scheduling": False}),
    Row("drafts", {"speculative_config": NGRAM}),
    Row("small-cache", {"num_gpu_blocks_override": BLOCKS}),
    Row("kv-offload", {"num_gpu_blocks_override": BLOCKS, "kv_offloading_size": 2.0}),
    Row("kv-fp8", {"kv_cache_dtype": "fp8"}, proven=False),
    Row("experts", experts=True),
    Row("tp", gpus=2, shape={"tp": 2}),
    Row("pp", gpus=2, shape={"pp": 2}),
    Row("dp", gpus=2, shape={"dp": 2}),
    Row("auto", gpus=2, shape={"tp": "auto"}),
    Row("experts-ep", {"enable_expert_parallel": True}, 2, {"tp": 2}, experts=True),
    Row("tp-4", gpus=4, shape={"tp": 4}),
    Row("tp-pp", gpus=4, shape={"tp": 2, "pp": 2}),
    Row("tp-dp", gpus=4, shape={"tp": 2, "dp": 2}),
)


@dataclass(frozen=True)
class Case:
    """A model, its first policy, and an update of it."""

    directory: Path
    old: State
    new: State
    changed: Changed

    @classmethod
    def make(cls, directory: Path, shape: Mapping[str, Any]) -> "Case":
        """Make random weights, as sharp as a trained model's; a fifth of the second policy is new."""
        states: list[State] = []
        for seed in (1, 0):  # the directory keeps the last
            huggingface.create(directory, shape, seed)
            states.append(sharp(huggingface.policy_state(huggingface.load_model(directory))))
        new, changed = blended(states[1], states[0], 0.2)
        return cls(directory, states[1], new, changed)


def requests(count: int, group: int = 4) -> list[GenerateRequest]:
    """Make prompts of 20 to 600 tokens, each for several samples."""
    prompts = [[(7 * index + 3 * at) % 250 for at in range(20 + 580 * index // count)]
               for index in range(0, count, group)]  # fmt: skip
    return [
        GenerateRequest(tuple(prompt), TOKENS, 1.0, seed, (), group=bytes([number % 256]))
        for number, prompt in enumerate(prompts)
        for seed in range(group)
    ]


async def drawn(engine: Engine, wanted: list[GenerateRequest]) -> list[Completion]:
    """Generate all at once."""
    return await asyncio.gather(*map(engine.generate, wanted))


class Judge:
    """Distances of completions to a policy in fp32, and of transformers in `dtype`."""

    def __init__(self, case: Case, state: State, device: str, dtype: str) -> None:
        exact, rounded = (
            huggingface.model_from_state(case.directory, state, dtype=one, device=device)
            for one in ("float32", dtype)
        )
        self._exact: Any = exact
        self._rounded: Any = rounded
        self._device = device

    def distances(
        self, wanted: list[GenerateRequest], found: list[Completion]
    ) -> tuple[float, float]:
        """Return mean proof distance, and mean |logprob - transformers' logprob|.

        The proof distance is 0 without proofs.
        """
        far, off = 0.0, 0.0
        for one, completion in zip(wanted, found, strict=True):
            hidden, chosen = self._read(self._exact, one, completion)
            off += float((chosen - torch.tensor(completion.logprobs)).abs().mean())
            if completion.proof:
                far += Projection().compare(completion.proof, hidden).distance
        return far / len(found), off / len(found)

    def expected(
        self, wanted: list[GenerateRequest], found: list[Completion]
    ) -> tuple[float, float]:
        """Return the bounds of both means for an engine that computes correctly."""
        far, off = 0.0, 0.0
        for one, completion in zip(wanted, found, strict=True):
            hidden, chosen = self._read(self._exact, one, completion)
            other, as_chosen = self._read(self._rounded, one, completion)
            off += float((chosen - as_chosen).abs().mean())
            far += Projection().compare(Projection().make(other), hidden).distance
        return max(FAR, AS_FAR * far / len(found)), max(OFF, AS_FAR * off / len(found))

    def _read(self, model: Any, one: GenerateRequest, completion: Completion) -> tuple[Any, Tensor]:
        """Return hidden states [n, hidden] that led to the drawn tokens, and their logprobs [n]."""
        tokens = torch.tensor([[*one.prompt, *completion.token_ids]], device=self._device)
        first = len(one.prompt) - 1
        with torch.inference_mode():
            hidden = model.model(input_ids=tokens).last_hidden_state[0, first:-1]
            logprobs = torch.log_softmax(model.lm_head(hidden).float(), -1).cpu()
        chosen = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return hidden.float().cpu().numpy(), chosen


async def measure(row: Row, case: Case, wanted: list[GenerateRequest], device: str) -> list[str]:
    """Return the figures of a row; the last is "ok", or the faults."""
    cpu = device == "cpu"
    config = EngineConfig(
        type="vllm",
        dtype="float32" if cpu else "bfloat16",
        max_batch=64,
        max_model_len=LENGTH,
        vllm=row.vllm if cpu else {"kv_cache_memory_bytes": CACHE} | row.vllm,
        **row.shape,
    )
    engine = build_engine(config)
    started = time.perf_counter()
    try:
        await engine.start(case.directory, fingerprint="projection" if row.proven else "")
        starting = time.perf_counter() - started
        await engine.load(0, case.old)
        await drawn(engine, wanted)  # warms up, and fills the cache with entries to evict
        began = time.perf_counter()
        before = await drawn(engine, wanted)
        speed = sum(len(one.token_ids) for one in before) / (time.perf_counter() - began)
        whole = Heard("loaded whole")
        logging.getLogger("primerl").addHandler(whole)
        await engine.update(1, case.new, case.changed)
        after = await drawn(engine, wanted)
        logging.getLogger("primerl").removeHandler(whole)
    finally:
        await engine.close()
    old = Judge(case, case.old, device, config.dtype)
    far, off = old.distances(wanted, before)
    most_far, most_off = old.expected(wanted, before)
    far_old, off_old = old.distances(wanted, after)
    far_new, off_new = Judge(case, case.new, device, config.dtype).distances(wanted, after)
    faults = [
        *(["proofs"] if max(far, far_new) > most_far else []),
        *(["logprobs"] if row.proven and max(off, off_new) > most_off else []),
        *(["old policy"] if max(far_old - far_new, off_old - off_new) < OFF else []),
        *(["loaded whole"] if whole.heard else []),
        *(["versions"] if any(one.policy_first != 1 for one in after) else []),
    ]
    figures = (f"{far:.4f}", f"{off:.4f}", f"{far_new:.4f}", f"{off_new:.4f}")
    return [f"{starting:.0f}", f"{speed:.0f}", *figures, " ".join(faults) or "ok"]


class Heard(logging.Handler):
    """A log handler that notes whether a message was logged."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.heard = False

    def emit(self, record: logging.LogRecord) -> None:
        """See Handler."""
        self.heard |= self._words in record.getMessage()


async def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure and print a row of each engine."""
    device, gpus = ("cpu", 1) if options.quick else ("cuda", torch.cuda.device_count())
    wanted = requests(8 if options.quick else 128)
    rows = [row for row in ROWS if row.name in options.rows] if options.rows else ROWS
    print("        row start s  tokens/s  proof  logprob | updated: proof  logprob")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        cases: dict[bool, Case] = {}
        for row in rows:
            if row.gpus > gpus:
                print(f"{row.name:>11} skipped: needs {row.gpus} GPUs")
                continue
            if row.experts not in cases:
                shape = TINY if options.quick else EXPERTS if row.experts else DENSE
                cases[row.experts] = Case.make(Path(name, str(row.experts)), shape)
            try:
                async with asyncio.timeout(ROW_S):
                    figures = await measure(row, cases[row.experts], wanted, device)
            except (NodeError, TimeoutError) as error:
                figures = [f"FAILED: {type(error).__name__} {error}"[:300]]
            print(f"{row.name:>11} " + "  ".join(f"{one:>7}" for one in figures), flush=True)
            found.append({"row": row.name, "figures": figures})
    return found


def main() -> int:
    """Measure, print, and return exit code 0 if every row draws correctly."""
    parser = make_parser(__doc__, "a tiny model on the CPU, to see that this runs")
    parser.add_argument("rows", nargs="*", choices=[[], *(row.name for row in ROWS)])
    options = parser.parse_args()
    torch.set_num_threads(1 if options.quick else 8)
    rows = asyncio.run(run(options))
    failed = [one["row"] for one in rows if one["figures"][-1] != "ok"]
    return conclude(rows, [at_most("rows that fail", len(failed), 0)], options.json)


if __name__ == "__main__":
    sys.exit(main())
