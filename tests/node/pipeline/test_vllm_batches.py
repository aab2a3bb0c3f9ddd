"""The persistent batch of each lane, without vLLM."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

from primerl.node.pipeline.vllm_runner import LaneBatches, empty_like, record_batch_arguments

META = torch.device("meta")


def buffer(device: Any = META) -> SimpleNamespace:
    return SimpleNamespace(gpu=torch.empty(2, device=device), cpu=torch.empty(2))


class InputBatch:
    """Rows of sequences, as vLLM's."""

    def __init__(self, device: Any = META, logitsprocs: Any = None) -> None:
        self.req_id_to_index: dict[str, int] = {}
        self.logitsprocs = logitsprocs
        table = SimpleNamespace(block_table=buffer(device), slot_mapping=buffer(device), size=3)
        self.block_table = SimpleNamespace(block_tables=[table])

    def remove_request(self, name: str) -> None:
        self.req_id_to_index.pop(name, None)


class Runner:
    """Updates its batch like vLLM's runner: removes unscheduled rows, adds new ones."""

    def __init__(self, made: Any) -> None:
        self.input_batch: Any = made()
        self.added: list[str] = []

    def _update_states(self, output: Any) -> None:
        rows = self.input_batch.req_id_to_index
        for name in rows.keys() - output.num_scheduled_tokens.keys():
            del rows[name]
        self.added = [name for name in output.num_scheduled_tokens if name not in rows]
        rows |= {name: 0 for name in self.added}


def make(most: int = 3) -> Runner:
    module = SimpleNamespace(InputBatch=InputBatch)
    record_batch_arguments(module)
    record_batch_arguments(module)  # twice is once
    runner = Runner(module.InputBatch)
    LaneBatches(runner, most).install()
    return runner


def step(runner: Any, names: Iterable[str], over: Iterable[str] = ()) -> list[str]:
    """Return the rows that had to be added."""
    output: Any = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, 1), finished_req_ids=set(over)
    )
    runner._update_states(output)
    return runner.added


def test_lanes_that_take_turns_find_their_rows_again() -> None:
    runner = make()
    assert [step(runner, lane) for lane in ("abc", "de", "fg")] == [[*"abc"], [*"de"], [*"fg"]]
    assert [step(runner, lane) for lane in ("abc", "de", "fg", "ab", "abc")] == [
        [],
        [],
        [],
        [],
        ["c"],
    ]


def test_a_sequence_is_in_one_batch_only() -> None:
    runner = make()
    step(runner, "abc")
    step(runner, "de")
    assert step(runner, "dec") == ["c"]  # it moved
    assert step(runner, "abc") == ["c"]  # and back: what its old row says is out of date
    assert step(runner, "de") == []


def test_a_finished_request_leaves_its_batch_at_once_in_any_turn() -> None:
    runner = make()
    step(runner, "abc")
    step(runner, "de", over="b")
    assert step(runner, "abc") == ["b"]  # empty_like one of that name
    step(runner, "", over="ac")
    assert step(runner, "ac") == ["a", "c"]


def test_no_more_batches_are_made_than_may_be() -> None:
    runner = make(most=2)
    for lane in ("ab", "cd", "ef"):
        step(runner, lane)
    assert step(runner, "cd") == []
    assert step(runner, "ab") == [
        "a",
        "b",
    ]  # which was used longest ago when empty_like one was needed


def test_an_emptied_batch_is_used_again() -> None:
    runner = make(most=2)
    step(runner, "ab")
    step(runner, "cd", over="ab")
    step(runner, "ef")
    assert step(runner, "cd") == []


def test_blocks_of_all_batches_lie_in_one_place_on_a_device_and_apart_on_a_host() -> None:
    for device, shared in ((META, True), ("cpu", False)):
        module = SimpleNamespace(InputBatch=InputBatch)
        record_batch_arguments(module)
        first = module.InputBatch(device=device, logitsprocs="of the first")
        second = empty_like(first)
        assert second.logitsprocs is None
        (own,), (other,) = second.block_table.block_tables, first.block_table.block_tables
        for name in ("block_table", "slot_mapping"):
            assert (getattr(own, name).gpu is getattr(other, name).gpu) is shared
            assert getattr(own, name).cpu is not getattr(other, name).cpu
