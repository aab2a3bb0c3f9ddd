"""Tasks by what their code does, as `args.moods` says: what `env test` has to find."""

# A hook must name the library's bare types, which are generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import asyncio
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress

import verifiers.v1 as vf


class UnrulyConfig(vf.TasksetConfig):
    moods: str = "good"
    file: str = ""


class UnrulyData(vf.TaskData):
    mood: str
    answer: str = "yes"


class UnrulyTask(vf.Task[UnrulyData]):
    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def scored(self, trace: vf.Trace) -> float:
        match self.data.mood:
            case "socket":
                try:
                    socket.create_connection(("10.11.12.13", 80), timeout=1.0)
                except OSError:
                    return 0.0
            case "process":
                try:
                    subprocess.run(["/bin/true"], check=True)  # noqa: ASYNC221
                except OSError:
                    return 0.0
            case "random":
                return random.random()
            case "nan":
                return float("nan")
            case "waits":
                await asyncio.Event().wait()
            case "spins":
                while True:
                    pass
            case "raises":
                return float(int(trace.last_reply))
            case _:
                pass
        return float(trace.last_reply == self.data.answer)


class UnrulyTaskset(vf.Taskset[UnrulyTask, UnrulyConfig]):
    def load(self) -> Iterator[UnrulyTask]:
        moods = self.config.moods.split()
        if "never-loads" in moods:
            time.sleep(3600)
        if self.config.file:
            with suppress(OSError), open(self.config.file, "w") as file:  # Landlock refuses it
                file.write("written")
        # tasks are dealt to the splits by their content: enough of them, so that both get some
        for number in range(60):
            own = time.time_ns() if "differs" in moods else 0  # each sandbox may have the same pids
            mood = moods[number % len(moods)]
            values = {"prompt": f"say yes {number} {own}", "mood": mood, "idx": number}
            yield UnrulyTask(UnrulyData.model_validate(values), self.config.task)


__all__ = ["UnrulyTaskset"]
