"""Forged rollouts inside valid envelopes: each costs itself, by the right reason, and nothing beside it."""

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.counting_environment import ASK, STOP
from support.hostile import Rogue, altered, altered_branch, reason_of, say
from support.swarm import VOCABULARY, Swarm

from primerl.protocol.errors import Reason
from primerl.protocol.manifests import PolicyHead
from primerl.protocol.rollouts import (
    BranchRecord,
    GroupRecord,
    Span,
    Verdict,
    pack_f32,
    unpack_f32,
    unpack_u32,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

Forge = Callable[[BranchRecord, PolicyHead], BranchRecord]
replace = msgspec.structs.replace


def number(branch: BranchRecord) -> int:
    """The number that was shown."""
    return unpack_u32(branch.tokens)[1]


def retold(branch: BranchRecord, said: list[int], head: PolicyHead) -> BranchRecord:
    """Another reply to the same prompt, with the logprobs that it should have."""
    return say([ASK, number(branch)], said, head)


def of_another_policy(branch: BranchRecord, head: PolicyHead) -> BranchRecord:
    """The same tokens, with the logprobs of weights that say something clearly different of them."""
    said = unpack_u32(branch.tokens)[2:]
    honest = unpack_f32(retold(branch, said, head).logprobs)
    for seed in range(256):
        told = retold(branch, said, replace(head, state=bytes([seed]) * 32))
        apart = [abs(a - b) for a, b in zip(unpack_f32(told.logprobs), honest, strict=True)]
        if sum(apart) > 0.2 * len(apart):
            return replace(branch, logprobs=told.logprobs)
    raise AssertionError("256 policies agree")


def retold_by(branch: BranchRecord, head: PolicyHead) -> BranchRecord:
    """The same reply, as another policy would prove it."""
    return retold(branch, unpack_u32(branch.tokens)[2:], head)


def sampled_count(branch: BranchRecord) -> int:
    return sum(branch.sampled)


FORGERIES: dict[str, tuple[Forge, Reason]] = {
    "logprobs of a sure thing": (
        lambda b, h: replace(b, logprobs=pack_f32([-0.01] * sampled_count(b))),
        Reason.BAD_LOGPROBS,
    ),
    "logprobs above zero": (
        lambda b, h: replace(b, logprobs=pack_f32([2.0] * sampled_count(b))),
        Reason.BAD_LOGPROBS,
    ),
    "logprobs that are no numbers": (
        lambda b, h: replace(b, logprobs=struct.pack("<f", float("nan")) * sampled_count(b)),
        Reason.MALFORMED,
    ),
    "logprobs without bound": (
        lambda b, h: replace(b, logprobs=struct.pack("<f", float("-inf")) * sampled_count(b)),
        Reason.MALFORMED,
    ),
    "fewer logprobs than tokens": (
        lambda b, h: replace(b, logprobs=b.logprobs[4:]),
        Reason.MALFORMED,
    ),
    "an array that is cut short": (lambda b, h: replace(b, tokens=b.tokens[:-1]), Reason.MALFORMED),
    "a mask that is too short": (lambda b, h: replace(b, sampled=b.sampled[:-1]), Reason.MALFORMED),
    "a mask of other values": (
        lambda b, h: replace(b, sampled=b.sampled[:-1] + b"\x02"),
        Reason.MALFORMED,
    ),
    "a prompt that was sampled": (
        lambda b, h: replace(b, sampled=b"\x01" * len(b.sampled), logprobs=bytes(len(b.tokens))),
        Reason.MALFORMED,
    ),
    "a policy of the future": (
        lambda b, h: replace(b, policy_first=h.version + 1, policy_last=h.version + 1),
        Reason.FUTURE_POLICY,
    ),
    "a policy older than the lease allows": (lambda b, h: replace(b, policy_first=0), Reason.STALE),
    "policies in the wrong order": (
        lambda b, h: replace(b, policy_first=h.version, policy_last=h.version - 1),
        Reason.MALFORMED,
    ),
    "a policy that was not the one that drew": (of_another_policy, Reason.BAD_LOGPROBS),
    "the prompt of another task": (
        lambda b, h: say([ASK, number(b) ^ 2], [number(b), STOP], h),
        Reason.BAD_PROMPT,
    ),
    "a token that the model has not": (
        lambda b, h: retold(b, [VOCABULARY, STOP], h),
        Reason.TOKEN_OUT_OF_RANGE,
    ),
    "the largest token there is": (
        lambda b, h: retold(b, [2**32 - 1, STOP], h),
        Reason.TOKEN_OUT_OF_RANGE,
    ),
    "tokens after the end": (
        lambda b, h: retold(b, [number(b) + 1, STOP, 5, STOP], h),
        Reason.BAD_TERMINATION,
    ),
    "a reply cut short where it was good": (
        lambda b, h: retold(b, [number(b) + 1], h),
        Reason.BAD_TERMINATION,
    ),
    "a reply longer than the contract": (
        lambda b, h: retold(b, [5, 5, 5, 5, STOP], h),
        Reason.BAD_TERMINATION,
    ),
    "another way of ending": (lambda b, h: replace(b, finish="length"), Reason.BAD_TERMINATION),
    "more tokens than the model takes": (lambda b, h: retold(b, [5] * 100, h), Reason.TOO_LARGE),
    "no tokens": (lambda b, h: replace(b, tokens=b"", sampled=b"", logprobs=b""), Reason.TOO_LARGE),
    "several policies and no word where": (
        lambda b, h: replace(
            b, policy_last=h.version, spans=(Span(0, h.version), Span(0, h.version))
        ),
        Reason.MALFORMED,
    ),
    "a span beyond the reply": (
        lambda b, h: replace(b, spans=(Span(0, h.version), Span(9, h.version + 1))),
        Reason.MALFORMED,
    ),
    "no proof": (lambda b, h: replace(b, proof=b""), Reason.BAD_PROOF),
    "a proof of a longer text": (
        lambda b, h: replace(b, proof=b.proof + b.proof[:8]),
        Reason.BAD_PROOF,
    ),
    "a proof of nothing": (lambda b, h: replace(b, proof=bytes(len(b.proof))), Reason.WRONG_MODEL),
    "the proof of another policy": (
        lambda b, h: replace(b, proof=retold_by(b, replace(h, state=bytes(32))).proof),
        Reason.WRONG_MODEL,
    ),
    "nothing sampled": (
        lambda b, h: replace(b, sampled=bytes(len(b.sampled)), logprobs=b""),
        Reason.MALFORMED,
    ),
}


async def verdict_on(
    swarm: Swarm, name: str, forge: Callable[[GroupRecord, PolicyHead], list[GroupRecord]]
) -> Verdict:
    """The verdict on a lease of four rollouts whose group was honest until `forge`."""
    async with Rogue(swarm, name) as rogue:
        await rogue.hello()
        lease, sealed = await rogue.lease()
        (group,) = await rogue.play(lease)
        forged = forge(group, await rogue.head())
        await rogue.submit(rogue.bundle(sealed, forged), lease.lease_id)
        return await rogue.verdict(lease.lease_id)


def rejected(verdict: Verdict) -> list[tuple[int, Reason]]:
    """(rollout, reason) of each; all four are judged."""
    assert verdict.accepted + len(verdict.rejections) == 4
    return [(one.rollout, one.reason) for one in verdict.rejections]


@pytest.mark.parametrize("name", FORGERIES)
async def test_a_forged_branch_costs_its_rollout_alone(siege: Swarm, name: str) -> None:
    forge, reason = FORGERIES[name]

    def forged(group: GroupRecord, head: PolicyHead) -> list[GroupRecord]:
        return [altered(group, 1, branches=(forge(group.rollouts[1].branches[0], head),))]

    assert rejected(await verdict_on(siege, name, forged)) == [(1, reason)]


async def test_words_that_the_seed_does_not_draw_cost_their_rollout(siege: Swarm) -> None:
    async with Rogue(siege, "composer") as rogue:
        await rogue.hello()
        while True:
            lease, sealed = await rogue.lease()
            (group,) = await rogue.play(lease)
            # a wrong answer, so that other words change no reward
            if wrong := [i for i, one in enumerate(group.rollouts) if one.reward == 0.0]:
                break
            await rogue.submit(rogue.bundle(sealed, [group]), lease.lease_id)
        branch = group.rollouts[wrong[0]].branches[0]
        said = [number(branch) + 7, number(branch) + 7, STOP]
        forged = altered(group, wrong[0], branches=(retold(branch, said, await rogue.head()),))
        await rogue.submit(rogue.bundle(sealed, [forged]), lease.lease_id)
        verdict = await rogue.verdict(lease.lease_id)
    found = [(one.rollout, one.reason) for one in verdict.rejections]
    assert found == [(wrong[0], Reason.BAD_SAMPLING)]


@pytest.mark.parametrize("reward", [1.5, -1.0, float("nan"), float("inf"), 1e300])
async def test_a_forged_reward_is_recomputed_and_refused(siege: Swarm, reward: float) -> None:
    verdict = await verdict_on(
        siege, f"reward {reward}", lambda group, head: [altered(group, 2, reward=reward)]
    )
    assert rejected(verdict) == [(2, Reason.BAD_REWARD)]


async def test_honest_work_is_accepted(siege: Swarm) -> None:
    verdict = await verdict_on(siege, "honest hand", lambda group, head: [group])
    assert (verdict.accepted, verdict.rejections, verdict.audited) == (4, (), 4)


async def test_an_index_that_is_missing_counts_as_failed(siege: Swarm) -> None:
    verdict = await verdict_on(
        siege, "picker", lambda group, head: [replace(group, rollouts=group.rollouts[:2])]
    )
    assert rejected(verdict) == [(2, Reason.MISSING_INDEX), (3, Reason.MISSING_INDEX)]


async def test_a_rollout_without_branches_or_error_counts_as_missing(siege: Swarm) -> None:
    verdict = await verdict_on(
        siege, "hollow", lambda group, head: [altered(group, 0, branches=())]
    )
    assert rejected(verdict) == [(0, Reason.MISSING_INDEX)]


WHOLE: dict[str, tuple[Callable[[GroupRecord], list[GroupRecord]], Reason]] = {
    "more rollouts than asked for": (
        lambda group: [replace(group, rollouts=group.rollouts * 2)],
        Reason.TOO_LARGE,
    ),
    "another task by index": (
        lambda group: [replace(group, task_index=group.task_index + 1)],
        Reason.WRONG_TASK,
    ),
    "another task by content": (
        lambda group: [replace(group, task_digest=bytes(32))],
        Reason.WRONG_TASK,
    ),
    "no group": (lambda group: [], Reason.WRONG_TASK),
    "a group too many": (lambda group: [group, group], Reason.WRONG_TASK),
}


@pytest.mark.parametrize("name", WHOLE)
async def test_a_bundle_that_is_not_the_work_of_its_lease_is_refused_whole(
    siege: Swarm, name: str
) -> None:
    forge, reason = WHOLE[name]
    verdict = await verdict_on(siege, name, lambda group, head: forge(group))
    assert rejected(verdict) == [(index, reason) for index in range(4)]


async def test_a_liar_is_banned_and_others_are_not(tmp_path: Path, model_dir: Path) -> None:
    # After each loss a worker rests for a quarter of a lease's time.
    rollouts = {"groups_per_batch": 64, "groups_per_lease": 1, "lease_timeout_s": 4.0}
    async with Swarm(tmp_path, model_dir, max_steps=3, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, "liar") as liar, Rogue(swarm, "bystander") as bystander:
            await liar.hello()
            await bystander.hello()
            for again in range(2):
                lease, sealed = await liar.lease()
                (group,) = await liar.play(lease)
                for index in range(lease.group_size):
                    group = altered(group, index, reward=7.0)
                await liar.submit(liar.bundle(sealed, [group]), lease.lease_id)
                await judged(swarm, liar, len(group.rollouts) * (again + 1))
            assert await reason_of(liar.poll(1)) == Reason.BANNED
            assert (await bystander.work()).lease_id
            assert (await row_of(swarm, liar))["top_reason"] == Reason.BAD_REWARD


async def judged(swarm: Swarm, rogue: Rogue, rejected: int) -> None:
    async with asyncio.timeout(60.0):
        while True:
            if (await row_of(swarm, rogue))["rejected"] == rejected:
                return
            await asyncio.sleep(0.01)


async def row_of(swarm: Swarm, rogue: Rogue) -> dict[str, object]:
    rows = await swarm.trainer.peers()
    return next(row for row in rows if row["id"] == rogue.key.node_id.hex())


# -- weights that change while a sample is drawn -------------------------------------------------------


@pytest.mark.parametrize(("honest", "accepted"), [(True, 4), (False, 3)])
async def test_claiming_that_weights_changed_midway_is_no_way_around_the_audit(
    tmp_path: Path, model_dir: Path, honest: bool, accepted: int
) -> None:
    rollouts = {"groups_per_batch": 2, "groups_per_lease": 1, "leases_per_worker": 4}
    async with Swarm(tmp_path, model_dir, max_steps=9, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        async with Rogue(swarm, "shifty") as rogue, Rogue(swarm, "hand") as hand:
            await rogue.hello()
            await hand.hello()
            lease, sealed = await rogue.lease()
            (group,) = await rogue.play(lease)
            old = await rogue.head()
            while (await swarm.trainer.status())["version"] < 1:
                await hand.work()
            new = await rogue.head()
            # the one that began last, which alone may have drawn so little by then
            last = group.rollouts[3].branches[0]
            said = unpack_u32(last.tokens)[2:]
            mixed = retold(last, said, old).logprobs[:4] + retold(last, said, new).logprobs[4:]
            logprobs = mixed if honest else pack_f32([-0.01] * len(said))
            proof = last.proof[:8] + retold(last, said, new).proof[8:]
            spans = (Span(0, old.version), Span(1, new.version))
            forged = altered_branch(
                group, 3, policy_last=new.version, logprobs=logprobs, spans=spans, proof=proof
            )
            await rogue.submit(rogue.bundle(sealed, [forged]), lease.lease_id)
            verdict = await rogue.verdict(lease.lease_id)
    assert verdict.accepted == accepted
    assert {one.reason for one in verdict.rejections} <= {Reason.BAD_LOGPROBS}
