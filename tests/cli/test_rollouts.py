"""`primerl-node rollouts`: list, show, compare and export what a run kept."""

import json
from pathlib import Path

import pytest
from support.kept_cases import row

from primerl.node.storage.rollouts import RolloutFiles, StepRecord

from .conftest import Cli

OTHER = "cd" * 32


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two steps: a group of three in step 1, one of its rollouts rejected before step 2."""
    files = RolloutFiles(tmp_path / "outputs" / "r" / "rollouts", fsync=False)
    first = [
        row(1, 0, 0, reward=1.0, advantage=0.5, completion=" two", cuts=[4]),
        row(1, 0, 1, reward=0.0, advantage=-0.5, completion=" twenty", cuts=[7]),
        row(
            1, 1, 0, reward=0.25, verdict="unused", reason="zero_advantage", advantage=None, lease=8
        ),
    ]
    lost = row(2, 1, 2, verdict="rejected", reason="bad_reward", detail="claimed 1", advantage=None)
    second = [row(2, 0, 0, worker=OTHER, lease=9, environment="words"), lost]
    files.write(StepRecord(1, groups=2, kept=2), first)
    files.write(StepRecord(2, groups=1, kept=1, rejected=1), second)
    return files.directory.parent


def listed(cli: Cli, run_dir: Path, *args: str) -> list[str]:
    ran = cli("rollouts", str(run_dir), *args)
    assert ran.code == 0, ran.err
    return [line.split()[0] for line in ran.out.splitlines()[1:] if "/" in line.split()[0]]


def test_the_list_takes_what_the_filters_say(cli: Cli, run_dir: Path) -> None:
    assert listed(cli, run_dir) == ["1/0/0", "1/0/1", "1/1/0", "2/0/0", "2/1/2"]
    assert listed(cli, run_dir, "--step", "2") == ["2/0/0", "2/1/2"]
    assert listed(cli, run_dir, "--step", "0-1", "--reward-min", "0.2") == ["1/0/0", "1/1/0"]
    assert listed(cli, run_dir, "--reward-max", "0.2") == ["1/0/1"]
    assert listed(cli, run_dir, "--worker", "CDcd") == ["2/0/0"]
    assert listed(cli, run_dir, "--environment", "words") == ["2/0/0"]
    assert listed(cli, run_dir, "--reason", "bad_reward") == ["2/1/2"]
    assert listed(cli, run_dir, "--verdict", "unused") == ["1/1/0"]
    assert listed(cli, run_dir, "--last", "2") == ["2/0/0", "2/1/2"], "the newest"
    assert "no rollout" in cli("rollouts", str(run_dir), "--step", "7").out


def test_the_list_as_json_has_the_reply_and_no_tokens(cli: Cli, run_dir: Path) -> None:
    found = json.loads(cli("rollouts", str(run_dir), "--json", "--step", "1").out)["rollouts"]
    assert [one["completion"] for one in found] == [" two", " twenty", " two"]
    assert "completion_ids" not in found[0]


def test_one_is_shown_as_the_model_saw_it_with_what_is_trained_marked(
    cli: Cli, run_dir: Path
) -> None:
    files = RolloutFiles(run_dir / "rollouts", fsync=False)
    turns = row(
        3,
        prompt="<|user|>hi<|end|>",
        completion="yes<|end|>and?no",
        cuts=[10, 14],
        completion_ids=[3, 4, 5, 6],
        completion_mask=[True, True, False, True],
        completion_logprobs=[-0.5, -0.5, 0.0, -2.0],
    )
    files.write(StepRecord(3, groups=1, kept=1), [turns])
    out = cli("rollouts", str(run_dir), "--show", "3/0/0").out
    assert "<|user|>hi<|end|>>>>yes<|end|><<<and?>>>no<<<" in out
    assert "What is trained is between >>> and <<<." in out
    assert "2 + 4, 3 drawn, mean logprob -1" in out
    (whole,) = json.loads(cli("rollouts", str(run_dir), "--show", "3/0/0", "--json").out)[
        "rollouts"
    ]
    assert whole["completion_ids"] == [3, 4, 5, 6]


def test_a_rejected_one_says_why_and_whose_reward_it_is(cli: Cli, run_dir: Path) -> None:
    out = cli("rollouts", str(run_dir), "--show", "2/1/2").out
    assert "rejected: bad_reward, claimed 1" in out
    assert "0.5 (claimed by its worker)" in out
    assert "What was drawn by the model is" in out


def test_a_group_is_compared_with_those_of_it_that_were_rejected(cli: Cli, run_dir: Path) -> None:
    out = cli("rollouts", str(run_dir), "--diff", "1/0").out
    head = next(line for line in out.splitlines() if "1/0/0" in line)
    assert head.split() == [
        "1/0/0",
        "1",
        "(+0.5)",
        "1/0/1",
        "0",
        "(-0.5)",
        "2/1/2",
        "0.5",
        "bad_reward",
    ]
    assert "two plus" in out, "the prompt, once"
    replies = next(line for line in out.splitlines() if "twenty" in line)
    assert replies.split() == ["two", "twenty", "two"]


def test_what_is_found_is_exported_as_lines_of_json(
    cli: Cli, run_dir: Path, tmp_path: Path
) -> None:
    target = tmp_path / "some.jsonl"
    ran = cli("rollouts", str(run_dir), "--verdict", "trained", "--export", str(target))
    assert ran.out == f"3 rollouts are in {target}\n"
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [one["reward"] for one in rows] == [1.0, 0.0, 0.5]
    assert rows[0]["prompt_ids"] == [1, 2]
    cli("rollouts", str(run_dir), "--export", str(tmp_path / "no" / "way")).refused(5, "no/way")


def test_a_reply_cannot_command_the_terminal(cli: Cli, run_dir: Path) -> None:
    files = RolloutFiles(run_dir / "rollouts", fsync=False)
    evil = "\x1b[2Jhi\x9b1m"
    rows = [row(4, 0, at, prompt=evil, completion=evil, detail=evil, cuts=[]) for at in range(2)]
    files.write(StepRecord(4, groups=1, kept=1), rows)
    for args in ((), ("--show", "4/0/0"), ("--diff", "4/0"), ("--export", "-"), ("--json",)):
        out = cli("rollouts", str(run_dir), *args).out
        assert "hi" in out
        assert "\x1b" not in out
        assert args[-1:] in (("-",), ("--json",)) or "\x9b" not in out


def test_what_cannot_be_read_is_said_in_one_line(cli: Cli, run_dir: Path, tmp_path: Path) -> None:
    cli("rollouts", str(tmp_path)).refused(2, "holds no rollouts")
    cli("rollouts", str(run_dir), "--step", "x").refused(2, "--step")
    cli("rollouts", str(run_dir), "--show", "1/0").refused(2, "STEP/GROUP/ROLLOUT")
    cli("rollouts", str(run_dir), "--show", "1/9/0").refused(2, "nothing is kept at 1/9/0")
    cli("rollouts", str(run_dir), "--diff", "9/0").refused(5, "not kept")
    cli("rollouts", str(run_dir), "--diff", "1/0", "--show", "1/0/0").refused(2, "one of")
