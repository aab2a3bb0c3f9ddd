from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lease_cases import A, B, granted, policy, task_digest
from support.protocol_cases import LEASE, RUN, refuses

from primerl.crypto.hashing import digest
from primerl.node.trainer.lease_book import LeaseBook
from primerl.protocol.errors import Reason
from primerl.protocol.leases import Lease, TaskRef, check_assignment, sample_seed
from primerl.protocol.manifests import encode
from primerl.protocol.session import decode
from primerl.protocol.version import MAX_PROMPT_TOKENS

# -- what was assigned can be checked ----------------------------------------------------------------


def test_a_lease_of_the_environments_tasks_passes() -> None:
    check_assignment(granted(LeaseBook(policy())), task_digest)


@pytest.mark.parametrize(
    "tasks",
    [
        (TaskRef(1, task_digest(2)),),
        (TaskRef(1, task_digest(1)), TaskRef(2, bytes(32))),
        (TaskRef(1, task_digest(1)), TaskRef(1, task_digest(1))),
    ],
)
def test_a_lease_of_other_tasks_or_of_one_task_twice_is_refused(tasks: tuple[TaskRef, ...]) -> None:
    with refuses(Reason.WRONG_TASK):
        check_assignment(msgspec.structs.replace(LEASE, tasks=tasks), task_digest)


# -- seeds -------------------------------------------------------------------------------------------

SEED_OF: dict[str, Any] = {
    "run": RUN,
    "lease": LEASE,
    "node": A,
    "task": task_digest(1),
    "index": 1,
    "turn": 1,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"run": digest(b"other")},
        {"lease": msgspec.structs.replace(LEASE, lease_id=LEASE.lease_id + 1)},
        {"lease": msgspec.structs.replace(LEASE, seed=digest(b"other"))},
        {"node": B},
        {"task": task_digest(2)},
        {"index": 0},
        {"turn": 0},
        {"index": 256},
        {"turn": 2},
    ],
)
def test_a_samples_seed_is_bound_to_every_argument(changes: dict[str, Any]) -> None:
    assert sample_seed(**{**SEED_OF, **changes}) != sample_seed(**SEED_OF)


def test_a_samples_seed_is_reproducible_and_of_63_bits() -> None:
    seeds = [
        sample_seed(RUN, LEASE, A, task_digest(task), index, turn)
        for task in range(4)
        for index in range(16)
        for turn in range(4)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62
    assert sample_seed(RUN, LEASE, A, task_digest(0), 0) == seeds[0]


@given(st.integers(0, 4095), st.integers(0, 4095), st.integers(0, 4095), st.integers(0, 4095))
def test_index_and_turn_do_not_stand_in_for_each_other(i: int, t: int, j: int, u: int) -> None:
    left = sample_seed(RUN, LEASE, A, task_digest(0), i, t)
    assert (left == sample_seed(RUN, LEASE, A, task_digest(0), j, u)) == ((i, t) == (j, u))


@pytest.mark.parametrize(
    "changes",
    [
        {"tasks": ()},
        {"tasks": LEASE.tasks * 2049},
        {"group_size": 0},
        {"group_size": 4097},
        {"seed": bytes(31)},
        {"min_version": -1},
        {"deadline": -1.0},
        {"max_bytes": 0},
        {"max_bytes": 2**40 + 1},
        {"lease_id": -1},
        {"lease_id": 2**53 + 1},
        {"tasks": (TaskRef(-1, bytes(32)),)},
        {"tasks": (TaskRef(0, bytes(33)),)},
        {"prompts": (b"",)},
        {"prompts": (bytes(4 * MAX_PROMPT_TOKENS + 4),)},
        {"prompts": (bytes(4),) * 4097},
    ],
)
def test_a_lease_has_limits(changes: dict[str, Any]) -> None:
    with refuses(Reason.MALFORMED):
        decode(encode(msgspec.structs.replace(LEASE, **changes)), Lease)
