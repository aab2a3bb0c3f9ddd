"""A process that may hang, die or lie: the cost of that, and that no other item bears it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import fake_audit_process as fake
from support.auditor_cases import make_case, make_run, measured
from support.engine_cases import FP32
from support.waiting import alive, until

from primerl.node.errors import EngineError
from primerl.node.verification import hf_auditor, local_audits
from primerl.node.verification.auditor import AuditItem, Measured, SampledSpan, Unreadable
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.weights.state import State, Tensor

PROGRAM = (sys.executable, "-P", fake.__file__)


def make_state(value: int = 0) -> State:
    return {"weight": Tensor("F32", (2,), np.full(2, value, "<u4"))}


STATES = {1: make_state()}
DEADLINE_S = 60.0
DEADLY = [[fake.DIES, fake.TIRED], [fake.BUGGY, fake.MISCOUNTS]]


def item(kind: int, mark: int = 0) -> AuditItem:
    return AuditItem([kind, mark], [SampledSpan(1, 2, 0)], [0.0], [1], b"")


@pytest.fixture(params=[DEADLINE_S])
async def auditor(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HfAuditor]:
    """Its parameter is the deadline of a portion."""
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    auditor = HfAuditor(FP32, timeout_s=request.param, program=PROGRAM)
    await auditor.start(tmp_path, make_run("float32"))
    yield auditor
    await auditor.close()


def marks(found: list[Measured | Unreadable]) -> list[float | None]:
    return [one.fingerprint if isinstance(one, Measured) else None for one in found]


async def test_one_process_starts_with_the_first_audit_and_serves_all_until_it_dies(
    auditor: HfAuditor,
) -> None:
    assert auditor.pid is None
    first = await auditor.audit([item(fake.FINE, 3)], STATES)
    second = await auditor.audit([item(fake.FINE, 4)], STATES)
    assert marks(first + second) == [3.0, 4.0]
    pid = auditor.pid
    assert {one.tokens for one in first + second if isinstance(one, Measured)} == {pid}
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert marks(await auditor.audit([item(fake.FINE, 2)], STATES)) == [2.0]
    assert auditor.pid != pid


async def test_an_auditor_that_starts_ahead_has_its_process_before_the_first_audit(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    auditor = HfAuditor(FP32, timeout_s=DEADLINE_S, program=PROGRAM, ahead=True)
    try:
        await auditor.start(tmp_path, make_run("float32"))
        await until(lambda: auditor.pid is not None)
        ahead = auditor.pid
        await auditor.audit([item(fake.FINE, 3)], STATES)
        assert auditor.pid == ahead
    finally:
        await auditor.close()
    assert auditor.pid is None


@pytest.mark.parametrize("deadly", DEADLY)
async def test_items_that_end_the_process_cost_no_other_item(
    auditor: HfAuditor, deadly: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    items = [item(fake.FINE, 1), *map(item, deadly), item(fake.FINE, 2)]
    async with asyncio.timeout(DEADLINE_S):
        found = await auditor.audit(items, STATES)
    assert marks(found) == [1.0, *[None] * len(deadly), 2.0]
    lost = [one for one in found if isinstance(one, Unreadable)]
    assert all(one.detail and not one.proof for one in lost)
    if fake.DIES in deadly:  # its last words are in the answer and in the log
        assert "I was told to die" in lost[0].detail
        assert "audit process: I was told to die" in caplog.text


@pytest.mark.parametrize("auditor", [2.0], indirect=True)
async def test_an_item_that_hangs_meets_the_deadline(auditor: HfAuditor) -> None:
    await auditor.audit([item(fake.FINE)], STATES)
    pid = auditor.pid
    async with asyncio.timeout(DEADLINE_S):
        found = await auditor.audit([item(fake.HANGS), item(fake.FINE, 2)], STATES)
    assert marks(found) == [None, 2.0]
    assert pid is not None
    assert not alive(pid)


async def test_a_process_without_audits_ends_until_the_next_one(
    auditor: HfAuditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_auditor, "REST_S", 0.01)
    await auditor.audit([item(fake.FINE)], STATES)
    await until(lambda: auditor.pid is None)
    assert marks(await auditor.audit([item(fake.FINE, 2)], STATES)) == [2.0]


async def test_a_process_that_started_ahead_and_audits_nothing_ends_until_it_is_expected_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_auditor, "REST_S", 0.01)
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    auditor = HfAuditor(FP32, timeout_s=DEADLINE_S, program=PROGRAM, ahead=True)
    try:
        await auditor.start(tmp_path, make_run("float32"))
        await until(lambda: auditor.pid is not None)
        first = auditor.pid
        await until(lambda: auditor.pid is None)
        auditor.begin()
        await until(lambda: auditor.pid not in (None, first))
    finally:
        await auditor.close()


async def test_where_nothing_can_be_measured_the_auditor_says_so(auditor: HfAuditor) -> None:
    with pytest.raises(EngineError, match="no audit succeeds"):
        await auditor.audit([item(fake.DIES)] * 2, STATES)
    with pytest.raises(EngineError, match="does not fit"):
        await auditor.audit([item(fake.BROKEN)], STATES)
    assert marks(await auditor.audit([item(fake.FINE, 2)], STATES)) == [2.0]


async def test_a_caller_that_gives_up_and_a_close_leave_no_process_busy(auditor: HfAuditor) -> None:
    await auditor.audit([item(fake.FINE)], STATES)
    pid = auditor.pid
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await auditor.audit([item(fake.HANGS)], STATES)
    assert pid is not None
    assert not alive(pid)
    assert marks(await auditor.audit([item(fake.FINE, 2)], STATES)) == [2.0]
    pid = auditor.pid
    running = asyncio.create_task(auditor.audit([item(fake.HANGS)], STATES))
    await asyncio.sleep(0.1)
    await auditor.close()
    with pytest.raises(EngineError):
        await running
    assert pid is not None
    assert not alive(pid)
    with pytest.raises(EngineError):
        await auditor.audit([item(fake.FINE)], STATES)
    await auditor.close()


async def test_a_state_is_handed_over_once(auditor: HfAuditor) -> None:
    states = {version: make_state(version) for version in range(1, 7)}

    async def handed(version: int) -> float:
        """How many states the process was given so far."""
        before = [version - 1] if version > 1 else []
        one = replace(item(fake.COUNTS), versions=[version], others=before)
        [found] = await auditor.audit([one], states)
        assert isinstance(found, Measured)
        return found.fingerprint

    assert [await handed(version) for version in (1, 1, 2, 3, 2, 1)] == [1, 1, 2, 3, 3, 3]
    states[2] = make_state(9)  # the trainer went back, and the number has another meaning now
    assert await handed(2) == 4
    # more versions than the process keeps: the oldest went, the newest is still there
    assert [await handed(version) for version in (5, 6, 6, 1)] == [6, 7, 7, 8]


def test_a_portion_is_within_its_limit_unless_one_item_alone_is_not() -> None:
    costs = [10, 20, 500, 30, 60, 20, 90]
    taken: list[int] = []
    while sum(taken) < len(costs):
        taken.append(local_audits.portion_size(costs[sum(taken) :], limit=100))
    assert taken == [2, 1, 2, 1, 1]
    assert local_audits.portion_size(costs[4:], limit=170) == 3
    items = [replace(item(fake.FINE), token_ids=[0] * size) for size in costs]
    assert local_audits.prefill_costs(items) == costs
    twice = local_audits.prefill_costs([replace(one, others=[0]) for one in items[4:]])
    assert local_audits.portion_size(twice, limit=170) == 2, "each version costs as much"
    assert local_audits.portion_size([], limit=100) == 0


def test_portions_take_a_quarter_of_the_time_that_there_is() -> None:
    pace = local_audits.Pace(100.0)
    assert pace.limit == local_audits.FIRST_PORTION
    pace.done(local_audits.FIRST_PORTION, 8.192)  # a thousand a second
    assert pace.limit == 25_000
    pace.done(10, 1.0)  # a network was loaded
    assert pace.limit == 25_000
    pace.done(25_000, 0.0)
    assert pace.limit == local_audits.LARGEST_PORTION
    for _ in range(9):
        pace.failed()
    assert pace.limit == local_audits.SMALLEST_PORTION
    pace.done(local_audits.SMALLEST_PORTION, 50.0)
    assert pace.limit == local_audits.SMALLEST_PORTION


async def test_a_portion_that_wants_too_much_memory_is_measured_in_smaller_ones() -> None:
    sizes: list[int] = []

    async def attempt(items: Sequence[AuditItem]) -> list[Measured | Unreadable]:
        sizes.append(len(items))
        if len(items) > 8:
            raise local_audits.AuditFailed("out of memory")
        return [Unreadable(str(one.token_ids[0]), proof=False) for one in items]

    items = [replace(item(fake.FINE), token_ids=[number]) for number in range(64)]
    found = await local_audits.Portions(60.0).measure(items, [1] * len(items), attempt)
    assert [one.detail for one in found if isinstance(one, Unreadable)] == list(map(str, range(64)))
    assert sizes == [64, *[16, 4, 4, 4, 4] * 4]


async def test_many_deadly_items_do_not_hold_up_the_auditor_for_long() -> None:
    attempts = 0

    async def attempt(items: Sequence[AuditItem]) -> list[Measured | Unreadable]:
        nonlocal attempts
        attempts += 1
        if fake.DIES in [one.token_ids[0] for one in items]:
            raise local_audits.AuditFailed("the process died")
        return [Measured(0, 0, 1, 0, 0, 0, 0, 0, 0)] * len(items)

    items = [item(fake.FINE), *[item(fake.DIES)] * 50, item(fake.FINE)]
    found = await local_audits.Portions(60.0).measure(items, [1] * len(items), attempt)
    assert [isinstance(one, Measured) for one in found] == [True, *[False] * 51]
    assert attempts < 3 * local_audits.MOST_DEADLY


@pytest.mark.nightly
async def test_a_real_process_that_is_killed_at_work_costs_time_only(tmp_path: Path) -> None:
    case = await make_case(tmp_path, "float32")
    auditor = HfAuditor(FP32, timeout_s=60.0, threads=1)
    await auditor.start(case.model_dir, case.run)
    try:
        wanted = await auditor.audit(case.honest, case.states)
        running = asyncio.create_task(auditor.audit(case.honest * 40, case.states))
        await asyncio.sleep(0.2)
        assert auditor.pid is not None
        os.kill(auditor.pid, signal.SIGKILL)
        found = measured(await running)
    finally:
        await auditor.close()
    for one, other in zip(found, measured(wanted * 40), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
