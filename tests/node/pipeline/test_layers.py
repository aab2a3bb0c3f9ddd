"""Tensor names alone decide which stage holds a tensor."""

import pytest

from primerl.node.inference.place import layer_of, share_of
from primerl.protocol.pipelines import PipelinePlan, PipelineShape, Stage

LAYERS = 5
PARTS = ("self_attn.q_proj.weight", "mlp.experts.3.up_proj.weight", "input_layernorm.weight")
BODY = {f"model.layers.{layer}.{part}" for layer in range(LAYERS) for part in PARTS}
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ODD = "model.rotary.inv_freq"
NAMES = BODY | {EMBEDDING, NORM, HEAD, ODD}


def plan(*cuts: int) -> PipelinePlan:
    """Stages that end at `cuts`."""
    edges = (0, *cuts)
    stages = tuple(
        Stage(bytes([rank]) * 32, edges[rank], edges[rank + 1]) for rank in range(len(cuts))
    )
    shape = PipelineShape("vllm", "1", "float32", 8, 64, 4, 64, 16, 256, 2)
    return PipelinePlan(bytes(32), 0, stages, (), shape)


def body(first: int, end: int, names: set[str] = BODY) -> set[str]:
    """The tensors of some layers."""
    return {name for name in names if first <= (layer_of(name) or 0) < end}


def test_stages_have_their_layers_and_the_ends_have_what_is_outside() -> None:
    cut = plan(2, 3, LAYERS)
    assert share_of(cut, 0)(NAMES) == body(0, 2) | {EMBEDDING, ODD}
    assert share_of(cut, 1)(NAMES) == body(2, 3) | {ODD}
    assert share_of(cut, 2)(NAMES) == body(3, LAYERS) | {NORM, HEAD, ODD}


@pytest.mark.parametrize("cuts", [(1, 5), (2, 4, 5), (1, 2, 3, 4, 5)])
def test_all_stages_together_have_everything_and_layers_once(cuts: tuple[int, ...]) -> None:
    cut = plan(*cuts)
    shares = [share_of(cut, rank)(NAMES) for rank in range(len(cuts))]
    assert set[str]().union(*shares) == NAMES
    assert sum(len(share & BODY) for share in shares) == len(BODY)


def test_a_tied_embedding_is_on_the_last_stage_too() -> None:
    cut = plan(2, LAYERS)
    assert EMBEDDING in share_of(cut, 1)(NAMES - {HEAD})
    assert EMBEDDING not in share_of(cut, 1)(NAMES)


def test_adapters_go_with_their_layers() -> None:
    of = [
        f"base_model.model.model.layers.{n}.mlp.up_proj.lora_{ab}.weight"
        for n in (1, 4)
        for ab in "AB"
    ]
    assert share_of(plan(2, LAYERS), 0)(of) == frozenset(of[:2])
    assert share_of(plan(2, LAYERS), 1)(of) == frozenset(of[2:])


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.mlp.down_proj.weight", 12),
        ("transformer.h.3.attn.c_attn.weight", 3),
        ("model.language_model.layers.7.mlp.gate.weight", 7),
        ("gpt_neox.layers.0.attention.dense.bias", 0),
        ("model.visual.blocks.4.attn.qkv.weight", None),
        ("vision_tower.encoder.layers.2.mlp.fc1.weight", None),
        ("model.layers.x.weight", None),
        ("layers", None),
        ("model.norm.weight", None),
    ],
)
def test_layers_are_read_from_names(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


def test_what_sees_is_on_the_first_stage() -> None:
    eyes = {"model.visual.blocks.4.attn.qkv.weight", "model.visual.merger.norm.weight"}
    assert share_of(plan(2, LAYERS), 0)(eyes) == eyes
    assert share_of(plan(2, LAYERS), 1)(eyes) == frozenset()


def test_layers_that_the_plan_does_not_count_are_on_the_last_stage() -> None:
    extra = f"model.layers.{LAYERS}.eh_proj.weight"
    assert extra in share_of(plan(2, LAYERS), 1)({*NAMES, extra})
    assert extra not in share_of(plan(2, LAYERS), 0)({*NAMES, extra})
