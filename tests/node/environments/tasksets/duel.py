"""Two agents see one prompt and each names a digit; the higher one wins. An Env of several agents."""

# A hook must name the library's bare types, which are generic, and configs are known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf


class DuelConfig(vf.EnvConfig):
    """`first` is asked before `second`."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class DuelTasksetConfig(vf.TasksetConfig):
    rounds: str = "once"
    """`once`: a reply each; `turns`: two each, in turn; `race`: two each, whoever is there first; `judged`: the
    second is no player."""


class DuelTask(vf.Task[vf.TaskData]):
    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class DuelTaskset(vf.Taskset[DuelTask, DuelTasksetConfig]):
    def load(self) -> Iterator[DuelTask]:
        for game in range(30):
            yield DuelTask(vf.TaskData.model_validate({"prompt": f"duel {game}"}), self.config.task)


class DuelEnv(vf.Env[DuelConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.second.trainable = self._rounds != "judged"

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        if self._rounds in ("once", "judged"):
            await asyncio.gather(agents.first.run(task), agents.second.run(task))
            return
        async with (
            agents.second.interaction(task) as second,  # opened first, asked last
            agents.first.interaction(task) as first,
        ):
            if self._rounds == "race":
                await asyncio.gather(self._twice(first), self._twice(second))
                return
            one, other = await first.turn(), await second.turn()
            await first.turn(other.last_reply)
            await second.turn(one.last_reply)

    async def _twice(self, one: vf.Interaction) -> None:
        await one.turn()
        await one.turn("again")

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        said = {trace.agent.name: trace.last_reply or "" for trace in episode.traces}
        for trace in episode.traces:
            (other,) = (reply for name, reply in said.items() if name != trace.agent.name)
            mine = said[trace.agent.name]
            trace.record_reward("won", float((mine > other) - (mine < other)))

    @property
    def _rounds(self) -> str:
        return getattr(self.taskset.config, "rounds", "")


__all__ = ["DuelEnv", "DuelTaskset"]
