"""Whom a newcomer asks for the way to a version: neighbours, and soon the trainer where these are silent."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.bare_node import bare_services
from support.hostile import HostileTrainer, policy, tensor_table
from support.memory_store import MemoryStore
from support.swarm import Swarm

from primerl.crypto.hashing import digest
from primerl.node.p2p.heads import HeadStore
from primerl.node.p2p.peers import PeerScores, PeerTable
from primerl.node.p2p.rpc import TooSlow
from primerl.node.storage.ledger import Ledger
from primerl.node.weights.codec import CODEC
from primerl.node.weights.replica import WeightReplica, prove
from primerl.node.worker.weight_sync import UpdatePlanner
from primerl.protocol.manifests import Artifact, ChunkRef, PolicyManifest, encode
from primerl.protocol.messages import GetHeads, HeadNotice, Heads
from primerl.protocol.trust import TrustedRun

OLD, KNOWN, NEWEST = 1, 40, 80
NEIGHBOUR_S = 2.0
NEIGHBOURS = [bytes([number]) * 32 for number in range(1, 13)]
Answer = Callable[[GetHeads], Heads | None]
"""The reply to a question; None: silence."""


def silent(question: GetHeads) -> Heads | None:
    return None


class Links:
    """Sources that answer at once, or let a clock run to the deadline."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.delay_s = 0.0
        """Of every answer."""
        self.answers: dict[bytes, Answer] = {}
        self.asked: list[bytes] = []

    async def request(
        self, source: bytes, alpn: bytes, question: GetHeads, kind: type[Heads], **limits: float
    ) -> Heads:
        self.asked.append(source)
        reply = self.answers.get(source, silent)(question)
        self.now += limits["deadline"] if reply is None else self.delay_s
        if reply is None:
            raise TooSlow("nothing")
        return reply


class Newcomer:
    """A planner with twelve neighbours that knows a head, and no way to it."""

    def __init__(self, links: Links, book: HeadStore, hostile: HostileTrainer) -> None:
        self.links, self.book = links, book
        self.trainer = hostile.key.node_id
        services = bare_services(
            hostile.key,
            run_id=hostile.run,
            heads=book,
            links=links,
            peers=PeerTable(),
            store=MemoryStore(max_bytes=1 << 20),
            fetcher=SimpleNamespace(scores=PeerScores()),
        )
        upstreams: Any = SimpleNamespace(nodes=NEIGHBOURS)
        self.planner = UpdatePlanner(services, upstreams)

    async def plan(self) -> list[bytes]:
        """Find a way; return those that were asked for it."""
        self.links.asked.clear()
        head = self.book.latest()
        assert head is not None
        head, steps = await self.planner.plan(head, WeightReplica(threads=1).policy)
        assert (head.head.version, len(steps)) == (NEWEST, 1)
        return list(self.links.asked)


@dataclass
class Case:
    """A newcomer, and heads to tell it of."""

    newcomer: Newcomer
    old: HeadNotice
    newest: HeadNotice
    """The only one that it can load."""


@asynccontextmanager
async def a_newcomer(
    directory: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Case]:
    links = Links()
    clock = SimpleNamespace(monotonic=lambda: links.now)
    monkeypatch.setattr("primerl.node.worker.weight_sync.time", clock)
    with closing(Ledger(directory / "newcomer.db")) as ledger:
        async with HostileTrainer(Swarm(directory, model)) as hostile:
            old, known = (unloadable(hostile, version) for version in (OLD, KNOWN))
            newest = await hostile.publish(NEWEST, policy(NEWEST))
            book = HeadStore(TrustedRun(hostile.run, hostile.key.node_id), ledger)
            await book.admit(known)
            yield Case(Newcomer(links, book, hostile), old, newest)


def unloadable(hostile: HostileTrainer, version: int) -> HeadNotice:
    """A version that only a delta on an unknown one leads to."""
    state = policy(version)
    delta = Artifact("delta", version - 1, digest(b""), CODEC, 1, (ChunkRef(digest(b"x"), 1),))
    whole = prove(version, state).digest
    manifest = PolicyManifest(hostile.run, version, whole, tensor_table(state), (delta,))
    document = encode(manifest)
    return HeadNotice(hostile.head(version, state, document), document)


def saying(*notices: HeadNotice) -> Answer:
    return lambda question: Heads(notices)


async def test_where_every_neighbour_is_silent_the_trainer_is_asked_after_two_of_them(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it was asked last, 10 s later for each neighbour."""
    async with a_newcomer(tmp_path, model_dir, monkeypatch) as case:
        newcomer = case.newcomer
        newcomer.links.answers[newcomer.trainer] = saying(case.newest)
        assert await newcomer.plan() == [*NEIGHBOURS[:2], newcomer.trainer]


async def test_neighbours_that_answer_late_with_little_are_not_asked_without_end(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, one that repeated an old head was asked once for every version."""
    async with a_newcomer(tmp_path, model_dir, monkeypatch) as case:
        newcomer, links = case.newcomer, case.newcomer.links
        links.delay_s = 0.9 * NEIGHBOUR_S
        links.answers = dict.fromkeys(NEIGHBOURS, saying(case.old))
        links.answers[newcomer.trainer] = saying(case.newest)
        assert await newcomer.plan() == [*NEIGHBOURS[:1] * 3, newcomer.trainer]


async def test_a_neighbour_that_answers_spares_the_trainer_the_question(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    async with a_newcomer(tmp_path, model_dir, monkeypatch) as case:
        case.newcomer.links.answers[NEIGHBOURS[1]] = saying(case.newest)
        assert await case.newcomer.plan() == NEIGHBOURS[:2]


async def test_a_silent_neighbour_is_passed_over_for_a_while(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_newcomer(tmp_path, model_dir, monkeypatch) as case:
        newcomer, links = case.newcomer, case.newcomer.links
        links.answers[newcomer.trainer] = saying(case.old)
        await newcomer.planner.fetch_head((0, NEWEST))
        assert links.asked == [*NEIGHBOURS[:2], newcomer.trainer]
        links.answers[NEIGHBOURS[2]] = saying(case.newest)
        assert await newcomer.plan() == NEIGHBOURS[2:3]


async def test_where_the_trainer_is_silent_too_every_neighbour_is_asked(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_newcomer(tmp_path, model_dir, monkeypatch) as case:
        newcomer = case.newcomer
        newcomer.links.answers[NEIGHBOURS[-1]] = saying(case.newest)
        asked = await newcomer.plan()
        assert asked == [*NEIGHBOURS[:2], newcomer.trainer, *NEIGHBOURS[2:]]
