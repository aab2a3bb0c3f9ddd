"""Which reader of replies a model gets: by what it is told, by its name, by its template."""

from itertools import pairwise
from pathlib import Path

import pytest
from api_cases import chat_dir
from tool_cases import CALL, TEMPLATE, WEATHER, ids_of, tool_dir

from primerl.node.api.rendered import form_of, open_reader
from primerl.node.api.replies import Call, Reader, Telling
from primerl.node.environments.chat import ChatFormat
from primerl.node.errors import UsageError

JSON_CALL = '<tool_call>{"name": "{{ c.function.name }}"'
FORMS = {
    "qwen3": TEMPLATE,
    "qwen3.5": TEMPLATE.replace(
        JSON_CALL, "<tool_call>\n<function={{ c.function.name }}>{# "
    ).replace("</tool_call>", "#}</function></tool_call>"),
    "glm": TEMPLATE.replace(JSON_CALL, "<tool_call>{{ c.function.name }}{# ").replace(
        "</tool_call>", "#}</tool_call>"
    ),
    "": TEMPLATE.replace("<tool_call>", "<call>"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_dir(tmp_path_factory.mktemp("model"))


def opened(model_dir: Path, form: str = "auto", name: str = "") -> Reader | None:
    return open_reader(form, name, model_dir, ChatFormat.load(model_dir, needs_template=False))


@pytest.mark.parametrize(("form", "template"), FORMS.items(), ids=FORMS)
def test_the_form_of_calls_is_seen_in_what_the_template_writes(
    tmp_path: Path, form: str, template: str
) -> None:
    assert form_of(ChatFormat.load(chat_dir(tmp_path, template=template))) == form


@pytest.mark.parametrize(("form", "name"), [("auto", ""), ("hermes", ""), ("qwen3", "")])
def test_the_same_call_is_read_by_a_name_or_by_the_template(
    model_dir: Path, form: str, name: str
) -> None:
    reader = opened(model_dir, form, name)
    assert reader is not None
    assert reader.flows
    ids = ids_of(model_dir, "<think>x</think>y" + CALL)[:-1]
    reply = reader.read(ids, prompt=(1,), tools=[WEATHER], done=True)
    assert (reply.reasoning, reply.content) == ("x", "y")
    assert reply.calls == (Call("weather", '{"city": "Oslo"}'),)


def test_a_model_that_the_library_knows_by_name_is_read_by_its_own_renderer(
    model_dir: Path,
) -> None:
    assert opened(model_dir, name="Qwen/Qwen3-0.6B") is not None
    # what does not fit is no reason not to serve it
    assert opened(model_dir, name="deepseek-ai/DeepSeek-V3") is None


def test_a_long_reply_is_not_read_again_for_each_of_its_pieces() -> None:
    telling = Telling()
    read = [tokens for tokens in range(32, 32_000, 32) if not telling.early(tokens)]
    assert read[:32] == list(range(32, 1025, 32))
    assert len(read) < 200
    assert max(later - sooner for sooner, later in pairwise(read)) < 32_000 / 30


def test_a_template_writes_json_as_it_does_with_transformers(tmp_path: Path) -> None:
    written = (
        "{{ t | tojson(ensure_ascii=False, indent=1, separators=(',', ':'), sort_keys=True) }}"
    )
    model = chat_dir(tmp_path, template=TEMPLATE.replace("{{ t | tojson }}", written))
    text = ChatFormat.load(model).render([], tools=[{"b": "\u00e9", "a": [1]}])
    assert '{\n "a":[\n  1\n ],\n "b":"\u00e9"\n}' in text


def test_without_a_form_replies_are_text(model_dir: Path, tmp_path: Path) -> None:
    assert opened(model_dir, "none") is None
    assert opened(chat_dir(tmp_path / "plain")) is None
    untokened = chat_dir(tmp_path / "untokened", template=TEMPLATE)
    assert opened(untokened) is None  # <tool_call> is no token of it
    (untokened / "chat_template.jinja").unlink()
    assert opened(untokened) is None


@pytest.mark.parametrize("form", ["qwen4", "default", "custom", "deepseek-v3"])
def test_a_form_that_is_none_or_does_not_fit_is_refused_at_the_start(
    model_dir: Path, form: str
) -> None:
    with pytest.raises(UsageError, match=r"api\.reply_form"):
        opened(model_dir, form)
