"""What a trainer leases out, as its configuration says."""

from ...protocol.leases import LeasePolicy
from ...protocol.manifests import RunManifest
from ...protocol.pipelines import MAX_STAGES
from ...protocol.version import MIB
from ..config.run import EngineConfig, RunConfig
from ..ops.errors import UsageError

BYTES_PER_TOKEN = 64 + 8 * (MAX_STAGES - 1)
"""Generous: of one token in a submission its id, mask, logprob, proof and framing, and what the stages of the
longest pipeline say of it."""
MAX_SUBMISSION = 256 * MIB


def longest_sequence(config: RunConfig, positions: int) -> int:
    """Tokens that a sequence of a run may have, prompt and replies: what every worker serves.

    A sequence has to fit into a row of training, where several are packed, into the model's `positions` (0:
    not known) and into engine.max_model_len, if that was set. Raises UsageError where no reply fits.
    """
    longest = min(config.training.seq_len, positions or config.training.seq_len)
    if "max_model_len" in config.engine.model_fields_set:
        longest = min(longest, config.engine.max_model_len)
    if config.sampling.max_tokens >= longest:
        raise UsageError(
            f"sampling.max_tokens is {config.sampling.max_tokens}, and a sequence of this run has at most "
            f"{longest} tokens (training.seq_len, the model's positions, engine.max_model_len): lower it"
        )
    return longest


def served_length(config: EngineConfig, run: RunManifest) -> int:
    """Tokens of the longest sequence that a worker's engine serves: what the run's manifest says.

    Fewer where engine.max_model_len was set to fewer; its default says nothing of this run.
    """
    longest = run.limits.max_model_len
    if "max_model_len" in config.model_fields_set:
        longest = min(longest, config.max_model_len)
    return longest


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
