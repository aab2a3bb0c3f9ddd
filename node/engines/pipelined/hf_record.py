"""What the last stage says that it drew, checked and given to the requests that it is of."""

from math import isfinite

import numpy as np

from ....protocol.pipelines import PipelineShape
from ...errors import EngineError
from ...pipeline import boundaries
from ...pipeline.frame import Frame
from .fingerprinted import check_numbers
from .hf_rows import Pending
from .lane_step import Answer, read_answer

NO_NUMBERS = "the policy's logits are not numbers: load another version"
NO_PROOF = "no proof can be made of a completion: load another version"


def record(
    frame: Frame,
    rows: tuple[Pending, ...],
    version: int,
    *,
    shape: PipelineShape,
    vocab_size: int,
    crossed: int,
) -> int:
    """Give every open row of `rows` its token, drawn by `version`; how many got one.

    The trail holds a fingerprint a row at each of `crossed` boundaries. Raises EngineError, and has given
    nothing, if the answer is none to what was asked.
    """
    answer = read_answer(frame.body)
    tokens, logprobs = _drawn(answer, len(rows), vocab_size)
    parts: list[tuple[bytes, ...]] = [()] * len(rows)
    if shape.fingerprint:
        try:
            parts = boundaries.split(frame.trail, len(rows), crossed)
        except boundaries.BadTrail as error:
            raise EngineError(f"the last stage sent no proper fingerprints: {error}") from error
    given = 0
    for at, row in enumerate(rows):
        if not row.open:
            continue
        proof = answer.proofs[8 * at : 8 * at + 8]
        if not isfinite(logprobs[at]):
            row.failed = NO_NUMBERS
        elif shape.fingerprint and not proof:
            row.failed = NO_PROOF
        else:
            row.add(tokens[at], logprobs[at], version, proof, parts[at])
            given += 1
    return given


def _drawn(answer: Answer, rows: int, vocab_size: int) -> tuple[list[int], list[float]]:
    sizes = len(answer.tokens), len(answer.logprobs)
    if sizes != (4 * rows, 4 * rows) or len(answer.proofs) not in (0, 8 * rows):
        raise EngineError("the last stage answered for other rows than it was asked for")
    tokens = np.frombuffer(answer.tokens, "<i4")
    if rows and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise EngineError("the last stage drew tokens that the model does not have")
    logprobs = np.frombuffer(answer.logprobs, "<f4")
    check_numbers(logprobs, answer.proofs)
    return tokens.tolist(), logprobs.tolist()
