"""Compose `primerl-node chat`: one prompt and one seed for several models, whose replies are compared.

Models are found, loaded, prompted and sampled as by `primerl-node eval`. Nothing is written.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..config.chat_api import check_url
from ..config.engine import EngineConfig
from ..config.evaluation import EndpointConfig, EvalConfig, EvalSamplingConfig
from ..config.paths import expand_home
from ..config.run import EvaluatedEnvironment
from ..config.sandbox import SandboxConfig
from ..environments.chat import Chat, ChatFormat, Transcript, dated
from ..environments.chat_api import ApiUnavailable, open_api, read_key
from ..environments.environment import Environment
from ..environments.marks import Message
from ..environments.policies import PlayFailed
from ..environments.sandbox import choose
from ..errors import NetworkError, NodeError, UsageError, first_cause
from ..evaluation.candidates import STEP, Candidate, candidate, candidates, run_config
from ..evaluation.endpoint import open_endpoint
from ..evaluation.evaluator import PolicyClient, TurnRequest, run_rollouts
from ..gpus import usable
from ..inference.build import build_engine
from ..inference.engine import Engine
from ..models.model_files import position_count
from ..storage.run_files import MARK, today
from .eval import (
    MAX_TOKENS,
    PolicyLoader,
    StartedEnvironments,
    completed,
    make_text_environment,
    trained_on,
)
from .factories import make_environment

LONGEST = 4096
"""Tokens of prompt and reply at most, where the model has room for them."""
RETRIES = 2


@dataclass(frozen=True)
class ChatSettings:
    """What to compare, and how to sample."""

    models: Sequence[str] = ()
    """Run directories, model directories and hub ids."""
    url: str = ""
    """Base URL of an OpenAI-compatible API, whose model is compared as well."""
    key_variable: str = ""
    """Environment variable that holds the API's key."""
    step: int | None = None
    """Step of the weights of a run; None: the newest."""
    system: str = ""
    """System message of every conversation."""
    keeps: bool = False
    """Whether a prompt goes on with the conversation."""
    seed: int = 0
    temperature: float = 1.0
    max_tokens: int = 0
    """0: as in the run, or 512."""


class ComparedReply(msgspec.Struct, frozen=True):
    """A reply of one model."""

    model: str
    text: str
    reward: float | None = None
    """The environment's, of a task."""
    error: str = ""
    """Why there is none, or why the conversation ended early."""
    cut: bool = False
    """Whether the limit of tokens ended it."""


@dataclass
class Speaker:
    """A model that is compared, with its conversation."""

    name: str
    policy: PolicyClient
    chat: Chat
    environments: StartedEnvironments
    """Those made for this model."""
    messages: list[Message] = field(default_factory=list[Message])


class ModelComparison:
    """Open models that are asked the same. Made by open_comparison()."""

    def __init__(
        self,
        settings: ChatSettings,
        speakers: Sequence[Speaker],
        environments: Sequence[EvaluatedEnvironment],
    ) -> None:
        self._settings = settings
        self._speakers = speakers
        self._environments = environments

    @property
    def names(self) -> list[str]:
        """The models' names, in the order of replies."""
        return [speaker.name for speaker in self._speakers]

    @property
    def has_tasks(self) -> bool:
        """Whether there is a run, whose held-out tasks can be played."""
        return bool(self._environments)

    async def ask(self, prompt: str) -> list[ComparedReply]:
        """Ask every model, with the same seed. Raises NodeError where none can reply any more."""
        return await self._of_all(lambda speaker: self._ask(speaker, prompt))

    async def play(self, number: int) -> tuple[str, list[ComparedReply]]:
        """Play a held-out task (from 0) of the run with every model; return its prompt as text, and replies.

        Several environments take turns. Raises UsageError without a run, EnvironmentFailed.
        """
        if not self._environments:
            raise UsageError("tasks are those of a run: name its directory, outputs/RUN")
        prompts: list[str] = []
        index, which = divmod(number, len(self._environments))

        async def one(speaker: Speaker) -> ComparedReply:
            environment = await speaker.environments.get(self._environments[which])
            task = await environment.task(index, "eval")
            prompts.append(speaker.chat.text(await environment.prompt(task)))
            (rollout,) = await run_rollouts(
                environment,
                [task],
                speaker.policy,
                samples=1,
                seed=self._settings.seed,
                concurrency=1,
            )
            reward = None if rollout.error else rollout.reward
            return ComparedReply(
                speaker.name, rollout.reply, reward, rollout.error, rollout.truncated
            )

        replies = await self._of_all(one)
        return prompts[0], replies

    async def _of_all(self, reply: Callable[[Speaker], Any]) -> list[ComparedReply]:
        try:
            async with asyncio.TaskGroup() as tasks:
                replies = [tasks.create_task(reply(speaker)) for speaker in self._speakers]
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
        return [task.result() for task in replies]

    async def _ask(self, speaker: Speaker, prompt: str) -> ComparedReply:
        settings = self._settings
        system: list[Message] = (
            [{"role": "system", "content": settings.system}] if settings.system else []
        )
        before = speaker.messages if settings.keeps else []
        messages: list[Message] = [*before, {"role": "user", "content": prompt}]
        ids = speaker.chat.prompt([*system, *messages])
        try:
            turn = await speaker.policy.reply(TurnRequest(tuple(ids), settings.seed, b""))
        except PlayFailed as error:
            return ComparedReply(speaker.name, "", error=str(error))
        text = speaker.chat.text(turn.completion.token_ids)
        speaker.messages = [*messages, {"role": "assistant", "content": text}]
        return ComparedReply(speaker.name, text, cut=turn.completion.finish == "length")


@asynccontextmanager
async def open_comparison(
    settings: ChatSettings,
    environ: Mapping[str, str],
    make_engine: Callable[[EngineConfig], Engine] = build_engine,
) -> AsyncGenerator[ModelComparison]:
    """Open the models until the block ends, each with an engine of its own. Raises NodeError."""
    run, models = await asyncio.to_thread(find_models, settings)
    sampling = EvalSamplingConfig(
        temperature=settings.temperature,
        max_tokens=settings.max_tokens or (run.sampling.max_tokens if run else 0) or MAX_TOKENS,
    )
    environments = list(run.environments) if run else []
    options = environments[0].chat_template_kwargs if environments else {}
    async with AsyncExitStack() as open_things:
        speakers = [
            await _local(settings, sampling, model, options, open_things, make_engine)
            for model in models
        ]
        if settings.url:
            speakers.append(await _remote(settings, sampling, environ, open_things))
        yield ModelComparison(settings, speakers, environments)


def find_models(settings: ChatSettings) -> tuple[EvalConfig | None, list[Candidate]]:
    """Find the models: of a single run its base and its weights, of several the weights of each.

    Returns the config of the first run's evaluation, and None if there is no run. Raises NodeError.
    """
    run: EvalConfig | None = None
    models: list[Candidate] = []
    for name in settings.models:
        if (weights := _weights_of(expand_home(name))) is None:
            models.append(candidate(name, _resolve(name)))
            continue
        config = EvalConfig(
            weights_dir=weights,
            steps=[_newest(weights) if settings.step is None else settings.step],
            eval_base=len(settings.models) == 1 and not settings.url,
        )
        if trained_on(run_config(weights)):  # else of `sft`
            config = completed(config)
        run = run or config
        models += candidates(config)
    return run, models


def find_run() -> str:
    """Find the run in outputs/ whose weights are the newest. Raises UsageError where there is none."""
    runs = {
        path.parent.parent: path.stat().st_mtime
        for path in Path("outputs").glob(f"*/weights/{STEP}*")
    }
    if not runs:
        raise UsageError(
            "no run in outputs/ has weights: name a run's directory, a model's, or a hub id"
        )
    return str(max(runs, key=lambda run: runs[run]))


def _weights_of(path: Path) -> Path | None:
    """Return the directory with the weights of a run, which `path` is or holds; None for a model."""
    there = (weights for weights in (path / "weights", path) if any(weights.glob(f"{STEP}*")))
    weights = next(there, None)
    if weights is None and (path / MARK).is_file():
        raise UsageError(
            f"{path} has no weights yet: a run writes them at its end, and every "
            "checkpoint.weights_interval steps"
        )
    return weights


def _newest(weights: Path) -> int:
    steps = [path.name.removeprefix(STEP) for path in weights.glob(f"{STEP}*")]
    return max((int(step) for step in steps if step.isdigit()), default=0)


def _resolve(name: str) -> Path:
    from ..models import huggingface

    return huggingface.resolve(name)


async def _local(
    settings: ChatSettings,
    sampling: EvalSamplingConfig,
    model: Candidate,
    options: Mapping[str, Any],
    open_things: AsyncExitStack,
    make_engine: Callable[[EngineConfig], Engine],
) -> Speaker:
    """Load a model of this machine."""
    engine = EngineConfig(
        dtype="bfloat16" if usable() else "float32",
        max_batch=1,
        max_model_len=min(position_count(model.model_dir) or LONGEST, LONGEST),
    )
    loader = PolicyLoader(engine, sampling, model.model_dir, open_things, make_engine)
    variables = dated(options, model.model_dir, today())
    chat = await asyncio.to_thread(ChatFormat.load, model.model_dir, defaults=variables)
    make = partial(_environment, settings, sampling, model.model_dir)
    environments = StartedEnvironments(make, open_things)
    return Speaker(model.name, await loader.policy(model), chat, environments)


def _environment(
    settings: ChatSettings,
    sampling: EvalSamplingConfig,
    model_dir: Path,
    config: EvaluatedEnvironment,
) -> Environment:
    variables = dated(config.chat_template_kwargs, model_dir, today())
    return make_environment(
        config.model_copy(update={"chat_template_kwargs": variables}),
        model_dir,
        settings.seed,
        sampling.max_tokens,
        sampling.temperature,
        sandbox=choose(SandboxConfig()),
    )


async def _remote(
    settings: ChatSettings,
    sampling: EvalSamplingConfig,
    environ: Mapping[str, str],
    open_things: AsyncExitStack,
) -> Speaker:
    """Connect to an API, and take the first model that it lists."""
    try:
        url = check_url(settings.url)
    except ValueError as error:
        raise UsageError(f"--url: {error}") from error
    config = EndpointConfig(url=url, model="", key_variable=settings.key_variable, retries=RETRIES)
    key = read_key(config, environ)
    try:
        async with open_api(config, key) as api:
            names = await api.models()
    except (ApiUnavailable, PlayFailed) as error:
        raise NetworkError(f"the API at {config.url} does not work: {error}") from None
    if not names:
        raise NodeError(f"the API at {config.url} serves no model")
    named = config.model_copy(update={"model": names[0]})
    policy = await open_things.enter_async_context(
        open_endpoint(named, sampling, sampling.max_tokens, key)
    )

    def environment(played: EvaluatedEnvironment) -> Environment:
        return make_text_environment(
            played, settings.seed, sampling.temperature, sandbox=choose(SandboxConfig())
        )

    environments = StartedEnvironments(environment, open_things)
    return Speaker(names[0], policy, Transcript(), environments)
