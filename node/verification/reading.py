"""Reads one item before anything is computed of it: whether it can be replayed, and its proof reply by reply.

Whatever an item holds, the answer is about this item only.
"""

from collections.abc import Sequence
from itertools import pairwise

from ..inference.fingerprint import TOKEN_BYTES, BadProof, Projection, split
from .auditor import AuditItem, Unreadable


def check_item(
    item: AuditItem, vocabulary: int, layers: int, fingerprint: Projection
) -> Unreadable | None:
    """Why nothing can be measured on `item` by a model of `layers` layers; None if something can."""
    detail = _fault(item, vocabulary) or _boundary_fault(item, layers)
    if detail:
        return Unreadable(detail, proof=False)
    try:
        for proof, tokens in split_proof(item, fingerprint):
            fingerprint.check(proof, tokens)
    except BadProof as error:
        return Unreadable(str(error), proof=True)
    return None


def split_proof(item: AuditItem, fingerprint: Projection) -> list[tuple[bytes, int]]:
    """(proof, number of tokens) of each reply. Raises BadProof if the sizes do not add up."""
    lengths = [reply.end - reply.start for reply in item.replies]
    return split(item.proof, lengths, fingerprint)


def _fault(item: AuditItem, vocabulary: int) -> str:
    tokens = item.token_ids
    if not tokens or not 0 <= min(tokens) <= max(tokens) < vocabulary:
        return f"tokens outside 0..{vocabulary - 1}"
    if not item.replies or not _in_order(item):
        return "its replies are empty, overlap or lie outside the branch"
    if any(not 0 <= reply.seed < 2**63 for reply in item.replies):
        return "a seed outside 0..2**63-1"
    sampled = sum(reply.end - reply.start for reply in item.replies)
    if not sampled == len(item.logprobs) == len(item.versions):
        return (
            f"{len(item.logprobs)} logprobs for {sampled} tokens of {len(item.versions)} versions"
        )
    if sorted(item.versions) != list(item.versions):
        return "its policy versions go back"
    return ""


def _boundary_fault(item: AuditItem, layers: int) -> str:
    if not item.boundaries:
        return ""
    heights = [0, *(one.layers for one in item.boundaries), layers]
    if any(low >= high for low, high in pairwise(heights)):
        return f"boundaries behind layers that the model has not, or out of order: {heights[1:-1]}"
    if any(len(one.proof) != TOKEN_BYTES * len(item.versions) for one in item.boundaries):
        return "boundaries of another number of tokens"
    return ""


def _in_order(item: AuditItem) -> bool:
    """Whether replies follow each other, each after a token that led to it."""
    ends: Sequence[int] = [1, *(reply.end for reply in item.replies)]
    rising = zip(ends, item.replies, strict=False)
    return all(end <= reply.start < reply.end for end, reply in rising) and ends[-1] <= len(
        item.token_ids
    )
