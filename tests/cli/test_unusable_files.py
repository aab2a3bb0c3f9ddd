"""A directory, a link to nothing, a full or a read-only disk in place of a file: one line and exit code 5."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.disks import fill, make_read_only, small_disk

from .conftest import Ran

SMALL = ("@", "demo", "--name", "run")
SFT = ("@", "sft_demo", "--name", "run")


def one_line(ran: Ran, *words: str) -> None:
    """Assert that a command ended with the exit code of a disk, and one line with these words."""
    assert ran.code == 5, ran.err
    last = ran.err.rstrip("\n").splitlines()
    assert last[-1].startswith("primerl-node: error: ")
    assert len([line for line in last if line.startswith("primerl-node: error: ")]) == 1
    assert "Traceback" not in ran.err
    for word in words:
        assert word in last[-1]


@pytest.mark.parametrize("name", ["config.json", "ticket.txt", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("command", ["train", "rl"])
def test_a_directory_where_a_file_of_the_run_should_be(
    cli: Callable[..., Ran], home: Path, command: str, name: str
) -> None:
    (home / "outputs" / "run" / name).mkdir(parents=True)
    resume = ["--resume"] if name == "metrics.jsonl" else []
    one_line(cli(command, *SMALL, *resume), f"run/{name}", "directory", "move it away")


@pytest.mark.parametrize("name", ["", "logs", "checkpoints", "trainer", "trainer/key.pem"])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_something_else_where_a_directory_or_the_key_should_be(
    cli: Callable[..., Ran], home: Path, name: str, kind: str
) -> None:
    path = home / "outputs" / "run" / name
    path.parent.mkdir(parents=True)
    if kind == "link":
        path.symlink_to(home / "nowhere")
    elif name == "trainer/key.pem":
        path.mkdir()
    else:
        path.touch()
    ran = cli("train", *SMALL)
    one_line(ran, name)
    assert any(word in ran.err for word in ("move it away", "remove it"))


@pytest.mark.parametrize("name", ["config.json", "logs"])
def test_the_same_in_supervised_learning(cli: Callable[..., Ran], home: Path, name: str) -> None:
    path = home / "outputs" / "run" / name
    path.parent.mkdir(parents=True)
    path.mkdir() if name == "config.json" else path.touch()
    one_line(cli("sft", *SFT), f"run/{name}", "move it away")


@pytest.mark.parametrize("command", [["id"], ["init"]])
def test_a_directory_or_a_link_in_the_place_of_the_key(
    cli: Callable[..., Ran], home: Path, command: list[str]
) -> None:
    (home / "a" / "key.pem").mkdir(parents=True)
    (home / "b").mkdir()
    (home / "b" / "key.pem").symlink_to("nowhere")
    (home / "c").touch()
    for place in "abc":
        ran = cli(*command, "--data-dir", str(home / place))
        assert ran.code in (4, 5), ran.err
        assert ran.err.count("\n") == 1
        assert str(home / place) in ran.err


@pytest.mark.parametrize("command", ["train", "rl", "sft", "init"])
def test_a_read_only_disk_is_one_line(cli: Callable[..., Ran], home: Path, command: str) -> None:
    with small_disk(home / "disk") as disk:
        (disk / "run").mkdir()
        make_read_only(disk)
        if command == "init":
            ran = cli("init", "--data-dir", str(disk / "node"))
        else:
            ran = cli(command, *(SFT if command == "sft" else SMALL), "--output-dir", str(disk))
        one_line(ran, "Read-only file system")


def test_a_full_disk_at_the_start_is_one_line_and_leaves_no_half_of_a_file(
    cli: Callable[..., Ran], home: Path
) -> None:
    with small_disk(home / "disk") as disk:
        run = disk / "run"
        run.mkdir()
        (run / "config.json").write_text(json.dumps({"name": "before"}))
        filling = fill(disk)
        one_line(cli("train", *SMALL, "--output-dir", str(disk)), "No space left on device")
        assert json.loads((run / "config.json").read_text()) == {"name": "before"}
        (disk / "node").mkdir()
        one_line(cli("init", "--data-dir", str(disk / "node")), "No space left on device")
        assert list((disk / "node").iterdir()) == []
        filling.unlink()
        assert cli("init", "--data-dir", str(disk / "node")).code == 0
