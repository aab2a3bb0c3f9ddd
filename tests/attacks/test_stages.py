"""Offers of stages to a real trainer: which are answered, how, and what a hostile one gains."""

import json
import shutil
from pathlib import Path

import pytest
from support.hostile import Rogue, reason_of
from support.offer_cases import CONFIG, offer, record
from support.swarm import VOCABULARY, Swarm

from primerl.crypto.keys import SecretKey
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import PeerRecord
from primerl.protocol.messages import OfferStage, StagePlanned, StageWait, SyncRecords
from primerl.protocol.pipelines import PipelinePlan, StageOffer, check_plan

STRANGER = SecretKey.from_seed(b"s" * 32)


@pytest.fixture
def real_model(model_dir: Path, tmp_path: Path) -> Path:
    """A model directory whose config.json says how large the model is."""
    directory = shutil.copytree(model_dir, tmp_path / "sized")
    known = json.loads((directory / "config.json").read_text())
    sized = {**CONFIG, **known, "vocab_size": VOCABULARY}
    (directory / "config.json").write_text(json.dumps(sized))
    return directory


def half(rank: int, software: str = "vllm 1") -> StageOffer:
    return offer(2**40, rank=rank, world_size=2, software=software)


def opened(swarm: Swarm, reply: StageWait | StagePlanned) -> PipelinePlan:
    assert isinstance(reply, StagePlanned)
    ticket = swarm.read_ticket()
    found = unseal(
        reply.plan, Purpose.PIPELINE, PipelinePlan, now=0, run=ticket.run, signer=ticket.trainer
    )
    check_plan(found.body)
    return found.body


async def ask(rogue: Rogue, request: OfferStage) -> StageWait | StagePlanned:
    return await rogue.ask(request, StageWait | StagePlanned)  # type: ignore[arg-type]


async def test_a_trainer_plans_those_that_it_admitted_and_nobody_else(
    tmp_path: Path, real_model: Path
) -> None:
    async with Swarm(tmp_path, real_model) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, "one") as one, Rogue(swarm, "two") as two:
            reason = await reason_of(ask(one, OfferStage(half(0))))
            assert reason == Reason.NOT_ADMITTED
            await one.hello()
            await two.hello()
            assert isinstance(await ask(one, OfferStage(half(0))), StageWait)
            plan = opened(swarm, await ask(two, OfferStage(half(1))))
            assert [stage.node for stage in plan.stages] == [one.key.node_id, two.key.node_id]
            reply = await ask(one, OfferStage(half(0)))
            assert opened(swarm, reply) == plan
            assert isinstance(reply, StagePlanned)
            shown = unseal(reply.records[0], Purpose.PEER, PeerRecord, now=0, run=one.run).body
            assert (shown.node, shown.addresses) == (
                two.key.node_id,
                two.transport.addresses(),
            )
            status = await swarm.trainer.status()
            (row,) = status["pipelines"]
            assert row["layers"] == ["0-3", "4-7"]
            rows = {peer["id"]: peer["stage"] for peer in await swarm.trainer.peers()}
            assert rows[two.key.node_id.hex()] == "1/2, layers 4-7"
            await two.goodbye()
            assert opened(swarm, await ask(one, OfferStage(half(0)))) == plan
            assert (await swarm.trainer.status())["pipelines"][0]["state"] == "waiting"


async def test_nobody_renews_the_record_of_another(tmp_path: Path, real_model: Path) -> None:
    async with Swarm(tmp_path, real_model) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, "one") as one, Rogue(swarm, "two") as two:
            await one.hello()
            await two.hello()
            forged = {
                record(STRANGER, one.run): Reason.WRONG_SIGNER,
                two.record(): Reason.WRONG_SIGNER,
                record(one.key, b"x" * 32): Reason.WRONG_RUN,
                b"noise": Reason.MALFORMED,
            }
            for sealed, reason in forged.items():
                assert await reason_of(one.ask(SyncRecords((sealed,)), SyncRecords)) == reason
            await one.ask(SyncRecords((one.record(),)), SyncRecords)
            await ask(one, OfferStage(half(0)))
            reply = await ask(two, OfferStage(half(1)))
            assert isinstance(reply, StagePlanned)
            shown = unseal(reply.records[0], Purpose.PEER, PeerRecord, now=0, run=one.run).body
            assert shown.addresses == one.transport.addresses()


async def test_a_run_whose_model_is_not_known_makes_no_pipelines(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm) as rogue:
            await rogue.hello()
            assert await reason_of(ask(rogue, OfferStage(half(0)))) == Reason.NOT_FOUND
