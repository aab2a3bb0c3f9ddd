"""`model import`: what becomes of a GGUF file or a directory computes the same; else a line says why not."""

import json
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_cases import SHAPE

from primerl.node.errors import EngineError, StorageError, UsageError
from primerl.node.models import huggingface
from primerl.node.models.conversion import convert

WIDTH, HEADS, KV, LAYERS, INNER = 32, 4, 2, 2, 48
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
IDS = torch.tensor([[5, 70, 200, 256, 9, 258, 31]])


def byte_tokens() -> list[str]:
    """The characters that stand for bytes in a byte-level vocabulary, in the order of the bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {byte: chr(byte) for byte in plain} | {b: chr(256 + n) for n, b in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


@pytest.fixture(scope="module")
def llama() -> Any:
    """A random Llama whose weights have few bits, so that a bfloat16 holds them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        vocab_size=264,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            parameter.data = (parameter.data + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    return model.eval()


def permuted(weight: "np.ndarray[Any, Any]", heads: int) -> "np.ndarray[Any, Any]":
    """Rows of a query or key matrix as llama.cpp has them: the halves of a head interleaved."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


Write = Callable[..., Path]


@pytest.fixture
def write(llama: Any, tmp_path: Path) -> Write:
    """Write a GGUF file of the Llama by gguf's own writer, which `change` may add to."""

    def write(change: Callable[[Any], None] = lambda writer: None, *, tied: bool = False) -> Path:
        path = tmp_path / "source" / "model.gguf"
        path.parent.mkdir(exist_ok=True)
        writer: Any = gguf.GGUFWriter(path, "llama")
        writer.add_name("a test")
        writer.add_license("apache-2.0")
        writer.add_context_length(128)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(500.0)
        writer.add_rope_dimension_count(WIDTH // HEADS)
        writer.add_vocab_size(264)
        tokens = [*byte_tokens(), *SPECIAL, "th", "the", "he", "in"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * 256 + [3] * len(SPECIAL) + [1] * 4)
        writer.add_token_merges(["t h", "th e", "h e", "i n"])
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)
        writer.add_pad_token_id(256)
        writer.add_chat_template(TEMPLATE)
        change(writer)
        for name, tensor in llama.state_dict().items():
            data = tensor.numpy()
            inner = name.replace("model.norm", "output_norm").removeprefix("model.")
            if "q_proj" in inner or "k_proj" in inner:
                data = permuted(data, HEADS if "q_proj" in inner else KV)
            for old, new in NAMES:
                inner = inner.replace(old, new)
            if not (tied and inner == "output.weight"):
                writer.add_tensor(inner, np.ascontiguousarray(data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


NAMES = (
    ("embed_tokens", "token_embd"),
    ("layers.", "blk."),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("post_attention_layernorm", "ffn_norm"),
    ("input_layernorm", "attn_norm"),
    ("lm_head", "output"),
)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.float()(IDS, use_cache=False).logits


def read(directory: Path, name: str) -> Any:
    return json.loads((directory / name).read_text())


# -- GGUF ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_becomes_a_model_that_computes_the_same(
    write: Write, llama: Any, tmp_path: Path, tied: bool
) -> None:
    lines = convert(write(tied=tied), tmp_path / "made")
    model: Any = huggingface.load_model(tmp_path / "made")
    wanted: Any = llama
    if tied:
        from transformers import LlamaForCausalLM

        state = llama.state_dict()
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        wanted = LlamaForCausalLM(llama.config)
        wanted.load_state_dict(state)
    assert (logits(model) - logits(wanted)).abs().max() < 1e-5
    assert read(tmp_path / "made", "config.json")["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in huggingface.read_state(tmp_path / "made")) is not tied
    assert lines == [
        f"wrote {tmp_path / 'made'}: llama, {sum(p.numel() for p in model.parameters()):,} weights in bfloat16",
        f"dropped the number formats of tensors ({20 if tied else 21} of F32): bfloat16 now",
        "dropped metadata: general.license",
    ]


def test_tokens_template_and_ends_of_a_gguf_file_are_kept(write: Write, tmp_path: Path) -> None:
    def named(writer: Any) -> None:
        writer.add_eot_token_id(259)
        writer.add_string("tokenizer.chat_template.tool_use", "tools!")

    convert(write(named), tmp_path / "made")
    tokenizer: Any = huggingface.load_tokenizer(tmp_path / "made")
    assert tokenizer("the thin<|im_end|>").input_ids == [261, 32, 260, 263, 258]
    messages = [{"role": "user", "content": "a"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\na<|im_end|>\n"
    with_tool = tokenizer.apply_chat_template(
        messages, tokenize=False, tools=[{"type": "function"}]
    )
    assert with_tool == "tools!"
    assert huggingface.stop_token_ids(tmp_path / "made") == (258, 259)


def test_a_quantized_gguf_file_is_recognized(write: Write, tmp_path: Path) -> None:
    def quantized(writer: Any) -> None:
        add = writer.add_tensor

        def rounded(name: str, data: Any) -> None:
            if data.ndim == 1:
                return add(name, data)
            kind = gguf.GGMLQuantizationType.Q8_0
            blocks = np.pad(data, ((0, 0), (0, -data.shape[1] % 32)))[:, : data.shape[1] // 32 * 32]
            if blocks.shape != data.shape:
                return add(name, data)
            add(name, gguf.quants.quantize(data, kind), raw_dtype=kind)

        writer.add_tensor = rounded

    lines = convert(write(quantized), tmp_path / "made")
    assert lines[1] == (
        "dropped the number formats of tensors (7 of F32, 14 of Q8_0): bfloat16 now"
    )
    assert huggingface.load_model(tmp_path / "made")


def scaled(writer: Any) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)


def factors(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(WIDTH // HEADS // 2, np.float32))


def window(writer: Any) -> None:
    writer.add_sliding_window(16)


def unknown(writer: Any) -> None:
    writer.add_string("general.architecture", "nobody")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (scaled, "sets llama.rope.scaling.type to linear"),
        (factors, "without rope_freqs.weight"),
        (window, "sets llama.attention.sliding_window to 16"),
        (unknown, "nobody"),
    ],
)
def test_what_transformers_would_leave_out_of_a_gguf_file_is_refused(
    write: Write, tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    with pytest.raises(EngineError, match=said) as refused:
        convert(write(change), tmp_path / "made")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_gguf_file_that_is_none_or_cut_off_is_refused(write: Write, tmp_path: Path) -> None:
    path = write()
    whole = path.read_bytes()
    for data in (b"", b"GGUF", b"no model at all" * 9, whole[: len(whole) // 2], whole[:-400]):
        path.write_bytes(data)
        with pytest.raises(EngineError, match="cannot be read"):
            convert(path, tmp_path / "made")
        assert not (tmp_path / "made").exists()


def test_without_its_package_a_gguf_file_says_what_to_install(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write()
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as hidden:
            hidden.setitem(sys.modules, package, None)
            with pytest.raises(EngineError, match=rf"needs the package {package}: pip install"):
                convert(path, tmp_path / "made")


# -- directories -----------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    huggingface.create(tmp_path / "source", SHAPE, 3)
    return tmp_path / "source"


def changed(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, **changes}))


def test_a_directory_keeps_weights_tokens_and_generation_config(
    directory: Path, tmp_path: Path
) -> None:
    changed(directory / "config.json", _name_or_path="/home/me", auto_map={"AutoModel": "own.Own"})
    generation = {"eos_token_id": [256, 258], "temperature": 0.6, "do_sample": False}
    changed(directory / "generation_config.json", **generation)
    (directory / "own.py").write_text("raise SystemExit")
    (directory / "README.md").touch()
    lines = convert(directory, tmp_path / "made")
    assert lines[1:] == [
        "dropped files: README.md, own.py",
        "dropped from config.json: _name_or_path, auto_map",
    ]
    assert not {"_name_or_path", "auto_map"} & read(tmp_path / "made", "config.json").keys()
    made = load_file(tmp_path / "made" / "model.safetensors")
    source = load_file(directory / "model.safetensors")
    assert made.keys() == source.keys()
    assert all(torch.equal(made[name], source[name]) for name in made)
    assert read(tmp_path / "made", "generation_config.json").items() >= generation.items()
    files = {path.name for path in (tmp_path / "made").iterdir()}
    assert files == {path.name for path in directory.iterdir()} - {"README.md", "own.py"}
    assert huggingface.stop_token_ids(tmp_path / "made") == (256, 258)


def test_tensors_that_the_model_does_not_have_are_named_or_refused(
    directory: Path, tmp_path: Path
) -> None:
    path = directory / "model.safetensors"
    own = load_file(path)
    save_file({**own, "mtp.layers.0.up.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    lines = convert(directory, tmp_path / "made")
    assert lines[1:] == [
        "dropped 1 tensors that the model does not have, as mtp.layers.0.up.weight"
    ]
    assert load_file(tmp_path / "made" / "model.safetensors").keys() == own.keys()
    inner = {**own, "model.layers.0.self_attn.gate.weight": torch.ones(2)}
    save_file(inner, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"has model\.layers\.0\.self_attn\.gate\.weight"):
        convert(directory, tmp_path / "other")
    del own["model.norm.weight"]
    save_file(own, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks 1 weights of its model, as model\.norm\.weight"):
        convert(directory, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_head_of_its_own_is_kept_and_reported_where_the_config_ties_it(
    directory: Path, tmp_path: Path
) -> None:
    path = directory / "model.safetensors"
    own = load_file(path)
    head = own["model.embed_tokens.weight"] + 1
    save_file({**own, "lm_head.weight": head}, path, metadata={"format": "pt"})
    assert read(directory, "config.json")["tie_word_embeddings"] is True
    convert(directory, tmp_path / "made")
    assert read(tmp_path / "made", "config.json")["tie_word_embeddings"] is False
    assert torch.equal(load_file(tmp_path / "made" / "model.safetensors")["lm_head.weight"], head)
    made, source = (huggingface.load_model(one) for one in (tmp_path / "made", directory))
    assert torch.equal(logits(made), logits(source))


def quantized(directory: Path) -> None:
    changed(directory / "config.json", quantization_config={"quant_method": "fp8"})


def adapted(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def of_nobody(directory: Path) -> None:
    changed(directory / "config.json", model_type="nobody")


def untrainable(directory: Path) -> None:
    changed(directory / "config.json", rope_parameters={"rope_type": "ntk", "rope_theta": 1.0})


def without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def without_tokens(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (quantized, "are quantized"),
        (adapted, "has adapters"),
        (pickled, r"has no \*.safetensors"),
        (of_nobody, "nobody"),
        (untrainable, "ntk"),
        (without_config, "config.json is missing"),
        (without_tokens, "tokenizer"),
    ],
)
def test_a_directory_that_cannot_be_taken_is_one_line_and_no_files(
    directory: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(directory)
    with pytest.raises(EngineError, match=said) as refused:
        convert(directory, tmp_path / "made")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_nothing_is_overwritten_and_no_source_is_one_line(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "folder", "link"):
        with pytest.raises(UsageError, match="exists: name a new directory"):
            convert(directory, tmp_path / name)
    with pytest.raises(UsageError, match="neither a GGUF file nor a model directory"):
        convert(tmp_path / "nowhere", tmp_path / "made")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot write"):
        convert(directory, tmp_path / "file" / "made")
    assert (tmp_path / "file").read_text() == "x"


def test_a_full_disk_leaves_nothing(directory: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match="cannot write"):
            convert(directory, tmp_path / "made")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert(directory, tmp_path / "made")
    shutil.rmtree(tmp_path / "made")
