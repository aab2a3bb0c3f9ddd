"""What a way of pipeline.py drew: kept by the process that drew it, held against what the whole model drew."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from primerl.node.inference.engine import Completion


def keep(path: Path, done: Sequence[Completion]) -> None:
    """Tokens and log-probabilities of completions that are equally long."""
    drawn = {
        "tokens": [one.token_ids for one in done],
        "logprobs": [one.logprobs for one in done],
    }
    path.write_text(json.dumps(drawn))


def agreement(path: Path, whole: Path) -> dict[str, float]:
    """How much of each completion is the whole model's up to the first other token, how far logprobs are off.

    In bfloat16 the size of a batch turns near ties, after which a completion is another one; until then a
    state that went wrong on its way would show.
    """
    found, wanted = (json.loads(one.read_text()) for one in (path, whole))
    equal = np.equal(found["tokens"], wanted["tokens"])
    same = np.logical_and.accumulate(equal, axis=1)
    off = np.abs(np.subtract(found["logprobs"], wanted["logprobs"]))[same]
    return {"same_share": float(same.mean()), "logprob_off": float(off.mean()) if off.size else 1.0}
