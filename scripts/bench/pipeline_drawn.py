"""What a way of pipeline.py drew: kept by the process that drew it, held against what the whole model drew."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from primerl.node.engines.engine import Completion


def keep(path: Path, done: Sequence[Completion]) -> None:
    """Tokens [N, T] and log-probabilities [N, T] of completions that are equally long."""
    tokens = np.array([one.token_ids for one in done], np.int64)
    logprobs = np.array([one.logprobs for one in done], np.float64)
    np.savez(path, tokens=tokens, logprobs=logprobs)


def agreement(path: Path, whole: Path) -> dict[str, float]:
    """How much of each completion is the whole model's up to the first other token, how far logprobs are off.

    In bfloat16 the size of a batch turns near ties, after which a completion is another one; until then a
    state that went wrong on its way would show.
    """
    with np.load(path) as found, np.load(whole) as wanted:
        same = np.logical_and.accumulate(found["tokens"] == wanted["tokens"], axis=1)
        off = np.abs(found["logprobs"] - wanted["logprobs"])[same]
    return {"same_share": float(same.mean()), "logprob_off": float(off.mean()) if off.size else 1.0}
