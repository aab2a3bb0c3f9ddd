"""A run whose rewards a frozen model gives under leases, with real engines and audits and a forger."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scenarios.test_judged_run import Boasting, Judged
from support.memory_network import MemoryNetwork
from support.swarm import Swarm, at_home, key_of
from support.waiting import until

from primerl.node.app.factories import Factories
from primerl.node.app.judge import JudgeAddress, JudgeNode
from primerl.node.app.worker import WorkerNode
from primerl.node.config.chat_api import JudgeConfig
from primerl.node.config.engine import EngineConfig
from primerl.node.config.judge import JudgeRunConfig
from primerl.node.config.run import JoinConfig, ModelCreateConfig
from primerl.node.environments.chat import ChatFormat
from primerl.node.environments.judge_model import ANSWERS, JudgeModel
from primerl.node.evaluation.candidates import candidate, read
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine, GenerateRequest
from primerl.node.inference.hf import HfEngine
from primerl.node.inference.vllm_arguments import is_installed
from primerl.node.models import huggingface
from primerl.node.ops import control
from primerl.node.storage.rollouts import RolloutFiles
from primerl.node.storage.run_files import ROLLOUTS

NETWORK = {"libp2p": False, "connect_timeout_s": 2.0}
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": False}
MOST = 6
"""Tokens of a judge's reply."""
VLLM = pytest.mark.skipif(not is_installed(), reason="vLLM is not installed")
START_S = 250.0
"""For a run that waits for a start of vLLM; a busy machine takes a minute for it."""


def make_judge(directory: Path) -> Path:
    """A small model with a chat template whose likeliest tokens depend on what it reads."""
    from transformers import AutoModelForCausalLM

    huggingface.create(directory, ModelCreateConfig.model_validate(SHAPE), 5)
    model = AutoModelForCausalLM.from_pretrained(directory)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 8
    model.save_pretrained(directory)
    return directory


class Forger(HfEngine):
    """A judge's worker that says what it likes: tokens of its own, with proofs of the states behind them."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        return await super().generate(replace(request, temperature=2.0))


class JudgeNetwork:
    """A judge and its workers, over the memory network."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.network = MemoryNetwork()
        self.model = make_judge(directory / "model")
        self.address: JudgeAddress | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self, **settings: Any) -> "asyncio.Task[None]":
        """Start the judge and wait until it can be asked."""
        told = {
            "output_dir": self.directory,
            "network": NETWORK,
            "fsync": False,
            "model": {"name": str(self.model)},
            "max_tokens": MOST,
            "engine": {"max_model_len": 512},
            "api": {"port": 0},
            **settings,
        }
        config, key = JudgeRunConfig.model_validate(told), key_of("judge")
        self.address = None

        def announce(address: JudgeAddress) -> None:
            self.address = address

        node = JudgeNode(config, key, self.data_dir, announce, self._factories(key.node_id))
        task = asyncio.create_task(node.run())
        self._tasks.append(task)
        await until(lambda: self.address is not None or task.done())
        if task.done():
            await task
        return task

    def join(
        self,
        name: str,
        engine: Callable[[EngineConfig], Engine] = build_engine,
        kind: str = "hf",
    ) -> "asyncio.Task[None]":
        """Start a worker of the judge; `kind` is the engine's type in its config."""
        assert self.address is not None
        told: dict[str, Any] = {
            "ticket": self.address.ticket,
            "network": NETWORK,
            "fsync": False,
            "wait": True,
            "engine": {"type": kind, "device": "cpu"},
        }
        config, key = JoinConfig.model_validate(told), key_of(name)
        factories = replace(self._factories(key.node_id), engine=engine)
        node = WorkerNode(config, key, self.directory / name, factories)
        task = asyncio.create_task(node.run())
        self._tasks.append(task)
        return task

    async def until_row(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until `primerl-node peers --json` of the judge shows something of a worker."""
        async with asyncio.timeout(100.0):
            while True:
                rows = await asyncio.to_thread(control.ask, self.data_dir, "peers")
                for row in rows:
                    if row["id"] == key_of(name).node_id.hex() and holds(row):
                        return row
                await asyncio.sleep(0.05)

    async def status(self) -> dict[str, Any]:
        """What `primerl-node status --json` of the judge shows."""
        return await asyncio.to_thread(control.ask, self.data_dir, "status")

    @property
    def data_dir(self) -> Path:
        """Of the judge."""
        return self.directory / "judge" / "j"

    @property
    def asking(self) -> dict[str, Any]:
        """The section [environment.judge] of a run whose rewards ask it."""
        assert self.address is not None
        return {"url": f"{self.address.url}/v1", "model": self.address.model, "retries": 0}

    async def close(self) -> None:
        """End all of it."""
        for task in reversed(self._tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _factories(self, node: bytes) -> Factories:
        async def transport(*_: Any) -> Any:
            return at_home(self.network, node)

        async def discovery(*_: Any) -> None:
            return None

        return Factories(transport=transport, discovery=discovery)


@asynccontextmanager
async def court(directory: Path) -> AsyncGenerator[JudgeNetwork]:
    """A judge that is up, without workers."""
    held = JudgeNetwork(directory)
    try:
        await held.start()
        yield held
    finally:
        await held.close()


async def expected_replies(model_dir: Path, contents: Sequence[str]) -> list[str]:
    """What the judge's model says to each, computed by nobody but this test."""
    chat, engine = ChatFormat.load(model_dir), HfEngine(EngineConfig(max_model_len=512))
    await engine.start(model_dir)
    await engine.load(0, read(candidate("", model_dir)))

    async def reply(content: str) -> str:
        prompt = chat.encode(chat.render([{"role": "user", "content": content}]))
        request = GenerateRequest(tuple(prompt), MOST, 0.0, 0, chat.stop_token_ids)
        drawn = (await engine.generate(request)).token_ids
        ended = drawn[-1] in chat.stop_token_ids
        return chat.shown(drawn[: len(drawn) - ended], special=False)

    try:
        return await asyncio.gather(*map(reply, contents))
    finally:
        await engine.close()


def worth(text: str) -> float:
    """A reward by what a judge of random weights says."""
    return sum(text.encode()) % 4 / 4


class Graded(Judged):
    """The trainer's: a reward by the judge's words."""

    def reward(self, answer: str) -> float:
        """See Judged."""
        return worth(answer)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("hf", marks=pytest.mark.nightly),
        pytest.param("vllm", marks=[pytest.mark.slow, VLLM]),
    ],
)
async def test_rewards_of_a_leased_judge_are_what_its_model_says_and_a_forger_is_named(
    engine: str, tmp_path: Path, model_dir: Path
) -> None:
    """The honest worker draws with `engine`, and the judge audits with the embedded one."""
    async with court(tmp_path / "court") as judge:
        forger = judge.join("forger", Forger)
        config = JudgeConfig.model_validate(judge.asking)
        asked = JudgeModel(config, "", tmp_path / ANSWERS, pauses_s=(0.01,))
        environment = {"id": "reverse-text", "judge": judge.asking}
        async with Swarm(tmp_path, model_dir, max_steps=2, environment=environment) as swarm:
            swarm.environments["trainer"] = {"reverse-text": Graded(asked)}
            swarm.environments["w1"] = {"reverse-text": Boasting()}
            await swarm.start_trainer()
            swarm.add_worker("w1")
            named = await judge.until_row("forger", lambda row: row["rejected"] >= 3)
            assert named["accepted"] == 0
            assert named["top_reason"] == "bad_sampling"
            assert (await swarm.trainer.status())["accepted"] == 0  # nothing was scored by it
            honest = judge.join("honest", kind=engine)
            summary = await swarm.finished(START_S)
        row = await judge.until_row("honest", lambda row: row["accepted"] > 0)
        assert row["rejected"] == 0
        assert not forger.done()
        assert not honest.done()
        kept = RolloutFiles(swarm.run_dir / ROLLOUTS)
        rows = [one for step in kept.steps() for one in kept.read(step) if one.verdict == "trained"]
        asked_of = [json.dumps(one.prompt_ids + one.completion_ids) for one in rows]
        assert [one.reward for one in rows] == list(
            map(worth, await expected_replies(judge.model, asked_of))
        )
    assert summary["steps"] == 2
    assert summary["rejected"].keys() <= {"stale"}
    assert len({one.reward for one in rows}) > 1
