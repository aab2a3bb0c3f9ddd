"""A table of directories: tokens, templates and ids are as transformers reads them, or the model is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_cases import SHAPE

from primerl.node.environments.chat import ChatFormat
from primerl.node.environments.environment import EnvironmentFailed
from primerl.node.errors import EngineError
from primerl.node.models import huggingface
from primerl.node.models.conversion import convert
from primerl.node.models.tokenizer_files import FILES, read_tokenizer_files

CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
SPOKEN = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if sep_token is defined %}{{ sep_token }}{% endif %}{{ image_token }}{{ boi_token }}"
)
OTHER = "other {{ messages[0].content }}"
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("base") / "model"
    huggingface.create(directory, SHAPE, 7)
    return directory


@pytest.fixture
def directory(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "model"))


def update(path: Path, **values: Any) -> None:
    held = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: value for name, value in {**held, **values}.items() if value is not ...}
    path.write_text(json.dumps(kept))


def config(**values: Any) -> Change:
    """Set keys of tokenizer_config.json, or remove those that are `...`."""
    return lambda directory: update(directory / "tokenizer_config.json", **values)


def in_map(**values: Any) -> Change:
    return lambda directory: update(directory / "special_tokens_map.json", **values)


def written(name: str, text: str) -> Change:
    def write(directory: Path) -> None:
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    return write


def without(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


SAYS = written("chat_template.jinja", SPOKEN)
TEMPLATES = [{"name": "default", "template": SPOKEN}, {"name": "tool_use", "template": OTHER}]
NO_FILE = without("chat_template.jinja")
TAKEN: dict[str, tuple[Change, ...]] = {
    "as it was made": (),
    "tokens of tokenizer_config.json": (SAYS, config(bos_token="<|im_start|>")),
    "a token that is an object": (
        SAYS,
        config(bos_token={"__type": "AddedToken", "content": "<|im_start|>", "special": True}),
    ),
    "tokens of special_tokens_map.json": (
        SAYS,
        config(eos_token=..., pad_token=...),
        in_map(bos_token="<|im_start|>", eos_token={"content": "<|im_end|>"}),
    ),
    "a map that says otherwise than the config": (
        SAYS,
        config(eos_token="<|endoftext|>"),
        in_map(eos_token="<|im_end|>"),
    ),
    "a map that is not read beside added_tokens_decoder": (
        SAYS,
        config(
            eos_token="<|im_end|>",
            added_tokens_decoder={"258": {"content": "<|im_end|>", "special": True}},
        ),
        in_map(eos_token="<|endoftext|>", bos_token="<|user|>"),
    ),
    "no token": (SAYS, config(pad_token=None)),
    "tokens of the model's own": (SAYS, config(image_token="<think>", sep_token="</think>")),
    "extra tokens by name": (SAYS, config(extra_special_tokens={"boi_token": "<think>"})),
    "extra tokens by name in the map": (
        SAYS,
        in_map(extra_special_tokens={"boi_token": "<think>"}),
    ),
    "a template in tokenizer_config.json": (NO_FILE, config(chat_template=SPOKEN)),
    "a template beside the config's": (SAYS, config(chat_template=OTHER)),
    "named templates": (NO_FILE, config(chat_template=TEMPLATES)),
    "a template beside the config's named ones": (SAYS, config(chat_template=TEMPLATES)),
    "a folder of templates beside the file": (
        SAYS,
        written("additional_chat_templates/tool_use.jinja", OTHER),
        written("additional_chat_templates/rag.jinja", "rag"),
    ),
    "a folder of templates with the default one": (
        NO_FILE,
        written("additional_chat_templates/default.jinja", SPOKEN),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_tokens_templates_and_ids_are_those_of_transformers(directory: Path, name: str) -> None:
    for change in TAKEN[name]:
        change(directory)
    assert huggingface.resolve(str(directory)) == directory
    theirs: Any = huggingface.load_tokenizer(directory)
    files = read_tokenizer_files(directory)
    held = theirs.chat_template
    assert files.templates == (held if isinstance(held, dict) else {"default": held})
    chat = ChatFormat.load(directory)
    text = theirs.apply_chat_template(CHAT, tokenize=False)
    assert chat.render(CHAT, generate=False) == text
    assert chat.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert theirs.eos_token_id in chat.stop_token_ids
    assert chat.stop_token_ids == huggingface.stop_token_ids(directory)
    assert not chat.options & files.special.keys()


@pytest.mark.parametrize("name", ["named templates", "a folder of templates beside the file"])
def test_a_template_for_tools_is_not_passed_over(directory: Path, name: str) -> None:
    for change in TAKEN[name]:
        change(directory)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}
    theirs: Any = huggingface.load_tokenizer(directory)
    assert theirs.apply_chat_template(CHAT, tools=[tool], tokenize=False) == "other ab"
    with pytest.raises(EnvironmentFailed, match=r"another chat template for tools \(tool_use\)"):
        ChatFormat.load(directory).prompt(CHAT[:1], [tool])


NO_DEFAULT: dict[str, tuple[Change, ...]] = {
    "named templates": (NO_FILE, config(chat_template=TEMPLATES[1:])),
    "a folder that stands in place of the config's": (
        NO_FILE,
        config(chat_template=SPOKEN),
        written("additional_chat_templates/tool_use.jinja", OTHER),
    ),
}


@pytest.mark.parametrize("name", NO_DEFAULT)
def test_templates_without_a_default_are_named(directory: Path, name: str) -> None:
    for change in NO_DEFAULT[name]:
        change(directory)
    theirs: Any = huggingface.load_tokenizer(directory)
    with pytest.raises(ValueError, match="no default specified"):
        theirs.apply_chat_template(CHAT, tokenize=False)
    with pytest.raises(EnvironmentFailed, match="no chat template but tool_use: add"):
        ChatFormat.load(directory)


def of_gpt2(directory: Path) -> None:
    """A class of transformers that cuts text in its own way, whatever tokenizer.json says."""
    update(directory / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    spaces = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "use_regex": False,
        "trim_offsets": True,
    }
    cut = {"type": "Sequence", "pretokenizers": [spaces, level]}
    update(directory / "tokenizer.json", pre_tokenizer=cut)


def no_text(directory: Path) -> None:
    (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")


REFUSED: dict[str, tuple[tuple[Change, ...], str]] = {
    "an end that tokenizer.json lacks": (
        (config(eos_token="<end>"),),
        r"transformers reads 1 tokens, as '<end>',",
    ),
    "a token in added_tokens.json alone": (
        (written("added_tokens.json", '{"<more>": 271}'),),
        r"reads .* as '<more>'",
    ),
    "a class that reads text otherwise": ((of_gpt2,), "transformers reads 'Hello,  World!"),
    "a template that is a number": ((NO_FILE, config(chat_template=5)), "tokenizer"),
    "templates without names": ((NO_FILE, config(chat_template=[{"x": "y"}])), "tokenizer"),
    "a template that is no text": ((no_text,), "the tokenizer of .* cannot be loaded"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_read_otherwise_is_refused_in_one_line(directory: Path, name: str) -> None:
    changes, said = REFUSED[name]
    for change in changes:
        change(directory)
    with pytest.raises(EngineError, match=said) as refused:
        huggingface.resolve(str(directory))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["a token in added_tokens.json alone", "a class that reads text otherwise"]
)
def test_import_writes_a_tokenizer_as_transformers_has_it(
    directory: Path, tmp_path: Path, name: str
) -> None:
    for change in REFUSED[name][0]:
        change(directory)
    theirs: Any = huggingface.load_tokenizer(directory)
    convert(directory, tmp_path / "made")
    made = huggingface.resolve(str(tmp_path / "made"))
    text = theirs.apply_chat_template(CHAT, tokenize=False) + "<more>  x<|im_end|>"
    assert ChatFormat.load(made).encode(text) == theirs(text, add_special_tokens=False).input_ids


def test_a_directory_with_a_vocabulary_and_merges_alone_is_imported(
    directory: Path, tmp_path: Path
) -> None:
    path = directory / "tokenizer.json"
    held = json.loads(path.read_text())
    path.unlink()
    (directory / "vocab.json").write_text(json.dumps(held["model"]["vocab"]))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    added = {str(token.pop("id")): token for token in held["added_tokens"]}
    config(tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=added)(directory)
    with pytest.raises(EnvironmentFailed, match=r"has no tokenizer\.json: .* model import"):
        ChatFormat.load(directory)
    theirs: Any = huggingface.load_tokenizer(directory)
    convert(directory, tmp_path / "made")
    text = theirs.apply_chat_template(CHAT, tokenize=False) + "\u00e9 x 12"
    made = ChatFormat.load(huggingface.resolve(str(tmp_path / "made")))
    assert made.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert made.stop_token_ids == (258,)


def test_a_head_of_its_own_under_a_config_that_ties_it_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    own = load_file(path)
    embedding = own["model.embed_tokens.weight"]
    save_file({**own, "lm_head.weight": embedding.clone()}, path, metadata={"format": "pt"})
    huggingface.resolve(str(directory))  # the same twice
    save_file({**own, "lm_head.weight": embedding + 1}, path, metadata={"format": "pt"})
    with pytest.raises(EngineError, match="has a head of its own"):
        huggingface.resolve(str(directory))
    update(directory / "config.json", tie_word_embeddings=False)
    huggingface.resolve(str(directory))


def test_the_files_that_are_read_are_shown_to_environments() -> None:
    from primerl.node.environments.chat import CHAT_FILES

    assert set(FILES) < set(CHAT_FILES)
