"""Reasons that an operator reads when a process ends."""

from primerl.node.process.exit_reason import exit_reason, known_cause, signal_name

CAUSES = (("No space", "make room"), ("broke", "mend it"))


def test_the_first_known_cause_in_any_line_is_the_reason() -> None:
    lines = ["it broke", "No space left", "and a traceback"]
    for code in (1, None, -6):
        assert exit_reason("it", code, lines, causes=CAUSES) == "make room"
    assert known_cause(["harmless"], CAUSES) == ""


def test_without_a_known_cause_the_reason_is_the_signal_or_the_last_line() -> None:
    assert "killed from outside" in exit_reason("it", -9, [], memory_advice="buy more")
    assert "buy more" in exit_reason("it", -9, [], memory_advice="buy more")
    assert "asked to end from outside" in exit_reason("it", -15, [])
    assert "shared memory" in exit_reason("it", -7, ["harmless"])
    assert "crashed (SIGSEGV)" in exit_reason("it", -11, [])
    assert "signal 200" in exit_reason("it", -200, [])
    assert "exit code 3 (the last line)" in exit_reason("it", 3, ["a line", "the last line"])
    assert "it broke" in exit_reason("it", None, [])
    assert (signal_name(9), signal_name(200)) == ("SIGKILL", "signal 200")
