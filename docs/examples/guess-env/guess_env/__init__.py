"""Guess a number: after each guess the environment says whether the number is higher or lower."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf


class GuessEnvConfig(vf.TasksetConfig):
    """Options, set by `environment.args` of a run; `seed` is the run's unless it is given."""

    seed: int = 0
    highest: int = 16
    guesses: int = 5


class GuessEnvData(vf.TaskData):
    """One task: `prompt` is asked first."""

    number: int
    guesses: int


class GuessEnvState(vf.State):
    """What a rollout remembers between its turns; each field needs a default."""

    guesses: tuple[int, ...] = ()


def read_guess(reply: str) -> int:
    """The first whole number of a reply; -1 if there is none."""
    found = re.search(r"[0-9]{1,9}", reply)
    return int(found[0]) if found else -1


def answer(guess: int, number: int) -> str:
    """What the environment says to a wrong guess: a function of the task and of the replies."""
    if guess < 0:
        return "That is no number. Guess again."
    return f"The number is {'higher' if guess < number else 'lower'}. Guess again."


class GuessEnvTask(vf.Task[GuessEnvData, GuessEnvState]):
    """Scores a finished rollout."""

    @vf.reward(weight=1.0)
    async def found(self, trace: vf.Trace) -> float:
        return float(self.data.number in trace.state.guesses)

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(trace.state.guesses))


class GuessEnvEnv(vf.SingleAgentEnv):
    """Plays a rollout turn by turn."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            for left in reversed(range(task.data.guesses)):
                guess = read_guess(segment.last_reply)
                interaction.trace.state.guesses += (guess,)
                if segment.terminated or guess == task.data.number or not left:
                    return
                segment = await interaction.turn(answer(guess, task.data.number))


class GuessEnvTaskset(vf.Taskset[GuessEnvTask, GuessEnvConfig]):
    """Task 7 is the eighth that load() gives, on every machine and each time."""

    INFINITE = True

    def load(self) -> Iterator[GuessEnvTask]:
        config = self.config
        rng = random.Random(config.seed)
        for index, _ in enumerate(iter(int, 1)):
            values = {
                "idx": index,
                "prompt": f"Guess my number from 1 to {config.highest}, in {config.guesses} guesses.",
                "number": rng.randint(1, config.highest),
                "guesses": config.guesses,
            }
            yield GuessEnvTask(GuessEnvData.model_validate(values), config.task)


__all__ = ["GuessEnvEnv", "GuessEnvTaskset"]
