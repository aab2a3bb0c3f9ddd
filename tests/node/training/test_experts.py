"""Mixtures of experts through the learner: made, routed in fp32, counted, frozen, saved and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import ranks_cases as ranks
from support.training_cases import FAST, MIXTURE, TINY, batch, learner
from support.weights_cases import same
from torch import Tensor

from primerl.node.errors import UsageError
from primerl.node.models import huggingface
from primerl.node.models.created_model import created_config
from primerl.node.training.backend import Sample, TrainBatch
from primerl.node.training.experts import ExpertLoad, count_chosen
from primerl.node.training.learner import Learner
from primerl.node.training.world import World

CPU = torch.device("cpu")
LAYERS = 2


def routers(of: Any) -> list[Any]:
    causal = of._model.causal
    return [layer.mlp.gate for layer in causal.model.layers]


# -- making ----------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_experts(directory: Path, tmp_path: Path) -> None:
    huggingface.create(tmp_path / "again", MIXTURE, 7)
    huggingface.create(tmp_path / "other", MIXTURE, 8)
    read = [
        huggingface.read_state(one) for one in (directory, tmp_path / "again", tmp_path / "other")
    ]
    assert same(read[0], read[1])
    assert not same(read[0], read[2])
    assert "model.layers.1.mlp.experts.5.gate_proj.weight" in read[0]
    told = json.loads((directory / "config.json").read_text())
    assert told["architectures"] == ["Qwen3MoeForCausalLM"]
    assert told["norm_topk_prob"] is True


def test_a_dense_model_knows_nothing_of_experts(tmp_path: Path) -> None:
    huggingface.create(tmp_path / "one", TINY, 7)
    huggingface.create(tmp_path / "two", TINY | {"num_experts_per_tok": 5}, 7)
    text = (tmp_path / "one" / "config.json").read_text()
    assert "expert" not in text
    assert "moe" not in text
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_token_cannot_have_more_experts_than_there_are() -> None:
    with pytest.raises(UsageError, match="set at most num_experts, 2"):
        created_config({"num_experts": 2, "num_experts_per_tok": 3})
    assert "num_experts" not in created_config({"num_experts": 0, "num_experts_per_tok": 3})


# -- routers ---------------------------------------------------------------------------------------


def routed(of: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return routers(of)[0](hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_multiply_in_fp32_whatever_the_rest_does(
    directory: Path, dtype: torch.dtype
) -> None:
    mine = learner(directory, dtype="bfloat16")
    weight = routers(mine)[0].weight
    weight.data = weight.data.to(dtype)  # as FSDP hands it over
    hidden = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits, weights, chosen = routed(mine, hidden)
    exact = hidden.double() @ weight.detach().double().T
    assert logits.dtype == weights.dtype == torch.float32
    assert torch.allclose(logits.double(), exact, atol=1e-6)
    rounded = F.linear(hidden, weight.bfloat16()).double()
    assert not torch.allclose(rounded, exact, atol=1e-4)
    top = exact.softmax(-1).topk(2)
    assert torch.equal(chosen, top.indices)
    assert torch.allclose(weights.double(), top.values / top.values.sum(-1, keepdim=True))
    assert weight.dtype == dtype


def test_gradients_reach_the_router_and_every_expert_that_read_a_token(directory: Path) -> None:
    mine = learner(directory)
    before = {name: one.detach().clone() for name, one in mine._parameters.items()}
    assert mine.step(batch(1, rows=12)).values["optim/skipped"] == 0.0
    moved = {name for name, one in mine._parameters.items() if not one.equal(before[name])}
    assert moved == set(before)


def test_a_frozen_router_stays_while_the_rest_learns(directory: Path) -> None:
    mine = learner(directory, freeze_router=True)
    before = {name: one.detach().clone() for name, one in mine._parameters.items()}
    mine.step(batch(1, rows=12))
    stayed = {name for name, one in mine._parameters.items() if one.equal(before[name])}
    assert stayed == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(LAYERS)}


def compiled(directory: Path) -> list[float]:
    """One step on one rank with FSDP, then the same with every mixture in one compiled graph."""
    world = ranks.join(FAST)
    found: list[float] = []
    for whole in (False, True):
        config = FAST.model_copy(update={"dtype": "bfloat16", "activation_checkpointing": "full"})
        mine: Any = Learner.build(
            directory, config, max_steps=9, seed=1, temperature=1.0, world=world
        )
        for layer in mine._model.causal.model.layers if whole else ():
            forward = torch.compile(layer.mlp.forward, backend="aot_eager", fullgraph=True)
            layer.mlp.forward = forward
        values = mine.step(batch(1)).values
        found += [values["loss/mean"], values["expert_load/max_mean/max"], values["optim/skipped"]]
        mine.close(keep_world=True)
    world.close()
    return found


@pytest.mark.nightly
def test_a_mixture_is_one_graph_that_computes_what_it_does_uncompiled(directory: Path) -> None:
    """Sharded, in bf16 and computed again in backward."""
    ((loss, load, skipped, *graph),) = ranks.on_ranks(1, compiled, directory)
    assert graph == [pytest.approx(loss, abs=2e-3), load, 0.0]
    assert skipped == 0.0
    in_fp32 = learner(directory).step(batch(1)).values["loss/mean"]
    assert loss == pytest.approx(in_fp32, abs=0.02)


# -- counting --------------------------------------------------------------------------------------


def test_shares_are_those_of_the_busiest_and_of_the_cold() -> None:
    counts = [torch.tensor([4, 0, 0, 0]), torch.tensor([2, 2, 2, 2]), torch.zeros(4).long()]
    figures = ExpertLoad(counts, World.alone(CPU)).figures()
    assert figures == pytest.approx(
        {
            "expert_load/max_mean/mean": 2.5,
            "expert_load/max_mean/max": 4.0,
            "expert_load/cv/mean": 3**0.5 / 2,
            "expert_load/cv/max": 3**0.5,
            "expert_load/cold_frac/mean": 0.375,
            "expert_load/cold_frac/max": 0.75,
        }
    )


def test_without_experts_or_tokens_there_is_no_figure() -> None:
    alone = World.alone(CPU)
    assert ExpertLoad([], alone).figures() == {}
    assert ExpertLoad([torch.zeros(3).long()], alone).figures() == {}


def test_the_operator_that_counts_is_sound() -> None:
    counts, chosen = torch.zeros(5, dtype=torch.int64), torch.tensor([[0, 4], [4, 1]])
    torch.library.opcheck(count_chosen, (counts, chosen))
    counts.zero_()
    count_chosen(counts, chosen)
    assert counts.tolist() == [1, 1, 0, 0, 2]


def recount(directory: Path, samples: list[Sample]) -> list[Tensor]:
    """How often each expert of each layer is chosen, as transformers' own model says."""
    plain: Any = huggingface.load_model(directory)
    found = [torch.zeros(6, dtype=torch.int64) for _ in range(LAYERS)]
    for sample in samples:
        with torch.no_grad():
            told = plain(input_ids=torch.tensor([sample.token_ids]), output_router_logits=True)
        for counts, logits in zip(found, told.router_logits, strict=True):
            counts += logits.topk(2).indices.flatten().bincount(minlength=6)
    return found


@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_a_step_counts_its_own_tokens_whatever_is_computed_again(
    directory: Path, again: str
) -> None:
    mine = learner(directory, activation_checkpointing=again)
    mine.evaluate(batch(5).samples)
    mine.packed_logprobs(batch(6).samples)
    step = TrainBatch(1, batch(1, rows=9).samples)
    values = mine.step(step).values
    wanted = ExpertLoad(recount(directory, step.samples), World.alone(CPU)).figures()
    found = {name: value for name, value in values.items() if name.startswith("expert_load")}
    assert found == pytest.approx(wanted)


# -- the rest of a learner -------------------------------------------------------------------------


def test_what_is_saved_goes_on_to_the_same_bits(directory: Path, tmp_path: Path) -> None:
    mine, other = learner(directory), learner(directory)
    mine.step(batch(1))
    mine.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    figures = [one.step(batch(2)).values["loss/mean"] for one in (mine, other)]
    assert figures[0] == figures[1]
    assert same(mine.state(), other.state())


def test_an_export_is_a_checkpoint_of_single_experts(directory: Path, tmp_path: Path) -> None:
    mine = learner(directory)
    first = mine.snapshot()
    mine.step(batch(1))
    second = mine.snapshot()
    assert second.changed_since(first.state) is not None
    assert same(second.state, mine.state())
    mine.export(tmp_path / "out")
    assert same(huggingface.read_state(tmp_path / "out"), second.state)
    assert second.state.keys() == huggingface.read_state(directory).keys()
    reloaded = learner(tmp_path / "out")
    one, other = (each.evaluate(batch(3).samples)["loss/mean"] for each in (mine, reloaded))
    assert one == pytest.approx(other, abs=0.02)  # bf16


def test_a_mixture_learns_by_heart(directory: Path) -> None:
    mine = learner(directory)
    examples = [([1, 2, 3], [4, 5, 6]), ([7, 8], [9, 10])]
    losses = [mine.supervised_step(examples, 1e-2) for _ in range(25)]
    assert losses[-1] < 0.2 < 4 < losses[0]
