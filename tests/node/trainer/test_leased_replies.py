"""Prompts that workers answer: a client gets a verified reply, whatever becomes of leases meanwhile."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.hostile import say
from support.lease_cases import A, policy
from support.protocol_cases import (
    MANIFEST,
    NOW,
    PROMPTED_LEASE,
    head,
    played_otherwise,
)

from primerl.crypto.hashing import digest
from primerl.node.errors import EngineError, EngineLost
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.trainer.lease_book import LeaseBook
from primerl.node.trainer.leased_replies import (
    LeasedReplies,
    PromptQueue,
    PromptSupply,
    accepted_replies,
)
from primerl.node.verification.verdict import (
    AuditResults,
    ReceivedSubmission,
    Verified,
    make_verdict,
    refuse_all,
)
from primerl.protocol.errors import Reason, RemoteProtocolError
from primerl.protocol.leases import Lease, prompt_digest
from primerl.protocol.rollouts import (
    GroupRecord,
    Rejection,
    RolloutRecord,
    Submission,
    pack_u32,
)

STOPS = MANIFEST.model.stop_token_ids
GREEDY = played_otherwise(MANIFEST, temperature=0.0, max_tokens=4)
REPLY = Completion([7, 8, 1], [-0.1, -0.2, -0.3], "stop", 0, 0)


class Court:
    """A queue of prompts and the lease book that takes from it."""

    def __init__(self, most: int = 100) -> None:
        self.prompts = PromptQueue(1 << 32, most)
        self.book = LeaseBook(policy(groups_per_lease=1), tasks=[self.prompts.tasks])
        self.supply = PromptSupply(self.prompts, self.book)

    def ask(self, *prompt: int) -> "asyncio.Task[Completion]":
        return asyncio.create_task(self.prompts.ask(prompt))

    async def grant(self, now: float = NOW) -> Lease | None:
        await self.supply.make_ready(1)
        lease = self.book.grant(
            A,
            version=0,
            capacity=self.prompts.unleased(),
            digest_of=lambda _, index: self.supply.digests[index],
            seed=bytes(32),
            now=now,
        )
        return None if lease is None else self.supply.complete(lease)

    async def granted(self, now: float = NOW) -> Lease:
        lease = await self.grant(now)
        assert lease is not None
        return lease

    def answer(self, lease: Lease, reply: Completion | None = REPLY) -> None:
        """The submission of a lease arrives and is judged; without a `reply` it is rejected."""
        if lease.lease_id in self.book.held:
            self.book.settle(lease.lease_id, A, NOW)
        self.prompts.judged(lease, {one.index: reply for one in lease.tasks} if reply else {})


async def test_equal_prompts_are_one_task_whose_lease_holds_the_prompt() -> None:
    court = Court()
    waiting = [court.ask(3, 4), court.ask(5), court.ask(3, 4)]
    await asyncio.sleep(0)
    leases = [await court.granted(), await court.granted()]
    assert await court.grant() is None
    assert [one.prompts for one in leases] == [(pack_u32([3, 4]),), (pack_u32([5]),)]
    assert all(one.tasks[0].digest == prompt_digest(one.prompts[0]) for one in leases)
    assert all(one.tasks[0].index >> 32 == 1 for one in leases)  # of no earlier start
    court.answer(leases[0])
    assert await waiting[0] == await waiting[2] == REPLY
    assert not waiting[1].done()
    assert await court.prompts.ask((3, 4)) == REPLY  # and again, without a lease
    assert len(court.prompts) == 1
    waiting[1].cancel()


async def test_a_rejected_reply_is_never_given_and_its_prompt_is_leased_again() -> None:
    court = Court()
    waiting = court.ask(3)
    await asyncio.sleep(0)
    for _ in range(3):
        lease = await court.granted()
        assert court.prompts.unleased() == 0
        court.answer(lease, None)
        assert not waiting.done()
        assert court.prompts.unleased() == 1
    court.answer(await court.granted())
    assert await waiting == REPLY


async def test_while_a_submission_is_verified_its_prompt_is_not_leased_again() -> None:
    court = Court()
    waiting = court.ask(3)
    await asyncio.sleep(0)
    lease = await court.granted()
    court.book.settle(lease.lease_id, A, NOW)
    assert (await court.grant(), court.prompts.unleased()) == (None, 0)
    waiting.cancel()


async def test_a_lost_lease_costs_time_and_no_prompt() -> None:
    court = Court()
    waiting = court.ask(3)
    await asyncio.sleep(0)
    lost = await court.granted()
    court.book.expire(NOW + 1e4)
    assert court.prompts.unleased() == 1
    again = await court.granted(NOW + 2e4)
    assert (again.tasks, again.lease_id) != (lost.tasks, lost.lease_id)
    assert again.tasks == lost.tasks
    court.answer(again)
    assert await waiting == REPLY


async def test_an_answer_from_before_a_restart_ends_the_wait_for_an_equal_request() -> None:
    court = Court()
    before = msgspec.structs.replace((await _one_lease(Court(), 3)), lease_id=5)
    waiting = court.ask(3)
    await asyncio.sleep(0)
    lost = await court.granted()
    court.book.expire(NOW + 1e4)  # its prompt is to be leased again
    court.answer(before)
    assert await waiting == REPLY
    assert (len(court.prompts), court.prompts.unleased()) == (0, 0)
    assert await court.grant(NOW + 2e4) is None
    court.answer(lost)  # late, and harmless


async def _one_lease(court: Court, *prompt: int) -> Lease:
    task = court.ask(*prompt)
    await asyncio.sleep(0)
    lease = await court.granted()
    task.cancel()
    return lease


async def test_a_client_that_gave_up_may_ask_again_and_finds_the_reply() -> None:
    court = Court()
    lease = await _one_lease(court, 3)
    court.answer(lease)
    assert await court.prompts.ask((3,)) == REPLY


async def test_the_number_of_prompts_that_wait_is_bounded() -> None:
    court = Court(most=2)
    waiting = [court.ask(3), court.ask(4)]
    await asyncio.sleep(0)
    with pytest.raises(EngineLost, match="come back later"):
        await court.prompts.ask((5,))
    court.answer(await court.granted())
    assert await waiting[0] == REPLY
    for task in waiting:
        task.cancel()


async def test_a_reply_ends_where_the_request_ends_it() -> None:
    court = Court()
    engine = LeasedReplies(GREEDY, court.prompts)
    asked = GenerateRequest((3,), 100, 0.0, 0, STOPS)
    waiting = asyncio.create_task(engine.generate(asked))
    await asyncio.sleep(0)
    court.answer(await court.granted())
    assert (await waiting).token_ids == [7, 8, 1]
    short = await engine.generate(replace(asked, max_tokens=2))
    assert (short.token_ids, short.finish) == ([7, 8], "length")
    other = await engine.generate(replace(asked, stop_token_ids=(*STOPS, 8)))
    assert (other.token_ids, other.logprobs, other.finish) == ([7, 8], [-0.1, -0.2], "stop")


@pytest.mark.parametrize("changes", [{"temperature": 0.5}, {"stop_token_ids": ()}])
async def test_what_the_contract_excludes_is_refused(changes: dict[str, Any]) -> None:
    asked = replace(GenerateRequest((3,), 4, 0.0, 0, STOPS), **changes)
    with pytest.raises(EngineError):
        await LeasedReplies(GREEDY, PromptQueue()).generate(asked)


async def test_rejected_work_answers_no_request() -> None:
    lease = msgspec.structs.replace(PROMPTED_LEASE, group_size=1)
    prompts = [[11, 12, 13], [300]]
    groups = tuple(
        GroupRecord(
            task.index, task.digest, (RolloutRecord((say(prompt, [7, 1], head(0)),), 0.0, ""),)
        )
        for task, prompt in zip(lease.tasks, prompts, strict=True)
    )
    submission = Submission(lease=b"", groups=groups, engine="hf")
    arrival = ReceivedSubmission(1, digest(b"bundle"), A, b"", bytes(32))

    def judged(*rejected: int) -> Verified:
        found = [Rejection(group, 0, Reason.BAD_SAMPLING, "forged") for group in rejected]
        verdict = make_verdict(arrival, lease, 2 - len(found), found, AuditResults(), 1.0)
        return Verified(verdict, found, [])

    first, second = (task.index for task in lease.tasks)
    assert accepted_replies(submission, lease, judged()).keys() == {first, second}
    (reply,) = accepted_replies(submission, lease, judged(0)).values()
    assert (reply.token_ids, len(reply.logprobs), reply.policy_first) == ([7, 1], 2, 0)
    refused = refuse_all(arrival, lease, RemoteProtocolError(Reason.WRONG_TASK, "other groups"))
    empty = msgspec.structs.replace(submission, groups=())
    assert accepted_replies(empty, lease, refused) == {}
