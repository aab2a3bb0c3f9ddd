"""The trainer's pipeline coordinator: from offers to plans, and what becomes of them when stages are lost."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.offer_cases import MODEL, NOW, PART, TRAINER, OfferNetwork, key, node, opened, ranks
from support.protocol_cases import refuses

from primerl.node.memory_plan.stages import CutModel
from primerl.node.p2p.gossip import read_record
from primerl.node.trainer import pipeline_coordinator
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.messages import OfferStage, StagePlanned, StageWait
from primerl.protocol.pipelines import PipelinePlan, StageOffer


@pytest.fixture
def world(tmp_path: Path) -> Iterator[OfferNetwork]:
    found = OfferNetwork(tmp_path)
    yield found
    found.ledger.close()


def test_a_node_that_offers_alone_is_told_to_come_again(world: OfferNetwork) -> None:
    for _ in range(3):
        reply = world.offer(1)
        assert isinstance(reply, StageWait)
        assert reply.others == ()
        world.later(20.0)


def test_two_halves_make_a_pipeline_once_no_other_node_comes(world: OfferNetwork) -> None:
    assert isinstance(world.offer(1), StageWait)
    waiting = world.offer(2)
    assert isinstance(waiting, StageWait)
    other = read_record(waiting.others[0], b"r" * 32, NOW)
    assert other.node == node(1)
    world.later(4.0)
    world.offer(1)
    plan = world.plan(1, 2)
    assert sorted(ranks(plan)) == [1, 2]
    assert (plan.generation, plan.layers) == (0, 8)
    shape = plan.shape
    assert (shape.engine, shape.software, shape.dtype) == ("vllm", "vllm 1", "float32")
    assert (shape.hidden_size, shape.max_model_len) == (64, 256)


def test_who_expects_pipelines_is_called_with_the_first_plan_and_after_a_restart(
    world: OfferNetwork,
) -> None:
    calls: list[int] = []
    world.coordinator.expect(lambda: calls.append(1))
    world.offer(1)
    assert not calls
    world.gather(1, 2)
    assert calls == [1]
    world.restart()
    world.coordinator.expect(lambda: calls.append(2))
    assert calls == [1, 2]


def test_the_reply_names_the_other_stages_and_no_other_node(world: OfferNetwork) -> None:
    plan = world.gather(1, 2, 3)
    assert len(plan.stages) == 2
    spare = ({1, 2, 3} - set(ranks(plan))).pop()
    reply = world.offer(ranks(plan)[0])
    assert isinstance(reply, StagePlanned)
    assert [read_record(one, b"r" * 32, NOW).node for one in reply.records] == [plan.stages[1].node]
    assert plan.spares == (node(spare),)
    assert isinstance(world.offer(spare), StageWait)


def test_a_node_that_has_not_measured_is_waited_for_but_not_for_ever(world: OfferNetwork) -> None:
    for number in (1, 2):
        world.offer(number, round_trips={})
    world.later(4.0)
    assert isinstance(world.offer(1, round_trips={}), StageWait)
    world.offer(2, round_trips={})
    world.later(pipeline_coordinator.MEASURE_S)
    world.offer(2, round_trips={})
    assert isinstance(world.offer(1, round_trips={}), StagePlanned)


def test_what_operators_said_is_planned_at_once(world: OfferNetwork) -> None:
    assert isinstance(world.offer(1, rank=1, world_size=2, round_trips={}), StageWait)
    plan = opened(world.offer(2, rank=0, world_size=2, round_trips={}))
    assert ranks(plan) == [2, 1]


def test_only_equals_are_put_together(world: OfferNetwork) -> None:
    world.offer(1)
    world.offer(2, software="vllm 2")
    world.offer(3, name="home")
    world.offer(4, software="vllm 1+cpu")
    world.later(15.0)
    assert isinstance(world.offer(1), StageWait)
    assert isinstance(world.offer(3, name="home"), StageWait)


def test_a_spare_takes_the_place_of_a_lost_stage(world: OfferNetwork) -> None:
    plan = world.gather(1, 2, 3)
    head, lost = ranks(plan)
    spare = ({1, 2, 3} - {head, lost}).pop()
    world.later(pipeline_coordinator.ALIVE_S + 1)
    world.offer(spare)
    after = opened(world.offer(head, of=plan, lost=(lost,)))
    assert ranks(after) == [head, spare]
    assert (after.group, after.generation) == (plan.group, 1)
    assert after.shape == plan.shape
    assert opened(world.offer(spare)) == after


def test_a_lost_stage_that_comes_back_is_given_another_place_after_a_while(
    world: OfferNetwork,
) -> None:
    plan = world.gather(1, 2, 3)
    head, lost = ranks(plan)
    spare = ({1, 2, 3} - {head, lost}).pop()
    world.later(pipeline_coordinator.ALIVE_S + 1)
    world.offer(spare)
    world.offer(head, of=plan, lost=(lost,))
    assert isinstance(world.offer(lost, of=plan), StageWait)
    world.later(pipeline_coordinator.BENCH_S)
    for number in (head, spare, lost):
        world.offer(number)
    after = world.plan(head, spare)
    world.later(pipeline_coordinator.ALIVE_S + 1)
    world.offer(lost)
    assert ranks(opened(world.offer(head, of=after, lost=(spare,)))) == [head, lost]


def test_without_a_spare_those_that_are_left_are_planned_anew(world: OfferNetwork) -> None:
    """Three hold it with more room each than two of them need."""
    plan = world.gather(1, 2, 3, world_size=0, memory=PART // 10 * 9)
    assert len(plan.stages) == 3
    head, middle, last = ranks(plan)
    world.later(pipeline_coordinator.ALIVE_S + 1)
    for number in (head, last):
        world.offer(number, PART * 2)
    after = opened(world.offer(head, PART * 2, of=plan, lost=(middle,)))
    assert ranks(after) == [head, last]
    assert (after.group, after.generation) == (plan.group, 1)


def broken(world: OfferNetwork) -> tuple[PipelinePlan, int, int]:
    """A pipeline of two whose stage 1 is gone, and its stage 0 has said so: (plan, stage 0, lost node)."""
    plan = world.gather(1, 2)
    head, lost = ranks(plan)
    world.later(pipeline_coordinator.ALIVE_S + 1)
    assert opened(world.offer(head, of=plan, lost=(lost,))) == plan
    assert world.coordinator.rows()[0].state == "waiting"
    return plan, head, lost


def test_a_group_that_no_node_can_complete_goes_on_when_one_joins(world: OfferNetwork) -> None:
    plan, head, lost = broken(world)
    world.later(5.0)
    assert opened(world.offer(head, of=plan, lost=(lost,))) == plan
    after = opened(world.offer(3))
    assert ranks(after) == [head, 3]
    assert (after.group, after.generation) == (plan.group, 1)
    assert opened(world.offer(head)) == after
    assert world.coordinator.rows()[0].state == "planned"
    assert isinstance(world.offer(lost), StageWait)


def test_a_lost_stage_that_comes_back_finds_its_place_free(world: OfferNetwork) -> None:
    plan, head, lost = broken(world)
    world.later(60.0)
    world.offer(head, of=plan, lost=(lost,))
    assert opened(world.offer(lost)) == plan
    assert world.coordinator.rows()[0].state == "planned"


def test_a_place_is_not_kept_for_a_node_that_has_too_little_memory_by_now(
    world: OfferNetwork,
) -> None:
    plan, head, lost = broken(world)
    world.offer(lost, 1000)
    assert world.coordinator.rows()[0].state == "waiting"
    assert ranks(opened(world.offer(3))) == [head, 3]
    assert plan.rank_of(node(lost)) == 1


def test_those_that_are_left_do_not_wait_for_ever(world: OfferNetwork) -> None:
    plan, head, _ = broken(world)
    for _ in range(int(pipeline_coordinator.WAIT_S / 10) + 1):
        world.later(10.0)
        world.offer(head, of=plan)
    assert isinstance(world.offer(head, of=plan), StageWait)
    after = opened(world.offer(3))
    assert ranks(after) == [head, 3]
    assert (after.group, after.generation) == (plan.group, 1)


def test_a_complaint_about_an_old_plan_changes_nothing(world: OfferNetwork) -> None:
    plan = world.gather(1, 2)
    head, other = ranks(plan)
    after = opened(world.offer(head, of=plan, lost=(other,)))
    assert opened(world.offer(other, of=plan, lost=(head,))) == after
    assert opened(world.offer(head, of=plan, lost=(other,))) == after


def test_a_node_that_complains_about_all_others_is_let_go(world: OfferNetwork) -> None:
    """Those that it slanders still talk to us, and one complaint each is not held against them."""
    everybody = (1, 2, 3, 4)
    plan = world.gather(*everybody, world_size=3)
    slanderer = ranks(plan)[1]
    out: list[int] = []
    for _ in range(2):
        accused = next(one for one in ranks(plan) if one != slanderer)
        world.offer(slanderer, of=plan, lost=(accused,), world_size=3)
        plan = world.plan(*everybody, world_size=3)
        out.append(({*everybody} - {*ranks(plan)}).pop())
        for _ in range(5):
            world.later(10.0)
            world.plan(*everybody, world_size=3)
    assert out[0] != slanderer
    assert out[1] == slanderer


def test_a_complaint_names_stages_of_ones_own_plan_only(world: OfferNetwork) -> None:
    plan = world.gather(1, 2)
    other = world.gather(3, 4, name="home")
    assert opened(world.offer(1, of=plan, lost=(3, 4, 9, 1))) == plan
    assert opened(world.offer(1, of=other, lost=(3,))) == plan
    assert world.plan(3, 4, name="home") == other


def test_a_stage_that_says_goodbye_is_replaced_at_once(world: OfferNetwork) -> None:
    plan = world.gather(1, 2, 3)
    head, last = ranks(plan)
    spare = ({1, 2, 3} - {head, last}).pop()
    world.coordinator.left(node(last))
    assert ranks(world.plan(head, spare)) == [head, spare]
    world.coordinator.left(node(head))
    assert isinstance(world.offer(spare), StageWait)


def test_a_stage_that_offers_less_than_it_holds_is_replaced(world: OfferNetwork) -> None:
    plan = world.gather(1, 2, 3)
    head, last = ranks(plan)
    spare = ({1, 2, 3} - {head, last}).pop()
    assert isinstance(world.offer(last, 1000, of=plan), StageWait)
    assert ranks(world.plan(head, spare)) == [head, spare]


def test_a_liar_is_in_no_plan_ever_after(world: OfferNetwork) -> None:
    plan = world.gather(1, 2, 3)
    head, liar = ranks(plan)
    spare = ({1, 2, 3} - {head, liar}).pop()
    world.coordinator.dissolve(plan.group, node(liar), "states that no honest stage makes")
    after = world.plan(head, spare)
    assert ranks(after) == [head, spare]
    with refuses(Reason.BANNED):
        world.offer(liar)
    world.restart()
    world.later(10.0)
    with refuses(Reason.BANNED):
        world.offer(liar)
    assert world.plan(head, spare) == after


def test_a_node_that_is_banned_for_its_rollouts_is_in_no_plan(world: OfferNetwork) -> None:
    plan = world.gather(1, 2)
    head, last = ranks(plan)
    world.refused[node(last)] = "banned: false work"
    with refuses(Reason.BANNED):
        world.offer(last)
    assert isinstance(world.offer(head), StageWait)
    with refuses(Reason.BANNED):
        world.offer(last)
    assert ranks(opened(world.offer(3))) == [head, 3]


def test_a_trainer_that_restarts_gives_the_same_plan(world: OfferNetwork) -> None:
    plan = world.gather(1, 2)
    world.restart()
    assert opened(world.offer(2, of=plan)) == plan
    assert world.plan(1, 2) == plan
    world.later(1.0)
    # a restarted trainer does not take a node for dead that it has not heard yet
    world.restart()
    head, other = ranks(plan)
    after = opened(world.offer(head, of=plan, lost=())), opened(world.offer(other))
    assert after == (plan, plan)


def test_a_plan_is_sealed_anew_before_it_runs_out(world: OfferNetwork) -> None:
    world.gather(1, 2)

    def expires() -> int:
        reply = world.offer(1)
        assert isinstance(reply, StagePlanned)
        return unseal(
            reply.plan, Purpose.PIPELINE, PipelinePlan, now=NOW, signer=TRAINER.node_id
        ).expires

    first = expires()
    assert first == NOW + pipeline_coordinator.PLAN_TTL_S
    world.away = pipeline_coordinator.PLAN_TTL_S / 4
    assert expires() == first
    world.away = pipeline_coordinator.PLAN_TTL_S * 3 / 4
    assert expires() == NOW + world.away + pipeline_coordinator.PLAN_TTL_S


def test_a_group_that_no_node_mentions_is_forgotten(world: OfferNetwork) -> None:
    world.gather(1, 2)
    world.later(pipeline_coordinator.GONE_S + 1)
    world.offer(5)
    assert world.coordinator.rows() == []
    assert isinstance(world.offer(1), StageWait)


def test_operators_see_every_group(world: OfferNetwork) -> None:
    plan = world.gather(1, 2, 3)
    (row,) = world.coordinator.rows()
    assert row.layers == [f"{stage.first}-{stage.end - 1}" for stage in plan.stages]
    assert (row.state, row.spares, row.round_trip_ms) == ("planned", 1, 10.0)
    head, last = ranks(plan)
    assert world.coordinator.place(node(head)) == f"0/2, layers {row.layers[0]}"
    assert world.coordinator.place(node(last)) == f"1/2, layers {row.layers[1]}"
    assert world.coordinator.place(node(9)) == ""


# -- attacks ---------------------------------------------------------------------------------------


def test_a_node_that_hides_its_address_is_no_stage(world: OfferNetwork) -> None:
    with refuses(Reason.NOT_ADMITTED):
        world.offer(1, shared=False)
    assert isinstance(world.offer(1), StageWait)


def test_an_offer_for_a_model_that_is_not_cut_is_refused(tmp_path: Path) -> None:
    world = OfferNetwork(tmp_path, None)
    with refuses(Reason.NOT_FOUND):
        world.offer(1)
    world.model = CutModel(replace(MODEL.shape, layers=1), MODEL.terms)
    world.restart()
    with refuses(Reason.NOT_FOUND):
        world.offer(1)
    world.ledger.close()


def test_an_offer_of_an_engine_without_stages_is_refused_with_what_to_do(
    world: OfferNetwork,
) -> None:
    """Nodes of older releases offer `hf`."""
    with pytest.raises(RemoteProtocolError, match=r"set engine\.type to vllm") as refusal:
        world.offer(1, engine="hf", software="primerl 0.1.0")
    assert refusal.value.reason is Reason.NOT_FOUND
    assert isinstance(world.offer(1), StageWait)


def test_nobody_may_offer_without_end(world: OfferNetwork) -> None:
    for _ in range(pipeline_coordinator.PEER_BURST):
        world.offer(1)
    with refuses(Reason.RATE_LIMITED):
        world.offer(1)
    world.offer(2)
    world.later(5.0)
    world.offer(1)


def test_the_number_of_offers_is_limited(world: OfferNetwork) -> None:
    world.know(1)
    row = world.peers.get(node(1))
    for number in range(pipeline_coordinator.MAX_OFFERS):
        name = number.to_bytes(32, "big")
        world.peers.get(name).record = row.record
        lone = StageOffer(0, "vllm", "vllm 1", name=str(number))
        world.coordinator.offered(name, OfferStage(lone))
    with refuses(Reason.BUSY):
        world.offer(2)
    world.later(pipeline_coordinator.ALIVE_S + 1)
    world.offer(2)


def test_memory_that_nobody_has_costs_its_group_only_time(world: OfferNetwork) -> None:
    """A boaster is planned once, found out, and benched for longer each time."""
    world.gather(1, 7, memory=PART)
    world.coordinator.left(node(1))
    world.coordinator.left(node(7))
    plan = world.gather(1, 2, memory=2**49)
    assert len(plan.stages) == 2
    head, boaster = ranks(plan)
    world.offer(3, 2**49)
    after = opened(world.offer(head, 2**49, of=plan, lost=(boaster,)))
    assert ranks(after) == [head, 3]
    assert isinstance(world.offer(boaster, 2**49), StageWait)


def test_a_key_is_in_one_plan_only(world: OfferNetwork) -> None:
    plan = world.gather(1, 2)
    assert key(1).node_id in {stage.node for stage in plan.stages}
    world.offer(1, name="other")  # says another name now: it is still in its plan
    assert len(world.coordinator.rows()) == 1


def test_offers_that_change_all_the_time_do_not_keep_the_trainer_planning(
    world: OfferNetwork,
) -> None:
    for number in (1, 2):
        world.offer(number, rank=number - 1, world_size=2, memory=10)
    for size in range(2 * pipeline_coordinator.MAKE_BURST):
        world.offer(3 + size % 6, rank=0, world_size=2, memory=100 + size)
    assert isinstance(world.offer(9, rank=0, world_size=2), StageWait)
    assert isinstance(world.offer(10, rank=1, world_size=2), StageWait)
    world.later(2.0)
    assert isinstance(world.offer(9, rank=0, world_size=2), StagePlanned)
