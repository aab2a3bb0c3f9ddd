"""A judge as a node: one way to draw, one model for good, and the same run wherever it is started again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.api_cases import Client
from support.memory_network import MemoryNetwork
from support.swarm import CONFIG, at_home, key_of
from support.waiting import until
from support.witness import Fakes, WitnessAuditor

from primerl.node.api.completions import CHAT
from primerl.node.app.factories import Factories
from primerl.node.app.judge import JudgeAddress, JudgeNode, as_run
from primerl.node.config.engine import EngineConfig
from primerl.node.config.judge import JudgeRunConfig
from primerl.node.environments.allowed import check_allowed, environment_contracts
from primerl.node.errors import UsageError
from primerl.node.ops import control
from primerl.node.verification.auditor import Auditor
from primerl.protocol import tickets

KEY = key_of("judge")
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def judge_config(directory: Path, **settings: Any) -> JudgeRunConfig:
    base: dict[str, Any] = {
        "output_dir": directory,
        "network": CONFIG["network"],
        "fsync": False,
        "model": {"name": "tiny", "create": SHAPE},
        "max_tokens": 8,
        "engine": {"max_model_len": 128},
        "api": {"port": 0},
    }
    return JudgeRunConfig.model_validate(base | settings)


@dataclass
class Judge:
    """A judge that is up."""

    address: JudgeAddress
    client: Client
    data_dir: Path

    @property
    def run(self) -> bytes:
        """The id of its run."""
        return tickets.read(self.address.ticket, now=0).run

    async def waiting(self) -> dict[str, Any]:
        """What its status shows once a prompt waits."""
        async with asyncio.timeout(30.0):
            while True:
                status = await asyncio.to_thread(control.ask, self.data_dir, "status")
                if status["waiting_groups"]:
                    return status
                await asyncio.sleep(0.01)


@asynccontextmanager
async def judge(directory: Path, **settings: Any) -> AsyncGenerator[Judge]:
    network, fakes, told = MemoryNetwork(), Fakes(), list[JudgeAddress]()

    async def transport(*_: Any) -> Any:
        return at_home(network, KEY.node_id)

    async def discovery(*_: Any) -> None:
        return None

    def auditor(config: EngineConfig, timeout_s: float) -> Auditor:
        return WitnessAuditor(fakes)

    factories = Factories(transport=transport, discovery=discovery, auditor=auditor)
    config, data_dir = judge_config(directory, **settings), directory / "d"
    node = JudgeNode(config, KEY, data_dir, told.append, factories)
    task = asyncio.create_task(node.run())
    try:
        await until(lambda: bool(told) or task.done())
        if task.done():
            await task
        async with aiohttp.ClientSession() as http:
            yield Judge(told[0], Client(told[0].url, http), data_dir)
    finally:
        await node.request_stop()
        with suppress(UsageError):
            await task


async def test_a_judge_goes_on_as_the_run_that_it_was_and_with_no_other_model_or_length(
    tmp_path: Path,
) -> None:
    async with judge(tmp_path) as first:
        name, run = first.address.model, first.run
        assert name.startswith("tiny@")
        reply = await first.client.post("/v1/chat/completions", {**ASKED, "model": "tiny@0123"})
        assert reply.status == 404  # a judge of other weights is never taken for this one
    async with judge(tmp_path) as again:
        assert (again.address.model, again.run) == (name, run)
    with pytest.raises(UsageError, match="began with max_tokens 8"):
        async with judge(tmp_path, max_tokens=4):
            pass
    other = {"name": "tiny", "create": {**SHAPE, "num_hidden_layers": 2}}
    for file in (tmp_path / "judge" / "model").iterdir():
        file.unlink()
    with pytest.raises(UsageError, match="other weights: give another --name"):
        async with judge(tmp_path, model=other):
            pass


async def test_a_judge_draws_one_way_and_says_that_it_waits_for_workers(tmp_path: Path) -> None:
    async with judge(tmp_path, api={"port": 0, "served_name": "grader"}) as up:
        assert up.address.model == "grader"
        for refused in ({"temperature": 0.5}, {"stream": True}, {"ignore_eos": True}):
            reply = await up.client.post("/v1/chat/completions", {**ASKED, **refused})
            assert (reply.status, next(iter(refused)) in reply.text) == (400, True)
        assert (await up.client.post("/v1/completions", {"prompt": "a"})).status == 404
        named = {**ASKED, "model": up.address.model}
        waiting = [asyncio.create_task(up.client.post(CHAT, named)) for _ in range(2)]
        status = await up.waiting()
        assert (status["role"], status["version"], status["waiting_groups"]) == ("judge", 0, 1)
        assert status["waiting_for"] == "1 prompts wait for workers: `primerl-node join` them"
        for task in waiting:
            task.cancel()


def test_its_manifest_has_one_environment_that_no_owner_of_a_worker_has_to_trust(
    tmp_path: Path,
) -> None:
    (contract,) = environment_contracts(as_run(judge_config(tmp_path)))
    assert (contract.sampling.temperature, contract.sampling.max_tokens) == (0.0, 8)
    assert (contract.group_size, contract.max_turns, contract.rewards) == (1, 1, "recomputed")
    assert (contract.package, contract.package_digest) == ("", b"")
    check_allowed(contract, [], tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": {"max_model_len": 60_001}}, "a lease holds a prompt of 60000 tokens"),
        ({"max_tokens": 128}, "engine.max_model_len, 128"),
    ],
)
def test_lengths_that_no_lease_could_hold_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        judge_config(tmp_path, **settings)
