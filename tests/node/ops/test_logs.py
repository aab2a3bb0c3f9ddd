import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machine import fill, small_disk

from primerl.node.config.run import LogConfig
from primerl.node.errors import StorageError
from primerl.node.ops.logs import JsonLines, LogLimits, PlainLines, configure, newest_lines

EVIL = "peer \x1b[31m\x1b]0;title\x07 says\r\n12:00:00 I fake: all is well \u202e \x9b2J"


def record(error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("primerl.node.x", 20, "x.py", 1, "refused: %s", (EVIL,), info)


def test_a_peers_words_cannot_steer_the_terminal() -> None:
    line = PlainLines("%(levelname).1s %(name)s: %(message)s").format(record())
    assert line.isprintable()
    assert "\\x1b[31m" in line
    assert "\\r\\n12:00:00 I fake" in line


def test_what_is_printable_stays_as_it_is() -> None:
    plain = logging.LogRecord("x", 20, "x.py", 1, "policy %d of caf\u00e9 \u2713", (3,), None)
    assert PlainLines("%(message)s").format(plain) == "policy 3 of caf\u00e9 \u2713"


def test_a_traceback_keeps_its_lines_and_nothing_else() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as error:
        lines = PlainLines("%(message)s").format(record(error)).split("\n")
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("failed", [False, True])
def test_a_json_line_is_one_line(failed: bool) -> None:
    line = JsonLines().format(record(ValueError(EVIL) if failed else None))
    assert line.isprintable()
    said = json.loads(line)
    assert said["message"] == f"refused: {EVIL}"
    assert ("traceback" in said) == failed
    assert said["level"] == "info"
    assert said["logger"] == "x"


# -- files -------------------------------------------------------------------------------------------


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The root logger, with what was there before once the test is done."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers = []
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = before, level


def test_a_full_disk_costs_log_lines_and_is_reported_once_as_is_its_end(
    tmp_path: Path, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        file = disk / "logs" / "node.jsonl"
        configure(LogConfig(), file)
        log.warning("before")
        filling = fill(disk)
        for number in range(40):
            log.warning("lost %d %s", number, "x" * 4096)
        filling.unlink()
        for _ in range(3):
            log.warning("after")
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert "Logging error" not in told
        assert told.count("the log cannot be written") == 1
        assert "No space left on device" in told
        assert told.count("the log is written to") == 1
        assert told.count(" lost ") == 40  # the terminal has them all
        lines = file.read_text().splitlines()
        assert json.loads(lines[0])["message"] == "before"
        assert json.loads(lines[-1])["message"] == "after"
        for handler in log.handlers:
            handler.close()


def test_a_log_whose_last_lines_do_not_fit_closes_without_a_word(
    tmp_path: Path, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        configure(LogConfig(), disk / "node.jsonl")
        fill(disk)
        log.warning("x" * 10000)
        for handler in log.handlers:
            handler.close()
    assert "Traceback" not in capsys.readouterr().err


def test_a_log_is_rotated_by_size_and_a_limited_number_is_kept(
    tmp_path: Path, log: logging.Logger
) -> None:
    file = tmp_path / "node.jsonl"
    configure(LogConfig(), file, LogLimits(max_bytes=10_000, keep=2))
    for number in range(100):
        log.warning("%d %s", number, "x" * 1000)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["node.jsonl", "node.jsonl.1", "node.jsonl.2"]
    assert all(path.stat().st_size <= 10_000 for path in tmp_path.iterdir())
    assert json.loads(file.read_text().splitlines()[-1])["message"].startswith("99 ")


@pytest.mark.parametrize("name", ["logs", "logs/node.jsonl"])
def test_something_else_where_the_log_should_be_is_one_line(
    tmp_path: Path, log: logging.Logger, name: str
) -> None:
    if name == "logs":
        (tmp_path / "logs").touch()
    else:
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(StorageError, match="move it away"):
        configure(LogConfig(), tmp_path / "logs" / "node.jsonl")


def test_a_mistake_of_ours_in_a_log_call_is_still_shown(
    tmp_path: Path, log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(LogConfig(), tmp_path / "node.jsonl")
    log.warning("%d", "no number")
    assert "Traceback" in capsys.readouterr().err


def test_a_log_can_be_read_by_its_owner_alone(tmp_path: Path, log: logging.Logger) -> None:
    before = os.umask(0o022)
    try:
        limits = LogLimits(max_bytes=1000, keep=1)
        configure(LogConfig(), tmp_path / "logs" / "worker.jsonl", limits)
        for _ in range(50):
            log.info("a line of some length that fills the file")
    finally:
        os.umask(before)
    files = list((tmp_path / "logs").iterdir())
    assert len(files) == 2
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 2


def test_the_newest_lines_are_read_back_bounded_and_whole(
    tmp_path: Path, log: logging.Logger
) -> None:
    assert newest_lines() == [], "a process without a log file"
    file = tmp_path / "node.jsonl"
    configure(LogConfig(), file)
    for number in range(300):
        log.warning("line %d", number)
    messages = [json.loads(json.dumps(line))["message"] for line in newest_lines()]
    assert messages == [f"line {number}" for number in range(100, 300)]
    cut = newest_lines(most=250)
    assert 1 <= len(cut) <= 3, "a line whose beginning is cut off is left out"
    file.unlink()
    assert newest_lines() == []
