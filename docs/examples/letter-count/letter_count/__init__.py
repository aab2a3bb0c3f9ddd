"""Sort the digits of a number: one prompt, one reply."""

import random
from collections.abc import Iterator

import verifiers.v1 as vf


class LetterCountConfig(vf.TasksetConfig):
    """Options, set by `environment.args` of a run; `seed` is the run's unless it is given."""

    seed: int = 0
    digits: int = 4


class LetterCountData(vf.TaskData):
    """One task: `prompt` is asked. `answer` is a right reply, which a warm-up learns from."""

    answer: str


def score(reply: str, answer: str) -> float:
    """Reward of a reply, from 0.0 to 1.0."""
    return float(reply.strip() == answer)


class LetterCountTask(vf.Task[LetterCountData]):
    """Ends after one reply, and scores it."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return score(trace.last_reply, self.data.answer)

    @vf.metric
    async def reply_length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class LetterCountTaskset(vf.Taskset[LetterCountTask, LetterCountConfig]):
    """Task 7 is the eighth that load() gives, on every machine and each time."""

    INFINITE = True

    def load(self) -> Iterator[LetterCountTask]:
        rng = random.Random(self.config.seed)
        while True:
            digits = "".join(rng.choices("0123456789", k=self.config.digits))
            answer = "".join(sorted(digits))
            data = LetterCountData.model_validate({"prompt": f"Sort: {digits}", "answer": answer})
            yield LetterCountTask(data, self.config.task)


__all__ = ["LetterCountTaskset"]
