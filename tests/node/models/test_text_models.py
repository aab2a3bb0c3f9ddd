"""A checkpoint that also reads images: a run trains its text model."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.multimodal_cases import CHECKPOINTS, SIZES, saved

from primerl.node.config.run import ModelConfig
from primerl.node.errors import EngineError, StorageError
from primerl.node.models import huggingface, text_models
from primerl.node.models.architectures import ARCHITECTURES, read_config, untrainable
from primerl.node.models.json_files import read_json
from primerl.node.models.tokenizer_files import read_tokenizer_files
from primerl.node.training.parity import difference

TOKENS = torch.arange(3, 40)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_kind_of_checkpoint_is_compared() -> None:
    assert {kind.partition("/")[0] for kind in CHECKPOINTS} == set(text_models.TEXT_MODELS)
    assert {family for family, _ in text_models.ALONE.values()} <= ARCHITECTURES.keys()


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_text_model_says_of_text_what_the_whole_says(kind: str, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path / "whole")
    directory = huggingface.resolve(str(tmp_path / "whole"))
    alone = huggingface.load_model(directory)
    with torch.no_grad():
        assert torch.equal(alone(input_ids=TOKENS).logits, whole(input_ids=TOKENS).logits)
    stored = huggingface.read_state(directory)
    assert stored.keys() == huggingface.policy_state(alone).keys(), "images are left out"
    same = (directory / "tokenizer.json").read_bytes()
    assert same == (tmp_path / "whole" / "tokenizer.json").read_bytes()
    assert huggingface.vocab_size(directory) == SIZES["vocab_size"]


def test_a_checkpoint_of_several_files_stays_one(tmp_path: Path) -> None:
    whole = saved("qwen3_5", tmp_path / "whole", most="200kB")
    directory = huggingface.resolve(str(tmp_path / "whole"))
    files = {one.name for one in directory.glob("*.safetensors")}
    assert 1 < len(files) <= len(list((tmp_path / "whole").glob("*.safetensors")))
    alone = huggingface.load_model(directory)
    with torch.no_grad():
        assert torch.equal(alone(input_ids=TOKENS).logits, whole(input_ids=TOKENS).logits)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_it_can_be_trained_and_that_is_known_before_it_is_written(
    kind: str, tmp_path: Path, cache: Path
) -> None:
    saved(kind, tmp_path / "whole")
    before = read_config(ModelConfig(name=str(tmp_path / "whole")))
    assert not cache.exists()
    directory = huggingface.resolve(str(tmp_path / "whole"))
    assert json.loads(json.dumps(before)) == read_json(directory / "config.json")
    assert untrainable(before, 64) == ""
    assert difference(before) < 1e-4
    gated = {**before, "output_gate_type": "sigmoid"}
    assert not kind.startswith("qwen3_5") or "output_gate_type is sigmoid" in untrainable(gated, 64)


def test_it_is_written_once_for_a_checkpoint(tmp_path: Path) -> None:
    saved("qwen3_5", tmp_path / "whole")
    first = huggingface.resolve(str(tmp_path / "whole"))
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert huggingface.resolve(str(tmp_path / "whole")) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    os.utime(tmp_path / "whole" / "model.safetensors", ns=(1, 1))
    assert huggingface.resolve(str(tmp_path / "whole")) != first, "the checkpoint is another one"
    assert not list(first.parent.glob(".*")), "nothing half written is left"


def test_named_templates_stay_with_the_text_model(tmp_path: Path) -> None:
    saved("gemma3", tmp_path / "whole")
    folder = tmp_path / "whole" / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("tools")
    made = huggingface.resolve(str(tmp_path / "whole"))
    assert made != tmp_path / "whole"
    assert read_tokenizer_files(made).templates["tool_use"] == "tools"


def test_a_model_that_reads_no_images_stays_where_it_is(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert huggingface.resolve(str(tmp_path)) == tmp_path
    assert not cache.exists()


def test_a_checkpoint_without_a_text_model_is_refused(tmp_path: Path, cache: Path) -> None:
    saved("qwen3_5", tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="no weights of a text model"):
        huggingface.resolve(str(tmp_path / "whole"))
    assert not [one for one in cache.rglob("*") if one.is_file()]


def test_a_checkpoint_that_lacks_a_file_is_refused(tmp_path: Path, cache: Path) -> None:
    saved("qwen3_5", tmp_path / "whole", most="200kB")
    max((tmp_path / "whole").glob("*.safetensors")).unlink()
    with pytest.raises(EngineError, match=r"lacks model-.*\.safetensors: download"):
        huggingface.resolve(str(tmp_path / "whole"))
    (tmp_path / "whole" / text_models.INDEX).unlink()
    with pytest.raises(EngineError, match=r"lacks .* weights of its model"):
        huggingface.load_model(huggingface.resolve(str(tmp_path / "whole")))


def test_a_tied_head_is_tied_whatever_the_inner_config_says(tmp_path: Path) -> None:
    whole = saved("gemma3", tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    config = json.loads(path.read_text())
    assert config["tie_word_embeddings"]
    config["text_config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(config))
    alone = huggingface.load_model(huggingface.resolve(str(tmp_path / "whole")))
    with torch.no_grad():
        assert torch.equal(alone(input_ids=TOKENS).logits, whole(input_ids=TOKENS).logits)


def test_the_config_is_the_checkpoint_s_own_and_of_no_release(tmp_path: Path) -> None:
    saved("gemma3", tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] = {"hidden_size": 2560, "model_type": "gemma3_text"}  # as published
    path.write_text(json.dumps(config))
    found = read_config(ModelConfig(name=str(tmp_path / "whole")))
    assert "transformers_version" not in found
    assert (found["hidden_size"], found["num_attention_heads"], found["head_dim"]) == (2560, 8, 256)


def test_a_text_model_that_was_never_compared_is_refused_by_its_name(tmp_path: Path) -> None:
    config = {"model_type": "mistral3", "text_config": {"model_type": "cohere", **SIZES}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="text model of 'mistral3' is a 'cohere'"):
        read_config(ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_weights_that_are_quantized_as_a_whole_are_so_in_the_text_model(
    key: str, tmp_path: Path
) -> None:
    config = {"model_type": "gemma3", "text_config": SIZES, key: {"bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(ModelConfig(name=str(tmp_path)))
    assert untrainable(found, 64) == "its weights are quantized: use the model in bf16"


def test_qwen3_vl_becomes_a_qwen3_with_the_positions_of_its_config(tmp_path: Path) -> None:
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {**SIZES, "rope_scaling": rope, "rope_theta": 5000000, "rms_norm_eps": 1e-6}
    config = {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", **text}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(ModelConfig(name=str(tmp_path)))
    assert (found["model_type"], found["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert found["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000000}
    assert "rope_scaling" not in found


@pytest.mark.parametrize(
    "damage",
    [
        *({"text_config": one} for one in ([1], 5, "x", {"hidden_size": "a"})),
        *(
            {"text_config": {**SIZES, **one}}
            for one in ({"rope_parameters": "abc"}, {"id2label": 5})
        ),
        {"text_config": {**SIZES, "layer_types": None, "full_attention_interval": 0}},
        {"vision_config": "x"},
        {"text_config": {"to_json_string": 3}},
    ],
    ids=lambda one: str(one)[-40:],
)
def test_a_damaged_config_is_refused_before_anything_is_written(
    damage: dict[str, Any], tmp_path: Path, cache: Path
) -> None:
    directory = tmp_path / "whole"
    directory.mkdir()
    text = {"model_type": "qwen3_5", "text_config": {}, **damage}
    (directory / "config.json").write_text(json.dumps(text))
    with pytest.raises(EngineError, match=r"cannot be read|no weights"):
        huggingface.resolve(str(directory))
    assert not [one for one in cache.rglob("*") if one.is_file()]


def test_a_damaged_file_of_weights_is_named(tmp_path: Path) -> None:
    saved("qwen3_5", tmp_path / "whole")
    weights = tmp_path / "whole" / "model.safetensors"
    weights.write_bytes(b"\x08" + b"\0" * 20)
    with pytest.raises(EngineError, match=r"model\.safetensors cannot be read"):
        huggingface.resolve(str(tmp_path / "whole"))
    weights.unlink()
    weights.symlink_to(tmp_path / "gone")
    with pytest.raises(EngineError, match=r"cannot be read .*: download the model again"):
        huggingface.resolve(str(tmp_path / "whole"))


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, cache: Path) -> None:
    saved("qwen3_5", tmp_path / "whole")
    cache.write_text("a file")
    with pytest.raises(StorageError, match="set XDG_CACHE_HOME"):
        huggingface.resolve(str(tmp_path / "whole"))


def test_a_full_disk_says_so_and_leaves_nothing_half_written(tmp_path: Path, cache: Path) -> None:
    saved("qwen3_5", tmp_path / "whole")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(StorageError, match="free disk space"):
            huggingface.resolve(str(tmp_path / "whole"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [one for one in cache.rglob("*") if one.is_file()]


WRITER = """
import os, sys, tempfile
from pathlib import Path
from primerl.node.models import text_models

partial = tempfile.mkdtemp(prefix=".whole-0123456789abcdef.", dir=sys.argv[1])
Path(partial, "model.safetensors").write_bytes(b"half")
os.utime(partial, (1, 1))
assert text_models.try_lock(os.open(partial, os.O_RDONLY))
print(partial, flush=True)
sys.stdin.read()
"""
"""A process that writes a text model since 1970."""


def test_what_a_killed_conversion_left_is_removed_by_the_next_one(
    tmp_path: Path, cache: Path
) -> None:
    saved("qwen3_5", tmp_path / "whole")
    models = huggingface.resolve(str(tmp_path / "whole")).parent
    new, foreign = models / ".new-0123456789abcdef.abcdefgh", models / ".mine"
    new.mkdir()
    foreign.mkdir()
    os.utime(foreign, (1, 1))
    command = [sys.executable, "-c", WRITER, str(models)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as writer:
        assert writer.stdout is not None
        partial = Path(writer.stdout.readline().strip())
        assert partial.parent == models
        os.utime(tmp_path / "whole" / "model.safetensors", ns=(1, 1))
        huggingface.resolve(str(tmp_path / "whole"))
        assert (partial / "model.safetensors").exists(), "it is still written"
        writer.kill()
    os.utime(tmp_path / "whole" / "model.safetensors", ns=(2, 2))
    found = huggingface.resolve(str(tmp_path / "whole"))
    assert not partial.exists()
    assert new.is_dir(), "its process may be about to lock it"
    assert foreign.is_dir(), "a conversion makes no such name"
    assert len(list(models.glob("whole-*/config.json"))) == 3, "text models stay"
    assert huggingface.load_model(found)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.patch_embed.proj.weight", ""),
        ("mtp.layers.0.mlp.up_proj.weight", ""),
        ("vision_tower.head.layernorm.weight", ""),
    ],
)
def test_tensors_have_the_names_of_a_text_model(name: str, own: str) -> None:
    assert text_models.text_name(name) == own
