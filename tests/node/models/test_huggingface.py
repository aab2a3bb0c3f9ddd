"""Models as files: the same seed gives the same bytes, and what we write transformers reads."""

import json
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_cases import SHAPE, make_qwen3

from primerl.node.config.run import ModelConfig
from primerl.node.errors import EngineError, StorageError, UsageError
from primerl.node.models import huggingface
from primerl.node.models.architectures import read_config
from primerl.node.models.json_files import read_json
from primerl.node.models.tensors import from_torch
from primerl.node.weights.state import State, digests


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    huggingface.create(directory, SHAPE, 7)
    return directory


@pytest.fixture(scope="module")
def state(model_dir: Path) -> State:
    return huggingface.policy_state(huggingface.load_model(model_dir))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


IMPORTS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from pathlib import Path
from primerl.node.models import huggingface
from primerl.node.process.threads import importing

def free():
    taken = importing.acquire(blocking=False)
    if taken:
        importing.release()
    return taken

class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("transformers", "accelerate") and other.submit(free).result():
            print(name)

other = ThreadPoolExecutor(1)
other.submit(free).result()
sys.meta_path.insert(0, Watch())
model_dir = Path(sys.argv[1])
huggingface.register_attention("own", print)
huggingface.load_tokenizer(model_dir)
huggingface.policy_tensors(huggingface.load_model(model_dir))
assert {"transformers", "transformers.models.qwen3.modeling_qwen3"} <= sys.modules.keys()
"""


@pytest.mark.slow
def test_one_thread_at_a_time_imports_modules_of_transformers(model_dir: Path) -> None:
    program = [sys.executable, "-c", IMPORTS, str(model_dir)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr + ran.stdout


# -- making ---------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(
    model_dir: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1234)  # whatever the global generator did before
    before = torch.random.get_rng_state()
    huggingface.create(tmp_path / "same", SHAPE, 7)
    huggingface.create(tmp_path / "other", SHAPE, 8)
    assert torch.random.get_rng_state().equal(before)
    wanted, other = contents(model_dir), contents(tmp_path / "other")
    assert contents(tmp_path / "same") == wanted
    assert [name for name in wanted if wanted[name] != other[name]] == ["model.safetensors"]


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="vocab_size"):
        huggingface.create(tmp_path, SHAPE | {"vocab_size": 256}, 0)


def test_the_created_model_is_fp32_and_has_the_shape_that_was_asked_for(model_dir: Path) -> None:
    model: Any = huggingface.load_model(model_dir)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.rope_parameters["rope_theta"] == 100.0
    assert not model.training
    assert huggingface.vocab_size(model_dir) == SHAPE["vocab_size"]


def test_the_tokenizer_keeps_every_byte_and_its_ids_are_the_bytes(model_dir: Path) -> None:
    tokenizer: Any = huggingface.load_tokenizer(model_dir)
    text = "".join(map(chr, range(256))) + "\u20ac"
    ids = tokenizer(text).input_ids
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_the_chat_template_spends_one_token_a_role(model_dir: Path) -> None:
    tokenizer: Any = huggingface.load_tokenizer(model_dir)
    messages = [{"role": "user", "content": "abc"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>abc<|im_end|><|assistant|>"
    assert len(tokenizer(text).input_ids) == 3 + 3
    for markup in ("<think>", "</tool_call>", "<|im_start|>"):
        assert len(tokenizer(markup).input_ids) == 1


@pytest.mark.slow
def test_several_threads_may_be_the_first_to_need_the_library(model_dir: Path) -> None:
    """A trainer starts its environment and its backend side by side."""
    program = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from pathlib import Path;"
        "from primerl.node.models import huggingface; directory = Path(sys.argv[1]);"
        "print(len(list(ThreadPoolExecutor(3).map(huggingface.load_tokenizer, [directory] * 3))))"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(model_dir)], capture_output=True, text=True, timeout=280
    )
    assert found.stdout.strip() == "3", found.stderr[-2000:]


def test_stop_tokens_are_those_of_generation_config_and_tokenizer(
    model_dir: Path, tmp_path: Path
) -> None:
    for name, data in contents(model_dir).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 256]}))
    assert huggingface.stop_token_ids(tmp_path) == (256, 258, 300)
    (tmp_path / "generation_config.json").unlink()
    assert huggingface.stop_token_ids(tmp_path) == (258,)


# -- files ----------------------------------------------------------------------------------------


def test_the_contract_holds_no_weights_and_no_code(model_dir: Path, tmp_path: Path) -> None:
    assert huggingface.contract_files(model_dir) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    names = ["tokenizer_x.py", "chat_template.py", "model.bin", "merges.txt", "vocab.json"]
    for name in [*names, "chat_template.safetensors", "model.safetensors.index.json"]:
        (tmp_path / name).touch()
    (tmp_path / "chat_templates").mkdir()
    assert huggingface.contract_files(tmp_path) == ["merges.txt", "vocab.json"]


def test_export_keeps_every_bit_and_replaces_what_was_there(
    model_dir: Path, state: State, tmp_path: Path
) -> None:
    target = tmp_path / "policy"
    target.mkdir()
    (target / "model-00001-of-00002.safetensors").touch()
    huggingface.export(state, model_dir, target)
    assert digests(huggingface.read_state(target)) == digests(state)
    files = {*huggingface.contract_files(model_dir), "model.safetensors"}
    assert contents(target).keys() == files
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_an_export_to_a_full_disk_leaves_what_was_there(
    model_dir: Path, state: State, tmp_path: Path
) -> None:
    target = tmp_path / "policy"
    huggingface.export(state, model_dir, target)
    before = contents(target)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(StorageError, match="free disk space"):
            huggingface.export(state, model_dir, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert contents(target) == before


def test_transformers_loads_an_export_and_computes_the_same(
    model_dir: Path, state: State, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    huggingface.export(state, model_dir, tmp_path / "policy")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    wanted: Any = huggingface.model_from_state(model_dir, state)
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        assert loaded(tokens).logits.equal(wanted(tokens).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").chat_template


@pytest.mark.parametrize("tie", [True, False])
def test_a_tied_head_appears_once_and_an_untied_one_on_its_own(tie: bool, tmp_path: Path) -> None:
    state = make_qwen3(tmp_path, 1, SHAPE | {"tie_word_embeddings": tie})
    assert ("lm_head.weight" in state) is not tie
    assert {tensor.dtype for tensor in state.values()} == {"BF16"}
    loaded: Any = huggingface.model_from_state(tmp_path, state)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tie
    assert digests(huggingface.policy_state(loaded)) == digests(state)


def test_a_policy_state_does_not_change_with_the_model_it_came_from(
    model_dir: Path, state: State
) -> None:
    model: Any = huggingface.load_model(model_dir, dtype="bfloat16")
    taken = huggingface.policy_state(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert digests(taken) == digests(state)


def test_experts_have_their_checkpoint_names(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_config: Any = Qwen3MoeConfig
    config = make_config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_experts=3,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    state = huggingface.policy_state(model)
    assert state.keys() == huggingface.read_state(tmp_path).keys()
    assert "model.layers.0.mlp.experts.2.up_proj.weight" in state
    loaded: Any = huggingface.model_from_state(tmp_path, state)
    assert digests(huggingface.policy_state(loaded)) == digests(state)


def test_weights_with_a_name_in_two_files_are_refused(tmp_path: Path) -> None:
    huggingface.create(tmp_path, SHAPE, 0)
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(EngineError, match="repeats"):
        huggingface.read_state(tmp_path)


def test_a_pickle_is_not_read(model_dir: Path, tmp_path: Path) -> None:
    for name in huggingface.contract_files(model_dir):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    torch.save({"lm_head.weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineError, match="safetensors"):
        huggingface.read_state(tmp_path)
    with pytest.raises(EngineError, match="cannot be loaded"):
        huggingface.load_model(tmp_path)


def test_code_that_came_with_a_model_is_not_run(model_dir: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(EngineError, match="cannot be loaded"):
        huggingface.load_config(tmp_path)
    with pytest.raises(EngineError, match="cannot be loaded"):
        huggingface.load_model(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"vocab_size": "many"}'])
def test_a_broken_config_is_one_line_that_names_the_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json is missing"):
        huggingface.vocab_size(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"config\.json") as caught:
        huggingface.vocab_size(tmp_path)
    assert "\n" not in str(caught.value)


# -- finding --------------------------------------------------------------------------------------


def test_a_directory_is_its_own_resolution(model_dir: Path) -> None:
    assert huggingface.resolve(str(model_dir)) == model_dir


def test_offline_an_unknown_hub_id_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EngineError, match=r"set model\.name to a local directory"):
        huggingface.resolve("nobody/no-such-model")
    with pytest.raises(EngineError, match=r"correct model\.name"):
        huggingface.resolve("not a hub id!")


def test_a_companion_that_breaks_on_import_is_hidden_and_others_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_companion.py").write_text("raise RuntimeError('operator does not exist')")
    (tmp_path / "sound_companion.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken_companion", "sound_companion", "absent_companion"):
        huggingface.hide_if_broken(name)
    assert sys.modules.pop("broken_companion") is None
    assert sys.modules.pop("sound_companion") is not None
    assert "absent_companion" not in sys.modules


def test_floats_become_bf16_by_rounding_to_nearest_even() -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -0.0, float("inf")])  # two exact ties
    assert from_torch(values, "BF16").data.tolist() == [0x3F80, 0x3F80, 0x3F82, 0x8000, 0x7F80]


def test_a_config_that_was_fetched_before_is_taken_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's cache: models--OWNER--NAME/refs/main says which snapshot."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    home = tmp_path / "models--some--model"
    (home / "snapshots" / "abc").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc")
    (home / "snapshots" / "abc" / "config.json").write_text('{"vocab_size": 7}')
    assert huggingface.fetch_config("some/model") == {"vocab_size": 7}
    with pytest.raises(EngineError, match="the hub cannot be reached for 'some/other'"):
        huggingface.fetch_config("some/other")
    with pytest.raises(EngineError, match="neither a directory nor a hub id"):
        huggingface.fetch_config("not a name")


def test_models_may_be_built_by_several_threads_at_once(tmp_path: Path) -> None:
    state = make_qwen3(tmp_path, 0, SHAPE | {"tie_word_embeddings": True})
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(huggingface.model_from_state, tmp_path, state) for _ in range(12)]
        for one in made:
            one.result()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hiden_size": 64}, "hiden_size is no field of a new qwen3: did you mean hidden_size"),
        (
            {"moe_intermediate_size": 8, "num_experts": 4, "q": 1},
            "q is no field of a new qwen3_moe",
        ),
        ({"model_type": "llama"}, "model_type follows from num_experts"),
        ({"hidden_size": "x"}, "hidden_size should be a number, not 'x'"),
        ({"hidden_size": 0}, "hidden_size should be above 0, not 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings should be true or false, not 1"),
        ({"attention_bias": "x"}, "transformers refuses it: .*attention_bias"),
        ({"hidden_act": "none"}, "transformers refuses it: .*none"),
    ],
)
def test_a_field_of_a_new_model_that_transformers_would_not_take_is_named(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=rf"^model\.create.*{said}"):
        huggingface.create(tmp_path, fields, 0)
    assert not (tmp_path / "config.json").exists()


def test_a_new_model_takes_any_field_of_its_transformers_config(tmp_path: Path) -> None:
    fields = {**SHAPE, "attention_bias": True, "rms_norm_eps": 1e-5}
    assert read_config(ModelConfig(create=fields))["attention_bias"] is True
    huggingface.create(tmp_path, fields, 0)
    config = read_json(tmp_path / "config.json")
    assert (config["attention_bias"], config["rms_norm_eps"]) == (True, 1e-5)
