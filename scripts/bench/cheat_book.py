"""The cheat book: ways in which a worker gains by not doing what its lease says, and how each is caught.

Every cheat is as clever as it can be beside what it does: a forger has the right weights too, and says what
they would say.
"""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import DynamicCache

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.counting_environment import even_share

from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.model import LanguageModel, ModelOutput
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease
from primerl.protocol.rollouts import (
    BranchRecord,
    GroupRecord,
    RolloutRecord,
    pack_f32,
    unpack_f32,
)
from primerl.scripts.bench.calibrate_cheats import int4, int8

from .cheat_world import Groups, Sampler, Sent, Workshop


class Float8Cache(DynamicCache):
    """Keys and values go through float8 (e4m3) before anything attends to them."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See DynamicCache."""
        rounded = _through_float8(key_states), _through_float8(value_states)
        return super().update(*rounded, *args, **kwargs)


class RoundedCache(LanguageModel):
    """Generates with a Float8Cache."""

    def run(
        self, tokens: Tensor, mask: Tensor, cache: Any, keep_routes: bool = False
    ) -> tuple[ModelOutput, Any]:
        """See LanguageModel."""
        cache = Float8Cache() if cache is None else cache
        return super().run(tokens, mask, cache, keep_routes)


class Narrowed(LanguageModel):
    """Generates with fewer tokens than there are."""

    def run(
        self, tokens: Tensor, mask: Tensor, cache: Any, keep_routes: bool = False
    ) -> tuple[ModelOutput, Any]:
        """See LanguageModel."""
        output, cache = super().run(tokens, mask, cache, keep_routes)
        return replace(output, logits=self.narrow(output.logits)), cache

    def narrow(self, logits: Tensor) -> Tensor:
        """Exclude tokens by minus infinity."""
        raise NotImplementedError


class BestOnly(Narrowed):
    """Only the `kept` likeliest tokens can be drawn."""

    kept = 20

    def narrow(self, logits: Tensor) -> Tensor:
        """See Narrowed."""
        least = logits.topk(self.kept, -1).values[..., -1:]
        return logits.masked_fill(logits < least, -torch.inf)


class Nucleus(Narrowed):
    """Only the likeliest tokens that together make up `kept` of the probability can be drawn."""

    kept = 0.98

    def narrow(self, logits: Tensor) -> Tensor:
        """See Narrowed."""
        likely, order = logits.float().softmax(-1).sort(-1, descending=True)
        tail = likely.cumsum(-1) - likely > self.kept
        return logits.masked_fill(tail.scatter(-1, order, tail), -torch.inf)


def _through_float8(values: Tensor) -> Tensor:
    """As a cache in e4m3 without scales keeps them; 448 is its largest number."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


MakeSampler = Callable[[Workshop], Awaitable[Sampler]]
Retell = Callable[[Workshop, GenerateRequest, Completion], Completion]
Reproof = Callable[[Workshop, bytes, int], bytes]
"""(proof, number of tokens) -> another proof."""

OTHER_SEED = 0x5EED
CANDIDATES = 4
AT_LEAST = 64
"""Tokens below which a reply is left as it is by cheats that need some length."""


# -- other distributions -------------------------------------------------------------------------------


async def smaller_model(shop: Workshop) -> Sampler:
    """A model that costs less, with its own proofs and logprobs."""
    model_dir, state = shop.world.small
    return await shop.engine("small", state, model_dir=model_dir)


async def previous_version(shop: Workshop) -> Sampler:
    """The policy before, to save an update."""
    world = shop.world
    return await shop.engine("previous", world.states[world.version - 1])


async def base_model(shop: Workshop) -> Sampler:
    """The base model, to save all of them."""
    return await shop.engine("base", shop.world.states[0])


async def int8_weights(shop: Workshop) -> Sampler:
    """Weight-only int8."""
    return await shop.engine("int8", int8(shop.world.states[shop.world.version]))


async def int4_weights(shop: Workshop) -> Sampler:
    """Weight-only int4 in groups."""
    return await shop.engine("int4", int4(shop.world.states[shop.world.version]))


async def fp8_cache(shop: Workshop) -> Sampler:
    """Half the memory for keys and values."""
    state = shop.world.states[shop.world.version]
    return await shop.engine("fp8 cache", state, model=RoundedCache)


def narrowed(kind: type[Narrowed]) -> MakeSampler:
    """Only likely tokens, which are oftener right; the logprobs are those of the whole distribution."""

    async def make(shop: Workshop) -> Sampler:
        state = shop.world.states[shop.world.version]
        return retold(await shop.engine(kind.__name__, state, model=kind), shop, forged)

    return make


def temperature(degrees: float) -> MakeSampler:
    """Sharper or wilder than agreed; the logprobs and proofs are those of the agreed temperature."""

    async def make(shop: Workshop) -> Sampler:
        honest = await shop.honest()

        async def sampler(request: GenerateRequest) -> Completion:
            drawn = await honest(replace(request, temperature=degrees))
            return shop.forge(request, drawn.token_ids)

        return sampler

    return make


async def foreign_text(shop: Workshop) -> Sampler:
    """A smaller model writes; one prefill of the right one proves and prices it."""
    return retold(await smaller_model(shop), shop, forged)


async def best_of_several(shop: Workshop) -> Sampler:
    """More seeds than one; the best reply is kept, with its own honest proof."""
    honest = await shop.honest()

    async def sampler(request: GenerateRequest) -> Completion:
        drawn = [
            await honest(replace(request, seed=request.seed ^ number))
            for number in range(CANDIDATES)
        ]
        return max(drawn, key=lambda one: even_share(one.token_ids))

    return sampler


async def foreign_seed(shop: Workshop) -> Sampler:
    """The noise of another lease."""
    honest = await shop.honest()
    return lambda request: honest(replace(request, seed=request.seed ^ OTHER_SEED))


# -- replies told otherwise ----------------------------------------------------------------------------


def retold(sampler: Sampler, shop: Workshop, retell: Retell) -> Sampler:
    """What `sampler` draws, told otherwise."""

    async def told(request: GenerateRequest) -> Completion:
        return retell(shop, request, await sampler(request))

    return told


def telling(retell: Retell) -> MakeSampler:
    """An honest worker up to the last moment."""

    async def make(shop: Workshop) -> Sampler:
        return retold(await shop.honest(), shop, retell)

    return make


def forged(shop: Workshop, request: GenerateRequest, drawn: Completion) -> Completion:
    """The same tokens, with what the right model says of them."""
    return shop.forge(request, drawn.token_ids)


def edited(count: int) -> Retell:
    """`count` tokens replaced, and everything proved anew."""

    def retell(shop: Workshop, request: GenerateRequest, drawn: Completion) -> Completion:
        tokens = list(drawn.token_ids)
        stops = frozenset(request.stop_token_ids)
        for number in range(count):
            place = (2 * number + 1) * len(tokens) // (2 * count)
            if tokens[place] not in stops:
                tokens[place] = _neighbour(tokens[place], stops)
        return shop.forge(request, tokens)

    return retell


def _neighbour(token: int, stops: frozenset[int]) -> int:
    """Another token, and an even one: those pay."""
    return next(one for one in (token ^ 2, token ^ 4, token ^ 8) if one not in stops) & ~1


def early_stop(shop: Workshop, request: GenerateRequest, drawn: Completion) -> Completion:
    """The reply ends where it is good enough, as if the stop token had been drawn."""
    if len(drawn.token_ids) <= AT_LEAST:
        return drawn
    cut = [*drawn.token_ids[: AT_LEAST - 1], request.stop_token_ids[0]]
    return shop.forge(request, cut)


def forged_logprobs(shop: Workshop, request: GenerateRequest, drawn: Completion) -> Completion:
    """Likelier than they were, so that the importance ratio is another."""
    return replace(drawn, logprobs=[0.7 * value for value in drawn.logprobs])


def shifted_logprobs(nats: float) -> Retell:
    """All importance ratios off by as much."""

    def retell(shop: Workshop, request: GenerateRequest, drawn: Completion) -> Completion:
        return replace(drawn, logprobs=[min(0.0, value + nats) for value in drawn.logprobs])

    return retell


def reproved(make: Reproof) -> Retell:
    """An honest reply with another proof."""

    def retell(shop: Workshop, request: GenerateRequest, drawn: Completion) -> Completion:
        return replace(drawn, proof=make(shop, drawn.proof, len(drawn.token_ids)))

    return retell


def zero_proof(shop: Workshop, proof: bytes, tokens: int) -> bytes:
    """Nothing but zeros."""
    return bytes(len(proof))


def constant_proof(shop: Workshop, proof: bytes, tokens: int) -> bytes:
    """The first token's bytes for all, which are well formed."""
    size = shop.fingerprint.size(1)
    return (proof[:size] * (len(proof) // size + 1))[: len(proof)]


def random_proof(shop: Workshop, proof: bytes, tokens: int) -> bytes:
    """The well-formed proof of hidden states that are noise."""
    import numpy as np

    noise = np.random.default_rng(len(proof)).normal(0, 1, (tokens, 64))
    return shop.fingerprint.make(noise.astype(np.float32))


def shuffled_proof(shop: Workshop, proof: bytes, tokens: int) -> bytes:
    """The right bytes, token by token in another order."""
    size = shop.fingerprint.size(1)
    parts = [proof[at : at + size] for at in range(0, len(proof), size)]
    return b"".join(reversed(parts))


def truncated_proof(shop: Workshop, proof: bytes, tokens: int) -> bytes:
    """A byte less."""
    return proof[:-1]


def zero_scale(shop: Workshop, proof: bytes, tokens: int) -> bytes:
    """The scale of the first token is 0, its codes are not."""
    return bytes(1) + proof[1:]


def longer_proof(shop: Workshop, proof: bytes, tokens: int) -> bytes:
    """The proof of a longer text."""
    return proof + proof[: shop.fingerprint.size(32)]


Work = Callable[[Workshop, Lease], Awaitable[Groups]]


def sampled(make: MakeSampler) -> Work:
    """The lease played with another sampler."""

    async def work(shop: Workshop, lease: Lease) -> Groups:
        return await shop.play(lease, await make(shop))

    return work


async def honest_work(shop: Workshop, lease: Lease) -> Groups:
    """No cheat."""
    return await shop.play(lease, await shop.honest())


async def older_proofs(shop: Workshop, lease: Lease) -> Groups:
    """Honest tokens with the proofs of what the policy before said to the same prompt."""
    before = await shop.play(lease, await previous_version(shop))
    now = await honest_work(shop, lease)

    def mixed(branch: BranchRecord, old: BranchRecord) -> BranchRecord:
        proof = (old.proof * (len(branch.proof) // len(old.proof) + 1))[: len(branch.proof)]
        return msgspec.structs.replace(branch, proof=proof)

    return [
        _with_branches(
            group, lambda index, one, old=old: mixed(one, old.rollouts[index].branches[0])
        )
        for group, old in zip(now, before, strict=True)
    ]


async def forged_rewards(shop: Workshop, lease: Lease) -> Groups:
    """Everything was right."""
    groups = await honest_work(shop, lease)
    return [
        msgspec.structs.replace(
            group,
            rollouts=tuple(msgspec.structs.replace(one, reward=2.0) for one in group.rollouts),
        )
        for group in groups
    ]


async def dropped_failures(shop: Workshop, lease: Lease) -> Groups:
    """The worse half of each group is left out."""
    return _without_failures(await honest_work(shop, lease), "")


async def failures_as_errors(shop: Workshop, lease: Lease) -> Groups:
    """The worse half of each group is told as the environment's errors."""
    return _without_failures(await honest_work(shop, lease), "the environment failed")


def _without_failures(groups: Groups, error: str) -> Groups:
    left_out = RolloutRecord((), 0.0, error)
    found: Groups = []
    for group in groups:
        least = sorted(one.reward for one in group.rollouts)[len(group.rollouts) // 2]
        kept = tuple(one if one.reward >= least else left_out for one in group.rollouts)
        found.append(msgspec.structs.replace(group, rollouts=kept))
    return found


async def repeated_best(shop: Workshop, lease: Lease) -> Groups:
    """The best rollout of each group in the place of all others."""
    groups = await honest_work(shop, lease)
    return [
        msgspec.structs.replace(
            group,
            rollouts=(max(group.rollouts, key=lambda one: one.reward),) * len(group.rollouts),
        )
        for group in groups
    ]


async def repeated_bundle(shop: Workshop, lease: Lease) -> Groups:
    """What was sent for another lease of the same tasks."""
    other = msgspec.structs.replace(lease, lease_id=lease.lease_id + (1 << 32))
    groups = await honest_work(shop, other)
    shop.sent_before.append(Sent(shop.node, other, groups))
    return groups


async def copied_bundle(shop: Workshop, lease: Lease) -> Groups:
    """What another node sent for the same tasks."""
    victim = bytes(31) + b"v"
    other = msgspec.structs.replace(lease, lease_id=lease.lease_id + (1 << 32))
    groups = await shop.play(other, await shop.honest(), node=victim)
    shop.sent_before.append(Sent(victim, other, groups))
    return groups


async def wrong_prompt(shop: Workshop, lease: Lease) -> Groups:
    """The work on easier tasks under the names of those that were leased."""
    easier = await shop.world.lease(len(lease.tasks), lease.group_size, first_task=1 << 20)
    easier = msgspec.structs.replace(lease, tasks=easier.tasks)
    groups = await honest_work(shop, easier)
    return [
        msgspec.structs.replace(group, task_index=task.index, task_digest=task.digest)
        for group, task in zip(groups, lease.tasks, strict=True)
    ]


async def cut_without_stop(shop: Workshop, lease: Lease) -> Groups:
    """Replies that simply end."""

    def cut(index: int, branch: BranchRecord) -> BranchRecord:
        drawn = unpack_f32(branch.logprobs)
        if len(drawn) <= AT_LEAST:
            return branch
        less = len(drawn) - AT_LEAST
        return msgspec.structs.replace(
            branch,
            tokens=branch.tokens[: -4 * less],
            sampled=branch.sampled[:-less],
            logprobs=pack_f32(drawn[:-less]),
            proof=branch.proof[: shop.fingerprint.size(AT_LEAST)],
            finish="length",
        )

    return [_with_branches(group, cut) for group in await honest_work(shop, lease)]


def _with_branches(
    group: GroupRecord, change: Callable[[int, BranchRecord], BranchRecord]
) -> GroupRecord:
    rollouts = [
        msgspec.structs.replace(one, branches=tuple(change(index, b) for b in one.branches))
        for index, one in enumerate(group.rollouts)
    ]
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


@dataclass(frozen=True)
class Cheat:
    """`reasons` are those with which a run rejects it; `within` audited rollouts it has to be caught."""

    name: str
    work: Work
    reasons: frozenset[Reason]
    within: int = 16
    wanted: float = 0.99


MODEL = frozenset({Reason.WRONG_MODEL})
POLICY = frozenset({Reason.WRONG_POLICY})
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
    Cheat("top-k 20", sampled(narrowed(BestOnly)), SAMPLING),
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
    # where both versions said the same the proof is right, but of the other policy
    Cheat("proof of an older version's rollout", older_proofs, MODEL | PROOF | POLICY),
)
"""By name, as in the issue."""
