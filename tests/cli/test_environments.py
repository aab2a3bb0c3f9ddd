"""`primerl-node env`: packages that install and pass, and environments that must not."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.chat_model import make_chat_model

from primerl.cli.tables import plain_table
from primerl.node.environments.allowed import find_package, is_remembered

from .conftest import Cli, Ran

TASKSETS = Path(__file__).parents[1] / "node" / "environments" / "tasksets"
confined = pytest.mark.skipif(sys.platform != "linux", reason="only Linux refuses sockets")


@pytest.fixture
def site(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages before all others, into which pip installs, without reaching an index."""
    directory = home / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(directory)
    monkeypatch.setenv("PIP_TARGET", str(directory))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_DEPS", "1")  # a target of its own would get all of them anew
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # as pip reads it: build with what is here
    return directory


def checks(ran: Ran) -> dict[str, tuple[str, str]]:
    """Name of a check -> what was found, and what is wrong."""
    return {it["name"]: (it["found"], it["problem"]) for it in json.loads(ran.out)["checks"]}


# -- the examples ----------------------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
FOUND = {
    "letter-count": {"rewards": "right answer 1, empty 0", "prompts": "10 characters"},
    "guess-env": {"rollouts": "9 played, 5 turn(s) each"},
    "shop-env": {"rewards": "right answer 1, empty 0", "tools": "right answer 2, empty 0"},
    "wiki-search": {
        "rewards": "right answer 1, empty 0",
        "tools": "right answer 2, empty 0",
        "tasks": "train 29, held out 7",
    },
}
"""Example -> findings of `env test`."""


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.slow
def test_an_example_installs_passes_and_is_trusted(
    cli: Cli, home: Path, site: Path, name: str
) -> None:
    copy = shutil.copytree(EXAMPLES / name, home / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", str(copy)]
    subprocess.run(pip, check=True, timeout=300)
    found = checks(cli("env", "test", name, "--tasks", "3", "--json"))
    assert [problem for _, problem in found.values()] == [""] * len(found)
    for check, words in FOUND[name].items():
        assert words in found[check][0]
    package = find_package(name)
    assert package is not None
    assert package.digest.hex()[:12] in found["package"][0]

    assert cli("env", "trust", name).code == 0
    assert is_remembered(package, home / ".primerl")
    with (site / name.replace("-", "_") / "__init__.py").open("a") as file:
        file.write("# another release\n")
    changed = find_package(name)
    assert changed is not None
    assert not is_remembered(changed, home / ".primerl")
    assert cli("env", "trust", name, "--remove").code == 0
    cli("env", "trust", name, "--remove").refused(2, "is not trusted", "nothing changed")


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("init my-env --tools", "vf-init"),
        ("install ./my-env", "pip install"),
        ("list --json", "pip list"),
    ],
)
def test_a_command_that_was_removed_names_what_to_use(cli: Cli, line: str, instead: str) -> None:
    cli("env", *line.split()).refused(2, "was removed", instead)


def test_bundled_environments_need_no_trust(cli: Cli, home: Path) -> None:
    assert "needs no trust" in cli("env", "trust", "word-game").out
    assert not (home / ".primerl").exists()
    cli("env", "trust", "no-such-env").refused(2, "not installed here")


# -- test ------------------------------------------------------------------------------------------


@pytest.fixture
def unruly(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`env test unruly --args '{"moods": ..., ...}'`, with further arguments."""
    monkeypatch.syspath_prepend(TASKSETS)

    def run(moods: str, *args: str, **options: str) -> Ran:
        given = json.dumps({"moods": moods, **options})
        count = str(len(moods.split()))
        return cli("env", "test", "unruly", "--args", given, "--tasks", count, "--json", *args)

    return run


@pytest.mark.slow
@confined
def test_what_reaches_out_of_its_process_is_named(unruly: Cli, home: Path) -> None:
    ran = unruly("socket process good", "--reply", "yes", file=str(home / "left"))
    found = checks(ran)
    assert ran.code == 1
    assert "unruly failed: sockets, processes" in ran.err
    assert "a worker refuses: " in found["sockets"][1]
    assert "unruly.py line" in found["sockets"][1]
    assert "--sandbox.network true" in found["sockets"][1]
    assert "run ['/bin/true'] (scored, unruly.py line" in found["processes"][1]
    assert f"confined: writes {home / 'left'} (load, unruly.py line" in found["files"][0]
    assert found["rollouts"] == ("3 played, 1 turn(s) each", "")
    assert found["rewards"] == ("as given 0 to 1", "")


@pytest.mark.slow
def test_rollouts_without_a_score_are_named_and_waiting_ends(unruly: Cli) -> None:
    ran = unruly("nan waits raises good", "--reply", "yes", "--timeout-s", "1")
    found = checks(ran)
    assert ran.code == 1
    count, problem = found["rollouts"]
    assert count == "3 played, 3 failed, 1 turn(s) each", "the rest is not played"
    assert "task 0, as given: 'scored' of the rewards and metrics is not a finite number" in problem
    assert "task 1, as given: the environment's code gave no result within 1 s" in problem
    assert "task 2, as given: " in problem
    assert "invalid literal for int()" in problem


@pytest.mark.slow
def test_code_that_keeps_the_processor_is_ended_and_named_by_its_line(unruly: Cli) -> None:
    ran = unruly("spins good", "--reply", "yes", "--timeout-s", "2")
    assert ran.code == 1
    assert "(in scored, unruly.py line" in checks(ran)["rollouts"][1]
    assert checks(ran)["rewards"][0] == "as given 1", "the next task is played"


@pytest.mark.slow
def test_a_taskset_that_never_loads_ends_within_the_limit(unruly: Cli) -> None:
    found = checks(ran := unruly("never-loads", "--limit-s", "40"))
    assert ran.code == 1
    # a machine so busy that the library is still imported says the latter
    assert re.search(r"did not (return within .*\(in load, unruly\.py|start) ", found["start"][1])


@pytest.mark.slow
def test_tasks_and_rewards_that_differ_in_another_process_are_found(unruly: Cli) -> None:
    found = checks(ran := unruly("differs random"))
    assert ran.code == 1
    assert "has other content in a second process" in found["tasks"][1]
    assert "a second process does not agree" in found["rewards"][1]


@pytest.mark.slow
def test_a_random_reward_is_found_and_may_be_declared(unruly: Cli) -> None:
    found = checks(ran := unruly("random", "--reply", "yes"))
    assert ran.code == 1
    assert "task 0, as given: reward 0." in found["rewards"][1]
    assert "deterministic_rewards = false" in found["rewards"][1]
    assert unruly("random", "--reply", "yes", "--sampled-rewards").code == 0


@pytest.mark.slow
def test_a_finite_taskset_is_counted_and_tokens_are_those_of_the_model(
    unruly: Cli, home: Path
) -> None:
    ran = unruly("good", "--model", str(make_chat_model(home / "model")), "--show")
    found = checks(ran)
    assert ran.code == 0, ran.err
    train, held_out = (int(part.split()[-1]) for part in found["tasks"][0].split(","))
    assert train + held_out == 60
    assert "14 to 15 tokens" in found["prompts"][0], (
        "the question, and three tokens of the template"
    )
    assert "right answer 1, empty 0" in found["rewards"][0]
    scripts = {it["script"] for it in json.loads(ran.out)["rollouts"]}
    assert scripts == {"right answer", "empty", "noise", "cut off"}


@pytest.mark.slow
def test_tools_are_called_and_shown_and_their_calls_counted(cli: Cli) -> None:
    ran = cli("env", "test", "calculator", "--tasks", "2", "--show")
    assert ran.code == 0, ran.out
    calls = "6 calls in 10 rollouts: right answer 1, empty 0, noise 0, cut off 0, calls 2"
    assert calls in ran.out
    assert "right answer 1.2, empty 0" in ran.out
    assert '"name": "calculate"' in ran.out


@pytest.mark.slow
def test_a_tool_that_draws_is_found_and_may_be_declared(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    call = '<tool_call>{"name": "roll", "arguments": {}}</tool_call>'
    test = ["env", "test", "tooled", "--tasks", "1", "--reply", call, "--reply", "x", "--json"]
    quiet = [*test, "--args", '{"kind": "quiet"}']  # does not say that it draws
    found = checks(ran := cli(*quiet))
    assert ran.code == 1
    assert "turn 1 of the task has another prompt" in found["rewards"][1]
    assert "deterministic_tools = false" in found["rewards"][1]
    assert cli(*quiet, "--sampled-tools").code == 0


def test_options_that_are_none_are_refused_before_anything_starts(cli: Cli) -> None:
    cli("env", "test", "word-game", "--judge", "{").refused(2, "--judge is no JSON")
    cli("env", "test", "word-game", "--judge", '{"model": "m"}').refused(2, "--judge has no url")
    cli("env", "test", "word-game", "--judge", '{"url": "ftp://h", "model": "m"}').refused(
        2, "--judge: url: an endpoint is http"
    )
    cli("env", "test", "word-game", "--args", "{").refused(2, "--args is no JSON")
    cli("env", "test", "word-game", "--args", "[1]").refused(2, "JSON object")
    cli("env", "test", "no-such-env").refused(2, "is not installed here")
    cli("env", "test", "json").refused(2, "part of Python")
    cli("env", "test", "word-game", "--model", "nowhere").refused(8, "tokenizer.json")


def test_a_long_finding_takes_several_lines_and_the_names_stay_whole() -> None:
    table = plain_table("CHECK", "FOUND", fold="FOUND")
    table.add_row("sandbox", "confines " * 40)
    printed = io.StringIO()
    Console(width=60, file=printed).print(table)
    lines = printed.getvalue().splitlines()
    assert lines[1].startswith("sandbox  confines")
    assert "".join(lines).count("confines") == 40
