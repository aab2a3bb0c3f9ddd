"""A stage does what stage 0 says, within the plan; whatever else it is told, it refuses and makes no room."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine_cases import make_qwen3
from pipeline_cases import DEEP, plan_of, shape_of

from primerl.node.engines.pipelined.hf_compute import HfCompute
from primerl.node.engines.pipelined.hf_lanes import Lanes
from primerl.node.engines.pipelined.lane_step import (
    NOTHING,
    Draws,
    LaneStep,
    Taken,
    pack_step,
    read_answer,
    read_step,
)
from primerl.node.engines.pipelined.slices import Slice
from primerl.node.engines.qwen3 import Qwen3Network
from primerl.node.errors import EngineError
from primerl.node.pipeline.frame import Frame, Kind
from primerl.node.pipeline.place import Place

TIGHT = shape_of(max_model_len=64, max_step_tokens=32, kv_tokens=128)
BEGUN = LaneStep(1, 16, taken=(Taken(NOTHING, (0, 0)),), fill=((0, 4), (1, 3)))
PLAIN = Draws((1, 2), (1.0, 0.5), (0, 0), (1.0, 1.0))


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Slice:
    """The last stage of two."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    state = make_qwen3(directory, 1, DEEP)
    held = Slice(Place(plan_of(2, TIGHT), 1, ""), "cpu")
    held.open(directory)
    held.write(held.prepare_load(0, state))
    return held


@pytest.fixture
def network(last: Slice) -> Qwen3Network:
    return last.network


def states(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, 32, generator=torch.Generator().manual_seed(seed))


def run(lanes: Lanes, network: Qwen3Network, step: LaneStep, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        made, _ = lanes.step(network, step, x.clone())
        return made.clone()


def test_what_is_read_in_pieces_and_beside_others_is_what_is_read_at_once(
    network: Qwen3Network,
) -> None:
    x, other = states(9), states(5, 1)
    whole = Lanes(TIGHT, torch.device("cpu"))
    wanted = run(whole, network, LaneStep(1, 16, taken=(Taken(NOTHING, (0,)),), fill=((0, 9),)), x)
    lanes = Lanes(TIGHT, torch.device("cpu"))
    begin = LaneStep(4, 16, taken=(Taken(NOTHING, (0, 0)),), fill=((0, 4), (1, 3)))
    found = [run(lanes, network, begin, torch.cat([x[:4], other[:3]]))[:4]]
    both = LaneStep(4, 16, fill=((1, 2), (0, 3)))
    found.append(run(lanes, network, both, torch.cat([other[3:], x[4:7]]))[2:])
    for at in (7, 8):  # row 1 is shorter: what is behind it must not be seen
        step = LaneStep(4, 16, keep=(1, 0) if at == 7 else None)
        found.append(run(lanes, network, step, torch.stack([other[0], x[at]]))[1:])
    assert torch.allclose(torch.cat(found), wanted, atol=1e-4)


def test_a_row_that_is_taken_goes_on_in_both_lanes(network: Qwen3Network) -> None:
    lanes = Lanes(TIGHT, torch.device("cpu"))
    run(lanes, network, BEGUN, states(7))
    copy = LaneStep(2, 16, taken=(Taken(1, (1, 1)),))
    x = states(1, 5)
    first = run(lanes, network, copy, x.expand(2, -1))
    again = run(lanes, network, LaneStep(1, 16, keep=(1,)), x)
    assert torch.allclose(first, again.expand(2, -1), atol=1e-5)


BAD: dict[str, tuple[LaneStep, int, str]] = {
    "a lane that never began": (LaneStep(9, 16), 2, "never begun"),
    "rows of a lane that never began": (LaneStep(2, 16, taken=(Taken(9, (0,)),)), 1, "never begun"),
    "a row that is not there": (LaneStep(1, 16, keep=(0, 2)), 2, "does not have"),
    "a row of nothing": (LaneStep(2, 16, taken=(Taken(NOTHING, (1,)),)), 1, "nothing"),
    "filling a row that is not there": (LaneStep(1, 16, fill=((2, 1),)), 1, "does not have"),
    "filling a row twice": (LaneStep(1, 16, fill=((0, 1), (0, 1))), 2, "does not have"),
    "more tokens than it says": (LaneStep(1, 16, fill=((0, 1),)), 2, "other tokens"),
    "fewer tokens than rows": (LaneStep(1, 16), 1, "other tokens"),
    "no rows at all": (LaneStep(1, 16, keep=()), 0, "other tokens"),
    "longer than the plan": (LaneStep(1, 65), 2, "longer"),
    "longer than it said": (LaneStep(1, 6, fill=((0, 4),)), 4, "more slots"),
    "more cache than the plan": (LaneStep(1, 64, keep=(0, 1, 0)), 3, "more keys and values"),
    "more cache in another lane": (
        LaneStep(2, 60, taken=(Taken(NOTHING, (0, 0)),)),
        2,
        "more keys and values",
    ),
    "cache under a small number": (
        LaneStep(2, 1, taken=(Taken(1, (0,) * 30),)),
        30,
        "more keys and values",
    ),
    "draws of other rows": (LaneStep(1, 16, keep=(0,), draws=PLAIN), 1, "every row"),
    "draws of fewer rows": (
        LaneStep(1, 16, draws=Draws((1,), (1.0,), (0,), (1.0,))),
        2,
        "every row",
    ),
    "uneven draws": (LaneStep(1, 16, draws=msgspec.structs.replace(PLAIN, top_ks=())), 2, "differ"),
    "draws of some rows only": (
        LaneStep(1, 16, draws=PLAIN, taken=(Taken(NOTHING, (0,)),)),
        3,
        "every row",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_plan_allows_is_refused(network: Qwen3Network, case: str) -> None:
    step, tokens, words = BAD[case]
    lanes = Lanes(TIGHT, torch.device("cpu"))
    run(lanes, network, BEGUN, states(7))
    with pytest.raises(EngineError, match=words):
        run(lanes, network, read_step(pack_step(step)), states(tokens))


def frame(step: LaneStep, tokens: int, **changes: Any) -> Frame:
    made: dict[str, Any] = {
        "body": pack_step(step),
        "tensors": (states(tokens).numpy(),),
        **changes,
    }
    return Frame(Kind.STEP, 1, 1, **made)


def test_rows_draw_once_they_are_told_how(last: Slice) -> None:
    compute = HfCompute(Place(plan_of(2, TIGHT), 1, ""), last)
    assert read_answer(compute.step(frame(BEGUN, 7)).body).tokens == b""
    with pytest.raises(EngineError, match="how rows draw"):
        compute.step(frame(LaneStep(1, 16), 2))
    answer = read_answer(compute.step(frame(LaneStep(1, 16, draws=PLAIN), 2)).body)
    assert (len(answer.tokens), len(answer.logprobs), answer.proofs) == (8, 8, b"")


@pytest.mark.parametrize(
    "changes",
    [
        {"body": b""},
        {"body": b"\x91\x01"},
        {"body": pack_step(BEGUN) + b"\x00"},
        {"tensors": ()},
        {"tensors": (states(7).numpy()[:, :5],)},
        {"body": pack_step(LaneStep(1, 64, fill=((0, 40),))), "tensors": (states(40).numpy(),)},
    ],
    ids=["empty", "another message", "trailing bytes", "no states", "narrow states", "large"],
)
def test_frames_that_no_stage_sends_are_refused(last: Slice, changes: dict[str, Any]) -> None:
    compute = HfCompute(Place(plan_of(2, TIGHT), 1, ""), last)
    with pytest.raises(EngineError):
        compute.step(frame(BEGUN, 7, **changes))


def test_a_state_may_be_the_stage_s_own_or_the_whole_model_s_but_no_other(
    tmp_path: Path,
) -> None:
    state = make_qwen3(tmp_path, 3, DEEP)
    held = Slice(Place(plan_of(2, TIGHT), 0, ""), "cpu")
    held.open(tmp_path)
    held.prepare_load(0, state)
    with pytest.raises(EngineError, match="lacks"):
        held.prepare_load(0, {name: one for name, one in state.items() if "layers.1." not in name})
    with pytest.raises(EngineError, match="too many"):
        held.prepare_load(0, {**state, "model.extra.weight": state["model.norm.weight"]})
    assert not held.holds
