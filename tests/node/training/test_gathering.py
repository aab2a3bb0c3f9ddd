"""Whichever way a model keeps its weights, what is walked are the checkpoint's tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import ranks_cases as ranks
from support import weights_cases as cases
from support.training_cases import make_model

from primerl.node.errors import EngineError
from primerl.node.models import huggingface
from primerl.node.models.model_files import read_state
from primerl.node.models.tensors import bf16_state
from primerl.node.training import gather
from primerl.node.training.export import PolicyExporter
from primerl.node.training.gather import policy_sources, whole_tensors
from primerl.node.training.world import World
from primerl.node.weights.state import State

ALONE = World.alone(torch.device("cpu"))

Tensors = dict[str, torch.Tensor]


class Bare:
    """A model that is no more than its tensors."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def state_dict(self, *, keep_vars: bool) -> Tensors:
        assert keep_vars
        return self.tensors


def bare(tensors: Tensors) -> Any:
    return Bare(tensors)


def exported(model: Any) -> State:
    """What an export finds, in two steps so that both a whole and a compared one count."""
    exporter = PolicyExporter(ALONE, threads=1, chunk=37)
    sources = policy_sources(model, 0)
    exporter.snapshot(sources)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.reshape(-1)[::7] += 1
    return exporter.snapshot(sources).state


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    ranks.make_moe(directory)
    return directory


def test_experts_are_runs_of_the_tensor_that_they_are_fused_into(moe: Path) -> None:
    model = ranks.load(moe)
    sources = policy_sources(model, 0)
    assert len(sources) == len(huggingface.unique_tensors(model))
    names = {run.name for source in sources for run in source.runs}
    assert names == read_state(moe).keys()
    fused = next(source for source in sources if source.name.endswith("1.mlp.experts.gate_up_proj"))
    assert [run.name.rpartition("experts.")[2] for run in fused.runs[:3]] == [
        "0.gate_proj.weight",
        "0.up_proj.weight",
        "1.gate_proj.weight",
    ]
    assert cases.same(exported(model), huggingface.policy_state(model))
    assert cases.same(bf16_state(whole_tensors(sources, 0)), huggingface.policy_state(model))


def test_a_published_policy_is_taken_over_where_bf16_shows_a_difference(moe: Path) -> None:
    """Fused experts, too; what bf16 does not show keeps its exact value, the sign of zero counts."""
    model = ranks.load(moe)
    sources = policy_sources(model, 0)
    policy = {name: tensor.clone() for name, tensor in whole_tensors(sources, 0)}
    name = next(name for name in policy if name.endswith("1.mlp.experts.1.up_proj.weight"))
    policy[name].view(-1)[3] = 2.0
    policy["model.norm.weight"][0] = -0.0
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[:2] = torch.tensor([0.0, 1.0 + 1e-4])
        policy["model.norm.weight"][1] = 1.0
        gather.adopt(sources, lambda name: policy[name].view(-1))
    norm = model.get_parameter("model.norm.weight")
    assert norm[0].signbit()
    assert norm[1].item() == pytest.approx(1.0 + 1e-4, rel=1e-7)
    assert cases.same(bf16_state(whole_tensors(sources, 0)), bf16_state(policy.items()))


def test_a_tensor_in_another_order_than_its_checkpoint_is_not_taken_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface, "checkpoint_tensors", ranks.joined)
    sources = policy_sources(bare(layers()), 0)
    with pytest.raises(EngineError, match="another order"):
        gather.adopt(sources, lambda name: torch.empty(0))


def test_a_tied_weight_comes_once(tmp_path: Path) -> None:
    model: Any = ranks.load(make_model(tmp_path))
    names = [source.name for source in policy_sources(model, 0)]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert "lm_head.weight" not in names
    assert cases.same(exported(model), huggingface.policy_state(model))


def layers(count: int = 3) -> Tensors:
    """Layers with two projections, a norm, and something outside of them."""
    rng = torch.Generator().manual_seed(5)
    tensors = {"embed": torch.randn(6, 4, generator=rng), "steps": torch.arange(3)}
    for at in range(count):
        for name in ("q", "k"):
            tensors[f"layers.{at}.{name}"] = torch.randn(4, 4, generator=rng)
        tensors[f"layers.{at}.norm"] = torch.randn(4, generator=rng)
    return tensors


def check(monkeypatch: pytest.MonkeyPatch, groups: list[list[str]]) -> None:
    """All that leaves the exporter is what the conversion makes of all at once."""
    model = bare(layers())
    asked: list[list[str]] = []
    convert = huggingface.checkpoint_tensors

    def watched(model: Any, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        if not next(iter(tensors.values())).is_meta:
            asked.append(list(tensors))
        return convert(model, tensors)

    monkeypatch.setattr(huggingface, "checkpoint_tensors", watched)
    found = exported(model)
    assert asked == groups * 2  # two exports
    wanted = {name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
              for name, tensor in model.tensors.items()}  # fmt: skip
    assert cases.same(found, bf16_state(convert(model, wanted).items()))
    assert cases.same(bf16_state(whole_tensors(policy_sources(model, 0), 0)), found)


def test_what_is_transposed_or_joined_is_turned_back_by_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface, "checkpoint_tensors", ranks.joined)
    check(monkeypatch, [[f"layers.{at}.q", f"layers.{at}.k"] for at in range(3)])


def test_what_goes_over_layers_is_turned_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def stacked(model: Any, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        del model
        made = {name: one for name, one in tensors.items() if not name.endswith("q")}
        projections = [one for name, one in tensors.items() if name.endswith("q")]
        return made | ({"queries": torch.stack(projections)} if projections else {})

    monkeypatch.setattr(huggingface, "checkpoint_tensors", stacked)
    check(monkeypatch, [[f"layers.{at}.q" for at in range(3)]])


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 3))
def test_rows_are_cut_as_torch_cuts_them(rows: int, ranks: int, width: int) -> None:
    everything = torch.arange(rows * width).reshape(rows, width)
    chunks = list(torch.chunk(everything, ranks)) if rows else []
    for rank in range(ranks):
        share = gather._rows((rows, width), rank, ranks)  # pyright: ignore[reportPrivateUsage]
        wanted = chunks[rank].reshape(-1).tolist() if rank < len(chunks) else []
        assert everything.reshape(-1)[share].tolist() == wanted
