"""An engine of a run with adapters: what the engine inside is given, and what it is told has changed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from support.protocol_cases import ADAPTED, MANIFEST
from support.weights_cases import LAYERS, contract, make_adapters, make_base, random_tensor

from primerl.node.config.engine import EngineConfig
from primerl.node.errors import EngineError, StorageError
from primerl.node.inference.adapted import AdaptedEngine, adapted
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.inference.hosted import HostedEngine
from primerl.node.weights.adapters import PREFIX, B, merge
from primerl.node.weights.checkpoint import write_checkpoint
from primerl.node.weights.replica import prove
from primerl.node.weights.state import Changed, State, Tensor, digests
from primerl.protocol.manifests import RunManifest

RUN: RunManifest = msgspec.structs.replace(
    ADAPTED,
    adapters=contract(),
    model=msgspec.structs.replace(ADAPTED.model, base_state=prove(0, make_base()).digest),
)
NAME = PREFIX + LAYERS[0] + B


class Inner:
    """An Engine that writes what it is told, and nothing else."""

    def __init__(self) -> None:
        self.policy_version = -1
        self.weights: dict[str, Tensor] = {}
        self.calls: list[str] = []
        self.changed: Changed = {}
        self.fails = False

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        self.calls.append(f"start {fingerprint}")

    async def load(self, version: int, state: State) -> None:
        self.calls.append("load")
        self.policy_version, self.weights = version, dict(state)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        self.calls.append("update")
        if self.fails:
            raise EngineError("no")
        for name, positions in changed.items():
            data = self.weights[name].data.copy()
            where: Any = slice(None) if positions is None else positions
            data[where] = state[name].data[where]
            self.weights[name] = Tensor("BF16", state[name].shape, data)
        self.changed, self.policy_version = changed, version

    async def generate(self, request: GenerateRequest) -> Completion:
        version = self.policy_version
        return Completion([1], [0.0], "stop", version, version)

    def stats(self) -> EngineStats:
        return EngineStats(running=7)

    async def close(self) -> None:
        self.calls.append("close")


@pytest_asyncio.fixture
async def inner() -> Inner:
    return Inner()


@pytest_asyncio.fixture
async def engine(inner: Inner, tmp_path: Path) -> AsyncIterator[AdaptedEngine]:
    write_checkpoint(tmp_path / "model.safetensors", make_base())
    engine = AdaptedEngine(inner, RUN)
    await engine.start(tmp_path, fingerprint="projection")
    yield engine
    await engine.close()
    assert inner.calls[-1] == "close"


def whole(adapters: State) -> dict[str, bytes]:
    return digests(merge(make_base(), adapters, contract()))


def moved(adapters: State, place: int = 5) -> State:
    """One element of one B, and so one row of one layer, is different."""
    data = adapters[NAME].data.copy()
    data[place] ^= 0x0040
    return {**adapters, NAME: Tensor("BF16", adapters[NAME].shape, data)}


@pytest.mark.asyncio
async def test_the_engine_inside_is_loaded_with_merged_weights(
    engine: AdaptedEngine, inner: Inner
) -> None:
    await engine.load(3, make_adapters())
    assert digests(inner.weights) == whole(make_adapters())
    assert engine.policy_version == 3
    request = GenerateRequest((1,), 1, 1.0, 0, ())
    assert (await engine.generate(request)).policy_first == 3
    assert inner.calls == ["start projection", "load"]


@pytest.mark.asyncio
async def test_the_engine_inside_starts_while_the_base_is_fetched(
    inner: Inner, tmp_path: Path
) -> None:
    fetched: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    engine = AdaptedEngine(inner, RUN, fetched)
    starting = asyncio.create_task(engine.start(tmp_path))
    for _ in range(5):  # rounds of the event loop
        await asyncio.sleep(0)
    assert inner.calls == ["start "]
    assert not starting.done()
    write_checkpoint(tmp_path / "model.safetensors", make_base())
    fetched.set_result(None)
    await starting
    await engine.load(0, make_adapters())
    assert digests(inner.weights) == whole(make_adapters())
    await engine.close()


@pytest.mark.asyncio
async def test_a_base_that_cannot_be_fetched_ends_the_start(inner: Inner, tmp_path: Path) -> None:
    fetched: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fetched.set_exception(StorageError("the disk is full"))
    with pytest.raises(StorageError, match="the disk is full"):
        await AdaptedEngine(inner, RUN, fetched).start(tmp_path)


@pytest.mark.asyncio
async def test_an_update_tells_where_the_merged_weights_differ(
    engine: AdaptedEngine, inner: Inner
) -> None:
    adapters = make_adapters()
    await engine.load(0, adapters)
    later = moved(adapters)
    await engine.update(1, later, {NAME: np.array([5], np.int64)})
    assert inner.calls[-1] == "update"
    assert digests(inner.weights) == whole(later) != whole(adapters)
    assert list(inner.changed) == [LAYERS[0] + ".weight"]
    positions = inner.changed[LAYERS[0] + ".weight"]
    assert positions is not None
    assert 0 < len(positions) <= 24


@pytest.mark.asyncio
async def test_an_update_of_everything_is_sent_as_whole_tensors(
    engine: AdaptedEngine, inner: Inner
) -> None:
    await engine.load(0, make_adapters(1))
    await engine.update(1, make_adapters(2), {})
    assert digests(inner.weights) == whole(make_adapters(2))
    assert inner.changed == {layer + ".weight": None for layer in LAYERS}


@pytest.mark.asyncio
async def test_after_an_update_that_failed_nothing_is_known_of_what_the_engine_holds(
    engine: AdaptedEngine, inner: Inner
) -> None:
    await engine.load(0, make_adapters())
    inner.fails = True
    with pytest.raises(EngineError):
        await engine.update(1, moved(make_adapters()), {})
    inner.fails = False
    await engine.update(2, moved(make_adapters()), {})
    assert inner.calls[-1] == "load"
    assert digests(inner.weights) == whole(moved(make_adapters()))


@pytest.mark.asyncio
async def test_adapters_of_another_shape_never_reach_the_engine(
    engine: AdaptedEngine, inner: Inner
) -> None:
    wrong = {**make_adapters(), NAME: random_tensor(np.random.default_rng(0), (40, 5))}
    with pytest.raises(EngineError, match="manifest says"):
        await engine.load(0, wrong)
    assert inner.calls == ["start projection"]


@pytest.mark.asyncio
async def test_a_base_that_is_not_the_runs_is_refused(tmp_path: Path, inner: Inner) -> None:
    write_checkpoint(tmp_path / "model.safetensors", make_base(seed=1))
    with pytest.raises(EngineError, match="the run needs"):
        await AdaptedEngine(inner, RUN).start(tmp_path)
    with pytest.raises(EngineError, match="start"):
        await AdaptedEngine(inner, RUN).load(0, make_adapters())


def test_a_run_of_whole_policies_has_a_plain_engine(inner: Inner) -> None:
    assert adapted(inner, MANIFEST) is inner
    assert isinstance(adapted(inner, RUN), AdaptedEngine)


def test_vllm_is_given_adapters_as_they_are_and_other_engines_merged_weights() -> None:
    vllm, hf = (HostedEngine(EngineConfig(type=kind)) for kind in ("vllm", "hf"))
    assert adapted(vllm, RUN) is vllm
    assert isinstance(adapted(hf, RUN), AdaptedEngine)
    assert adapted(vllm, MANIFEST) is vllm
