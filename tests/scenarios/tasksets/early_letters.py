"""A taskset for tests: any model earns something, so a run moves from its first step on."""

# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import itertools
from collections.abc import Iterator

import verifiers.v1 as vf


class EarlyLettersTask(vf.Task[vf.TaskData]):
    """One turn; the reward is the share of the reply's characters below U+0080."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        """One reply is all there is."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def early(self, trace: vf.Trace) -> float:
        """0.0 .. 1.0."""
        reply = trace.last_reply
        return sum(ord(character) < 128 for character in reply) / max(len(reply), 1)


class EarlyLettersTaskset(vf.Taskset[EarlyLettersTask, vf.TasksetConfig]):
    """Endless."""

    INFINITE = True

    def load(self) -> Iterator[EarlyLettersTask]:
        """Numbered prompts."""
        for index in itertools.count():
            yield EarlyLettersTask(
                vf.TaskData.model_validate({"idx": index, "prompt": f"{index}"}), self.config.task
            )


__all__ = ["EarlyLettersTaskset"]
