"""hf in a process of its own: fed by files, it answers as it does in the node's."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engine_cases import FP32, make_qwen3, request, started

from primerl.node.errors import EngineError, EngineLost
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine
from primerl.node.inference.engine_replica import EngineTimeouts
from primerl.node.inference.handover import make_delta, read_update, shared_file
from primerl.node.inference.hf import HfCore, HfEngine
from primerl.node.inference.hosted import HostedEngine
from primerl.node.weights.checkpoint import write_checkpoint
from primerl.node.weights.state import Changed, State, Tensor, digests

Model = tuple[Path, State, State, Changed]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A directory, a policy, the next one, and where that differs: one tensor whole, one in some places."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    state = make_qwen3(directory, 1)
    other = make_qwen3(tmp_path_factory.mktemp("other"), 2)
    first, second = list(state)[:2]
    where = np.arange(0, state[second].data.size, 40)
    data = state[second].data.copy()
    data[where] = other[second].data[where]
    moved = Tensor(state[second].dtype, state[second].shape, data)
    return (
        directory,
        state,
        {**state, first: other[first], second: moved},
        {first: None, second: where},
    )


async def completions_of(engine: Engine | HfCore) -> list[Completion]:
    return [await engine.generate(request(seed=seed, max_tokens=8)) for seed in range(3)]


def assert_alike(ours: list[Completion], theirs: list[Completion]) -> None:
    """The same but for rounding: another process may compute with more threads."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        assert (one.policy_first, one.policy_last) == (other.policy_first, other.policy_last)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_files_make_it_compute_what_states_make_the_engine_compute(model: Model) -> None:
    directory, state, later, changed = model
    plain = await started(HfEngine(FP32), directory, state)
    core = HfCore(FP32)
    await core.start(directory)
    try:
        async with shared_file(state) as path:
            assert (await core.check(path)).fault == ""
            assert (await core.load(0, path)).paused_s >= 0
        assert await completions_of(core) == await completions_of(plain)
        delta = make_delta(later, changed, ())
        async with shared_file(delta.tensors, delta.metadata) as path:
            assert (await core.stage(path)).fault == ""
            assert (await completions_of(core))[0].policy_last == 0  # staged is not written
            await core.write(1)
        await plain.update(1, later, changed)
        found = await completions_of(core)
        assert found == await completions_of(plain)
        assert {one.policy_first for one in found} == {1}
        with pytest.raises(EngineError, match="stage one first"):
            await core.write(2)
        with pytest.raises(EngineError, match="sleep_after_s"):
            await core.sleep()
        assert (core.stats().running, core.stuck_s()) == (0, 0.0)
    finally:
        await core.close()
        await plain.close()


async def test_files_that_cannot_be_used_change_nothing(model: Model, tmp_path: Path) -> None:
    directory, state, _, _ = model
    core = HfCore(FP32)
    await core.start(directory)
    try:
        async with shared_file(state) as path:
            await core.load(0, path)
        with pytest.raises(EngineError, match="cannot be read"):
            await core.load(1, str(tmp_path / "nowhere"))
        short = tmp_path / "short"
        write_checkpoint(short, dict(list(state.items())[1:]))
        with pytest.raises(EngineError):
            await core.load(1, str(short))
        alien = make_delta({"w": Tensor("I64", (9,), np.zeros(9, "<u8"))}, {"w": np.array([1])}, ())
        write_checkpoint(tmp_path / "alien", alien.tensors, metadata=alien.metadata)
        assert "cannot be read" in (await core.stage(str(tmp_path / "alien"))).fault
        assert (await core.generate(request())).policy_first == 0
    finally:
        await core.close()


async def test_a_closed_engine_is_lost_so_that_it_is_replaced(model: Model) -> None:
    core = HfCore(FP32)
    await core.start(model[0])
    await core.close()
    with pytest.raises(EngineLost):
        await core.generate(request())


def test_an_update_is_read_back_as_it_was_made(model: Model, tmp_path: Path) -> None:
    _, state, later, changed = model
    before = digests(state)
    delta = make_delta(later, changed, ())
    write_checkpoint(tmp_path / "delta", delta.tensors, metadata=delta.metadata)
    found, where = read_update(tmp_path / "delta", state)
    assert digests(found) == digests(later)
    assert digests(state) == before
    assert where.keys() == changed.keys()
    for name, positions in changed.items():
        found_there = where[name]
        if positions is None or found_there is None:
            assert positions is found_there
        else:
            assert np.array_equal(found_there, positions)


@pytest.mark.parametrize(
    ("device", "gpus", "kind"),
    [("auto", ("0",), HostedEngine), ("auto", (), HfEngine), ("cpu", ("0",), HfEngine)],
)
def test_on_a_gpu_it_leaves_the_node(device: str, gpus: Sequence[str], kind: type) -> None:
    config = FP32.model_copy(update={"device": device, "tp": 2, "dp": 2})
    assert isinstance(build_engine(config, lambda: gpus), kind)


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_a_process_of_its_own_answers_the_same_and_is_replaced_when_it_dies(
    model: Model,
) -> None:
    directory, state, later, changed = model
    plain = await started(HfEngine(FP32), directory, state, fingerprint="projection")
    config = FP32.model_copy(update={"max_restarts": 9})
    hosted = HostedEngine(config, timeouts=EngineTimeouts(end_s=60.0, first_restart_s=0.01))
    await hosted.start(directory, fingerprint="projection")
    try:
        await hosted.load(0, state)
        found = await completions_of(hosted)
        assert_alike(found, await completions_of(plain))
        assert all(one.proof for one in found)
        await hosted.update(1, later, changed)
        await plain.update(1, later, changed)
        wanted = await completions_of(plain)
        assert_alike(await completions_of(hosted), wanted)
        with pytest.raises(EngineError):
            await hosted.load(2, dict(list(state.items())[1:]))
        assert hosted.policy_version == 1
        assert_alike(await completions_of(hosted), wanted)
        os.kill(hosted.pids[0], signal.SIGKILL)
        with pytest.raises(EngineLost, match="hf's process was killed from outside"):
            await hosted.generate(request())
        await hosted.load(3, later)  # waits for the next one
        found = await completions_of(hosted)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        assert (found[0].policy_first, hosted.stats().restarts) == (3, 1)
    finally:
        await hosted.close()
        await plain.close()
