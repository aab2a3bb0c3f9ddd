"""Try an environment: play it with scripted replies in two processes, compare them, note what reaches out.

The processes are those of a worker (hosted.py), sandbox included, only that this file starts them, to listen to
Python's audit events. Nothing of the environment is imported into the process that asks.
"""

import asyncio
import inspect
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ... import __version__
from ..config.run import EnvironmentConfig
from ..config.sandbox import WorkerSandboxConfig
from ..inference.engine import Completion
from ..ops.errors import UsageError, printable
from . import tasksets
from .allowed import BUNDLED, find_package, module_of, root_of
from .chat import ASSISTANT, CHARACTERS, Chat, ChatFormat, Transcript
from .environment import Environment, EnvironmentFailed, Episode, ScoreMismatch, Split, Task
from .host import EnvironmentSetUp, main, make_environment
from .hosted import HostedEnvironment
from .sandbox import Sandbox, choose

COUNTED = 1000
"""Tasks of a split that are looked at, to count and to compare them ..."""
COUNT_S = 3.0
"""... and the seconds after which no more of them are."""
LOOKED_AT_ONCE = 50
MIN_REPEATED = 10
"""Tasks after the end of a taskset that have to equal its first ones before it counts as finite."""
MOST_FAILURES = 3
"""Failed rollouts after which no more are played."""
MAX_TOKENS = 1 << 20
"""Of a scripted reply; no limit of a run."""
SHOWN = 3
"""Examples of what went wrong."""
MAX_NOTED = 1000
MAX_NOTES = 1 << 20
"""Most lines that the environment's process notes, and bytes that are read of them."""
SAME_REWARD = 1e-6
"""As the trainer compares a claimed reward with its own."""


@dataclass(frozen=True)
class TrialOptions:
    """How an environment is tried."""

    environment: str
    args: dict[str, Any]
    tasks: int
    model: Path | None
    """Directory with a tokenizer and a chat template; None: characters are tokens."""
    seed: int
    max_turns: int
    timeout_s: float
    limit_s: float
    sandbox: WorkerSandboxConfig
    sampled_rewards: bool
    replies: tuple[str, ...]
    """What the model says, turn by turn, the last one from then on; empty: the usual scripts."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what was found, and what is wrong with it and how to mend it."""

    name: str
    found: str
    problem: str = ""


@dataclass(frozen=True)
class ScriptedRollout:
    """One rollout of the test."""

    task: int
    script: str
    turns: int
    seconds: float
    reward: float | None
    """None: it failed."""
    tokens: tuple[int, ...] = ()
    """Of its last branch."""


class ScriptedPolicy:
    """A model that says what a script has for it; no state is shared between rollouts."""

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
        else:
            text = "" if self._script == "empty" else self._noise()
        ids = self._chat.reply(text)
        cut = self._script == "cut off"
        ids = ids[:-1] if cut else ids
        return Completion(ids, [-1.0] * len(ids), "length" if cut else "stop", 0, 0)

    def _noise(self) -> str:
        """What models say that have not learned: words, numbers, brackets, letters of other alphabets."""
        draw = self._random
        words = ["yes", str(draw.randint(-9, 99)), "[crane]", "\\boxed{3}", "<answer>x</answer>"]
        letters = "".join(draw.choices("abc xyz 019.,-+*/=(){}[]\n\u00e9\u4e2d", k=24))
        return draw.choice([*words, letters, " ".join(words)])


class EnvironmentTrial:
    """Two processes of an environment, what was found in them, and what is wrong."""

    def __init__(self, options: TrialOptions) -> None:
        self.options = options
        self.checks: list[Check] = []
        self.rollouts: list[ScriptedRollout] = []
        self._chat = self._load_chat()
        self._roots = self._find_roots()
        self._step = "start"

    def _load_chat(self) -> Chat:

        model = self.options.model
        return Transcript() if model is None else ChatFormat.load(model)

    def _find_roots(self) -> list[Path]:
        """Find its package, which has to be installed. Raises UsageError."""

        name = self.options.environment
        package = find_package(name)
        self.checks.append(Check("package", str(package or f"bundled {__version__}")))
        if name in BUNDLED:
            return [Path(tasksets.__file__).parent]
        root = root_of(module_of(name))
        if root is None and not (package and package.of_library):
            raise UsageError(f"the environment {name!r} is not installed here")
        return [] if root is None else [root]

    def shown(self) -> str:
        """Show the rollout with the most turns as the model saw it."""

        if not self.rollouts:
            return "\nno rollout to show"
        one = max(self.rollouts, key=lambda it: (it.turns, it.reward or 0.0))
        head = f"\ntask {one.task}, {one.script}: reward {one.reward}, {one.turns} turn(s)\n"
        return head + _text(self._chat, one.tokens)

    # -- playing -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Make all checks, or as many as there is time for. Raises UsageError."""

        sandbox = await asyncio.to_thread(choose, self.options.sandbox)
        self.checks.append(Check("sandbox", str(sandbox)))
        with tempfile.TemporaryFile() as notes:
            try:
                async with (
                    self._hosted(notes, sandbox) as one,
                    self._hosted(notes, sandbox) as other,
                    asyncio.timeout(self.options.limit_s),
                ):
                    await self._check_all(one, other)
            except TimeoutError:
                self._fail_late()
            self._check_outside(_read_notes(notes), sandbox)

    @asynccontextmanager
    async def _hosted(self, notes: BinaryIO, sandbox: Sandbox) -> AsyncGenerator[Environment]:

        options = self.options
        environment = HostedEnvironment(
            EnvironmentConfig(
                id=options.environment,
                args=options.args,
                max_turns=options.max_turns,
                timeout_s=options.timeout_s,
                start_timeout_s=options.limit_s / 3,  # the limit of all names no line of code
            ),
            model_dir=options.model or Path(),
            seed=options.seed,
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            text=options.model is None,
            sandbox=sandbox,
            program=(
                *(sys.executable, "-P", "-m", __name__),
                *(str(notes.fileno()), *map(str, self._roots)),
            ),
        )
        environment.pass_fds = [notes.fileno()]
        try:
            yield environment
        finally:
            await environment.close()

    async def _check_all(self, one: Environment, other: Environment) -> None:

        try:
            began = time.monotonic()
            await asyncio.gather(one.start(), other.start())
            took = time.monotonic() - began
            self.checks.append(Check("start", f"{took:.1f} s, two at once"))
            self._step = "tasks"
            train = await self._check_tasks(one, other)
            self._step = "prompts"
            await self._check_prompts(one, train)
            self._step = "rollouts"
            await self._check_rollouts(one, other, train)
        except EnvironmentFailed as error:
            self.checks.append(Check(self._step, "not done", str(error)))

    def _fail_late(self) -> None:
        limit = f"{self.options.limit_s:g} s"
        self.checks.append(
            Check(
                self._step,
                f"not done after {limit}, {len(self.rollouts)} rollouts played",
                f"it took longer than {limit}: mend code that waits for what never comes, or give --tasks a "
                "lower or --limit-s a higher number",
            )
        )

    async def _check_tasks(self, one: Environment, other: Environment) -> list[Task]:
        """Compare the tasks of two processes and count them; returns those to train on."""

        train = await self._look(one, "train", COUNTED)
        found, differing = (
            [f"train {_count(train)}"],
            _differ(train, await self._look(other, "train", len(train))),
        )
        try:
            held_out = await self._look(one, "eval", COUNTED)
            found.append(f"held out {_count(held_out)}")
            differing += _differ(held_out, await self._look(other, "eval", len(held_out)))
        except EnvironmentFailed as error:
            found.append(f"held out none ({error})")
        problem = ""
        if differing:
            found.append(f"{len(differing)} differ")
            problem = (
                f"task {differing[0].index} ({differing[0].split}) has other content in a second process: "
                "load() must draw from config.seed alone, not from the time, the machine or unseeded randomness"
            )
        self.checks.append(Check("tasks", ", ".join(found), problem))
        return train

    async def _look(self, environment: Environment, split: Split, most: int) -> list[Task]:
        """Look at tasks, in order: at least at those that are played, else until it takes too long."""
        found: list[Task] = []
        began = time.monotonic()
        while len(found) < most:
            if len(found) >= self.options.tasks and time.monotonic() - began > COUNT_S:
                break
            some = range(len(found), min(most, len(found) + LOOKED_AT_ONCE))
            found += await asyncio.gather(*(environment.task(it, split) for it in some))
        return found

    async def _check_prompts(self, environment: Environment, tasks: list[Task]) -> None:
        text = self.options.model is None
        prompts = [await environment.prompt(task) for task in tasks]
        # without a tokenizer an id is a character, or marks where a message begins and ends
        lengths = [len([it for it in ids if not text or it < CHARACTERS]) for ids in prompts]
        if not any(lengths):
            self.checks.append(
                Check("prompts", "the environment's own code opens the conversation")
            )
            return
        mean = sum(lengths) / len(lengths)
        unit = "characters" if text else "tokens"
        span = _span([float(it) for it in (min(lengths), max(lengths))])
        self.checks.append(Check("prompts", f"{span} {unit}, {mean:.0f} on average"))

    async def _check_rollouts(
        self, one: Environment, other: Environment, train: list[Task]
    ) -> None:
        failures: list[str] = []
        disagreements: list[str] = []
        try:
            for task in train[: self.options.tasks]:
                for script, replies in await self._scripts(one, task):
                    policy = ScriptedPolicy(self._chat, script, task.index, replies)
                    began = time.monotonic()
                    episode = await one.run(task, policy)
                    took = time.monotonic() - began
                    self._note(task, script, policy, took, episode)
                    place = f"task {task.index}, {script}"
                    if episode.error:
                        failures.append(f"{place}: {episode.error}")
                    elif why := await self._disagrees(other, task, episode):
                        disagreements.append(f"{place}: {why}")
                    if len(failures) >= MOST_FAILURES:
                        return
        finally:
            self._sum_up(failures, disagreements)

    async def _scripts(
        self, environment: Environment, task: Task
    ) -> list[tuple[str, Sequence[str]]]:
        """Name what is said to a task, and the replies where they are given."""
        if self.options.replies:
            return [("as given", self.options.replies)]
        scripts: list[tuple[str, Sequence[str]]] = [("empty", ()), ("noise", ()), ("cut off", ())]
        answer = await environment.demonstration(task)
        if answer is not None:
            scripts.insert(0, ("right answer", [self._chat.text(answer)]))
        return scripts

    def _note(
        self, task: Task, script: str, policy: ScriptedPolicy, took: float, episode: Episode
    ) -> None:
        reward = None if episode.error else episode.score.reward
        tokens = tuple(episode.branches[-1].token_ids) if episode.branches else ()
        self.rollouts.append(
            ScriptedRollout(task.index, script, policy.turns, took, reward, tokens)
        )

    async def _disagrees(self, other: Environment, task: Task, episode: Episode) -> str:
        """Score a finished rollout in the second process, as the trainer does; why it differs, if it does."""

        try:
            reward = (await other.score(task, episode.branches)).reward
        except (ScoreMismatch, EnvironmentFailed) as error:
            return str(error)
        ours = episode.score.reward
        return "" if abs(reward - ours) <= SAME_REWARD else f"reward {ours:g}, then {reward:g}"

    # -- findings ----------------------------------------------------------------------------------

    def _sum_up(self, failures: list[str], disagreements: list[str]) -> None:
        played = self.rollouts
        scored = [one for one in played if one.reward is not None]
        turns = [one.turns for one in played]
        count = (
            f"{len(played)} played, {len(failures)} failed" if failures else f"{len(played)} played"
        )
        if played:
            count += f", {_span([float(it) for it in turns])} turn(s) each"
        problem = ""
        if failures:
            problem = f"on a worker these are lost as environment_error: {_some(failures)}"
        self.checks.append(Check("rollouts", count, problem))
        by_script: dict[str, list[float]] = {}
        for one in scored:
            by_script.setdefault(one.script, []).append(one.reward or 0.0)
        text = ", ".join(f"{name} {_span(rewards)}" for name, rewards in by_script.items())
        self.checks.append(Check("rewards", text or "none", self._blame(disagreements)))
        if scored:
            times = sorted(one.seconds for one in scored)
            median, most = times[len(times) // 2], times[-1]
            self.checks.append(
                Check("speed", f"{median * 1e3:.1f} ms a rollout, {most * 1e3:.1f} at most")
            )

    def _blame(self, disagreements: list[str]) -> str:
        if not disagreements or self.options.sampled_rewards:
            return ""
        return (
            f"a second process does not agree: {_some(disagreements)}. Rewards, and what the environment says, "
            "have to be a function of task and replies; for judges and random rewards set "
            "environment.deterministic_rewards = false in the run, and test with --sampled-rewards"
        )

    def _check_outside(self, notes: "list[Note]", sandbox: Sandbox) -> None:
        allows = self.options.sandbox
        for kind, allowed, key in (
            ("sockets", allows.network, "--sandbox.network true"),
            ("processes", allows.processes > 0, "--sandbox.processes N"),
        ):
            found = [note for note in notes if note.kind == kind]
            said = _some([str(note) for note in found])
            if not found or allowed:
                self.checks.append(Check(kind, said if found else "none"))
                continue
            self.checks.append(
                Check(
                    kind,
                    f"{len(found)} refused",
                    f"a worker refuses: {said}. Do without, or ask each worker's owner for {key}",
                )
            )
        files = [str(note) for note in notes if note.kind == "files"]
        state = "confined" if sandbox.confines_files else "not confined"
        self.checks.append(Check("files", f"{state}: {_some(files)}" if files else "none"))


def _text(chat: Chat, tokens: Sequence[int]) -> str:
    """Write a conversation for people, one message after the other."""
    if isinstance(chat, Transcript):
        messages = chat.messages([*tokens, ASSISTANT])
        return "\n".join(f"[{it['role']}] {it['content']}" for it in messages)
    return chat.text(tokens)


def _differ(ours: list[Task], theirs: list[Task]) -> list[Task]:
    return [one for one, other in zip(ours, theirs, strict=True) if one.digest != other.digest]


def _count(tasks: list[Task]) -> str:
    """Count the tasks of a split from the first ones: a finite taskset starts over at its end."""
    digests = [task.digest for task in tasks]
    repeats = len(digests) - MIN_REPEATED
    for length in range(1, repeats + 1):
        if all(digests[it] == digests[it - length] for it in range(length, len(digests))):
            return f"{length:,}"
    unique = len(set(digests))
    twice = "" if unique == len(digests) else f" ({unique:,} different)"
    return f"at least {len(digests):,}{twice}"


def _span(rewards: list[float]) -> str:
    low, high = min(rewards), max(rewards)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _some(lines: list[str]) -> str:
    """Join the first few, and count the rest."""
    more = f"; {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return "; ".join(lines[:SHOWN]) + more


# -- what it does outside of its process -------------------------------------------------------------


@dataclass(frozen=True)
class Note:
    """Something that the environment's code did, or tried to do, outside of its process."""

    kind: str
    """sockets, processes or files."""
    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


def _read_notes(file: BinaryIO) -> "list[Note]":
    """Read what both processes noted, each thing once. The code that is tested may have written there, too."""
    file.seek(0)
    lines = file.read(MAX_NOTES).splitlines()[: 2 * MAX_NOTED]
    found: dict[Note, None] = {}
    for line in lines:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, list) and len(values) == 3:
            found[Note(*(printable(str(value), 200) for value in values))] = None
    return list(found)


@dataclass
class Notes:
    """Python's audit events of an environment's process that reach out of it. Calls from C are not among them;
    the sandbox refuses those all the same."""

    descriptor: int
    roots: Sequence[str]
    """Where the environment's code lies."""
    library: str
    """Where verifiers does."""
    on: bool = False
    written: set[str] = field(default_factory=set[str])

    def take(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an event, each thing once. An audit hook."""
        if not self.on or event not in KINDS or len(self.written) >= MAX_NOTED:
            return
        what = _told(event, arguments)
        place, own = self._where() if what else ("", False)
        if not place or (what.startswith("reads ") and not own):
            return
        line = json.dumps([KINDS[event], what[:200], place])
        if line not in self.written:
            self.written.add(line)
            os.write(self.descriptor, line.encode() + b"\n")

    def _where(self) -> tuple[str, bool]:
        """Find the innermost line of the environment's own, else the innermost outside of Python's library, and
        say which it is; nothing for what `verifiers` does by itself, such as to ask git for its release."""
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
KINDS = {
    "socket.__new__": "sockets",
    "socket.getaddrinfo": "sockets",
    "socket.gethostbyname": "sockets",
    "socket.connect": "sockets",
    "subprocess.Popen": "processes",
    "os.system": "processes",
    "os.posix_spawn": "processes",
    "os.exec": "processes",
    "os.fork": "processes",
    "os.forkpty": "processes",
    "os.kill": "processes",
    "open": "files",
    "os.remove": "files",
    "os.rename": "files",
    "os.mkdir": "files",
    "os.rmdir": "files",
}
"""Audit events that are noted, and of which kind."""


def _told(event: str, arguments: tuple[Any, ...]) -> str:
    """Describe an audit event; empty for files that only Python itself reads, to import."""
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
            shown = " ".join(str(it) for it in arguments[:2] if isinstance(it, str | bytes | int))
            if "__pycache__" in shown:
                return ""
            return f"{event.rpartition('.')[2]} {shown}".strip()


def _opened(path: str, *, writes: bool) -> str:
    if "__pycache__" in path or path.startswith("/dev/"):
        return ""
    ours = (LIBRARY, "/proc/", *(os.path.abspath(it) for it in sys.path))
    if not writes and path.startswith(ours):
        return ""
    return f"{'writes' if writes else 'reads'} {path}"


def _play_noted(descriptor: int, roots: Sequence[str]) -> None:
    """Be the environment's process, as host.py is, and note from the set-up on what its code does."""

    os.set_inheritable(descriptor, False)
    notes = Notes(descriptor, roots, str(root_of("verifiers")))
    sys.addaudithook(notes.take)

    def make(request: EnvironmentSetUp) -> Environment:
        notes.on = True
        return make_environment(request)

    main(make)


if __name__ == "__main__":
    _play_noted(int(sys.argv[1]), sys.argv[2:])
