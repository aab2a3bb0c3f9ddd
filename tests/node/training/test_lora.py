"""Adapters in training: only they change, what travels computes the same, and what is exported is PEFT's."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from support.training_cases import FAST, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from primerl.node.config.training import FsdpConfig, LoraConfig, TrainingConfig
from primerl.node.errors import EngineError
from primerl.node.models import huggingface, model_files
from primerl.node.models.tensors import bf16_state, to_torch
from primerl.node.training import lora
from primerl.node.training.fsdp_backend import FsdpBackend
from primerl.node.training.learner import Learner
from primerl.node.training.model import TrainedModel
from primerl.node.training.world import World
from primerl.node.weights.adapters import adapter_shapes, merge
from primerl.node.weights.state import State, digests

LORA = LoraConfig(rank=4, alpha=8.0)
ADAPTING: TrainingConfig = FAST.model_copy(update={"lora": LORA})
TOKENS = torch.arange(2, 40)[None]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One rank on the CPU that shards over itself."""
    meeting = f"file://{tmp_path / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    yield World(0, 1, torch.device("cpu"), mesh)
    dist.destroy_process_group()


def base_of(model_dir: Path) -> State:
    state = model_files.read_state(model_dir)
    return bf16_state((name, to_torch(tensor)) for name, tensor in state.items())


def adapting(model_dir: Path, seed: int = 1) -> tuple[Learner, torch.nn.Module]:
    """A learner, and the model of transformers that it trains."""
    world = World.alone(torch.device("cpu"))
    attach = partial(lora.attach, config=LORA, seed=seed)
    model = TrainedModel.build(model_dir, ADAPTING, world, attach=attach)
    made = Learner(
        model, model_dir=model_dir, config=ADAPTING, world=world, max_steps=10, temperature=1.0
    )
    return made, model.causal


def learner(model_dir: Path, seed: int = 1) -> Learner:
    return Learner.build(model_dir, ADAPTING, max_steps=10, seed=seed, temperature=1.0)


def trained(model_dir: Path, steps: int = 2) -> Learner:
    found = learner(model_dir)
    for step in range(1, steps + 1):
        found.step(batch(step))
    return found


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor in one piece."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def spread(model: torch.nn.Module, seed: int = 0) -> None:
    """Values for B, which begins as zeros, that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in lora.adapter_tensors(model).values():
            values = torch.randn(tensor.shape, generator=generator) * 0.1
            tensor.copy_(values.bfloat16().float())


def test_fresh_adapters_change_no_logit_of_the_bf16_base(model_dir: Path) -> None:
    base = huggingface.model_from_state(model_dir, base_of(model_dir))
    expected = logits(base)
    lora.attach(base, LORA, seed=3)
    assert torch.equal(logits(base), expected)


def test_the_merged_model_computes_what_the_adapted_one_does(model_dir: Path) -> None:
    """Up to the rounding of merged weights to bf16: merged in fp32 the two would agree to 1e-5."""
    model = huggingface.load_model(model_dir)
    lora.attach(model, LORA, seed=3)
    plain = logits(model)
    spread(model)
    adapters = bf16_state(lora.adapter_tensors(model).items())
    merged = huggingface.model_from_state(model_dir, merge(base_of(model_dir), adapters, LORA))
    found, expected = logits(merged), logits(model)
    moved = (expected - plain).norm()
    assert (found - expected).norm() < 0.02 * moved
    exact = huggingface.load_model(model_dir)
    lora.attach(exact, LORA, seed=3)
    fold(exact, adapters)
    assert torch.allclose(logits(exact), expected, atol=1e-5)


def fold(model: torch.nn.Module, adapters: State) -> None:
    """Add the product to the weights in fp32; the adapters of `model` itself are still zero."""
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, lora.LoraLinear):
                a, b = (
                    to_torch(adapters[f"base_model.model.{name}.{part}.weight"]).float()
                    for part in ("lora_A", "lora_B")
                )
                layer.weight += LORA.alpha / LORA.rank * b @ a


def test_the_adapters_are_those_that_every_node_expects(model_dir: Path) -> None:
    shapes = {name: tensor.shape for name, tensor in base_of(model_dir).items()}
    found = learner(model_dir).state()
    assert {name: one.shape for name, one in found.items()} == adapter_shapes(shapes, LORA)
    assert {one.dtype for one in found.values()} == {"BF16"}
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in found


def test_the_seed_alone_decides_how_adapters_begin(model_dir: Path) -> None:
    first = digests(learner(model_dir, seed=1).state())
    torch.rand(7)
    assert digests(learner(model_dir, seed=1).state()) == first
    other = digests(learner(model_dir, seed=2).state())
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {name for name in first if "lora_A" in name}
    assert len({first[name] for name in changed}) == len(changed)


def test_training_changes_all_adapters_and_nothing_else(model_dir: Path) -> None:
    one, causal = adapting(model_dir)
    before = {name: tensor.detach().clone() for name, tensor in causal.named_parameters()}
    for step in (1, 2):
        values = one.step(batch(step)).values
    assert values["optim/skipped"] == 0
    assert values["optim/grad_norm"] > 0
    for name, tensor in causal.named_parameters():
        assert torch.equal(tensor, before[name]) != ("lora_" in name), name
        assert tensor.requires_grad == ("lora_" in name)
    one.close()


def test_a_snapshot_is_of_adapters_and_says_what_changed(model_dir: Path) -> None:
    one, causal = adapting(model_dir)
    one.step(batch(1))
    first = one.snapshot()
    one.step(batch(2))
    second = one.snapshot()
    assert second.base is first.state
    assert set() < second.changed.keys() <= second.state.keys()
    assert second.state.keys() == lora.adapter_tensors(causal).keys()
    assert digests(second.state) == digests(one.state())
    one.close()


def test_a_saved_learner_goes_on_bit_by_bit(model_dir: Path, tmp_path: Path) -> None:
    one = trained(model_dir)
    one.save(tmp_path / "saved")
    one.step(batch(3))
    other = learner(model_dir, seed=5)
    other.load(tmp_path / "saved")
    other.step(batch(3))
    assert digests(other.state()) == digests(one.state())


def test_a_warm_up_teaches_adapters_too(model_dir: Path) -> None:
    one = learner(model_dir)
    examples = [([1, 2, 3], [4, 5, 6, 258])] * 4
    losses = [one.supervised_step(examples, 1e-2) for _ in range(8)]
    one.end_supervised()
    assert losses[-1] < losses[0] - 0.1


def test_layers_that_are_computed_again_in_backward_train_the_same(model_dir: Path) -> None:
    states: list[dict[str, bytes]] = []
    for checkpointing in ("none", "full"):
        config = ADAPTING.model_copy(update={"activation_checkpointing": checkpointing})
        one = Learner.build(model_dir, config, max_steps=10, seed=1, temperature=1.0)
        one.step(batch(1))
        states.append(digests(one.state()))
    assert states[0] == states[1]


def test_a_layer_compiles_without_a_break(model_dir: Path) -> None:
    model = huggingface.load_model(model_dir)
    lora.attach(model, LORA, seed=3)
    spread(model)
    layer = model.get_submodule("model.layers.0.mlp")
    rows = torch.randn(3, 32)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(rows), layer(rows))


def test_sharded_with_a_base_in_bf16_the_gradient_is_that_of_adapters(
    model_dir: Path, world: World
) -> None:
    model = huggingface.load_model(model_dir)
    lora.attach(model, LORA, seed=3, dtype=torch.bfloat16)
    spread(model)
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in huggingface.layers_of(model):
        fully_shard(layer, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    before = {name: whole(one).clone() for name, one in lora.adapter_tensors(model).items()}
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    model(input_ids=TOKENS, use_cache=False).logits.float().square().mean().backward()
    optimizer.step()
    for name, one in lora.adapter_tensors(model).items():
        assert one.dtype == torch.float32
        assert not torch.equal(whole(one), before[name]), name
    assert all(one.grad is None for one in model.parameters() if not one.requires_grad)


# -- export ----------------------------------------------------------------------------------------


def test_an_export_is_read_as_pefts(model_dir: Path, tmp_path: Path) -> None:
    one = trained(model_dir)
    one.export(tmp_path / "out")
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", 4, 8)
    assert set(described["target_modules"]) == set(LORA.target_modules)
    assert described["base_model_name_or_path"] == str(model_dir)
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
    expected = {name: to_torch(tensor) for name, tensor in one.state().items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    layer = "base_model.model.model.layers.1.mlp.down_proj"
    assert found[f"{layer}.lora_A.weight"].shape == (4, 64)
    assert found[f"{layer}.lora_B.weight"].shape == (32, 4)
    huggingface.load_tokenizer(tmp_path / "out")
    assert not (tmp_path / "out" / "merged").exists()


def test_a_merged_export_is_a_model_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    one = trained(model_dir)
    config = LORA.model_copy(update={"export_merged": True})
    lora.export(one.state(), config, model_dir, tmp_path / "out")
    merged = huggingface.load_model(tmp_path / "out" / "merged")
    expected = merge(base_of(model_dir), one.state(), LORA)
    assert digests(huggingface.policy_state(merged)) == digests(expected)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        (("q_proj", "qkv_proj"), "no linear layers qkv_proj, but down_proj"),
        (("input_layernorm",), "no linear layers input_layernorm"),
        (("lm_head",), "the head"),
        (("",), "no linear layers"),
    ],
)
def test_targets_that_are_no_linear_layers_are_refused(
    model_dir: Path, targets: tuple[str, ...], reason: str
) -> None:
    model = huggingface.load_model(model_dir)
    with pytest.raises(EngineError, match=reason):
        lora.attach(model, LORA.model_copy(update={"target_modules": targets}), seed=0)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_fused_experts_are_refused_and_attention_beside_them_is_not() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make: Any = Qwen3MoeConfig  # its stubs lack what its parents take
    shape = make(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = Qwen3MoeForCausalLM(shape)
    with pytest.raises(EngineError, match=r"take .*down_proj.* out of"):
        lora.attach(model, LORA, seed=0)
    attention = LORA.model_copy(update={"target_modules": ("q_proj", "o_proj")})
    lora.attach(model, attention, seed=0)
    assert len(lora.adapter_tensors(model)) == 4


# -- many ranks ------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.asyncio
async def test_two_ranks_train_the_adapters_that_one_does(model_dir: Path, tmp_path: Path) -> None:
    one = trained(model_dir)
    sharded = ADAPTING.model_copy(update={"backend": "fsdp", "fsdp": FsdpConfig(ranks=2)})
    backend = FsdpBackend(sharded, max_steps=10, seed=1)
    try:
        await backend.start(model_dir)
        first = await backend.snapshot()
        assert digests(first.state) == digests(learner(model_dir).state())
        for step in (1, 2):
            await backend.step(batch(step))
        found = (await backend.snapshot()).state
        await backend.save(tmp_path / "saved")
        await backend.export(tmp_path / "out")
    finally:
        await backend.close()
    expected = one.state()
    for name, tensor in expected.items():
        assert torch.allclose(to_torch(found[name]), to_torch(tensor), atol=2e-3), name
        assert digests(found)[name] != digests(first.state)[name]
    assert digests(model_files.read_state(tmp_path / "out")) == digests(found)
    other = learner(model_dir, seed=5)
    other.load(tmp_path / "saved")
    assert digests(other.state()) == digests(found)
