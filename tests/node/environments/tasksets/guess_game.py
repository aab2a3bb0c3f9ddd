"""Several turns: guess a digit, the environment says higher or lower."""

# A hook must name the library's bare types, which are generic, and states are known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeArguments=false

from collections.abc import Iterator

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    target: int


class GuessState(vf.State):
    guesses: tuple[str, ...] = ()


class GuessTask(vf.Task[GuessData, GuessState]):
    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        return float(trace.state.guesses[-1:] == (str(self.data.target),))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(trace.state.guesses))


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for game in range(30):
            data = GuessData.model_validate({"prompt": f"guess {game}", "target": 5})
            yield GuessTask(data, self.config.task)


class GuessEnv(vf.SingleAgentEnv):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(3):
                guess = segment.last_reply
                interaction.trace.state.guesses += (guess,)
                if guess == str(task.data.target):
                    break
                hint = "higher" if guess < str(task.data.target) else "lower"
                segment = await interaction.turn(hint)
                if segment.terminated:
                    break


__all__ = ["GuessEnv", "GuessTaskset"]
