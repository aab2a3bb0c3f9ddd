"""The cheat book against production checks: every cheat is caught by its reason, and its honest twin passes.

One tiny model, one lease, one honest rollout of each index: what a cheat does not change is not made again.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.prefill_core import PrefillCore
from support.swarm import Running, Swarm

from primerl.node.app.factories import Factories, MakeLedger, make_backend
from primerl.node.config.run import EngineConfig, EnvironmentConfig
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.hf import HfEngine
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease
from primerl.protocol.reputation import Audited, Reputation, ban_test
from primerl.scripts.bench import cheat_world
from primerl.scripts.bench.cheat_book import (
    BOOK,
    Nucleus,
    honest_work,
    narrowed,
    sampled,
    shifted_logprobs,
    telling,
    temperature,
)
from primerl.scripts.bench.trained_model import (
    Corpus,
    Recipe,
    recipe,
    stop_token,
    trained_model,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 72
LR = 1e-4
"""A hundred steps at 1e-6: the bench measures single ones, over more rollouts."""


@dataclass
class Stage:
    """A worker's workshop, the trainer's auditor, and the lease that all is about."""

    shop: cheat_world.Workshop
    auditor: PrefillCore
    lease: Lease

    @property
    def world(self) -> cheat_world.World:
        return self.shop.world

    async def play(self, name: str) -> list[cheat_world.Outcome]:
        """What becomes of a cheat's work."""
        work = BOOK[name].work if name in BOOK else honest_work
        groups = await work(self.shop, self.lease)
        found = await cheat_world.Court(self.world, self.auditor).judge(
            self.shop, self.lease, groups
        )
        self.shop.sent_before.clear()
        return found


def short(wanted: Recipe) -> Recipe:
    """Little to train on."""
    return replace(wanted, rows=12, length=64)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> cheat_world.World:
    """A run at version 2 of a tiny model."""
    import torch

    torch.set_num_threads(1)
    cache = tmp_path_factory.mktemp("models")

    def quiet(line: str) -> None:
        pass

    right = trained_model(short(recipe("tiny", steps=60)), cache=cache, say=quiet)
    narrow = recipe("tiny", steps=20, hidden_size=48, num_hidden_layers=1)
    small = trained_model(short(narrow), cache=cache, say=quiet)
    config = EngineConfig(device="cpu", max_model_len=TOKENS + 64, batch_window_ms=20)
    fresh = cheat_world.new_world(right, small, config, max_tokens=TOKENS)
    return cheat_world.with_updates(
        fresh, await cheat_world.learning_material(fresh, 4), lr=LR, updates=2
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(world: cheat_world.World) -> AsyncIterator[Stage]:
    """With projections."""
    async for one in _stage(world):
        yield one


async def _stage(world: cheat_world.World) -> AsyncIterator[Stage]:
    shop = cheat_world.Workshop(world, bytes(31) + b"c", remember=True)
    auditor = PrefillCore(world.engine)
    await auditor.start(world.model_dir, world.run)
    yield Stage(shop, auditor, await world.lease(1, 8, first_task=7))
    await auditor.close()
    await shop.close()


def rejected(found: list[cheat_world.Outcome]) -> float:
    return sum(one.caught for one in found) / len(found)


async def test_honest_work_passes_and_arouses_no_suspicion(stage: Stage) -> None:
    found = await stage.play("honest")
    assert cheat_world.reasons_of(found) == set()
    assert not any(one.suspect for one in found)
    assert sum(one.evidence.tokens for one in found if one.evidence) > 4 * 64


@pytest.mark.parametrize("name", BOOK)
async def test_a_cheat_is_caught_within_one_group(stage: Stage, name: str) -> None:
    found = await stage.play(name)
    assert cheat_world.reasons_of(found)
    assert cheat_world.reasons_of(found) <= BOOK[name].reasons


FAINT = {
    "temperature 1.03": sampled(temperature(1.03)),
    "top-p 0.98": sampled(narrowed(Nucleus)),
    "logprobs off by 0.00018 nats": sampled(telling(shifted_logprobs(1.8e-4))),
}
"""So little that single rollouts may pass."""


@pytest.mark.parametrize("name", FAINT)
async def test_a_faint_cheat_is_banned_by_what_its_rollouts_add_up_to(
    stage: Stage, name: str
) -> None:
    lease = await stage.world.lease(4, 8, first_task=100)
    found = await cheat_world.Court(stage.world, stage.auditor).judge(
        stage.shop, lease, await FAINT[name](stage.shop, lease)
    )
    stage.shop.sent_before.clear()
    peer = Reputation()
    peer.observe(
        [
            Audited(
                "rejected" if one.caught else "suspect" if one.suspect else "clean",
                one.evidence.other_policy,
            )
            for one in found
            if one.evidence is not None
        ],
        ban_test(stage.world.run.proofs, 160 * 128),
    )
    assert peer.banned


async def test_honest_work_in_any_company_says_the_same(stage: Stage) -> None:
    honest = await stage.shop.honest()
    request = stage.shop.request([10, 20, 30, 40], 5)
    alone = await honest(replace(request, seed=6))
    together = await asyncio.gather(*(honest(replace(request, seed=seed)) for seed in range(8)))
    assert together[6].token_ids == alone.token_ids


async def test_forging_what_was_drawn_gives_what_was_proved(stage: Stage) -> None:
    """The forger of the book has the right weights: else nothing would be shown by catching him."""
    request = stage.shop.request([10, 20, 30, 40], 5)
    drawn = await (await stage.shop.honest())(request)
    forged = stage.shop.forge(request, drawn.token_ids)
    fingerprint = stage.shop.fingerprint
    assert len(forged.proof) == fingerprint.size(len(drawn.token_ids))
    same = sum(a == b for a, b in zip(forged.proof, drawn.proof, strict=True))
    assert same > 0.9 * len(drawn.proof)
    assert forged.logprobs == pytest.approx(drawn.logprobs, abs=1e-4)


# -- in a swarm ----------------------------------------------------------------------------------------


class CoolEngine(HfEngine):
    """Draws at a lower temperature than it was asked to."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, temperature=0.7 * request.temperature))


class RealSwarm(Swarm):
    """Real engines, a real auditor and a real trainer; workers named "cool..." cheat."""

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        kind = CoolEngine if running.data_dir.name.startswith("cool") else HfEngine

        def environment(
            config: EnvironmentConfig, model: Path, seed: int, max_tokens: int, temperature: float
        ) -> cheat_world.CorpusEnvironment:
            corpus = Corpus(160, stop_token(model))
            return cheat_world.CorpusEnvironment(
                corpus, max_tokens=max_tokens, stops=(stop_token(model),)
            )

        def auditor(config: EngineConfig, timeout_s: float) -> PrefillCore:
            return PrefillCore(config)

        return replace(
            super()._factories(running, ledger),
            environment=environment,
            engine=kind,
            evaluation_engine=HfEngine,
            auditor=auditor,
            backend=make_backend,
        )


@pytest.mark.nightly
async def test_a_worker_that_samples_otherwise_is_banned_and_an_honest_one_is_not(
    world: cheat_world.World, tmp_path: Path, quiet_registry: None
) -> None:
    async with RealSwarm(
        tmp_path,
        world.model_dir,
        max_steps=10_000,
        engine={"device": "cpu", "batch_window_ms": 20.0},
        sampling={"max_tokens": 64},
        training={"seq_len": 128, "device": "cpu", "threads": 1},
    ) as swarm:
        await swarm.start_trainer()
        cheat, hand = swarm.add_worker("cool"), swarm.add_worker("honest")
        async with asyncio.timeout(240.0):
            while True:
                cheating, honest = await row_of(swarm, cheat), await row_of(swarm, hand)
                if cheating["refused"].startswith("banned") and honest["accepted"] >= 16:
                    break
                await asyncio.sleep(0.05)
    assert cheating["top_reason"] == Reason.BAD_SAMPLING
    assert honest["refused"] == ""
    assert honest["top_reason"] in ("", Reason.STALE)


async def row_of(swarm: Swarm, worker: Running) -> dict[str, Any]:
    rows = await swarm.trainer.peers()
    unknown = {"refused": "", "accepted": 0, "top_reason": ""}
    return next((row for row in rows if row["id"] == worker.node_id.hex()), unknown)
