"""Leases: which tasks a node is to roll out, with which seeds, until when. No I/O; time is an argument.

The signed lease records the assignment: it travels inside the submission, so the trainer or a validator finds
task and seed again from (run, lease, index) alone. Tasks are not computed from the lease's number, since the
size of a grant depends on the capacity of the moment and on tasks that come back. A worker has no say in
either, and check_assignment() tells whether the tasks are the environment's own.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec

from ..crypto.hashing import Digest, derive
from .envelope import Purpose
from .errors import Reason, RemoteProtocolError
from .leaders import Leaders
from .manifests import (
    MAX_ENVIRONMENTS,
    EnvironmentContract,
    GroupSize,
    RunManifest,
    Version,
)
from .version import MAX_PROMPT_TOKENS


class TaskRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A task by index, and by digest so that a differing environment is noticed before work is done."""

    index: Version
    digest: Digest


LEASED_PROMPTS = "leased-prompts"
"""Id of the environment whose tasks are nothing but a prompt, which comes with the lease, and one reply."""
Prompt = Annotated[bytes, msgspec.Meta(min_length=4, max_length=4 * MAX_PROMPT_TOKENS)]
"""Token ids as little-endian u32."""


def prompt_digest(prompt: bytes) -> bytes:
    """Compute the digest of the task that is this packed prompt."""
    return derive("leased prompt", prompt)


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The tasks that one node is to generate; sealed by the trainer to that node."""

    lease_id: Version
    tasks: Annotated[tuple[TaskRef, ...], msgspec.Meta(min_length=1, max_length=4096)]
    group_size: GroupSize
    seed: Digest
    """Fresh randomness of the trainer, so that no sample can be computed before the lease exists."""
    min_version: Version
    """Generate with this policy version or a newer one."""
    deadline: Annotated[float, msgspec.Meta(ge=0, le=2**53)]
    """Unix seconds."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    term: Version = 0
    """Epoch of min_version: a version of an abandoned epoch is another policy of the same number."""
    environment: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ENVIRONMENTS)] = 0
    """Place in RunManifest.environments of the one environment whose tasks these are."""
    prompts: Annotated[tuple[Prompt, ...], msgspec.Meta(max_length=4096)] = ()
    """Prompts of the tasks, in order, if the environment has none of its own (LEASED_PROMPTS); else empty."""


def environment_of(run: RunManifest, lease: Lease) -> EnvironmentContract:
    """Return the environment of a lease. Raises RemoteProtocolError: WRONG_TASK if the run has none there."""
    if lease.environment >= len(run.environments):
        detail = f"environment {lease.environment} of {len(run.environments)}"
        raise RemoteProtocolError(Reason.WRONG_TASK, detail)
    return run.environments[lease.environment]


def sample_seed(
    run: bytes, lease: Lease, node: bytes, task: bytes, index: int, turn: int = 0
) -> int:
    """Derive the sampling seed (63 bits) of sample `index` of `task` from everything that it is bound to.

    The environment is bound by the lease's own seed: a lease is of one environment.
    """
    name = derive(
        "sample seed",
        run,
        lease.lease_id.to_bytes(8, "big"),
        lease.seed,
        node,
        task,
        index.to_bytes(4, "big"),
        turn.to_bytes(4, "big"),
    )
    return int.from_bytes(name[:8], "big") >> 1


def check_assignment(lease: Lease, digest_of: Callable[[int], bytes]) -> None:
    """Check that a lease names tasks of its environment, each once; `digest_of` is that environment's.

    Raises:
        RemoteProtocolError: WRONG_TASK. Errors that `digest_of` raises for an unknown index are passed on.
    """
    indices: set[int] = set()
    for task in lease.tasks:
        if task.index in indices:
            raise RemoteProtocolError(Reason.WRONG_TASK, f"task {task.index} twice in one lease")
        indices.add(task.index)
        if digest_of(task.index) != task.digest:
            detail = f"task {task.index} differs: another environment, or another version of it"
            raise RemoteProtocolError(Reason.WRONG_TASK, detail)


def open_lease(sealed: bytes, leaders: Leaders, worker: bytes) -> Lease:
    """Open the lease inside a submission: a leader signed it, for this worker. Its deadline is not checked.

    Raises RemoteProtocolError.
    """
    return leaders.unseal(sealed, Purpose.LEASE, Lease, recipient=worker).body
