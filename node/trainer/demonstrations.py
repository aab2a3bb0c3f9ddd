"""Demonstrations in a run of rollouts: rows mixed into each step, teacher hints, and teachers' logprobs.

Invariant: the demonstrations of a step follow from the data, the cursor of the checkpoint and the tasks of its
rollouts.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..config.chat_api import ChatApiConfig
from ..environments.chat import ChatFormat
from ..environments.chat_api import ApiUnavailable, ChatApi
from ..environments.environment import Environment, EnvironmentFailed, ScoreMismatch, Task
from ..environments.policies import PlayFailed
from ..errors import RunFailed, UsageError
from ..sft.data import DataCursor, MixedReader
from ..training.backend import Sample
from ..training.buffer import RolloutGroup
from .state import TrainerState

logger = logging.getLogger(__name__)

PROBE = "The quick brown fox jumps over 13 lazy dogs: [a, b] = (7 + 8) * 92."
"""Text by which the tokens of a teacher are compared with the model's."""
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses between two attempts at a teacher that is down; the last one repeats."""
PLACE = "{demonstration}"
"""Placeholder of LossConfig.hint for the demonstration."""


class Hints:
    """Converts tasks' correct replies to system messages, as tokens (training.loss.hint)."""

    def __init__(
        self, template: str, chat: ChatFormat, environments: Mapping[str, Environment]
    ) -> None:
        """`environments` are those whose loss has the hint, started, by name."""
        self._template = template
        self._chat = chat
        self._environments = environments

    async def check(self) -> None:
        """Raise UsageError if hints are impossible.

        The first task of every environment needs a correct reply, and the model's template a system message.
        """
        for name, environment in self._environments.items():
            try:
                hint = await self._of(environment, await environment.task(0))
            except EnvironmentFailed as error:
                raise UsageError(f"training.loss.hint: {error}") from error
            if not hint:
                raise UsageError(
                    f"training.loss.hint: tasks of {name!r} have no right reply to show: leave hint out, or "
                    "give their data an `answer` (docs/environments.md)"
                )

    async def of(self, group: RolloutGroup) -> list[int]:
        """Return the hint of a group's task.

        Empty if its loss has no hint, or the task has no correct reply here.
        """
        environment = self._environments.get(group.environment)
        if environment is None or group.task_index < 0:  # from a checkpoint older than task_index
            return []
        try:
            return await self._of(environment, Task(group.task_index, group.task))
        except (EnvironmentFailed, ScoreMismatch):
            return []

    async def _of(self, environment: Environment, task: Task) -> list[int]:
        shown = await environment.demonstration(task)
        if shown is None:
            return []
        _, reply = shown.turns()[-1]
        content = self._template.replace(PLACE, self._chat.text(reply))
        message = {"role": "system", "content": content}
        return self._chat.encode(self._chat.render([message], generate=False))


class Teacher:
    """Adds the logprobs of a frozen model behind an endpoint to samples (training.loss.endpoint)."""

    def __init__(
        self,
        config: ChatApiConfig,
        api: ChatApi,
        environments: Collection[str],
        *,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        """`environments` are the names of those whose loss has the teacher."""
        self._url = config.url
        self._api = api
        self._environments = environments
        self._pauses_s = pauses_s
        self._room = asyncio.Semaphore(config.concurrency)

    def teaches(self, environment: str) -> bool:
        """Return whether it teaches on an environment."""
        return environment in self._environments

    async def check(self, chat: ChatFormat) -> None:
        """Raise UsageError for an endpoint that does not score tokens, or has others than the model's."""
        try:
            scores = await self._api.score(chat.encode(PROBE))
        except (ApiUnavailable, PlayFailed) as error:
            raise UsageError(f"training.loss.endpoint, {self._url}: {error}") from error
        text = "".join(token.text for token in scores)
        if not _letters(PROBE).endswith(_letters(text)):
            raise UsageError(
                f"training.loss.endpoint: the tokens of the teacher at {self._url} differ from those of the "
                f"trained model: it reads {text[:80]!r} in place of {PROBE!r}"
            )

    async def scored(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the teacher's logprobs. Waits for one that is down. Raises RunFailed."""
        return [*await asyncio.gather(*map(self._scored, samples))]

    async def _scored(self, sample: Sample) -> Sample:
        if not self.teaches(sample.environment):
            return sample
        failures = 0
        while True:
            try:
                async with self._room:
                    scores = await self._api.score(sample.token_ids)
                return replace(sample, reference=[0.0, *(token.logprob for token in scores)])
            except ApiUnavailable as error:
                if not failures:
                    logger.warning("the step waits for the teacher at %s: %s", self._url, error)
            except PlayFailed as error:
                raise RunFailed(f"the teacher at {self._url}: {error}") from error
            await asyncio.sleep(self._pauses_s[min(failures, len(self._pauses_s) - 1)])
            failures += 1


def _letters(text: str) -> str:
    """Drop spaces, which servers decode differently at the begin of a token."""
    return "".join(text.split())


class Demonstrations:
    """Demonstrations, hints and teachers' logprobs, added to the rollouts of each step."""

    def __init__(
        self,
        mixed: MixedReader | None = None,
        hints: Hints | None = None,
        teachers: Sequence[Teacher] = (),
    ) -> None:
        self._mixed = mixed
        self._hints = hints
        self._teachers = teachers
        self.cursor = DataCursor()
        """Position in `mixed`."""

    @property
    def identity(self) -> str:
        """Identity of the data that the cursor belongs to; empty without any."""
        return self._mixed.identity if self._mixed else ""

    def restore(self, state: TrainerState) -> None:
        """Continue at a checkpoint's position; from the start if the run had no such data then.

        Raises UsageError for other data.
        """
        if self._mixed is None or not state.sft_identity:
            return
        if state.sft_identity != self.identity:
            raise UsageError(
                "the data of training.sft are not those that the run began with: give the same, or "
                "another --name"
            )
        self.cursor = state.sft

    async def added_to(
        self, samples: Sequence[Sample], groups: Sequence[RolloutGroup]
    ) -> list[Sample]:
        """Give the `samples` of `groups` their hints or logprobs, and add the rows of this step.

        Raises RunFailed, UsageError.
        """
        completed = await self._hinted(samples, groups)
        for teacher in self._teachers:
            completed = await teacher.scored(completed)
        if self._mixed is None:
            return completed
        tokens = sum(len(sample.token_ids) for sample in samples)
        read = await asyncio.to_thread(self._mixed.batch, self.cursor, tokens)
        self.cursor = read.cursor
        return [*completed, *read.samples]

    async def _hinted(
        self, samples: Sequence[Sample], groups: Sequence[RolloutGroup]
    ) -> list[Sample]:
        if self._hints is None:
            return [*samples]
        hints = await asyncio.gather(*map(self._hints.of, groups))
        # a sample holds the same list object as its branch (advantages.py)
        hint_of = {
            id(branch.token_ids): hint
            for group, hint in zip(groups, hints, strict=True)
            for rollout in group.rollouts
            for branch in rollout.branches
        }
        return [replace(sample, hint=hint_of[id(sample.token_ids)]) for sample in samples]

    def figures(self) -> dict[str, float]:
        """Return the data's metrics by name."""
        if self._mixed is None:
            return {}
        return {
            "sft/epoch": self.cursor.epoch,
            "sft/total_samples": self.cursor.samples,
            "sft/total_tokens": self.cursor.tokens,
        }
