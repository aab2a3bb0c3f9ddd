"""Stop strings: where a reply ends by its text, and replies that are generated up to there.

A reply ends with the first token with which the bytes of its tokens contain one of the strings. These stay in
the reply. The bytes of a token do not depend on its neighbours, so that every node with the same tokenizer
finds the same token.
"""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from ...protocol.rollouts import cut_support, join_support
from ..inference.engine import Completion, GenerateRequest, join_boundaries, join_spans

FIRST_PART = 64
"""Tokens that are generated before the text is looked at; parts grow twofold, up to LAST_PART."""
LAST_PART = 512


class StopStrings:
    """Finder of the token that ends a reply, for some strings."""

    def __init__(self, strings: Sequence[str], spelled: Callable[[int], bytes]) -> None:
        """`spelled` returns the bytes of a token in the middle of a text."""
        self._strings = [string.encode() for string in strings]
        self._spelled = spelled

    def end(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens up to the one that completes a string first; 0 if none does."""
        parts = [self._spelled(token) for token in token_ids]
        text = b"".join(parts)
        places = [(text.find(string), len(string)) for string in self._strings]
        ends = [place + length for place, length in places if place >= 0]
        return bisect_left(list(accumulate(map(len, parts))), min(ends)) + 1 if ends else 0

    def cut(self, completion: Completion) -> Completion:
        """Cut a completion at its end, which then is a stop; return it as it is if it has none."""
        end = self.end(completion.token_ids)
        return completion if end == 0 else replace(_first(completion, end), finish="stop")


async def generate_until(
    generate: Callable[[GenerateRequest], Awaitable[Completion]],
    request: GenerateRequest,
    stops: StopStrings | None,
) -> Completion:
    """Generate a reply in parts, and no further than to its first stop string.

    The tokens are the same as without parts: their noise depends on seed and position alone. Raises the
    errors of `generate`.
    """
    if stops is None:
        return await generate(request)
    size, whole = FIRST_PART, None
    while True:
        reply = [] if whole is None else whole.token_ids
        most = min(size, request.max_tokens - len(reply))
        part = await generate(replace(request, prompt=(*request.prompt, *reply), max_tokens=most))
        whole = part if whole is None else _joined(whole, part)
        full = len(whole.token_ids) >= request.max_tokens or len(part.token_ids) < most
        shortened = stops.cut(whole)
        if part.finish == "stop" or full or shortened is not whole:
            return shortened
        size = min(2 * size, LAST_PART)


def _first(completion: Completion, tokens: int) -> Completion:
    """Return the first tokens of a completion; proofs and routes have as many bytes for each token."""
    whole = len(completion.token_ids)

    def part(data: bytes) -> bytes:
        return data[: len(data) // whole * tokens]

    spans = tuple(span for span in completion.spans if span[0] < tokens)
    return replace(
        completion,
        token_ids=completion.token_ids[:tokens],
        logprobs=completion.logprobs[:tokens],
        policy_last=spans[-1][1] if spans else completion.policy_last,
        spans=spans if len(spans) > 1 else (),
        proof=part(completion.proof),
        boundaries=tuple(map(part, completion.boundaries)),
        routes=part(completion.routes),
        support=cut_support(completion.support, whole, tokens),
    )


def _joined(first: Completion, second: Completion) -> Completion:
    """Join two parts of one reply."""
    boundaries, plan = join_boundaries((first, second))
    return Completion(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish=second.finish,
        policy_first=first.policy_first,
        policy_last=second.policy_last,
        spans=join_spans((first, second)),
        proof=first.proof + second.proof,
        boundaries=boundaries,
        plan=plan,
        routes=first.routes + second.routes,
        support=join_support([(part.support, len(part.token_ids)) for part in (first, second)]),
    )
