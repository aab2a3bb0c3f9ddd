"""What is kept of the states at a boundary: it follows from all of a state, however large some channels are."""

import numpy as np
import pytest
import torch

from primerl.node.errors import EngineError
from primerl.node.inference.boundary_states import (
    agrees,
    evened,
    pack_projected,
    project,
)
from primerl.node.inference.fingerprint import decode_rows, signs

WIDTH = 256


def states(rows: int = 64, *, massive: float = 0.0, seed: int = 0) -> torch.Tensor:
    """Normally distributed states, two channels of which may outweigh the others."""
    drawn = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    drawn[:, 17] += massive
    drawn[:, 200] -= massive / 2
    return drawn


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative distance of what is committed to."""
    return float((project(one) - project(other)).norm() / project(one).norm())


def test_ordinary_states_are_projected_as_they_are() -> None:
    drawn = states()
    assert torch.allclose(project(drawn), drawn @ torch.from_numpy(signs(WIDTH)), atol=1e-4)


@pytest.mark.parametrize("massive", [0.0, 30.0, 3000.0])
def test_an_evened_state_keeps_its_length(massive: float) -> None:
    drawn = states(massive=massive)
    assert torch.allclose(evened(drawn).norm(dim=1), drawn.norm(dim=1), rtol=1e-5)


def test_a_change_of_the_common_channels_shows_beside_channels_that_outweigh_them() -> None:
    drawn = states(massive=300.0)
    changed = drawn + 0.1 * states(seed=1)
    plain = torch.from_numpy(signs(WIDTH))
    hidden = float(((drawn - changed) @ plain).norm() / (drawn @ plain).norm())
    assert hidden < 0.01, "a plain projection shows next to nothing"
    assert apart(drawn, changed) > 0.05


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.1, -1.0], ids=str)
def test_a_change_of_the_largest_channel_shows(factor: float) -> None:
    drawn = states(massive=300.0)
    changed = drawn.clone()
    changed[:, 17] *= factor
    assert apart(drawn, changed) > 0.05


def test_a_longer_state_is_another_one() -> None:
    drawn = states(massive=300.0)
    assert apart(drawn, drawn * 1.1) == pytest.approx(0.1, rel=1e-3)


def test_states_of_zeros_and_no_states_have_fingerprints() -> None:
    assert pack_projected(project(torch.zeros(2, WIDTH))) == bytes(16)
    assert pack_projected(project(torch.empty(0, WIDTH))) == b""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_have_none(value: float) -> None:
    drawn = states(3)
    drawn[1, 5] = value
    with pytest.raises(EngineError, match="no fingerprint"):
        pack_projected(project(drawn))


@pytest.mark.parametrize("massive", [0.0, 300.0])
def test_the_receiver_of_the_same_states_agrees(massive: float) -> None:
    drawn = states(200, massive=massive).to(torch.bfloat16)
    assert agrees(pack_projected(project(drawn)), project(drawn).numpy())
    other_order = project(drawn.flip(0)).flip(0) * (1 + 1e-6)
    assert agrees(pack_projected(other_order), project(drawn).numpy())


def test_the_receiver_of_other_states_does_not() -> None:
    drawn = states(4)
    told = pack_projected(project(drawn))
    received = drawn.clone()
    received[2] += 0.1 * states(1, seed=3)[0]
    assert not agrees(told, project(received).numpy())
    assert not agrees(told[:-8], project(drawn).numpy())
    assert not agrees(told[:8] + b"\x01" * 8 + told[16:], project(drawn).numpy())
    assert agrees(b"", np.empty((0, 7), np.float32))


def test_rows_that_no_software_makes_are_recognized() -> None:
    told = pack_projected(project(states(3)))
    decoded, proper = decode_rows(told[:8] + b"\xff" + bytes(7) + told[16:])
    assert proper.tolist() == [True, False, True]
    assert decoded.shape == (3, 7)
