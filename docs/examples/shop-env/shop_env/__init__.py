"""Add up a bill: the model asks a tool for each price, and answers with the sum."""

import json
import random
from collections.abc import Iterator

import verifiers.v1 as vf

PRICES = {item: 5 + item * 37 % 95 for item in range(100, 1000)}
"""What the tool knows, by the item's number. Real tables belong into a file of the package, beside this module."""


class ShopEnvConfig(vf.TasksetConfig):
    """Options, set by `environment.args` of a run; `seed` is the run's unless it is given."""

    seed: int = 0
    items: int = 2


class ShopEnvData(vf.TaskData):
    """One task: `prompt` is asked. `replies` are those of a good rollout, which a warm-up learns from."""

    answer: str
    replies: tuple[str, ...]


class ShopEnvState(vf.State):
    """What a rollout remembers between its turns; each field needs a default."""

    asked: tuple[int, ...] = ()


class ShopEnvToolset(vf.Toolset[vf.SharedToolsetConfig, ShopEnvState]):
    """The tools. Equal calls must have equal results: the trainer makes every call again."""

    TOOL_PREFIX = None

    @vf.tool
    async def price(self, item: int) -> str:
        """Look up what an item costs, by its number."""
        self.state.asked += (item,)
        return look_up(item)


def look_up(item: int) -> str:
    """The price of an item. What is raised here is what the model reads."""
    if item not in PRICES:
        raise ValueError(f"unknown item; numbers are {min(PRICES)} to {max(PRICES)}")
    return str(PRICES[item])


class ShopEnvTask(vf.Task[ShopEnvData, ShopEnvState]):
    """Ends with the first reply that calls no tool, and scores it."""

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def known_items(self, trace: vf.Trace) -> float:
        return float(sum(item in PRICES for item in trace.state.asked))


class ShopEnvTaskset(vf.Taskset[ShopEnvTask, ShopEnvConfig]):
    """Task 7 is the eighth that load() gives, on every machine and each time."""

    INFINITE = True

    @classmethod
    def toolsets(cls, config: ShopEnvConfig) -> list[vf.Toolset]:
        """One toolset for all rollouts: what each of them remembers is in its state."""
        return [ShopEnvToolset(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[ShopEnvTask]:
        rng = random.Random(self.config.seed)
        while True:
            items = rng.choices(list(PRICES), k=self.config.items)
            calls = [json.dumps({"name": "price", "arguments": {"item": item}}) for item in items]
            answer = str(sum(PRICES[item] for item in items))
            values = {
                "prompt": f"Bill: {', '.join(map(str, items))}",
                "answer": answer,
                "replies": (*(f"<tool_call>{call}</tool_call>" for call in calls), answer),
            }
            yield ShopEnvTask(ShopEnvData.model_validate(values), self.config.task)


__all__ = ["ShopEnvTaskset"]
