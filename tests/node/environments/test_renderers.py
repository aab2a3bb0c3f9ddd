"""Prompts and continuations by published chat templates, token by token those of the renderers package.

The templates are those that TRL ships with. Tokenizers are small, with the families' own control tokens.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from primerl.node.environments.chat import DATE, ChatFormat, dated
from primerl.node.models import huggingface

TRL = find_spec("trl")
TEMPLATES = Path(TRL.origin or "").parent / "chat_templates" if TRL else Path()
DOCS = Path(__file__).parents[3] / "docs" / "models.md"
NEEDS_TRL = pytest.mark.skipif(
    TRL is None, reason="TRL, whose chat templates are read, is not installed"
)
FALLBACK = "2024-07-26"
"""Date that Llama 3.2's template and its renderer write where they are given none."""
DEEPSEEK = "<\uff5c{}\u2581of\u2581sentence\uff5c>"


@dataclass(frozen=True)
class Family:
    """A family of renderers, with templates of its models."""

    templates: tuple[str, ...]
    end: str
    """Token that ends a reply."""
    call_end: str = ""
    """Token that ends a reply with a call, if it is another one."""
    other_end: str = ""
    """Token that ends a reply, too, and that the template does not write."""
    begin: str = ""
    thought: str = ""
    """What a reply begins with where the prompt does not open reasoning."""
    tools: bool = True
    config: dict[str, Any] = field(default_factory=dict[str, Any])


FAMILIES = {
    "deepseek-r1": Family(
        ("deepseek_r1_distill",),
        DEEPSEEK.format("end"),
        begin=DEEPSEEK.format("begin"),
        tools=False,
    ),
    "gemma4": Family(("gemma4", "gemma4_v5"), "<turn|>", "<|tool_response>", begin="<bos>"),
    "glm-4.5": Family(("glm4moe",), "<|user|>", "<|observation|>", thought="<think></think>\n"),
    "llama-3": Family(("llama3_1", "llama3_2"), "<|eot_id|>", begin="<|begin_of_text|>"),
    "nemotron-3": Family(("nemotron_3_nano", "nemotron_3_super"), "<|im_end|>"),
    "nemotron-3-ultra": Family(("nemotron_3_ultra",), "<|im_end|>"),
    "nemotron-3.5": Family(("nemotron_3_5_lightning",), "<|im_end|>"),
    "qwen3": Family(("qwen3",), "<|im_end|>", other_end="<|endoftext|>"),
    "qwen3-vl": Family(("qwen3_vl",), "<|im_end|>", other_end="<|endoftext|>"),
    "qwen3.5": Family(("qwen3_5_think",), "<|im_end|>", other_end="<|endoftext|>"),
    "qwen3.6": Family(("qwen3_6",), "<|im_end|>", other_end="<|endoftext|>"),
    "qwen3.8": Family(("qwen3_8",), "<|im_end|>", other_end="<|endoftext|>"),
}
UNCOMPARED = {"gpt-oss": "the renderer downloads its vocabulary"}
OPAQUE = frozenset({"default", "auto", "custom"})
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Rome or Oslo?"}
REPLY = {"role": "assistant", "content": "Rome."}
THOUGHT = {**REPLY, "reasoning_content": "Sun is better."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Rome"}},
        }
    ],
}
THOUGHT_CALL = {**CALL, "reasoning_content": "I need the weather."}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "call_0", "name": "weather"}
MORE = {"role": "user", "content": "Why?\n"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Say the weather.", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
Conversation = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
COLUMNS: dict[str, list[Conversation]] = {
    "single turn": [([USER], None), ([SYSTEM, USER], None)],
    "several turns": [([SYSTEM, USER, REPLY, MORE], None)],
    "tools": [
        ([SYSTEM, USER], TOOLS),
        ([USER, CALL, RESULT], TOOLS),
        ([SYSTEM, USER, CALL, RESULT, REPLY, MORE], TOOLS),
    ],
    "thinking": [([USER, THOUGHT, MORE], None), ([USER, THOUGHT_CALL, RESULT], TOOLS)],
}
CONTINUED = "continuations"


class Opened:
    """A template with a tokenizer that has its control tokens, and the renderer of its family."""

    def __init__(self, name: str, template: str, directory: Path, base: str) -> None:
        from renderers import create_renderer
        from renderers.configs import config_from_name

        self.family = FAMILIES[name]
        kind: Any = type(config_from_name(name))
        text = (TEMPLATES / f"{template}.jinja").read_text()
        tokens = {self.family.end, self.family.call_end, self.family.begin, "<|endoftext|>"} - {""}
        tokens |= set(re.findall(r"\[gMASK\]|<\|?/?[\w\u2581\uff5c|:]+\|?>", text))
        while True:  # a renderer says which token it lacks
            self._write(directory, text, tokens, base)
            tokenizer: Any = huggingface.load_tokenizer(directory)
            try:
                self.renderer: Any = create_renderer(tokenizer, kind())
                self.keeping: Any = create_renderer(tokenizer, kind(thinking_retention="all"))
                break
            except (AssertionError, ValueError) as error:
                (missing,) = re.findall(r"'(<[^']+>|\[[^']+\])'", str(error))
                assert missing not in tokens
                tokens.add(missing)
        self.chat = ChatFormat.load(directory, defaults=dated({}, directory, FALLBACK))

    def _write(self, directory: Path, text: str, tokens: set[str], base: str) -> None:
        tokenizer = Tokenizer.from_str(base)
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in sorted(tokens)]
        )
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.family.end}
        if self.family.begin:
            settings["bos_token"] = self.family.begin
        named = (self.family.end, self.family.call_end, self.family.other_end)
        ends = [token for token in named if token]
        stops = {"eos_token_id": [tokenizer.token_to_id(token) for token in ends]}
        for file, value in (("tokenizer_config", settings), ("generation_config", stops)):
            (directory / f"{file}.json").write_text(json.dumps(value))
        (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        (directory / "chat_template.jinja").write_text(text)

    def unequal(self, column: str) -> list[tuple[str, str]]:
        """List what differs in a column of the table: (ours, the renderer's) as text."""
        pairs = self._continued() if column == CONTINUED else self._prompts(column)
        return [
            (self.chat.shown(ours, special=True), self.chat.shown(theirs, special=True))
            for ours, theirs in pairs
            if ours != theirs
        ]

    def _prompts(self, column: str) -> Iterator[tuple[list[int], list[int]]]:
        for messages, tools in COLUMNS[column]:
            if tools and not self.family.tools:
                continue
            theirs = self.renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            yield self.chat.prompt(messages, tools or ()), theirs

    def _continued(self) -> Iterator[tuple[list[int], list[int]]]:
        """Continue replies, whose tokens and reasoning stay as they were sampled."""
        cases: list[tuple[str, dict[str, Any], list[Any]]] = [(self.family.end, MORE, [])]
        if self.family.other_end:
            cases.append((self.family.other_end, MORE, []))
        if self.family.tools:
            cases.append((self.family.call_end or self.family.end, RESULT, TOOLS))
        for end, message, tools in cases:
            chat = self.chat
            prompt = chat.prompt([USER], tools)
            opened = chat.shown(prompt, special=True).endswith("<think>\n")
            thought = "so\n</think>\n\n" if opened else self.family.thought
            stop = next(it for it in chat.stop_token_ids if chat.shown([it], special=True) == end)
            reply = [*chat.encode(f"{thought}Rome."), stop]
            bridged = self.keeping.bridge_to_next_turn(
                prompt, reply, [message], tools=tools or None
            )
            assert bridged is not None
            yield [*prompt, *reply, *chat.continuation([message], stop)], bridged.token_ids


def train_tokenizer() -> str:
    """Train a tokenizer whose words end at the borders that Qwen's and Llama's have; as JSON."""
    tokenizer = Tokenizer(models.BPE())
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()


@pytest.fixture(scope="module")
def base() -> str:
    return train_tokenizer()


CASES = [(name, template) for name, it in FAMILIES.items() for template in it.templates]
Differences = dict[tuple[str, str], dict[str, list[tuple[str, str]]]]
"""Of a family and a template, by column."""


def compare(directory: Path, base: str) -> Differences:
    found: Differences = {}
    for name, template in CASES:
        opened = Opened(name, template, directory / template, base)
        columns = (*COLUMNS, CONTINUED)
        found[name, template] = {column: opened.unequal(column) for column in columns}
    return found


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory, base: str) -> Differences:
    return compare(tmp_path_factory.mktemp("models"), base)


@NEEDS_TRL
@pytest.mark.parametrize(("name", "template"), CASES, ids=lambda it: it)
def test_every_token_of_a_family_is_that_of_its_renderer(
    name: str, template: str, differences: Differences
) -> None:
    assert not any(differences[name, template].values()), differences[name, template]


@NEEDS_TRL
def test_a_difference_of_one_token_is_noticed(tmp_path: Path, base: str) -> None:
    opened = Opened("qwen3", "qwen3", tmp_path, base)
    template = tmp_path / "chat_template.jinja"
    template.write_text(template.read_text().replace("<think>", "<think> "))
    opened.chat = ChatFormat.load(tmp_path)
    assert opened.unequal("single turn") == []
    assert opened.unequal("thinking") != []


@NEEDS_TRL
def test_a_date_that_the_renderer_does_not_write_is_noticed(tmp_path: Path, base: str) -> None:
    opened = Opened("llama-3", "llama3_2", tmp_path, base)
    opened.chat = ChatFormat.load(tmp_path, defaults={DATE: "2026-01-02"})
    ((ours, theirs), _) = opened.unequal("single turn")
    assert (ours.count("02 Jan 2026"), theirs.count("26 Jul 2024")) == (1, 1)


def table(differences: Differences) -> str:
    """Make the table of docs/models.md: a row for each renderer that the package has."""
    from renderers.base import MODEL_RENDERER_MAP

    columns = [*COLUMNS, CONTINUED]
    rows = [f"| renderer | {' | '.join(columns)} | templates |", "|---" * (len(columns) + 2) + "|"]
    for name in sorted({*MODEL_RENDERER_MAP.values()} - OPAQUE):
        family = FAMILIES.get(name)
        if family is None:
            why = UNCOMPARED.get(name, "none in TRL")
            rows.append(f"| `{name}` | {' | '.join(['-'] * len(columns))} | {why} |")
            continue
        found = [differences[name, template] for template in family.templates]
        cells = [_cell(family, column, [one[column] for one in found]) for column in columns]
        shown = ", ".join(f"`{it}`" for it in family.templates)
        rows.append(f"| `{name}` | {' | '.join(cells)} | {shown} |")
    return "\n".join(rows)


def _cell(family: Family, column: str, differences: Sequence[list[tuple[str, str]]]) -> str:
    if any(differences):
        return "differ"
    return "has none" if column == "tools" and not family.tools else "equal"


@NEEDS_TRL
def test_the_table_in_the_docs_is_what_was_compared(differences: Differences) -> None:
    shown = f"print it: python {Path(__file__).name}, in this folder"
    assert table(differences) in DOCS.read_text(), shown


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdout.write(table(compare(Path(scratch), train_tokenizer())) + "\n")
