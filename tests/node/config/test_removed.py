"""Keys that were removed: an old config is refused with a line that says what to do now."""

from pathlib import Path

import pytest

from primerl.node.config.loader import COMMANDS, keys, load
from primerl.node.config.removed import REMOVED, replacement
from primerl.node.config.run import JoinConfig, RunConfig
from primerl.node.errors import UsageError

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_a_removed_key_says_what_takes_its_place_wherever_it_is_set(tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text("[engine.concurrency]\nmax_inflight = 9\n[log]\nkeep = 1\n")
    with pytest.raises(UsageError) as caught:
        load(RunConfig, ["@", str(file)], {})
    text = str(caught.value)
    assert f"engine.concurrency in {file} was removed: {REMOVED['engine.concurrency']}" in text
    assert f"log.keep in {file} was removed: {REMOVED['log.keep']}" in text
    with pytest.raises(UsageError, match=r"log\.keep on the command line was removed: four"):
        load(RunConfig, ["--log.keep", "1"], {})
    with pytest.raises(UsageError, match="PRIMERL_LOG__KEEP in the environment was removed: four"):
        load(RunConfig, [], {"PRIMERL_LOG__KEEP": "1"})


def test_a_removed_key_is_known_below_other_sections_and_by_its_section() -> None:
    assert replacement("engine.concurrency.min-inflight") == REMOVED["engine.concurrency"]
    assert replacement("environments.0.engine.max_restarts") == REMOVED["engine.max_restarts"]
    assert not replacement("engine.max_restart")
    assert not replacement("engine")
    assert "120 s" in replacement("lease_timeout_s")
    assert not replacement("rollouts.lease_timeout_s")


def test_no_page_tells_to_set_a_removed_key() -> None:
    for page in PAGES:
        text = page.read_text()
        for removed in REMOVED:
            name = removed.removeprefix(".")
            assert f"`{name}`" not in text or removed.startswith("."), (page, name)
            assert f"--{name.replace('_', '-')}" not in text, (page, name)


def test_no_key_is_removed_and_there() -> None:
    for command in COMMANDS:
        for key in keys(command):
            ends = [end for end in REMOVED if f".{key}".endswith(f".{end}") or f".{key}" == end]
            assert ends == [], key


def test_a_file_with_a_key_of_another_name_is_read_with_a_line_that_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "join.toml"
    file.write_text("[network]\nmax_upload_mbps = 5.0\nport = 7\n")
    config = load(JoinConfig, ["@", str(file)], {})
    assert (config.limits.upload, config.network.port) == (5.0, 7)
    assert f"{file}: network.max_upload_mbps is limits.upload now" in caplog.text
    file.write_text("[network]\nmax_upload_mbps = 5.0\n[limits]\nupload = 9.0\n")
    assert load(JoinConfig, ["@", str(file)], {}).limits.upload == 9.0


@pytest.mark.parametrize(
    "text", ["network = 3", "network = []", "limits = 3\n[network]\nmax_upload_mbps = 5"]
)
def test_a_file_whose_sections_are_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "join.toml"
    file.write_text(text)
    with pytest.raises(UsageError):
        load(JoinConfig, ["@", str(file)], {})
