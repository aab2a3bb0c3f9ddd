"""A learner that is closed keeps nothing: its successor has the memory."""

import gc
import weakref
from pathlib import Path

import pytest
from support.training_cases import FAST, batch

from primerl.node.training.learner import Learner


@pytest.mark.parametrize("changes", [{}, {"activation_checkpointing": "full"}])
def test_the_weights_of_a_closed_learner_go_with_it(
    model_dir: Path, changes: dict[str, str]
) -> None:
    config = FAST.model_copy(update=changes)
    learner = Learner.build(model_dir, config, max_steps=2, seed=0, temperature=1.0)
    learner.step(batch(1))
    weights = [weakref.ref(one) for one in learner.saved().weights.values()]
    gc.collect()
    gc.disable()  # the counts alone have to do it
    try:
        learner.close()
        del learner
        alive = sum(one() is not None for one in weights)
    finally:
        gc.enable()
    assert alive == 0
