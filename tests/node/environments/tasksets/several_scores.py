"""Two rewards, a metric and judges, which get in each other's way as `args.mood` says."""

# A hook must name the library's bare types, which are generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SeveralConfig(vf.TasksetConfig):
    mood: str = "good"


class SeveralData(vf.TaskData):
    mood: str


class Grader(vf.Judge):
    """A judge that asks no model; its name is `mood`'s, after a colon."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    def reward_name(self) -> str:
        return self.name

    async def score(self, task: vf.TaskData, trace: vf.Trace) -> Any:
        return {"exact": 0.0} if self.name == "table" else 0.0


class SeveralTask(vf.Task[SeveralData]):
    def plugged_judges(self) -> list[vf.Judge]:
        names = self.data.mood.partition("judged:")[2]
        return [Grader(name) for name in names.split(",") if name]

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return 1.0

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> Any:
        match self.data.mood:
            case "raises":
                raise KeyError("no such key")
            case "late":
                raise TimeoutError("a service")
            case "nothing":
                return None
            case "text":
                return {"length": "long"}
            case "endless":
                return float("inf")
            case "same":
                return {"exact": 0.0}
            case _:
                return {"length": 1.0}

    @vf.metric
    async def shares(self, trace: vf.Trace) -> dict[str, float]:
        if self.data.mood == "unmeasured":
            raise ValueError("no figure")
        return {"exact": 0.25, "other": 2.0}


class SeveralTaskset(vf.Taskset[SeveralTask, SeveralConfig]):
    def load(self) -> Iterator[SeveralTask]:
        for number in range(40):
            values = {"prompt": f"say {number}", "mood": self.config.mood}
            yield SeveralTask(SeveralData.model_validate(values), self.config.task)


__all__ = ["SeveralTaskset"]
