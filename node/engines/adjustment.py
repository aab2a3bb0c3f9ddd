"""How one request changes its logits before a token is drawn: penalties, biases, a least length, min_p.

For serving only: what a lease draws is proved from logits as they are. Definitions and order are vLLM's (and
OpenAI's, where it has them); adjusting.py does the arithmetic.
"""

import msgspec

from ..errors import EngineError

PENALTY = 2.0
"""The largest presence or frequency penalty, up or down; OpenAI's."""
REPETITION_LEAST, REPETITION_MOST = 0.01, 100.0
BIAS = 100.0
"""The largest bias, up or down; OpenAI's."""
MOST_BIASES = 1024
"""Tokens with a bias; that of vLLM's newer model runner."""
MOST_TOKENS = 1 << 31


class Adjustment(msgspec.Struct, frozen=True, array_like=True):
    """What is done to the logits of one request, in this order; the defaults do nothing.

    `bias` is added. While fewer than `min_tokens` tokens are drawn, none of `ends` can be. A logit of a token
    that the prompt or the completion has is divided by `repetition` if it is positive, else multiplied by
    it; `frequency` times its count in the completion, and `presence` if it is there at all, are taken off.
    Then comes the temperature; then tokens are left out whose probability is below `min_p` times the largest;
    then top_k and top_p.
    """

    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    drawn: int = 0
    """So many tokens at the end of the prompt were drawn for this completion, which is asked for in pieces."""

    @property
    def penalises(self) -> bool:
        """Whether it matters what was said before."""
        return bool(self.presence or self.frequency or self.repetition != 1)


def check_adjustment(asked: Adjustment, prompt: int, vocab_size: int) -> None:
    """Raise EngineError unless it can be done to a prompt of so many tokens. NaN is in no range."""
    if not 0 <= asked.min_p <= 1:
        raise EngineError(f"min_p is {asked.min_p}: give a number of 0 to 1")
    for name, value in (("presence", asked.presence), ("frequency", asked.frequency)):
        if not -PENALTY <= value <= PENALTY:
            raise EngineError(
                f"{name}_penalty is {value}: give a number of {-PENALTY} to {PENALTY}"
            )
    if not REPETITION_LEAST <= asked.repetition <= REPETITION_MOST:
        raise EngineError(
            f"repetition_penalty is {asked.repetition}: give a number of {REPETITION_LEAST} to "
            f"{REPETITION_MOST}"
        )
    _check_bias(asked.bias, vocab_size)
    if not 0 <= asked.min_tokens < MOST_TOKENS:
        raise EngineError(f"min_tokens is {asked.min_tokens}: give a number of tokens")
    ends = set(asked.ends)
    if ends and not 0 <= min(ends) <= max(ends) < vocab_size:
        raise EngineError(f"min_tokens has ends outside 0..{vocab_size - 1}: check the tokenizer")
    if asked.min_tokens and len(ends) >= vocab_size:
        raise EngineError("min_tokens leaves no token to draw: stop at fewer of them")
    if not 0 <= asked.drawn <= prompt:
        raise EngineError(f"{asked.drawn} of {prompt} tokens were drawn: count again")


def _check_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    if len(bias) > MOST_BIASES:
        raise EngineError(f"logit_bias has {len(bias)} tokens: give at most {MOST_BIASES}")
    tokens = {token for token, _ in bias}
    if len(tokens) < len(bias):
        raise EngineError("logit_bias has a token twice: give each one number")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise EngineError(f"logit_bias has tokens outside 0..{vocab_size - 1}: check the tokenizer")
    if not all(-BIAS <= value <= BIAS for _, value in bias):
        raise EngineError(f"logit_bias has values outside {-BIAS}..{BIAS}: give smaller ones")
