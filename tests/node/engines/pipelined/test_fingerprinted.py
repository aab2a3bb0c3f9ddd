"""What the last stage may say it drew: stage 0 signs for it, so what no sampler gives is not taken."""

import numpy as np
import pytest

from primerl.node.engines.pipelined.fingerprinted import check_numbers
from primerl.node.errors import EngineError
from primerl.node.fingerprints.fingerprint import NUMBERS, pack

PROPER = pack(np.random.default_rng(0).normal(0, 1, (3, NUMBERS)).astype(np.float32))


def logprobs(*values: float) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.array(values, np.float32)


def test_what_a_sampler_gives_is_taken_rounding_and_numbers_that_are_none_included() -> None:
    check_numbers(logprobs(-3.0, 0.0, 1e-6), PROPER)
    check_numbers(logprobs(-np.inf, np.nan, -1.0))


def test_a_logprob_above_0_is_no_sampler_s() -> None:
    with pytest.raises(EngineError, match="above 0"):
        check_numbers(logprobs(-1.0, 0.5), PROPER)


def test_bytes_that_stand_for_no_state_are_no_fingerprint() -> None:
    broken = PROPER[:8] + bytes([200]) + bytes(7) + PROPER[16:]
    with pytest.raises(EngineError, match="stands for no state"):
        check_numbers(logprobs(-1.0, -1.0, -1.0), broken)
