"""Tasksets of the verifiers library, played in process."""

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from inspect import Signature
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field
from support.chat_model import COMPACT, IM_END, THINKING, UNDEFINED, USER, make_chat_model
from support.counting_environment import shown_reply

from primerl.node.config.chat_api import JudgeConfig
from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.environments.environment import (
    AgentScore,
    Environment,
    EnvironmentFailed,
    Policy,
    Score,
    ScoreMismatch,
)
from primerl.node.environments.playing import PreparedTask
from primerl.node.environments.policies import episode_judge
from primerl.node.environments.verifiers import PREPARED_TASKS, VerifiersEnvironment
from primerl.node.evaluation.evaluator import ALL, evaluated
from primerl.node.inference.engine import Completion

TASKSETS = Path(__file__).parent / "tasksets"

Start = Callable[..., Awaitable[Environment]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.syspath_prepend(TASKSETS)
    model_dir = make_chat_model(tmp_path)

    async def start(
        name: str,
        *,
        max_tokens: int = 16,
        deadline: float = 60.0,
        turns: int = 8,
        options: dict[str, Any] | None = None,
        **args: object,
    ) -> Environment:
        told = {"max_turns": turns, "timeout_s": deadline, **(options or {})}
        environment = VerifiersEnvironment(
            EnvironmentConfig.model_validate({"id": name, "args": args, **told}),
            model_dir=model_dir,
            seed=0,
            max_tokens=max_tokens,
            temperature=1.0,
        )
        await environment.start()
        return environment

    return start


async def test_a_template_that_leaves_out_the_environments_later_turns_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "tasksets")
    deaf = COMPACT.replace("m in messages", "m in messages if m.role != 'user' or m == messages[0]")
    make_chat_model(tmp_path, deaf)

    async def start(name: str) -> None:
        config = EnvironmentConfig(id=name)
        environment = VerifiersEnvironment(
            config, model_dir=tmp_path, seed=0, max_tokens=9, temperature=1.0
        )
        await environment.start()

    await start("reverse-text")
    with pytest.raises(EnvironmentFailed, match="leaves out a user's message"):
        await start("guess-game")


def says(*replies: str | list[int], stop: bool = True) -> Policy:
    """A policy with one reply a turn."""

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        reply = replies[turn]
        ids = list(reply.encode()) if isinstance(reply, str) else reply
        ids = [*ids, IM_END] if stop else ids
        return Completion(ids, [-1.0 - turn] * len(ids), "stop" if stop else "length", turn, turn)

    return policy


# -- the bundled tasksets -------------------------------------------------------------------------


async def test_reversing_is_rewarded_exactly_and_measured_gradually(start: Start) -> None:
    environment = await start("reverse-text", min_len=4, max_len=4)
    task = await environment.task(3)
    text = bytes((await environment.prompt(task))[1:5])
    mirror = text[::-1].decode()
    right = await environment.run(task, says(mirror))
    assert right.score.reward == 1.0
    assert right.score.metrics == {"exact": 1.0, "lcs": 1.0}
    half = await environment.run(task, says(mirror[:2]))
    assert half.score.metrics == {"exact": 0.0, "lcs": 0.5}


async def test_a_right_answer_that_was_cut_off_is_not_right(start: Start) -> None:
    environment = await start("reverse-text", min_len=4, max_len=4, max_tokens=4)
    task = await environment.task(3)
    mirror = bytes((await environment.prompt(task))[1:5])[::-1].decode()
    episode = await environment.run(task, says(mirror, stop=False))
    assert episode.score.metrics == {"exact": 0.0, "lcs": 1.0}
    assert await environment.score(task, episode.branches) == episode.score


@pytest.mark.parametrize(
    "hidden", [[USER], [UNDEFINED], [0xC3]], ids=["special", "no token", "utf-8"]
)
async def test_nothing_can_hide_in_a_right_answer(start: Start, hidden: list[int]) -> None:
    environment = await start("reverse-text")
    task = await environment.task(0)
    shown = await shown_reply(environment, task)
    episode = await environment.run(task, says([*shown[:2], *hidden, *shown[2:-1]]))
    assert (episode.score.reward, episode.error) == (0.0, "")
    assert await environment.score(task, episode.branches) == episode.score


async def test_arithmetic_knows_its_results(start: Start) -> None:
    environment = await start("arithmetic", max_value=20)
    for index in range(30):
        task = await environment.task(index)
        question = bytes((await environment.prompt(task))[1:-2]).decode()
        episode = await environment.run(task, says(str(eval(question))))
        assert episode.score.metrics == {"exact": 1.0, "numeric": 1.0}
    wrong = await environment.run(await environment.task(0), says("soon"))
    assert wrong.score.metrics == {"exact": 0.0, "numeric": 0.0}


async def test_prompts_are_made_with_the_environments_variables_of_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout of another prompt is none of the task."""
    monkeypatch.syspath_prepend(TASKSETS)
    make_chat_model(tmp_path, THINKING)

    async def start(**variables: bool | int | float | str) -> Environment:
        environment = VerifiersEnvironment(
            EnvironmentConfig(id="arithmetic", chat_template_kwargs=variables),
            model_dir=tmp_path,
            seed=0,
            max_tokens=9,
            temperature=1.0,
        )
        await environment.start()
        return environment

    plain, short = await start(), await start(enable_thinking=False)
    task = await short.task(0)
    assert await short.prompt(task) == [*await plain.prompt(task), ord("x")]
    episode = await short.run(task, says("1"))
    assert (await short.score(task, episode.branches)).reward == episode.score.reward
    with pytest.raises(ScoreMismatch, match="another prompt"):
        await plain.score(task, episode.branches)


@pytest.mark.parametrize("name", ["reverse_text", "arithmetic"])
def test_the_library_itself_finds_the_bundled_tasksets_and_walks_them_in_order(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verifiers.v1.utils import loaders

    import primerl.node.environments.tasksets as bundled

    monkeypatch.syspath_prepend(str(Path(bundled.__path__[0])))
    taskset = loaders.taskset_class(name)(loaders.taskset_config_type(name)(id=name))
    walked = list(taskset.take(20))
    direct = [getattr(taskset, "task_at")(i) for i in range(20)]  # noqa: B009
    assert [task.hash for task in walked] == [task.hash for task in direct]


# -- any taskset ----------------------------------------------------------------------------------


async def test_hooks_run_in_order_and_see_the_prompt_with_its_system_message(start: Start) -> None:
    environment = await start("rows")
    task = await environment.task(0)
    prompt = bytes((await environment.prompt(task))[1:9])
    assert prompt == b"be brief"
    shown = await shown_reply(environment, task)
    episode = await environment.run(task, says(shown[:-1]))
    assert episode.score.reward == 0.5
    assert episode.score.metrics == {"right": 1.0, "steps": 1.0, "turns": 1.0}


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize("reply", ["0", "17", "nonsense", [0xFF, 0xFE], [USER, UNDEFINED]])
async def test_the_short_way_and_the_librarys_own_end_in_the_same_episode(
    start: Start, reply: str | list[int], *, stop: bool
) -> None:
    short, long = await start("rows"), await start("rows_env")
    task = await short.task(0)
    assert task == await long.task(0)
    assert await short.prompt(task) == await long.prompt(task)
    policy = says(reply, stop=stop)
    episode = await short.run(task, policy)
    assert episode.error == ""
    assert await long.run(task, policy) == episode
    assert await long.score(task, episode.branches) == episode.score


async def test_the_opening_prompt_of_a_task_is_made_once_for_all_its_rollouts(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    prompt = ChatFormat.prompt

    def noted(chat: ChatFormat, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[int]:
        made.append(messages[-1]["content"])
        return prompt(chat, messages, tools)

    monkeypatch.setattr(ChatFormat, "prompt", noted)
    environment = await start("alphabet-sort", max_turns=1)
    task = await environment.task(3)
    opening, before = await environment.prompt(task), len(made)
    for _ in range(2):
        episode = await environment.run(task, says_nothing)
        assert await environment.score(task, episode.branches) == episode.score
        assert episode.branches[0].token_ids[: len(opening)] == opening
    assert len(made) == before


async def test_what_is_kept_of_tasks_does_not_grow_with_those_that_were_played(
    start: Start,
) -> None:
    environment = await start("reverse-text")
    first = await environment.task(0)
    opening = await environment.prompt(first)
    for index in range(1, PREPARED_TASKS + 100):
        await environment.task(index)
    gc.collect()
    prepared = sum(isinstance(each, PreparedTask) for each in gc.get_objects())
    assert prepared <= PREPARED_TASKS == 1024
    assert await environment.task(0) == first
    assert await environment.prompt(first) == opening


async def says_nothing(prompt: Sequence[int], turn: int) -> Completion:
    del prompt, turn
    return Completion([IM_END], [-1.0], "stop", 0, 0)


async def test_a_default_factory_is_inspected_once_and_gets_what_it_takes(start: Start) -> None:
    class Zero:
        inspected = 0

        @property
        def __signature__(self) -> Signature:
            Zero.inspected += 1
            return Signature()

        def __call__(self) -> int:
            return 0

    class Two(list[int]):
        """A factory that cannot be hashed."""

        def __call__(self) -> int:
            return 2

    class Message(BaseModel):
        zero: int = Field(default_factory=Zero())
        one: int = Field(default_factory=lambda data: data["zero"] + 1)
        two: int = Field(default_factory=Two())

    await start("reverse-text")
    inspected = Zero.inspected
    for _ in range(3):
        made = Message.model_construct()
        assert (made.zero, made.one, made.two) == (0, 1, 2)
    assert Zero.inspected <= inspected + 1


async def test_a_finite_taskset_starts_over_and_is_dealt_into_two_splits(start: Start) -> None:
    environment = await start("rows")
    prompts = {
        split: [
            tuple(await environment.prompt(await environment.task(i, split))) for i in range(40)
        ]
        for split in ("train", "eval")
    }
    assert set(prompts["train"]).isdisjoint(prompts["eval"])
    assert len({*prompts["train"], *prompts["eval"]}) == 40
    count = len(set(prompts["eval"]))
    assert prompts["eval"][0] == prompts["eval"][count]


async def test_all_tasks_of_a_taskset_that_is_only_evaluated_are_found_once(start: Start) -> None:
    environment = await start("rows")
    assert len(await evaluated(environment, ALL, "all")) == 40
    assert 0 < len(await evaluated(environment, ALL, "eval")) < 20
    doubles = await start("reverse-text", min_len=1, max_len=1)
    contents = [task.content for task in await evaluated(doubles, 64)]
    assert len(contents) == len({*contents}) < 10, "few letters are held out"


@pytest.mark.parametrize("name", ["rows", "rows_env"])
@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("broken", "no such thing"),
        ("shell", "runs no commands"),
        ("odd", "not a finite number"),
        ("slow", "no result within 0.2 s"),
        ("impatient", "without a turn|before its first turn"),
    ],
)
async def test_a_taskset_that_fails_is_an_error_in_the_episode(
    start: Start, name: str, mood: str, reason: str
) -> None:
    deadline = 0.2 if mood == "slow" else 60.0
    environment = await start(name, mood=mood, deadline=deadline)
    episode = await environment.run(await environment.task(0), says("0"))
    assert episode.branches == []
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(episode.error)


async def test_a_rollout_whose_scoring_fails_has_no_score(start: Start) -> None:
    (branch,) = (await (good := await start("rows")).run(await good.task(0), says("0"))).branches
    environment = await start("rows", mood="broken")
    with pytest.raises(EnvironmentFailed, match="no such thing"):
        await environment.score(await environment.task(0), [branch])


@pytest.mark.parametrize("name", ["several_scores", "several_scores_env"])
async def test_a_metric_that_has_a_rewards_name_does_not_hide_it(start: Start, name: str) -> None:
    environment = await start(name)
    episode = await environment.run(await environment.task(0), says("0"))
    metrics = {"exact": 1.0, "length": 1.0, "metric/exact": 0.25, "other": 2.0}
    assert episode.score == Score(1.5, metrics)


async def test_judges_of_names_of_their_own_are_scores_beside_the_rewards(start: Start) -> None:
    environment = await start("several_scores", mood="judged:kind,true")
    episode = await environment.run(await environment.task(0), says("0"))
    assert episode.score.reward == 1.5
    assert episode.score.metrics.items() >= {"exact": 1.0, "kind": 0.0, "true": 0.0}.items()


@pytest.mark.parametrize("name", ["several_scores", "several_scores_env"])
@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("raises", "reward 'short' has no score: KeyError: 'no such key'"),
        ("late", "reward 'short' has no score: TimeoutError: a service"),
        ("nothing", "reward 'short' has no score: TypeError"),
        ("text", "reward 'short' has no score: ValueError"),
        ("endless", "'short' of the rewards and metrics is not a finite number"),
        ("same", "reward 'exact' and reward 'short' both give a score 'exact'"),
        ("judged:exact", "a reward and judge 'exact' both give a score 'exact'"),
        ("judged:table", "a reward and judge 'table' both give a score 'exact'"),
        ("judged:length", "a reward and judge 'length' both give a score 'length'"),
        ("unmeasured", "metric 'shares' has no score: ValueError: no figure"),
    ],
)
async def test_a_rollout_with_a_score_that_cannot_be_computed_fails_and_names_it(
    start: Start, name: str, mood: str, reason: str
) -> None:
    environment = await start(name, mood=mood)
    episode = await environment.run(await environment.task(0), says("0"))
    assert episode.branches == []
    assert episode.score.metrics == {}
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(episode.error)


async def test_the_policy_may_take_longer_than_the_tasksets_deadline(start: Start) -> None:
    import asyncio

    environment = await start("rows", deadline=0.5)
    answer = says("0")

    async def slow(prompt: Sequence[int], turn: int) -> Completion:
        await asyncio.sleep(0.8)
        return await answer(prompt, turn)

    assert (await environment.run(await environment.task(0), slow)).error == ""


async def test_hooks_on_single_requests_are_honoured(start: Start) -> None:
    environment = await start("rows_watched")
    task = await environment.task(0)
    episode = await environment.run(task, says("hm"))
    assert episode.error == ""
    assert b"QUIET" in bytes(t for t in episode.branches[0].token_ids if t < 256)
    assert await environment.score(task, episode.branches) == episode.score


# -- several turns --------------------------------------------------------------------------------


async def test_each_turn_extends_the_tokens_of_the_turn_before(start: Start) -> None:
    environment = await start("guess_game")
    task = await environment.task(5)
    seen: list[tuple[int, list[int]]] = []
    answer = says("1", [0xC3, USER], "9", "5")

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        seen.append((turn, list(prompt)))
        return await answer(prompt, turn)

    episode = await environment.run(task, policy)
    (branch,) = episode.branches
    assert [turn for turn, _ in seen] == [0, 1, 2, 3]
    assert seen[0][1] == await environment.prompt(task)
    for _, prompt in seen:
        assert branch.token_ids[: len(prompt)] == prompt
        assert branch.sampled[len(prompt) - 1 : len(prompt) + 1] == [False, True]
    assert (branch.policy_first, branch.policy_last, branch.finish) == (0, 3, "stop")
    assert [branch.logprobs[len(prompt)] for _, prompt in seen] == [-1.0, -2.0, -3.0, -4.0]
    assert sum(branch.sampled) == 2 + 3 + 2 + 2
    assert branch.spans == ((0, 0), (2, 1), (5, 2), (7, 3)), "each turn by another policy"
    score = await environment.score(task, episode.branches)
    assert score == episode.score
    assert score.turns == ((0, 1, 2, 3),), "as they were asked for: they are part of the seeds"


async def test_a_reply_that_was_cut_off_is_closed_before_the_next_turn(start: Start) -> None:
    environment = await start("guess_game")
    episode = await environment.run(await environment.task(5), says("1", "2", "3", "4", stop=False))
    (branch,) = episode.branches
    end = branch.sampled.index(True) + 1
    assert branch.token_ids[end : end + 2] == [IM_END, USER]
    assert branch.finish == "length"


async def test_a_game_is_rewarded_by_its_state(start: Start) -> None:
    environment = await start("guess_game")
    won = await environment.run(await environment.task(5), says("1", "5"))
    assert won.score.metrics == {"solved": 1.0, "guesses": 2.0}
    lost = await environment.run(await environment.task(5), says("1", "2", "3", "4"))
    assert lost.score.metrics == {"solved": 0.0, "guesses": 3.0}


async def test_max_turns_ends_a_game(start: Start) -> None:
    environment = await start("guess_game", turns=2)
    episode = await environment.run(await environment.task(5), says("1", "2"))
    assert episode.score.metrics == {"solved": 0.0, "guesses": 2.0}


async def test_a_game_with_altered_environment_turns_is_refused(start: Start) -> None:
    environment = await start("guess_game")
    task = await environment.task(5)
    (branch,) = (await environment.run(task, says("1", "2", "5"))).branches
    ids = branch.token_ids
    place = bytes(t if t < 256 else 0 for t in ids).index(b"higher")
    assert not branch.sampled[place]
    assert (await environment.score(task, [branch])).reward == 1.0
    forged = [*ids[:place], ids[place] + 1, *ids[place + 1 :]]
    with pytest.raises(ScoreMismatch):
        await environment.score(task, [replace(branch, token_ids=forged)])


async def test_a_game_with_turns_missing_or_added_is_refused(start: Start) -> None:
    environment = await start("guess_game")
    task = await environment.task(5)
    (lost,) = (await environment.run(task, says("1", "2", "3", "4"))).branches
    (won,) = (await environment.run(task, says("1", "5"))).branches
    cut = len(lost.token_ids) - 2
    while lost.sampled[cut - 1] is False or cut == len(lost.token_ids):
        cut -= 1
    short = replace(
        lost,
        token_ids=lost.token_ids[:cut],
        sampled=lost.sampled[:cut],
        logprobs=lost.logprobs[:cut],
    )
    more = replace(
        won,
        token_ids=[*won.token_ids, USER, 104, 53, IM_END],
        sampled=[*won.sampled, False, False, True, True],
        logprobs=[*won.logprobs, 0.0, 0.0, 0.0, 0.0],
    )
    for forged in (short, more):
        with pytest.raises(ScoreMismatch):
            await environment.score(task, [forged])


async def test_replies_end_at_their_first_stop_string_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker can neither go on behind one, nor end a reply by one that is not there."""
    monkeypatch.syspath_prepend(TASKSETS)
    make_chat_model(tmp_path)

    async def start(*stop: str) -> Environment:
        options = EnvironmentConfig(id="guess_game", stop=list(stop))
        environment = VerifiersEnvironment(
            options, model_dir=tmp_path, seed=0, max_tokens=9, temperature=1.0
        )
        await environment.start()
        return environment

    stopped, free = await start("!", "; "), await start()
    task = await stopped.task(5)
    (branch,) = (await stopped.run(task, says("1! no, 5", "9; or 8", "4!", "4!"))).branches
    ids = bytes(token for token in branch.token_ids if token < 256)
    assert (b"1!" in ids, b"no" in ids, b"9; " in ids, b"8" in ids) == (True, False, True, False)
    assert branch.finish == "stop"
    assert (await stopped.score(task, [branch])).turns == ((0, 1, 2, 3),)

    async def refused(*replies: str, said: str = "", **changes: Any) -> bool:
        """Whether what an engine without strings drew, or says that it did, is no rollout of the task."""
        (drawn,) = (await free.run(task, says(*replies, stop=False))).branches
        with pytest.raises(ScoreMismatch, match=said):
            await stopped.score(task, [replace(drawn, **changes)])
        return True

    assert await refused("1! no", "4!", "4!", "4!", said="another prompt")
    assert await refused("1", "4!", "4!", "4!", said="cut short")
    assert await refused("1!", "4!", "4!", "4! or", finish="stop", said="ending")
    assert await refused("1!", "4!", "4!", "4", finish="stop", said="ending")
    assert await refused("1!", "4!", "4!", "4!", finish="length", said="ending")
    (honest,) = (await free.run(task, says("1!", "4!", "4!", "4!", stop=False))).branches
    assert (await stopped.score(task, [replace(honest, finish="stop")])).turns == ((0, 1, 2, 3),)


async def test_an_engine_that_dies_in_a_game_is_not_the_games_fault(start: Start) -> None:
    environment = await start("guess_game")

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        if turn == 1:
            raise ConnectionError("engine died")
        return await says("1")(prompt, turn)

    with pytest.raises(ConnectionError, match="engine died"):
        await environment.run(await environment.task(5), policy)


# -- judges ---------------------------------------------------------------------------------------


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    from verifiers.v1.clients import base

    # replaced for the whole process, which otherwise is one environment's
    monkeypatch.setattr(base, "build_async_httpx", base.build_async_httpx)
    monkeypatch.syspath_prepend(TASKSETS)

    async def start(name: str, *, judged: bool, **args: object) -> Environment:
        judge = JudgeConfig(model="m")
        environment = VerifiersEnvironment(
            EnvironmentConfig(id=name, args=args, judge=judge),
            model_dir=make_chat_model(tmp_path),
            seed=0,
            max_tokens=16,
            temperature=1.0,
            judged=judged,
        )
        await environment.start()
        return environment

    return start


REFERENCE = {"id": "reference", "name": "same", "weight": 2.0}


async def test_any_taskset_with_answers_can_be_judged_by_the_librarys_own_judge(
    judged: Start,
) -> None:
    asked: list[str] = []

    async def answers_yes(request: bytes) -> bytes:
        asked.append(json.loads(request)["messages"][0]["content"])
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return json.dumps({"id": "x", "created": 0, "choices": [choice]}).encode()

    environment = await judged("reverse-text", judged=True, task={"judges": [REFERENCE]})
    token = episode_judge.set(answers_yes)
    try:
        task = await environment.task(0)
        played = await environment.run(task, says("nothing like it"))
        assert (played.error, played.score.reward) == ("", 2.0)
        assert played.score.metrics["same"] == 1.0
        assert await environment.score(task, played.branches) == played.score
    finally:
        episode_judge.reset(token)
    assert len(asked) == 2
    assert "nothing like it" in asked[0]


@pytest.mark.parametrize("name", ["rows", "guess_game"])
async def test_without_its_judge_an_environment_plays_and_does_not_score(
    judged: Start, start: Start, name: str
) -> None:
    unscored, scored = await judged(name, judged=False), await start(name)
    policy = says("1", "3", "5", "5")
    played = await unscored.run(await unscored.task(5), policy)
    known = await scored.run(await scored.task(5), policy)
    assert (played.error, played.score) == ("", Score(0.0))
    assert known.score != played.score
    assert played.branches == known.branches


@pytest.mark.parametrize(
    "entry",
    [
        {"id": "rubric", "path": "/etc/passwd"},
        {"id": "os"},
        {**REFERENCE, "prompt": "/etc/passwd"},
        {**REFERENCE, "headers_from_env": {"X": "SECRET"}},
        "reference",
    ],
)
async def test_judges_that_name_things_on_the_machine_are_refused(
    judged: Start, entry: object
) -> None:
    with pytest.raises(EnvironmentFailed, match="may not set judges"):
        await judged("reverse-text", judged=True, task={"judges": [entry]})


# -- refusals at the start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("no-such-taskset", {}, "no taskset named 'no-such-taskset': install it"),
        ("os.path", {}, "no taskset named 'os.path'"),
        ("json", {}, "no taskset named 'json'"),
        ("reverse-text", {"min_len": 9, "max_len": 4}, "min_len must not exceed max_len"),
        (
            "reverse-text",
            {"colour": "red"},
            "args.colour is no option of 'reverse-text': its options",
        ),
        ("reverse-text", {"min_lem": 5}, "args.min_lem is no option .*: did you mean min_len"),
        ("reverse-text", {"min_len": "a"}, "args.min_len does not fit .*: should be .*, not 'a'$"),
        ("rows", {"count": 0}, "has no task"),
        ("rows", {"system_prompt": "/etc/hostname"}, "may not set system_prompt"),
        ("rows", {"task": {"rewards": {"x": {"fn": "os:getcwd"}}}}, "may not set rewards"),
        ("rows", {"task": {"judges": [{"id": "reference"}]}}, "may not set judges"),
    ],
)
async def test_what_cannot_or_must_not_be_played_is_refused_at_the_start(
    start: Start, name: str, args: dict[str, object], reason: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=reason):
        await start(name, **args)


async def test_an_environment_before_its_start_says_so(tmp_path: Path) -> None:
    environment = VerifiersEnvironment(
        EnvironmentConfig(), model_dir=tmp_path, seed=0, max_tokens=4, temperature=1.0
    )
    with pytest.raises(EnvironmentFailed, match=r"call start\(\) first"):
        await environment.task(0)
    with pytest.raises(EnvironmentFailed, match=r"no tokenizer\.json"):
        await environment.start()


# -- several agents -------------------------------------------------------------------------------


async def test_agents_have_names_and_rewards_of_their_own_and_they_are_recomputed(
    start: Start,
) -> None:
    environment = await start("duel")
    task = await environment.task(2)
    episode = await environment.run(task, says("3", "8"))
    assert episode.error == ""
    assert episode.score.agents == (AgentScore("first", -1.0, 1), AgentScore("second", 1.0, 1))
    assert episode.score.reward == 0.0
    assert episode.score.metrics["second/won"] == 1.0
    assert [branch.token_ids[-2] for branch in episode.branches] == [*b"38"]
    again = await environment.score(task, episode.branches)
    assert (again, again.turns) == (episode.score, ((0,), (1,)))


async def test_a_reply_that_is_given_to_the_other_agent_has_the_seeds_of_that_one(
    start: Start,
) -> None:
    """Both saw the same prompt, so each may have said either: the audit knows with which seed it was drawn."""
    environment = await start("duel", rounds="turns")
    task = await environment.task(2)
    episode = await environment.run(task, says("3", "8", "5", "6"))
    assert [one.agent for one in episode.score.agents] == ["first", "second"]
    assert episode.score.turns == ((0, 2), (1, 3))
    swapped = await environment.score(task, episode.branches[::-1])
    assert swapped.turns == ((0, 2), (1, 3))  # "8" was drawn in turn 1
    with pytest.raises(ScoreMismatch):
        await environment.score(task, episode.branches[:1])
    heard = [*episode.branches[0].token_ids]
    heard[heard.index(ord("8"))] = ord("9")  # what the second one said
    altered = [replace(episode.branches[0], token_ids=heard), episode.branches[1]]
    with pytest.raises(ScoreMismatch):
        await environment.score(task, altered)


async def test_each_of_two_agents_has_a_sample_a_turn_where_reasoning_is_dropped(
    start: Start,
) -> None:
    drop = {"earlier_reasoning": "drop"}
    environment = await start("duel", rounds="turns", max_tokens=40, options=drop)
    task = await environment.task(2)
    said = says(*(f"<think>{n}</think>{n}" for n in (3, 8, 5, 6)))
    episode = await environment.run(task, said)
    assert episode.error == ""
    assert [(one.agent, one.branches) for one in episode.score.agents] == [
        ("first", 2),
        ("second", 2),
    ]
    assert episode.score.turns == ((0,), (2,), (1,), (3,))
    texts = [bytes(id for id in branch.token_ids if id < 256) for branch in episode.branches]
    assert (b"<think>3" in texts[0], b"<think>3" in texts[1]) == (True, False)
    assert (b"<think>8" in texts[2], b"<think>8" in texts[3]) == (True, False)
    assert await environment.score(task, episode.branches) == episode.score


async def test_equal_replies_of_two_agents_are_two_turns(start: Start) -> None:
    environment = await start("duel", rounds="turns")
    task = await environment.task(2)
    episode = await environment.run(task, says("4", "4", "4", "4"))
    assert (episode.error, episode.score.turns) == ("", ((0, 2), (1, 3)))
    assert (await environment.score(task, episode.branches)).turns == ((0, 2), (1, 3))


async def test_an_order_of_turns_that_depends_on_time_costs_the_rollout_and_not_the_worker(
    start: Start,
) -> None:
    environment = await start("duel", rounds="race")

    async def slow(prompt: Sequence[int], turn: int) -> Completion:
        await asyncio.sleep(0.01)
        return await says("1", "2", "3", "4")(prompt, turn)

    episode = await environment.run(await environment.task(2), slow)
    assert "in another order" in episode.error
    assert episode.branches == []


async def test_an_agent_that_is_not_the_policy_is_refused(start: Start) -> None:
    environment = await start("duel", rounds="judged")
    episode = await environment.run(await environment.task(2), says("3", "8"))
    assert "agent 'second' is not to be trained" in episode.error
