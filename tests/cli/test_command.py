"""The program itself: help, wrong lines, signals."""

import os
import pty
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import BaseModel

from primerl.cli.command import keys_help
from primerl.cli.main import CONFIGURED, PLAIN
from primerl.node.config.loader import COMMANDS as CONFIGS

from .conftest import Cli

HEAVY = {
    *("torch", "vllm", "transformers", "iroh", "libp2p", "trio", "verifiers", "numpy"),
    "matplotlib",
}
COMMANDS = (*CONFIGURED, *PLAIN, "ticket", "env")


def imported_by(*lines: str) -> set[str]:
    """What the first words of modules are after these command lines, in one new process."""
    program = (
        "import sys; from primerl.cli.main import execute;"
        "codes = [execute(line.split()) for line in sys.argv[1:]];"
        "print(*sys.modules, file=sys.stderr); sys.exit(any(codes))"
    )
    command = [sys.executable, "-c", program, *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "typer" in loaded  # else nothing was looked at
    return loaded


def test_help_dry_runs_and_keys_load_nothing_heavy(tmp_path: Path) -> None:
    assert imported_by("--help", "--version").isdisjoint({*HEAVY, "pydantic"})
    loaded = imported_by(
        "train --help",
        "env test --help",
        "rl @ demo --dry-run",
        "sft @ sft_demo --dry-run",
        *(f"{command} --data-dir {tmp_path}" for command in ("init", "id")),
    )
    assert "pydantic" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_help_names_every_command_and_every_exit_code(cli: Cli) -> None:
    ran = cli("--help")
    assert ran.code == 0
    for name in COMMANDS:
        assert f"\n  {name} " in ran.out
    for code in (*range(9), 130, 143):
        assert f" {code} " in ran.out
    bare = cli()
    assert (bare.code, bare.out, bare.err) == (2, ran.out, "")  # no success


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, cli: Cli) -> None:
    ran = cli(command, "--help")
    assert ran.code == 0
    assert ran.out.startswith(f"Usage: primerl-node {command}")


@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [
        ("train", ["--training.lr NUMBER"], ["--data.hub"]),
        ("sft", ["--data.loss-roles JSON"], ["--rollouts"]),
        ("join", ["--engine.type"], ["--training.lr"]),
        ("judge", ["--max-tokens INT", "--api.port"], ["--training.lr", "--max-steps"]),
        ("inference", ["--api.key-variable", "--model.base", "--engine.dtype"], ["--rollouts"]),
    ],
)
def test_help_shows_the_keys_of_the_command(
    command: str, shown: list[str], hidden: list[str], cli: Cli
) -> None:
    out = cli(command, "--help-all").out
    assert all(key in out for key in shown)
    assert not any(key in out for key in hidden)


@pytest.mark.parametrize("command", CONFIGURED)
def test_help_of_a_command_is_short_and_names_the_way_to_the_rest(command: str, cli: Cli) -> None:
    short, whole = (cli(command, flag).out for flag in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 45
    assert f"`primerl-node {command} --help-all`" in " ".join(short.split())
    assert "Examples:" in short
    often = re.findall(r"^  (--[a-z.-]+)", short.partition("often set")[2], re.MULTILINE)
    assert 4 <= len(often) <= 10
    sections = {"--resume": "resume: "}
    for flag in often:
        assert f"\n  {flag} " in whole or f"\n{sections.get(flag, '?')}" in whole
    assert len(whole) > 3 * len(short)


def test_help_and_version_may_be_words(cli: Cli) -> None:
    assert cli("help").out == cli("--help").out
    assert cli("help", "train").out == cli("train", "--help").out
    assert cli("version").out == cli("--version").out != ""


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("rl demo", "did you mean `@ demo`?"),
        ("train mine.toml", "as in `@ mine.toml`"),
        ("join primerl2-abc", "did you mean `--ticket primerl2-abc`?"),
        ("join run.ticket", "did you mean `--ticket run.ticket`?"),
        ("inference https://example.org/t", "did you mean `--ticket https://example.org/t`?"),
        ("eval outputs/a", "did you mean `--weights-dir outputs/a/weights`?"),
        ("eval models/b", "did you mean `--models models/b`?"),
        ("inference models/b", "did you mean `--model.name models/b`?"),
        ("status outputs/a", "did you mean `--data-dir outputs/a`?"),
        ("stop outputs/a", "did you mean `--data-dir outputs/a`?"),
        ("train -name x", "two dashes, as in --name"),
        ("train @ demo --fsync maybe", "'maybe' is not understood here: --fsync is true or false"),
        ("train --training.learning-rate 1", "did you mean training.lr?"),
        ("train --wandb x", "did you mean monitors.wandb?"),
        ("train --xyzzy 1", "--help-all lists the keys"),
        ("train @ nowhere.toml", "such as demo or reverse_text/laptop"),
    ],
)
def test_a_slip_of_the_command_line_is_answered_with_what_was_meant(
    line: str, hint: str, cli: Cli, home: Path
) -> None:
    (home / "outputs" / "a" / "weights").mkdir(parents=True)
    (home / "models" / "b").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (home / "models" / "b" / name).touch()
    ran = cli(*line.split())
    ran.refused(2, hint)
    assert len(ran.err) < 250


def test_the_whole_of_a_ticket_is_not_in_an_error(cli: Cli) -> None:
    ran = cli("join", f"primerl2-{'x' * 200}")
    ran.refused(2, "did you mean `--ticket primerl2-..`?")
    assert "x" * 40 not in ran.err


COMPLETE = """
import os, sys
from primerl.cli.main import main
lines, sys.argv = sys.argv[1:], ["primerl-node"]
for line in lines:
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    try:
        main()
    except SystemExit:
        print(";", flush=True)
print(*sys.modules, file=sys.stderr)
"""


def test_the_shell_completes_commands_options_keys_and_configs(home: Path) -> None:
    completed = {
        "ch": ["chat"],
        "join --wai": ["--wait", "--wait-for-trainer-s"],
        "rl --training.lor": ["--training.lora.rank", "--training.lora.alpha"],
        "rl @ dem": ["demo"],
        "rl @ reverse_text/l": ["reverse_text/laptop"],
        "chat --mo": [],
    }
    lines = [f"primerl-node {words}" for words in completed]
    ran = subprocess.run(
        [sys.executable, "-c", COMPLETE, *lines],
        env={**os.environ, "_PRIMERL_NODE_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [answer.split() for answer in ran.stdout.split(";")[:-1]]
    for (words, wanted), answer in zip(completed.items(), answers, strict=True):
        assert answer[: len(wanted) or None] == wanted, words
    loaded = {name.partition(".")[0] for name in ran.stderr.split()}
    assert "primerl" in loaded
    assert loaded.isdisjoint({"torch", "numpy", "transformers", "iroh", "libp2p", "textual"})


def test_the_manual_page_has_every_command_with_its_options(cli: Cli) -> None:
    page = cli("man").out
    assert page.startswith(".TH PRIMERL\\-NODE 1")
    for command in (*CONFIGURED, *PLAIN, "ticket revoke", "service install", "env trust"):
        assert f"\n.SS {command}\n" in page
    assert "\n.B \\-\\-allow\\-environment NAME\n" in page
    assert "primerl\\-node chat outputs/demo" in page
    assert not re.search(r"^[.'](?!TH|SH|SS|PP|TP|B |nf|fi)", page, re.MULTILINE)
    assert "\b" not in page


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_key_has_a_meaning_in_the_help(cls: type[BaseModel]) -> None:
    lines = keys_help(cls).splitlines()
    keys = [bool(re.match(r"  (?:--)?[a-z][\w.-]* \S", line)) for line in lines]
    without = [
        line
        for (line, below), is_key in zip(pairwise(lines), keys, strict=False)
        if is_key and below.strip().startswith("[")
    ]
    assert sum(keys) > 20  # else nothing was looked at
    assert without == []


@pytest.mark.parametrize(
    "args", [["nonsense"], ["peers", "--nonsense"], ["stop", "--wait", "soon"]]
)
def test_a_wrong_command_line_is_one_line_with_code_2(args: list[str], cli: Cli) -> None:
    cli(*args).refused(2, "--help")


# -- signals ---------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, fcntl, signal, sys, termios
from pathlib import Path
from primerl.cli.main import app, execute
from primerl.cli.command import run_to_end

signal.signal(signal.SIGHUP, signal.{hangup})
if sys.stdin.isatty():
    fcntl.ioctl(0, termios.TIOCSCTTY)

async def work():
    print("up", flush=True)
    try:
        await asyncio.sleep(60)
    finally:
        print("tidy", flush=True)
        {last}

app.command("work")(lambda: run_to_end(work(){run_dir}))
sys.exit(execute(["work"]))
"""


def program(last: str, run_dir: str = "", hangup: str = "SIG_DFL") -> list[str]:
    """The program's command; `hangup` is what its parent does with SIGHUP."""
    code = PROGRAM.format(last=last, run_dir=run_dir, hangup=hangup)
    return [sys.executable, "-c", code]


def started(last: str, run_dir: str = "", hangup: str = "SIG_DFL") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        program(last, run_dir, hangup),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.mark.parametrize(
    ("number", "last"),
    [
        (signal.SIGINT, "pass"),
        (signal.SIGTERM, "pass"),
        (signal.SIGHUP, "pass"),
        (signal.SIGTERM, "return"),  # the work swallows the stop
    ],
)
def test_the_first_signal_stops_in_order(number: signal.Signals, last: str) -> None:
    process = started(last)
    process.send_signal(number)
    out, err = process.communicate(timeout=100)
    assert (out, process.returncode) == ("tidy\n", 128 + number)
    assert err == "stopping; once more to stop at once\n"


@pytest.mark.parametrize("trace", ["checkpoints/step_0", "trainer/ledger.db", ""])
def test_a_run_that_is_stopped_says_how_to_go_on(trace: str, tmp_path: Path) -> None:
    (tmp_path / trace).mkdir(parents=True, exist_ok=True)
    process = started("pass", f", Path({str(tmp_path)!r})")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    begun = trace.startswith("checkpoints")
    assert err.endswith(f"stopped; go on with --resume: {tmp_path}\n") == begun
    assert ("--resume begins the warm-up again" in err) == (bool(trace) and not begun)


def test_the_second_signal_does_not_wait() -> None:
    process = started("await asyncio.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "tidy\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGINT


def test_a_terminal_that_closes_twice_lets_the_work_end_in_order() -> None:
    """A shell passes SIGHUP on that the kernel has sent already."""
    process = started("await asyncio.sleep(60)")
    process.send_signal(signal.SIGHUP)
    assert process.stdout is not None
    assert process.stdout.readline() == "tidy\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == -signal.SIGTERM


def test_under_nohup_the_work_goes_on_when_the_terminal_closes() -> None:
    process = started("pass", hangup="SIG_IGN")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=100)
    assert (out, process.returncode) == ("tidy\n", 128 + signal.SIGTERM)
    assert err == "stopping; once more to stop at once\n"


def read_line(terminal: int) -> bytes:
    """A terminal gives what it has, be it half of a line."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(terminal, 100)
    return line


def test_a_terminal_that_is_gone_does_not_cut_the_end_short(tmp_path: Path) -> None:
    done = tmp_path / "done"
    terminal, its_end = pty.openpty()
    command = program(f"Path({str(done)!r}).touch()")
    process = subprocess.Popen(
        command, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True
    )
    os.close(its_end)
    assert read_line(terminal) == b"up\r\n"
    os.close(terminal)
    assert process.wait(timeout=100) == 128 + signal.SIGHUP
    assert done.exists()


def test_under_nohup_the_work_goes_on_though_its_terminal_is_gone(tmp_path: Path) -> None:
    """What it says goes nowhere, and each line of it fails."""
    done = tmp_path / "done"
    terminal, its_end = pty.openpty()
    command = program(f"print('more'); Path({str(done)!r}).touch()", hangup="SIG_IGN")
    process = subprocess.Popen(
        command, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True
    )
    os.close(its_end)
    assert read_line(terminal) == b"up\r\n"
    os.close(terminal)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 128 + signal.SIGTERM
    assert done.exists()


@pytest.mark.parametrize(
    "command",
    [
        *("id --data-dir {}", "status --data-dir {}", "explain --data-dir {}"),
        *("replay {}", "rollouts {}", "join --ticket {}", "import {}"),
        *("sft --data.files {}", "env test reverse-text --readable {}"),
        *("inference --model.name {}", "eval @ eval_demo --weights-dir {}"),
        "train --training.loss.type reverse_kl --training.loss.reference {} --dry-run",
    ],
)
def test_the_home_of_a_user_that_does_not_exist_is_refused_in_one_line(
    cli: Cli, home: Path, command: str
) -> None:
    ran = cli(*command.format("~nobody-here/x").split())
    ran.refused(ran.code, "~nobody-here/x")
    assert ran.code in range(2, 9)
    assert not (home / "~nobody-here").exists()


@pytest.mark.parametrize(
    "command", ["status", "join", "train @ demo", "eval @ eval_api", "sft @ sft_demo", "doctor"]
)
def test_a_user_without_a_home_directory_is_told_so_in_one_line_before_anything_is_made(
    cli: Cli, home: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """As in a container that runs under a number."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 54321)
    cli(*command.split()).refused(2, "no home directory: set HOME")
    assert list(home.iterdir()) == []


PRIMERL_NODE = f"{sys.executable} -m primerl.cli.main"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_command_whose_streams_are_closed_does_its_work(closed: str, tmp_path: Path) -> None:
    """A service closes them, and what is opened next must not get what is printed."""
    line = f"{PRIMERL_NODE} init --data-dir node {closed}"
    ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert (tmp_path / "node" / "key.pem").read_text().startswith("-----BEGIN")


def test_a_reader_that_has_read_enough_ends_a_command_without_a_word() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as unread:
        command = [*PRIMERL_NODE.split(), "--help"]
        ran = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stderr) == (1, b"")
