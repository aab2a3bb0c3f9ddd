"""Chat messages to tokens and back."""

import json
from pathlib import Path

import pytest
from support.chat_model import (
    ASSISTANT,
    CHATML,
    COMPACT,
    END_OF_TEXT,
    FORGETFUL,
    IM_END,
    IM_START,
    SYSTEM,
    THINKING,
    TOOLED,
    UNDEFINED,
    USER,
    make_chat_model,
)
from tokenizers import Tokenizer, decoders, models

from primerl.node.environments.chat import DATE, ChatFormat, Transcript, dated
from primerl.node.environments.environment import EnvironmentFailed

HELLO = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]


def test_a_conversation_is_tokenised_by_the_models_own_template(tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path))
    assert chat.prompt(HELLO) == [SYSTEM, 115, IM_END, USER, 104, 105, IM_END, ASSISTANT]
    assert chat.stop_token_ids == (IM_END,)
    assert chat.reply("ok") == [111, 107, IM_END]


@pytest.mark.parametrize("last", [IM_END, 111])
def test_a_continuation_closes_the_reply_once_and_never_tokenises_it_again(
    tmp_path: Path, last: int
) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path, CHATML))
    opened = [IM_START, *b"user\nmore", IM_END, 10, IM_START, *b"assistant\n"]
    closed = [10, *opened] if last == IM_END else [IM_END, 10, *opened]
    assert chat.continuation([{"role": "user", "content": "more"}], last) == closed


@pytest.mark.parametrize(
    ("last", "earlier"), [("<|endoftext|>", "<|im_end|>"), ("<|im_end|>", "<|im_end|>"), ("", "")]
)
def test_a_reply_that_another_stop_token_ended_is_not_closed_again(
    tmp_path: Path, last: str, earlier: str
) -> None:
    """As gpt-oss's template closes the last reply by a token of its own; one without any is left alone."""
    template = COMPACT.replace(
        "<|im_end|>",
        "{% if m.role != 'assistant' %}<|im_end|>"
        f"{{% elif loop.last %}}{last}{{% else %}}{earlier}{{% endif %}}",
    )
    make_chat_model(tmp_path, template)
    ends = {"eos_token_id": [END_OF_TEXT, IM_END]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    chat = ChatFormat.load(tmp_path)
    more = [{"role": "user", "content": "m"}]
    opened = [USER, 109, IM_END, ASSISTANT]
    assert chat.continuation(more, END_OF_TEXT) == chat.continuation(more, IM_END) == opened
    assert chat.continuation(more, 111) == [*([IM_END] if earlier else []), *opened]


def test_variables_of_the_template_hold_for_prompts_and_continuations(tmp_path: Path) -> None:
    make_chat_model(tmp_path, THINKING)
    for value, thought in ((False, [120]), (True, [])):
        chat = ChatFormat.load(tmp_path, defaults={"enable_thinking": value})
        assert chat.prompt(HELLO)[-1 - len(thought) :] == [ASSISTANT, *thought]
        more = chat.continuation([{"role": "user", "content": "m"}], IM_END)
        assert more == [USER, 109, IM_END, ASSISTANT, *thought]
        assert chat.render(HELLO, options={"enable_thinking": False}).endswith("x")


@pytest.mark.parametrize("name", ["enable_thought", "messages", "bos_token"])
def test_variables_that_the_template_does_not_have_are_an_error(tmp_path: Path, name: str) -> None:
    make_chat_model(tmp_path, THINKING)
    with pytest.raises(EnvironmentFailed, match=f"uses enable_thinking, not {name}"):
        ChatFormat.load(tmp_path, defaults={name: False})


def test_a_replys_text_shows_everything_but_its_final_stop_token(tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path))
    assert chat.text([*"caf\u00e9".encode(), IM_END]) == "caf\u00e9"
    assert chat.text([97, IM_END, 98, IM_END]) == "a<|im_end|>b"
    assert chat.text([97, UNDEFINED, 98, IM_END]) == "a\ufffdb"
    assert chat.text([0xC3, 0x28]) == "\ufffd("
    assert chat.text([]) == ""


@pytest.mark.parametrize(
    ("thought", "prompt", "texts"),
    [
        (
            "<think>{}</think>",
            "",
            {"<think>a</think>\n\nb": "b", "b": "b", "<think>a": "", "a</think>b": "b"},
        ),
        ("<think>\n{}\n</think>\n\n", "<think>\n", {"a\n</think>\n\nb": "b", "a": ""}),
        (
            "[analysis]{}[end][final]",
            "",
            {"[analysis]a[end][final]b": "b", "[analysis]a": "", "b": "b"},
        ),
        ("", "", {"<think>a</think>b": "b", "<think>a": "", "b": "b"}),
    ],
)
def test_the_answer_of_a_reply_is_what_follows_its_reasoning_by_the_template_s_own_marks(
    tmp_path: Path, thought: str, prompt: str, texts: dict[str, str]
) -> None:
    written = thought.replace("{}", "{{ m.reasoning_content }}")
    template = COMPACT.replace(
        "{{ m.content or '' }}",
        "{% if m.reasoning_content %}" + written + "{% endif %}{{ m.content or '' }}",
    ).replace("<|assistant|>", "<|assistant|>" + prompt)
    chat = ChatFormat.load(make_chat_model(tmp_path, template))
    assert {text: chat.without_reasoning(text) for text in texts} == texts
    assert Transcript().without_reasoning("<think>a</think>\nb") == "b"


def test_parts_that_a_template_leaves_out_are_listed_by_name(tmp_path: Path) -> None:
    strict = TOOLED.replace("{{ t | tojson }}", "{{ t.function.parameters.properties | tojson }}")
    for template, left_out in (
        (COMPACT, ["reasoning", "schemas of tools", "calls"]),
        (TOOLED, ["reasoning"]),
        (strict, ["reasoning", "schemas of tools"]),  # without the names of tools
        (FORGETFUL, []),
        ("{% if messages[1] %}{{ raise_exception('one') }}{% endif %}" + COMPACT, "all"),
    ):
        found = ChatFormat.load(make_chat_model(tmp_path, template)).left_out()
        assert found == left_out or (left_out == "all" and len(found) == 6)


def test_all_end_tokens_count_as_stops(tmp_path: Path) -> None:
    make_chat_model(tmp_path)
    ends = {"eos_token_id": [END_OF_TEXT, IM_END]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    assert ChatFormat.load(tmp_path).stop_token_ids == (END_OF_TEXT, IM_END)


def test_a_template_may_stand_in_the_tokenizers_config(tmp_path: Path) -> None:
    make_chat_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = {"chat_template": [{"name": "default", "template": "{{ messages[1].content }}"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert ChatFormat.load(tmp_path).encode(ChatFormat.load(tmp_path).render(HELLO)) == [104, 105]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages", "does not compile"),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{% for i in range(999999999) %}{% endfor %}", "refuses"),
    ],
)
def test_a_template_that_is_broken_or_reaches_out_is_refused(
    tmp_path: Path, template: str, reason: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=reason):
        ChatFormat.load(make_chat_model(tmp_path, template)).prompt(HELLO)


def test_a_prompt_cannot_hold_todays_date(tmp_path: Path) -> None:
    template = "{{ strftime_now('%Y') if strftime_now is defined else 'fixed' }}"
    chat = ChatFormat.load(make_chat_model(tmp_path, template))
    assert chat.render(HELLO) == "fixed"


def test_a_template_that_writes_the_date_writes_the_given_one(tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %B %Y') }}" + COMPACT
    make_chat_model(tmp_path, template)
    assert dated({}, tmp_path, "2026-01-02") == {DATE: "2026-01-02"}
    assert dated({DATE: "2020-01-01"}, tmp_path, "2026-01-02") == {DATE: "2020-01-01"}
    chat = ChatFormat.load(tmp_path, defaults={DATE: "2026-01-02"})
    assert chat.render(HELLO).startswith("02 January 2026<|system|>s<|im_end|>")
    with pytest.raises(EnvironmentFailed, match=f"set {DATE} in environment.chat_template_kwargs"):
        ChatFormat.load(tmp_path).prompt(HELLO)
    with pytest.raises(EnvironmentFailed, match="give the date as"):
        ChatFormat.load(tmp_path, defaults={DATE: "tomorrow"})
    make_chat_model(tmp_path)
    assert dated({}, tmp_path, "2026-01-02") == {}
    with pytest.raises(EnvironmentFailed, match=f"uses nothing, not {DATE}"):
        ChatFormat.load(tmp_path, defaults={DATE: "2026-01-02"})


def test_marks_for_loss_masks_change_no_token(tmp_path: Path) -> None:
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    assert ChatFormat.load(make_chat_model(tmp_path, template)).prompt(HELLO[1:]) == [104, 105]


@pytest.mark.parametrize("missing", ["tokenizer.json", "chat_template.jinja"])
def test_an_incomplete_model_directory_is_named(tmp_path: Path, missing: str) -> None:
    make_chat_model(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(EnvironmentFailed, match=r"add|save"):
        ChatFormat.load(tmp_path)


def test_a_token_is_spelled_by_its_own_bytes_where_the_tokenizer_falls_back_to_bytes(
    tmp_path: Path,
) -> None:
    make_chat_model(tmp_path)
    words = [
        "<unk>",
        "<|im_end|>",
        "\u2581hi",
        "\ufffd",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chat = ChatFormat.load(tmp_path)
    assert [chat.spelled(4 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert (chat.spelled(2), chat.spelled(3)) == (b" hi", "\ufffd".encode())
    assert chat.spelled(9999) == "\ufffd".encode()
