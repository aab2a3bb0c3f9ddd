"""Audits that wait are made together, each gets its own answer, and none suffers for another's texts."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primerl.node.errors import EngineError
from primerl.node.verification.auditor import AuditItem, Measured, Unreadable
from primerl.node.verification.local_audits import (
    BATCH_TOKENS,
    ENOUGH_AUDITS,
    MAX_PAUSE_S,
    PAUSE_PER_LOAD,
    LocalAudits,
)
from primerl.node.weights.state import State, Tensor
from primerl.protocol.manifests import RunManifest

OLD, NEW = ({"w": Tensor("F32", (1,), np.full(1, value, "<u4"))} for value in (1, 2))
DEADLINE_S = 10.0
DEADLY = 666


class Auditor:
    """Measures when it is let go: of each item its first token; a deadly one spoils all of its audit."""

    def __init__(self) -> None:
        self.loading_s = 0.0
        self.load_s = 0.0
        """Seconds that each audit is said to load versions."""
        self.calls: list[tuple[Sequence[AuditItem], dict[int, State]]] = []
        self.gate = asyncio.Event()
        self.fault: EngineError | None = None

    async def start(self, model_dir: Path, run: RunManifest) -> None:
        """Nothing."""

    async def audit(
        self, items: Sequence[AuditItem], states: Mapping[int, State]
    ) -> list[Measured | Unreadable]:
        """Note what is asked for."""
        marks = [one.token_ids[0] for one in items]
        self.calls.append((items, dict(states)))
        await self.gate.wait()
        self.loading_s += self.load_s
        if self.fault is not None:
            raise self.fault
        if DEADLY in marks:
            return [Unreadable("it ended the audit", proof=False) for _ in marks]
        return [Measured(0, 0, mark, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0) for mark in marks]

    async def close(self) -> None:
        """Nothing."""
        self.gate.set()
        self.fault = EngineError("it was closed")

    @property
    def asked(self) -> list[list[int]]:
        """The marks of each audit."""
        return [[one.token_ids[0] for one in items] for items, _ in self.calls]


def items(*marks: int, tokens: int = 1) -> list[AuditItem]:
    """Items that begin with these tokens."""
    return [AuditItem([mark] * tokens, [], [], [], b"") for mark in marks]


async def answer(work: "asyncio.Task[list[Measured | Unreadable]]") -> list[int | str]:
    """What an audit was told of its items."""
    async with asyncio.timeout(DEADLINE_S):
        return [one.tokens if isinstance(one, Measured) else one.detail for one in await work]


Audit = tuple[list[AuditItem], Mapping[int, State]]


async def begun(service: LocalAudits, *audits: Audit) -> list[Any]:
    """The tasks of audits, begun one after the other."""
    tasks: list[Any] = []
    for audit in audits:
        tasks.append(asyncio.create_task(service.audit(*audit)))
        await asyncio.sleep(0)
    return tasks


def plain(mark: int) -> Audit:
    """An audit of one item."""
    return items(mark), {1: OLD}


async def test_audits_that_wait_are_made_at_once_and_each_gets_its_own_answer() -> None:
    auditor = Auditor()
    first, second, third = await begun(
        LocalAudits(auditor),
        plain(1),
        ([replace(one, others=[0]) for one in items(2, 3, 4)], {1: OLD, 0: NEW}),
        (items(5), {2: NEW, 1: dict(OLD)}),
    )
    assert auditor.asked == [[1]]
    auditor.gate.set()
    assert await answer(first) == [1]
    assert await answer(second) == [2, 3, 4]
    assert await answer(third) == [5]
    [_, (made, states)] = auditor.calls
    assert [one.others for one in made] == [[0], [0], [0], ()], (
        "no item is compared because of another"
    )
    assert states.keys() == {0, 1, 2}


async def test_audits_that_mean_different_weights_by_a_version_are_kept_apart() -> None:
    auditor = Auditor()
    audits = (plain(1), plain(2), (items(3), {1: NEW}))
    tasks = await begun(LocalAudits(auditor), *audits)
    auditor.gate.set()
    assert [await answer(one) for one in tasks] == [[1], [2], [3]]
    assert auditor.asked == [[1], [2], [3]]
    assert [states[1]["w"].data[0] for _, states in auditor.calls] == [1, 1, 2]


async def test_more_tokens_than_fit_into_a_batch_wait_for_the_next_one() -> None:
    auditor = Auditor()
    large = items(2, tokens=BATCH_TOKENS - 1), {1: OLD}
    tasks = await begun(LocalAudits(auditor), plain(1), large, plain(3), plain(4))
    auditor.gate.set()
    assert [await answer(one) for one in tasks] == [[1], [2], [3], [4]]
    assert auditor.asked == [[1], [2, 3], [4]]


async def test_a_text_that_ends_audits_harms_none_but_its_own() -> None:
    auditor = Auditor()
    first, fine, deadly, other = await begun(
        LocalAudits(auditor), plain(1), plain(2), (items(3, DEADLY), {1: OLD}), plain(4)
    )
    auditor.gate.set()
    assert await answer(first) == [1]
    assert await answer(fine) == [2]
    assert await answer(deadly) == ["it ended the audit"] * 2
    assert await answer(other) == [4]
    assert auditor.asked == [[1], [2, 3, DEADLY, 4], [2], [3, DEADLY], [4]]


async def test_what_the_auditor_cannot_do_is_told_to_all_that_asked() -> None:
    auditor = Auditor()
    auditor.fault = EngineError("no audit succeeds")
    tasks = await begun(LocalAudits(auditor), *map(plain, range(3)))
    auditor.gate.set()
    for task in tasks:
        with pytest.raises(EngineError, match="no audit succeeds"):
            await answer(task)


async def test_an_audit_that_is_given_up_costs_the_others_nothing() -> None:
    auditor = Auditor()
    first, second, third, fourth = await begun(LocalAudits(auditor), *map(plain, range(4)))
    third.cancel()
    first.cancel()  # while it is made
    await asyncio.sleep(0.01)
    second.cancel()  # which was to audit for the rest
    auditor.gate.set()
    assert await answer(fourth) == [3]
    assert auditor.asked[-1] == [3]


# -- waiting for more audits -----------------------------------------------------------------------


async def loaded(load_s: float, service: LocalAudits, auditor: Auditor) -> None:
    """Make an audit that loads versions for `load_s`."""
    auditor.load_s = load_s
    auditor.gate.set()
    [task] = await begun(service, plain(0))
    await answer(task)
    auditor.load_s = 0.0


async def test_after_versions_were_loaded_an_audit_waits_until_there_are_enough() -> None:
    auditor = Auditor()
    service = LocalAudits(auditor, patience_s=lambda: inf)
    await loaded(1e3, service, auditor)
    tasks = await begun(service, *map(plain, range(1, ENOUGH_AUDITS)))
    await asyncio.sleep(0.02)
    assert auditor.asked == [[0]]
    tasks += await begun(service, plain(ENOUGH_AUDITS))
    for task in tasks:
        await answer(task)
    assert auditor.asked == [[0], [*range(1, ENOUGH_AUDITS + 1)]]


async def test_many_tokens_are_not_kept_waiting() -> None:
    auditor = Auditor()
    service = LocalAudits(auditor, patience_s=lambda: inf)
    await loaded(1e3, service, auditor)
    [task] = await begun(service, (items(1, tokens=BATCH_TOKENS), {1: OLD}))
    assert await answer(task) == [1]


async def test_an_audit_that_may_not_wait_any_more_is_made_at_once() -> None:
    auditor, patience = Auditor(), [inf]
    service = LocalAudits(auditor, patience_s=lambda: patience[0])
    await loaded(1e3, service, auditor)
    [task] = await begun(service, plain(1))
    await asyncio.sleep(0.02)
    assert auditor.asked == [[0]]
    patience[0] = 0.0
    assert await answer(task) == [1]


@pytest.mark.parametrize(("load_s", "pause_s"), [(0.5, 0.5 * PAUSE_PER_LOAD), (1e3, MAX_PAUSE_S)])
async def test_the_wait_is_a_multiple_of_the_time_that_loading_took(
    load_s: float, pause_s: float
) -> None:
    auditor, time = Auditor(), [100.0]
    service = LocalAudits(auditor, patience_s=lambda: inf, now=lambda: time[0])
    await loaded(load_s, service, auditor)
    time[0] += pause_s - 0.02
    tasks = await begun(service, plain(1))
    await asyncio.sleep(0)
    assert auditor.asked == [[0]]
    time[0] += 0.03  # which it sees at its next look
    assert await answer(tasks[0]) == [1]


async def test_an_audit_waits_for_others_no_longer_than_the_trainer_can_spare() -> None:
    auditor, time = Auditor(), [100.0]
    service = LocalAudits(auditor, patience_s=lambda: 0.25, now=lambda: time[0])
    await loaded(1e3, service, auditor)
    tasks = await begun(service, plain(1))
    time[0] += 0.2
    await asyncio.sleep(0)
    assert auditor.asked == [[0]]
    time[0] += 0.1  # which it sees at its next look
    assert await answer(tasks[0]) == [1]


async def test_by_default_no_audit_waits_for_others() -> None:
    auditor = Auditor()
    service = LocalAudits(auditor)
    await loaded(1e3, service, auditor)
    [task] = await begun(service, plain(1))
    assert await answer(task) == [1]


async def test_an_auditor_that_loads_nothing_is_never_waited_for() -> None:
    auditor = Auditor()
    service = LocalAudits(auditor, patience_s=lambda: inf)
    for _ in range(2):
        await loaded(0.0, service, auditor)
    assert len(auditor.calls) == 2


async def test_closing_ends_the_wait() -> None:
    auditor = Auditor()
    service = LocalAudits(auditor, patience_s=lambda: inf)
    await loaded(1e3, service, auditor)
    [task] = await begun(service, plain(1))
    await service.close()
    with pytest.raises(EngineError, match="it was closed"):
        await answer(task)
