"""Stopped at 7 and gone on with is the same as never stopped, bit by bit; saved while it trains."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.counting_backend import CountingBackend
from support.training_cases import FAST, batch, contents

from primerl.node.errors import EngineError
from primerl.node.training.backend import TrainBackend
from primerl.node.training.checkpoint import Checkpoints
from primerl.node.training.local_backend import LocalBackend
from primerl.node.weights.state import digests

LAST, STOP = 10, 7
EXACT = FAST.model_copy(
    update={
        "deterministic": True,
        "scheduler": "linear",
        "warmup_steps": 2,
        "min_lr_ratio": 0.0,
        "weight_decay": 0.1,
        "dtype": "float32",
    }
)
TIMES = ("time/", "perf/")
"""What may differ: how long it took."""

Make = Callable[[], TrainBackend]
BACKENDS: dict[str, Make] = {
    "counting": CountingBackend,
    "local": lambda: LocalBackend(EXACT, max_steps=LAST, seed=0),
}
Line = list[tuple[dict[str, float], dict[str, bytes]]]
"""Of every step: its figures, the digests of its policy."""


@pytest.fixture(autouse=True)
def other_tests_are_not_bound() -> Iterator[None]:
    """A learner that is to be exact binds the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> Make:
    return BACKENDS[request.param]


async def train(make: Make, model_dir: Path, directory: Path, last: int) -> Line:
    """Train in a process's life: from the newest checkpoint to the end of step `last`."""
    checkpoints = Checkpoints(directory, keep_last=LAST)
    backend = make()
    await backend.start(model_dir)
    found = await checkpoints.read_newest()
    done = 0
    if found is not None:
        done = found[0]
        await backend.load(checkpoints.backend_directory(done))
    line: Line = []
    for number in range(done + 1, last + 1):
        values = (await backend.step(batch(number))).values
        figures = {name: value for name, value in values.items() if not name.startswith(TIMES)}
        line.append((figures, digests(await backend.state())))
        await checkpoints.begin(number, {"drawn": str(number).encode()}, backend)
    await checkpoints.finish()
    await backend.close()
    return line


def files(directory: Path, step: int) -> dict[str, bytes]:
    """All of a checkpoint: masters, moments, RNG, step, parts."""
    return contents(directory / f"step_{step}")


async def test_stopping_at_7_and_going_on_equals_the_unbroken_run(
    make: Make, model_dir: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    unbroken = await train(make, model_dir, tmp_path / "a", LAST)
    torch.manual_seed(2)
    broken = await train(make, model_dir, tmp_path / "b", STOP)
    torch.manual_seed(3)
    broken += await train(make, model_dir, tmp_path / "b", LAST)
    assert broken == unbroken
    assert len(unbroken) == LAST
    for step in (STOP, LAST):
        assert files(tmp_path / "a", step) == files(tmp_path / "b", step)
        assert len(files(tmp_path / "a", step)) >= 2


async def test_what_was_staged_is_written_while_other_steps_are_trained(
    model_dir: Path, tmp_path: Path
) -> None:
    backend = BACKENDS["local"]()
    assert isinstance(backend, LocalBackend)
    await backend.start(model_dir)
    with pytest.raises(EngineError, match=r"call stage\(\) first"):
        await backend.write_staged(tmp_path / "saved")
    await backend.step(batch(1))
    expected = digests(await backend.state())
    await backend.save(tmp_path / "at once")
    await backend.stage()
    await asyncio.gather(backend.write_staged(tmp_path / "saved"), backend.step(batch(2)))
    assert digests(await backend.state()) != expected
    assert contents(tmp_path / "saved") == contents(tmp_path / "at once")
    await backend.load(tmp_path / "saved")
    assert digests(await backend.state()) == expected
    await backend.close()
