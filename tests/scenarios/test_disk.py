"""The table of what grows on disk in docs/operating.md names every file that a run and its nodes leave."""

import re
from pathlib import Path

import pytest
from support.repository import ROOT
from support.swarm import Swarm

from primerl.node.storage.run_files import written_by_run

RUN, DATA = "in a run's directory", "in the data directory of a worker or validator"
NOT_OF_A_SMALL_RUN = {
    *("model/", "data/", "wandb/", "judge.db", "worker_N/", "reward.png", "evaluations.jsonl"),
    *("checkpoints/policy.safetensors", "checkpoints/void_N/", "logs/", "trainer/key.pem"),
    *("trainer/control.sock", "key.pem", "key.retired", "allowed_environments.json", "join.toml"),
    *("control.sock", "stage.sock", "trainer/backup/N/"),
}
"""Rows of which a run of this suite, in one process and without the program's logs, leaves nothing."""


def table() -> dict[str, list[str]]:
    """Return the names in the first column, by the part of the table that they stand in."""
    text = (ROOT / "docs" / "operating.md").read_text()
    rows = text.partition("## What grows on disk")[2].partition("\n## ")[0].splitlines()
    parts: dict[str, list[str]] = {}
    for row in (row for row in rows if row.startswith("| ")):
        first = row.split(" | ")[0].removeprefix("| ")
        if first.startswith("**"):
            parts[first.strip("*")] = []
        elif parts:
            parts[list(parts)[-1]] += re.findall(r"`([^`]+)`", first)
    return parts


def matches(name: str, path: str) -> bool:
    """Return whether a name of the table, a file or a folder with "/" at its end, stands for a path."""
    pattern = re.escape(name).replace("N", r"\d+").replace("ID", "[0-9a-f]{16}")
    rest = ".+" if name.endswith("/") else r"(-wal|-shm)?" if name.endswith(".db") else ""
    return re.fullmatch(pattern + rest, path) is not None


def files(directory: Path) -> list[str]:
    """List the files below a directory."""
    return [
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    ]


async def test_what_grows_on_disk_names_all_that_a_run_leaves_and_nothing_that_it_does_not(
    tmp_path: Path, model_dir: Path
) -> None:
    parts = table()
    async with Swarm(tmp_path, model_dir, checkpoint={"weights_interval": 1}) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w")
        await swarm.finished()
        await worker.ended()
    left = {RUN: files(swarm.run_dir), DATA: files(worker.data_dir)}
    for part, paths in left.items():
        unlisted = [path for path in paths if not any(matches(name, path) for name in parts[part])]
        assert not unlisted, part
        unseen = {name for name in parts[part] if not any(matches(name, path) for path in paths)}
        assert unseen <= NOT_OF_A_SMALL_RUN, part


@pytest.mark.parametrize("prefix", ["", "worker_1/"])
def test_what_the_table_names_is_what_clean_removes(prefix: str) -> None:
    names = table()[DATA if prefix else RUN]
    samples = [
        name.replace("N", "1").replace("ID", "0" * 16) for name in names if not name.endswith("/")
    ]
    samples.remove("key.retired" if prefix else ".primerl-run")  # these stay
    if not prefix:
        samples[samples.index("rollouts/step_1.parquet")] = "rollouts/step_000001.parquet"
    assert not [name for name in samples if not written_by_run(prefix + name)]
