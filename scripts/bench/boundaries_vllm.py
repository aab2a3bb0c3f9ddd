"""The same as boundaries.py for stages of vLLM, in processes of their own, beside the embedded auditor.

    python scripts/bench/boundaries_vllm.py [--rollouts 32] [--bits 4] [--dtype bfloat16]

Three stages of 2, 3 and 3 layers of the trained tiny model; first all honest, then one after the other with the
matrices of its layers in so many bits. Bounds are the largest honest distance, and 1.2 times that. Needs vLLM.
"""

import argparse
import asyncio
import sys
from pathlib import Path

import numpy as np
import torch
from boundaries import PROMPT, REPLY, TEMPERATURE, contract, laid, outputs, shares

from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.verification.auditor import (
    AuditItem,
    AuditTerms,
    BoundaryClaim,
    Measured,
    SampledSpan,
)
from primerl.node.verification.replay import Replay
from primerl.scripts.bench.trained_model import Trained, recipe, trained_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.auditor_cases import coarse  # pyright: ignore
from support.vllm_pipeline_cases import Pipeline, pipeline, plan_of, shape_of  # pyright: ignore

ENDS = [2, 5, 8]


def requests(made: Trained, count: int) -> list[GenerateRequest]:
    """What is asked of the pipeline."""
    return [
        GenerateRequest(
            prompt=tuple(made.corpus.text([3, number], PROMPT)),
            max_tokens=REPLY,
            temperature=TEMPERATURE,
            seed=1000 + number,
            stop_token_ids=(),
        )
        for number in range(count)
    ]


def item(request: GenerateRequest, said: Completion) -> AuditItem:
    """What is audited of a completion; all claim version 0."""
    start, count = len(request.prompt), len(said.token_ids)
    return AuditItem(
        token_ids=[*request.prompt, *said.token_ids],
        replies=[SampledSpan(start, start + count, request.seed)],
        logprobs=said.logprobs,
        versions=[0] * count,
        proof=said.proof,
        boundaries=[
            BoundaryClaim(end, "raw", part)
            for end, part in zip(ENDS, said.boundaries, strict=False)
        ],
        temperature=TEMPERATURE,
    )


async def load(stages: Pipeline, made: Trained, version: int, liar: int, bits: int) -> None:
    """Give every stage its weights, the liar coarse ones."""
    state = made.state
    whole = [coarse(state, bits) if rank == liar else state for rank in range(len(ENDS))]
    for rank, one in reversed(list(enumerate(stages.all))):
        await one.load(version, stages.share(rank, whole[rank]))
    if not version:
        await stages.join()


async def measure(asked: argparse.Namespace) -> None:
    """Everything, printed on the way."""
    made = trained_model(recipe("tiny", num_hidden_layers=ENDS[-1]))
    shape = shape_of(96, dtype=asked.dtype, fingerprint="projection")
    replay = Replay(AuditTerms(str(made.directory), asked.dtype, "cpu"))
    bounds = contract(asked.dtype)
    todo = requests(made, asked.rollouts)
    async with pipeline(
        made.directory, plan_of(shape, ENDS), fingerprint="projection", dtype=asked.dtype
    ) as stages:
        for version, liar in enumerate((-1, *range(len(ENDS)))):
            await load(stages, made, version, liar, asked.bits)
            said = await asyncio.gather(*map(stages.head.generate, todo))
            items = [item(*pair) for pair in zip(todo, said, strict=True)]
            answers = replay.measure(items, {0: made.state}, {})
            found = [one for one in answers if isinstance(one, Measured)]
            table = outputs(found)
            if liar < 0:
                most = float(table.max())
                bounds = contract(asked.dtype, 1.2 * most, most)
            name = "honest" if liar < 0 else f"int{asked.bits} in stage {liar}"
            print(name, "median", np.median(table, 0).round(4), "largest", table.max(0).round(4))
            print(
                "  ",
                {key: round(value, 3) for key, value in shares(laid(found, bounds), liar).items()},
            )


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description="Distances at the boundaries of vLLM's stages.")
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    torch.set_num_threads(1)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
