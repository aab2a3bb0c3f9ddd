"""What a trainer leases out, as its configuration says."""

from ..protocol.leases import LeasePolicy
from ..protocol.pipelines import MAX_STAGES
from ..protocol.version import MIB
from .config import RunConfig

BYTES_PER_TOKEN = 64 + 8 * (MAX_STAGES - 1)
"""Generous: of one token in a submission its id, mask, logprob, proof and framing, and what the stages of the
longest pipeline say of it."""
MAX_SUBMISSION = 256 * MIB


def lease_policy(config: RunConfig) -> LeasePolicy:
    """The policy of leases of a run."""
    rollouts = config.rollouts
    tokens = config.training.seq_len * rollouts.group_size * rollouts.groups_per_lease
    return LeasePolicy(
        group_size=rollouts.group_size,
        groups_per_batch=rollouts.groups_per_batch,
        groups_per_lease=rollouts.groups_per_lease,
        max_off_policy_steps=rollouts.max_off_policy_steps,
        leases_per_worker=rollouts.leases_per_worker,
        timeout_s=rollouts.lease_timeout_s,
        max_bytes=min(MIB + tokens * BYTES_PER_TOKEN, MAX_SUBMISSION),
    )
