"""Play tasksets of `verifiers`, imported only here, in tools.py and in the tasksets.

Model calls go through the node only: no harness program, no interception server, no HTTP (which took 5.4 ms of
CPU per rollout). Two paths give the same episode:

- a plain taskset (no Env of its own, no hooks on single requests) takes the short path, 0.35 ms: a Trace made
  of the library's public types, on which the task's stops, hooks and Task.score() run;
- any other goes through the library's Env.run, Agent and Rollout, 1.7 ms a turn, with a harness that calls the
  policy and the tools (tools.py), and a runtime that runs no commands.

Tasksets with containers are refused: a node runs no commands for strangers.
"""

import asyncio
import copy
import functools
import hashlib
import importlib
import inspect
import json
import math
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import httpx
import verifiers.v1 as vf
from pydantic.fields import FieldInfo
from verifiers.v1 import graph
from verifiers.v1 import task as library_task
from verifiers.v1 import tasksets as library_tasksets
from verifiers.v1.clients import base as library_clients
from verifiers.v1.clients.train import response_from_generate, tool_to_wire
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
from .marks import reply_with_call
from .policies import Exchange, JudgeRefused, PlayFailed, episode_judge
from .taskset import TaskIndex, load_tasksets, task_content

if TYPE_CHECKING:
    from .tools import CallParser, Toolbox


def check_trace(trace: Any) -> None:
    """Raise PlayFailed if a trace failed, or its agent is not to be trained."""
    if not trace.ok or trace.is_timeout:
        last = trace.last_error
        raise PlayFailed(trace.stop_condition if last is None else f"{last.type}: {last.message}")
    if not trace.agent.trainable:
        raise PlayFailed(
            f"agent {trace.agent.name!r} is not to be trained: all agents of an episode are the policy here"
        )


def trace_branches(trace: Any, completions: Mapping[int, Completion]) -> list[Branch]:
    """Return a trace's root-to-leaf paths that hold a turn.

    `completions`: by id() of the sampled node. Raises PlayFailed if there is no such path.
    """
    branches: list[Branch] = []
    for branch in trace.branches:
        turns = [completions[id(node)] for node in branch.nodes if node.sampled]
        if turns:
            branches.append(
                Branch.of_turns(branch.token_ids, branch.sampled_mask, branch.logprobs, turns)
            )
    if not branches:
        raise PlayFailed(f"the rollout ended without a turn: {trace.stop_condition}")
    return branches


def joined_score(traces: Sequence[Any], branches: Sequence[int]) -> Score:
    """Join the scores of several agents' traces. Raises PlayFailed.

    `branches` has the number of branches of each trace. Metrics are AGENT/NAME, means over the traces of an
    agent.
    """
    scores = [score(trace) for trace in traces]
    names = [trace.agent.name for trace in traces]
    values_by_name: dict[str, list[float]] = {}
    for name, agent_score in zip(names, scores, strict=True):
        for metric, value in {"reward": agent_score.reward, **agent_score.metrics}.items():
            values_by_name.setdefault(f"{name}/{metric}", []).append(value)
    return Score(
        reward=math.fsum(agent_score.reward for agent_score in scores) / len(scores),
        metrics={name: math.fsum(values) / len(values) for name, values in values_by_name.items()},
        agents=tuple(
            AgentScore(name, agent_score.reward, count)
            for name, agent_score, count in zip(names, scores, branches, strict=True)
        ),
    )


def score(trace: Any) -> Score:
    """Return a trace's weighted sum of rewards, with metrics.

    The metrics include each reward, unweighted, and the number of tool calls if there are tools. A metric that
    has a reward's name is `metric/NAME`. Raises PlayFailed if one of them is NaN or infinite.
    """
    named: dict[str, float] = {
        name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None
    }
    for name, value in trace.metrics.items():
        if value is not None:
            named[f"metric/{name}" if name in trace.rewards else name] = float(value)
    if trace.tools:
        replies = [node.message for node in trace.nodes if node.sampled]
        named.setdefault(CALLS, float(sum(len(reply.tool_calls or ()) for reply in replies)))
    total = float(trace.reward)
    for name, value in {**named, "reward": total}.items():
        if not math.isfinite(value):
            raise PlayFailed(f"{name!r} of the rewards and metrics is not a finite number: mend it")
    return Score(reward=total, metrics=named)


async def call_scores(
    hooks: Sequence[Callable[..., Any]], at_hand: dict[str | type, Any]
) -> list[Any]:
    """Call rewards, metrics or judges at once, in place of the library's invoke_all().

    Raises TaskError that names the one that failed: without it none of them has a score, and the library
    names none. So does a result that is no number, and a reward or judge under the name of another.
    """
    results = await asyncio.gather(*(_call_score(hook, at_hand) for hook in hooks))
    # judges come after the rewards, which have their scores by then
    scored = at_hand["trace"].rewards if "trace" in at_hand else {}
    judged = {str(key): "a reward" for key, score in scored.items() if score is not None}
    rewarded: dict[str, str] = {}
    for hook, result in zip(hooks, results, strict=True):
        if hasattr(hook, "metric"):
            continue
        name = _hook_name(hook)
        givers = rewarded if hasattr(hook, "reward") else judged
        alone = getattr(getattr(hook, "__self__", None), "reward_name", hook.__name__)
        for key in map(str, result if isinstance(result, Mapping) else (alone,)):
            if givers.setdefault(key, name) != name:
                raise vf.TaskError(f"{givers[key]} and {name} both give a score {key!r}")
    return list(results)


async def _call_score(hook: Callable[..., Any], at_hand: dict[str | type, Any]) -> Any:
    try:
        result = await invoke(hook, at_hand)
        for value in result.values() if isinstance(result, Mapping) else (result,):
            float(value)
    except Exception as error:  # a stranger's code, which may raise anything
        name = _hook_name(hook)
        raise vf.TaskError(f"{name} has no score: {type(error).__name__}: {error}") from error
    return result


def _hook_name(hook: Callable[..., Any]) -> str:
    for kind in ("reward", "metric"):
        if hasattr(hook, kind):
            return f"{kind} {hook.__name__!r}"
    return f"judge {getattr(getattr(hook, '__self__', None), 'reward_name', hook.__name__)!r}"


CALLS = "tool_calls"
"""Name of the metric of tool calls."""

# The library's classes are generic over types that only a taskset knows.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false


@dataclass(frozen=True)
class PreparedTask:
    """Data shared by all rollouts of one task."""

    task: vf.Task
    digest: bytes
    content: bytes
    """Digest of its data without its number."""
    place: int
    """Number in its split."""
    record: vf.TraceTask
    state: type[vf.State]
    messages: list[Any]
    prompt: tuple[int, ...]
    stops: list[Callable[..., Any]]
    replies: tuple[str, ...]
    """Correct replies, if the data has them: all `replies` of a conversation, else its `first_reply`, or the
    `answer` to a single question."""
    whole: bool
    """Whether the replies are a whole conversation."""


class TasksetPlayer:
    """One taskset, ready to be played; made by open_player()."""

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        chat: Chat,
        tasks: TaskIndex,
        taskset: vf.Taskset,
        env: vf.Env | None,
        agent: vf.AgentConfig,
        calls: "CallParser | None",
        scores: bool,
    ) -> None:
        """Keep the parts; `env` is None for a plain taskset, `calls` for one without tools.

        Without `scores` rollouts are played but not scored: each reward is 0.
        """
        self._config = config
        self._scores = scores
        self._chat = chat
        self._tasks = tasks
        self._taskset = taskset
        self._env = env
        self._agent = agent
        self._calls = calls
        self._shared: Toolbox | None = None
        """Tools of the whole taskset."""
        self._stack = AsyncExitStack()
        self._info = vf.AgentInfo(config=agent)
        self._context = vf.ModelContext(model="policy", client=vf.EvalClientConfig())
        self._limits = RolloutLimits(max_turns=config.max_turns)
        self._network = NetworkPolicyConfig()
        self._box = NoCommands()

    async def start(self) -> None:
        """Start the resources that episodes share. Raises EnvironmentFailed.

        TemplateFault if the model would not hear of a tool's result, of a second turn, or of earlier replies.
        """
        self._check_template()
        if self._calls is not None:
            from .tools import opened

            toolsets = self._taskset.toolsets(self._taskset.config)
            self._shared = await self._stack.enter_async_context(opened(toolsets))
        if self._env is not None:
            await self._env.start()

    def _check_template(self) -> None:
        """Make the prompts of later turns that the environment may come to. Raises EnvironmentFailed."""
        user, call = {"role": "user", "content": "a"}, reply_with_call("b", "c")
        number = call["tool_calls"][0]["id"]
        result = {"role": "tool", "content": "a", "name": "b", "tool_call_id": number}
        several = self._env is not None and type(self._env) is not vf.SingleAgentEnv
        history: list[dict[str, Any]] = [user]
        for needed, reply, message in (
            (self._calls is not None, call, result),
            (several, {"role": "assistant", "content": "a"}, user),
        ):
            if needed:
                self._chat.continuation([message], self._chat.stop_token_ids[0])
                history += [reply, message]
        if self._config.earlier_reasoning != "keep" and len(history) > 1:
            self._chat.prompt(history)

    async def close(self) -> None:
        """Stop the resources that episodes share."""
        if self._env is not None:
            await self._env.stop()
        await self._stack.aclose()

    @asynccontextmanager
    async def toolbox(self, task: vf.Task) -> "AsyncGenerator[Toolbox]":
        """Open the tools of a task, and its taskset's."""
        from .tools import opened

        toolsets = task.toolsets(task.config)
        async with opened(toolsets, beside=self._shared, task=task.data) as box:
            yield box

    @property
    def progress(self) -> str:
        """Progress of the iteration to a task; empty if there is none."""
        return self._tasks.progress

    async def load(self, index: int, split: Split) -> PreparedTask:
        """Prepare task number `index` of `split`; tokenise its prompt. Raises EnvironmentFailed."""
        task: vf.Task = await self._tasks.get(index, split)
        data, content = task.data, task.hash
        if not self._scores:
            task = task.defer_scoring()
        _keep_signatures(task)
        if data.image or data.agent_user or data.skills or data.network_block:
            raise EnvironmentFailed(f"task {index} wants a container: use another taskset")
        if data.prompt is None and self._env is None:
            raise EnvironmentFailed(f"task {index} has no prompt: mend the taskset")
        messages = [] if data.prompt is None else _messages(data.system_prompt, data.prompt)
        replies: Sequence[Any] = getattr(data, "replies", None) or ()
        if not replies:
            first = getattr(data, "answer" if self._env is None else "first_reply", None)
            replies = [] if first is None else [first]
        tools, identity = [], bytes.fromhex(content)
        if self._calls is not None:
            async with self.toolbox(task) as box:
                tools = [tool_to_wire(tool) for tool in box.schemas]
            # the tools' schemas are as much a part of the task as its prompt
            shown = json.dumps(tools, sort_keys=True).encode()
            identity = hashlib.sha256(identity + shown).digest()
        return PreparedTask(
            task=task,
            digest=identity,
            content=hashlib.sha256(task_content(task)).digest(),
            place=self._tasks.place(index, split),
            record=vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=content),
            state=state_cls(type(task)),
            messages=messages,
            prompt=tuple(self._chat.prompt(_wire(messages), tools)) if messages else (),
            stops=task.hooks("stop"),
            replies=tuple(reply for reply in replies if isinstance(reply, str)),
            whole=bool(getattr(data, "replies", None)),
        )

    async def play(
        self, prepared: PreparedTask, exchange: Exchange, *, one_branch: bool = False
    ) -> Episode:
        """Play one rollout. Raises PlayFailed, and the errors of the policy.

        With `one_branch` earlier reasoning is kept whatever the config says.
        """
        try:
            if self._env is None:
                return await self._play_plain(prepared, exchange)
            reasoning = "keep" if one_branch else self._config.earlier_reasoning
            return await self._play_env(self._env, prepared, exchange, reasoning)
        except vf.RolloutError as error:
            exchange.check()
            raise PlayFailed(f"{type(error).__name__}: {error}") from error

    async def _play_plain(self, prepared: PreparedTask, exchange: Exchange) -> Episode:
        """Play one turn, in the order of the library's Rollout."""
        task, prompt = prepared.task, prepared.prompt
        trace = vf.Trace(task=prepared.record, state=prepared.state(), agent=self._info)
        at_hand: dict[str | type, Any] = {"trace": trace, "runtime": self._box}
        if type(task).setup is not vf.Task.setup:
            async with boundary(vf.TaskError, "task setup"):
                await invoke(task.setup, at_hand)
        if prepared.stops:  # a limit refuses no first turn
            session = RolloutSession(
                self._context, trace, self._network, prepared.stops, self._limits
            )
            if (stop := await session.refused()) is not None:
                raise PlayFailed(
                    f"the taskset's @stop {stop} ends the rollout before its first turn"
                )
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
        """Add the turn to the trace and return the reply's node.

        Does the same as graph.prepare_turn().commit(), which spends 0.5 ms in pydantic's model_construct.
        """
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

    async def _play_env(
        self, env: vf.Env, prepared: PreparedTask, exchange: Exchange, reasoning: str
    ) -> Episode:
        """Play an episode by the library's code, from Env.run down to Rollout."""
        harness = PolicyHarness(self._chat, exchange, self._calls, reasoning, prepared)
        episode = vf.Episode(task=prepared.record)
        placement = {"runtime": self._box, "on_trace": episode.traces.append}
        toolbox = self.toolbox if self._calls is not None else None

        one_at_a_time = asyncio.Semaphore(1)  # so that the order of turns does not depend on timing

        def sit(name: str, agent: vf.AgentConfig) -> vf.Agent:
            limit = min(self._config.max_turns, agent.max_turns or self._config.max_turns)
            config = self._agent.model_copy(update={"max_turns": limit})
            return BorrowingAgent(config, harness, placement, name, one_at_a_time, toolbox)

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
        branches_by_trace = [trace_branches(trace, harness.completions) for trace in traces]
        branches = [branch for of_trace in branches_by_trace for branch in of_trace]
        total = joined_score(traces, list(map(len, branches_by_trace)))
        turns = tuple(numbers for trace in traces for numbers in harness.numbers(trace))
        return Episode(branches=branches, score=replace(total, turns=turns))


def _keep_signatures(task: vf.Task) -> None:
    """Attach the signatures of a task's functions to them, as `inspect` allows.

    The library asks for them at every rollout, which took a sixth of the time of scoring one.
    """
    for hook in (*task.hooks("metric"), *task.hooks("reward"), *task.hooks("stop")):
        function = getattr(hook, "__func__", hook)
        if not hasattr(function, "__signature__"):
            with suppress(AttributeError, TypeError, ValueError):  # not every callable takes one
                function.__signature__ = inspect.signature(function)


# -- the library's parts, played in process -------------------------------------------------------


class NoCommands(vf.Runtime):
    """Runtime for hooks; refuses all commands and file access."""

    def __init__(self) -> None:
        super().__init__("in-process")
        self.config = vf.SubprocessConfig()
        self.info = SubprocessRuntimeInfo()

    async def start(self) -> None:
        """Do nothing."""

    async def run(self, *_: object, **__: object) -> vf.ProgramResult:
        """Raise SandboxError, also for reading and writing files."""
        raise vf.SandboxError("a node runs no commands: use a taskset that scores in Python")

    write = _read = run  # type: ignore[assignment]


class JudgeTransport(httpx.AsyncBaseTransport):
    """HTTP transport that passes an OpenAI client's requests to the judge of the episode."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a chat completion; status 422 with the reason if the judge refuses it."""
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
    """Make a client that sends the requests for any endpoint to the run's judge."""
    return httpx.AsyncClient(transport=JudgeTransport(), timeout=None)


class PolicyHarness(vf.Harness[vf.HarnessConfig], Interception):
    """Harness and interception of an episode: a model call is a call of the policy."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    SUPPORTS_MCP = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(
        self,
        chat: Chat,
        exchange: Exchange,
        calls: "CallParser | None",
        reasoning: str,
        prepared: PreparedTask,
    ) -> None:
        """`reasoning`: EnvironmentConfig.earlier_reasoning; `prepared` is the episode's task."""
        vf.Harness.__init__(self, vf.HarnessConfig.model_validate({"id": "null"}))
        Interception.__init__(self)
        self._chat = chat
        self._exchange = exchange
        self._calls = calls
        self._reasoning = reasoning
        self._opening, self._opening_prompt = _wire(prepared.messages), prepared.prompt
        self.tools: Toolbox | None = None
        """Tools of the current rollout."""
        self._sessions: dict[str, RolloutSession] = {}
        self.completions: dict[int, Completion] = {}
        """id() of a sampled node, which its trace keeps alive -> its completion."""
        self._turns: dict[int, int] = {}
        """id() of a sampled node -> number of its turn in the episode."""

    def spoke(self, trace: Any) -> bool:
        """Return whether the policy was sampled for a trace."""
        return any(node.sampled for node in trace.nodes)

    def first_turn(self, trace: Any) -> int:
        """Return the number of a trace's first turn in the episode; there has to be one."""
        return min(self._turns[id(node)] for node in trace.nodes if node.sampled)

    def numbers(self, trace: Any) -> list[tuple[int, ...]]:
        """Return the turn numbers of each of a trace's branches, in order."""
        paths = [[node for node in branch.nodes if node.sampled] for branch in trace.branches]
        return [tuple(self._turns[id(node)] for node in path) for path in paths if path]

    async def start(self) -> None:
        """Do nothing: there is no server."""

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
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        """Play one segment, as the library's chat program does.

        Starts from the conversation so far; adds replies and the results of their calls to the trace, until a
        reply calls no tool.
        """
        system, prompt = self.resolve_prompt(data)
        session, messages = self._sessions[secret], _messages(system, prompt or [])
        while (reply := await self._turn(session, messages)) is not None:
            if not reply.tool_calls:
                return vf.ProgramResult(0, "", "")
            messages = [*messages, reply]
            for call in reply.tool_calls:
                messages.append(await self._result(session, call))
        return vf.ProgramResult(1, "", "")

    async def _turn(
        self, session: RolloutSession, messages: list[Any]
    ) -> vf.AssistantMessage | None:
        """Make one model call, in the order of the library's server; None if it was refused."""
        trace = session.trace
        if session.stopped or await session.refused() is not None:
            return None
        tools = None if self.tools is None else self.tools.schemas
        original = vf.Request(messages=messages, tools=tools)
        request, rewrites, stop = await session.rewrite_request(original)
        trace.request_rewrites.extend(rewrites)
        if stop is not None:
            trace.stop(stop)
            return None
        turn = graph.prepare_turn(trace, request.messages, request.tools)
        prompt, started = self._prompt(turn), time.time()
        number = self._exchange.turns
        completion = await self._exchange.sample(prompt)
        response = self._response(prompt, completion)
        _, rewrites, stop = await session.rewrite_response(response)
        if rewrites:
            raise ValueError("an @intercept rewrote a reply: tokens and text would disagree")
        node = turn.commit(response)
        session.consume_prepared(turn.tail)
        self.completions[id(trace.nodes[node])] = completion
        self._turns[id(trace.nodes[node])] = number
        trace.calls.append(_call(prompt, completion, node, started))
        stop = stop or await session.gate_tool_calls(node)
        if stop is not None:
            trace.stop(stop)
        return response.message

    def _response(self, prompt: list[int], completion: Completion) -> vf.Response:
        """Convert a completion to the library's type, with tool calls parsed from the text."""
        content, calls = self._chat.text(completion.token_ids), []
        if self._calls is not None:
            content, calls = self._calls.read(content)
        return response_from_generate(
            {
                "content": content,
                "tool_calls": calls,
                "finish_reason": completion.finish,
                "prompt_ids": prompt,
                "completion_ids": completion.token_ids,
                "completion_logprobs": completion.logprobs,
            },
            "policy",
        )

    async def _result(self, session: RolloutSession, call: vf.ToolCall) -> Any:
        """Return the message that answers a tool call."""
        arguments = _arguments(call.arguments or "{}")
        decision = await session.decide_tool(call.id, call.name, arguments)
        if decision["action"] == "deny":
            return vf.ToolMessage.model_validate(decision["message"])
        if decision["action"] == "stop":
            content = ""  # never read: the next turn is refused
        elif not isinstance(arguments, dict):
            content = "error: the arguments of a call are a JSON object"
        else:
            assert self.tools is not None  # calls are parsed only if there are tools
            content = await self.tools.call(session.trace, call.name, arguments)
        return vf.ToolMessage(tool_call_id=call.id, name=call.name, content=content)

    def _prompt(self, turn: graph.PendingTurn) -> list[int]:
        """Return the conversation's token ids; after a reply they extend the previous turn's.

        Where earlier reasoning is left out they are rendered anew, and the trace begins a new branch unless
        they extend the tokens before all the same.
        """
        before = turn.previous_renderer_token_ids()
        messages, start = _wire(turn.prompt), turn.tail_start
        users = [n for n, message in enumerate(messages) if message["role"] == "user"]
        dropped = {"keep": 0, "branch": max(users, default=0), "drop": len(messages)}
        shown = [
            self._answer(message) if n < dropped[self._reasoning] else message
            for n, message in enumerate(messages)
        ]
        # replies before the last user message of the turn before are in its prompt
        first = max((n for n in users if n < start), default=0)
        anew = self._reasoning == "drop" or (
            users[-1:] >= [start] and shown[first:start] != messages[first:start]
        )
        if before is None or anew or any(message.role == "assistant" for message in turn.tail):
            if self._calls is None and not turn.tools and shown == self._opening:
                return list(self._opening_prompt)  # all rollouts of the task begin with it
            return self._chat.prompt(shown, list(map(tool_to_wire, turn.tools)))
        return [*before[0], *before[1], *self._chat.continuation(_wire(turn.tail), before[1][-1])]

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message; a reply without its reasoning."""
        if message["role"] != "assistant":
            return message
        return {**message, "content": self._chat.without_reasoning(message["content"])}


class BorrowingAgent(vf.Agent):
    """Agent whose rollouts share a runtime without commands and record their traces."""

    def __init__(
        self,
        config: vf.AgentConfig,
        harness: PolicyHarness,
        placement: dict[str, Any],
        name: str,
        gate: asyncio.Semaphore,
        toolbox: "Callable[[vf.Task], AbstractAsyncContextManager[Toolbox]] | None",
    ) -> None:
        """Take the rollouts' options in `placement`: the runtime, and the callback for traces.

        `toolbox` opens the tools of a task. `name` is the agent's in the environment; `gate` is held while it
        is active, like the library's `max_concurrent_agents`, but not between the turns of an interaction.
        """
        super().__init__(config, interception=harness)
        self.harness: PolicyHarness = harness
        self._name = name
        self._one_at_a_time = self._gate = gate
        self._placement: dict[str, Any] = {**placement, "on_trace": self._note}
        self._on_trace: Callable[[vf.Trace], None] = placement["on_trace"]
        self._toolbox = toolbox

    def _note(self, trace: vf.Trace) -> None:
        """Set the agent's fields of a new trace, as the library's agents of an episode do."""
        trace.agent.name, trace.agent.trainable = self._name, self.trainable
        self._on_trace(trace)

    async def run(self, task: vf.Task, **options: Any) -> vf.Trace:
        """Play a whole rollout."""
        async with self._one_at_a_time, self._tools(task) as own:
            return await super().run(own, **{**options, **self._placement})

    @asynccontextmanager
    async def interaction(self, task: vf.Task, **options: Any) -> AsyncGenerator[vf.Interaction]:
        """Open a rollout to be played turn by turn."""
        async with (
            self._tools(task) as own,
            super().interaction(own, **{**options, **self._placement}) as interaction,
        ):
            yield interaction

    @asynccontextmanager
    async def _tools(self, task: vf.Task) -> AsyncGenerator[vf.Task]:
        """Give the harness the task's tools; yield the task without them, so none is served."""
        if self._toolbox is None:
            yield task
            return
        own = copy.copy(task)
        own.toolsets = _no_toolsets  # pyright: ignore[reportAttributeAccessIssue]
        async with self._toolbox(task) as self.harness.tools:
            yield own


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
    """Load the taskset and choose how to play it. Raises EnvironmentFailed."""
    library_task.invoke_all = call_scores
    _inspect_factories_once()
    if config.judge is not None:
        # vf.Judge has no hook for another client; the library makes all its clients with this function
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
    tasks = TaskIndex(tasksets)
    taskset = tasksets["train"]
    calls = _call_parser(config, taskset, chat)
    env = _load_env(config.id, taskset, tools=calls is not None)
    return TasksetPlayer(
        config,
        chat=chat,
        tasks=tasks,
        taskset=taskset,
        env=env,
        agent=agent,
        calls=calls,
        scores=scores,
    )


@functools.cache
def _inspect_factories_once() -> None:
    """Have pydantic keep what it finds out about a default factory.

    It inspects the signature of each field's factory for every object that is constructed without
    validation, as the library's messages are: half the time of a rollout went there.
    """
    inspected: Any = FieldInfo.default_factory_takes_validated_data
    known: dict[Callable[..., Any], bool | None] = {}

    def takes_validated_data(field: FieldInfo) -> bool | None:
        factory: Any = field.default_factory
        if factory is None:
            return None
        try:
            return known[factory]
        except (KeyError, TypeError) as error:
            answer = inspected.fget(field)
            if isinstance(error, KeyError):  # it can be hashed
                known[factory] = answer
            return answer

    FieldInfo.default_factory_takes_validated_data = property(takes_validated_data)  # type: ignore[assignment]


def _call_parser(config: EnvironmentConfig, taskset: vf.Taskset, chat: Chat) -> "CallParser | None":
    """Make the parser of tool calls; None for a taskset without tools.

    Raises EnvironmentFailed if its tools cannot be called here, or the model's template writes no known calls.
    """
    of_tasks = type(taskset).task_type().toolsets(taskset.config.task)
    toolsets = [*taskset.toolsets(taskset.config), *of_tasks]
    if not toolsets and not config.deterministic_tools:
        raise EnvironmentFailed(
            f"{config.id!r} has no tools: remove environment.deterministic_tools = false"
        )
    if not toolsets:
        return None
    from .tools import CallParser, check_toolsets

    check_toolsets(toolsets, deterministic=config.deterministic_tools)
    form = chat.call_form if config.tool_call_parser == "auto" else config.tool_call_parser
    if not form:
        raise EnvironmentFailed(
            f"{config.id!r} has tools, and the model's chat template writes no tool calls: use another model, "
            "or set environment.tool_call_parser = 'hermes' for one that learns them"
        )
    return CallParser(form)


def _no_toolsets(_: object) -> list[vf.Toolset]:
    return []


def _load_env(name: str, taskset: vf.Taskset, *, tools: bool) -> vf.Env | None:
    """Load the taskset's own Env; None if the short path plays it. Raises EnvironmentFailed."""
    kind = loaders.environment_class(name)
    plain = not tools and not _hooks_requests(type(taskset).task_type())
    if kind is vf.SingleAgentEnv and plain:
        return None
    config = loaders.resolve_env_config({"taskset": taskset.config.model_dump()})
    env = loaders.load_environment(config)
    agents = agent_config_fields(env.config)
    if tools and len(agents) > 1:
        raise EnvironmentFailed(
            f"{name!r} has tools and several agents: only one of the two is played here"
        )
    for agent, seat in agents.items():
        if seat.model is not None:
            raise EnvironmentFailed(
                f"agent {agent!r} of {name!r} is another model ({seat.model}): only the policy plays here"
            )
    return env


def _find(name: str) -> tuple[type[vf.Taskset], type[vf.TasksetConfig]]:
    if name in BUNDLED:
        # the library looks for a taskset and its Env among its own modules first: register bundled ones there
        module = importlib.import_module(f".tasksets.{BUNDLED[name]}", __package__)
        sys.modules[f"{library_tasksets.__name__}.{name.replace('-', '_')}"] = module
    kind = loaders.taskset_class(name)
    return kind, concrete_type(kind, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig


def _hooks_requests(task: type[vf.Task]) -> bool:
    """Return whether the task has @intercept hooks or stops on single requests and responses."""
    blank = object.__new__(task)
    stops = discover_decorated(blank, "stop")
    on_trace = all(hook_boundary(stop, allow_trace=True) is vf.Trace for stop in stops)
    return not on_trace or bool(discover_decorated(blank, "intercept"))


# -- conversion of the library's types ------------------------------------------------------------


def _messages(system: str | None, prompt: str | Sequence[Any]) -> list[Any]:
    opening = [] if system is None else [vf.SystemMessage(content=system)]
    return [*opening, *([vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt)]


def _wire(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert messages for chat templates: text only, and arguments of calls as objects."""
    wire: list[dict[str, Any]] = []
    for message in messages:
        entry: dict[str, Any] = {
            "role": message.role,
            "content": content_text(message.content or ""),
        }
        if message.role == "tool":
            entry |= {"tool_call_id": message.tool_call_id, "name": message.name}
        elif calls := getattr(message, "tool_calls", None):
            entry["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": _arguments(call.arguments)},
                }
                for call in calls
            ]
        wire.append(entry)
    return wire


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


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
