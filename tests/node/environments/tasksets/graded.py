"""A taskset whose reward asks a model by the library's own Judge, as a stranger to this program writes it."""

# A hook must name the library's bare types, which are generic, and options are known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeArguments=false
# pyright: reportIncompatibleVariableOverride=false

import os
from collections.abc import Iterator

import verifiers.v1 as vf


class PoliteJudge(vf.Judge[float]):
    prompt = "Is this polite? Answer yes or no. {response}"

    def parse(self, response: vf.JudgeResponse[float]) -> float:
        return {"yes": 1.0, "no": 0.0}[response.text]


class GradedConfig(vf.TaskConfig):
    judge: vf.JudgeConfig = vf.JudgeConfig()


class GradedTask(vf.Task[vf.TaskData, vf.State, GradedConfig]):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def polite(self, trace: vf.Trace) -> float:
        if trace.last_reply.startswith("$"):
            return float(trace.last_reply[1:] in os.environ)
        judge = PoliteJudge(self.config.judge)
        answer = await judge.evaluate(trace=trace, response=trace.last_reply)
        return 0.0 if answer.parsed is None else answer.parsed


class GradedTasksetConfig(vf.TasksetConfig):
    task: GradedConfig = GradedConfig()


class GradedTaskset(vf.Taskset[GradedTask, GradedTasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GradedTask]:
        number = 0
        while True:
            number += 1
            data = vf.TaskData.model_validate({"prompt": f"greet guest {number}"})
            yield GradedTask(data, self.config.task)


__all__ = ["GradedTaskset"]
