"""Whole rollouts of `verifiers` by its own machinery: environment, interception, train client, our server."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from support.api_cases import NAME, api
from support.engine_cases import FP32, make_qwen3, reference_logprobs, started

from primerl.node.inference.hf import HfEngine

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TASKS = '''
"""A few words to talk about."""
import verifiers.v1 as vf


class Again(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        for text in ("abc", "q", "xyz"):
            yield vf.Task(vf.TaskData(idx=0, name=text, prompt=text), self.config.task)


__all__ = ["Again"]
'''
HARNESS = '''
"""A chat loop in this process, over the interception server."""
import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult


class InProcess(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        async with httpx.AsyncClient(timeout=None, trust_env=False) as http:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if reply.status_code != 200:
                    return ProgramResult(1, "", reply.text)
                said = reply.json()["choices"][0]["message"]
                messages += [{"role": "assistant", "content": said["content"] or ""}]
                messages += [{"role": "user", "content": "again"}]
        return ProgramResult(0, "", "")


__all__ = ["InProcess"]
'''


async def test_a_rollout_of_two_turns_is_tokens_and_logprobs_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    (tmp_path / "api_again.py").write_text(TASKS)
    (tmp_path / "api_in_process.py").write_text(HARNESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    importlib.invalidate_caches()
    state = make_qwen3(tmp_path / "model", 3)
    engine = await started(HfEngine(FP32), tmp_path / "model", state)
    agent = {"harness": {"id": "api_in_process"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    settings: Any = {"taskset": {"id": "api_again"}, "agent": agent}
    env: Any = vf.load_environment(vf.resolve_env_config(settings))
    async with api(engine, tmp_path / "model") as server:
        context = vf.ModelContext(
            model=NAME,
            client=vf.TrainClientConfig(
                base_url=f"{server.url}/v1",
                api_key_var="NOBODY_SETS_THIS",
                renderer_model_name=str(tmp_path / "model"),
                multiplex=1,
            ),
            sampling=vf.SamplingConfig(temperature=0.8, max_tokens=6),
        )
        async with env.serving():
            limit = asyncio.Semaphore(4)
            episodes = await asyncio.gather(
                *(env.run_slot(env.slots(task)[0], context, limit) for task in env.taskset)
            )
    await engine.close()
    assert len(episodes) == 3
    for episode in episodes:
        [trace] = episode.traces
        assert episode.ok, [error.message for error in (*episode.errors, *trace.errors)]
        assert trace.num_turns == 2
        for branch in trace.branches:
            wanted = reference_logprobs(tmp_path / "model", state, branch.token_ids, 0.8)
            pairs = zip(wanted, branch.logprobs, branch.sampled_mask, strict=True)
            drawn = [(own, told) for own, told, sampled in pairs if sampled]
            assert drawn
            assert [told for _, told in drawn] == pytest.approx([own for own, _ in drawn], abs=1e-5)
