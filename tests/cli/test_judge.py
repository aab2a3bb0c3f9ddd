"""The command `judge`: what it refuses before anything starts, and what a dry run tells."""

from pathlib import Path

from primerl.node.storage.run_files import MARK

from .conftest import Cli


def test_a_dry_run_says_what_audits_need_of_memory(cli: Cli) -> None:
    ran = cli("judge", "--model.create.hidden-size", "64", "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert "# memory of this node: the auditor's networks" in ran.out
    assert "audit_rate = 1.0" in ran.out
    ran = cli("judge", "--model.name", "not-here", "--dry-run")
    assert (ran.code, "# memory" in ran.out) == (0, False)


def test_in_bfloat16_a_judge_without_a_measure_of_noise_is_refused(cli: Cli) -> None:
    given = ("judge", "--model.name", "m", "--engine.dtype", "bfloat16", "--dry-run")
    cli(*given).refused(2, "has to know honest noise", "verification.references")
    assert cli(*given, "--verification.references", "ab" * 32).code == 0
    assert cli(*given, "--verification.bounds", "built-in").code == 0


def test_replies_that_leave_no_room_for_a_prompt_are_refused_in_one_line(cli: Cli) -> None:
    ran = cli("judge", "--max-tokens", "8192", "--dry-run")
    ran.refused(2, "prompt and reply together have engine.max_model_len, 8192: lower it")


def test_a_judge_begins_in_a_fresh_directory(cli: Cli, tmp_path: Path) -> None:
    """Its logs are there before it looks whether the directory is free."""
    made = ("--output-dir", str(tmp_path), "--network.libp2p", "false")
    ran = cli("judge", "--model.name", str(tmp_path / "none"), *made)
    assert ran.code != 0
    assert "would write over" not in ran.err
    directory = tmp_path / "judge"
    assert (directory / MARK).is_file()
    assert (directory / "logs").is_dir()
