"""What a run's environment may be on a worker: found, compared, allowed before anything of it is imported."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from support.installed import install

from primerl.node.environments.allowed import (
    EnvironmentNotAllowed,
    Package,
    check_allowed,
    find_package,
    remember,
)
from primerl.node.errors import StorageError, UsageError
from primerl.protocol.manifests import EnvironmentContract, SamplingContract

Site = Callable[..., Package]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Install sort-digits in a directory of its own, before all others; returns what is found."""
    made = 0

    def make(**changes: str) -> Package:
        nonlocal made
        made += 1
        directory = tmp_path / f"site{made}"
        install(directory, tmp_path / "imported", **changes)
        monkeypatch.syspath_prepend(directory)
        found = find_package("sort-digits")
        assert found is not None
        assert "sort_digits" not in sys.modules
        assert not (tmp_path / "imported").exists()
        return found

    return make


def contract(package: Package) -> EnvironmentContract:
    return EnvironmentContract(
        name=package.environment,
        id=package.environment,
        config=json.dumps({"id": package.environment}).encode(),
        seed=0,
        version="verifiers",
        group_size=2,
        max_turns=1,
        sampling=SamplingContract(1.0, 4),
        package=package.label,
        package_digest=package.digest,
    )


def test_the_same_release_has_the_same_digest_wherever_it_lies(site: Site) -> None:
    one, other = site(), site()
    assert one == other
    assert one.label == "sort-digits 0.1.0"
    assert site(more="# a word\n").digest != one.digest


def test_a_module_of_the_same_distribution_counts(site: Site, tmp_path: Path) -> None:
    before = site()
    (tmp_path / "site1" / "sort_digits_helper.py").write_text("LIMIT = 10\n")
    after = find_package("sort_digits")
    assert after is not None
    assert after.digest != before.digest


@pytest.mark.parametrize("name", ["reverse-text", "arithmetic", "alphabet-sort", "word-game"])
def test_a_bundled_environment_needs_no_leave(name: str, tmp_path: Path) -> None:
    options = json.dumps({"id": name}).encode()
    bundled = EnvironmentContract(
        name=name,
        id=name,
        config=options,
        seed=0,
        version="verifiers",
        group_size=2,
        max_turns=1,
        sampling=SamplingContract(1.0, 4),
    )
    check_allowed(bundled, [], tmp_path)


def test_a_bundled_environment_that_a_library_scores_needs_its_release_and_no_leave(
    tmp_path: Path,
) -> None:
    found = find_package("math")
    assert found is not None
    assert found.label.startswith("math-verify ")
    check_allowed(contract(found), [], tmp_path)
    with pytest.raises(UsageError, match="install the release that the run has"):
        check_allowed(contract(replace(found, digest=bytes(32))), ["math"], tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("math-env", "hendrycks-math", "intellect-math", "deepscaler"),
        *("reverse-text-hub", "alphabet-sort-hub"),
    ],
)
def test_a_bundled_environment_that_reads_a_data_set_needs_leave(name: str, tmp_path: Path) -> None:
    found = find_package(name)
    assert found is not None
    with pytest.raises(EnvironmentNotAllowed, match="reads a data set that the run names"):
        check_allowed(contract(found), [], tmp_path)
    check_allowed(contract(found), [name], tmp_path)
    remember(found, tmp_path)
    check_allowed(contract(found), [], tmp_path)


@pytest.mark.parametrize("name", ["this", "antigravity", "os", "sys", "subprocess", "http"])
def test_a_part_of_python_is_no_environment_even_if_it_is_allowed(
    name: str, tmp_path: Path
) -> None:
    before = set(sys.modules)
    with pytest.raises(UsageError, match="a part of Python"):
        check_allowed(contract(Package(name, "x 1", bytes(32))), [name], tmp_path)
    assert name in before or name not in sys.modules


@pytest.mark.parametrize("name", ["os.path", "../evil", "a/b", "", "\x1b[2J", "-x"])
def test_a_name_that_is_no_module_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no environment is named"):
        find_package(name)


@pytest.mark.parametrize("name", ["openenv", "harbor"])
def test_a_taskset_of_the_library_is_played_only_where_it_is_allowed_by_name(
    name: str, tmp_path: Path
) -> None:
    loaded = set(sys.modules)  # the library itself may have loaded it in an earlier test
    found = find_package(name)
    assert found is not None
    with pytest.raises(EnvironmentNotAllowed, match="may fetch and run code of others"):
        check_allowed(contract(found), ["sort-digits"], tmp_path)
    check_allowed(contract(found), [name], tmp_path)
    assert f"verifiers.v1.tasksets.{name}" not in set(sys.modules) - loaded


def test_what_is_not_installed_is_refused_with_what_to_install(tmp_path: Path) -> None:
    wanted = contract(Package("sort-nothing", "sort-nothing 2.0", bytes(32)))
    told = r"pip install. its wheel or directory.*the run has sort-nothing 2\.0"
    with pytest.raises(UsageError, match=told):
        check_allowed(wanted, ["sort-nothing"], tmp_path)


def test_an_installed_package_is_played_once_its_name_is_allowed(
    site: Site, tmp_path: Path
) -> None:
    wanted = contract(site())
    with pytest.raises(EnvironmentNotAllowed, match=r"--allow-environment sort-digits") as caught:
        check_allowed(wanted, ["other"], tmp_path)
    assert "package sort-digits 0.1.0, digest " in str(caught.value)
    check_allowed(wanted, ["sort_digits"], tmp_path)


def test_another_release_is_refused_with_both_even_where_the_name_is_allowed(
    site: Site, tmp_path: Path
) -> None:
    theirs = site(version="0.2.0", more="# newer\n")
    ours = site()
    with pytest.raises(UsageError) as caught:
        check_allowed(contract(theirs), ["sort-digits"], tmp_path)
    for word in ("sort-digits 0.2.0", theirs.digest.hex()[:12], str(ours), "install the release"):
        assert word in str(caught.value)
    bare = structs.replace(contract(ours), package="", package_digest=b"")
    with pytest.raises(UsageError, match="no known package, digest none"):
        check_allowed(bare, ["sort-digits"], tmp_path)


def test_always_holds_for_this_very_package_only(site: Site, tmp_path: Path) -> None:
    first = site()
    remember(first, tmp_path)
    check_allowed(contract(first), [], tmp_path)
    changed = site(more="import os\n")
    with pytest.raises(EnvironmentNotAllowed):
        check_allowed(contract(changed), [], tmp_path)


@pytest.mark.parametrize("text", ["[]", "{"])
def test_a_broken_memory_of_what_is_allowed_is_one_line(
    site: Site, tmp_path: Path, text: str
) -> None:
    wanted = contract(site())
    (tmp_path / "allowed_environments.json").write_text(text)
    with pytest.raises(StorageError, match="remove it"):
        check_allowed(wanted, [], tmp_path)


def test_words_of_a_stranger_do_not_steer_the_terminal(site: Site, tmp_path: Path) -> None:
    evil = structs.replace(contract(site()), package="\x1b[2Jx\n", package_digest=bytes(32))
    with pytest.raises(UsageError) as caught:
        check_allowed(evil, [], tmp_path)
    assert str(caught.value).isprintable()


def test_what_is_kept_can_be_read_by_its_owner_alone(site: Site, tmp_path: Path) -> None:
    remember(site(), tmp_path)
    path = tmp_path / "allowed_environments.json"
    assert path.stat().st_mode & 0o077 == 0
    assert list(json.loads(path.read_text())) == ["sort-digits"]
