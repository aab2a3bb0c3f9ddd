"""What every trainer backend promises, whatever it computes with."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from support.counting_backend import CountingBackend
from support.fake_rank import gone
from support.training_cases import DEVICE, FAST, batch, make_model

from primerl.node.config.training import FsdpConfig
from primerl.node.errors import EngineError, StorageError
from primerl.node.models.model_files import contract_files, read_state
from primerl.node.training.backend import TrainBackend, TrainBatch
from primerl.node.training.fsdp_backend import FsdpBackend
from primerl.node.training.local_backend import LocalBackend
from primerl.node.training.rank_group import RankGroup
from primerl.node.weights.checkpoint import read_checkpoint, write_checkpoint
from primerl.node.weights.codec import encode_delta
from primerl.node.weights.state import Tensor, digests

pytestmark = pytest.mark.asyncio(loop_scope="module")

Make = Callable[[], TrainBackend]
SAME = 1e-3 if DEVICE == "cpu" else 2e-2
"""How far the figures of ranks may be from those of one process: a GPU computes in bf16."""
SHARDED = FAST.model_copy(update={"fsdp": FsdpConfig(timeout_s=60.0)})


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=[
        "counting",
        pytest.param("fsdp", marks=pytest.mark.slow),
        "local",
        pytest.param("process", marks=pytest.mark.nightly),
    ],
)
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """One backend at a time: ranks take seconds to start, so each takes the place of the last one there."""
    if request.param == "counting":
        yield lambda: CountingBackend(seed=0)
    elif request.param == "local":
        yield lambda: LocalBackend(FAST, max_steps=10, seed=0)
    else:
        ranks = RankGroup(SHARDED, 2 if request.param == "fsdp" else 1)
        await ranks.start()
        yield lambda: FsdpBackend(SHARDED, max_steps=10, seed=0, ranks=ranks)
        directory = ranks.directory
        await ranks.close()
        await gone(ranks.pid, *ranks.pids)
        assert not directory.exists()


@pytest_asyncio.fixture(loop_scope="module")
async def backend(make: Make, model_dir: Path) -> AsyncIterator[TrainBackend]:
    subject = make()
    await subject.start(model_dir)
    yield subject
    await subject.close()


async def test_a_batch_changes_the_policy_and_says_how_many_tokens(backend: TrainBackend) -> None:
    before = digests(await backend.state())
    metrics = (await backend.step(batch(1))).values
    trained = sum(sum(sample.mask[1:]) for sample in batch(1).samples)
    assert metrics["tokens"] == trained
    assert metrics["optim/skipped"] == 0.0
    assert digests(await backend.state()) != before


async def test_the_policy_is_bf16_and_a_copy(backend: TrainBackend) -> None:
    state = await backend.state()
    before = digests(state)
    assert {tensor.dtype for tensor in state.values()} == {"BF16"}
    await backend.step(batch(1))
    assert digests(state) == before


async def test_an_empty_batch_leaves_the_policy(backend: TrainBackend) -> None:
    before = digests(await backend.state())
    assert (await backend.step(TrainBatch(1, []))).values["tokens"] == 0.0
    assert digests(await backend.state()) == before


async def test_a_snapshot_is_the_policy_and_says_where_it_changed(backend: TrainBackend) -> None:
    first = await backend.snapshot()
    assert first.base is None
    before = digests(first.state)
    for step in (1, 2):
        await backend.step(batch(step))
        found = await backend.snapshot()
        assert digests(found.state) == digests(await backend.state())
        changed = found.changed_since(first.state)
        assert changed
        hinted = b"".join(encode_delta(first.state, found.state, changed=changed))
        assert hinted == b"".join(encode_delta(first.state, found.state))
        assert digests(first.state) == before
        first, before = found, digests(found.state)


async def test_a_step_that_is_asked_for_during_a_snapshot_is_trained_after_it(
    backend: TrainBackend,
) -> None:
    last = await backend.snapshot()
    for step in (1, 2):
        before = digests(await backend.state())
        taken = backend.snapshot()
        await backend.step(batch(step))
        found = await taken
        assert digests(found.state) == before
        assert found.changed_since(last.state) is not None
        last = found
    assert digests(await backend.state()) != digests(last.state)


async def test_a_snapshot_of_an_unchanged_policy_has_no_changes(backend: TrainBackend) -> None:
    await backend.step(batch(1))
    first = await backend.snapshot()
    await backend.step(TrainBatch(2, []))
    await backend.state()  # does not count as a snapshot
    assert (await backend.snapshot()).changed_since(first.state) == {}


async def test_a_snapshot_after_a_load_is_compared_with_the_one_before(
    backend: TrainBackend, tmp_path: Path
) -> None:
    await backend.save(tmp_path / "saved")
    await backend.step(batch(1))
    first = await backend.snapshot()
    await backend.load(tmp_path / "saved")
    found = await backend.snapshot()
    assert digests(found.state) == digests(await backend.state())
    hinted = encode_delta(first.state, found.state, changed=found.changed_since(first.state))
    assert b"".join(hinted) == b"".join(encode_delta(first.state, found.state))


async def test_a_step_is_not_trained_twice(backend: TrainBackend) -> None:
    await backend.step(batch(2))
    before = digests(await backend.state())
    with pytest.raises(EngineError, match="upwards"):
        await backend.step(batch(2))
    assert digests(await backend.state()) == before


async def test_the_same_batches_give_the_same_policy(make: Make, model_dir: Path) -> None:
    found: list[dict[str, bytes]] = []
    for _ in range(2):
        subject = make()
        await subject.start(model_dir)
        await subject.step(batch(1))
        await subject.step(batch(2))
        found.append(digests(await subject.state()))
        await subject.close()
    assert found[0] == found[1]


async def test_a_stopped_run_goes_on_as_the_unbroken_one(
    backend: TrainBackend, make: Make, model_dir: Path, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        await backend.step(batch(step))
    await backend.save(tmp_path / "saved")
    then = digests(await backend.state())
    for step in (4, 5):
        await backend.step(batch(step))
    unbroken = digests(await backend.state())
    await backend.close()
    resumed = make()
    await resumed.start(model_dir)
    await resumed.load(tmp_path / "saved")
    assert digests(await resumed.state()) == then
    for step in (4, 5):
        await resumed.step(batch(step))
    assert digests(await resumed.state()) == unbroken
    with pytest.raises(EngineError, match="upwards"):
        await resumed.step(batch(3))
    await resumed.close()


async def test_a_published_policy_is_taken_over_with_an_older_optimizer(
    make: Make, model_dir: Path, tmp_path: Path
) -> None:
    backend = make()
    await backend.start(model_dir)
    await backend.step(batch(1))
    await backend.save(tmp_path / "one")
    for step in (2, 3):
        await backend.step(batch(step))
    published = digests(await backend.state())
    write_checkpoint(tmp_path / "policy.safetensors", await backend.state())
    await backend.close()

    resumed = make()
    await resumed.start(model_dir)
    await resumed.load(tmp_path / "one")
    assert digests(await resumed.state()) != published
    await resumed.adopt(tmp_path / "policy.safetensors", 3)
    assert digests(await resumed.state()) == published
    with pytest.raises(EngineError, match="came after step 3"):
        await resumed.step(batch(3))
    await resumed.step(batch(4))
    assert digests(await resumed.state()) != published
    await resumed.close()


async def test_masters_that_were_written_are_taken_over_bit_by_bit(
    make: Make, model_dir: Path, tmp_path: Path
) -> None:
    first, again = tmp_path / "first.safetensors", tmp_path / "again.safetensors"
    backend = make()
    await backend.start(model_dir)
    await backend.step(batch(1))
    await backend.write_masters(first)
    policy = digests(await backend.state())
    await backend.step(batch(2))
    assert digests(await backend.state()) != policy
    await backend.read_masters(first, 1)
    await backend.write_masters(again)
    assert digests(await backend.state()) == policy
    masters = read_checkpoint(first)
    assert {tensor.dtype for tensor in masters.values()} == {"F32"}
    assert digests(read_checkpoint(again)) == digests(masters)
    await backend.step(batch(2))
    await backend.close()


async def test_masters_of_another_model_are_an_engine_error(
    make: Make, model_dir: Path, tmp_path: Path
) -> None:
    backend = make()
    await backend.start(model_dir)
    policy = digests(await backend.state())
    file = tmp_path / "masters.safetensors"
    write_checkpoint(file, {"other": Tensor("F32", (8,), np.zeros(8, "<u4"))})
    with pytest.raises(EngineError, match="of another model"):
        await backend.read_masters(file, 1)
    assert digests(await backend.state()) == policy
    await backend.close()


async def test_an_evaluation_counts_the_tokens_and_teaches_nothing(backend: TrainBackend) -> None:
    before = digests(await backend.state())
    figures = await backend.evaluate(batch(1).samples)
    assert figures["tokens"] == sum(sum(sample.mask[1:]) for sample in batch(1).samples)
    assert figures["loss/mean"] >= 0.0
    assert (await backend.evaluate([]))["tokens"] == 0.0
    assert digests(await backend.state()) == before


async def test_the_figures_of_a_step_are_those_of_one_process(
    backend: TrainBackend, model_dir: Path, request: pytest.FixtureRequest
) -> None:
    if isinstance(backend, CountingBackend):
        pytest.skip("it has no figures")
    exact = "[process]" in request.node.name and DEVICE == "cpu"
    alone = LocalBackend(FAST, max_steps=10, seed=0)
    await alone.start(model_dir)
    for step in (1, 2):
        ours, theirs = (await backend.step(batch(step))).values, (await alone.step(batch(step)))
        for name in ("loss/mean", "optim/grad_norm", "entropy/all/mean", "tokens", "optim/lr"):
            assert ours[name] == pytest.approx(
                theirs.values[name], rel=0.0 if exact else SAME, abs=0.0
            ), name
    if exact:
        assert digests(await backend.state()) == digests(await alone.state())
    await alone.close()


async def test_saving_twice_keeps_the_second(backend: TrainBackend, tmp_path: Path) -> None:
    await backend.save(tmp_path / "saved")
    await backend.step(batch(1))
    await backend.save(tmp_path / "saved")
    after = digests(await backend.state())
    await backend.step(batch(2))
    await backend.load(tmp_path / "saved")
    assert digests(await backend.state()) == after
    assert os.listdir(tmp_path) == ["saved"]


async def test_loading_what_is_not_there_is_a_storage_error(
    backend: TrainBackend, tmp_path: Path
) -> None:
    before = digests(await backend.state())
    with pytest.raises(StorageError, match="earlier"):
        await backend.load(tmp_path / "nothing")
    assert digests(await backend.state()) == before


async def test_an_export_holds_the_policy_and_the_contract(
    backend: TrainBackend, model_dir: Path, tmp_path: Path
) -> None:
    await backend.step(batch(1))
    await backend.export(tmp_path / "exported")
    exported = read_state(tmp_path / "exported")
    assert digests(exported) == digests(await backend.state())
    assert contract_files(tmp_path / "exported") == contract_files(model_dir)


async def test_a_closed_backend_answers_with_an_engine_error(make: Make, model_dir: Path) -> None:
    subject = make()
    await subject.start(model_dir)
    await subject.close()
    with pytest.raises(EngineError, match="start"):
        await subject.step(batch(1))
