"""Encode sampling supports as bytes: of each token, the tokens that top_p and top_k left to draw from.

No torch. The format is that of BranchRecord.support. Supports from the network are untrusted: check them with
support_fault() before use. As numbers a support is a row of token ids, the drawn one among them, filled up with
-1; a row of -1 alone says that more than MAX_SUPPORT tokens were left.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...protocol.rollouts import MAX_SUPPORT

NO_SUPPORT = -2
"""Fills the rows of claims that state nothing about their support."""

Ids = NDArray[np.int32]
Tokens = Sequence[int] | NDArray[np.int64]
"""Ids of tokens, [S]."""


def pack_support(rows: Ids, tokens: Tokens) -> bytes:
    """Pack the supports `rows` [S, W] of the sampled `tokens` [S] for transport."""
    others = (rows >= 0) & (rows != np.array(tokens, np.int32)[:, None])
    counts = np.where(rows[:, 0] < 0, MAX_SUPPORT, others.sum(1)).astype(np.uint8)
    ordered = np.sort(np.where(others, rows, np.iinfo(np.int32).max), axis=1)
    listed = np.arange(rows.shape[1]) < others.sum(1)[:, None]
    return counts.tobytes() + ordered[listed].astype("<u4").tobytes()


def unpack_support(data: bytes, tokens: Tokens) -> Ids:
    """Unpack the supports of the sampled `tokens` [S], as wide as the largest [S, W]."""
    counts, ids = _parts(data, len(tokens))
    rows = np.full((len(tokens), int(counts.max(initial=0)) + 1), -1, np.int32)
    rows[:, 0] = np.where(_is_stated(data, len(tokens)), np.array(tokens, np.int32), -1)
    rows[:, 1:][np.arange(1, rows.shape[1]) <= counts[:, None]] = ids
    return rows


def unpack_supports(parts: Sequence[tuple[bytes, Tokens]], missing: int) -> Ids | None:
    """Unpack supports of several texts, (supports, drawn tokens) each; see stack_supports()."""
    return stack_supports(
        [(unpack_support(data, tokens) if data else None, len(tokens)) for data, tokens in parts],
        missing,
    )


def stack_supports(parts: Sequence[tuple[Ids | None, int]], missing: int) -> Ids | None:
    """Stack supports of several texts, (rows, number of tokens) each, to one array [S, W].

    The rows of texts that state none (None, or W = 0) are filled with `missing`; None if no text states any.
    """
    width = max((0 if rows is None else rows.shape[1] for rows, _ in parts), default=0)
    if not width:
        return None
    return np.concatenate(
        [
            np.full((tokens, width), missing, np.int32)
            if rows is None or not rows.shape[1]
            else np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=-1)
            for rows, tokens in parts
        ]
    )


def split_support(data: bytes, tokens: int) -> list[bytes]:
    """Return the support of each of `count` tokens."""
    counts, _ = _parts(data, tokens)
    ends = tokens + 4 * np.cumsum(counts)
    starts = ends - 4 * counts
    return [
        data[at : at + 1] + data[start:end]
        for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
    ]


def support_fault(data: bytes, tokens: Tokens, vocabulary: int, top_k: int, top_p: float) -> str:
    """Return why `data` are no supports of the sampled `tokens` under these limits; "" if they may be."""
    if len(data) < len(tokens):
        return f"{len(data)} bytes of supports for {len(tokens)} tokens"
    counts, ids = _parts(data, len(tokens))
    if len(data) != len(tokens) + 4 * int(counts.sum()):
        return f"{len(data)} bytes of supports that have {int(counts.sum())} tokens"
    if len(ids) and int(ids.max()) >= vocabulary:
        return f"token {int(ids.max())} in a support"
    owner = np.repeat(np.arange(len(tokens)), counts)
    if (np.array(tokens, np.int64)[owner] == ids).any():
        return "a drawn token occurs twice in its support"
    if ((ids[1:] <= ids[:-1]) & (owner[1:] == owner[:-1])).any():
        return "a support is not in ascending order"
    most = min(top_k or vocabulary, vocabulary)
    stated = _is_stated(data, len(tokens))
    if int(counts.max(initial=0)) >= most or (most <= MAX_SUPPORT and not stated.all()):
        return f"a support of more than {most} tokens"
    if top_p == 1 and (counts[stated] != most - 1).any():
        return f"a support of fewer than {most} tokens"
    return ""


def support_bytes(top_k: int) -> int:
    """Return the most bytes of the support of one token under `top_k`; 0: of any number of tokens."""
    return 1 + 4 * (min(top_k or MAX_SUPPORT, MAX_SUPPORT) - 1)


def _is_stated(data: bytes, tokens: int) -> NDArray[np.bool_]:
    return np.frombuffer(data, np.uint8, tokens) < MAX_SUPPORT


def _parts(data: bytes, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many others each support has [S], and all of these in order; what is cut short is left out."""
    counts = np.where(_is_stated(data, tokens), np.frombuffer(data, np.uint8, tokens), 0)
    ids = np.frombuffer(data, "<u4", (len(data) - tokens) // 4, tokens)
    return counts.astype(np.int64), ids.astype(np.int64)
