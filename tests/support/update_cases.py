"""Updates for the tests of engines: a second state, and exactly where it differs from the first."""

import numpy as np

from primerl.node.weights.state import Changed, State, Tensor


def blended(old: State, new: State, share: float, seed: int = 0) -> tuple[State, Changed]:
    """`old` with `share` of its elements taken from `new`, and their positions.

    Vectors (norms, equal in all fresh models) change too, one of them as a whole; the first matrix
    of all does not change at all.
    """
    rng = np.random.default_rng(seed)
    vectors = [name for name in sorted(old) if len(old[name].shape) == 1]
    untouched = next(name for name in sorted(old) if len(old[name].shape) == 2)
    state = dict(old)
    changed: dict[str, np.ndarray | None] = {}
    for name, tensor in old.items():
        size = tensor.data.size
        positions = np.flatnonzero(rng.random(size) < share)
        if name == untouched:
            continue
        data = tensor.data.copy()
        if name in vectors:
            positions = np.array([0, size - 1])
            data[positions] ^= 0x30  # of a bf16's seven bits of mantissa
            changed[name] = None if name == vectors[0] else positions
        else:
            data[positions] = new[name].data[positions]
            changed[name] = positions
        state[name] = Tensor(tensor.dtype, tensor.shape, data)
    return state, changed
