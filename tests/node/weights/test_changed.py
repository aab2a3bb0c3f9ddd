"""What an engine has not been given yet: never less than what changed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from primerl.node.weights.state import Changed
from primerl.node.worker.weight_sync import PendingChanges

NAMES = st.sampled_from(["a", "b", "c"])
POSITIONS = st.none() | st.lists(st.integers(0, 20), unique=True).map(
    lambda listed: np.array(sorted(listed), np.int64)
)


@given(st.lists(st.dictionaries(NAMES, POSITIONS)))
def test_what_is_unwritten_is_the_union_of_all_steps(steps: list[Changed]) -> None:
    unwritten = PendingChanges()
    unwritten.none()
    for step in steps:
        unwritten.add(step)
    changed = unwritten.changed
    assert changed is not None
    assert set(changed) == {name for step in steps for name in step}
    for name, positions in changed.items():
        parts = [step[name] for step in steps if name in step]
        if any(part is None for part in parts):
            assert positions is None
        else:
            assert positions is not None
            assert positions.tolist() == sorted({int(i) for p in parts if p is not None for i in p})


def test_everything_is_unwritten_at_first_and_after_a_step_that_nobody_knows() -> None:
    unwritten = PendingChanges()
    unwritten.add({"a": None})
    assert unwritten.changed is None
    unwritten.none()
    assert unwritten.changed == {}
    unwritten.add(None)
    unwritten.add({"a": None})
    assert unwritten.changed is None
    unwritten.none()
    unwritten.all()
    assert unwritten.changed is None
