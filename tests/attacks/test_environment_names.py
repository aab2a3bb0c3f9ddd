"""A manifest names a module that every worker would import: only what its owner allowed is imported."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.installed import install
from support.swarm import Swarm

from primerl.node.environments import allowed
from primerl.node.environments.allowed import EnvironmentNotAllowed
from primerl.node.errors import UsageError
from primerl.protocol.manifests import EnvironmentContract


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("antigravity", "a part of Python"),
        ("harbor", "may fetch and run code of others"),
        ("no-such-module", "not installed here"),
    ],
)
async def test_a_worker_imports_no_module_because_a_run_names_it(
    tmp_path: Path, model_dir: Path, name: str, why: str
) -> None:
    async with Swarm(tmp_path, model_dir, environment={"id": name}) as swarm:
        await swarm.start_trainer()
        with pytest.raises(UsageError, match=why):
            await swarm.add_worker("w1").ended()
    assert name not in sys.modules
    assert list((tmp_path / "w1" / "runs").glob("*/model/*")) == []  # nothing was fetched either


@pytest.mark.parametrize(
    "options",
    [
        b'{"id": "antigravity"}',
        b'{"args": {}, "id": "Reverse-Text"}',
        b'{"id": 3}',
        b"[]",
        b"[" * 9999,
    ],
)
async def test_a_manifest_whose_options_name_another_module_than_it_does_is_refused(
    tmp_path: Path, model_dir: Path, options: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is allowed has to be what is played; before, the options said what was imported."""

    def forged(**fields: Any) -> EnvironmentContract:
        fields["config"] = options
        return EnvironmentContract(**fields)

    monkeypatch.setattr(allowed, "EnvironmentContract", forged)
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        with pytest.raises(UsageError, match="this run's environment"):
            await swarm.add_worker("w1").ended()
    assert list((tmp_path / "w1" / "runs").glob("*/model/*")) == []


async def test_a_worker_whose_owner_allows_the_package_takes_part(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", tmp_path / "imported")
    monkeypatch.syspath_prepend(tmp_path / "site")
    async with Swarm(tmp_path, model_dir, environment={"id": "sort-digits"}) as swarm:
        await swarm.start_trainer()
        with pytest.raises(EnvironmentNotAllowed):
            await swarm.add_worker("w1").ended()
        swarm.add_worker("w2", environments={"allow": ["sort-digits"]})
        assert (await swarm.finished())["steps"] == 3


async def test_a_worker_refuses_other_files_under_the_name_that_its_owner_allows(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", tmp_path / "imported")
    monkeypatch.syspath_prepend(tmp_path / "site")
    async with Swarm(tmp_path, model_dir, environment={"id": "sort-digits"}) as swarm:
        await swarm.start_trainer()
        (tmp_path / "site" / "sort_digits" / "words.txt").write_text("three")
        with pytest.raises(UsageError, match="install the release that the run has"):
            await swarm.add_worker("w1", environments={"allow": ["sort-digits"]}).ended()
