"""How the suite runs: what is compiled is kept, the files that take longest begin first."""

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Tests start many processes: what they import is compiled once."""
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # as the program does
os.environ.setdefault("OMP_NUM_THREADS", "1")  # with more threads than cores most of them spin
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and tables keep to it

hypothesis.settings.register_profile("suite", deadline=None)  # no test asserts a speed
hypothesis.settings.load_profile("suite")

GARBAGE = 20_000, 20, 20
"""When to look for garbage (gc.set_threshold): Python's default took a tenth of the suite's computing."""

LONGEST = (
    "scenarios/test_programs.py",
    "scenarios/test_crashes.py",
    "attacks/test_exact_numerics.py",
    "node/environments/test_bundled.py",
    "node/training/test_rank_failures.py",
    "node/training/test_world.py",
    "node/training/test_sharded_export.py",
    "node/training/test_saved_ranks.py",
    "conformance/test_auditor.py",
    "node/verification/test_vllm_auditor.py",
    "node/inference/test_hosted.py",
    "attacks/test_cheats.py",
    "attacks/test_sandbox.py",
    "node/models/test_families.py",
    "attacks/test_environment_code.py",
    "scenarios/test_swarm.py",
    "conformance/test_chunk_source.py",
    "attacks/test_late_joiner.py",
    "attacks/test_supports.py",
    "scenarios/test_going_back.py",
    "conformance/test_engine.py",
    "attacks/test_lines.py",
    "attacks/test_idle_leases.py",
    "attacks/test_hostile_sources.py",
    "scenarios/test_stage_swarm.py",
    "scenarios/test_validation.py",
    "attacks/test_floods.py",
    "attacks/test_copied_keys.py",
    "node/p2p/test_libp2p_chunks.py",
    "scenarios/test_standby.py",
    "attacks/test_class_claims.py",
    "node/ops/test_monitors.py",
    "scenarios/test_leaving.py",
    "scenarios/test_lost_engine.py",
    "scenarios/test_dead_ranks.py",
    "test_bench.py",
    "test_install.py",
    "test_structure.py",
)
"""Files that take longest: those that compute and those that wait in turn."""

TOGETHER = (
    (
        "tests/node/environments/",
        "tests/node/sft/",
        "tests/node/api/test_clients.py",
        "tests/attacks/test_forged_tools.py",
        "tests/conformance/test_environment.py",
    ),
    (
        "tests/node/p2p/test_libp2p",
        "tests/conformance/test_chunk_source.py",
        "tests/conformance/test_discovery.py",
        "tests/conformance/test_transport",
    ),
)
"""Files that load `verifiers`, renderers and datasets, or libp2p, which takes seconds: one worker runs each."""


@pytest.fixture
def small_heap() -> None:
    """Have gc.collect() look at what a test makes alone: all that is there takes it two seconds."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Schedule as `--dist loadfile` does, but give one worker all of TOGETHER."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # tests of the daemon run without it

    class FileScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((files[0] for files in TOGETHER if file.startswith(files)), file)

    return FileScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """Have xdist keep the order below, and not begin with the files of most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@hypothesis.settings(max_examples=1, database=None)
@hypothesis.given(strategies.none())
def draw_nothing(_: None) -> None:
    """Have hypothesis register its generator of random numbers."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look for garbage among modules and tests, which all stay: that took half of the collection."""
    draw_nothing()  # the first test of hypothesis looks at all objects: now there are few
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(*GARBAGE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first: one that begins last is waited for alone."""
    here = Path(__file__).parent
    place = {here / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
