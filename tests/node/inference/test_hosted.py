"""Engines in processes of their own, lost and started again: a fake one stands for vLLM."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support import fake_engine_process as fake
from support.engine_cases import request as any_request
from support.waiting import started_processes, until

from primerl.node.config.run import EngineConfig
from primerl.node.errors import EngineError, EngineLost, UsageError
from primerl.node.inference import hosted
from primerl.node.inference.engine import GenerateRequest
from primerl.node.inference.engine_replica import EngineChild, EngineTimeouts
from primerl.node.inference.host_messages import ApiOptions
from primerl.node.inference.hosted import HostedEngine, environments_of
from primerl.node.weights.state import State, Tensor

PROGRAM = (sys.executable, fake.__file__)
TIMEOUTS = EngineTimeouts(
    start_s=60.0,
    load_s=60.0,
    ping_s=0.05,
    silent_s=60.0,
    stuck_s=1e5,
    end_s=10.0,
    first_restart_s=0.01,
    restart_factor=1.0,
)
DEADLINE_S = 60.0


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a folder for the files that the engines read."""
    (tmp_path / "shared").mkdir()

    def there(_: int) -> str:
        return str(tmp_path / "shared")

    monkeypatch.setattr("primerl.node.inference.handover._shared_memory", there)
    shape = {"hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path


def config(dp: int = 1, sleep_after_s: float = 0.0, **vllm: Any) -> EngineConfig:
    return EngineConfig(
        type="vllm",
        device="cpu",
        dp=dp,
        sleep_after_s=sleep_after_s,
        vllm=vllm,
    )


def restarting(most: int) -> EngineTimeouts:
    """Quick restarts, `most` of them in a row."""
    return replace(TIMEOUTS, max_restarts=most)


def state(*numbers: int) -> State:
    return {"w": Tensor("I64", (len(numbers),), np.array(numbers, np.int64).view("<u8"))}


def ask(kind: int, group: bytes = b"") -> GenerateRequest:
    return GenerateRequest((kind,), 4, 1.0, 1, (), group)


@asynccontextmanager
async def running(
    model_dir: Path,
    config: EngineConfig,
    timeouts: EngineTimeouts = TIMEOUTS,
    api: ApiOptions | None = None,
) -> AsyncGenerator[HostedEngine]:
    """An engine that holds 1, 2, 3 as version 0; nothing of it is left afterwards."""
    engine = HostedEngine(config, PROGRAM, timeouts)
    try:
        assert api is None or engine.serve_api(api)
        await engine.start(model_dir)
        await engine.load(0, state(1, 2, 3))
        yield engine
    finally:
        started = started_processes()
        async with asyncio.timeout(DEADLINE_S):
            await engine.close()
        assert not [one for one in started if psutil.pid_exists(one.pid)]
        assert not list((model_dir / "shared").iterdir())


async def weights(engine: HostedEngine, group: bytes = b"") -> list[int]:
    return (await engine.generate(ask(fake.WEIGHTS, group))).token_ids


async def lost(engine: HostedEngine, call: Awaitable[Any]) -> str:
    """What is said when an engine is lost during `call`; returns when it works again."""
    before = engine.stats().restarts
    with pytest.raises(EngineLost) as caught:
        await call
    await until(lambda: engine.stats().restarts == before + 1)
    assert engine.stats().fault == ""
    return str(caught.value)


async def begun() -> EngineChild:
    """A process that is ahead of its engine."""
    ahead = EngineChild("fake", "vLLM", dict(os.environ), PROGRAM, TIMEOUTS)
    await ahead.begin()
    return ahead


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start quickly rest at once."""
    monkeypatch.setattr(hosted, "REST_S", 0.01)
    monkeypatch.setattr(hosted, "REST_STARTS", 0.0)


async def rested(engine: HostedEngine) -> None:
    """Wait until the engine has ended its processes."""
    await until(lambda: not started_processes())
    assert not engine.pids


async def test_an_engine_that_nobody_needs_ends_until_the_next_request(
    model_dir: Path, impatient: None
) -> None:
    async with running(model_dir, config().model_copy(update={"type": "hf"})) as engine:
        await rested(engine)
        assert (engine.policy_version, engine.stats().fault) == (0, "")
        answers = await asyncio.gather(*(weights(engine) for _ in range(16)))
        assert answers == [[1, 2, 3]] * 16
        await rested(engine)
        await engine.update(1, state(1, 2, 4), {"w": np.array([2])})
        assert await weights(engine) == [1, 2, 4]
        await rested(engine)
        given_up = asyncio.create_task(weights(engine))
        await until(lambda: bool(started_processes()))
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert await weights(engine) == [1, 2, 4]
        waiting = asyncio.create_task(engine.generate(ask(fake.WAITS)))
        while not engine.stats().running:
            assert await weights(engine) == [1, 2, 4]
        (process,) = engine.pids
        await engine.update(2, state(1, 2, 5), {"w": np.array([2])})
        for _ in range(16):
            assert await weights(engine) == [1, 2, 5]
        assert engine.pids == [process], "it has work"
        waiting.cancel()
        await asyncio.wait([waiting])
        assert engine.stats().restarts == 0, "none was lost"


async def test_an_engine_that_takes_long_to_start_ends_without_work_while_its_node_is_paused_alone(
    model_dir: Path, impatient: None
) -> None:
    paused = False
    async with running(model_dir, config()) as engine:
        assert config().type == "vllm"
        engine.rest_while(lambda: paused)
        (process,) = engine.pids
        for _ in range(8):  # as long as another one takes to rest
            assert await weights(engine) == [1, 2, 3]
            await asyncio.sleep(0.05)
        assert engine.pids == [process]
        paused = True
        await rested(engine)
        assert (engine.policy_version, engine.stats().fault) == (0, "")
        paused = False
        assert await weights(engine) == [1, 2, 3]
        assert engine.pids != [process]


async def test_a_resting_engine_that_cannot_start_again_is_lost_and_given_up(
    model_dir: Path, impatient: None
) -> None:
    broken = model_dir / "broken"
    resting = config(fails=str(broken)).model_copy(update={"type": "hf"})
    async with running(model_dir, resting, restarting(2)) as engine:
        await rested(engine)
        broken.touch()
        with pytest.raises(EngineLost, match="started again"):
            await weights(engine)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(EngineError, match="given up after 2 restarts"):
                await engine.load(1, state(4, 5, 6))


async def test_a_process_that_is_ahead_becomes_the_first_engine(model_dir: Path) -> None:
    ahead = await begun()
    engine = HostedEngine(config(), PROGRAM, TIMEOUTS, ahead=ahead)
    try:
        await engine.start(model_dir)
        await engine.load(0, state(1, 2, 3))
        assert engine.pids == [ahead.pid]
        assert await weights(engine) == [1, 2, 3]
    finally:
        await engine.close()
    assert ahead.pid is not None
    assert not psutil.pid_exists(ahead.pid)


async def test_a_process_that_is_ahead_ends_where_another_one_is_needed(model_dir: Path) -> None:
    """Variables of batch-invariant kernels have to be set before vLLM is imported."""
    ahead = await begun()
    exact = config().model_copy(update={"batch_invariant": True})
    engine = HostedEngine(exact, PROGRAM, TIMEOUTS, ahead=ahead)
    try:
        await engine.start(model_dir)
        assert ahead.pid not in engine.pids
        assert ahead.pid is not None
        assert not psutil.pid_exists(ahead.pid)
    finally:
        await engine.close()


async def test_a_process_that_is_ahead_ends_with_an_engine_that_never_started() -> None:
    ahead = await begun()
    await HostedEngine(config(), PROGRAM, TIMEOUTS, ahead=ahead).close()
    assert ahead.pid is not None
    assert not psutil.pid_exists(ahead.pid)


async def test_weights_are_loaded_updated_and_refused_and_requests_fail_alone(
    model_dir: Path,
) -> None:
    async with running(model_dir, config()) as engine:
        with pytest.raises(EngineError, match=r"does not fit.*a number is bad"):
            await engine.load(1, state(fake.BAD))
        assert (engine.policy_version, await weights(engine)) == (0, [1, 2, 3])
        await engine.update(1, state(1, 5, 3), {"w": np.array([1])})
        found = await engine.generate(ask(fake.WEIGHTS))
        assert (found.token_ids, found.policy_first, found.policy_last) == ([1, 5, 3], 1, 1)
        assert (found.logprobs, found.finish, found.proof) == ([-0.5] * 3, "stop", b"\x00\xff")
        with pytest.raises(EngineError, match="cannot be drawn") as caught:
            await engine.generate(ask(fake.FAULTY))
        assert type(caught.value) is EngineError
        with pytest.raises(EngineError, match="outside"):
            await engine.generate(ask(9999))
        with pytest.raises(EngineError, match="ZeroDivisionError") as caught:
            await engine.generate(ask(fake.ERRS))
        assert type(caught.value) is EngineError
        await until(lambda: engine.stats().generated_tokens == 6)
        stats = engine.stats()
        assert (stats.waiting, stats.kv_use, stats.kv_tokens, stats.restarts) == (2, 0.25, 100, 0)


async def test_a_lost_engine_is_explained_and_comes_back_with_the_newest_weights(
    model_dir: Path,
) -> None:
    """Every way to be lost, one after the other, in one node."""
    async with running(model_dir, config(), restarting(9)) as engine:
        await engine.update(1, state(1, 7, 3), {"w": np.array([1])})
        assert "exit code 3 (I was told to die)" in await lost(
            engine, engine.generate(ask(fake.DIES))
        )
        assert await weights(engine) == [1, 7, 3]
        assert engine.policy_version == 1

        words = await lost(engine, engine.generate(ask(fake.OOM)))
        assert "ran out of GPU memory: lower engine.vllm.gpu_memory_utilization" in words
        assert "engine process ended" in await lost(engine, engine.generate(ask(fake.LOST)))

        [pid] = engine.pids
        waiting = asyncio.create_task(engine.generate(ask(fake.WAITS)))
        await until(lambda: engine.stats().running == 1)
        os.kill(pid, signal.SIGKILL)
        assert "killed from outside" in await lost(engine, waiting)
        assert "gave no token for" in await lost(engine, engine.generate(ask(fake.STUCK)))
        assert await weights(engine) == [1, 7, 3]
        assert engine.stats().generated_tokens >= 3  # counted since the start, not the restart


async def test_an_error_of_the_program_while_weights_change_loses_the_engine(
    model_dir: Path,
) -> None:
    """Which weights are in there is unknown then; a request that changes nothing fails alone."""
    async with running(model_dir, config(), restarting(1)) as engine:
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await engine.load(1, state(fake.ERRONEOUS))
        assert engine.policy_version == 0


async def test_one_that_does_not_answer_at_all_is_killed(model_dir: Path) -> None:
    impatient = replace(TIMEOUTS, silent_s=2.0)
    async with running(model_dir, config(), impatient) as engine:
        [pid] = engine.pids
        assert "no answer within 2 s" in await lost(engine, engine.generate(ask(fake.BLOCKS)))
        assert engine.pids != [pid]
        assert not psutil.pid_exists(pid)


async def test_an_engine_that_gives_no_sign_of_life_is_reported_to_hang_and_one_whose_node_stood_still_is_not(
    model_dir: Path,
) -> None:
    impatient = replace(TIMEOUTS, quiet_s=1.0, end_s=0.5)
    async with running(model_dir, config(), impatient) as engine:
        honest = asyncio.create_task(engine.generate(ask(fake.WAITS)))
        await asyncio.sleep(0.2)
        time.sleep(1.5)  # noqa: ASYNC251 - the node, not the engine, was suspended
        assert engine.stats().fault == ""
        hanging = asyncio.create_task(engine.generate(ask(fake.BLOCKS)))
        await until(lambda: "no sign of life" in engine.stats().fault)
        for task in (honest, hanging):
            task.cancel()
        await asyncio.gather(honest, hanging, return_exceptions=True)


async def test_while_it_is_started_again_requests_are_lost_and_loads_wait(
    model_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    async with running(model_dir, config(fails=str(broken)), restarting(1000)) as engine:
        broken.touch()
        with pytest.raises(EngineLost):
            await engine.generate(ask(fake.DIES))
        await until(lambda: "no GPU any more" in engine.stats().fault)
        with pytest.raises(EngineLost, match="is being started again"):
            await engine.generate(ask(fake.WEIGHTS))
        loading = asyncio.create_task(engine.load(1, state(8)))
        await asyncio.sleep(0.1)
        assert not loading.done()
        broken.unlink()
        async with asyncio.timeout(DEADLINE_S):
            await loading
        assert (await weights(engine), engine.policy_version) == ([8], 1)
        assert engine.stats().fault == ""


async def test_after_too_many_restarts_in_a_row_the_engine_has_failed(
    model_dir: Path, tmp_path: Path
) -> None:
    """Each attempt to load a deadly state counts, too: nothing good came in between."""
    async with running(model_dir, config(), restarting(2)) as engine:
        with pytest.raises(EngineError, match="given up after 2 restarts") as caught:
            await engine.load(1, state(fake.DEADLY))
        assert not isinstance(caught.value, EngineLost)
        with pytest.raises(EngineError, match="exit code 5") as caught:
            await engine.generate(ask(fake.WEIGHTS))
        assert not isinstance(caught.value, EngineLost)
        with pytest.raises(EngineError, match="given up"):
            engine.stats()
        assert engine.policy_version == 0


async def test_groups_stay_together_and_new_ones_go_to_the_least_busy(model_dir: Path) -> None:
    async with running(model_dir, config(dp=2)) as engine:

        async def where(group: bytes) -> int:
            return (await engine.generate(ask(fake.PID, group))).token_ids[0]

        held = [asyncio.create_task(engine.generate(ask(fake.WAITS, b"a"))) for _ in range(3)]
        await until(lambda: engine.stats().running == 3)
        first = await where(b"a")
        found = [await where(name) for name in (b"b", b"b", b"a", b"", b"c")]
        [other] = set(engine.pids) - {first}
        assert found == [other, other, first, other, other]

        os.kill(first, signal.SIGKILL)
        for task in held:
            with pytest.raises(EngineLost):
                await task
        assert (
            await where(b"a") == other
        )  # it goes on with the others, and nothing is said to be wrong
        assert engine.stats().fault == ""
        await until(lambda: engine.stats().restarts == 1)
        assert await where(b"a") == other
        assert other in engine.pids


async def test_an_update_reaches_all_engines_and_whole_the_one_that_refuses_it(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = tmp_path / "refusing"
    async with running(model_dir, config(dp=2, refuses_updates=str(refusing))) as engine:
        for version, refused in ((1, False), (2, True)):
            caplog.clear()
            if refused:
                refusing.touch()
            await engine.update(version, state(1, 2 + version, 3), {"w": np.array([1])})
            assert ("loaded whole: its parameters have moved" in caplog.text) == refused
            held = [
                asyncio.create_task(engine.generate(ask(fake.WAITS, b"x")))
            ]  # the next to the other
            found = [await engine.generate(ask(fake.WEIGHTS, name)) for name in (b"x", b"y")]
            assert [one.token_ids for one in found] == [[1, 2 + version, 3]] * 2
            assert {one.policy_first for one in found} == {version}
            for task in held:
                task.cancel()
            engine._groups.clear()  # pyright: ignore[reportPrivateUsage]
        # one is lost while a policy comes: the others have it, and so has the new one
        os.kill(engine.pids[0], signal.SIGKILL)
        await engine.update(3, state(4, 5, 6), {"w": None})
        assert engine.policy_version == 3
        await until(lambda: engine.stats().restarts == 1)
        await asyncio.gather(*(engine.generate(ask(fake.WEIGHTS)) for _ in range(4)))
        held = [asyncio.create_task(engine.generate(ask(fake.WAITS, b"p")))]
        await until(lambda: engine.stats().running == 1)
        assert [await weights(engine, b"p"), await weights(engine, b"q")] == [[4, 5, 6]] * 2
        held[0].cancel()


async def test_a_caller_that_gives_up_ends_its_request_and_not_a_load(model_dir: Path) -> None:
    async with running(model_dir, config()) as engine:
        quitters = [asyncio.create_task(engine.generate(ask(fake.WAITS))) for _ in range(3)]
        await until(lambda: engine.stats().running == 3)
        for task in quitters:
            task.cancel()
        await until(lambda: engine.stats().running == 0)
        loading = asyncio.create_task(engine.load(1, state(9)))
        await asyncio.sleep(0)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await until(lambda: engine.policy_version == 1)
        assert await weights(engine) == [9]


async def test_it_sleeps_without_work_and_wakes_for_it(model_dir: Path) -> None:
    async with running(model_dir, config(sleep_after_s=0.1)) as engine:
        slept, version = set[int](), 0
        async with asyncio.timeout(DEADLINE_S):
            while len(slept - {0}) < 2:
                await asyncio.sleep(0.3)
                version += 1
                await engine.load(version, state(version))
                assert await weights(engine) == [version]
                waiting, times = (await engine.generate(ask(fake.LOOKS))).token_ids
                assert waiting == 0
                slept.add(times)


async def test_a_start_that_fails_is_not_tried_again(model_dir: Path, tmp_path: Path) -> None:
    refused = HostedEngine(config(refuses=1), PROGRAM)
    with pytest.raises(UsageError, match=r"vllm\.refuses"):
        await refused.start(model_dir)
    await refused.close()
    (tmp_path / "fails").touch()
    broken = HostedEngine(config(dp=2, fails=str(tmp_path / "fails")), PROGRAM)
    with pytest.raises(EngineError, match="no GPU any more") as caught:
        await broken.start(model_dir)
    assert type(caught.value) is EngineError
    with pytest.raises(EngineError, match="make a new one"):
        await broken.start(model_dir)
    await broken.close()
    words = "Free memory on device cuda:0 (13/139 GiB) on startup is less than desired"
    crowded = HostedEngine(config(breaks=words), PROGRAM)
    with pytest.raises(EngineError, match=r"less GPU memory is free.*See root cause above"):
        await crowded.start(model_dir)
    await crowded.close()
    assert not started_processes()


async def test_close_ends_a_start_and_everything_that_is_pending(model_dir: Path) -> None:
    engine = HostedEngine(config(starts_s=600, with_another=True), PROGRAM, TIMEOUTS)
    starting = asyncio.create_task(engine.start(model_dir))
    await until(lambda: len(started_processes()) == 2)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await starting
    await until(lambda: not started_processes())

    async with running(model_dir, config()) as engine:
        pending = asyncio.create_task(engine.generate(ask(fake.WAITS)))
        await until(lambda: engine.stats().running == 1)
        await engine.close()
        with pytest.raises(EngineError, match="closed") as caught:
            await pending
        assert type(caught.value) is EngineError
        for call in (engine.generate(any_request()), engine.load(1, state(1))):
            with pytest.raises(EngineError, match="closed"):
                await call


async def test_a_half_started_engine_that_is_asked_to_end_takes_what_it_started_with_it(
    model_dir: Path,
) -> None:
    """As it asks itself where its node was killed (process/spawn.py: leave_with_parent)."""
    engine = HostedEngine(config(starts_s=600, with_another=True), PROGRAM, TIMEOUTS)
    starting = asyncio.create_task(engine.start(model_dir))
    await until(lambda: len(started_processes()) == 2)
    host, another = started_processes()
    host.terminate()
    psutil.wait_procs([another], timeout=DEADLINE_S)
    assert not another.is_running()
    with pytest.raises(EngineError, match="killed from outside"):
        await starting
    await engine.close()


def test_engines_side_by_side_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(gpus: str, **shape: Any) -> list[str]:
        def visible(_: object) -> tuple[str, ...]:
            return tuple(gpus.split())

        monkeypatch.setattr("primerl.node.inference.hosted.visible", visible)
        found = environments_of(EngineConfig(type="vllm", **shape), {"KEPT": "1"})
        assert all(one["KEPT"] == "1" and one["PRIMERL_PARENT_PID"] for one in found)
        return [one.get("CUDA_VISIBLE_DEVICES", "-") for one in found]

    assert shown("0 1 2 3", dp=2) == ["0", "1"]
    assert shown("3 GPU-b 5 6", dp=2, tp=2) == ["3,GPU-b", "5,6"]
    assert shown("0 1 2 3 4", dp=2, tp="auto") == ["0,1", "2,3"]
    assert shown("", dp=3) == ["-"] * 3
    assert shown("0 1", dp=1, tp=2) == ["-"]
    assert shown("0 1", dp=2, device="cpu") == ["-"] * 2
    planned = {"kv_cache_memory_bytes": 1 << 30}
    assert shown("3", dp=3, vllm=planned) == ["-"] * 3  # they share the one that is visible
    assert shown("0 1 2 3", dp=2, vllm=planned) == ["0", "1"]
    assert shown("3") == ["-"]  # auto, before a model is known
    with pytest.raises(UsageError, match="1 are visible"):
        shown("3", dp=2)
    for shape in ({"dp": 2, "tp": 2}, {"dp": 4}, {"dp": 4, "tp": "auto"}):
        with pytest.raises(UsageError, match="3 are visible"):
            shown("0 1 2", **shape)


async def read_socket(socket: str) -> str:
    reader, writer = await asyncio.open_unix_connection(socket)
    try:
        return (await reader.read()).decode()
    finally:
        writer.close()


async def test_each_engine_serves_on_a_socket_that_is_its_owners_alone(model_dir: Path) -> None:
    async with running(model_dir, config(dp=2), api=ApiOptions("tiny")) as engine:
        sockets = engine.upstreams()
        folder = Path(sockets[0]).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        with engine.upstream() as first, engine.upstream() as second:
            assert sorted([first, second]) == sockets  # the other one is less busy
        assert {await read_socket(one) for one in sockets} == {f"tiny {pid}" for pid in engine.pids}
        dead, alive = sockets[0], sockets[1]
        await lost(engine, engine.generate(ask(fake.DIES)))
        assert engine.upstreams() == [dead, alive]
        assert {await read_socket(one) for one in sockets} == {f"tiny {pid}" for pid in engine.pids}
    assert not folder.exists()


async def test_only_vllm_serves_by_itself_and_only_with_weights(model_dir: Path) -> None:
    assert not HostedEngine(EngineConfig(type="hf", device="cuda")).serve_api(ApiOptions("tiny"))
    engine = HostedEngine(config(), PROGRAM, TIMEOUTS)
    assert engine.serve_api(ApiOptions("tiny"))
    try:
        with pytest.raises(EngineError, match="start"), engine.upstream():
            pass
        await engine.start(model_dir)
        with pytest.raises(EngineError, match="holds no weights"), engine.upstream():
            pass
    finally:
        await engine.close()
