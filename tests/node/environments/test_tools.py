"""Environments with tools: what tools say is recomputed and never learned, and no reply breaks a rollout."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from support.chat_model import COMPACT, FORGETFUL, TOOLED, make_chat_model
from support.late_imports import imported_late

from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.environments.environment import (
    Branch,
    Environment,
    EnvironmentFailed,
    Episode,
    ScoreMismatch,
)
from primerl.node.environments.hosted import HostedEnvironment
from primerl.node.environments.policies import ShownReplies, turn_spans
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.inference.engine import Completion
from primerl.node.models.huggingface import COMPACT_TEMPLATE

if TYPE_CHECKING:
    from primerl.node.environments import tools

late_imports = imported_late(globals(), tools="primerl.node.environments.tools")

TASKSETS = Path(__file__).parent / "tasksets"
Start = Callable[..., Awaitable[Environment]]


@pytest_asyncio.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Start]:
    monkeypatch.syspath_prepend(TASKSETS)
    async with AsyncExitStack() as stack:

        async def start(
            name: str = "tooled",
            *,
            template: str = TOOLED,
            turns: int = 8,
            made: Any = VerifiersEnvironment,
            options: dict[str, Any] | None = None,
            **args: object,
        ) -> Environment:
            config = EnvironmentConfig(id=name, args=args, max_turns=turns, **options or {})
            environment: Environment = made(
                config,
                model_dir=make_chat_model(tmp_path, template),
                seed=0,
                max_tokens=200,
                temperature=1.0,
            )
            stack.push_async_callback(environment.close)
            await environment.start()
            return environment

        yield start


def call(tool: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def chat(directory: Path) -> ChatFormat:
    return ChatFormat.load(directory)


async def say(environment: Environment, tmp_path: Path, *replies: str, task: int = 0) -> Episode:
    """A rollout in which the model says these replies."""
    policy = ShownReplies([chat(tmp_path).reply(text) for text in replies])
    return await environment.run(await environment.task(task), policy)


def environment_messages(branch: Branch, directory: Path) -> list[str]:
    """What the environment said after each reply but the last."""
    ids, flags, found = branch.token_ids, branch.sampled, list[str]()
    places = [i for i in range(1, len(ids)) if flags[i] != flags[i - 1]]
    for start, end in zip(places[1::2], places[2::2], strict=False):
        found.append(chat(directory).shown(ids[start:end], special=True))
    return found


async def test_results_of_tools_are_read_by_the_model_and_learned_by_nobody(
    start: Start, tmp_path: Path
) -> None:
    environment = await start("calculator", max_value=99, steps=1)
    task = await environment.task(3)
    shown = await environment.demonstration(task)
    assert shown is not None
    (prompt, asked), (before, answer) = shown.turns()
    assert prompt == await environment.prompt(task)
    assert '"name": "calculate"' in chat(tmp_path).text(prompt)
    result = chat(tmp_path).text(answer)
    between = chat(tmp_path).encode(f"<|tool|>{result}<|im_end|><|assistant|>")
    assert before == [*prompt, *asked, *between]
    episode = await environment.run(task, ShownReplies([asked, answer]))
    (branch,) = episode.branches
    assert branch.token_ids == shown.token_ids
    assert branch.sampled == shown.sampled
    assert sum(branch.sampled) == len(asked) + len(answer)
    assert episode.score.reward == pytest.approx(1.2)
    assert episode.score.metrics == {"exact": 1.0, "computed": 1.0, "tool_calls": 1.0}
    score = await environment.score(task, episode.branches)
    assert (score, score.turns) == (episode.score, ((0, 1),))


async def test_a_forged_result_of_a_tool_is_refused(start: Start, tmp_path: Path) -> None:
    """A cheat lets the calculator say what it answers anyway, or leaves the call out of the transcript."""
    environment = await start("calculator", max_value=99, steps=1)
    task = await environment.task(3)
    shown = await environment.demonstration(task)
    assert shown is not None
    (prompt, asked), (before, answer) = shown.turns()
    (honest,) = (await environment.run(task, ShownReplies([asked, answer]))).branches
    at = len(prompt) + len(asked) + len(chat(tmp_path).encode("<|tool|>"))
    other = ord("1") if honest.token_ids[at] != ord("1") else ord("2")
    forged = [*honest.token_ids[:at], other, *honest.token_ids[at + 1 :]]
    with pytest.raises(ScoreMismatch, match="turn 1 of the task has another prompt"):
        await environment.score(task, [replace(honest, token_ids=forged)])
    closed = before[len(prompt) + len(asked) :]
    uncalled = replace(
        honest,
        token_ids=[*prompt, *closed, *answer],
        sampled=[False] * (len(prompt) + len(closed)) + [True] * len(answer),
        logprobs=[0.0] * (len(prompt) + len(closed) + len(answer)),
    )
    with pytest.raises(ScoreMismatch):
        await environment.score(task, [uncalled])


async def test_rollouts_at_once_have_their_own_state_and_their_own_tools(
    start: Start, tmp_path: Path
) -> None:
    environment = await start()
    episodes = await asyncio.gather(
        *(
            say(
                environment, tmp_path, *[call("add", a=n, b=1)] * 2, call("chest_take"), "x", task=n
            )
            for n in range(4)
        ),
        say(environment, tmp_path, *[call("chest_take")] * 2, "x", task=5),
    )
    for number, episode in enumerate(episodes[:4]):
        assert episode.error == ""
        assert episode.score.reward == 2 * (number + 1)
        results = environment_messages(episode.branches[0], tmp_path)
        assert f"<|tool|>{number + 1}, sum 1" in results[0]
        assert f"<|tool|>{number + 1}, sum 2" in results[1]
        assert f"<|tool|>gold{number}" in results[2]
    first, second = environment_messages(episodes[4].branches[0], tmp_path)
    assert "gold5" in first
    assert "empty" in second


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        (call("fly"), "error: unknown tool 'fly'"),
        (call("add", a="x"), "error: the arguments do not fit: a: Input should be a valid integer"),
        (call("fail"), "nothing here"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "are a JSON object"),
        (call("echo", text="\ud800"), "<|tool|>?"),
        (call("echo", text="y" * 90), "y" * 90),
        (call("add", a=1, b=2) + call("add", a=3, b=4), "7, sum 2"),
    ],
)
async def test_whatever_a_call_is_like_it_has_a_result(
    start: Start, tmp_path: Path, reply: str, result: str
) -> None:
    environment = await start()
    episode = await say(environment, tmp_path, reply, "done")
    assert episode.error == ""
    assert result in environment_messages(episode.branches[0], tmp_path)[0]
    task = await environment.task(0)
    assert await environment.score(task, episode.branches) == episode.score


@pytest.mark.parametrize(
    "reply",
    [
        '<tool_call>{"name": 4, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arg',
        "<tool_call>[]</tool_call>",
        "</tool_call><tool_call>",
        "<think>" + call("add", a=1, b=2) + "</think>no",
        "<think>" + call("add", a=1, b=2),
        "",
    ],
)
async def test_what_cannot_be_read_as_a_call_ends_the_rollout(
    start: Start, tmp_path: Path, reply: str
) -> None:
    environment = await start()
    episode = await say(environment, tmp_path, reply)
    assert (episode.error, episode.score.metrics["tool_calls"]) == ("", 0.0)


def test_brackets_too_deep_for_json_are_no_call() -> None:
    text = '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "</tool_call>"
    assert tools.CallParser("hermes").read(text) == (text, [])


async def test_the_last_turn_may_call_a_tool(start: Start, tmp_path: Path) -> None:
    environment = await start(turns=2)
    episode = await say(environment, tmp_path, *[call("add", a=1, b=2)] * 2)
    assert (episode.error, episode.score.metrics["tool_calls"]) == ("", 2.0)
    task = await environment.task(0)
    assert await environment.score(task, episode.branches) == episode.score


WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "qwen3_xml": "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "deepseek_v3": "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
    '<\uff5ctool\u2581sep\uff5c>add\n```json\n{"a": 1}\n```<\uff5ctool\u2581call\u2581end\uff5c>'
    "<\uff5ctool\u2581calls\u2581end\uff5c>",
}


def test_calls_of_every_form_are_read() -> None:
    assert WRITTEN.keys() == tools.PARSERS.keys()
    for form, text in WRITTEN.items():
        content, (found,) = tools.CallParser(form).read(f"<think>hm</think>I add.{text}")
        assert content == "<think>hm</think>I add."
        assert (found.name, found.arguments) == ("add", {"a": 1})
        assert tools.CallParser(form).read("plain <text>") == ("plain <text>", [])


@pytest.mark.slow
async def test_tools_run_in_the_environments_own_process_without_sockets(
    start: Start, tmp_path: Path
) -> None:
    environment = await start("calculator", made=HostedEnvironment)
    task = await environment.task(0)
    shown = await environment.demonstration(task)
    assert shown is not None
    episode = await environment.run(task, ShownReplies([reply for _, reply in shown.turns()]))
    assert (episode.error, episode.score.metrics["tool_calls"]) == ("", 1.0)
    assert await environment.score(task, episode.branches) == episode.score


@pytest.mark.parametrize(
    ("options", "args", "reason"),
    [
        ({}, {"kind": "remote"}, "Adder is a server somewhere else"),
        ({}, {"kind": "dice"}, r"Dice says .* set environment\.deterministic_tools = false"),
        ({"tool_call_parser": "morse"}, {}, "'morse' cannot be read"),
        ({}, {"replies": ["x", "y"]}, ""),
    ],
)
async def test_tools_that_cannot_be_called_or_checked_are_refused_at_the_start(
    start: Start, options: dict[str, Any], args: dict[str, Any], reason: str
) -> None:
    if not reason:
        environment = await start(options=options, **args)
        with pytest.raises(EnvironmentFailed, match="ends after 1 of the `replies` of task 0"):
            await environment.demonstration(await environment.task(0))
        return
    with pytest.raises(EnvironmentFailed, match=reason):
        await start(options=options, **args)


async def test_a_template_without_tool_calls_needs_a_parser_in_the_config(start: Start) -> None:
    shown = TOOLED.replace("in m.tool_calls or []", "in []")
    with pytest.raises(EnvironmentFailed, match="writes no tool calls"):
        await start(template=shown)
    await start(template=shown, options={"tool_call_parser": "hermes"})


async def test_models_that_are_made_here_are_shown_tools_as_any_other(start: Start) -> None:
    await start(template=COMPACT_TEMPLATE)


@pytest.mark.parametrize(
    ("template", "lost"),
    [
        (COMPACT, r"leaves out the schema of a tool \('add', "),
        (
            TOOLED.replace("<|{{ m.role }}|>", "{% if m.role != 'tool' %}<|{{ m.role }}|>").replace(
                "<|im_end|>{%- endfor", "<|im_end|>{% endif %}{%- endfor"
            ),
            "leaves out a tool's result",
        ),
        (
            TOOLED.replace("{{ m.content or '' }}", "{{ m.content or '' }}{{ m.content or '' }}"),
            "2 times",
        ),
    ],
)
async def test_a_template_that_loses_or_repeats_a_part_of_a_tools_turn_is_refused_at_the_start(
    start: Start, template: str, lost: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=lost):
        await start(template=template, options={"tool_call_parser": "hermes"})


TURNS = [
    "<think>t0</think>" + '<tool_call>{"name": "hour", "arguments": {}}</tool_call>',
    "<think>t1</think>A1",
    "<think>t2</think>A2",
    "A3",
]
"""A call, its answer, and the answers to two more messages of the user."""
CALLED = TURNS[0].removeprefix("<think>t0</think>")


@pytest.mark.parametrize(
    ("setting", "prompts"),
    [
        (
            "keep",
            [f"Q|{TURNS[0]}|N|{TURNS[1]}|and now|{TURNS[2]}|and then|A3"],
        ),
        (
            "drop",
            [
                f"Q|{TURNS[0]}",
                f"Q|{CALLED}|N|{TURNS[1]}",
                f"Q|{CALLED}|N|A1|and now|{TURNS[2]}",
                f"Q|{CALLED}|N|A1|and now|A2|and then|A3",
            ],
        ),
        (
            "branch",
            [
                f"Q|{TURNS[0]}|N|{TURNS[1]}",
                f"Q|{CALLED}|N|A1|and now|{TURNS[2]}",
                f"Q|{CALLED}|N|A1|and now|A2|and then|A3",
            ],
        ),
    ],
)
async def test_earlier_reasoning_is_kept_or_dropped_or_begins_a_new_sample(
    start: Start, tmp_path: Path, setting: str, prompts: list[str]
) -> None:
    options = {"earlier_reasoning": setting}
    environment = await start("tooled-guess", template=FORGETFUL, options=options)
    task = await environment.task(0)
    first = chat(tmp_path).text(await environment.prompt(task))
    asked: list[tuple[int, ...]] = []

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        asked.append(tuple(prompt))
        ids = chat(tmp_path).reply(TURNS[turn])
        return Completion(ids, [-1.0] * len(ids), "stop", 0, 0)

    episode = await environment.run(task, policy)
    assert (episode.error, episode.score.reward) == ("", 4.0)
    shown = [
        chat(tmp_path).text(branch.token_ids).removeprefix(first) for branch in episode.branches
    ]
    written = [
        prompt.removeprefix("Q|")
        .replace("|N|", "<|im_end|><|tool|>noon<|im_end|><|assistant|>")
        .replace("|and now|", "<|im_end|><|user|>and now<|im_end|><|assistant|>")
        .replace("|and then|", "<|im_end|><|user|>and then<|im_end|><|assistant|>")
        for prompt in prompts
    ]
    assert shown == written
    # every turn is learned once, after the very prompt that the policy was asked with
    learned = [(tuple(ids[:start]), ids[start:end]) for ids, start, end in spans(episode)]
    assert learned == [(prompt, chat(tmp_path).reply(TURNS[n])) for n, prompt in enumerate(asked)]
    score = await environment.score(task, episode.branches)
    assert (score, sorted(n for turns in score.turns for n in turns)) == (
        episode.score,
        [0, 1, 2, 3],
    )
    forged = replace(episode.branches[-1], token_ids=[*episode.branches[-1].token_ids])
    forged.token_ids[turn_spans(forged)[-1][0] - 3] ^= 1
    with pytest.raises(ScoreMismatch):
        await environment.score(task, [*episode.branches[:-1], forged])


async def test_where_reasoning_is_dropped_the_template_has_to_show_earlier_calls(
    start: Start,
) -> None:
    template = FORGETFUL.replace("{{ c.function.arguments | tojson }}", "{}")
    hermes = {"tool_call_parser": "hermes"}
    await start("tooled-guess", template=template, options=hermes)
    dropped = {**hermes, "earlier_reasoning": "drop"}
    with pytest.raises(EnvironmentFailed, match="leaves out an argument of the tool call"):
        await start("tooled-guess", template=template, options=dropped)


async def test_reasoning_that_a_worker_keeps_against_the_run_is_refused(
    start: Start, tmp_path: Path
) -> None:
    keeps = await start("tooled-guess", template=FORGETFUL)
    drops = await start("tooled-guess", template=FORGETFUL, options={"earlier_reasoning": "drop"})
    task = await keeps.task(0)
    kept = await say(keeps, tmp_path, *TURNS)
    dropped = await say(drops, tmp_path, *TURNS)
    assert (len(kept.branches), len(dropped.branches)) == (1, 4)
    for environment, other in ((drops, kept), (keeps, dropped)):
        with pytest.raises(ScoreMismatch):
            await environment.score(task, other.branches)
    with pytest.raises(ScoreMismatch):
        await drops.score(task, dropped.branches[:3])


async def test_where_reasoning_is_dropped_a_reply_without_any_does_not_begin_a_sample(
    start: Start, tmp_path: Path
) -> None:
    environment = await start(
        "tooled-guess", template=FORGETFUL, options={"earlier_reasoning": "branch"}
    )
    episode = await say(environment, tmp_path, "A0", "A1", "<think>t2</think>A2")
    assert [len(turn_spans(branch)) for branch in episode.branches] == [3]


async def test_a_demonstration_is_one_sequence_where_reasoning_is_dropped(
    start: Start, tmp_path: Path
) -> None:
    replies = [TURNS[0].replace("hour", "chest_take"), "<think>t1</think>A1"]
    options = {"earlier_reasoning": "drop"}
    environment = await start(template=FORGETFUL, options=options, replies=replies)
    shown = await environment.demonstration(await environment.task(0))
    assert shown is not None
    assert [chat(tmp_path).text(reply) for _, reply in shown.turns()] == replies


def spans(episode: Episode) -> list[tuple[list[int], int, int]]:
    return [
        (branch.token_ids, start, end)
        for branch in episode.branches
        for start, end in turn_spans(branch)
    ]


BESIDE = (
    "{%- if tools -%}<|system|>{%- for t in tools %}{{ t | tojson }}{%- endfor -%}{%- endif -%}"
    "{%- for m in messages -%}{%- if m.role != 'tool' -%}<|{{ m.role }}|>{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{%- endfor -%}<|im_end|>"
    "{%- if m.tool_calls -%}{%- for r in messages[loop.index:] if r.role == 'tool' -%}"
    "[{{ r.content }}]{%- endfor -%}{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""In the manner of Gemma 4: results stand beside the call that they answer, and nowhere else."""


async def test_results_that_a_template_shows_beside_their_call_only_are_heard(
    start: Start, tmp_path: Path
) -> None:
    environment = await start(template=BESIDE)
    episode = await say(environment, tmp_path, call("add", a=1, b=2), "done")
    assert environment_messages(episode.branches[0], tmp_path) == ["[3, sum 1]<|assistant|>"]


async def test_tools_that_nobody_can_check_play_where_the_operator_allows_it(
    start: Start, tmp_path: Path
) -> None:
    environment = await start(kind="dice", options={"deterministic_tools": False})
    episode = await say(environment, tmp_path, call("roll"), "x")
    assert episode.error == ""
    with pytest.raises(EnvironmentFailed, match="has no tools"):
        await start("reverse-text", options={"deterministic_tools": False})
