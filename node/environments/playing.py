"""Play a taskset of `verifiers`; besides the bundled tasksets only this file imports the library.

A model is called through the node alone: no harness program, no interception server, no HTTP (which cost
5.4 ms of CPU a rollout). Two ways, and the same episode from both:

- a plain taskset (no Env of its own, no hooks on single requests) takes the short way, 0.35 ms: a Trace
  made of the library's public types, over which its own stops, hooks and Task.score() run;
- any other goes through the library's Env.run, Agent and Rollout, 1.7 ms a turn, with a harness that calls
  the policy and a runtime that runs no commands.

Tasksets with tool servers or containers are refused: a node runs no commands for a stranger.
"""

import asyncio
import importlib
import math
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1 import tasksets as library_tasksets
from verifiers.v1.clients import base as library_clients
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.errors import boundary
from verifiers.v1.interception import Interception
from verifiers.v1.runtimes import NetworkPolicyConfig, SubprocessRuntimeInfo
from verifiers.v1.session import RolloutLimits, RolloutSession, hook_boundary
from verifiers.v1.state import state_cls
from verifiers.v1.types import content_text
from verifiers.v1.utils import loaders
from verifiers.v1.utils.decorators import discover_decorated, invoke
from verifiers.v1.utils.generic import concrete_type

from ..config.run import EnvironmentConfig
from ..inference.engine import Completion
from .allowed import BUNDLED
from .chat import Chat
from .environment import AgentScore, Branch, EnvironmentFailed, Episode, Score, Split
from .policies import Exchange, JudgeRefused, PlayFailed, episode_judge
from .taskset import TaskIndex, load_tasksets


def check_trace(trace: Any) -> None:
    """Raise PlayFailed if a trace failed, or is not of the policy that is trained."""
    if not trace.ok or trace.is_timeout:
        last = trace.last_error
        raise PlayFailed(trace.stop_condition if last is None else f"{last.type}: {last.message}")
    if not trace.agent.trainable:
        raise PlayFailed(
            f"agent {trace.agent.name!r} is not to be trained: all agents of an episode are the policy here"
        )


def trace_branches(trace: Any, completions: Mapping[int, Completion]) -> list[Branch]:
    """The trace's root-to-leaf paths that hold a turn; `completions` by id() of the sampled node.
    Raises PlayFailed if there is none."""
    found: list[Branch] = []
    for it in trace.branches:
        turns = [completions[id(node)] for node in it.nodes if node.sampled]
        if turns:
            found.append(Branch.of_turns(it.token_ids, it.sampled_mask, it.logprobs, turns))
    if not found:
        raise PlayFailed(f"the rollout ended without a turn: {trace.stop_condition}")
    return found


def joined_score(traces: Sequence[Any], branches: Sequence[int]) -> Score:
    """The score of an episode of several agents, whose traces have so many branches each. Raises PlayFailed.

    Metrics are AGENT/NAME, means over the traces of an agent.
    """
    scores = [score(trace) for trace in traces]
    names = [trace.agent.name for trace in traces]
    found: dict[str, list[float]] = {}
    for name, one in zip(names, scores, strict=True):
        for metric, value in {"reward": one.reward, **one.metrics}.items():
            found.setdefault(f"{name}/{metric}", []).append(value)
    return Score(
        reward=math.fsum(one.reward for one in scores) / len(scores),
        metrics={name: math.fsum(values) / len(values) for name, values in found.items()},
        agents=tuple(
            AgentScore(name, one.reward, count)
            for name, one, count in zip(names, scores, branches, strict=True)
        ),
    )


def score(trace: Any) -> Score:
    """The weighted sum of the rewards; each reward stands by name among the metrics, unweighted.
    Raises PlayFailed where one is NaN or infinite."""
    named: dict[str, float] = {
        name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None
    }
    named |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    total = float(trace.reward)
    if not all(map(math.isfinite, [total, *named.values()])):
        raise PlayFailed("a reward or metric is not a finite number: mend the taskset")
    return Score(reward=total, metrics=named)


# The library's classes are generic over types that only a taskset knows.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false


@dataclass(frozen=True)
class PreparedTask:
    """What all rollouts of one task share."""

    task: vf.Task
    digest: bytes
    record: vf.TraceTask
    state: type[vf.State]
    messages: list[Any]
    prompt: tuple[int, ...]
    stops: list[Callable[..., Any]]
    answer: str | None
    """A good first reply, where the data has one: its `first_reply` or, in a plain taskset, its `answer`."""


class TasksetPlayer:
    """One taskset, ready to be played; made by open_player()."""

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        chat: Chat,
        tasks: TaskIndex,
        env: vf.Env | None,
        agent: vf.AgentConfig,
        scores: bool,
    ) -> None:
        """Without `scores` rollouts are played, and their rewards left to others: each is 0."""
        self._config = config
        self._scores = scores
        self._chat = chat
        self._tasks = tasks
        self._env = env
        self._agent = agent
        self._info = vf.AgentInfo(config=agent)
        self._context = vf.ModelContext(model="policy", client=vf.EvalClientConfig())
        self._limits = RolloutLimits(max_turns=config.max_turns)
        self._network = NetworkPolicyConfig()
        self._box = NoCommands()

    async def start(self) -> None:
        """Start what the taskset's Env shares between episodes."""
        if self._env is not None:
            await self._env.start()

    async def close(self) -> None:
        """Stop what the taskset's Env shares."""
        if self._env is not None:
            await self._env.stop()

    @property
    def progress(self) -> str:
        """How far a walk to a task has come; empty while there is none."""
        return self._tasks.progress

    async def load(self, index: int, split: Split) -> PreparedTask:
        """Task number `index` of `split`, its prompt tokenised. Raises EnvironmentFailed."""
        task: vf.Task = await self._tasks.get(index, split)
        data, content = task.data, task.hash
        if not self._scores:
            task = task.defer_scoring()
        if data.image or data.agent_user or data.skills or data.network_block:
            raise EnvironmentFailed(f"task {index} wants a container: use another taskset")
        if data.prompt is None and self._env is None:
            raise EnvironmentFailed(f"task {index} has no prompt: mend the taskset")
        messages = [] if data.prompt is None else _messages(data.system_prompt, data.prompt)
        shown = "answer" if self._env is None else "first_reply"
        answer = getattr(data, shown, None)
        return PreparedTask(
            task=task,
            digest=bytes.fromhex(content),
            record=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=content),
            state=state_cls(type(task)),
            messages=messages,
            prompt=tuple(self._chat.prompt(_wire(messages))) if messages else (),
            stops=task.hooks("stop"),
            answer=answer if isinstance(answer, str) else None,
        )

    async def play(self, prepared: PreparedTask, exchange: Exchange) -> Episode:
        """One rollout. Raises PlayFailed, and what the policy raised."""
        try:
            if self._env is None:
                return await self._play_plain(prepared, exchange)
            return await self._play_env(self._env, prepared, exchange)
        except vf.RolloutError as error:
            exchange.check()
            raise PlayFailed(f"{type(error).__name__}: {error}") from error

    async def _play_plain(self, prepared: PreparedTask, exchange: Exchange) -> Episode:
        """One turn, in the order of the library's Rollout."""
        task, prompt = prepared.task, prepared.prompt
        trace = vf.Trace(task=prepared.record, state=prepared.state(), agent=self._info)
        at_hand: dict[str | type, Any] = {"trace": trace, "runtime": self._box}
        if type(task).setup is not vf.Task.setup:
            async with boundary(vf.TaskError, "task setup"):
                await invoke(task.setup, at_hand)
        session = RolloutSession(self._context, trace, self._network, prepared.stops, self._limits)
        if (stop := await session.refused()) is not None:
            raise PlayFailed(f"the taskset's @stop {stop} ends the rollout before its first turn")
        started = time.time()
        completion = await exchange.sample(prompt)
        reply = self._record(trace, prepared, completion, started)
        trace.stop("agent_completed")
        if type(task).finalize is not vf.Task.finalize:
            async with boundary(vf.TaskError, "task finalize"):
                await invoke(task.finalize, at_hand)
        await task.score(trace, self._box)
        logprobs = [0.0] * len(prompt) + completion.logprobs
        sequence = Branch.of_turns(reply.token_ids, reply.mask, logprobs, [completion])
        return Episode(branches=[sequence], score=score(trace))

    def _record(
        self, trace: vf.Trace, prepared: PreparedTask, completion: Completion, started: float
    ) -> vf.MessageNode:
        """Add the one turn to the trace, as graph.prepare_turn().commit() would (which spends 0.5 ms
        in pydantic's model_construct). Returns the reply's node."""
        for parent, message in enumerate(prepared.messages, start=-1):
            node = vf.MessageNode(parent=None if parent < 0 else parent, message=message)
            trace.nodes.append(node)
        reply = vf.MessageNode(
            parent=len(trace.nodes) - 1,
            message=_say(self._chat, completion),
            sampled=True,
            token_ids=[*prepared.prompt, *completion.token_ids],
            mask=[False] * len(prepared.prompt) + [True] * len(completion.token_ids),
            logprobs=completion.logprobs,
        )
        trace.nodes.append(reply)
        trace.calls.append(_call(prepared.prompt, completion, len(trace.nodes) - 1, started))
        return reply

    async def _play_env(self, env: vf.Env, prepared: PreparedTask, exchange: Exchange) -> Episode:
        """The library's own way, from Env.run down to Rollout."""
        harness = PolicyHarness(self._chat, exchange)
        episode = vf.Episode(task=prepared.record)
        placement = {"runtime": self._box, "on_trace": episode.traces.append}

        one_at_a_time = asyncio.Semaphore(1)  # so that the order of turns does not depend on time

        def sit(name: str, agent: vf.AgentConfig) -> vf.Agent:
            limit = min(self._config.max_turns, agent.max_turns or self._config.max_turns)
            config = self._agent.model_copy(update={"max_turns": limit})
            return BorrowingAgent(config, harness, placement, name, one_at_a_time)

        agents = vf.Agents(env.config, sit)
        async with boundary(vf.EnvError, type(env).__name__):
            await env.setup(agents)
            await env.run(prepared.task, agents)
            await env.finalize(prepared.task, episode)
        exchange.check()
        if not episode.traces:
            raise PlayFailed("no agent played: mend the environment's run()")
        for trace in episode.traces:
            check_trace(trace)
        several = len(episode.traces) > 1 or len(agent_config_fields(env.config)) > 1
        if not several:
            (trace,) = episode.traces
            return Episode(trace_branches(trace, harness.completions), score(trace))
        traces = sorted(filter(harness.spoke, episode.traces), key=harness.first_turn)
        if not traces:
            raise PlayFailed("no agent took a turn: mend the environment's run()")
        found = [trace_branches(trace, harness.completions) for trace in traces]
        branches = [branch for one in found for branch in one]
        total = joined_score(traces, list(map(len, found)))
        turns = tuple(numbers for trace in traces for numbers in harness.numbers(trace))
        return Episode(branches=branches, score=replace(total, turns=turns))


# -- the library's parts, played in process -------------------------------------------------------


class NoCommands(vf.Runtime):
    """The box that hooks get as `runtime`: it exists, and refuses everything."""

    def __init__(self) -> None:
        super().__init__("in-process")
        self.config = vf.SubprocessConfig()
        self.info = SubprocessRuntimeInfo()

    async def start(self) -> None:
        """Nothing to start."""

    async def run(self, *_: object, **__: object) -> vf.ProgramResult:
        """Refused, like reading and writing files."""
        raise vf.SandboxError("a node runs no commands: use a taskset that scores in Python")

    write = _read = run  # type: ignore[assignment]


class JudgeTransport(httpx.AsyncBaseTransport):
    """Takes what an OpenAI client would send over the network to the judge of the episode."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a chat completion; 422 with the reason where the judge refuses it."""
        ask = episode_judge.get()
        if ask is None:
            raise httpx.ConnectError("a judge is asked by rewards alone", request=request)
        if not request.url.path.endswith("/chat/completions"):
            raise httpx.ConnectError("a judge answers chat completions alone", request=request)
        try:
            answer = await ask(await request.aread())
        except JudgeRefused as error:
            return httpx.Response(422, json={"error": {"message": str(error)}}, request=request)
        headers = {"content-type": "application/json"}
        return httpx.Response(200, headers=headers, content=answer, request=request)


def judge_client(_: object) -> httpx.AsyncClient:
    """In place of the library's client of an endpoint: whatever that is, the run's judge answers."""
    return httpx.AsyncClient(transport=JudgeTransport(), timeout=None)


class PolicyHarness(vf.Harness[vf.HarnessConfig], Interception):
    """An episode's harness and its interception in one: a model call is a call of the policy."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, chat: Chat, exchange: Exchange) -> None:
        vf.Harness.__init__(self, vf.HarnessConfig.model_validate({"id": "null"}))
        Interception.__init__(self)
        self._chat = chat
        self._exchange = exchange
        self._sessions: dict[str, RolloutSession] = {}
        self.completions: dict[int, Completion] = {}
        """id() of a sampled node, which its trace keeps alive -> what was sampled."""
        self._turns: dict[int, int] = {}
        """id() of a sampled node -> number of its turn in the episode."""

    def spoke(self, trace: Any) -> bool:
        """Whether the policy was sampled for a trace."""
        return any(node.sampled for node in trace.nodes)

    def first_turn(self, trace: Any) -> int:
        """Number of a trace's first turn in the episode; it has one."""
        return min(self._turns[id(node)] for node in trace.nodes if node.sampled)

    def numbers(self, trace: Any) -> list[tuple[int, ...]]:
        """Numbers of the turns of each of a trace's branches, in order."""
        paths = [[node for node in one.nodes if node.sampled] for one in trace.branches]
        return [tuple(self._turns[id(node)] for node in path) for path in paths if path]

    async def start(self) -> None:
        """Nothing listens."""

    @asynccontextmanager
    async def acquire(self, session: RolloutSession) -> AsyncGenerator[tuple[str, str, str]]:
        """Hold a rollout's session under its trace id while it runs."""
        self._sessions[session.trace.id] = session
        try:
            yield "in-process", session.trace.id, ""
        finally:
            del self._sessions[session.trace.id]
            session.release()

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """One segment: the conversation so far in, one reply onto the trace."""
        system, prompt = self.resolve_prompt(data)
        answered = await self._turn(self._sessions[secret], _messages(system, prompt or []))
        return vf.ProgramResult(0 if answered else 1, "", "")

    async def _turn(self, session: RolloutSession, messages: list[Any]) -> bool:
        """One model call, in the order of the library's server; False if something refused it."""
        trace = session.trace
        if session.stopped or await session.refused() is not None:
            return False
        request, rewrites, stop = await session.rewrite_request(vf.Request(messages=messages))
        trace.request_rewrites.extend(rewrites)
        if stop is not None:
            trace.stop(stop)
            return False
        turn = graph.prepare_turn(trace, request.messages)
        prompt, started = self._prompt(turn), time.time()
        number = self._exchange.turns
        completion = await self._exchange.sample(prompt)
        tokens = vf.TurnTokens(
            prompt_ids=prompt,
            completion_ids=completion.token_ids,
            completion_logprobs=completion.logprobs,
        )
        response = vf.Response(
            id="",
            created=0,
            model="policy",
            message=_say(self._chat, completion),
            finish_reason=completion.finish,
            tokens=tokens,
        )
        _, rewrites, stop = await session.rewrite_response(response)
        if rewrites:
            raise ValueError("an @intercept rewrote a reply: tokens and text would disagree")
        node = turn.commit(response)
        session.consume_prepared(turn.tail)
        self.completions[id(trace.nodes[node])] = completion
        self._turns[id(trace.nodes[node])] = number
        trace.calls.append(_call(prompt, completion, node, started))
        if stop is not None:
            trace.stop(stop)
        return True

    def _prompt(self, turn: graph.PendingTurn) -> list[int]:
        """The conversation's token ids; after a reply they extend those of the turn before."""
        before = turn.previous_renderer_token_ids()
        if before is None or any(message.role == "assistant" for message in turn.tail):
            return self._chat.prompt(_wire(turn.prompt))
        return [*before[0], *before[1], *self._chat.continuation(_wire(turn.tail), before[1][-1])]


class BorrowingAgent(vf.Agent):
    """An agent whose rollouts borrow the box without commands and note their traces in a list."""

    def __init__(
        self,
        config: vf.AgentConfig,
        harness: PolicyHarness,
        placement: dict[str, Any],
        name: str,
        gate: asyncio.Semaphore,
    ) -> None:
        """`placement` is what every rollout gets: the runtime, and who notes its trace.

        `name` is the agent's in the environment; `gate` is held while it is active, as the library's
        `max_concurrent_agents` has it, but not between the turns of an interaction.
        """
        super().__init__(config, interception=harness)
        self.harness = harness
        self._name = name
        self._one_at_a_time = self._gate = gate
        self._placement: dict[str, Any] = {**placement, "on_trace": self._note}
        self._on_trace: Callable[[vf.Trace], None] = placement["on_trace"]

    def _note(self, trace: vf.Trace) -> None:
        """Stamp a trace that begins, as the library's own agents of an episode do."""
        trace.agent.name, trace.agent.trainable = self._name, self.trainable
        self._on_trace(trace)

    async def run(self, task: vf.Task, **options: Any) -> vf.Trace:
        """A whole rollout."""
        async with self._one_at_a_time:
            return await super().run(task, **{**options, **self._placement})

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **options: Any) -> AsyncGenerator[vf.Interaction]:
        """A rollout held open, turn by turn."""
        async with super().interaction(task, **{**options, **self._placement}) as interaction:
            yield interaction


# -- loading --------------------------------------------------------------------------------------


def open_player(
    config: EnvironmentConfig,
    *,
    chat: Chat,
    seed: int,
    max_tokens: int,
    temperature: float,
    scores: bool,
) -> TasksetPlayer:
    """Find the taskset and how to play it. Raises EnvironmentFailed."""
    if config.judge is not None:
        # vf.Judge has no hook for a client of ours; all clients of the library are made by this function
        library_clients.build_async_httpx = judge_client
    tasksets = load_tasksets(config, seed, _find)
    agent = vf.AgentConfig(
        model="policy",
        harness=vf.HarnessConfig.model_validate({"id": "null"}),
        runtime=vf.SubprocessConfig(),
        client=vf.EvalClientConfig(),
        sampling=vf.SamplingConfig(temperature=temperature, max_tokens=max_tokens),
        max_turns=config.max_turns,
    )
    tasks = TaskIndex(tasksets, dealt="eval" not in tasksets)
    env = _load_env(config.id, tasksets["train"])
    return TasksetPlayer(config, chat=chat, tasks=tasks, env=env, agent=agent, scores=scores)


def _load_env(name: str, taskset: vf.Taskset) -> vf.Env | None:
    """The taskset's own Env; None where the short way plays it. Raises EnvironmentFailed."""
    kind = loaders.environment_class(name)
    if kind is vf.SingleAgentEnv and not _hooks_requests(type(taskset).task_type()):
        return None
    config = loaders.resolve_env_config({"taskset": taskset.config.model_dump()})
    env = loaders.load_environment(config)
    for agent, seat in agent_config_fields(env.config).items():
        if seat.model is not None:
            raise EnvironmentFailed(
                f"agent {agent!r} of {name!r} is another model ({seat.model}): only the policy plays here"
            )
    return env


def _find(name: str) -> tuple[type[vf.Taskset], type[vf.TasksetConfig]]:
    if name in BUNDLED:
        # the library looks for a taskset, and for its Env, among its own first: bundled ones are there, too
        module = importlib.import_module(f".tasksets.{BUNDLED[name]}", __package__)
        sys.modules[f"{library_tasksets.__name__}.{name.replace('-', '_')}"] = module
    kind = loaders.taskset_class(name)
    return kind, concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig


def _hooks_requests(task: type[vf.Task]) -> bool:
    """Whether the task has @intercept hooks or stops on single requests and responses."""
    blank = object.__new__(task)
    stops = discover_decorated(blank, "stop")
    on_trace = all(hook_boundary(stop, allow_trace=True) is vf.Trace for stop in stops)
    return not on_trace or bool(discover_decorated(blank, "intercept"))


# -- between the library's types and ours ---------------------------------------------------------


def _messages(system: str | None, prompt: str | Sequence[Any]) -> list[Any]:
    opening = [] if system is None else [vf.SystemMessage(content=system)]
    return [*opening, *([vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt)]


def _wire(messages: Sequence[Any]) -> list[dict[str, str]]:
    return [{"role": it.role, "content": content_text(it.content or "")} for it in messages]


def _say(chat: Chat, completion: Completion) -> vf.AssistantMessage:
    return vf.AssistantMessage(content=chat.text(completion.token_ids) or None)


def _call(prompt: Sequence[int], completion: Completion, node: int, started: float) -> vf.ModelCall:
    return vf.ModelCall(
        node=node,
        model="policy",
        finish_reason=completion.finish,
        usage=vf.Usage(prompt_tokens=len(prompt), completion_tokens=len(completion.token_ids)),
        time=vf.TimeSpan(start=started, end=time.time()),
    )
