"""An auditor over a process that stands in for vLLM: what faults cost, and which weights measured what."""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec import structs
from support import fake_engine_process as fake
from support.auditor_cases import compared, make_run, measured
from support.engine_cases import FP32
from support.waiting import alive, until

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError, UsageError
from primerl.node.inference.engine_replica import EngineChild, EngineTimeouts
from primerl.node.inference.fingerprint import pack
from primerl.node.inference.prefill import PrefillRequest, read_claims
from primerl.node.verification import local_audits, vllm_auditor
from primerl.node.verification.auditor import (
    AuditItem,
    BoundaryClaim,
    Measured,
    SampledSpan,
    Unreadable,
)
from primerl.node.verification.hf_auditor import HfAuditor
from primerl.node.verification.local_audits import (
    ENOUGH_AUDITS,
    LocalAudits,
    RoutedAuditor,
)
from primerl.node.verification.measures import FEWEST
from primerl.node.verification.vllm_auditor import (
    NO_BOUNDARIES,
    AuditingEngine,
    Rows,
    VllmAuditor,
    audit_engine,
)
from primerl.node.weights.state import State, Tensor
from primerl.node.weights.state_history import StateHistory
from primerl.protocol.manifests import RouteShape, RunManifest
from primerl.protocol.rollouts import FINGERPRINT_NUMBERS

beside_others = pytest.mark.asyncio(loop_scope="module")
"""Of a test that takes the auditor of several."""

PROGRAM = (sys.executable, "-P", fake.__file__)
DEADLINE_S = 60.0
FINE = 20
"""A token that means nothing."""
SHAPE = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MIXTURE = SHAPE | {
    "model_type": "qwen3_moe",
    "intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
TOKENS = 3


def make_state(value: int) -> State:
    """Eight equal numbers apart from the first, by which a state is known."""
    numbers = np.full(64, 7, "<u4")
    numbers[0] = value
    return {"w": Tensor("F32", (64,), numbers)}


STATES = {version: make_state(version) for version in (1, 2, 3)}


def item(kind: int, version: int = 1, *, shown: int | None = None, mark: int = 0) -> AuditItem:
    """A branch that claims `version`, and whose proof is of the states of version `shown`."""
    states = np.full(
        (TOKENS, FINGERPRINT_NUMBERS), float(version if shown is None else shown), np.float32
    )
    return AuditItem(
        token_ids=[kind, mark, *[5] * TOKENS],
        replies=[SampledSpan(2, 2 + TOKENS, 9)],
        logprobs=[0.0] * TOKENS,
        versions=[version] * TOKENS,
        proof=pack(states),
    )


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


@pytest.fixture(params=[DEADLINE_S])
async def auditor(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[VllmAuditor]:
    """Its parameter is the deadline of a portion."""
    auditor = VllmAuditor(FP32, timeout_s=request.param, program=PROGRAM)
    await auditor.start(model_dir, make_run("float32"))
    yield auditor
    await auditor.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmAuditor]:
    """For the tests that lose no process: it starts one for all of them."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(SHAPE))
    auditor = VllmAuditor(FP32, timeout_s=DEADLINE_S, program=PROGRAM)
    await auditor.start(directory, make_run("float32"))
    yield auditor
    await auditor.close()


def well(found: Sequence[Measured | Unreadable]) -> list[bool]:
    """Which were measured under the weights that they claim."""
    return [isinstance(one, Measured) and one.fingerprint < 0.01 for one in found]


@beside_others
async def test_each_token_is_measured_under_the_version_that_it_claims(
    shared: VllmAuditor,
) -> None:
    crossed = item(FINE, 1)
    first, second = (
        np.full((count, FINGERPRINT_NUMBERS), version) for count, version in ((1, 1), (2, 2))
    )
    proof = pack(np.concatenate([first, second]).astype(np.float32))
    crossed = replace(crossed, versions=[1, 2, 2], proof=proof)
    items = [item(FINE, 2), item(FINE, 1), crossed, item(FINE, 3), item(FINE, 3, shown=2)]
    found = await shared.audit(items, STATES)
    assert well(found) == [True, True, True, True, False]


@beside_others
async def test_a_text_is_read_up_to_the_last_token_of_a_version_that_it_is_not_compared_with(
    shared: VllmAuditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[list[int]] = []
    read = AuditingEngine.read

    async def noted(
        engine: AuditingEngine, requests: Sequence[PrefillRequest], timeout_s: float
    ) -> list[Rows]:
        lengths.append([len(one.token_ids) for one in requests])
        return await read(engine, requests, timeout_s)

    monkeypatch.setattr(AuditingEngine, "read", noted)
    first, second = (
        np.full((count, FINGERPRINT_NUMBERS), version) for count, version in ((2, 1), (1, 2))
    )
    proof = pack(np.concatenate([first, second]).astype(np.float32))
    crossed = replace(item(FINE, 1), versions=[1, 1, 2], proof=proof)
    start = crossed.replies[0].start
    assert well(await shared.audit([crossed, item(FINE, 2)], STATES)) == [True, True]
    assert sorted(map(sorted, lengths)) == [[start + 1], [start + 2, start + 2]]
    lengths.clear()
    assert well(await shared.audit([replace(crossed, others=[1])], STATES)) == [True]
    assert sorted(map(sorted, lengths)) == [[start + 2], [start + 2]]


def kept_run() -> RunManifest:
    run = make_run("float32")
    return structs.replace(run, proofs=structs.replace(run.proofs, kv_cache="kept"))


def long_item(*versions: int, mark: int = 0) -> AuditItem:
    """A branch of replies of 50 tokens of each version, apart from the first, which has 40."""
    claimed = [version for version in versions for _ in range(50)][10:]
    states = np.repeat(np.array(claimed, np.float32)[:, None], FINGERPRINT_NUMBERS, axis=1)
    return AuditItem(
        token_ids=[FINE, mark, *[5] * len(claimed)],
        replies=[SampledSpan(2, 2 + len(claimed), 9)],
        logprobs=[0.0] * len(claimed),
        versions=claimed,
        proof=pack(states),
    )


@dataclass
class Requests:
    """What an engine was asked to read."""

    made: list[tuple[int, PrefillRequest]] = field(default_factory=list[tuple[int, PrefillRequest]])
    """(version, request)."""

    def of(self, mark: int) -> list[tuple[int, int, list[int]]]:
        """(version, tokens, places) of those of a branch, in order."""
        return [
            (version, len(one.token_ids), read_claims(one.claims)["places"].tolist())
            for version, one in self.made
            if one.token_ids[1] == mark
        ]


@pytest.fixture
def requests_made(monkeypatch: pytest.MonkeyPatch) -> Requests:
    found = Requests()
    read = AuditingEngine.read

    async def noted(
        engine: AuditingEngine, requests: Sequence[PrefillRequest], timeout_s: float
    ) -> list[Rows]:
        held = engine._held  # pyright: ignore[reportPrivateUsage]
        found.made += [(held.version if held else -1, one) for one in requests]
        return await read(engine, requests, timeout_s)

    monkeypatch.setattr(AuditingEngine, "read", noted)
    return found


@pytest.fixture(params=[1 << 20])
async def keeping(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[VllmAuditor]:
    """An auditor of a run that keeps keys and values; its parameter is the tokens that its cache holds."""
    config = FP32.model_copy(update={"vllm": {"room": request.param}})
    auditor = VllmAuditor(config, timeout_s=DEADLINE_S, program=PROGRAM)
    await auditor.start(model_dir, kept_run())
    yield auditor
    await auditor.close()


async def test_a_reply_whose_cache_was_kept_is_read_on_after_the_blocks_of_the_versions_before(
    keeping: VllmAuditor, requests_made: Requests
) -> None:
    items = [long_item(1, 2, 3, mark=1), long_item(2, mark=2)]
    assert well(await keeping.audit(compared(items, {3: [2], 2: [1]}), STATES)) == [True, True]
    kept = [bool(one.salt) for _, one in requests_made.made if one.token_ids[1] == 1]
    reads = list(zip(kept, requests_made.of(1), strict=True))
    own, other = ([read for kept, read in reads if kept is wanted] for wanted in (True, False))
    # places 2 to 41 are of version 1, 42 to 91 of 2, 92 to 141 of 3; 32 and 64 tokens were whole blocks
    assert own == [
        (1, 41, [*range(2, 42)]),
        (2, 91, [32, *range(42, 92)]),
        (3, 141, [64, *range(92, 142)]),
    ]
    assert len({one.salt for _, one in requests_made.made if one.token_ids[1] == 1} - {""}) == 1
    assert [(version, tokens) for version, tokens, _ in other] == [(1, 141), (2, 141)]
    visited = [version for version, _ in requests_made.made]
    assert visited == sorted(visited), "a version was loaded twice"
    assert all(one.salt == "" for _, one in requests_made.made if one.token_ids[1] == 2)


@pytest.mark.parametrize("keeping", [200], indirect=True)
async def test_replies_whose_kept_blocks_were_lost_are_read_again_fewer_at_a_time(
    keeping: VllmAuditor, requests_made: Requests
) -> None:
    items = [long_item(1, 2, 3, mark=mark) for mark in range(4)]
    assert well(await keeping.audit(items, STATES)) == [True] * 4
    assert all(len(requests_made.of(mark)) > 3 for mark in range(4))


@beside_others
async def test_in_a_run_that_keeps_nothing_every_version_is_read_from_the_start(
    shared: VllmAuditor, requests_made: Requests
) -> None:
    assert well(await shared.audit([long_item(1, 2)], STATES)) == [True]
    assert [one.salt for _, one in requests_made.made] == ["", ""]


async def test_a_run_that_keeps_keys_and_values_has_no_embedded_auditor_beside_vllm(
    model_dir: Path,
) -> None:
    embedded = HfAuditor(FP32, timeout_s=1.0)
    routed = RoutedAuditor(VllmAuditor(FP32, timeout_s=DEADLINE_S, program=PROGRAM), embedded)
    await routed.start(model_dir, kept_run())
    assert well(await routed.audit([long_item(1, 2)], STATES)) == [True]
    await routed.close()


async def test_the_embedded_engine_audits_no_run_that_keeps_keys_and_values(
    model_dir: Path,
) -> None:
    with pytest.raises(EngineError, match=r"set engine\.type to vllm, and verification\.auditor"):
        await HfAuditor(FP32, timeout_s=1.0).start(model_dir, kept_run())


@beside_others
async def test_another_version_explains_what_it_has_drawn(shared: VllmAuditor) -> None:
    items = [item(FINE, 3), item(FINE, 3, shown=2)]
    honest, old = measured(await shared.audit(compared(items, {3: [2]}), STATES))
    assert honest.other_policy < 0 < old.other_policy


@beside_others
async def test_versions_are_swapped_by_what_differs_and_not_loaded_again(
    shared: VllmAuditor,
) -> None:
    for version in (1, 2, 1, 3, 2, 2, 1):
        [found] = measured(await shared.audit([item(fake.LOADED, version)], STATES))
        assert found.fingerprint < 0.01
        assert found.logprob_max == 1
    other = {**STATES, 2: make_state(25)}  # the trainer went back: the number has another meaning
    [found] = measured(await shared.audit([item(fake.LOADED, 2, shown=25)], other))
    assert (found.fingerprint < 0.01, found.logprob_max) == (True, 1)


async def test_versions_of_a_history_are_reached_step_by_step(
    auditor: VllmAuditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = StateHistory(8, whole=1)
    for version in range(1, 6):
        history.add(version, make_state(version))
    steps: list[int] = []
    switch = AuditingEngine._switch  # pyright: ignore[reportPrivateUsage]

    async def noted(engine: AuditingEngine, version: int, state: State) -> None:
        assert state is history[version]
        steps.append(version)
        await switch(engine, version, state)

    monkeypatch.setattr(AuditingEngine, "_switch", noted)
    for versions, expected in (((4,), [4]), ((1, 2), [3, 2, 1]), ((5, 2), [2, 3, 4, 5])):
        steps.clear()
        items = [item(FINE, version) for version in versions]
        assert well(await auditor.audit(items, history)) == [True] * len(versions)
        assert steps == expected


async def audit_in_turn(
    auditor: VllmAuditor, history: Mapping[int, State], versions: Sequence[int]
) -> list[float]:
    """Audit an honest item of each version, one after the other; return the recalls until each."""
    recalls: list[float] = []
    for version in versions:
        number = int(history[version]["w"].data[0])
        [answer] = await auditor.audit([item(fake.RECALLED, version, shown=number)], history)
        assert well([answer]) == [True]
        assert isinstance(answer, Measured)
        recalls.append(answer.logprob_max)
    return recalls


async def test_versions_are_switched_by_copies_that_the_engine_keeps(model_dir: Path) -> None:
    config = FP32.model_copy(update={"vllm": {"copies": 3}})
    auditor = VllmAuditor(config, timeout_s=DEADLINE_S, program=PROGRAM)
    await auditor.start(model_dir, make_run("float32"))
    history = StateHistory(8, whole=1)
    for version in range(1, 6):
        history.add(version, make_state(version))
    turns = [5, 4, 3, 5, 3, 4, 2, 5, 1]
    # 2 is written after its neighbour 3, whose copy is used; 5 has made room for 2
    assert await audit_in_turn(auditor, history, turns) == [0, 0, 0, 1, 2, 3, 4, 5, 6]
    other = dict(STATES) | {
        4: make_state(25)
    }  # the trainer went back: the number has another meaning
    assert await audit_in_turn(auditor, other, [4, 3, 4]) == [6, 6, 7]
    await auditor.close()


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that engines were given, in order."""
    held: list[int] = []
    hold = AuditingEngine.hold

    async def noted(engine: AuditingEngine, version: int, state: State) -> None:
        if not engine.holds(version, state):
            held.append(version)
        await hold(engine, version, state)

    monkeypatch.setattr(AuditingEngine, "hold", noted)
    return held


@beside_others
async def test_audits_that_wait_are_made_together(shared: VllmAuditor, swapped: list[int]) -> None:
    await shared.audit([item(FINE)], STATES)
    swapped.clear()
    batched, loading_s = LocalAudits(shared), shared.loading_s
    calls = [[item(FINE, version) for version in (1, 2, 3)] for _ in range(ENOUGH_AUDITS + 1)]
    calls[2][1] = item(FINE, 2, shown=3)
    found = await asyncio.gather(*(batched.audit(items, STATES) for items in calls))
    assert [well(one) for one in found] == [
        [True, number != 2, True] for number in range(ENOUGH_AUDITS + 1)
    ]
    assert len(swapped) == 4, "two by the first alone, two by those that waited for it"
    assert shared.loading_s > loading_s


async def test_a_text_that_kills_vllm_harms_no_audit_made_together_with_its_own(
    auditor: VllmAuditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    measure = VllmAuditor._measure  # pyright: ignore[reportPrivateUsage]

    async def noted(self: VllmAuditor, texts: Sequence[Any], states: Mapping[int, State]) -> None:
        made.append(len(texts))
        await measure(self, texts, states)

    monkeypatch.setattr(VllmAuditor, "_measure", noted)
    monkeypatch.setattr(local_audits, "MOST_DEADLY", 1)
    batched = LocalAudits(auditor)
    deadly = [item(fake.DIES, 2, mark=number) for number in range(2)]
    calls = [[item(FINE, version) for version in (1, 2)] for _ in range(ENOUGH_AUDITS)]
    calls.append([item(FINE, 2), *deadly])
    *honest, bad = await asyncio.gather(*(batched.audit(items, STATES) for items in calls))
    assert any(isinstance(one, Unreadable) for one in bad)
    assert [well(one) for one in honest] == [[True, True]] * ENOUGH_AUDITS
    first, together, *alone = made
    assert first == 2
    assert together == sum(map(len, calls[1:]))
    assert sorted(alone) == sorted(map(len, calls[1:]))


@beside_others
async def test_audits_are_made_one_after_the_other_and_a_cancelled_one_leaves_the_rest(
    shared: VllmAuditor,
) -> None:
    audits = [
        asyncio.create_task(shared.audit([item(FINE, version)], STATES)) for version in (1, 2, 3, 2)
    ]
    await asyncio.sleep(0.05)
    audits[0].cancel()
    audits[2].cancel()
    await asyncio.wait(audits)
    assert [well(audits[number].result()) for number in (1, 3)] == [[True]] * 2


@beside_others
async def test_an_audit_of_many_portions_swaps_each_version_in_once(
    shared: VllmAuditor, swapped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized = local_audits.portion_size

    def small(costs: Sequence[int], limit: int) -> int:
        return sized(costs, min(20, limit))

    monkeypatch.setattr(local_audits, "portion_size", small)
    await shared.audit([item(FINE)], STATES)
    swapped.clear()
    items = [item(FINE, version) for version in (3, 1, 2) * 8]
    assert well(await shared.audit(compared(items, {3: [2], 2: [1]}), STATES)) == [True] * 24
    assert swapped == [2, 3]


async def test_an_audit_of_nothing_does_not_wait_for_vllm(model_dir: Path) -> None:
    auditor = VllmAuditor(FP32, timeout_s=DEADLINE_S, program=(sys.executable, "-c", "1/0"))
    await auditor.start(model_dir, make_run("float32"))
    try:
        assert await auditor.audit([], {}) == []
    finally:
        await auditor.close()


@beside_others
async def test_a_place_that_was_cached_is_read_once_for_all_texts_that_begin_so(
    shared: VllmAuditor,
) -> None:
    items = [item(fake.CACHED), item(FINE), item(fake.CACHED), item(fake.CACHED, mark=1)]
    found = measured(await shared.audit(items, STATES))
    assert [one.logprob_max for one in found] == [1, 0, 1, 2]
    assert well(found) == [True] * 4


@beside_others
async def test_what_leads_to_the_first_place_is_measured_once_for_all_texts_that_share_it(
    shared: VllmAuditor,
) -> None:
    items = [item(fake.COUNTS, mark=mark) for mark in (0, 1, 0, 0)]
    leader, alone, *others = measured(await shared.audit(items, STATES))
    # the leader asks for the first places of two others beside its own, and they for what is left
    assert leader.logprob * FEWEST == TOKENS * (TOKENS + 2)
    assert alone.logprob * FEWEST == TOKENS * TOKENS
    assert [one.logprob * FEWEST for one in others] == [TOKENS + 2 + (TOKENS - 1) ** 2] * 2


@pytest.mark.parametrize("deadly", [(fake.DIES, fake.LOST), (fake.FAULTY, fake.ERRS)])
async def test_items_that_end_vllm_or_fail_in_it_cost_no_other_item(
    auditor: VllmAuditor, deadly: tuple[int, int]
) -> None:
    items = [item(FINE), *map(item, deadly), item(FINE, 2)]
    async with asyncio.timeout(DEADLINE_S):
        found = await auditor.audit(items, STATES)
    assert well(found) == [True, False, False, True]
    lost = [one for one in found if isinstance(one, Unreadable)]
    assert all(one.detail and not one.proof for one in lost)


async def test_texts_summed_up_before_vllm_died_are_not_read_again(
    auditor: VllmAuditor, requests_made: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, sum_up, read = threading.Event(), vllm_auditor.sum_up, AuditingEngine.read

    def noted(texts: Sequence[Any]) -> list[Measured]:
        summed.set()
        return sum_up(texts)

    async def after(
        engine: AuditingEngine, requests: Sequence[PrefillRequest], timeout_s: float
    ) -> list[Rows]:
        if requests[0].token_ids[0] == fake.DIES:
            assert await asyncio.to_thread(summed.wait, DEADLINE_S)
        return await read(engine, requests, timeout_s)

    monkeypatch.setattr(vllm_auditor, "PART_TOKENS", 1)
    monkeypatch.setattr(vllm_auditor, "sum_up", noted)
    monkeypatch.setattr(AuditingEngine, "read", after)
    found = await auditor.audit([item(FINE, mark=1), item(fake.DIES)], STATES)
    assert well(found) == [True, False]
    assert len(requests_made.of(1)) == 1


@pytest.mark.parametrize("auditor", [2.0], indirect=True)
async def test_an_item_that_hangs_meets_the_deadline(auditor: VllmAuditor) -> None:
    await auditor.audit([item(FINE)], STATES)
    pid = auditor.pid
    async with asyncio.timeout(DEADLINE_S):
        found = await auditor.audit([item(fake.BLOCKS), item(FINE, 2)], STATES)
    assert well(found) == [False, True]
    assert pid is not None
    assert not alive(pid)


async def test_deadly_items_of_one_version_leave_those_of_another_alone(
    auditor: VllmAuditor,
) -> None:
    items = [item(FINE), item(FINE), *[item(fake.DIES, 2)] * 2]
    assert well(await auditor.audit(items, STATES)) == [True, True, False, False]


async def test_where_nothing_can_be_measured_the_auditor_says_so(auditor: VllmAuditor) -> None:
    with pytest.raises(EngineError, match="no audit succeeds"):
        await auditor.audit([item(fake.DIES)] * 2, STATES)
    with pytest.raises(EngineError, match="a number is bad"):
        await auditor.audit([item(FINE, 4)], {4: make_state(fake.BAD)})
    assert well(await auditor.audit([item(FINE, 2)], STATES)) == [True]


async def test_a_process_that_dies_as_it_is_given_weights_or_between_audits_is_replaced(
    auditor: VllmAuditor,
) -> None:
    states = {**STATES, 4: make_state(fake.DEADLY)}
    [found] = await auditor.audit([item(FINE, 4)], states)
    assert isinstance(found, Unreadable)
    assert well(await auditor.audit([item(FINE, 2)], states)) == [True]
    pid = auditor.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert well(await auditor.audit([item(FINE, 2)], STATES)) == [True]
    assert auditor.pid != pid


@beside_others
async def test_a_caller_that_gives_up_waiting_leaves_vllm_to_the_next_audit(
    shared: VllmAuditor,
) -> None:
    await shared.audit([item(FINE)], STATES)
    pid = shared.pid
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await shared.audit([item(fake.WAITS, 2)], STATES)
    assert well(await shared.audit([item(FINE, 2), item(FINE, 1)], STATES)) == [True, True]
    assert shared.pid == pid  # it is worth a minute


@pytest.mark.parametrize(
    ("family", "layers", "words"),
    [("qwen3", 2, "its model has no experts"), ("qwen3_moe", 3, "2 of 8 experts in 2 layers")],
)
async def test_routes_that_the_model_cannot_take_are_refused_before_a_process_starts(
    model_dir: Path, family: str, layers: int, words: str
) -> None:
    (model_dir / "config.json").write_text(json.dumps(MIXTURE | {"model_type": family}))
    routes = RouteShape(layers=layers, experts=8, top_k=2)
    run = structs.replace(make_run("float32"), routes=routes)
    engine = VllmAuditor(FP32, timeout_s=DEADLINE_S, program=PROGRAM)
    for auditor in (engine, HfAuditor(FP32, timeout_s=DEADLINE_S)):
        with pytest.raises(EngineError, match=f"2 of 8 experts in {layers} layers, .*{words}"):
            await auditor.start(model_dir, run)
        with pytest.raises(EngineError, match="not running"):
            await auditor.audit([item(FINE)], STATES)
        await auditor.close()
    assert engine.pid is None


async def test_routes_are_measured_under_the_version_that_each_token_claims(
    model_dir: Path,
) -> None:
    (model_dir / "config.json").write_text(json.dumps(MIXTURE))
    shape = RouteShape(layers=2, experts=8, top_k=2)
    config = FP32.model_copy(update={"vllm": {"route_bytes": shape.token_bytes}})
    auditor = VllmAuditor(config, timeout_s=DEADLINE_S, program=PROGRAM)
    await auditor.start(model_dir, structs.replace(make_run("float32"), routes=shape))
    routes = bytes([0, 1, 2, 3]) * 2 + bytes([0, 1, 7, 3])
    routed = replace(item(FINE), routes=routes)
    crossed = replace(routed, versions=[1, 2, 2], token_ids=[FINE, 1, 5, 5, 5])
    items = [routed, item(FINE), crossed, routed, replace(routed, routes=bytes([0, 1, 8, 3]) * 3)]
    try:
        *found, bad = await auditor.audit(compared(items, {1: [2], 2: [1]}), STATES)
    finally:
        await auditor.close()
    own, bare = (TOKENS / FEWEST, 7.0), (0.0, 0.0)
    assert [(one.routing, one.routing_max) for one in measured(found)] == [own, bare, own, own]
    assert bad == Unreadable("expert 8 of 8 does not exist", proof=False)


@pytest.mark.parametrize("fits", [True, False], ids=["fits", "has ended"])
async def test_a_process_that_began_ahead_audits_unless_it_has_ended(
    model_dir: Path, fits: bool
) -> None:
    ahead = EngineChild("fake", "vLLM", dict(os.environ), PROGRAM, EngineTimeouts())
    await ahead.begin()
    assert ahead.pid is not None
    if not fits:
        os.kill(ahead.pid, signal.SIGKILL)
        await asyncio.wait_for(ahead.lost.wait(), DEADLINE_S)
    auditor = VllmAuditor(FP32, timeout_s=DEADLINE_S, program=PROGRAM, ahead=ahead)
    await auditor.start(model_dir, make_run("float32"))
    try:
        assert well(await auditor.audit([item(FINE)], STATES)) == [True]
        assert (auditor.pid == ahead.pid) == fits
    finally:
        await auditor.close()
    assert not alive(ahead.pid)


@beside_others
async def test_what_left_a_pipeline_is_measured_by_the_other_auditor(
    shared: VllmAuditor, model_dir: Path
) -> None:
    staged = replace(item(FINE), boundaries=[BoundaryClaim(1, "raw", bytes(8 * TOKENS))])

    class Staged:
        """Says which items it was given."""

        loading_s = 0.0

        def __init__(self) -> None:
            self.items: list[AuditItem] = []

        async def start(self, model_dir: Path, run: RunManifest) -> None:
            """See Auditor."""

        async def audit(
            self, items: Sequence[AuditItem], states: Mapping[int, State]
        ) -> list[Measured | Unreadable]:
            self.items += items
            return [Measured(0, 0, TOKENS, 0.5, 0, 0, 0, 0, 0)] * len(items)

        async def close(self) -> None:
            """See Auditor."""

    assert await shared.audit([staged], STATES) == [Unreadable(NO_BOUNDARIES, proof=False)]
    other = Staged()
    routed = RoutedAuditor(VllmAuditor(FP32, timeout_s=DEADLINE_S, program=PROGRAM), other)
    await routed.start(model_dir, make_run("float32"))
    found = measured(await routed.audit([staged, item(FINE), staged], STATES))
    assert [one.fingerprint for one in found] == [0.5, pytest.approx(0, abs=0.01), 0.5]
    assert other.items == [staged, staged]
    await routed.close()


async def test_what_measures_pipelines_starts_when_one_is_planned_and_not_before(
    model_dir: Path,
) -> None:
    embedded = HfAuditor(FP32, timeout_s=DEADLINE_S)
    whole = VllmAuditor(FP32, timeout_s=DEADLINE_S, program=PROGRAM)
    routed = RoutedAuditor(whole, embedded, embedded.begin)
    await routed.start(model_dir, make_run("float32"))
    assert embedded.pid is None
    routed.expect_stages()
    routed.expect_stages()
    await until(lambda: embedded.pid is not None)
    await routed.close()


def exact_run(own_class: str) -> RunManifest:
    run = make_run("bfloat16")
    proofs = structs.replace(run.proofs, numerics="exact", engine_class=own_class)
    return structs.replace(run, proofs=proofs)


async def test_exact_numerics_are_audited_by_an_engine_of_their_class_alone(
    model_dir: Path,
) -> None:
    with pytest.raises(EngineError, match=r"set engine\.type to vllm"):
        await HfAuditor(FP32, timeout_s=1.0).start(model_dir, exact_run("vLLM 1"))
    config = FP32.model_copy(update={"type": "vllm"})
    with pytest.raises(UsageError, match=r"exact for vLLM 0\.1 on the moon, and this machine is"):
        await VllmAuditor(config, timeout_s=1.0, program=PROGRAM).start(
            model_dir, exact_run("vLLM 0.1 on the moon")
        )


def test_the_engine_that_audits_keeps_the_kernels_and_takes_little_memory() -> None:
    said: dict[str, Any] = {
        "gpu_memory_utilization": 0.9,
        "attention_backend": "FLASH_ATTN",
        "max_num_batched_tokens": 512,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    }
    config = EngineConfig(type="vllm", device="cpu", tp="auto", dp=2, sleep_after_s=3, vllm=said)
    run = make_run("bfloat16")
    found = audit_engine(config, run, SHAPE)
    step = 2**12
    assert found.vllm == {
        "attention_backend": "FLASH_ATTN",
        "max_num_batched_tokens": step,
        "enable_prefix_caching": True,
        # key and value x layers x heads x size x bytes
        "kv_cache_memory_bytes": (2 * step + run.limits.max_model_len) * 2 * 2 * 2 * 16 * 2,
    }
    assert (found.dtype, found.tp, found.dp, found.batch_invariant) == ("bfloat16", 1, 1, False)
    assert found.max_model_len == run.limits.max_model_len
    rounded = structs.replace(run, proofs=structs.replace(run.proofs, quantization="fp8"))
    assert audit_engine(config, rounded, SHAPE) == found.model_copy(update={"quantization": "fp8"})
    exact = audit_engine(config, exact_run(""), SHAPE)
    assert exact.batch_invariant
    # what is compiled depends on the size of a step: it is the workers'
    assert (exact.vllm["max_num_batched_tokens"], exact.max_batch) == (512, config.max_batch)
    assert "compilation_config" not in exact.vllm
