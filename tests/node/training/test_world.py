"""One rank, two ranks, replicas and shared sequences learn the same: real gloo processes, one start for all."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from support import ranks_cases as ranks
from support.training_cases import FAST, TINY, batch, logprobs

from primerl.node.config.training import LossConfig, MixedSftConfig, TrainingConfig
from primerl.node.errors import EngineError, StorageError
from primerl.node.models import huggingface
from primerl.node.training.backend import Sample, SampleTerms, TrainBatch
from primerl.node.training.learner import Learner
from primerl.node.training.world import RankChannel, World

CONFIG = FAST.model_copy(update={"lr": 1e-3, "seq_len": 40})
SHAPES: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicas": {"fsdp": CONFIG.fsdp.model_copy(update={"replicas": 2})},
    "context": {"context_parallel": 2},
    "recomputed": {"activation_checkpointing": "full"},
    "offloaded": {"optimizer_offload": True},
    "travelling": {"expert_parallel": 2},
    "recomputed travelling": {"expert_parallel": 2, "activation_checkpointing": "full"},
}
DENSE = TINY.model_copy(update={"num_key_value_heads": 2})
EXPERTS = DENSE.model_copy(update={"num_experts": 6, "moe_intermediate_size": 16})
CASES = [
    "dense-sharded",
    "dense-replicas",
    "dense-context",
    "dense-recomputed",
    "dense-offloaded",
    "experts-sharded",
    "experts-context",
    "experts-travelling",
    "experts-recomputed travelling",
]
STEPS = 3
LAST = batch(9, rows=7).samples
FIGURES = ("loss/mean", "optim/grad_norm", "entropy/all/mean", "mismatch_kl/all/mean", "tokens")
TAUGHT = (*FIGURES, "ref_kl/all/mean", "sft_loss/mean", "sft_loss/tokens")


HOT = {"hot": SampleTerms(1.3, LossConfig(type="ipo").model_dump_json())}


def steps() -> list[TrainBatch]:
    """Of many samples, of one only (some rank has none), of many again; some of another environment."""
    found = [batch(1), TrainBatch(2, batch(2).samples[:1]), batch(3, rows=9)]
    return [TrainBatch(one.step, of_two_environments(one.samples)) for one in found]


def of_two_environments(samples: list[Sample]) -> list[Sample]:
    """The samples, every third one of the environment HOT."""
    return [replace(one, environment="" if at % 3 else "hot") for at, one in enumerate(samples)]


def learn(model_dir: Path, config: TrainingConfig, world: World) -> dict[str, Any]:
    """What one rank makes of the steps."""
    learner = Learner.build(
        model_dir, config, max_steps=9, seed=1, temperature=0.9, own=HOT, world=world
    )
    values = [learner.step(one).values for one in steps()]
    found = {
        "figures": [[one[name] for name in FIGURES] for one in values],
        "skipped": [one["optim/skipped"] for one in values],
        "load": [{k: v for k, v in one.items() if k.startswith("expert_load")} for one in values],
        "evaluated": learner.evaluate(LAST),
        "nothing": learner.evaluate([]),
        "empty": learner.step(TrainBatch(STEPS + 1, [])).values["tokens"],
    }
    if world.context is None:
        found["logprobs"] = logprobs(learner, LAST[:3])
    found["packed"] = learner.supervised_step([([1, 2, 3], [4, 5]), ([7], [8, 9, 10])], 1e-3)
    learner.close()
    return found


def on_two_ranks(place: Path) -> dict[str, Any]:
    """Everything that two ranks are asked."""
    found: dict[str, Any] = {}
    for case in CASES:
        kind, _, name = case.partition("-")
        config = CONFIG.model_copy(update=SHAPES[name])
        found[case] = learn(place / kind, config, ranks.join(config))
    found["world"] = folded()
    found["taught"] = taught(place, ranks.join(CONFIG))
    found["refused"] = [
        refused(place / "dense", {"fsdp": CONFIG.fsdp.model_copy(update={"replicas": 3})}),
        refused(place / "dense", {"context_parallel": 3}),
        refused(place / "one-head", {"context_parallel": 2}),
        refused(place / "experts", {"expert_parallel": 3}),
        refused(place / "dense", {"expert_parallel": 2}),
        refused(place / "five", {"expert_parallel": 2}),
        refused(
            place / "experts",
            {"expert_parallel": 2, "fsdp": CONFIG.fsdp.model_copy(update={"replicas": 2})},
        ),
    ]
    found["handed over"] = [handed_over(place, *pair) for pair in ((1, 2), (2, 1))]
    return found


def taught(place: Path, world: World) -> list[dict[str, float]]:
    """Figures of steps with demonstrations, and hints that the policy reads as its own teacher."""
    loss = {"type": "reverse_kl", "teacher": "policy", "hint": "{demonstration}"}
    update = {
        "loss": LossConfig.model_validate(loss),
        "sft": MixedSftConfig(files=["demonstrations.jsonl"], weight=0.3),
    }
    config = CONFIG.model_copy(update=update)
    learner = Learner.build(
        place / "dense", config, max_steps=9, seed=1, temperature=0.9, world=world
    )
    found: list[dict[str, float]] = []
    for step in (1, 2):
        drawn = batch(step).samples
        hinted = [replace(one, hint=[3] * (at % 4)) for at, one in enumerate(drawn)]
        given = [replace(one, given=True) for one in drawn[:3]]
        values = learner.step(TrainBatch(step, [*hinted, *given])).values
        found.append({name: values[name] for name in TAUGHT})
    learner.close()
    return found


def handed_over(place: Path, first: int, second: int) -> list[Any]:
    """What ranks that share experts out as `first` says save, those of `second` go on with."""
    found: list[Any] = []
    directory = place / f"saved-{first}"
    for share, load in ((first, False), (second, True)):
        config = CONFIG.model_copy(update={"expert_parallel": share})
        world = ranks.join(config)
        learner = Learner.build(
            place / "experts",
            config,
            max_steps=9,
            seed=1,
            temperature=0.9,
            world=world,
        )
        if load:
            learner.load(directory)
        else:
            learner.step(batch(1))
            learner.save(directory)
        state = learner.state()
        found.append(({name: one.data.tobytes() for name, one in state.items()}, learner.step_done))
        values = learner.step(batch(2)).values
        found.append([values[name] for name in FIGURES])
        learner.close()
    return found


def folded() -> dict[str, Any]:
    """Sums and maxima of what the two ranks have."""
    world = ranks.join(CONFIG)
    own = [1.0 + world.rank, -5.0 * world.rank, 2.0**60]
    found: dict[str, Any] = {
        "total": world.total(own),
        "largest": world.largest(own),
        "rank": world.rank,
    }
    found["shares"] = (world.data_rank, world.data_size, world.context_rank, world.context_size)
    world.close()
    return found


def refused(model_dir: Path, update: dict[str, Any]) -> str:
    """What an EngineError said."""
    config = CONFIG.model_copy(update=update)
    try:
        world = ranks.join(config)
        learn(model_dir, config, world)
    except EngineError as error:
        return str(error)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return ""


@dataclass(frozen=True)
class Results:
    """What a rank alone found, by the kind of model, and what each of two found."""

    alone: dict[str, Any]
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    place = tmp_path_factory.mktemp("ranks")
    huggingface.create(place / "dense", DENSE, 7)
    huggingface.create(place / "experts", EXPERTS, 7)
    huggingface.create(place / "one-head", TINY, 7)
    huggingface.create(place / "five", EXPERTS.model_copy(update={"num_experts": 5}), 7)
    alone = World.alone(torch.device("cpu"))
    before = torch.get_rng_state()
    mine: dict[str, Any] = {
        kind: learn(place / kind, CONFIG, alone) for kind in ("dense", "experts")
    }
    mine["taught"] = taught(place, alone)
    torch.set_rng_state(before)
    return Results(mine, ranks.on_ranks(2, on_two_ranks, place))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_does(results: Results, case: str) -> None:
    wanted = results.alone[case.partition("-")[0]]
    for one in results.ranks:
        mine = one[case]
        assert mine["skipped"] == [0.0] * STEPS
        for got, had in zip(mine["figures"], wanted["figures"], strict=True):
            assert got == pytest.approx(had, rel=1e-5, abs=1e-5)
        assert mine["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)
        assert mine["nothing"] == {"loss/mean": 0.0, "tokens": 0.0}
        assert mine["empty"] == 0.0
        assert mine["packed"] == pytest.approx(wanted["packed"], rel=1e-5)
        for got, had in zip(mine.get("logprobs", []), wanted["logprobs"], strict=False):
            assert got == pytest.approx(had, abs=1e-5)
    assert results.ranks[0][case] == results.ranks[1][case]  # the same figures on every rank


@pytest.mark.slow
def test_two_ranks_read_hints_and_demonstrations_as_one_does(results: Results) -> None:
    for one in results.ranks:
        for got, had in zip(one["taught"], results.alone["taught"], strict=True):
            assert got == pytest.approx(had, rel=1e-5, abs=1e-5)
            assert had["sft_loss/tokens"] > 0


@pytest.mark.slow
def test_the_experts_tokens_of_all_ranks_are_counted(results: Results) -> None:
    wanted = results.alone["experts"]["load"]
    assert [len(one) for one in wanted] == [6] * STEPS
    for one in results.ranks:
        got = one["experts-sharded"]["load"]
        for step in (0, 2):  # in step 1 a rank reads padding, and that is counted
            assert got[step] == pytest.approx(wanted[step], rel=1e-6)
    assert results.ranks[0]["dense-sharded"]["load"] == [{}] * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1])
def test_experts_that_were_shared_out_are_saved_and_published_as_any_others(
    results: Results, turn: int
) -> None:
    for rank, one in enumerate(results.ranks):
        (state, done), went_on, (loaded, also_done), goes_on = one["handed over"][turn]
        assert done == also_done == 1
        assert state == loaded
        assert ("model.layers.1.mlp.experts.5.up_proj.weight" in state) == (rank == 0)
        assert goes_on == pytest.approx(went_on, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_what_ranks_tell_each_other_is_added_up_and_compared(results: Results) -> None:
    for rank, one in enumerate(results.ranks):
        assert one["world"] == {
            "total": [3.0, -5.0, 2.0**61],
            "largest": [2.0, 0.0, 2.0**60],
            "rank": rank,
            "shares": (rank, 2, 0, 1),
        }


@pytest.mark.slow
def test_ranks_that_cannot_be_shared_out_are_refused_on_all_of_them(results: Results) -> None:
    for one in results.ranks:
        replicas, sharers, heads, number, dense, uneven, copies = one["refused"]
        assert "expert_parallel is 3: set it to the number of ranks, 2" in number
        assert "has no experts: set expert_parallel to 1" in dense
        assert "5 experts are not divisible by expert_parallel 2" in uneven
        assert "fsdp.replicas to 1" in copies
        assert "2 ranks are not divisible by fsdp.replicas 3" in replicas
        assert "context_parallel 3" in sharers
        assert "1 key-value heads are not divisible by context_parallel 2" in heads


def test_a_rank_alone_adds_up_nothing() -> None:
    world = World.alone(torch.device("cpu"))
    assert (world.rank, world.size, world.mesh, world.context) == (0, 1, None, None)
    assert world.total([1.0, math.pi]) == [1.0, math.pi]
    assert world.largest([-2.0]) == [-2.0]
    assert (world.data_size, world.data_rank, world.context_size) == (1, 0, 1)
    assert world.is_first
    world.close()


def test_a_full_disk_is_named_with_what_to_do() -> None:
    def save() -> None:
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    with pytest.raises(StorageError, match="the disk is full: make room, then go on with --resume"):
        RankChannel().first(save)
