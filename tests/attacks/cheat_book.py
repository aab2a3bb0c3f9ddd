"""The cheat book: ways in which a worker gains something by not doing what its lease says, by name.

What each does is in cheat_samplers.py and cheat_groups.py; here stands how it has to be caught.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from primerl.protocol.errors import Reason

from .cheat_groups import (
    Work,
    copied_bundle,
    cut_without_stop,
    dropped_failures,
    failures_as_errors,
    forged_rewards,
    honest_work,
    older_proofs,
    repeated_best,
    repeated_bundle,
    sampled,
    wrong_prompt,
)
from .cheat_samplers import (
    base_model,
    best_of_several,
    best_only,
    constant_proof,
    early_stop,
    edited,
    foreign_seed,
    foreign_text,
    forged_logprobs,
    fp8_cache,
    int4_weights,
    int8_weights,
    longer_proof,
    previous_version,
    random_proof,
    reproved,
    shuffled_proof,
    smaller_model,
    telling,
    temperature,
    truncated_proof,
    zero_proof,
    zero_scale,
)

__all__ = ["BOOK", "Cheat", "Work", "audited_by_content", "honest_work"]


@dataclass(frozen=True)
class Cheat:
    """`reasons` are those with which a run rejects it; `within` audited rollouts it has to be caught."""

    name: str
    work: Work
    reasons: frozenset[Reason]
    within: int = 16
    wanted: float = 0.99


MODEL = frozenset({Reason.WRONG_MODEL})
SAMPLING = frozenset({Reason.BAD_SAMPLING})
PROOF = frozenset({Reason.BAD_PROOF})
ANY_AUDIT = frozenset(
    {Reason.WRONG_MODEL, Reason.WRONG_POLICY, Reason.BAD_SAMPLING, Reason.BAD_LOGPROBS}
)


def _cheats(*found: Cheat) -> dict[str, Cheat]:
    return {one.name: one for one in found}


BOOK: dict[str, Cheat] = _cheats(
    Cheat("smaller model", sampled(smaller_model), MODEL),
    Cheat("previous policy version", sampled(previous_version), ANY_AUDIT, 64, 0.9),
    Cheat("base model without deltas", sampled(base_model), ANY_AUDIT),
    Cheat("int8 weights", sampled(int8_weights), ANY_AUDIT),
    Cheat("int4 weights", sampled(int4_weights), ANY_AUDIT),
    Cheat("fp8 KV cache", sampled(fp8_cache), ANY_AUDIT),
    Cheat("temperature 0.7", sampled(temperature(0.7)), SAMPLING),
    Cheat("temperature 0.9", sampled(temperature(0.9)), SAMPLING),
    Cheat("temperature 1.2", sampled(temperature(1.2)), SAMPLING),
    Cheat("top-k 20", sampled(best_only), SAMPLING),
    Cheat("right model fed foreign text", sampled(foreign_text), SAMPLING),
    Cheat("1 token edited", sampled(telling(edited(1))), SAMPLING),
    Cheat("4 tokens edited", sampled(telling(edited(4))), SAMPLING),
    Cheat("forged logprobs", sampled(telling(forged_logprobs)), frozenset({Reason.BAD_LOGPROBS})),
    Cheat("forged rewards", forged_rewards, frozenset({Reason.BAD_REWARD})),
    Cheat("best of 4", sampled(best_of_several), SAMPLING),
    Cheat("dropped failures", dropped_failures, frozenset({Reason.MISSING_INDEX})),
    Cheat(
        "failures told as errors",
        failures_as_errors,
        frozenset({Reason.ENVIRONMENT_ERROR}),
    ),
    Cheat("best one repeated", repeated_best, frozenset({Reason.DUPLICATE, Reason.BAD_SAMPLING})),
    Cheat("early stop", sampled(telling(early_stop)), SAMPLING),
    Cheat("cut without a stop token", cut_without_stop, frozenset({Reason.BAD_TERMINATION})),
    Cheat("repeated bundle", repeated_bundle, frozenset({Reason.BAD_SAMPLING, Reason.DUPLICATE})),
    Cheat("copied bundle", copied_bundle, frozenset({Reason.BAD_SAMPLING, Reason.DUPLICATE})),
    Cheat("wrong prompt", wrong_prompt, frozenset({Reason.BAD_PROMPT})),
    Cheat("other lease's seed", sampled(foreign_seed), SAMPLING),
    Cheat("zero proof", sampled(telling(reproved(zero_proof))), MODEL | PROOF),
    Cheat("constant proof", sampled(telling(reproved(constant_proof))), MODEL | PROOF),
    Cheat("random proof", sampled(telling(reproved(random_proof))), MODEL),
    Cheat("shuffled proof", sampled(telling(reproved(shuffled_proof))), MODEL),
    Cheat("truncated proof", sampled(telling(reproved(truncated_proof))), PROOF),
    Cheat("zero scale", sampled(telling(reproved(zero_scale))), PROOF | MODEL),
    Cheat("proof of a longer text", sampled(telling(reproved(longer_proof))), PROOF),
    Cheat("proof of an older version's rollout", older_proofs, MODEL | PROOF),
)
"""By name, as in the issue."""


def audited_by_content(names: Sequence[str] = tuple(BOOK)) -> list[str]:
    """Those that only an audit can catch."""
    return [name for name in names if BOOK[name].reasons <= ANY_AUDIT]
