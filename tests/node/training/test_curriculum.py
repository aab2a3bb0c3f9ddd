"""Which tasks are chosen, and which groups are admitted."""

import math
from collections import Counter
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError
from support.lease_cases import A, B, granted, indices, policy
from support.protocol_cases import NOW

from primerl.node.config.training import CurriculumConfig, SamplerConfig, TrainingConfig
from primerl.node.trainer.lease_book import LeaseBook, TaskQueue
from primerl.node.trainer.state import TrainerState, positions
from primerl.node.training.buffer import BranchTokens, RolloutGroup, ScoredRollout
from primerl.node.training.curriculum import Curriculum

POOLS = {
    "hard": {"threshold": 0.25, "weight": 0.5},
    "normal": {"threshold": 0.75, "weight": 2.0},
    "easy": {"threshold": 1.0, "weight": 0.0},
}
LOW_SIGNAL = {"low_signal": {"reject_min": -0.05, "reject_max": 0.05}}


def pools(num_tasks: int = 6, seed: int = 0, **changes: object) -> Curriculum:
    sampler = {"type": "difficulty_pool", "num_tasks": num_tasks, "pools": POOLS, **changes}
    training = TrainingConfig.model_validate({"curriculum": {"sampler": sampler}})
    return Curriculum(training, environment="e", seed=seed)


def gated(gates: object, **training: object) -> Curriculum:
    config = TrainingConfig.model_validate({"curriculum": {"gates": gates}, **training})
    return Curriculum(config, environment="e", seed=0)


def group(rewards: list[float], task: int = 0) -> RolloutGroup:
    branch = BranchTokens([1, 2], [False, True], [0.0, -1.0])
    rollouts = [ScoredRollout([branch], reward) for reward in rewards]
    return RolloutGroup(b"t", "e", rollouts, 0, b"n", b"lease", task)


def draws(subject: Curriculum, count: int, first: int = 0) -> list[int | None]:
    return [subject.draw(number, ()) for number in range(first, first + count)]


# -- the sampler ------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_tasks_and_another_seed_others() -> None:
    assert draws(pools(50), 40) == draws(pools(50), 40)
    assert draws(pools(50), 40) != draws(pools(50, seed=1), 40)
    # and it does not matter what was drawn before
    assert draws(pools(50), 40)[30:] == draws(pools(50), 10, first=30)


def test_tasks_are_sampled_in_proportion_to_the_weights_of_their_pools() -> None:
    """Unseen 1, hard 0.5, normal 2, easy 0: the closed form is weight / sum of weights."""
    subject = pools(4)
    for task, rewards in enumerate([[0.0, 0.5], [1.0, 0.0], [1.0, 1.0]]):
        subject.observe(group(rewards, task))
    assert subject.rewards == {0: 0.25, 1: 0.5, 2: 1.0}  # a threshold is inclusive
    found = Counter(draws(subject, 7000))
    for task, weight in enumerate([0.5, 2.0, 0.0, 1.0]):
        share = weight / 3.5
        error = 5 * math.sqrt(7000 * share * (1 - share))
        assert abs(found[task] - 7000 * share) <= error
    assert found[2] == 0


@pytest.mark.parametrize(
    ("reward", "pool"),
    [(-3.0, "hard"), (0.25, "hard"), (0.26, "normal"), (1.0, "easy"), (9.0, "easy")],
)
def test_a_task_is_in_the_first_pool_that_its_reward_does_not_exceed(
    reward: float, pool: str
) -> None:
    subject = pools(3)
    subject.observe(group([reward, reward], 1))
    sizes = {"unseen": 2.0, "hard": 0.0, "normal": 0.0, "easy": 0.0, pool: 1.0}
    assert subject.metrics() == {f"curriculum/e/sampler/pool/{k}": v for k, v in sizes.items()}


def test_a_tasks_newest_group_counts() -> None:
    subject = pools(2)
    for rewards in ([1.0, 1.0], [0.0, 0.0]):
        subject.observe(group(rewards, 1))
    assert subject.rewards == {1: 0.0}


def test_a_task_on_lease_is_not_leased_again() -> None:
    subject = pools(4)
    assert {subject.draw(number, {0, 2, 900}) for number in range(50)} == {1, 3}
    assert subject.draw(0, {0, 1, 2, 3}) is None


def test_when_all_tasks_have_no_weight_none_is_sampled() -> None:
    subject = pools(2)
    for task in (0, 1):
        assert not subject.exhausted
        subject.observe(group([1.0, 1.0], task))
    assert subject.exhausted
    assert subject.draw(5, ()) is None
    subject.observe(group([0.0, 1.0], 1))
    assert not subject.exhausted


@pytest.mark.parametrize("task", [-1, 6, 2**40])
def test_a_group_of_another_task_changes_no_weight(task: int) -> None:
    subject = pools(6)
    before = draws(subject, 20)
    assert subject.observe(group([0.0, 0.0], task))
    assert subject.rewards == {}
    assert draws(subject, 20) == before


def test_a_reward_that_is_no_number_is_not_remembered() -> None:
    subject = pools(3)
    subject.observe(group([math.nan, 1.0], 1))
    subject.observe(group([math.inf, 1.0], 2))
    assert subject.rewards == {}


# -- leases and checkpoints -------------------------------------------------------------------------


def book_of(subject: Curriculum, **changes: int) -> LeaseBook:
    return LeaseBook(policy(**changes), tasks=[TaskQueue(draw=subject.draw)])


def test_leases_name_the_sampled_tasks_and_none_twice_at_a_time() -> None:
    book = book_of(pools(9))
    first, second, third = granted(book, A), granted(book, A), granted(book, B)
    assert sorted(indices(first) + indices(second) + indices(third)) == list(range(9))
    assert book.tasks[0].next_task == 9
    again = pools(9)
    assert indices(first)[0] == again.draw(0, ())
    book.settle(third.lease_id, B, NOW)
    assert set(indices(granted(book, B))) == set(indices(third))


def test_a_lease_is_smaller_where_fewer_tasks_are_left_and_none_is_empty() -> None:
    book = book_of(pools(4))
    assert len(granted(book, A).tasks) == 3
    assert len(granted(book, B).tasks) == 1
    assert (
        book.grant(
            A, version=7, capacity=9, digest_of=lambda _, index: bytes([index]), seed=b"s", now=NOW
        )
        is None
    )
    assert book.tasks[0].next_task == 4


def test_tasks_of_an_expired_lease_go_out_before_new_ones() -> None:
    book = book_of(pools(30))
    lost = granted(book, A)
    coming = book.upcoming(0, 2)
    book.expire(NOW + 61)
    again = granted(book, B, now=NOW + 61)
    assert indices(again) == indices(lost)
    assert indices(granted(book, B, now=NOW + 61)) == coming[:3]


def state(book: LeaseBook, subject: Curriculum) -> TrainerState:
    whole = TrainerState(
        tasks=positions(book, ["e"]),
        verified_up_to=0,
        history=[],
        accepted=0,
        rejected={},
        received=0,
        delta_bytes=0,
        full_bytes=0,
        staleness_history=[],
        staleness_max=0,
        curriculum={subject.environment: dict(subject.rewards)},
    )
    return msgspec.json.decode(msgspec.json.encode(whole), type=TrainerState)


def test_a_restart_goes_on_with_the_rewards_and_the_draws_of_the_checkpoint() -> None:
    subject = pools(40)
    book = book_of(subject)
    done = granted(book, A)
    book.settle(done.lease_id, A, NOW)
    for index in indices(done):
        subject.observe(group([0.0, 1.0], index))
    held = granted(book, A)
    saved = state(book, subject)
    after = granted(book, B)  # answered after the checkpoint, before the trainer was killed

    other = pools(40)
    other.restore(saved.curriculum["e"])
    resumed = book_of(other)
    saved.restore_tasks(resumed, ["e"], [after])
    assert other.rewards == subject.rewards
    assert indices(granted(resumed, A)) == indices(held)
    assert resumed.tasks[0].next_task == book.tasks[0].next_task
    # the unbroken run draws the same from here on, as the same tasks are out
    fresh = [other.draw(resumed.tasks[0].next_task + n, ()) for n in range(20)]
    assert fresh == [subject.draw(book.tasks[0].next_task + n, ()) for n in range(20)]


def test_a_resume_with_fewer_tasks_forgets_the_others() -> None:
    subject = pools(3)
    subject.restore({1: 0.5, 3: 0.5, -1: 0.5})
    assert subject.rewards == {1: 0.5}
    subject.restore({})
    assert draws(subject, 20) == draws(pools(3), 20)


# -- gates ------------------------------------------------------------------------------------------


def test_a_group_of_equal_rewards_is_not_admitted_and_counted() -> None:
    subject = gated({"signal": {}})
    assert [subject.observe(group(one)) for one in ([0.5, 0.5], [1.0, 1.0], [0.0, 1.0])] == [
        False,
        False,
        True,
    ]
    assert subject.metrics() == {"curriculum/e/admission_rate": pytest.approx(1 / 3)}
    assert subject.metrics() == {}
    subject.observe(group([0.1] * 3))
    assert subject.rejected_in_a_row == 1


def test_a_range_rejects_what_is_within_it_bounds_included() -> None:
    subject = gated(LOW_SIGNAL)
    assert not subject.observe(group([0.5, 0.6]))  # advantages of -0.05 and 0.05
    assert subject.observe(group([0.5, 0.62]))


def test_all_gates_have_to_admit_a_group() -> None:
    subject = gated({"signal": {}, "perfect": {"reject_min": -0.5, "reject_max": 1.0}})
    assert subject.observe(group([0.0, 3.0]))
    assert not subject.observe(group([0.0, 1.0]))


def test_a_gate_judges_the_advantages_that_are_trained() -> None:
    overlong = {"max_tokens": 4, "buffer_tokens": 4, "penalty": 1.0}
    longer = BranchTokens([1, 2, 2], [False, True, True], [0.0, -1.0, -1.0])
    uneven = group([1.0])
    uneven.rollouts.append(ScoredRollout([longer], 1.0))
    assert not gated({"signal": {}}).observe(uneven)
    assert gated({"signal": {}}, overlong=overlong).observe(uneven)


@pytest.mark.parametrize("loss", ["ce", "reverse_kl"])
def test_a_loss_that_reads_no_advantage_has_no_gate(loss: str) -> None:
    assert gated({"signal": {}}, loss={"type": loss}).observe(group([1.0, 1.0]))


def test_without_gates_every_group_is_admitted_and_nothing_is_reported() -> None:
    subject = gated({})
    assert subject.observe(group([1.0, 1.0]))
    assert subject.metrics() == {}


# -- config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        {"type": "difficulty_pool"},
        {"num_tasks": 5},
        {"type": "difficulty_pool", "num_tasks": 5, "pools": {}},
        {"pools": {"one": {"threshold": 1.0, "weight": 0.0}}},
        {"pools": {n: {"threshold": 1.0, "weight": 1.0} for n in "ab"}},
        {"pools": {"one": {"threshold": math.nan, "weight": 1.0}}},
        {"pools": {"one/two": {"threshold": 1.0, "weight": 1.0}}},
        {"pools": {"one": {"threshold": 1.0, "weight": -1.0}}},
        {"type": "difficulty_pool", "num_tasks": 10**7},
    ],
)
def test_a_sampler_that_cannot_be_is_refused(sampler: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplerConfig.model_validate(sampler)


@pytest.mark.parametrize("bounds", [(0.1, 0.0), (math.nan, 0.0), (0.0, math.inf)])
def test_a_range_that_is_none_is_refused(bounds: tuple[float, float]) -> None:
    gate = {"reject_min": bounds[0], "reject_max": bounds[1]}
    with pytest.raises(ValidationError):
        CurriculumConfig.model_validate({"gates": {"one": gate}})
