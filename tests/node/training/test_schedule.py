import math

import pytest

from primerl.node.config.run import TrainingConfig
from primerl.node.training.optimizer import learning_rate

LINEAR = TrainingConfig(lr=1.0, scheduler="linear", warmup_steps=10, min_lr_ratio=0.1)


def test_linear_rises_then_falls_to_its_floor_at_the_last_step() -> None:
    rates = [learning_rate(LINEAR, step, 110) for step in (1, 5, 10, 60, 110, 200)]
    assert rates == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1, 0.1])


def test_constant_stays_after_its_warmup() -> None:
    config = TrainingConfig(lr=2.0, warmup_steps=2)
    assert [learning_rate(config, step, 3) for step in (1, 2, 3, 9)] == [1.0, 2.0, 2.0, 2.0]


def test_a_run_shorter_than_its_warmup_still_has_a_rate() -> None:
    assert 0 < learning_rate(LINEAR, 3, 3) <= 1.0
    assert learning_rate(LINEAR, 11, 5) == pytest.approx(0.1)


def test_there_is_no_step_zero() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(LINEAR, 0, 10)


def test_cosine_falls_in_half_a_period_and_stays_at_its_floor() -> None:
    config = LINEAR.model_copy(update={"scheduler": "cosine"})
    rates = [learning_rate(config, step, 110) for step in (1, 10, 35, 60, 85, 110, 200)]
    middle, swing = 0.55, 0.45
    slope = swing * math.cos(math.pi / 4)
    wanted = [0.1, 1.0, middle + slope, middle, middle - slope, 0.1, 0.1]
    assert rates == pytest.approx(wanted)
    falling = [learning_rate(config, step, 110) for step in range(10, 111)]
    assert falling == sorted(falling, reverse=True)
