"""Calls of audits that wait are audited together, and each gets its own answer."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from primerl.node.ops.errors import EngineError
from primerl.node.verification.auditor import (
    AuditCall,
    AuditItem,
    AuditTarget,
    LocalAudits,
    Measured,
    Unreadable,
)
from primerl.node.weights.state import State, Tensor
from primerl.protocol.manifests import RunManifest

OLD, NEW = ({"w": Tensor("F32", (1,), np.full(1, value, "<u4"))} for value in (1, 2))
DEADLINE_S = 10.0


class Auditor:
    """Measures when it is let go: of each item its first token."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], dict[int, State], dict[int, list[int]]]] = []
        self.gate = asyncio.Event()
        self.fault: EngineError | None = None

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """Nothing."""

    async def audit(
        self,
        items: Sequence[AuditItem],
        states: Mapping[int, State],
        others: Mapping[int, Sequence[int]],
    ) -> list[Measured | Unreadable]:
        """Note what is asked for."""
        marks = [one.token_ids[0] for one in items]
        self.calls.append((marks, dict(states), {k: list(v) for k, v in others.items()}))
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return [Unreadable(f"{mark}", proof=False) for mark in marks]

    async def close(self) -> None:
        """Nothing."""


def make_call(
    *rollouts: Sequence[int],
    states: Mapping[int, State] | None = None,
    others: Mapping[int, Sequence[int]] | None = None,
) -> AuditCall:
    """Of rollouts with branches that begin with these tokens."""
    chosen = [
        AuditTarget(cast("Any", None), [AuditItem([mark], [], [], [], b"") for mark in marks])
        for marks in rollouts
    ]
    nothing = cast("Any", None)
    return AuditCall(
        sealed=b"",
        digest=b"",
        lease=nothing,
        node=b"",
        challenge=b"",
        chosen=chosen,
        states=states or {1: OLD},
        others=others or {},
        contract=nothing,
    )


async def answers(work: "asyncio.Task[Any]") -> list[list[str]]:
    """What a call was told of its branches."""
    async with asyncio.timeout(DEADLINE_S):
        return [[one.detail for one in branches] for branches in (await work).measured]


async def begun(auditor: Auditor, service: LocalAudits, *calls: AuditCall) -> list[Any]:
    """The tasks of calls, the first of which is being audited."""
    tasks: list[Any] = []
    for call in calls:
        tasks.append(asyncio.create_task(service.audit(call)))
        await asyncio.sleep(0)
    assert len(auditor.calls) == 1
    return tasks


async def test_calls_that_wait_are_audited_at_once_and_each_gets_its_own_answer() -> None:
    auditor = Auditor()
    calls = (
        make_call([1]),
        make_call([2, 3], [4], others={1: [0]}, states={1: OLD, 0: NEW}),
        make_call([5], states={2: NEW, 1: dict(OLD)}, others={2: [1], 1: [0]}),
    )
    first, second, third = await begun(auditor, LocalAudits(auditor), *calls)
    auditor.gate.set()
    assert await answers(first) == [["1"]]
    assert await answers(second) == [["2", "3"], ["4"]]
    assert await answers(third) == [["5"]]
    [_, (marks, states, others)] = auditor.calls
    assert (marks, others) == ([2, 3, 4, 5], {1: [0], 2: [1]})
    assert states.keys() == {0, 1, 2}


async def test_calls_that_mean_different_weights_by_a_version_are_kept_apart() -> None:
    auditor = Auditor()
    calls = (make_call([1]), make_call([2], states={1: OLD}), make_call([3], states={1: NEW}))
    tasks = await begun(auditor, LocalAudits(auditor), *calls)
    auditor.gate.set()
    assert [await answers(one) for one in tasks] == [[["1"]], [["2"]], [["3"]]]
    assert [(marks, states[1]["w"].data[0]) for marks, states, _ in auditor.calls] == [
        ([1], 1),
        ([2], 1),
        ([3], 2),
    ]


async def test_what_the_auditor_cannot_do_is_told_to_all_that_asked() -> None:
    auditor = Auditor()
    auditor.fault = EngineError("no audit succeeds")
    tasks = await begun(auditor, LocalAudits(auditor), *(make_call([one]) for one in range(3)))
    auditor.gate.set()
    for task in tasks:
        with pytest.raises(EngineError, match="no audit succeeds"):
            await answers(task)
    assert len(auditor.calls) == 2


async def test_a_call_that_is_given_up_costs_the_others_nothing() -> None:
    auditor = Auditor()
    tasks = await begun(auditor, LocalAudits(auditor), *(make_call([one]) for one in range(4)))
    first, second, third, fourth = tasks
    third.cancel()
    first.cancel()  # while it is audited
    await asyncio.sleep(0.01)
    second.cancel()  # which was to audit for the rest
    auditor.gate.set()
    assert await answers(fourth) == [["3"]]
    assert [marks for marks, _, _ in auditor.calls][-1] == [3]
