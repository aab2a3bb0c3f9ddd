"""Rows whose task watches single requests, so that the short way must not play it."""

# A hook must name the library's bare types, which are generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

from collections.abc import Iterator

import verifiers.v1 as vf


class WatchedTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def shout(self, request: vf.Request) -> vf.Request:
        for message in request.messages:
            if isinstance(message.content, str):
                message.content = message.content.upper()
        return request

    @vf.reward
    async def always(self, trace: vf.Trace) -> float:
        return 1.0


class WatchedTaskset(vf.Taskset[WatchedTask, vf.TasksetConfig]):
    def load(self) -> Iterator[WatchedTask]:
        yield WatchedTask(vf.TaskData.model_validate({"prompt": "quiet"}), self.config.task)


__all__ = ["WatchedTaskset"]
