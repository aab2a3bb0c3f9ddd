"""A run whose rewards a model gives: what workers claim is nothing, and a judge that is down is waited for."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web
from support.counting_environment import CountingEnvironment
from support.openai_server import chat_completion, openai_server, refused
from support.swarm import Swarm

from primerl.node.config.chat_api import JudgeConfig
from primerl.node.environments.environment import Branch, Episode, Policy, Score, Task
from primerl.node.environments.judge_model import ANSWERS, JudgeModel
from primerl.node.storage.rollouts import RolloutFiles
from primerl.node.storage.run_files import ROLLOUTS


class Boasting(CountingEnvironment):
    """A worker's that claims the best reward for whatever it plays."""

    async def run(self, task: Task, policy: Policy) -> Episode:
        """See Environment."""
        return replace(await super().run(task, policy), score=Score(reward=1e6))


class Judged(CountingEnvironment):
    """The trainer's: the judge gives its rewards."""

    def __init__(self, judge: JudgeModel) -> None:
        super().__init__()
        self._judge = judge

    @property
    def judge_fault(self) -> str:
        """See Environment."""
        return self._judge.fault

    async def start(self) -> None:
        """See Environment."""
        await self._judge.start()

    async def close(self) -> None:
        """See Environment."""
        await self._judge.close()

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """See Environment."""
        played = await super().score(task, branches)
        message = {"role": "user", "content": json.dumps(branches[0].token_ids)}
        answer = json.loads(await self._judge.ask(json.dumps({"messages": [message]}).encode()))
        return replace(played, reward=self.reward(answer["choices"][0]["message"]["content"]))

    def reward(self, answer: str) -> float:
        """The reward by what the judge says."""
        return float(answer)


def worth(token_ids: Sequence[int]) -> float:
    return 0.25 if len(token_ids) > 4 else 0.75


async def test_the_judge_alone_says_what_is_learned_from_and_may_be_down(
    tmp_path: Path, model_dir: Path
) -> None:
    down = True

    def answer(body: dict[str, Any]) -> web.StreamResponse:
        if down:
            return refused(503, "overloaded")
        text = body["messages"][0]["content"]
        return chat_completion(str(worth(json.loads(text)) if text.startswith("[") else "yes"))

    async with openai_server(answer) as server:
        told = {"url": server.url, "model": "m", "retries": 0}
        config = JudgeConfig.model_validate(told)
        judge = JudgeModel(config, "", tmp_path / ANSWERS, pauses_s=(0.01,))
        async with Swarm(
            tmp_path, model_dir, max_steps=3, environment={"id": "reverse-text", "judge": told}
        ) as swarm:
            swarm.environments["trainer"] = {"reverse-text": Judged(judge)}
            swarm.environments["w1"] = {"reverse-text": Boasting()}
            await swarm.start_trainer()
            swarm.add_worker("w1")
            swarm.add_worker("w2")
            async with asyncio.timeout(60.0):
                while True:
                    waiting = await swarm.trainer.status()
                    if "rollouts wait for it" in waiting["waiting_for"]:
                        break
                    await asyncio.sleep(0.02)
            assert waiting["step"] == waiting["accepted"] == 0
            assert waiting["rejected"] == {}
            down = False
            summary = await swarm.finished()
        assert summary["steps"] == 3
        assert summary["rejected"].keys() <= {"stale"}  # a slow worker may come too late
        kept = RolloutFiles(swarm.run_dir / ROLLOUTS)
        rows = [row for step in kept.steps() for row in kept.read(step) if row.verdict == "trained"]
        assert {row.worker for row in rows} == {one.node_id.hex() for one in swarm.workers.values()}
        assert {row.reward for row in rows} == {0.25, 0.75}
        assert all(worth(row.prompt_ids + row.completion_ids) == row.reward for row in rows)
