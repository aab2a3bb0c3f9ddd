"""Cheats with whole groups: what is left out, repeated, copied, renamed, or rewarded."""

from collections.abc import Awaitable, Callable

import msgspec

from primerl.protocol.leases import Lease
from primerl.protocol.rollouts import (
    BranchRecord,
    GroupRecord,
    RolloutRecord,
    pack_f32,
    unpack_f32,
)

from .cheat_samplers import AT_LEAST, MakeSampler, previous_version
from .cheat_world import Groups, Sent, Workshop

Work = Callable[[Workshop, Lease], Awaitable[Groups]]


def sampled(make: MakeSampler) -> Work:
    """The lease played with another sampler."""

    async def work(shop: Workshop, lease: Lease) -> Groups:
        return await shop.play(lease, await make(shop))

    return work


async def honest_work(shop: Workshop, lease: Lease) -> Groups:
    """No cheat."""
    return await shop.play(lease, await shop.honest())


async def older_proofs(shop: Workshop, lease: Lease) -> Groups:
    """Honest tokens with the proofs of what the policy before said to the same prompt."""
    before = await shop.play(lease, await previous_version(shop))
    now = await honest_work(shop, lease)

    def mixed(branch: BranchRecord, old: BranchRecord) -> BranchRecord:
        proof = (old.proof * (len(branch.proof) // len(old.proof) + 1))[: len(branch.proof)]
        return msgspec.structs.replace(branch, proof=proof)

    return [
        _with_branches(
            group, lambda index, one, old=old: mixed(one, old.rollouts[index].branches[0])
        )
        for group, old in zip(now, before, strict=True)
    ]


async def forged_rewards(shop: Workshop, lease: Lease) -> Groups:
    """Everything was right."""
    groups = await honest_work(shop, lease)
    return [
        msgspec.structs.replace(
            group,
            rollouts=tuple(msgspec.structs.replace(one, reward=2.0) for one in group.rollouts),
        )
        for group in groups
    ]


async def dropped_failures(shop: Workshop, lease: Lease) -> Groups:
    """The worse half of each group is left out."""
    return _without_failures(await honest_work(shop, lease), "")


async def failures_as_errors(shop: Workshop, lease: Lease) -> Groups:
    """The worse half of each group is told as the environment's errors."""
    return _without_failures(await honest_work(shop, lease), "the environment failed")


def _without_failures(groups: Groups, error: str) -> Groups:
    left_out = RolloutRecord((), 0.0, error)
    found: Groups = []
    for group in groups:
        least = sorted(one.reward for one in group.rollouts)[len(group.rollouts) // 2]
        kept = tuple(one if one.reward >= least else left_out for one in group.rollouts)
        found.append(msgspec.structs.replace(group, rollouts=kept))
    return found


async def repeated_best(shop: Workshop, lease: Lease) -> Groups:
    """The best rollout of each group in the place of all others."""
    groups = await honest_work(shop, lease)
    return [
        msgspec.structs.replace(
            group,
            rollouts=(max(group.rollouts, key=lambda one: one.reward),) * len(group.rollouts),
        )
        for group in groups
    ]


async def repeated_bundle(shop: Workshop, lease: Lease) -> Groups:
    """What was sent for another lease of the same tasks."""
    other = msgspec.structs.replace(lease, lease_id=lease.lease_id + (1 << 32))
    groups = await honest_work(shop, other)
    shop.sent_before.append(Sent(shop.node, other, groups))
    return groups


async def copied_bundle(shop: Workshop, lease: Lease) -> Groups:
    """What another node sent for the same tasks."""
    victim = bytes(31) + b"v"
    other = msgspec.structs.replace(lease, lease_id=lease.lease_id + (1 << 32))
    groups = await shop.play(other, await shop.honest(), node=victim)
    shop.sent_before.append(Sent(victim, other, groups))
    return groups


async def wrong_prompt(shop: Workshop, lease: Lease) -> Groups:
    """The work on easier tasks under the names of those that were leased."""
    easier = await shop.world.lease(len(lease.tasks), lease.group_size, first_task=1 << 20)
    easier = msgspec.structs.replace(lease, tasks=easier.tasks)
    groups = await honest_work(shop, easier)
    return [
        msgspec.structs.replace(group, task_index=task.index, task_digest=task.digest)
        for group, task in zip(groups, lease.tasks, strict=True)
    ]


async def cut_without_stop(shop: Workshop, lease: Lease) -> Groups:
    """Replies that simply end."""

    def cut(index: int, branch: BranchRecord) -> BranchRecord:
        drawn = unpack_f32(branch.logprobs)
        if len(drawn) <= AT_LEAST:
            return branch
        less = len(drawn) - AT_LEAST
        return msgspec.structs.replace(
            branch,
            tokens=branch.tokens[: -4 * less],
            sampled=branch.sampled[:-less],
            logprobs=pack_f32(drawn[:-less]),
            proof=branch.proof[: shop.fingerprint.size(AT_LEAST)],
            finish="length",
        )

    return [_with_branches(group, cut) for group in await honest_work(shop, lease)]


def _with_branches(
    group: GroupRecord, change: Callable[[int, BranchRecord], BranchRecord]
) -> GroupRecord:
    rollouts = [
        msgspec.structs.replace(one, branches=tuple(change(index, b) for b in one.branches))
        for index, one in enumerate(group.rollouts)
    ]
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))
