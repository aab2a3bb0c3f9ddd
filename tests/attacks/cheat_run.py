"""A run to cheat in: a model that was trained a little, a manifest as in production, some policy updates."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from primerl.node.config.run import EngineConfig, RunConfig
from primerl.node.models import huggingface
from primerl.node.training.backend import Sample
from primerl.node.verification.calibration import trial_run
from primerl.protocol.manifests import RunManifest
from primerl.protocol.rollouts import GroupRecord, unpack_f32, unpack_u32
from primerl.scripts.bench.trained_model import Trained, policy_updates, stop_token

from .cheat_world import Workshop, World
from .corpus_environment import CorpusEnvironment

GROUP_SIZE = 8
ROOM = 64
"""For the longest prompt."""


def new_world(trained: Trained, small: Trained, engine: EngineConfig, *, max_tokens: int) -> World:
    """The run before its first step, with production's bounds for engine.dtype."""
    stops = (stop_token(trained.directory),)
    environment = CorpusEnvironment(trained.corpus, max_tokens=max_tokens, stops=stops)
    return World(
        model_dir=trained.directory,
        run=manifest(trained.directory, engine, max_tokens),
        environment=environment,
        states={0: trained.state},
        engine=engine,
        small=(small.directory, small.state),
    )


def manifest(model_dir: Path, engine: EngineConfig, max_tokens: int) -> RunManifest:
    """As a trainer would sign it."""
    config = RunConfig.model_validate(
        {
            "name": "cheats",
            "engine": engine.model_dump(),
            "sampling": {"max_tokens": max_tokens},
            "rollouts": {"group_size": GROUP_SIZE},
            "training": {"seq_len": max_tokens + ROOM},
        }
    )
    return trial_run(
        config,
        config_file=(model_dir / "config.json").read_bytes(),
        vocab_size=huggingface.vocab_size(model_dir),
        stop_token_ids=(stop_token(model_dir),),
    )


async def learning_material(world: World, groups: int) -> list[Sample]:
    """What a trainer learns from: honest groups of the base model."""
    shop = Workshop(world, bytes(32))
    try:
        lease = await world.lease(groups, GROUP_SIZE, first_task=1 << 24)
        return samples(await shop.play(lease, await shop.honest()))
    finally:
        await shop.close()


def with_updates(world: World, material: Sequence[Sample], *, lr: float, updates: int) -> World:
    """The run after `updates` steps over equal shares of `material`."""
    device = world.engine.device
    states = policy_updates(world.model_dir, material, lr=lr, updates=updates, device=device)
    return replace(world, states=dict(enumerate(states)))


def samples(groups: Sequence[GroupRecord]) -> list[Sample]:
    """What a trainer would learn from these groups, with advantages as GRPO has them."""
    found: list[Sample] = []
    for group in groups:
        mean = sum(one.reward for one in group.rollouts) / len(group.rollouts)
        for one in group.rollouts:
            (branch,) = one.branches
            logprobs = iter(unpack_f32(branch.logprobs))
            found.append(
                Sample(
                    token_ids=unpack_u32(branch.tokens),
                    mask=[flag == 1 for flag in branch.sampled],
                    logprobs=[next(logprobs) if flag else 0.0 for flag in branch.sampled],
                    advantage=one.reward - mean,
                )
            )
    return found
