import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.chat_model import (
    BESIDE_LAST,
    CHATML,
    COMPACT,
    END_OF_TEXT,
    IM_END,
    TWO_ENDS,
    make_chat_model,
)
from support.sft_cases import QWEN, REPLIES, TALK, WEATHER, qwen_chat, trained_texts
from support.training_cases import make_model
from tokenizers import Tokenizer

from primerl.node.environments.chat import ChatFormat
from primerl.node.errors import UsageError
from primerl.node.sft.rows import BadRow, Conversation, LostPart, RawText
from primerl.node.sft.tokens import RendererTokenizer, TemplateTokenizer, open_renderer

ASSISTANT = frozenset({"assistant"})


def talk(messages: list[dict[str, Any]], **more: Any) -> Conversation:
    return Conversation(messages, more.pop("trained", [True] * len(messages)), **more)


@pytest.fixture
def chat(tmp_path: Path) -> ChatFormat:
    return qwen_chat(tmp_path / "model")


def test_the_trained_tokens_are_what_the_model_says_and_its_stop_tokens(chat: ChatFormat) -> None:
    row = talk(parsed(), tools=[WEATHER])
    tokens = TemplateTokenizer(chat, ASSISTANT).tokens(row)
    assert trained_texts(chat, tokens) == REPLIES
    text = chat.text(tokens.token_ids)
    for word in ("Be brief.", '"weather"', "Rome or Oslo?", "sunny", "Thanks"):
        assert word in text


def parsed() -> list[dict[str, Any]]:
    """TALK as rows.py gives it: arguments as an object."""
    messages = [dict(message) for message in TALK]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages[2]["tool_calls"] = [call]
    return messages


def test_the_tokens_are_those_of_a_rollout_turn_by_turn(chat: ChatFormat) -> None:
    """Prompt, reply as sampled, continuation: as environments make them of the same conversation."""
    messages = [message for message in parsed() if "tool_calls" not in message]
    messages = [message for message in messages if message["role"] != "tool"]
    tokens = TemplateTokenizer(chat, ASSISTANT).tokens(talk(messages))
    rollout = [*chat.prompt(messages[:2]), *chat.reply(REPLIES[1].removesuffix("<|im_end|>"))]
    rollout += chat.continuation([messages[3]], rollout[-1])
    rollout += chat.reply("Welcome!")
    assert tokens.token_ids == rollout


@pytest.mark.parametrize("template", [COMPACT, CHATML])
def test_one_turn_equals_prompt_and_reply(template: str, tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", template))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y z"}]
    tokens = TemplateTokenizer(chat, ASSISTANT).tokens(talk(messages))
    prompt, reply = chat.prompt(messages[:1]), chat.reply("y z")
    assert tokens.token_ids == prompt + reply
    assert tokens.mask == [False] * len(prompt) + [True] * len(reply)
    assert tokens.token_ids[-1] == IM_END


def test_what_is_not_trained_is_context(chat: ChatFormat) -> None:
    trained = [False] * 4 + [True] * 3
    tokens = TemplateTokenizer(chat, ASSISTANT).tokens(
        talk(parsed(), tools=[WEATHER], trained=trained)
    )
    assert trained_texts(chat, tokens) == REPLIES[1:]
    whole = TemplateTokenizer(chat, ASSISTANT).tokens(talk(parsed(), tools=[WEATHER]))
    assert tokens.token_ids == whole.token_ids


def test_of_other_roles_the_text_alone_is_trained(chat: ChatFormat) -> None:
    roles = frozenset({"tool", "user", "system"})
    messages = [*parsed(), {"role": "user", "content": "user"}]  # a word that the template has, too
    tokens = TemplateTokenizer(chat, roles).tokens(talk(messages, tools=[WEATHER]))
    said = ["Be brief.", "Rome or Oslo?", "sunny", "Thanks", "user"]
    assert trained_texts(chat, tokens) == said


def test_roles_add_up(chat: ChatFormat) -> None:
    tokens = TemplateTokenizer(chat, frozenset({"assistant", "tool"})).tokens(
        talk(parsed(), tools=[WEATHER])
    )
    assert trained_texts(chat, tokens) == [REPLIES[0], "sunny", *REPLIES[1:]]


def test_what_comes_after_the_last_reply_is_left_out(chat: ChatFormat) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = TemplateTokenizer(chat, ASSISTANT)
    longer = talk([*messages, {"role": "user", "content": "never answered"}])
    assert tokenizer.tokens(longer) == tokenizer.tokens(talk(messages))


def test_raw_text_has_no_template(chat: ChatFormat) -> None:
    tokens = TemplateTokenizer(chat, ASSISTANT).tokens(RawText("ab", "cd"))
    assert tokens.token_ids == [*b"abcd", IM_END]
    assert tokens.mask == [False, False, True, True, True]
    exported = RawText("ab", "cd<|im_end|>")  # by `primerl-node rollouts --export`
    assert TemplateTokenizer(chat, ASSISTANT).tokens(exported) == tokens


def test_a_stop_token_inside_a_reply_is_refused(chat: ChatFormat) -> None:
    """Whoever writes one into a data set would teach the model to go on after its own end."""
    for text in ("a<|im_end|>b", "<|im_end|>"):
        row = talk([{"role": "user", "content": "a"}, {"role": "assistant", "content": text}])
        with pytest.raises(BadRow, match="stop token"):
            TemplateTokenizer(chat, ASSISTANT).tokens(row)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({"reasoning_content": "hm"}, "reasoning_content"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, "tool call"),
    ],
)
def test_nothing_is_lost_unseen(message: dict[str, Any], what: str, tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", COMPACT))  # which knows neither
    reply = {"role": "assistant", "content": "b", **message}
    with pytest.raises(BadRow, match=f"leaves out .*{what}"):
        TemplateTokenizer(chat, ASSISTANT).tokens(talk([{"role": "user", "content": "a"}, reply]))


def test_tools_that_the_template_leaves_out_are_noticed(tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", COMPACT))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(BadRow, match="'weather'"):
        TemplateTokenizer(chat, ASSISTANT).tokens(talk(messages, tools=[WEATHER]))


def test_a_template_that_rewrites_what_is_learned_is_refused(tmp_path: Path) -> None:
    loud = COMPACT.replace("m.content or ''", "m.content | upper")
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", loud))
    row = talk([{"role": "user", "content": "abc"}, {"role": "assistant", "content": "B"}])
    with pytest.raises(BadRow, match="loss_roles"):
        TemplateTokenizer(chat, frozenset({"user"})).tokens(row)
    assert TemplateTokenizer(chat, ASSISTANT).tokens(row).token_ids[-2:] == [ord("B"), IM_END]


def test_a_template_whose_replies_begin_otherwise_is_refused(tmp_path: Path) -> None:
    odd = COMPACT.replace("<|assistant|>{%- endif -%}", "<|assistant|>Sure: {%- endif -%}")
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", odd))
    row = talk([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(BadRow, match=r"data\.renderer"):
        TemplateTokenizer(chat, ASSISTANT).tokens(row)


def test_a_template_that_closes_no_reply_gets_a_stop_token(tmp_path: Path) -> None:
    open_end = COMPACT.replace("<|im_end|>", "{% if m.role != 'assistant' %}<|im_end|>{% endif %}")
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", open_end))
    row = talk([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    tokens = TemplateTokenizer(chat, ASSISTANT).tokens(row)
    assert tokens.token_ids[-2:] == [ord("b"), IM_END]
    assert tokens.mask[-2:] == [True, True]


def test_two_replies_in_a_row_are_both_trained(chat: ChatFormat) -> None:
    reply = {"role": "assistant", "content": "b"}
    row = talk([{"role": "user", "content": "a"}, reply, reply])
    assert (
        trained_texts(chat, TemplateTokenizer(chat, ASSISTANT).tokens(row)) == ["b<|im_end|>"] * 2
    )


def test_a_row_without_a_reply_is_refused(chat: ChatFormat) -> None:
    with pytest.raises(BadRow, match="assistant"):
        TemplateTokenizer(chat, ASSISTANT).tokens(talk([{"role": "user", "content": "a"}]))


def test_a_reply_ends_at_its_first_stop_where_the_template_writes_two(tmp_path: Path) -> None:
    two_ends = make_chat_model(tmp_path / "m", TWO_ENDS)
    ends = {"eos_token_id": [IM_END, END_OF_TEXT]}
    (two_ends / "generation_config.json").write_text(json.dumps(ends))
    chat = ChatFormat.load(two_ends)
    user, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    tokens = TemplateTokenizer(chat, ASSISTANT).tokens(talk([user, reply, user, reply]))
    assert trained_texts(chat, tokens) == ["b<|im_end|>", "b<|im_end|>"]
    assert END_OF_TEXT not in tokens.token_ids
    for text in ("b<|im_end|>", "b<|endoftext|>c"):
        row = talk([user, {"role": "assistant", "content": text}])
        with pytest.raises(BadRow, match="stop token"):
            TemplateTokenizer(chat, ASSISTANT).tokens(row)


def test_a_system_message_that_only_the_last_user_message_has_beside_it_is_named(
    tmp_path: Path,
) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", BESIDE_LAST))
    system = {"role": "system", "content": "s"}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(BadRow, match="put its text into the first user message"):
        TemplateTokenizer(chat, ASSISTANT).tokens(talk([system, *messages]))
    assert trained_texts(chat, TemplateTokenizer(chat, ASSISTANT).tokens(talk(messages))) == [
        "b<|im_end|>"
    ]


def test_a_template_that_takes_no_system_message_says_what_to_do(tmp_path: Path) -> None:
    strict = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + QWEN
    )
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", strict))
    row = talk([*TALK[:2], {"role": "assistant", "content": "b"}])
    with pytest.raises(
        BadRow, match=r"no system\): it takes no system message there: put that text into"
    ):
        TemplateTokenizer(chat, ASSISTANT).tokens(row)


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ("\n{{ m.content }}\n</tool_response>", "\n</tool_response>", "leaves out a tool's result"),
        ("{{ m.reasoning_content }}", "", "leaves out a reply's reasoning_content"),
        ("{{ call.function.name }}", "", "leaves out the tool call 'weather'"),
        ("{{ call.function.arguments | tojson }}", "{}", "leaves out an argument of the tool call"),
        ("{{ tool | tojson }}", "", r"leaves out the schema of a tool \('weather'\)"),
        ("{{ messages[0].content + '\\n\\n' }}", "", "leaves out the system message"),
        (
            "{{ m.content }}\n</tool",
            "{{ m.content }}{{ m.content }}\n</tool",
            "shows a tool's result 2 times",
        ),
    ],
)
def test_a_part_that_the_template_loses_or_repeats_is_named(
    tmp_path: Path, old: str, new: str, lost: str
) -> None:
    assert old in QWEN
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", QWEN.replace(old, new)))
    with pytest.raises(LostPart, match=lost):
        TemplateTokenizer(chat, ASSISTANT).tokens(talk(parsed(), tools=[WEATHER]))


def test_a_template_that_takes_arguments_as_text_gets_them_so(tmp_path: Path) -> None:
    for text in ("{{ '' + call.function.arguments }}", "{{ call.function.arguments }}"):
        template = QWEN.replace("{{ call.function.arguments | tojson }}", text)
        chat = ChatFormat.load(make_chat_model(tmp_path / "m", template))
        assert chat.call_form == "hermes"
        tokens = TemplateTokenizer(chat, ASSISTANT).tokens(talk(parsed(), tools=[WEATHER]))
        assert trained_texts(chat, tokens) == REPLIES


def test_a_template_that_reads_thinking_is_given_the_reasoning(tmp_path: Path) -> None:
    template = QWEN.replace("m.reasoning_content", "m.thinking")
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", template))
    tokens = TemplateTokenizer(chat, ASSISTANT).tokens(talk(parsed(), tools=[WEATHER]))
    assert trained_texts(chat, tokens) == REPLIES


def test_a_template_that_fails_costs_the_row(tmp_path: Path) -> None:
    strict = "{{ raise_exception('no tools here') }}" + QWEN
    chat = ChatFormat.load(make_chat_model(tmp_path / "m", strict))
    row = talk([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(BadRow, match="no tools here"):
        TemplateTokenizer(chat, ASSISTANT).tokens(row)


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
def own_chat(model_dir: Path) -> ChatFormat:
    """The chat format of `model_dir`."""
    return ChatFormat.load(model_dir)


def tokenizer(model_dir: Path, own_chat: ChatFormat, roles: frozenset[str]) -> RendererTokenizer:
    renderer = open_renderer("qwen3", "tiny", model_dir)
    assert renderer is not None
    return RendererTokenizer(renderer, own_chat, roles)


def test_a_renderer_that_prompts_otherwise_than_the_template_is_named(
    model_dir: Path, own_chat: ChatFormat, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer(model_dir, own_chat, ASSISTANT)
    assert (
        "and the chat template, by which the model is run and served, by '<|user|>a" in caplog.text
    )
    caplog.clear()
    alike = Path(shutil.copytree(model_dir, tmp_path / "alike"))
    (alike / "chat_template.jinja").write_text(CHATML)
    tokenizer(alike, ChatFormat.load(alike), ASSISTANT)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("name", "thinks"), [("Qwen/Qwen3.5-0.8B", False), ("Qwen/Qwen3.5-4B", True)]
)
def test_a_renderer_knows_the_model_whose_files_lie_in_a_directory(
    model_dir: Path, tmp_path: Path, name: str, thinks: bool
) -> None:
    directory = Path(shutil.copytree(model_dir, tmp_path / "m"))
    tokens = Tokenizer.from_file(str(directory / "tokenizer.json"))
    vision = ("vision_start", "vision_end", "image_pad", "video_pad")
    tokens.add_special_tokens([f"<|{it}|>" for it in vision])
    tokens.save(str(directory / "tokenizer.json"))
    renderer: Any = open_renderer("auto", name, directory)
    assert renderer.config.enable_thinking is thinks


def test_a_renderer_trains_what_the_model_says(model_dir: Path, own_chat: ChatFormat) -> None:
    tokens = tokenizer(model_dir, own_chat, ASSISTANT).tokens(ONE_CYCLE)
    assert trained_texts(own_chat, tokens) == REPLIES[:2]
    assert "Rome or Oslo?" in own_chat.text(tokens.token_ids)


def test_a_renderer_trains_the_text_of_other_roles(model_dir: Path, own_chat: ChatFormat) -> None:
    tokens = tokenizer(model_dir, own_chat, frozenset({"assistant", "tool"})).tokens(ONE_CYCLE)
    assert trained_texts(own_chat, tokens) == [REPLIES[0], "sunny", REPLIES[1]]
    only = tokenizer(model_dir, own_chat, frozenset({"tool"})).tokens(ONE_CYCLE)
    assert trained_texts(own_chat, only) == ["sunny"]


def test_context_is_not_trained(model_dir: Path, own_chat: ChatFormat) -> None:
    row = Conversation(ONE_CYCLE.messages, [False] * 4 + [True], ONE_CYCLE.tools)
    tokens = tokenizer(model_dir, own_chat, ASSISTANT).tokens(row)
    assert trained_texts(own_chat, tokens) == [REPLIES[1]]


def test_reasoning_that_a_renderer_drops_is_noticed(
    model_dir: Path, own_chat: ChatFormat, tmp_path: Path
) -> None:
    with pytest.raises(BadRow, match="template"):
        tokenizer(model_dir, own_chat, ASSISTANT).tokens(LATER)
    kept = qwen_chat(tmp_path / "chat")
    tokens = TemplateTokenizer(kept, ASSISTANT).tokens(LATER)
    assert all("<think>" in text for text in trained_texts(kept, tokens))


def test_a_row_that_a_renderer_refuses_is_bad(model_dir: Path, own_chat: ChatFormat) -> None:
    with pytest.raises(BadRow, match="refuses"):
        tokenizer(model_dir, own_chat, ASSISTANT).tokens(Conversation([], [], None))


def test_raw_text_needs_no_renderer(model_dir: Path, own_chat: ChatFormat) -> None:
    row = RawText("a", "b")
    plain = TemplateTokenizer(own_chat, ASSISTANT).tokens(row)
    assert tokenizer(model_dir, own_chat, ASSISTANT).tokens(row) == plain


def test_auto_knows_models_by_their_name_only(model_dir: Path) -> None:
    assert open_renderer("auto", "Qwen/Qwen3-0.6B", model_dir) is not None
    assert open_renderer("auto", "some/fine-tune", model_dir) is None


@pytest.mark.parametrize("name", ["nonsense", "default", "custom", "llama-3"])
def test_a_renderer_that_does_not_fit_is_refused(name: str, model_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.renderer"):
        open_renderer(name, "tiny", model_dir)
