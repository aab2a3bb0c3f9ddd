"""Whether a model can be trained follows from what its config.json makes transformers compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_cases import make_family

from primerl.node.app.rundir import prepare_model
from primerl.node.config.run import ModelConfig, ModelCreateConfig, RunConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.models import huggingface
from primerl.node.models.architectures import keys_to_compare, keys_without_effect
from primerl.node.reports.doctor import check_model, check_trainable
from primerl.node.training import parity

LONGEST = 128
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16}
GEMMA3 = {**GEMMA2, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    huggingface.create_random(tmp_path, LLAMA, seed=0)
    return tmp_path


def change(directory: Path, config: dict[str, Any], **tensors: torch.Tensor) -> ModelConfig:
    """Write a config.json, and further tensors."""
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, metadata={"format": "pt"})
    return ModelConfig(name=str(directory))


@pytest.mark.parametrize(
    ("config", "ignored"),
    [
        ({**LLAMA, "is_llama_config": True, "max_sequence_length": 2048}, 2),
        ({**GEMMA2, "cache_implementation": "hybrid", "sliding_window_size": 4096}, 2),
        ({**LLAMA, "num_beams": 1, "temperature": 0.7, "unsloth_fixed": False}, 2),
        (LLAMA, 0),
    ],
)
def test_keys_that_transformers_does_not_read_are_listed_in_one_line_and_change_no_bit(
    config: dict[str, Any], ignored: int, tmp_path: Path
) -> None:
    keys = keys_without_effect(config)
    assert len(keys) == ignored
    assert not keys_to_compare(config)
    huggingface.create_random(tmp_path, config, seed=0)
    ids = torch.arange(3, 60)[None]
    model: Any = huggingface.load_model(tmp_path)
    logits = model(input_ids=ids).logits
    notes = check_trainable(ModelConfig(name=str(tmp_path)), LONGEST)
    assert notes == ([f"config.json: transformers does not read {', '.join(keys)}"] if keys else [])
    assert all(key in check_model(config, LONGEST).found for key in keys)
    plain = {key: value for key, value in config.items() if key not in keys}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    model = huggingface.load_model(tmp_path)
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_a_key_that_is_read_is_compared_and_accepted_if_training_computes_the_same() -> None:
    config = {**GEMMA3, "rope_local_base_freq": 200.0, "num_layers": 2}
    assert keys_to_compare(config) == ["rope_local_base_freq", "num_layers"]
    assert parity.fault(config, LONGEST) == ""


def test_a_key_that_makes_training_differ_is_refused_by_name() -> None:
    """Attention in both directions."""
    config = {**GEMMA3, "is_causal": False, "num_layers": 2}
    assert set(keys_to_compare(config)) == {"is_causal", "num_layers"}
    assert parity.difference(config) > 0.01
    found = parity.fault(config, LONGEST)
    assert found.startswith(
        "its config.json sets 'is_causal', and then logprobs of training differ"
    )
    assert check_model(config, LONGEST).advice == found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("d2t", r"no place for 1 of the tensors in .*, as d2t: .*a draft"),
        ("midlayer.hidden_norm.weight", r"as midlayer\.hidden_norm\.weight"),
        ("model.layers.0.self_attn.q_proj.qweight", "are quantized, as .*qweight says"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "are quantized"),
    ],
)
def test_tensors_that_the_model_has_no_place_for_are_refused_before_and_as_it_loads(
    name: str, reason: str, directory: Path
) -> None:
    model = change(directory, LLAMA, **{name: torch.zeros(4)})
    with pytest.raises(UsageError, match=f"cannot be trained: .*{reason}"):
        check_trainable(model, LONGEST)
    with pytest.raises(EngineError, match=reason):
        parity.check_directory(directory, LONGEST)
    with pytest.raises(EngineError, match=reason):
        huggingface.load_model(directory)


def test_the_index_of_a_sharded_checkpoint_is_read_before_its_files_are_there(
    directory: Path,
) -> None:
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a", "fc.weight": "a"}}))
    with pytest.raises(UsageError, match=r"1 of the tensors in .*, as fc\.weight"):
        check_trainable(ModelConfig(name=str(directory)), LONGEST)
    for damaged in ("[]", "{}", '{"weight_map": 5}', '{"weight_map": ["fc.weight"]}'):
        index.write_text(damaged)
        if damaged == "[]":
            with pytest.raises(EngineError, match="does not hold a JSON object"):
                check_trainable(ModelConfig(name=str(directory)), LONGEST)
        else:
            assert check_trainable(ModelConfig(name=str(directory)), LONGEST) == []


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("qwen3_next", "mtp.fc.weight"),
        ("mixtral", ""),
        ("gpt_oss", ""),
    ],
)
def test_tensors_that_transformers_converts_or_skips_are_taken(
    family: str, more: str, tmp_path: Path
) -> None:
    make_family(family, tmp_path)
    if more:
        config = json.loads((tmp_path / "config.json").read_text())
        change(tmp_path, config, **{more: torch.zeros(4)})
    assert check_trainable(ModelConfig(name=str(tmp_path)), LONGEST) == []
    huggingface.load_model(tmp_path)


def test_a_model_that_is_made_here_can_be_trained() -> None:
    for create in (ModelCreateConfig(), ModelCreateConfig(num_experts=4)):
        assert check_trainable(ModelConfig(create=create), LONGEST) == []


def test_a_hub_that_cannot_be_asked_is_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert check_trainable(ModelConfig(name="nobody/no-such-model"), LONGEST) == []
    with pytest.raises(EngineError, match=r"config\.json is missing"):
        check_trainable(ModelConfig(name=str(tmp_path)), LONGEST)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "gpt2"}))
    with pytest.raises(UsageError, match="cannot be trained: its architecture 'gpt2'"):
        check_trainable(ModelConfig(name=str(tmp_path)), LONGEST)


async def test_a_model_that_was_just_downloaded_is_checked_before_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the hub's cache, whose files nobody has looked at."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--some--draft"
    snapshot = home / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    huggingface.create_random(snapshot, LLAMA, seed=0)
    run = RunConfig(model=ModelConfig(name="some/draft"), output_dir=tmp_path / "out")
    assert await prepare_model(run, tmp_path / "model") == snapshot
    change(snapshot, LLAMA, d2t=torch.zeros(4))
    with pytest.raises(EngineError, match=r"cannot be trained: .* no place for .* as d2t"):
        await prepare_model(run, tmp_path / "model")
    change(snapshot, {**LLAMA, "is_causal": False})
    with pytest.raises(EngineError, match=r"cannot be trained: its config\.json sets 'is_causal'"):
        await prepare_model(run, tmp_path / "model")


def test_a_large_number_that_is_read_is_compared_at_a_small_value_too() -> None:
    """It might act beyond so many tokens only, as a window does."""
    small, large = ({**GEMMA3, "num_layers": number} for number in (4, 4096))
    assert len(list(parity.differences(small, ["num_layers"]))) == 1
    assert len(list(parity.differences(large, ["num_layers"]))) == 2


def test_a_config_that_transformers_cannot_read_is_refused_with_its_words() -> None:
    config = {**GEMMA3, "rope_local_base_freq": 200.0, "hidden_activation": "no-such"}
    found = parity.fault(config, LONGEST)
    assert found.startswith("a small model of its config.json cannot be computed: ")
    assert "\n" not in found
