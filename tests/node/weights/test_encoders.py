"""Processes code what encode_delta() codes, byte for byte, and none of them outlives its owner."""

import io
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from support import weights_cases as cases

from primerl.node.weights import encoders
from primerl.node.weights.blocks import BLOCK
from primerl.node.weights.codec import encode_delta
from primerl.node.weights.encoders import Encoders, serve
from primerl.node.weights.state import Changed, CodecError, State, Tensor


@pytest.fixture(scope="module")
def pool() -> Iterator[Encoders]:
    with Encoders(2) as running:
        yield running


def steps() -> tuple[State, State]:
    """Tensors of several blocks, small ones, and every density."""
    rng = np.random.default_rng(5)
    base = {
        "as it was": cases.like_a_model(9, 5000),
        "dense": cases.like_a_model(1, 9000),
        "long": cases.like_a_model(2, 2 * BLOCK + 100),
        "noise": Tensor("F32", (6000,), rng.integers(0, 2**32, 6000, dtype="<u4")),
        "same": cases.like_a_model(3, 5000),
        "small": cases.like_a_model(4, 64),
        "steps": cases.tensor("I64", (), bytes(8)),
    }
    noise = Tensor("F32", (6000,), rng.integers(0, 2**32, 6000, dtype="<u4"))
    new = base | {
        "dense": cases.stepped(base["dense"], 6, 0.9),
        "long": cases.stepped(base["long"], 7, 0.02),
        "noise": noise,
        "small": cases.stepped(base["small"], 8, 0.5),
        "steps": cases.tensor("I64", (), b"\x01" + bytes(7)),
    }
    return base, new


def hints(base: State, new: State) -> Changed:
    return {
        name: np.flatnonzero(tensor.data != base[name].data)
        for name, tensor in new.items()
        if name not in ("as it was", "same")
    }


def coded(pool: Encoders, base: State, new: State, changed: Changed | None) -> bytes:
    return b"".join(pool.encode_delta(base, new, changed))


@pytest.fixture
def for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are asked however few elements changed."""
    monkeypatch.setattr(encoders, "WORTH_IT", 0)


@pytest.mark.usefixtures("for_little")
def test_processes_give_the_bytes_of_one_thread(pool: Encoders) -> None:
    base, new = steps()
    plain = b"".join(encode_delta(base, new))
    exact = hints(base, new)
    assert coded(pool, base, new, exact) == plain
    more: Changed = {**exact, "long": np.arange(base["long"].data.size)}
    assert coded(pool, base, new, more) == plain  # more than what changed, but for one tensor
    every: Changed = {name: np.arange(t.data.size) for name, t in base.items()}
    assert coded(pool, base, new, every) == plain
    assert coded(pool, new, new, {}) == b"".join(encode_delta(new, new))
    assert pool.pids


@pytest.mark.usefixtures("for_little")
def test_states_of_different_layout_have_no_delta(pool: Encoders) -> None:
    with pytest.raises(CodecError, match="snapshot"):
        pool.encode_delta({"w": cases.bf16(1)}, {"w": cases.bf16(1, 2)}, {})


def test_few_changes_start_no_process() -> None:
    base, new = steps()
    with Encoders(2) as idle:
        assert coded(idle, base, new, hints(base, new)) == b"".join(encode_delta(base, new))
        assert idle.pids == []


@pytest.mark.usefixtures("for_little")
def test_a_process_that_was_killed_costs_only_time() -> None:
    base, new = steps()
    plain = b"".join(encode_delta(base, new))
    with Encoders(2) as hurt:
        hurt.start()
        os.kill(hurt.pids[0], signal.SIGKILL)
        for _ in range(2):
            assert coded(hurt, base, new, hints(base, new)) == plain


@pytest.mark.usefixtures("for_little")
def test_a_reader_that_stops_leaves_the_encoders_ready(pool: Encoders) -> None:
    base, new = steps()
    half = pool.encode_delta(base, new, hints(base, new))
    next(half)
    next(half)
    assert coded(pool, base, new, hints(base, new)) == b"".join(encode_delta(base, new))


def test_processes_end_with_their_owner() -> None:
    with Encoders(2) as running:
        running.start()
        children = running.pids
        assert len(children) == 2
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_a_process_leaves_when_its_input_ends() -> None:
    sink = io.BytesIO()
    serve(io.BytesIO(), sink)
    assert sink.getvalue() == b""
    with pytest.raises(EOFError):
        serve(io.BytesIO(bytes.fromhex("0200000001000000ff")), sink)


@pytest.mark.usefixtures("for_little")
def test_where_states_are_compared_no_process_is_started() -> None:
    base, new = steps()
    plain = b"".join(encode_delta(base, new))
    with Encoders(2) as idle:
        assert coded(idle, base, new, None) == plain
        assert idle.pids == []


def test_a_few_elements_to_compare_do_not_keep_the_rest_from_the_processes(
    pool: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, new = steps()
    monkeypatch.setattr(encoders, "WORTH_IT", 5000)
    monkeypatch.setattr(encoders, "MOST_COMPARED", 5000)
    some: Changed = {**hints(base, new), "small": None}
    assert coded(pool, base, new, some) == b"".join(encode_delta(base, new))
    with Encoders(2) as idle:
        much: Changed = {**some, "long": None}
        assert coded(idle, base, new, much) == b"".join(encode_delta(base, new))
        assert idle.pids == []
        assert coded(idle, base, new, some) == b"".join(encode_delta(base, new))
        assert len(idle.pids) == 2
