import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import BaseModel

from primerl.cli.command import keys_help
from primerl.node.config.loader import COMMANDS as COMMANDS_WITH_CONFIG

from .conftest import Ran

HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "iroh",
    "libp2p",
    "trio",
    "verifiers",
    "numpy",
    "matplotlib",
)
COMMANDS = (
    "init",
    "id",
    "ticket",
    "join",
    "train",
    "rl",
    "sft",
    "calibrate",
    "doctor",
    "inference",
    "peers",
    "explain",
    "status",
    "stop",
)


def imported_by(*args: str) -> set[str]:
    program = (
        "import sys; from primerl.cli.main import execute; code = execute(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["train", "--help"]])
def test_help_loads_nothing_heavy(args: list[str]) -> None:
    loaded = imported_by(*args)
    assert "typer" in loaded  # else nothing was looked at
    assert loaded.isdisjoint(HEAVY)


def test_a_dry_run_and_an_id_load_nothing_heavy(tmp_path: Path) -> None:
    assert imported_by("rl", "@", "demo", "--dry-run").isdisjoint(HEAVY)
    assert imported_by("sft", "@", "sft_demo", "--dry-run").isdisjoint(HEAVY)
    assert imported_by("init", "--data-dir", str(tmp_path)).isdisjoint(HEAVY)
    assert imported_by("id", "--data-dir", str(tmp_path)).isdisjoint(HEAVY)


def test_help_names_every_command_and_every_exit_code(cli: Callable[..., Ran]) -> None:
    ran = cli("--help")
    assert ran.code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in ran.out
    for code in (*range(9), 130, 143):
        assert f" {code} " in ran.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, cli: Callable[..., Ran]) -> None:
    ran = cli(command, "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"Usage: primerl-node {command}")


def test_help_of_configured_commands_shows_the_keys(cli: Callable[..., Ran]) -> None:
    assert "--training.lr NUMBER" in cli("train", "--help").out
    assert "--data.loss-roles JSON" in cli("sft", "--help").out
    join = cli("join", "--help").out
    assert "--engine.type" in join
    assert "--training.lr" not in join


def test_no_arguments_print_the_help_as_it_is_and_are_no_success(cli: Callable[..., Ran]) -> None:
    ran = cli()
    assert (ran.code, ran.err) == (2, "")
    assert ran.out == cli("--help").out


@pytest.mark.parametrize("cls", COMMANDS_WITH_CONFIG)
def test_every_key_has_a_meaning_in_the_help(cls: type[BaseModel]) -> None:
    lines = keys_help(cls).splitlines()
    flag = re.compile(r"  (?:--)?[a-z][\w.-]* \S")
    without = [
        line.strip()
        for line, below in pairwise(lines)
        if flag.match(line) and below.strip().startswith("[")
    ]
    assert sum(bool(flag.match(line)) for line in lines) > 20  # else nothing was looked at
    assert without == []


@pytest.mark.parametrize(
    "args", [["nonsense"], ["peers", "--nonsense"], ["stop", "--wait", "soon"]]
)
def test_a_wrong_command_line_is_one_line_with_code_2(
    args: list[str], cli: Callable[..., Ran]
) -> None:
    ran = cli(*args)
    assert ran.code == 2
    assert ran.err.startswith("primerl-node: error: ")
    assert ran.err.count("\n") == 1
    assert "--help" in ran.err
