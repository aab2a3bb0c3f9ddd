"""Two engines over one model, of which one generates and one audits: what gpu_audit.py and honest.py share."""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from shapes import SHAPES  # pyright: ignore
from trained_model import Corpus, Course, stop_token, train_for  # pyright: ignore
from update import make_model  # pyright: ignore

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.auditor_cases import make_run, measured
from support.exact_cases import altered, requests, stepped
from support.protocol_cases import played_otherwise

from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Engine, GenerateRequest
from primerl.node.inference.numerics import numerics_of
from primerl.node.models.model_files import export
from primerl.node.models.tensors import from_torch, to_torch
from primerl.node.ops.errors import UsageError
from primerl.node.verification.auditor import MEASURES, AuditItem, Auditor, Measured, evidence
from primerl.node.verification.bounds import proof_contract
from primerl.node.verification.checks import CheckedRollout
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.verification.judge import judge
from primerl.node.verification.self_calibration import Reference, make_bounds
from primerl.node.verification.vllm_auditor import LEAST_SHARE, VllmAuditor
from primerl.node.weights.state import State, Tensor
from primerl.protocol.manifests import ProofContract, RunManifest
from primerl.protocol.rollouts import Evidence

OWN, BEFORE, OTHER = 1, 0, 9
PROMPT = 64
SEQUENCES = 256
HONEST = "honest rollouts that are rejected"
GAIN = 2.0
WORDS = 160
"""Of the language that models are trained on."""
TRAINED_BYTES, TRAINED_SHARE = 18, 0.75
"""What a parameter takes while it is trained, and how much of a GPU's memory all of them may."""
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BEGAN = time.monotonic()


def say(line: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:4.0f} s] {line}", flush=True)


@dataclass(frozen=True)
class Model:
    """A model directory without weights, its policies, and the language of a trained one."""

    directory: Path
    states: dict[int, State]
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
    def states(self) -> dict[int, State]:
        """The policies, by version."""
        return self.model.states

    @property
    def left_s(self) -> float:
        """Of the time that was given."""
        return 60 * self.options.minutes - (time.monotonic() - BEGAN)

    def requests(self, count: int, portion: int = 0) -> list[GenerateRequest]:
        """Requests that share prompts in groups: random tokens, or text of the language of a trained model."""
        vocabulary = self.states[OWN]["model.embed_tokens.weight"].shape[0]
        text = None if self.model.corpus is None else self.model.corpus.text
        return requests(count, PROMPT, self.options.reply, vocabulary, portion=portion, text=text)

    async def audit(self, items: Sequence[AuditItem], *, beside: bool = False) -> list[Measured]:
        """Measure rollouts of OWN."""
        others = {OWN: [BEFORE]} if beside else {}
        return measured(await self.auditor.audit(items, self.states, others))


def is_embedded(shape: str) -> bool:
    """Whether the embedded engine has to do: vLLM without a GPU cannot be given the weights of experts."""
    return not CUDA and bool(SHAPES[shape].get("num_experts"))


def make_bench(model: Model, numerics: str, options: argparse.Namespace) -> Bench:
    """Engines that are not started."""
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
        proofs=proof_contract(RunConfig.model_validate(told), ""),
        limits=structs.replace(run.limits, max_model_len=length),
    )
    auditor = (HfAuditor if embedded else VllmAuditor)(config, timeout_s=240.0)
    return Bench(model, run, run.proofs, config, build_engine(config), auditor, options)


def cache_of(options: argparse.Namespace, length: int) -> dict[str, Any]:
    """Memory of the engine that generates, on a GPU.

    With --honest the bytes of keys and values are said. Else vLLM takes what is left of a share, and what the
    other engine takes meanwhile would be missing: too much where both have a large model.
    """
    if not options.honest:
        return {"gpu_memory_utilization": 0.45}
    shape = SHAPES[options.shape]
    token = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    tokens = SEQUENCES * (length + 32)
    return {"gpu_memory_utilization": LEAST_SHARE, "kv_cache_memory_bytes": tokens * token}


# -- the model ---------------------------------------------------------------------------------------


def make_policies(directory: Path, options: argparse.Namespace) -> Model:
    """The policy, and that before it where something needs it."""
    corpus, rope = None, {"rope_type": "default", "rope_theta": 10000.0}
    made = make_model(
        directory, options.shape, **({"rope_parameters": rope} if options.trained else {})
    )
    own: State = made
    if options.trained:
        corpus = Corpus(WORDS, stop_token(directory))
        own = trained(directory, made, corpus, options)
    else:  # in place: there is not room for two large models everywhere
        for name, one in made.items():
            if len(one.shape) == 2:
                made[name] = from_torch((to_torch(one).to(DEVICE) * GAIN).cpu())
    states: dict[int, State] = {OWN: own}
    if options.cheats:
        states[BEFORE] = altered(own, stepped(1e-6), DEVICE)
    if CUDA:
        torch.cuda.empty_cache()
    return Model(directory, states, corpus)


def check_trainable(options: argparse.Namespace, parameters: int) -> None:
    """Raise UsageError for a model that one GPU cannot train whole, with AdamW."""
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
    """The policy after --train-seconds."""
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
