"""The proof of a branch is those of its replies in a row; where each begins follows from their lengths."""

from collections.abc import Sequence
from itertools import accumulate

from .fingerprint import BadProof, Fingerprint


def split(
    proof: bytes, lengths: Sequence[int], fingerprint: Fingerprint
) -> list[tuple[bytes, int]]:
    """(proof, tokens) of each reply; `lengths` are their tokens. Raises BadProof for any other size."""
    sizes = [fingerprint.size(length) for length in lengths]
    if len(proof) != sum(sizes):
        raise BadProof(
            f"{len(proof)} bytes of proof where replies of {list(lengths[:8])} tokens take {sum(sizes)}"
        )
    ends = accumulate(sizes)
    return [
        (proof[end - size : end], length)
        for end, size, length in zip(ends, sizes, lengths, strict=True)
    ]
