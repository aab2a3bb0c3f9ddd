"""From a lease to its groups: a group has one name, a sample one seed, and nothing goes on of what failed."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.counting_environment import STOP, CountingEnvironment, counting_task
from support.lease_cases import granted, policy
from support.protocol_cases import MANIFEST

from primerl.crypto.keys import SecretKey
from primerl.node.environments.environment import Branch, Episode, Policy, Score, Task
from primerl.node.environments.stop_strings import FIRST_PART, StopStrings
from primerl.node.errors import EngineError, EngineLost
from primerl.node.inference.concurrency import Concurrency, Decision
from primerl.node.inference.engine import Completion, EngineStats, GenerateRequest
from primerl.node.models.support import pack_support, support_fault
from primerl.node.trainer.lease_book import LeaseBook
from primerl.node.verification.checks import check_submission
from primerl.node.weights.state import Changed, State
from primerl.node.worker import rollouts
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, sample_seed
from primerl.protocol.manifests import SamplingContract
from primerl.protocol.rollouts import Submission, join_support

NODE = SecretKey.from_seed(bytes(31) + b"n").node_id
RUN_ID = bytes(32)
RUN: Any = SimpleNamespace(
    environments=[SimpleNamespace(sampling=SamplingContract(0.5, 4, top_p=0.9, top_k=7))],
    model=SimpleNamespace(stop_token_ids=(STOP,), vocab_size=256),
    limits=SimpleNamespace(max_model_len=64),
)
LONG: Any = SimpleNamespace(
    environments=[SimpleNamespace(sampling=SamplingContract(0.5, 400))],
    model=RUN.model,
    limits=SimpleNamespace(max_model_len=512),
)


class Engine:
    """Says the next number, after a look at what it is asked; may die at a certain request."""

    policy_version = 3

    def __init__(self, fails_at: int = -1, error: Exception | None = None) -> None:
        self.asked: list[GenerateRequest] = []
        self.now = 0
        self._fails_at = fails_at
        self._error = error or EngineError("dead")

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.append(request)
        number = len(self.asked)
        self.now += 1
        try:
            await asyncio.sleep(0.001 if number == self._fails_at else 0.01)
            if number == self._fails_at:
                raise self._error
        finally:
            self.now -= 1
        return Completion([request.prompt[-1] + 1, STOP], [-1.0, -2.0], "stop", 3, 3)

    def stats(self) -> EngineStats:
        return EngineStats(fault="down")

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None: ...
    async def load(self, version: int, state: State) -> None: ...
    async def update(self, version: int, state: State, changed: Changed) -> None: ...
    async def close(self) -> None: ...


class Generation(NamedTuple):
    generator: rollouts.RolloutGenerator
    admission: rollouts.AdmissionControl


def generation(
    engine: Engine,
    ended: "Counter[int] | None" = None,
    environment: CountingEnvironment | None = None,
    concurrency: type[Concurrency] = Concurrency,
    run: Any = RUN,
) -> Generation:
    counted: Counter[int] = Counter() if ended is None else ended
    cap = concurrency(max_batch=64, max_model_len=8)
    admission = rollouts.AdmissionControl(engine, cap)
    generator = rollouts.RolloutGenerator(
        run_id=RUN_ID,
        run=run,
        node=NODE,
        environments={0: environment or CountingEnvironment()},
        admission=admission,
        rollout_ended=lambda lease_id: counted.update([lease_id]),
    )
    return Generation(generator, admission)


def lease_of(*indices: int) -> Lease:
    """A lease of these tasks, four rollouts each."""
    book = LeaseBook(policy(groups_per_lease=len(indices)))
    book.tasks[0].requeued.extend(indices)
    lease = granted(book)
    assert [task.index for task in lease.tasks] == list(indices)
    digests = [counting_task(index).digest for index in indices]
    refs = zip(lease.tasks, digests, strict=True)
    tasks = tuple(type(task)(task.index, digest) for task, digest in refs)
    return Lease(
        lease.lease_id, tasks, 4, lease.seed, lease.min_version, lease.deadline, lease.max_bytes
    )


@pytest.mark.parametrize("large", [rollouts.LARGE, 1], ids=["packed here", "packed in a thread"])
async def test_every_rollout_is_there_in_its_place(
    monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    monkeypatch.setattr(rollouts, "LARGE", large)
    engine, ended = Engine(), Counter[int]()
    lease = lease_of(5, 9)
    played = await generation(engine, ended).generator.play(lease)
    environment = CountingEnvironment()
    for group, task in zip(played.groups, lease.tasks, strict=True):
        assert (group.task_index, group.task_digest) == (task.index, task.digest)
        prompt = await environment.prompt(await environment.task(task.index))
        assert [one.reward for one in group.rollouts] == [1.0] * 4
        said = [prompt[-1] + 1, STOP]
        expected = b"".join(token.to_bytes(4, "little") for token in [*prompt, *said])
        assert {one.branches[0].tokens for one in group.rollouts} == {expected}
    assert ended == {lease.lease_id: 8}


async def test_a_task_has_one_name_for_the_engine_and_each_sample_its_own_seed() -> None:
    engine = Engine()
    lease = lease_of(5, 9)
    await generation(engine).generator.play(lease)
    names = Counter(request.group for request in engine.asked)
    assert sorted(names.values()) == [4, 4]
    assert all(len(name) == 16 for name in names)
    wanted = {
        sample_seed(RUN_ID, lease, NODE, task.digest, index)
        for task in lease.tasks
        for index in range(4)
    }
    assert {request.seed for request in engine.asked} == wanted
    assert {(one.temperature, one.top_k, one.top_p) for one in engine.asked} == {(0.5, 7, 0.9)}
    assert all(one.supported for one in engine.asked)


def test_a_branch_travels_with_its_supports() -> None:
    support = pack_support(np.array([[8, 5], [7, -1]], np.int32), [5, 7])
    turn = Completion([5, 7], [-1.0, 0.0], "length", 3, 3, support=support)
    tokens, sampled = [1, 5, 7, 2, 5, 7], [False, True, True, False, True, True]
    branch = Branch.of_turns(tokens, sampled, [0.0] * 6, [turn, turn])
    assert support_fault(branch.support, [5, 7, 5, 7], 9, 0, 0.9) == ""
    assert rollouts.branch_record(branch).support == join_support([(support, 2)] * 2)
    silent = replace(turn, support=b"")
    assert Branch.of_turns(tokens, sampled, [0.0] * 6, [turn, silent]).support == b""


async def test_replies_end_at_the_strings_of_their_environment() -> None:
    engine, environment = Engine(), CountingEnvironment()
    environment.stops = StopStrings(["."], lambda token: b"" if token == STOP else b".")
    played = await generation(engine, environment=environment, run=LONG).generator.play(lease_of(5))
    assert {request.max_tokens for request in engine.asked} == {FIRST_PART}, "not all 400 tokens"
    (prompt,) = {request.prompt for request in engine.asked}
    said = [*prompt, prompt[-1] + 1]
    expected = b"".join(token.to_bytes(4, "little") for token in said)
    assert {one.branches[0].tokens for one in played.groups[0].rollouts} == {expected}


class Verbose(CountingEnvironment):
    """Its prompts leave no room for a reply, but for task 9."""

    async def prompt(self, task: Task) -> list[int]:
        prompt = await super().prompt(task)
        return prompt if task.index == 9 else prompt * 32


async def test_a_conversation_that_has_outgrown_the_model_costs_its_rollout_alone() -> None:
    engine = Engine()
    played = await generation(engine, environment=Verbose()).generator.play(lease_of(5, 9))
    outgrown, fits = played.groups
    assert {one.error for one in outgrown.rollouts} == {
        "the conversation has 64 tokens, and the run's model takes 64"
    }
    assert [one.reward for one in fits.rollouts] == [1.0] * 4
    assert {len(one.prompt) for one in engine.asked} == {2}


class SlowToSetUp(CountingEnvironment):
    """The first episode of a task is set up last, and one of them fails before it asks for a reply."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self._fails = fails
        self._runs = 0

    async def run(self, task: Task, policy: Policy) -> Episode:
        number = self._runs
        self._runs += 1
        for _ in range(8 - 2 * number):
            await asyncio.sleep(0)
        if number == self._fails:
            return Episode([], Score(0.0), "no sandbox")
        return await super().run(task, policy)


async def test_samples_begin_in_the_order_of_their_indices_however_long_their_set_up_takes() -> (
    None
):
    engine, lease = Engine(), lease_of(5)
    played = await generation(engine, environment=SlowToSetUp(fails=1)).generator.play(lease)
    task = counting_task(5)
    seeds = [sample_seed(RUN_ID, lease, NODE, task.digest, index) for index in range(4)]
    assert [request.seed for request in engine.asked] == seeds[:3]
    assert [one.error for one in played.groups[0].rollouts] == ["", "", "", "no sandbox"]


class Renewed(Engine):
    """Never ends the first sample before the others have; by then the policy is another one."""

    def __init__(self, *, dies: bool) -> None:
        super().__init__(fails_at=1 if dies else -1, error=EngineLost("dead"))
        self.others_done = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        version = 3 if len(self.asked) < 4 else 4
        if not self.asked and self._fails_at < 0:
            self.asked.append(request)
            await asyncio.sleep(3600)  # until its permit is taken back
        completion = await super().generate(request)
        if not self.now:
            self.others_done.set()
        return replace(completion, policy_first=version, policy_last=version)

    def stats(self) -> EngineStats:
        return EngineStats()


class NoRoom(Concurrency):
    """Takes one sequence back at every look."""

    def observe(self, *_: Any, **__: Any) -> Decision:
        return Decision(take_back=1)


@pytest.mark.parametrize("why", ["its engine died", "there was no room"])
async def test_a_sample_begun_anew_under_a_newer_policy_than_later_ones_is_withdrawn(
    why: str,
) -> None:
    engine, lease = Renewed(dies=why == "its engine died"), lease_of(5)
    work = generation(engine, concurrency=NoRoom)
    playing = asyncio.create_task(work.generator.play(lease))
    if why == "there was no room":
        await engine.others_done.wait()
        work.admission.look()
    (group,) = (await playing).groups
    assert len(engine.asked) == 5
    assert [bool(one.branches) for one in group.rollouts] == [False, True, True, True]
    checked = check_submission(Submission(b"", (group,), "hf"), lease, MANIFEST, version=4)
    (rejection,) = (one for one in checked.rejections if one.rollout == 0)
    assert rejection.reason == Reason.WITHDRAWN
    assert rejection.detail.startswith("it had drawn 0 tokens when policy 4 came")


async def test_a_task_that_is_another_one_here_is_reported_and_not_played() -> None:
    engine = Engine()
    lease = lease_of(5)
    foreign = type(lease.tasks[0])(6, lease.tasks[0].digest)
    played = await generation(engine).generator.play(
        Lease(1, (foreign,), 4, lease.seed, 0, lease.deadline, 1000)
    )
    assert [one.error for one in played.groups[0].rollouts] == [
        "this node's environment makes another task of that index"
    ] * 4
    assert engine.asked == []


@pytest.mark.parametrize("error", [EngineError("dead"), EngineLost("dead")], ids=repr)
async def test_when_the_engine_fails_nothing_of_the_lease_goes_on(error: EngineError) -> None:
    engine = Engine(fails_at=6, error=error)
    with pytest.raises(type(error), match="dead"):
        await generation(engine).generator.play(lease_of(5, 9))
    assert engine.now == 0
    assert len(asyncio.all_tasks()) == 1


async def test_a_lease_that_runs_out_of_time_leaves_nothing_behind() -> None:
    engine = Engine()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.002):
            await generation(engine).generator.play(lease_of(5, 9))
    assert engine.now == 0
    assert len(asyncio.all_tasks()) == 1


def test_a_failed_rollout_travels_with_its_reason() -> None:
    record = rollouts.rollout_record(Episode([], Score(0.0), "x" * 1000))
    assert (record.branches, record.reward, record.error) == ((), 0.0, "x" * 500)


def episode_of(*branches: tuple[bytes, tuple[bytes, ...]]) -> Any:
    """An episode whose branches were made under these plans, with these boundaries."""
    from primerl.node.environments.environment import Branch

    made = [
        Branch([5, 6], [False, True], [0.0, -1.0], 3, 3, "stop", boundaries=parts, plan=plan)
        for plan, parts in branches
    ]
    return Episode(made, Score(1.0))


def test_a_submission_names_one_plan_and_what_another_one_made_goes_without() -> None:
    one, other = (b"plan one", (b"a" * 8,)), (b"plan two", (b"b" * 8, b"c" * 8))
    groups = [
        [episode_of(one), episode_of(other), episode_of((b"", ()))],
        [episode_of(one, one), episode_of()],
    ]
    plan, parts = rollouts.crossed(groups)
    assert plan == b"plan one"
    assert [(each.group, each.rollout, each.branch) for each in parts] == [
        (0, 0, 0),
        (1, 0, 0),
        (1, 0, 1),
    ]
    assert {each.boundaries for each in parts} == {(b"a" * 8,)}
    assert rollouts.crossed([[episode_of((b"", ()))]]) == (b"", ())
    assert rollouts.crossed([[episode_of((b"plan one", ()))]]) == (b"plan one", ())
    assert rollouts.crossed([[]]) == (b"", ())


def test_turns_of_one_plan_tell_what_crossed_and_turns_of_several_do_not() -> None:
    from primerl.node.environments.environment import Branch

    def turn(plan: bytes, *parts: bytes) -> Completion:
        return Completion([7], [-0.5], "stop", 3, 3, boundaries=parts, plan=plan)

    def joined(*turns: Completion) -> tuple[tuple[bytes, ...], bytes]:
        made = Branch.of_turns([5, 7, 6, 7], [False, True] * 2, [0.0, -0.5] * 2, turns)
        return made.boundaries, made.plan

    first, second = turn(b"p", b"a" * 8, b"b" * 8), turn(b"p", b"c" * 8, b"d" * 8)
    assert joined(first, second) == ((b"a" * 8 + b"c" * 8, b"b" * 8 + b"d" * 8), b"p")
    assert joined(first, turn(b"q", b"c" * 8, b"d" * 8)) == ((), b"q")
    assert joined(first, turn(b"p")) == ((), b"p")
    assert joined(first, turn(b"p", b"c" * 8)) == ((), b"p")
    assert joined(turn(b"")) == ((), b"")
