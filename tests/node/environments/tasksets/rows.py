"""A plain, finite taskset with hooks, whose mood decides how it misbehaves."""

# A hook must name the library's bare types, which are generic, and states are known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeArguments=false

import asyncio

import verifiers.v1 as vf


class RowsConfig(vf.TasksetConfig):
    mood: str = "good"
    count: int = 40


class RowData(vf.TaskData):
    answer: str
    mood: str


class RowState(vf.State):
    steps: tuple[str, ...] = ()


class RowTask(vf.Task[RowData, RowState]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.state.steps += ("setup",)

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.state.steps += ("finalize",)

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= (0 if self.data.mood == "impatient" else 1)

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        if self.data.mood == "broken":
            raise KeyError("no such thing")
        if self.data.mood == "slow":
            await asyncio.Event().wait()
        if self.data.mood == "shell":
            await runtime.run(["true"], {})
        right = float(trace.last_reply == self.data.answer)
        return float("nan") if self.data.mood == "odd" else right

    @vf.metric
    async def counts(self, trace: vf.Trace) -> dict[str, float]:
        return {
            "steps": float(trace.state.steps == ("setup", "finalize")),
            "turns": float(trace.num_turns),
        }


class RowsTaskset(vf.Taskset[RowTask, RowsConfig]):
    def load(self) -> list[RowTask]:
        return [RowTask(self._row(i), self.config.task) for i in range(self.config.count)]

    def _row(self, i: int) -> RowData:
        values = {"prompt": f"say {i}", "system_prompt": "be brief", "answer": str(i)}
        return RowData.model_validate({**values, "mood": self.config.mood})


__all__ = ["RowsTaskset"]
