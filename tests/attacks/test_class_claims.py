"""A run that measures its own noise, attacked: before it has bounds, by strangers, and by false claims."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.hostile import Rogue
from support.swarm import Running, Swarm
from support.witness import WitnessEngine

from primerl.crypto.keys import SecretKey
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.node.p2p.rpc import Refused
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.messages import GetBounds, MeasuredBounds
from primerl.protocol.numerics import ClassBounds

pytestmark = pytest.mark.asyncio(loop_scope="session")

DEADLINE = 50.0
BF16 = {"dtype": "bfloat16"}


def id_of(name: str) -> str:
    """The node id (hex) of a swarm's worker."""
    return SecretKey.from_seed(name.encode().rjust(32, b"\x00")).node_id.hex()


def run_in_bfloat16(tmp_path: Path, model_dir: Path, *references: str) -> Swarm:
    """A run without an end whose references are the workers of these names."""
    named = {"references": [id_of(name) for name in references]}
    rollouts = {"max_peer_share": 1.0}
    return Swarm(
        tmp_path, model_dir, max_steps=4000, engine=BF16, verification=named, rollouts=rollouts
    )


async def until_told(node: Running, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the status of a node has something in it."""
    async with asyncio.timeout(DEADLINE):
        while True:
            status = await node.status()
            if holds(status):
                return status
            await asyncio.sleep(0.02)


async def row_of(swarm: Swarm, worker: Running) -> dict[str, Any]:
    rows = {row["id"]: row for row in await swarm.trainer.peers()}
    return rows[worker.node_id.hex()]


async def until_accepted(swarm: Swarm, worker: Running) -> None:
    """Wait until work of a node was accepted."""
    await swarm.until_row(worker, lambda row: bool(row["accepted"]), DEADLINE)


class RandomProof(WitnessEngine):
    """Draws as it should, and commits to states that nobody computed."""

    async def generate(self, request: GenerateRequest) -> Completion:
        found = await super().generate(request)
        rows = np.random.default_rng(request.seed).normal(size=(len(found.token_ids), 32))
        return replace(found, proof=Projection().make(rows.astype(np.float32)))


class OtherSeed(WitnessEngine):
    """Takes the draws of a seed that it likes better."""

    async def generate(self, request: GenerateRequest) -> Completion:
        return await super().generate(replace(request, seed=request.seed ^ 1))


@pytest.mark.parametrize(
    ("cheat", "reason"),
    [(RandomProof, Reason.WRONG_MODEL), (OtherSeed, Reason.BAD_SAMPLING)],
    ids=["random proof", "other seed"],
)
async def test_a_cheat_is_banned_also_while_nothing_is_measured(
    tmp_path: Path, model_dir: Path, cheat: type[WitnessEngine], reason: Reason
) -> None:
    async with run_in_bfloat16(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        honest = swarm.add_worker("honest", engine_section=BF16)
        guilty = swarm.add_worker(
            "guilty", engine=cheat(swarm.fakes, "guilty"), engine_section=BF16
        )
        row = await swarm.until_row(
            guilty, lambda row: row["refused"].startswith("banned"), DEADLINE
        )
        assert (row["accepted"], row["top_reason"]) == (0, reason.value)
        status = await until_told(swarm.trainer, lambda told: told["step"] >= 2)
        assert any("bounds of noise are provisional" in one for one in status["warnings"])
        assert any("verification.references" in one for one in status["warnings"])
        good = await row_of(swarm, honest)
        assert good["accepted"] > 0
        assert good["refused"] == ""


async def test_a_stranger_waits_until_the_operators_worker_has_made_bounds_and_loses_no_work(
    tmp_path: Path, model_dir: Path
) -> None:
    async with run_in_bfloat16(tmp_path, model_dir, "own") as swarm:
        await swarm.start_trainer()
        stranger = swarm.add_worker("stranger", engine_section=BF16)
        status = await until_told(
            swarm.trainer,
            lambda told: any("1 worker of" in one for one in told["warnings"]),
        )
        assert any("waits for bounds of noise, without work" in one for one in status["warnings"])
        told = await until_told(stranger, lambda told: "bounds of noise" in told["waiting_for"])
        assert "no reference of that class has sent work" in told["waiting_for"]
        assert "the run's operator has to name one" in told["waiting_for"]
        status = await swarm.trainer.status()
        assert (status["accepted"], status["step"], status["leases"]) == (0, 0, 0)
        assert (await row_of(swarm, stranger))["trust"] == 0.5, "it counts neither for nor against"

        swarm.add_worker("own", engine_section=BF16)
        status = await until_told(
            swarm.trainer, lambda told: any(row["number"] for row in told["bounds"])
        )
        await until_accepted(swarm, stranger)
        (row,) = status["bounds"]
        assert row["rollouts"] >= 64
        assert row["workers"] == 2
        assert row["rejected_at_most"] < 0.06
        told = await until_told(stranger, lambda told: told["bounds"][0]["number"] > 0)
        assert told["bounds"][0]["numerics"] == row["numerics"]
        status = await swarm.trainer.status()
        assert not status["warnings"]
        assert "uncalibrated" not in status["rejected"], "nothing that it made was thrown away"


async def test_bounds_go_to_members_only_and_are_signed_by_the_trainer(
    tmp_path: Path, model_dir: Path
) -> None:
    async with run_in_bfloat16(tmp_path, model_dir, "own") as swarm:
        await swarm.start_trainer()
        swarm.add_worker("own", engine_section=BF16)
        await until_told(swarm.trainer, lambda told: any(row["number"] for row in told["bounds"]))
        async with Rogue(swarm) as rogue:
            with pytest.raises(Refused) as refusal:
                await rogue.ask(GetBounds(), MeasuredBounds)
            assert refusal.value.reason is Reason.NOT_ADMITTED
            await rogue.hello()
            (sealed,) = (await rogue.ask(GetBounds(), MeasuredBounds)).bounds
            fact = unseal(
                sealed, Purpose.BOUNDS, ClassBounds, now=0, run=rogue.run, signer=rogue.trainer
            ).body
            assert fact.rollouts >= 64


async def test_a_trainer_that_is_killed_has_its_bounds_again(
    tmp_path: Path, model_dir: Path
) -> None:
    async with run_in_bfloat16(tmp_path, model_dir, "own") as swarm:
        await swarm.start_trainer()
        swarm.add_worker("own", engine_section=BF16)
        before = await until_told(
            swarm.trainer, lambda told: any(row["number"] for row in told["bounds"])
        )
        await swarm.crash_worker("own")
        await swarm.crash_trainer()
        await swarm.start_trainer(resume=True)
        after = await until_told(swarm.trainer, lambda told: bool(told["bounds"]))
        assert after["bounds"][0]["number"] >= before["bounds"][0]["number"]
        stranger = swarm.add_worker("stranger", engine_section=BF16)
        await until_accepted(swarm, stranger)
        assert "uncalibrated" not in (await swarm.trainer.status())["rejected"]
