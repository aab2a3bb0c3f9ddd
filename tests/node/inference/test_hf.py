"""The embedded engine from inside: its networks, its batches, and what makes it fail."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.engine_cases import (
    FP32,
    request,
    started,
    varied_requests,
)

from primerl.node.errors import EngineError
from primerl.node.inference.decoding import decode
from primerl.node.inference.fingerprint import Hidden, Projection, ProofFailed
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.model import LanguageModel, ModelOutput
from primerl.node.models.tensors import from_torch
from primerl.node.weights.state import Changed, State, Tensor


@pytest.fixture(params=["tied", "llama"])
def model(request: pytest.FixtureRequest) -> tuple[Path, State]:
    return request.getfixturevalue(request.param)


def network(model: tuple[Path, State], dtype: str = "float32") -> LanguageModel:
    return LanguageModel.build(*model, dtype=dtype, device="cpu")


# -- decoding -------------------------------------------------------------------------------------


class Counting(LanguageModel):
    """Records the shapes that reach it."""

    made: ClassVar[list["Counting"]] = []

    def __init__(self, model: Any, state: State) -> None:
        super().__init__(model, state)
        self.prefilled: list[tuple[int, int]] = []
        self.stepped: list[int] = []
        self.made.append(self)

    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor, **_: Any) -> Any:
        self.prefilled.append((tokens.shape[0], tokens.shape[1]))
        session, output = super().prefill(tokens, mask)
        step = session.step

        def counted(tokens: torch.Tensor) -> ModelOutput:
            self.stepped.append(len(tokens))
            return step(tokens)

        session.step = counted
        return session, output


def counting(model: tuple[Path, State]) -> Counting:
    return Counting.build(*model, dtype="float32", device="cpu")


def run(model: tuple[Path, State], requests: Sequence[Any]) -> Counting:
    counted = counting(model)
    decode(counted, requests, max_length=256, cancelled=lambda: False)
    return counted


def test_equal_prompts_are_read_once(tied: tuple[Path, State]) -> None:
    requests = [request(text, seed=seed) for text in ("abc", "de") for seed in range(8)]
    assert run(tied, requests).prefilled == [(2, 3)]


def test_the_last_token_is_not_fed_back_and_finished_rows_are_dropped(
    tied: tuple[Path, State],
) -> None:
    requests = [request(seed=n, max_tokens=n, stop=()) for n in (1, 2, 2, 2, 6)]
    # five rows, the first of them finished at once: too few to drop
    assert run(tied, requests).stepped == [5, 1, 1, 1, 1]


def test_a_step_is_not_begun_once_cancelled(tied: tuple[Path, State]) -> None:
    counted = counting(tied)
    with pytest.raises(EngineError, match="closed"):
        decode(counted, [request()], max_length=256, cancelled=lambda: len(counted.stepped) == 2)
    assert len(counted.stepped) == 2


async def test_weights_that_are_not_numbers_fail_the_request_and_not_the_engine(
    tied: tuple[Path, State],
) -> None:
    directory, state = tied
    poisoned = {**state, "model.norm.weight": from_torch(torch.full((32,), torch.nan), "BF16")}
    engine = await started(HfEngine(FP32), directory, poisoned)
    try:
        with pytest.raises(EngineError, match="not numbers"):
            await engine.generate(request())
        await engine.load(1, state)
        assert (await engine.generate(request())).policy_first == 1
    finally:
        await engine.close()


class Failing(Projection):
    """Makes no proof of anything."""

    def make(self, hidden: Hidden) -> bytes:
        raise ProofFailed("hidden states are not finite")


async def test_a_proof_that_cannot_be_made_fails_the_batch_and_is_never_left_out(
    tied: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await started(HfEngine(FP32), *tied, fingerprint="projection")
    monkeypatch.setattr(engine, "_fingerprint", Failing())
    try:
        for _ in range(2):  # the engine lives on
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate(request())
    finally:
        await engine.close()


# -- the engine -----------------------------------------------------------------------------------


def _drop(state: dict[str, Tensor]) -> None:
    del state["model.norm.weight"]


def _add(state: dict[str, Tensor]) -> None:
    state["model.extra.weight"] = state["model.norm.weight"]


def _reshape(state: dict[str, Tensor]) -> None:
    state["model.norm.weight"] = Tensor("BF16", (1,), np.zeros(1, dtype="<u2"))


FAULTS: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "missing": _drop,
    "extra": _add,
    "wrong shape": _reshape,
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_state_that_does_not_fit_is_refused_and_the_old_weights_stay(
    model: tuple[Path, State], fault: str
) -> None:
    directory, state = model
    engine = await started(HfEngine(FP32), directory, state)
    try:
        before = await engine.generate(request())
        broken = dict(state)
        FAULTS[fault](broken)
        with pytest.raises(EngineError, match=r"model\.(norm|extra)\.weight"):
            await engine.load(1, broken)
        after = await engine.generate(request())
        assert (after, engine.policy_version) == (before, 0)
    finally:
        await engine.close()


async def test_integers_are_not_weights(tied: tuple[Path, State]) -> None:
    directory, state = tied
    norm = state["model.norm.weight"]
    with pytest.raises(EngineError, match="I16"):
        network((directory, {**state, "model.norm.weight": replace(norm, dtype="I16")}))


async def test_a_batch_larger_than_max_batch_is_split(tied: tuple[Path, State]) -> None:
    directory, state = tied
    wide = await started(HfEngine(FP32), directory, state)
    narrow = await started(HfEngine(FP32.model_copy(update={"max_batch": 3})), directory, state)
    try:
        wanted = await asyncio.gather(*map(wide.generate, varied_requests()))
        found = await asyncio.gather(*map(narrow.generate, varied_requests()))
    finally:
        await wide.close()
        await narrow.close()
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]


async def test_more_requests_than_the_queue_holds_are_refused(tied: tuple[Path, State]) -> None:
    config = FP32.model_copy(update={"max_batch": 1})
    engine = await started(HfEngine(config), *tied)
    try:
        requests = [request(seed=seed, max_tokens=1) for seed in range(40)]
        results = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
    finally:
        await engine.close()
    refused = [one for one in results if isinstance(one, EngineError)]
    assert len(refused) == 24
    assert "max_batch" in str(refused[0])


async def test_a_batch_that_nobody_waits_for_any_more_ends_at_its_next_step(
    tied: tuple[Path, State],
) -> None:
    engine = await started(HfEngine(FP32, model=Counting), *tied)
    counted = Counting.made[-1]
    try:
        long = [request(seed=seed, max_tokens=250, stop=()) for seed in (1, 2)]
        tasks = [asyncio.create_task(engine.generate(one)) for one in long]
        async with asyncio.timeout(60.0):
            while True:
                if counted.stepped:
                    break
                await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        found = await engine.generate(request(max_tokens=2, stop=()))
    finally:
        await engine.close()
    assert len(found.token_ids) == 2
    assert counted.stepped.count(2) < 249  # of the two, and then one of the other
    assert counted.stepped[-1] == 1


async def test_an_engine_that_is_not_started_or_started_twice_says_so(
    tied: tuple[Path, State], tmp_path: Path
) -> None:
    engine = HfEngine(FP32)
    with pytest.raises(EngineError, match="start"):
        await engine.generate(request())
    with pytest.raises(EngineError, match="start"):
        await engine.load(0, tied[1])
    with pytest.raises(EngineError, match="config"):
        await engine.start(tmp_path)
    with pytest.raises(EngineError, match="another"):
        await engine.start(tied[0])
    await engine.close()


class Unwritable(Counting):
    """Fails or refuses in the middle of an update."""

    fault: RuntimeError | None = None

    def update(self, state: State, changed: Changed) -> bool:
        if self.fault:
            raise self.fault
        return False


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
async def test_what_cannot_be_written_in_place_is_loaded_whole(
    tied: tuple[Path, State], error: RuntimeError | None
) -> None:
    class Broken(Unwritable):
        fault = error

    before = len(Counting.made)
    engine = await started(HfEngine(FP32, model=Broken), *tied)
    try:
        await engine.update(1, tied[1], {})
        assert (len(Counting.made) - before, engine.policy_version) == (2, 1)
        assert (await engine.generate(request())).policy_first == 1
    finally:
        await engine.close()


class Exhausted(LanguageModel):
    def prefill(self, tokens: torch.Tensor, mask: torch.Tensor, **_: Any) -> Any:
        raise RuntimeError("out of memory")


async def test_an_engine_whose_batch_crashes_is_dead_and_says_so(
    tied: tuple[Path, State],
) -> None:
    engine = await started(HfEngine(FP32, model=Exhausted), *tied)
    try:
        results = await asyncio.gather(
            engine.generate(request()), engine.generate(request()), return_exceptions=True
        )
        assert ["out of memory" in str(one) for one in results] == [True, True]
        with pytest.raises(EngineError, match="died"):
            await engine.generate(request())
    finally:
        await engine.close()


async def test_an_impossible_device_is_an_engine_error(tied: tuple[Path, State]) -> None:
    config = FP32.model_copy(update={"device": "meta:nonsense"})
    engine = HfEngine(config)
    await engine.start(tied[0])
    try:
        with pytest.raises(EngineError, match=r"engine\.device"):
            await engine.load(0, tied[1])
    finally:
        await engine.close()
