"""An ordinary endless taskset, as a stranger to this program would write it."""

# A hook must name the library's bare types, which are generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import random
from collections.abc import Iterator

import verifiers.v1 as vf


class SortConfig(vf.TasksetConfig):
    seed: int = 0
    digits: int = 6


class SortData(vf.TaskData):
    answer: str


class SortTask(vf.Task[SortData]):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        if trace.last_reply == "spin":
            while True:
                pass
        return float(trace.last_reply == self.data.answer)


class SortTaskset(vf.Taskset[SortTask, SortConfig]):
    INFINITE = True

    def load(self) -> Iterator[SortTask]:
        rng = random.Random(self.config.seed)
        while True:
            text = "".join(rng.choices("0123456789", k=self.config.digits))
            data = SortData.model_validate({"prompt": text, "answer": "".join(sorted(text))})
            yield SortTask(data, self.config.task)


__all__ = ["SortTaskset"]
