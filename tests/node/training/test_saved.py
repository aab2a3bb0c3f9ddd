"""A learner's files: what comes back is what was written, or nothing changes."""

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from primerl.node.errors import StorageError
from primerl.node.training import learner_state

SHARD = "shard-00000-00000.safetensors"


def trained(steps: int = 1, width: int = 5) -> learner_state.SavedLearner:
    torch.manual_seed(3)
    model = torch.nn.Linear(width, 3)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, width)).square().sum().backward()
        optimizer.step()
    moments = {
        f"{name}:{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }
    return learner_state.SavedLearner(steps, parameters, moments, learner_state.rng_state())


def assert_equal(one: learner_state.SavedLearner, other: learner_state.SavedLearner) -> None:
    assert one.step == other.step
    tables = ((one.weights, other.weights), (one.moments, other.moments), (one.rng, other.rng))
    for ours, theirs in tables:
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype
            assert tensor.shape == theirs[name].shape
            assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_weights_moments_counters_rng_and_step_come_back_bit_by_bit(
    tmp_path: Path, steps: int
) -> None:
    saved = trained(steps)
    assert len(saved.moments) == (6 if steps else 0)
    saved.write(tmp_path / "saved")
    found = learner_state.read_saved(tmp_path / "saved", saved.weights)
    assert_equal(found, saved)
    assert os.listdir(tmp_path) == ["saved"]


def test_what_was_read_shares_no_memory_with_the_learner(tmp_path: Path) -> None:
    saved = trained()
    saved.write(tmp_path / "saved")
    found = learner_state.read_saved(tmp_path / "saved", saved.weights)
    assert all(found.weights[name] is not tensor for name, tensor in saved.weights.items())
    for tensor in found.weights.values():
        tensor.zero_()
    assert_equal(learner_state.read_saved(tmp_path / "saved", saved.weights), saved)


def test_a_staged_copy_is_of_the_moment_when_it_was_taken(tmp_path: Path) -> None:
    saved, as_it_was = trained(), trained()
    staged = saved.staged()
    with torch.no_grad():
        for tensor in (*saved.weights.values(), *saved.moments.values()):
            tensor.add_(1.0)
    staged.write(tmp_path / "saved")
    found = learner_state.read_saved(tmp_path / "saved", saved.weights)
    assert_equal(replace(found, rng={}), replace(as_it_was, rng={}))


def test_no_file_is_a_pickle_or_a_zip(tmp_path: Path) -> None:
    trained().write(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == [learner_state.HEADER, SHARD]


@pytest.mark.parametrize("name", [learner_state.HEADER, SHARD])
@pytest.mark.parametrize("keep", [None, 0, 20, -5])
def test_a_torn_or_missing_file_is_a_storage_error(
    tmp_path: Path, name: str, keep: int | None
) -> None:
    saved = trained()
    saved.write(tmp_path / "saved")
    torn = tmp_path / "saved" / name
    if keep is None:
        torn.unlink()
    else:
        torn.write_bytes(torn.read_bytes()[:keep])
    with pytest.raises(StorageError, match="earlier checkpoint"):
        learner_state.read_saved(tmp_path / "saved", saved.weights)


def test_a_file_of_another_checkpoint_does_not_pass(tmp_path: Path) -> None:
    saved = trained()
    saved.write(tmp_path / "saved")
    trained(0).write(tmp_path / "other")
    (tmp_path / "other" / SHARD).replace(tmp_path / "saved" / SHARD)
    with pytest.raises(StorageError, match=r"lacks a part of optimizer\.weight:"):
        learner_state.read_saved(tmp_path / "saved", saved.weights)


@pytest.mark.parametrize("change", ["width", "missing", "more", "moments"])
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, change: str) -> None:
    saved = trained(width=6 if change == "width" else 5)
    parameters = dict(trained().weights)
    if change == "missing":
        del parameters["bias"]
    if change == "more":
        parameters["adapter"] = torch.zeros(2)
    if change == "moments":
        strange = {"ghost:exp_avg": torch.zeros(3)}
        saved = replace(saved, moments={**saved.moments, **strange})
    saved.write(tmp_path / "saved")
    with pytest.raises(StorageError, match="another model"):
        learner_state.read_saved(tmp_path / "saved", parameters)


def test_a_checkpoint_of_another_format_says_which(tmp_path: Path) -> None:
    saved = trained()
    saved.write(tmp_path / "saved")
    header = tmp_path / "saved" / learner_state.HEADER
    fields = msgspec.json.decode(header.read_bytes())
    header.write_bytes(msgspec.json.encode(fields | {"format": 3}))
    with pytest.raises(StorageError, match="has format 3"):
        learner_state.read_saved(tmp_path / "saved", saved.weights)


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    saved = trained()
    saved.write(tmp_path / "saved")
    unwritable = {"odd": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(StorageError):
        replace(saved, weights=unwritable).write(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    assert_equal(learner_state.read_saved(tmp_path / "saved", saved.weights), saved)


def test_large_models_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("primerl.node.training.learner_state.FILE_BYTES", 64)
    saved = trained()
    saved.write(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) >= 3
    assert_equal(learner_state.read_saved(tmp_path / "saved", saved.weights), saved)


def test_a_room_is_used_again_and_grows_with_what_is_put_there(tmp_path: Path) -> None:
    room = learner_state.HostRoom()
    first, second = trained(0), trained(3)
    copies = [one.staged(room=room) for one in (first, second, second)]
    places = [{s.name: s.data.data_ptr() for s in copy.slices} for copy in copies]
    assert places[1] == places[2]
    assert places[0].items() <= places[1].items()
    copies[1].write(tmp_path / "saved")
    assert_equal(learner_state.read_saved(tmp_path / "saved", second.weights), second)
