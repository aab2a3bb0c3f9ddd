"""What sharded ranks export is, bit by bit, what the same policy exports in one piece."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ranks_cases as ranks
from support import weights_cases as cases
from support.training_cases import make_model

from primerl.node.models import huggingface
from primerl.node.models.tensors import bf16_state, from_torch
from primerl.node.training.backend import Snapshot
from primerl.node.training.snapshot import SnapshotReader
from primerl.node.weights.codec import encode_delta
from primerl.node.weights.state import State

pytestmark = pytest.mark.slow

CASES = [f"{kind}-{how}" for kind in ("tied", "experts") for how in ("sharded", "replicated")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have exported."""
    folder = tmp_path_factory.mktemp("ranks")
    make_model(folder / "tied")
    ranks.make_moe(folder / "experts")
    for name in (*CASES, "faults", "odd"):
        (folder / name).mkdir()
    command = [sys.executable, str(Path(ranks.__file__))]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(ranks.RANKS)
    ]
    try:
        said = [one.communicate(timeout=240)[0].decode() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [one.returncode for one in started] == [0, 0], "\n".join(said)
    return folder


def check(found: Snapshot, before: State, wanted: State) -> None:
    """`found` is `wanted`, and says exactly where that differs from `before`."""
    assert cases.same(found.state, wanted)
    changed = found.changed_since(before)
    assert changed is not None
    for name, tensor in wanted.items():
        differs = np.flatnonzero(tensor.data != before[name].data)
        if not differs.size:
            assert name not in changed
            assert found.state[name] is before[name]
            continue
        told = changed[name]
        assert told is None or np.array_equal(told, differs)
    hinted = b"".join(encode_delta(before, found.state, changed=changed))
    assert hinted == b"".join(encode_delta(before, found.state))


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_write_what_one_process_has_and_what_changed(folder: Path, case: str) -> None:
    model: Any = ranks.load(folder / case.partition("-")[0])
    parameters = dict(model.named_parameters())
    reader = SnapshotReader(threads=2)
    first = reader.snapshot(folder / case / "0")
    assert first.base is None
    assert cases.same(first.state, huggingface.policy_state(model))
    last = first.state
    sparse = 0
    for step in range(1, len(ranks.SHARES) + 1):
        ranks.move(parameters, step)
        found = reader.snapshot(folder / case / str(step))
        check(found, last, huggingface.policy_state(model))
        sparse += sum(told is not None for told in found.changed.values())
        last = found.state
    assert sparse > 20
    whole = reader.snapshot(folder / case / "whole")
    assert whole.base is None
    assert cases.same(whole.state, last)
    ranks.move(parameters, len(ranks.SHARES) + 1)
    wanted = huggingface.policy_state(model)
    assert cases.same(reader.state(folder / case / "state"), wanted)
    check(reader.snapshot(folder / case / "after"), whole.state, wanted)
    from safetensors import safe_open

    with safe_open(folder / case / "walked.safetensors", framework="pt") as walked:
        tensors = {name: from_torch(walked.get_tensor(name)) for name in walked.keys()}
    assert cases.same(tensors, wanted)
    assert {path.name for path in (folder / case).iterdir()} == {"walked.safetensors"}


def test_shards_that_are_no_rows_and_tensors_that_are_joined_arrive_whole(folder: Path) -> None:
    reader = SnapshotReader(threads=1)
    for step in range(3):
        found = reader.snapshot(folder / "odd" / str(step))
        tensors = ranks.odd_tensors(step)
        wanted = bf16_state(ranks.joined(None, tensors).items())
        assert cases.same(found.state, wanted)
        assert (found.base is None) is (step == 0)


def test_a_file_that_cannot_be_written_is_an_error_of_the_first_rank_and_the_next_one_is_whole(
    folder: Path,
) -> None:
    said = [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(ranks.RANKS)]
    assert said[0]["nowhere"].startswith("StorageError: the policy cannot be handed over")
    assert said[1]["nowhere"] == ""
    reader = SnapshotReader(threads=1)
    model = ranks.load(folder / "tied")
    for name in ("0", "2", "4"):
        found = reader.snapshot(folder / "faults" / name)
        assert found.base is None
        assert cases.same(found.state, huggingface.policy_state(model))


def test_ranks_that_do_not_fit_together_fail_on_all_of_them(folder: Path) -> None:
    for rank in range(ranks.RANKS):
        said = json.loads((folder / f"said-{rank}.json").read_text())
        assert said["differ"].startswith("EngineError: the ranks export different tensors")
        assert said["claim"].startswith("EngineError: the shards of w are not all of it")
