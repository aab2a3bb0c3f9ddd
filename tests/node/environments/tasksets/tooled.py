"""A taskset with a tool server."""

# A hook must name the library's bare types, which are generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        return a + b


class TooledTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self) -> list[vf.Task[vf.TaskData]]:
        return []

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]


__all__ = ["TooledTaskset"]
