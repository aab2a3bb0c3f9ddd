"""Cheats that draw from another distribution than agreed, or tell a reply otherwise than it was drawn.

Every cheat is as clever as it can be beside what it does: whoever forges has the right weights too, and says
what they would say.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.verification.cheats import int4, int8

from .cheat_networks import build_best_only, build_nucleus, build_rounded_cache
from .cheat_world import Sampler, Workshop
from .corpus_environment import worth

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
    return await shop.engine("fp8 cache", state, build=build_rounded_cache)


async def best_only(shop: Workshop) -> Sampler:
    """Only likely tokens, which are oftener right; the logprobs are those of the whole distribution."""
    state = shop.world.states[shop.world.version]
    sampler = await shop.engine("top-k", state, build=build_best_only)
    return retold(shop, sampler, lambda shop, request, drawn: shop.forge(request, drawn.token_ids))


async def nucleus(shop: Workshop) -> Sampler:
    """No unlikely tokens; the logprobs are those of the whole distribution."""
    state = shop.world.states[shop.world.version]
    sampler = await shop.engine("top-p", state, build=build_nucleus)
    return retold(shop, sampler, lambda shop, request, drawn: shop.forge(request, drawn.token_ids))


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
    sampler = await smaller_model(shop)
    return retold(shop, sampler, lambda shop, request, drawn: shop.forge(request, drawn.token_ids))


async def best_of_several(shop: Workshop) -> Sampler:
    """More seeds than one; the best reply is kept, with its own honest proof."""
    honest = await shop.honest()

    async def sampler(request: GenerateRequest) -> Completion:
        drawn = [
            await honest(replace(request, seed=request.seed ^ number))
            for number in range(CANDIDATES)
        ]
        return max(drawn, key=lambda one: worth(one.token_ids))

    return sampler


async def foreign_seed(shop: Workshop) -> Sampler:
    """The noise of another lease."""
    honest = await shop.honest()
    return lambda request: honest(replace(request, seed=request.seed ^ OTHER_SEED))


# -- replies told otherwise ----------------------------------------------------------------------------


def retold(shop: Workshop, sampler: Sampler, retell: Retell) -> Sampler:
    """What `sampler` draws, told otherwise."""

    async def told(request: GenerateRequest) -> Completion:
        return retell(shop, request, await sampler(request))

    return told


def telling(retell: Retell) -> MakeSampler:
    """An honest worker up to the last moment."""

    async def make(shop: Workshop) -> Sampler:
        return retold(shop, await shop.honest(), retell)

    return make


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
