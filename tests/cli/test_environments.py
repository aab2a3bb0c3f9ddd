"""`primerl-node env`: packages that install and pass, and environments that must not."""

import io
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console
from support.chat_model import make_chat_model
from support.installed import install

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


def wheel(directory: Path, module: str, source: str) -> Path:
    """A wheel of one module, as a build tool writes it."""
    path = directory / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{module}.py", source)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", f"{module}.py,,\n")
    return path


# -- a package from nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["single", "multi", "tools", "search"])
@pytest.mark.slow
def test_a_new_package_installs_passes_and_is_trusted(
    cli: Cli, home: Path, site: Path, kind: str
) -> None:
    name = f"first-{kind}-env"  # a name of its own: a module that was imported stays imported
    flags = {"single": [], "multi": ["--multi-turn"], "tools": ["--tools"], "search": ["--search"]}
    made = cli("env", "init", name, *flags[kind])
    assert made.code == 0, made.err
    installed = cli("env", "install", f"./{name}", "--json")
    assert installed.code == 0, installed.err
    (row,) = json.loads(installed.out)["environments"]
    assert (row["id"], row["trust"]) == (name, "not trusted")
    package = find_package(name)
    assert package is not None
    assert package.digest.hex() == row["digest"]
    assert name in cli("env", "list").out

    found = checks(cli("env", "test", name, "--tasks", "3", "--json"))
    assert [problem for _, problem in found.values()] == [""] * len(found)
    train = "train 29, held out 7" if kind == "search" else "train at least"
    assert found["tasks"][0].startswith(train)
    if kind == "single":
        assert "right answer 1, empty 0" in found["rewards"][0]
        assert found["prompts"][0].startswith("10 characters")
    elif kind == "tools":
        assert "right answer 1, empty 0" in found["rewards"][0]
        assert "right answer 2, empty 0" in found["tools"][0]
    elif kind == "search":
        assert "right answer 1, empty 0" in found["rewards"][0]
        assert "right answer 2, empty 0" in found["tools"][0]
    else:
        assert found["rollouts"][0] == "9 played, 5 turn(s) each"

    assert cli("env", "trust", name).code == 0
    assert is_remembered(package, home / ".primerl")
    listed = {it["id"]: it for it in json.loads(cli("env", "list", "--json").out)["environments"]}
    assert listed[name]["trust"] == "trusted"
    with (site / name.replace("-", "_") / "__init__.py").open("a") as file:
        file.write("# another release\n")
    listed = {it["id"]: it for it in json.loads(cli("env", "list", "--json").out)["environments"]}
    assert listed[name]["trust"] == "other release trusted"
    assert cli("env", "trust", name, "--remove").code == 0
    cli("env", "trust", name, "--remove").refused(2, "is not trusted", "nothing changed")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("reverse-text", "bundled environment"),
        ("Word_Game", "bundled environment"),
        ("json", "part of Python"),
        ("harbor", "taskset of verifiers"),
        ("pytest", "installed here already"),
        ("../up", "no name of a package"),
        ("2048", "no name of a package"),
        ("class", "no name of a package"),
    ],
)
def test_a_name_that_would_never_be_played_is_not_taken(
    cli: Cli, home: Path, name: str, word: str
) -> None:
    cli("env", "init", name).refused(2, word)
    assert list(home.iterdir()) == []


def test_a_new_environment_is_of_one_kind(cli: Cli, home: Path) -> None:
    cli("env", "init", "third-env", "--tools", "--multi-turn").refused(2, "choose one")
    cli("env", "init", "third-env", "--search", "--tools").refused(2, "--tools and --search")
    assert list(home.iterdir()) == []


def test_nothing_is_overwritten(cli: Cli, home: Path) -> None:
    assert cli("env", "init", "second-env", "--path", "envs").code == 0
    (home / "envs" / "second-env" / "README.md").write_text("mine")
    cli("env", "init", "second-env", "--path", "envs").refused(2, "exists already")
    assert (home / "envs" / "second-env" / "README.md").read_text() == "mine"


# -- install, list, trust --------------------------------------------------------------------------


def test_what_is_not_there_is_not_installed(cli: Cli, home: Path) -> None:
    (home / "empty").mkdir()
    cli("env", "install", "gone-1.0-py3-none-any.whl").refused(2, "does not exist")
    cli("env", "install", "owner/gone").refused(2, "does not exist")
    cli("env", "install", "./empty").refused(2, "no pyproject.toml")
    cli("env", "install", "--", "--index-url=http://127.0.0.1").refused(2, "does not exist")
    cli("env", "install", "--", "-r").refused(2, "no name of a package")


TASKSET = "import verifiers.v1 as vf\nclass A(vf.Taskset): pass\n__all__ = ['A']\n"


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("word_game", TASKSET, ("'word_game' would not be played", "bundled")),
        ("msgspec", TASKSET, ("replace the installed package", "no environment")),
        (
            "old_env",
            "def load_environment(**args):\n    return None\n",
            ("load_environment() of verifiers before 0.4",),
        ),
        ("plain_lib", "A = 1\n", ("no Taskset",)),
    ],
)
def test_a_wheel_that_must_not_or_cannot_be_played_is_refused_and_nothing_lands(
    cli: Cli, home: Path, site: Path, module: str, source: str, words: tuple[str, ...]
) -> None:
    cli("env", "install", str(wheel(home, module, source))).refused(2, *words)
    assert list(site.iterdir()) == []


def test_a_damaged_wheel_is_refused_with_what_pip_says(cli: Cli, home: Path, site: Path) -> None:
    (home / "bad_env-1.0-py3-none-any.whl").write_bytes(b"no zip")
    ran = cli("env", "install", "bad_env-1.0-py3-none-any.whl")
    assert ran.code == 1
    assert "ERROR" in ran.err
    assert "cannot be installed, and nothing was changed" in ran.err.splitlines()[-1]
    assert list(site.iterdir()) == []


def test_bundled_environments_are_listed_and_need_no_trust(cli: Cli, home: Path) -> None:
    rows = {it["id"]: it for it in json.loads(cli("env", "list", "--json").out)["environments"]}
    assert rows["word-game"]["trust"] == "not needed"
    assert rows["math-env"]["trust"] == "not trusted"
    assert "needs no trust" in cli("env", "trust", "word-game").out
    assert not (home / ".primerl").exists()
    cli("env", "trust", "no-such-env").refused(2, "not installed here")


def test_a_listed_package_is_not_imported(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home / "other", home / "imported")
    with (home / "other" / "sort_digits-0.1.0.dist-info" / "METADATA").open("a") as file:
        file.write("Requires-Dist: verifiers>=0.4\n")
    with (home / "other" / "sort_digits" / "__init__.py").open("a") as file:
        file.write("# a Taskset\n")
    monkeypatch.syspath_prepend(home / "other")
    assert "sort-digits" in cli("env", "list").out
    assert not (home / "imported").exists()
    assert "sort_digits" not in sys.modules


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
