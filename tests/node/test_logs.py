import json
import logging

import pytest

from primerl.node.logs import JsonLines, PlainLines

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
