"""Verdicts reach everybody, the banned above all, and are kept where `explain` finds them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.bare_node import bare_services
from support.hostile import Rogue, altered_branch, reason_of
from support.protocol_cases import NOW, OTHER_RUN, STRANGER, TRAINER, WORKER, refuses
from support.swarm import Swarm
from support.verdict_cases import CLEAN, VERDICT, fill, signed, tampered
from support.waiting import until
from support.witness import Fakes, WitnessEngine

from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.p2p.transport import Unreachable
from primerl.node.reports.explain import explain
from primerl.node.storage.ledger import Ledger
from primerl.node.worker.verdicts import BAN_PAUSE_S, MAX_BAN_PAUSE_S, VerdictLog
from primerl.protocol.envelope import Purpose, seal, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.messages import GetVerdicts, Message, Verdicts
from primerl.protocol.rollouts import Verdict


class Talk:
    """Links to a trainer that answers GetVerdicts from a list, one verdict a reply."""

    def __init__(self, *verdicts: bytes) -> None:
        self.verdicts = list(verdicts)
        self.asked: list[int] = []

    async def request(
        self, peer: bytes, alpn: bytes, message: Message, kind: type[Any], *, deadline: float
    ) -> Verdicts:
        """See Links."""
        assert isinstance(message, GetVerdicts)
        self.asked.append(message.after)
        found = tuple(self.verdicts[message.after : message.after + 1])
        return Verdicts(found, message.after + len(found))


class Silence(Talk):
    """A trainer that cannot be reached."""

    async def request(self, *args: Any, **options: Any) -> Verdicts:
        """See Links."""
        raise Unreachable("no address led to it")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """A worker's."""
    ledger = fill(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


def box(ledger: Ledger, talk: Talk | None = None) -> VerdictLog:
    """The worker's box."""
    links: Any = talk or Talk()
    return VerdictLog(bare_services(WORKER, links=links, ledger=ledger))


def kept(ledger: Ledger) -> list[bytes]:
    """The verdicts in a ledger."""
    found = ledger.verdicts_after(WORKER.node_id, 0, count=100, size=2**20)
    return [sealed for _, sealed in found]


async def test_a_verdict_is_kept_and_counted_once_however_often_it_comes(ledger: Ledger) -> None:
    mine = box(ledger)
    for sealed in (signed(VERDICT), signed(CLEAN), signed(VERDICT)):
        await mine.take(sealed)
    assert mine.accepted == 6
    assert dict(mine.rejected) == {"wrong_model": 1, "missing_index": 1}
    assert kept(ledger) == [signed(VERDICT), signed(CLEAN)]


async def test_trust_is_derived_for_the_environment_of_the_lease(ledger: Ledger) -> None:
    mine = box(ledger)
    assert mine.trusts() == {}
    mine.leased(VERDICT.lease_id, "words")
    for sealed in (signed(VERDICT), signed(CLEAN)):  # the other lease is of an earlier start
        await mine.take(sealed)
    assert list(mine.trusts()) == ["words"]
    assert mine.trusts()["words"] < 0.5


async def test_rejections_that_the_verdict_has_no_room_for_are_counted(ledger: Ledger) -> None:
    mine = box(ledger)
    await mine.take(signed(msgspec.structs.replace(VERDICT, rejected=10)))
    assert dict(mine.rejected) == {"wrong_model": 1, "missing_index": 9}


@pytest.mark.parametrize(
    ("sealed", "reason"),
    [
        (signed(VERDICT, STRANGER), Reason.WRONG_SIGNER),
        (signed(VERDICT, recipient=STRANGER.node_id), Reason.WRONG_RECIPIENT),
        (tampered(VERDICT, rejected=0), Reason.BAD_SIGNATURE),
        (
            seal(
                TRAINER, Purpose.VERDICT, OTHER_RUN, VERDICT, recipient=WORKER.node_id, expires=NOW
            ),
            Reason.WRONG_RUN,
        ),
        (b"\xc1", Reason.MALFORMED),
    ],
    ids=["a stranger's", "on another's work", "changed", "of another run", "noise"],
)
async def test_what_is_no_verdict_of_the_trainer_on_our_work_is_not_kept(
    ledger: Ledger, sealed: bytes, reason: Reason
) -> None:
    mine = box(ledger)
    with refuses(reason):
        await mine.take(sealed)
    assert (kept(ledger), mine.accepted) == ([], 0)


async def test_verdicts_that_were_missed_are_asked_for_and_only_those(ledger: Ledger) -> None:
    talk = Talk(signed(VERDICT), signed(CLEAN))
    mine = box(ledger, talk)
    await mine.take(signed(VERDICT))
    await mine.fetch()
    assert (mine.accepted, talk.asked) == (6, [0, 1, 2])
    again = box(ledger, talk)  # the node was started again
    talk.verdicts.append(signed(msgspec.structs.replace(CLEAN, lease_id=9)))
    await again.fetch()
    assert (again.accepted, talk.asked[3:]) == (4, [2, 3])


async def test_a_node_that_gets_no_work_tells_its_operator_once_a_minute_or_less(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    mine = box(ledger, Silence())
    pauses = [await mine.refused("banned: wrong_model") for _ in range(8)]
    assert pauses[:3] == [BAN_PAUSE_S, 2 * BAN_PAUSE_S, 4 * BAN_PAUSE_S]
    assert pauses[-1] == MAX_BAN_PAUSE_S
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(lines) == 8
    assert "banned: wrong_model" in lines[0]
    assert "`primerl-node explain`" in lines[0]
    mine.welcome()
    assert await mine.refused("again") == BAN_PAUSE_S


async def test_who_is_refused_as_of_another_class_reads_what_may_cause_it_and_what_to_do(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    mine = box(ledger, Silence())
    await mine.refused("wrong numerics class: it claims vllm 0.25.1 on H100")
    await mine.refused("banned: wrong_model")
    misplaced, banned = [
        record.getMessage() for record in caplog.records if record.levelname == "ERROR"
    ]
    for words in (
        "enforce_eager",
        "engine.batch_invariant",
        "attention backend",
        "chunked prefill",
    ):
        assert words in misplaced
        assert words not in banned
    assert "ask the run's operator to name a worker that is started like this one" in misplaced


# -- at the trainer -----------------------------------------------------------------------------


def opened(swarm: Swarm, rogue: Rogue, verdicts: Sequence[bytes]) -> list[int]:
    """The leases that verdicts to `rogue` are about."""
    return [
        unseal(
            sealed,
            Purpose.VERDICT,
            Verdict,
            now=0,
            run=rogue.run,
            signer=swarm.trainer.node_id,
            recipient=rogue.key.node_id,
        ).body.lease_id
        for sealed in verdicts
    ]


async def test_a_banned_worker_still_hears_what_became_of_its_work(
    tmp_path: Path, model_dir: Path
) -> None:
    rollouts = {"groups_per_lease": 1, "groups_per_batch": 16}
    async with Swarm(tmp_path, model_dir, rollouts=rollouts) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm, "cheat") as cheat, Rogue(swarm, "other") as other:
            assert await reason_of(other.ask(GetVerdicts(0), Verdicts)) == Reason.NOT_ADMITTED
            await cheat.hello()
            await other.hello()
            first = await cheat.work()
            lease, sealed = await cheat.lease()
            (group,) = await cheat.play(lease)
            size = len(group.rollouts[0].branches[0].proof)
            forged = altered_branch(group, 0, proof=bytes(range(8)) * (size // 8))
            await cheat.submit(cheat.bundle(sealed, [forged]), lease.lease_id)
            leases = [first.lease_id, lease.lease_id]
            after, found = 0, list[int]()
            while len(found) < 2:
                reply = await cheat.ask(GetVerdicts(after), Verdicts)
                found += opened(swarm, cheat, reply.verdicts)
                after = reply.next
            assert await reason_of(cheat.poll(1)) == Reason.BANNED
            assert found == leases
            again = await cheat.ask(GetVerdicts(0), Verdicts)
            assert opened(swarm, cheat, again.verdicts) == leases
            assert await cheat.ask(GetVerdicts(after), Verdicts) == Verdicts((), after)
            assert (await other.ask(GetVerdicts(0), Verdicts)).verdicts == ()


class NoProofEngine(WitnessEngine):
    """Makes up its proofs."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        honest = await super().generate(request)
        return replace(honest, proof=bytes(range(8)) * (len(honest.proof) // 8))


async def test_a_worker_that_is_banned_knows_why_without_the_trainer(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = Fakes()
    async with Swarm(tmp_path, model_dir, fakes=fakes) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("worker", engine=NoProofEngine(fakes, "worker"))
        await until(lambda: "gives this node no work" in caplog.text)
        running = explain(worker.data_dir, "")  # beside the running node
        rejected = (await worker.status())["rejected"]
    assert rejected.keys() == {"bad_proof"}
    assert {finding.reason for finding in running.findings} == {"bad_proof"}
    assert (running.accepted, running.worker) == (0, worker.node_id.hex())
    assert explain(worker.data_dir, str(running.lease)) == running  # and after both are gone
    assert f"explain --data-dir {worker.data_dir}" in caplog.text
    assert caplog.text.count("gives this node no work (banned: ") == 1
