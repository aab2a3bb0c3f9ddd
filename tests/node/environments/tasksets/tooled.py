"""A taskset with tools: of the taskset, of each task, and some that cannot be called or checked."""

# A hook must name the library's bare types, which are generic, and states are known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeArguments=false

import random
from typing import Any, Literal

import verifiers.v1 as vf


class Tally(vf.State):
    sums: tuple[int, ...] = ()


class Adder(vf.Toolset[vf.SharedToolsetConfig, Tally]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state.sums += (a + b,)
        return f"{a + b}, sum {len(self.state.sums)}"

    @vf.tool
    async def fail(self) -> str:
        """Fail."""
        raise LookupError("nothing here")

    @vf.tool
    async def echo(self, text: str) -> str:
        """Say it."""
        return text


class Dice(Adder):
    """One that says that it cannot be checked."""

    DETERMINISTIC = False

    @vf.tool
    async def roll(self) -> str:
        return str(random.random())


class Chest(vf.Toolset[vf.ToolsetConfig, Tally]):
    """One for each rollout, which knows its task."""

    async def setup_task(self, task: Any) -> None:
        self.inside = [task.secret]

    @vf.tool
    async def take(self) -> str:
        return self.inside.pop() if self.inside else "empty"


class TooledData(vf.TaskData):
    secret: str
    replies: tuple[str, ...] = ()


class TooledTask(vf.Task[TooledData, Tally]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset[Any, Any]]:
        return [Chest(vf.ToolsetConfig())]

    @vf.reward
    async def summed(self, trace: vf.Trace) -> float:
        return float(sum(trace.state.sums))


class TooledConfig(vf.TasksetConfig):
    kind: Literal["plain", "remote", "dice", "quiet"] = "plain"
    replies: tuple[str, ...] = ()


class TooledTaskset(vf.Taskset[TooledTask, TooledConfig]):
    def load(self) -> list[TooledTask]:
        return [self._task(number) for number in range(40)]

    def _task(self, number: int) -> TooledTask:
        values = {
            "prompt": f"q{number}",
            "secret": f"gold{number}",
            "replies": self.config.replies,
        }
        return TooledTask(TooledData.model_validate(values), self.config.task)

    @classmethod
    def toolsets(cls, config: TooledConfig) -> list[vf.Toolset[Any, Any]]:
        url = "http://127.0.0.1:9/mcp" if config.kind == "remote" else None
        made = Dice if config.kind in ("dice", "quiet") else Adder
        toolset = made(vf.SharedToolsetConfig(url=url))
        if config.kind == "quiet":
            toolset.DETERMINISTIC = True
        return [toolset]


__all__ = ["TooledTaskset"]
