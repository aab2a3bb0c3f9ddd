from pathlib import Path

import pytest
from support.sft_cases import REPLIES, WEATHER, qwen_chat, trained_texts
from support.training_cases import make_model

from primerl.node.environments.chat import ChatFormat
from primerl.node.ops.errors import UsageError
from primerl.node.sft.rows import BadRow, Conversation, RawText
from primerl.node.sft.tokens import RendererTokenizer, TemplateTokenizer, open_renderer

ASSISTANT = frozenset({"assistant"})
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
ONE_CYCLE = Conversation(
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rome or Oslo?"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I need the weather.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Rome.", "reasoning_content": "Sun is better."},
    ],
    [True] * 5,
    [WEATHER],
)
LATER = Conversation(
    [
        *ONE_CYCLE.messages,
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome!", "reasoning_content": "Polite."},
    ],
    [True] * 7,
    [WEATHER],
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chat(model_dir: Path) -> ChatFormat:
    return ChatFormat.load(model_dir)


def tokenizer(model_dir: Path, chat: ChatFormat, roles: frozenset[str]) -> RendererTokenizer:
    renderer = open_renderer("qwen3", "tiny", model_dir)
    assert renderer is not None
    return RendererTokenizer(renderer, chat, roles)


def test_a_renderer_trains_what_the_model_says(model_dir: Path, chat: ChatFormat) -> None:
    tokens = tokenizer(model_dir, chat, ASSISTANT).tokens(ONE_CYCLE)
    assert trained_texts(chat, tokens) == REPLIES[:2]
    assert "Rome or Oslo?" in chat.text(tokens.token_ids)


def test_a_renderer_trains_the_text_of_other_roles(model_dir: Path, chat: ChatFormat) -> None:
    tokens = tokenizer(model_dir, chat, frozenset({"assistant", "tool"})).tokens(ONE_CYCLE)
    assert trained_texts(chat, tokens) == [REPLIES[0], "sunny", REPLIES[1]]
    only = tokenizer(model_dir, chat, frozenset({"tool"})).tokens(ONE_CYCLE)
    assert trained_texts(chat, only) == ["sunny"]


def test_context_is_not_trained(model_dir: Path, chat: ChatFormat) -> None:
    row = Conversation(ONE_CYCLE.messages, [False] * 4 + [True], ONE_CYCLE.tools)
    tokens = tokenizer(model_dir, chat, ASSISTANT).tokens(row)
    assert trained_texts(chat, tokens) == [REPLIES[1]]


def test_reasoning_that_a_renderer_drops_is_noticed(
    model_dir: Path, chat: ChatFormat, tmp_path: Path
) -> None:
    with pytest.raises(BadRow, match="template"):
        tokenizer(model_dir, chat, ASSISTANT).tokens(LATER)
    kept = qwen_chat(tmp_path / "chat")
    tokens = TemplateTokenizer(kept, ASSISTANT).tokens(LATER)
    assert all("<think>" in text for text in trained_texts(kept, tokens))


def test_a_row_that_a_renderer_refuses_is_bad(model_dir: Path, chat: ChatFormat) -> None:
    with pytest.raises(BadRow, match="refuses"):
        tokenizer(model_dir, chat, ASSISTANT).tokens(Conversation([], [], None))


def test_raw_text_needs_no_renderer(model_dir: Path, chat: ChatFormat) -> None:
    row = RawText("a", "b")
    plain = TemplateTokenizer(chat, ASSISTANT).tokens(row)
    assert tokenizer(model_dir, chat, ASSISTANT).tokens(row) == plain


def test_auto_knows_models_by_their_name_only(model_dir: Path) -> None:
    assert open_renderer("auto", "Qwen/Qwen3-0.6B", model_dir) is not None
    assert open_renderer("auto", "some/fine-tune", model_dir) is None


@pytest.mark.parametrize("name", ["nonsense", "default", "custom", "llama-3"])
def test_a_renderer_that_does_not_fit_is_refused(name: str, model_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.renderer"):
        open_renderer(name, "tiny", model_dir)
