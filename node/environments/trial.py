"""Try an environment: play scripted replies in two processes, compare, log outside access.

The processes are those of a worker (hosted.py), sandbox included, except that this file starts them, to listen
to Python's audit events. The calling process imports none of the environment's code.
"""

import asyncio
import inspect
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ... import __version__
from ..config.run import EnvironmentConfig
from ..config.sandbox import WorkerSandboxConfig
from ..errors import BAD_FILE, UsageError, printable
from ..inference.engine import Completion
from ..storage.run_files import today
from . import tasksets
from .allowed import BUNDLED, find_package, module_of, root_of
from .chat import ASSISTANT, CHARACTERS, Chat, ChatFormat, Transcript, dated
from .environment import Environment, EnvironmentFailed, ScoreMismatch, Split, Task
from .host import EnvironmentSetUp, main, make_environment
from .hosted import HostedEnvironment
from .judge_model import Judges
from .sandbox import Sandbox, choose

COUNTED = 1000
"""Most tasks of a split that are counted and compared."""
COUNT_S = 3.0
"""Seconds after which no more tasks are loaded than those to be played."""
LOOKED_AT_ONCE = 50
MIN_REPEATED = 10
"""Tasks after a taskset's end that have to equal its first ones before it counts as finite."""
MOST_FAILURES = 3
"""Failed rollouts after which no more are played."""
MAX_TOKENS = 1 << 20
"""Limit of a scripted reply, not of a run."""
CALLS, CALLED = "calls", 2
"""Name of the script that calls tools, and its number of replies with a call."""
SHOWN = 3
"""Most examples of a problem that are shown."""
MAX_NOTED = 1000
MAX_NOTES = 1 << 20
"""Limits of the environment process's log, in lines and in bytes."""
SAME_REWARD = 1e-6
"""Tolerance of the trainer between a claimed reward and its own."""


@dataclass(frozen=True)
class TrialOptions:
    """Options of the trial of an environment."""

    environment: EnvironmentConfig
    sandbox: WorkerSandboxConfig
    tasks: int
    model: Path | None
    """Directory with a tokenizer and a chat template; None: characters are tokens."""
    seed: int
    limit_s: float
    replies: tuple[str, ...]
    """The model's replies, turn by turn, the last one repeated; empty: the usual scripts."""


@dataclass(frozen=True)
class Check:
    """Result of one check: the finding, and a problem with its remedy, if there is one."""

    name: str
    found: str
    problem: str = ""


@dataclass(frozen=True)
class ScriptedRollout:
    """One rollout of the trial."""

    task: int
    script: str
    turns: int
    seconds: float
    reward: float | None
    """Reward; None if the rollout failed."""
    failure: str
    disagreement: str
    """Difference of the second process's score; empty if there is none."""
    calls: int | None
    """Number of tool calls; None if the environment has no tools or the rollout failed."""
    tokens: tuple[int, ...] = ()
    """Token ids of the last branch."""


class ScriptedPolicy:
    """Policy that plays a script; no state is shared between rollouts."""

    def __init__(self, chat: Chat, script: str, task: int, replies: Sequence[str]) -> None:
        self._chat = chat
        self._script = script
        self._replies = replies
        self._random = random.Random(f"{script}/{task}")
        self.turns = 0

    async def __call__(self, prompt: Sequence[int], turn: int) -> Completion:
        """See Policy."""
        self.turns += 1
        if self._replies:
            text = self._replies[min(turn, len(self._replies) - 1)]
        elif self._script == CALLS:
            text = self._call(self._chat.text(prompt)) if turn < CALLED else "done"
        else:
            text = "" if self._script == "empty" else self._noise()
        ids = self._chat.reply(text)
        cut = self._script == "cut off"
        ids = ids[:-1] if cut else ids
        return Completion(ids, [-1.0] * len(ids), "length" if cut else "stop", 0, 0)

    def _call(self, prompt: str) -> str:
        """Write a random call of one of the prompt's tools; arguments may be of the wrong type."""
        tool = self._random.choice(described_tools(prompt))["function"]
        fields = tool.get("parameters", {}).get("properties", {})
        kinds: dict[Any, Any] = {
            "integer": 7,
            "number": 0.5,
            "boolean": True,
            "array": [],
            "object": {},
        }
        arguments = {
            name: kinds.get(self._random.choice([field.get("type"), None]), "12*(3+4)")
            for name, field in fields.items()
        }
        call = json.dumps({"name": tool["name"], "arguments": arguments})
        return f"<tool_call>{call}</tool_call>"

    def _noise(self) -> str:
        """Write text like an untrained model's: words, numbers, brackets, non-ASCII letters."""
        draw = self._random
        words = ["yes", str(draw.randint(-9, 99)), "[crane]", "\\boxed{3}", "<answer>x</answer>"]
        letters = "".join(draw.choices("abc xyz 019.,-+*/=(){}[]\n\u00e9\u4e2d", k=24))
        return draw.choice([*words, letters, " ".join(words)])


class EnvironmentTrial:
    """Trial of an environment in two processes, with its findings.

    Raises UsageError for an environment that is not installed.
    """

    def __init__(self, options: TrialOptions) -> None:
        self.options = options
        self.checks: list[Check] = []
        self.rollouts: list[ScriptedRollout] = []
        self._chat: Chat = Transcript()
        if options.model is not None:
            environment = options.environment
            variables = dated(environment.chat_template_kwargs, options.model, today())
            self._chat = ChatFormat.load(options.model, defaults=variables)
            own = environment.model_copy(update={"chat_template_kwargs": variables})
            self.options = replace(options, environment=own)
        name = options.environment.id
        package = find_package(name)
        self._found("package", str(package or f"bundled {__version__}"))
        root = Path(tasksets.__file__).parent if name in BUNDLED else root_of(module_of(name))
        if root is None and not (package and package.of_library):
            raise UsageError(f"the environment {name!r} is not installed here")
        self._roots = [] if root is None else [str(root)]
        self._step = "start"
        self._judge_fault = ""

    def _found(self, name: str, found: str, problem: str = "") -> None:
        self.checks.append(Check(name, found, problem))

    def shown(self) -> str:
        """Format the rollout with the most turns as the model saw it."""
        if not self.rollouts:
            return "\nno rollout to show"
        longest = max(self.rollouts, key=lambda rollout: (rollout.turns, rollout.reward or 0.0))
        head = f"\ntask {longest.task}, {longest.script}: reward {longest.reward}, {longest.turns} turn(s)\n"
        return head + _text(self._chat, longest.tokens)

    # -- playing -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run all checks, or as many as the time limit allows. Raises UsageError."""
        sandbox = await asyncio.to_thread(choose, self.options.sandbox)
        self._found("sandbox", str(sandbox))
        with tempfile.TemporaryFile() as notes, tempfile.TemporaryDirectory() as answers:
            try:
                async with (
                    self._hosted(notes, sandbox, Path(answers)) as first,
                    self._hosted(notes, sandbox, Path(answers)) as other,
                    asyncio.timeout(self.options.limit_s),
                ):
                    await self._check_all(first, other)
            except TimeoutError:
                limit = f"{self.options.limit_s:g} s"
                self._found(
                    self._step,
                    f"not done after {limit}, {len(self.rollouts)} rollouts played",
                    self._judge_fault
                    or f"it took longer than {limit}: mend code that waits for what never comes, or give "
                    "--tasks a lower or --limit-s a higher number",
                )
            self._check_outside(_read_notes(notes), sandbox)

    @asynccontextmanager
    async def _hosted(
        self, notes: BinaryIO, sandbox: Sandbox, answers: Path
    ) -> AsyncGenerator[Environment]:
        """Make the environment of one process; a judge's answers are stored in `answers`."""
        options = self.options
        environment = HostedEnvironment(
            options.environment,
            model_dir=options.model,
            seed=options.seed,
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            sandbox=sandbox,
            judges=Judges([options.environment], answers),
            program=(sys.executable, "-P", "-m", __name__, str(notes.fileno()), *self._roots),
        )
        environment.pass_fds = [notes.fileno()]
        try:
            yield environment
        finally:
            self._judge_fault = self._judge_fault or environment.judge_fault
            await environment.close()

    async def _check_all(self, first: Environment, other: Environment) -> None:
        try:
            began = time.monotonic()
            await asyncio.gather(first.start(), other.start())
            self._found("start", f"{time.monotonic() - began:.1f} s, two at once")
            self._step = "tasks"
            train = await self._check_tasks(first, other)
            self._step = "prompts"
            await self._check_prompts(first, train)
            self._step = "rollouts"
            try:
                await self._play_all(first, other, train)
            finally:
                self._check_rollouts()
        except EnvironmentFailed as error:
            self._found(self._step, "not done", str(error))

    async def _check_tasks(self, first: Environment, other: Environment) -> list[Task]:
        """Compare the tasks of two processes and count them; return the training tasks."""
        train, differing = await self._compare(first, other, "train")
        counts = [f"train {_count(train)}"]
        try:
            held_out, more = await self._compare(first, other, "eval")
            counts.append(f"held out {_count(held_out)}")
            differing += more
        except EnvironmentFailed as error:
            counts.append(f"held out none ({error})")
        problem = ""
        if differing:
            counts.append(f"{len(differing)} differ")
            problem = (
                f"task {differing[0].index} ({differing[0].split}) has other content in a second process: "
                "load() must draw from config.seed alone, not from the time, the machine or unseeded randomness"
            )
        self._found("tasks", ", ".join(counts), problem)
        return train

    async def _compare(
        self, first: Environment, other: Environment, split: Split
    ) -> tuple[list[Task], list[Task]]:
        """Return the tasks of a split, and the ones that differ between the processes."""
        ours = await self._look(first, split, COUNTED)
        # the other process may have had no time for all
        pairs = zip(ours, await self._look(other, split, len(ours)), strict=False)
        return ours, [task for task, theirs in pairs if task.digest != theirs.digest]

    async def _look(self, environment: Environment, split: Split, most: int) -> list[Task]:
        """Load tasks in order: at least those to be played, more until COUNT_S."""
        tasks: list[Task] = []
        began = time.monotonic()
        while len(tasks) < most:
            if len(tasks) >= self.options.tasks and time.monotonic() - began > COUNT_S:
                break
            some = range(len(tasks), min(most, len(tasks) + LOOKED_AT_ONCE))
            tasks += await asyncio.gather(*(environment.task(index, split) for index in some))
        return tasks

    async def _check_prompts(self, environment: Environment, tasks: list[Task]) -> None:
        text = self.options.model is None
        prompts = [await environment.prompt(task) for task in tasks]
        # without a tokenizer an id is a character, or marks the beginning or end of a message
        lengths = [
            len([token for token in ids if not text or token < CHARACTERS]) for ids in prompts
        ]
        if not any(lengths):
            self._found("prompts", "the environment's own code opens the conversation")
            return
        unit = "characters" if text else "tokens"
        mean = sum(lengths) / len(lengths)
        self._found("prompts", f"{_span(lengths)} {unit}, {mean:.0f} on average")

    async def _play_all(self, first: Environment, other: Environment, train: list[Task]) -> None:
        for task in train[: self.options.tasks]:
            for script, replies in await self._scripts(first, task):
                self.rollouts.append(await self._play(first, other, task, script, replies))
                if sum(bool(rollout.failure) for rollout in self.rollouts) >= MOST_FAILURES:
                    return

    async def _scripts(
        self, environment: Environment, task: Task
    ) -> list[tuple[str, Sequence[str]]]:
        """List (name, replies) of the scripts for a task; generated replies are empty."""
        if self.options.replies:
            return [("as given", self.options.replies)]
        scripts: list[tuple[str, Sequence[str]]] = [("empty", ()), ("noise", ()), ("cut off", ())]
        if described_tools(self._chat.text(await environment.prompt(task))):
            scripts.append((CALLS, ()))
        shown = await environment.demonstration(task)
        if shown is not None:
            replies = [self._chat.text(reply) for _, reply in shown.turns()]
            scripts.insert(0, ("right answer", replies))
        return scripts

    async def _play(
        self,
        first: Environment,
        other: Environment,
        task: Task,
        script: str,
        replies: Sequence[str],
    ) -> ScriptedRollout:
        """Play a rollout, and score it in the second process, as the trainer does."""
        policy = ScriptedPolicy(self._chat, script, task.index, replies)
        began = time.monotonic()
        episode = await first.run(task, policy)
        took = time.monotonic() - began
        ours, disagreement = None, ""
        if not episode.error:
            ours = episode.score.reward
            try:
                reward = (await other.score(task, episode.branches)).reward
                if abs(reward - ours) > SAME_REWARD:
                    disagreement = f"reward {ours:g}, then {reward:g}"
            except (ScoreMismatch, EnvironmentFailed) as error:
                disagreement = str(error)
        tokens = tuple(episode.branches[-1].token_ids) if episode.branches else ()
        calls = episode.score.metrics.get("tool_calls")
        return ScriptedRollout(
            *(task.index, script, policy.turns, took, ours, episode.error, disagreement),
            None if calls is None else int(calls),
            tokens,
        )

    # -- findings ----------------------------------------------------------------------------------

    def _check_rollouts(self) -> None:
        played = self.rollouts
        failed = [
            f"task {rollout.task}, {rollout.script}: {rollout.failure}"
            for rollout in played
            if rollout.failure
        ]
        count, problem = f"{len(played)} played", ""
        if failed:
            count += f", {len(failed)} failed"
            problem = f"on a worker these are lost as environment_error: {_some(failed)}"
        if played:
            count += f", {_span([rollout.turns for rollout in played])} turn(s) each"
        self._found("rollouts", count, problem)

        calls = [(rollout.script, rollout.calls) for rollout in played if rollout.calls is not None]
        if calls:
            total = sum(count for _, count in calls)
            self._found("tools", f"{total} calls in {len(calls)} rollouts: {_by_script(calls)}")

        spans = _by_script(
            [(rollout.script, rollout.reward) for rollout in played if rollout.reward is not None]
        )
        unlike = [
            f"task {rollout.task}, {rollout.script}: {rollout.disagreement}"
            for rollout in played
            if rollout.disagreement
        ]
        problem = ""
        environment = self.options.environment
        if unlike and environment.deterministic_rewards and environment.deterministic_tools:
            problem = (
                f"a second process does not agree: {_some(unlike)}. Rewards, and what the environment says, "
                "have to be a function of task and replies; for random rewards set "
                "environment.deterministic_rewards = false in the run, and test with --sampled-rewards; for "
                "tools that search or draw deterministic_tools = false, and --sampled-tools"
            )
        self._found("rewards", spans or "none", problem)

        times = sorted(rollout.seconds for rollout in played if not rollout.failure)
        if times:
            median, most = times[len(times) // 2] * 1e3, times[-1] * 1e3
            self._found("speed", f"{median:.1f} ms a rollout, {most:.1f} at most")

    def _check_outside(self, notes: Mapping[str, list[str]], sandbox: Sandbox) -> None:
        allows = self.options.sandbox
        for kind, allowed, key in (
            ("sockets", allows.network, "--sandbox.network true"),
            ("processes", allows.processes > 0, "--sandbox.processes N"),
        ):
            uses = notes.get(kind, [])
            if not uses or allowed:
                self._found(kind, _some(uses) or "none")
                continue
            self._found(
                kind,
                f"{len(uses)} refused",
                f"a worker refuses: {_some(uses)}. Do without, or ask each worker's owner for {key}",
            )
        files = notes.get("files", [])
        state = "confined" if sandbox.confines_files else "not confined"
        self._found("files", f"{state}: {_some(files)}" if files else "none")


def described_tools(prompt: str) -> list[Any]:
    """Parse the tool schemas of a prompt: one a line in <tools> tags, as many templates write."""
    match = re.search(r"<tools>\n(.*?)\n?</tools>", prompt, re.DOTALL)
    try:
        return [json.loads(line) for line in match[1].splitlines()] if match else []
    except ValueError:
        return []


def _text(chat: Chat, tokens: Sequence[int]) -> str:
    """Format a conversation for display, one message after the other."""
    if isinstance(chat, Transcript):
        messages = chat.messages([*tokens, ASSISTANT])
        return "\n".join(f"[{message['role']}] {message['content']}" for message in messages)
    return chat.text(tokens)


def _count(tasks: list[Task]) -> str:
    """Count the tasks of a split from the first ones: a finite taskset starts over at its end."""
    digests = [task.digest for task in tasks]
    repeats = len(digests) - MIN_REPEATED
    for length in range(1, repeats + 1):
        if all(digests[index] == digests[index - length] for index in range(length, len(digests))):
            return f"{length:,}"
    unique = len(set(digests))
    twice = "" if unique == len(digests) else f" ({unique:,} different)"
    return f"at least {len(digests):,}{twice}"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _by_script(values: Sequence[tuple[str, float]]) -> str:
    """Show the span of the values of each script."""
    by_script: dict[str, list[float]] = {}
    for script, value in values:
        by_script.setdefault(script, []).append(value)
    return ", ".join(f"{script} {_span(values)}" for script, values in by_script.items())


def _some(lines: list[str]) -> str:
    """Join the first few, and count the rest."""
    more = f"; {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


# -- access outside of the process -------------------------------------------------------------------


def _read_notes(file: BinaryIO) -> dict[str, list[str]]:
    """Read the log lines of both processes by kind, without duplicates.

    The tested code may have written to the file, too.
    """
    file.seek(0)
    lines = file.read(MAX_NOTES).splitlines()[: 2 * MAX_NOTED]
    by_kind: dict[str, list[str]] = {}
    for line in dict.fromkeys(lines):
        try:
            kind, what = msgspec.json.decode(line, type=tuple[str, str])
        except BAD_FILE:
            continue
        by_kind.setdefault(printable(kind, 20), []).append(printable(what, 400))
    return by_kind


@dataclass
class Notes:
    """Log of Python's audit events that reach outside of an environment's process.

    Calls from C are not among them; the sandbox refuses those all the same.
    """

    descriptor: int
    roots: Sequence[str]
    """Directories of the environment's code."""
    library: str
    """Directory of verifiers."""
    on: bool = False
    written: set[str] = field(default_factory=set[str])

    def take(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Log an event, unless it was logged before; an audit hook."""
        if not self.on or event not in KINDS or len(self.written) >= MAX_NOTED:
            return
        what = _told(event, arguments)
        place, own = self._where() if what else ("", False)
        if not place or (what.startswith("reads ") and not own):
            return
        line = json.dumps([KINDS[event], f"{what[:200]} ({place[:200]})"])
        if line not in self.written:
            self.written.add(line)
            os.write(self.descriptor, line.encode() + b"\n")

    def _where(self) -> tuple[str, bool]:
        """Return (place of the calling code, whether it is the environment's own).

        The place is the innermost line of the environment's code, else the innermost outside of Python's
        library; empty for calls that `verifiers` makes by itself, such as asking git for its release.
        """
        fallback = ""
        for frame, line in traceback.walk_stack(inspect.currentframe()):
            file = frame.f_code.co_filename
            if file == __file__ or file.startswith("<"):
                continue
            place = f"{frame.f_code.co_name}, {Path(file).name} line {line}"
            if any(file.startswith(root) for root in self.roots):
                return place, True
            if not fallback and ("site-packages" in file or not file.startswith(LIBRARY)):
                if file.startswith(self.library):
                    return "", False
                fallback = place
        return fallback, False


LIBRARY = os.path.dirname(os.__file__)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NOTED = {
    "sockets": "socket.__new__ socket.getaddrinfo socket.gethostbyname socket.connect",
    "processes": "subprocess.Popen os.system os.posix_spawn os.exec os.fork os.forkpty os.kill",
    "files": "open os.remove os.rename os.mkdir os.rmdir",
}
KINDS = {event: kind for kind, events in NOTED.items() for event in events.split()}
"""Audit event that is logged -> its kind."""


def _told(event: str, arguments: tuple[Any, ...]) -> str:
    """Describe an audit event; empty for files that Python itself reads to import."""
    match event, arguments:
        case "socket.__new__", (_, family, *_):
            return f"socket of family {int(family)}"
        case "subprocess.Popen", (program, words, *_):
            return f"run {words or program}"
        case "open", (str() | bytes() as path, _, int() as flags):
            return _opened(os.path.abspath(os.fsdecode(path)), writes=bool(flags & WRITES))
        case "open", _:  # a descriptor that is open already
            return ""
        case _:
            shown = " ".join(
                str(argument)
                for argument in arguments[:2]
                if isinstance(argument, str | bytes | int)
            )
            if "__pycache__" in shown:
                return ""
            return f"{event.rpartition('.')[2]} {shown}".strip()


def _opened(path: str, *, writes: bool) -> str:
    if "__pycache__" in path or path.startswith("/dev/"):
        return ""
    ours = (LIBRARY, "/proc/", *(os.path.abspath(path) for path in sys.path))
    if not writes and path.startswith(ours):
        return ""
    return f"{'writes' if writes else 'reads'} {path}"


def _play_noted(descriptor: int, roots: Sequence[str]) -> None:
    """Run as the environment's process, like host.py; log audit events from the set-up on."""
    os.set_inheritable(descriptor, False)
    notes = Notes(descriptor, roots, str(root_of("verifiers")))
    sys.addaudithook(notes.take)

    def make(request: EnvironmentSetUp) -> Environment:
        # the library's client of a judge asks for it, which runs `uname -p` once; Python keeps the answer
        platform.processor()
        notes.on = True
        return make_environment(request)

    main(make)


if __name__ == "__main__":
    _play_noted(int(sys.argv[1]), sys.argv[2:])
