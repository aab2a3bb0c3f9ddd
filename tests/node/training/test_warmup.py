from collections.abc import AsyncIterator, Sequence
from itertools import count, islice

import pytest

from primerl.node.config.run import WarmupConfig
from primerl.node.training.warmup import WarmupProgress, warm_up
from primerl.node.weights.state import State

CONFIG = WarmupConfig(lr=1.0, batch_size=4, max_steps=50, target=0.5, eval_interval=5)


class Pupil:
    """Answers right ever more often; notes what it was asked."""

    def __init__(self, *, per_step: float, fails_at: int = 0) -> None:
        self.per_step = per_step
        self.fails_at = fails_at
        self.rates: list[float] = []
        self.sizes: list[int] = []
        self.ended = 0

    async def supervised_step(
        self, examples: Sequence[tuple[Sequence[int], Sequence[int]]], lr: float
    ) -> float:
        self.rates.append(lr)
        self.sizes.append(len(examples))
        if len(self.rates) == self.fails_at:
            raise RuntimeError("broken")
        return 1.0

    async def end_supervised(self) -> None:
        self.ended += 1

    async def state(self) -> State:
        return {}

    async def accuracy(self, state: State) -> float:
        return self.per_step * len(self.rates)


async def examples(
    end: int | None = None,
) -> AsyncIterator[tuple[Sequence[int], Sequence[int]]]:
    for n in islice(count(), end):
        yield [n], [n, 258]


async def test_it_stops_at_the_first_evaluation_that_reaches_the_target() -> None:
    pupil, seen = Pupil(per_step=0.042), list[WarmupProgress]()
    ticks = iter(range(100))
    result = await warm_up(
        pupil,
        examples(),
        CONFIG,
        evaluate=pupil.accuracy,
        progress=seen.append,
        clock=lambda: float(next(ticks)),
    )
    assert (result.steps, result.accuracy) == (15, pytest.approx(0.63))
    assert [note.step for note in seen] == [5, 10, 15]
    assert result.seconds == 4.0
    assert pupil.sizes == [4] * 15
    assert pupil.ended == 1


async def test_the_rate_rises_over_twenty_steps() -> None:
    pupil = Pupil(per_step=0.0)
    await warm_up(pupil, examples(), CONFIG, evaluate=pupil.accuracy, progress=lambda note: None)
    assert pupil.rates[:2] == pytest.approx([0.05, 0.1])
    assert pupil.rates[19:] == [1.0] * 31


async def test_a_target_out_of_reach_ends_at_max_steps_with_what_was_reached() -> None:
    pupil = Pupil(per_step=0.001)
    result = await warm_up(
        pupil, examples(), CONFIG, evaluate=pupil.accuracy, progress=lambda note: None
    )
    assert (result.steps, result.accuracy) == (50, pytest.approx(0.05))


async def test_examples_that_run_out_end_it_with_a_last_evaluation() -> None:
    pupil = Pupil(per_step=0.01)
    result = await warm_up(
        pupil,
        examples(26),
        CONFIG,
        evaluate=pupil.accuracy,
        progress=lambda note: None,
    )
    assert (result.steps, result.accuracy) == (7, pytest.approx(0.07))
    assert pupil.sizes[-1] == 2


async def test_the_optimizer_is_reset_even_when_a_step_fails() -> None:
    pupil = Pupil(per_step=0.0, fails_at=3)
    with pytest.raises(RuntimeError):
        await warm_up(
            pupil, examples(), CONFIG, evaluate=pupil.accuracy, progress=lambda note: None
        )
    assert pupil.ended == 1
