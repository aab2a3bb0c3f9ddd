"""Several turns with tools: the environment asks again after each answer."""

# A hook must name the library's bare types, which are generic, and states are known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

from typing import Any

import verifiers.v1 as vf


class Clock(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def hour(self) -> str:
        """Say the hour."""
        return "noon"


class AskedTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class AskedTaskset(vf.Taskset[AskedTask, vf.TasksetConfig]):
    def load(self) -> list[AskedTask]:
        data = [vf.TaskData.model_validate({"prompt": f"q{n}"}) for n in range(40)]
        return [AskedTask(one, self.config.task) for one in data]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset[Any, Any]]:
        return [Clock(vf.SharedToolsetConfig())]


class AskedEnv(vf.SingleAgentEnv):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for question in ("and now", "and then"):
                if segment.terminated:
                    break
                segment = await interaction.turn(question)


__all__ = ["AskedEnv", "AskedTaskset"]
