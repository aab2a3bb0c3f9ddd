"""Run a `verifiers` taskset as an Environment in this process; nodes use hosted.py.

This file handles tasks, digests and recorded rollouts; playing.py handles the library and is imported by
start(), because that takes seconds. A score is always the result of playing: run() plays with the policy,
score() plays again with the replies that a rollout recorded.
"""

import asyncio
import gc
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...protocol.recent import RecentDict
from ..config.run import EnvironmentConfig
from ..errors import NodeError, named_line
from .chat import Chat, ChatFormat
from .environment import (
    Branch,
    Demonstration,
    EnvironmentFailed,
    EnvironmentStuck,
    Episode,
    Policy,
    Score,
    ScoreMismatch,
    Split,
    Task,
)
from .policies import (
    BadCompletion,
    EpisodeStuck,
    Exchange,
    PlayFailed,
    RecordedRollout,
    ShownReplies,
    check_endings,
)
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from .playing import PreparedTask, TasksetPlayer

PREPARED_TASKS = 1024
"""Cached tasks, with their prompt tokens; a group's rollouts share one."""


class VerifiersEnvironment:
    """Environment of a `verifiers` taskset; rollouts run concurrently on one event loop.

    No model call leaves the process.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        model_dir: Path,
        seed: int,
        max_tokens: int,
        temperature: float,
        chat: Chat | None = None,
        judged: bool = False,
    ) -> None:
        """Take the options; `seed` is the taskset's unless its own options name one.

        `max_tokens` bounds one turn; `chat` replaces the tokenizer and template of `model_dir`. `judged`:
        policies.episode_judge asks the judge that the config names; otherwise an environment that has one plays
        and does not score.
        """
        self._config = config
        self._model_dir = model_dir
        self._seed = seed
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._prepared = RecentDict[tuple[int, Split], "PreparedTask"](PREPARED_TASKS)
        self._given = chat
        self._judged = judged
        self._chat: Chat | None = None
        self.stops: StopStrings | None = None
        self._player: TasksetPlayer | None = None

    @property
    def name(self) -> str:
        """Id of the taskset."""
        return self._config.id

    @property
    def status(self) -> str:
        """See Environment."""
        return "" if self._player is None else self._player.progress

    @property
    def judge_fault(self) -> str:
        """See Environment; always empty, as the node's own process asks the judge."""
        return ""

    async def start(self) -> None:
        """Read the tokenizer, import verifiers, find the taskset. Raises EnvironmentFailed."""
        # takes seconds, and more while another thread imports too: the event loop has to run meanwhile
        await asyncio.to_thread(_import_player)
        from .playing import open_player

        self._chat = self._given or await asyncio.to_thread(
            ChatFormat.load, self._model_dir, defaults=self._config.chat_template_kwargs
        )
        if self._config.stop:
            self.stops = StopStrings(self._config.stop, self._chat.piece)
        try:
            self._player = open_player(
                self._config,
                chat=self._chat,
                seed=self._seed,
                max_tokens=self._max_tokens,
                temperature=self._temperature,
                scores=self._judged or self._config.judge is None,
            )
            await self._player.start()
        except NodeError:
            raise
        except Exception as error:  # a taskset's own code may raise anything
            raise EnvironmentFailed(
                f"the taskset cannot be loaded ({named_line(error)}): mend it"
            ) from error
        await self._prepare(
            0, "train"
        )  # an empty taskset, or a template that refuses it, fails here

    async def close(self) -> None:
        """Stop the taskset's resources."""
        player, self._player = self._player, None
        if player is not None:
            await player.close()

    async def task(self, index: int, split: Split = "train") -> Task:
        """Return task number `index`; its digest is verifiers' content hash (SHA-256).

        With tools it covers their schemas, too.
        """
        prepared = await self._prepare(index, split)
        return Task(index, prepared.digest, split, prepared.place, prepared.content)

    async def prompt(self, task: Task) -> list[int]:
        """Return the first turn's prompt; empty if the taskset's own code opens the conversation.

        Raises ScoreMismatch if the task has other content here.
        """
        return list((await self._own(task)).prompt)

    async def demonstration(self, task: Task) -> Demonstration | None:
        """Return the conversation of the task's data: see PreparedTask.replies.

        A whole conversation is played to get the environment's messages, and keeps its reasoning. Raises
        EnvironmentFailed if the replies are not a rollout of this task.
        """
        prepared = await self._own(task)
        if not prepared.replies:
            return None
        replies = [self._format.reply(text) for text in prepared.replies]
        if not prepared.whole:
            end = self.stops.end(replies[0]) if self.stops is not None else 0
            return Demonstration.of_reply(prepared.prompt, replies[0][: end or None])
        try:
            episode = await self._play(prepared, ShownReplies(replies), one_branch=True)
        except PlayFailed as error:
            raise EnvironmentFailed(
                f"the `replies` of task {task.index} are no rollout of it ({error}): mend the taskset"
            ) from error
        shown = Demonstration(episode.branches[0].token_ids, episode.branches[0].sampled)
        if len(shown.turns()) != len(replies):
            raise EnvironmentFailed(
                f"the rollout ends after {len(shown.turns())} of the `replies` of task {task.index}: mend the "
                "taskset, or use a model whose tool calls they are"
            )
        return shown

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Play and score a task. Errors of the policy are raised; others are the episode's `error`."""
        try:
            episode = await self._play(await self._own(task), policy)
            if episode.score.agents:
                await self._check_order(task, episode)
            return episode
        except (PlayFailed, ScoreMismatch, EnvironmentFailed) as error:
            return Episode(branches=[], score=Score(reward=0.0), error=str(error))

    async def _check_order(self, task: Task, episode: Episode) -> None:
        """Play an episode of several agents again, to check the order of turns.

        Seeds depend on turn numbers: an environment that asks its agents in another order on replay would get
        its worker blamed. Raises PlayFailed, and the errors of score().
        """
        again = await self.score(task, episode.branches)
        if again.turns != episode.score.turns:
            raise PlayFailed(
                "its agents take turns in another order when it is played again: have the environment's run() "
                "await one agent after the other"
            )

    async def score(self, task: Task, branches: Sequence[Branch]) -> Score:
        """Play again with the recorded turns and score the result.

        Raises EnvironmentFailed if the taskset itself fails on these replies: such a rollout has no score.
        """
        ends = self._format.stop_token_ids
        recording = RecordedRollout(branches, stop_token_ids=ends)
        if self.stops is not None:
            check_endings(branches, self.stops, max_tokens=self._max_tokens, stop_token_ids=ends)
        try:
            episode = await self._play(await self._own(task), recording)
        except BadCompletion as error:
            raise ScoreMismatch(str(error)) from error
        except EpisodeStuck as error:
            raise EnvironmentStuck(str(error)) from error
        except PlayFailed as error:
            raise EnvironmentFailed(str(error)) from error
        recording.check(episode.branches)
        turns = episode.score.turns or recording.turns()
        return replace(episode.score, turns=turns)

    async def _play(
        self, prepared: "PreparedTask", policy: Policy, *, one_branch: bool = False
    ) -> Episode:
        exchange = Exchange(
            policy,
            max_tokens=self._max_tokens,
            stop_token_ids=self._format.stop_token_ids,
            stops=self.stops,
            deadline=self._config.timeout_s,
        )
        async with exchange.bounded():
            return await self._started.play(prepared, exchange, one_branch=one_branch)

    async def _own(self, task: Task) -> "PreparedTask":
        prepared = await self._prepare(task.index, task.split)
        if prepared.digest != task.digest:
            raise ScoreMismatch(
                f"task {task.index} of {self.name!r} has other content here: "
                "install the run's version of the taskset"
            )
        return prepared

    async def _prepare(self, index: int, split: Split) -> "PreparedTask":
        """Prepare a task, cached for the other rollouts of its group."""
        key = (index, split)
        if key not in self._prepared:
            try:
                prepared = await self._started.load(index, split)
            except NodeError:
                raise
            except Exception as error:  # a taskset's own code may raise anything
                raise EnvironmentFailed(
                    f"task {index} cannot be made ({named_line(error)}): mend the taskset"
                ) from error
            self._prepared[key] = prepared
            return prepared
        self._prepared.move_to_end(key)
        return self._prepared[key]

    @property
    def _started(self) -> "TasksetPlayer":
        if self._player is None:
            raise EnvironmentFailed(f"environment {self.name!r} is not running: call start() first")
        return self._player

    @property
    def _format(self) -> Chat:
        if self._chat is None:
            raise EnvironmentFailed(f"environment {self.name!r} is not running: call start() first")
        return self._chat


def _import_player() -> None:
    """Import verifiers, with its thousands of modules; to look for garbage among them took a third of that."""
    if f"{__package__}.playing" in sys.modules:
        return
    gc.disable()
    try:
        with _without_unused_packages():
            import_module(".playing", __package__)
    finally:
        gc.freeze()  # modules stay
        gc.collect()  # of nothing: see process/heap.py
        gc.enable()


class UnusedPackage(ModuleType):
    """Package with an empty class under every name that is imported from it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class DeferredPackage(ModuleType):
    """Package whose functions import it when one of them is called first."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> Any:
            return getattr(import_module(self.__name__), name)(*arguments, **named)

        return call


UNUSED = ("anthropic", "anthropic.types", "mcp", "mcp.server", "mcp.server.mcpserver", "mcp.types")
"""verifiers takes types from these for a wire format that no node speaks, and for its own tasksets, which no
node plays. tools.py, or a taskset that imports them itself, gets the packages."""
SCORES = "math_verify"
"""Loads sympy, which only mathematical rewards need."""


@contextmanager
def _without_unused_packages() -> Generator[None]:
    """Import verifiers in the block without packages that few tasksets use: two thirds of its time."""
    loaded = {name.partition(".")[0] for name in sys.modules}
    stubs: dict[str, ModuleType] = {
        name: UnusedPackage(name) for name in UNUSED if name.partition(".")[0] not in loaded
    }
    errors = f"{SCORES}.errors"
    if SCORES not in loaded and (module := _errors_of(SCORES)) is not None:
        stubs[SCORES] = DeferredPackage(SCORES)
        sys.modules[errors] = module  # stays: an except clause names its class
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


def _errors_of(package: str) -> ModuleType | None:
    """Load errors.py of a package without the package; None if it has none."""
    there = find_spec(package)
    if there is None or there.origin is None:
        return None
    path = Path(there.origin).with_name("errors.py")
    spec = spec_from_file_location(f"{package}.errors", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
