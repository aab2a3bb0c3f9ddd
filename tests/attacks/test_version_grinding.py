"""A lease allows its policy version or a newer one: a worker may not pick the better one sample by sample."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.counting_environment import STOP
from support.hostile import Rogue, say
from support.swarm import Swarm
from support.witness import Fakes, WitnessEngine, felt, witness_logprob

from primerl.node.errors import EngineLost
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.inference.fingerprint import Projection
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import PolicyHead
from primerl.protocol.rollouts import BranchRecord, GroupRecord, Span, pack_f32, unpack_u32

pytestmark = pytest.mark.asyncio(loop_scope="session")


def long_or_right(request: GenerateRequest) -> list[int]:
    """Right for half of the seeds, else wrong and of many lengths."""
    number = request.prompt[-1]
    if request.seed % 2:
        return [number + 1, STOP]
    return [number] * (6 + request.seed // 2 % 9) + [STOP]


def switched(branch: BranchRecord, old: PolicyHead, new: PolicyHead, at: int) -> BranchRecord:
    """The same reply, its first `at` tokens drawn by `old` and the others by `new`."""
    tokens = unpack_u32(branch.tokens)
    start = branch.sampled.index(1)
    if at <= 0 or at >= len(tokens) - start:
        return say(tokens[:start], tokens[start:], new if at <= 0 else old)
    heads = [old if place < start + at else new for place in range(len(tokens))]
    places = range(start, len(tokens))
    logprobs = [
        witness_logprob(heads[i].state, heads[i].version, 1.0, tokens[:i], tokens[i])
        for i in places
    ]
    rows = np.stack([felt(heads[i].state, tokens[:i]) for i in places])
    return msgspec.structs.replace(
        branch,
        logprobs=pack_f32(logprobs),
        policy_first=old.version,
        policy_last=new.version,
        spans=(Span(0, old.version), Span(at, new.version)),
        proof=Projection().make(rows),
    )


def drawn_by(
    group: GroupRecord, old: PolicyHead, new: PolicyHead, switches: Sequence[int]
) -> GroupRecord:
    """A group, of sample i the first `switches[i]` tokens by `old` and the others by `new`."""
    rollouts = [
        msgspec.structs.replace(one, branches=(switched(one.branches[0], old, new, at),))
        for one, at in zip(group.rollouts, switches, strict=True)
    ]
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


ALL = 99
"""More tokens than any reply has: the old version drew it whole."""
PICKED = {
    "each sample begun with the version of its choice": (0, ALL, 0, ALL),
    "all begun with the old one, and gone on from the first token with the one of its choice": (
        1,
        ALL,
        1,
        ALL,
    ),
}
IN_ORDER = (ALL, 5, 3, 0)


@pytest.mark.parametrize("picked", PICKED.values(), ids=list(PICKED))
async def test_a_group_whose_samples_were_drawn_by_the_versions_of_their_choice_is_refused(
    tmp_path: Path, model_dir: Path, picked: Sequence[int]
) -> None:
    def long(request: GenerateRequest) -> list[int]:
        return [request.prompt[-1]] * 8 + [STOP]

    fakes = Fakes(last_step=1)
    async with Swarm(tmp_path, model_dir, fakes=fakes, sampling={"max_tokens": 16}) as swarm:
        await swarm.start_trainer()
        async with Rogue(swarm) as rogue:
            await rogue.hello()
            lease, sealed = await rogue.lease()
            old = await rogue.head()
            swarm.add_worker("honest")
            await swarm.wait_step(1)
            new = await rogue.head()
            assert (old.version, new.version) == (lease.min_version, lease.min_version + 1)
            fakes.reply = long
            ground, honest = (rogue.group(lease, task, old, long) for task in lease.tasks)
            groups = [
                drawn_by(ground, old, new, picked),
                drawn_by(honest, old, new, IN_ORDER),
            ]
            await rogue.submit(rogue.bundle(sealed, groups), lease.lease_id)
            verdict = await rogue.verdict(lease.lease_id)
    assert [(one.group, one.reason) for one in verdict.rejections] == [
        (0, Reason.WRONG_ORDER)
    ] * 4, verdict.rejections
    assert verdict.accepted == 4
    assert "sample 0 had drawn" in verdict.rejections[0].detail


class Ticks:
    """Lets everything that waits go on at once: an engine that draws a token of every sequence in a step."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    async def pause(self) -> None:
        """Wait for the next step."""
        await self._next.wait()

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await asyncio.sleep(0.002)
            self._next.set()
            self._next = asyncio.Event()


class ShakyEngine(WitnessEngine):
    """Loses a tenth of the sequences in the middle, so that they are begun anew."""

    def __init__(self, fakes: Fakes, name: str, steps: Ticks) -> None:
        super().__init__(fakes, name, steps.pause)
        self._chance = random.Random(name)
        self._steps = steps
        self.lost = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        if self._chance.random() < 0.1:
            for _ in range(self._chance.randrange(1, 12)):
                await self._steps.pause()
            self.lost += 1
            raise EngineLost("its process ended")
        return await super().generate(request)


async def test_honest_workers_whose_sequences_are_begun_anew_while_policies_change_are_never_refused(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes, steps = Fakes(reply=long_or_right), Ticks()
    ticking = asyncio.create_task(steps.run())
    async with Swarm(
        tmp_path, model_dir, fakes=fakes, max_steps=16, sampling={"max_tokens": 16}
    ) as swarm:
        await swarm.start_trainer()
        engines = [ShakyEngine(fakes, name, steps) for name in ("w1", "w2")]
        for name, engine in zip(("w1", "w2"), engines, strict=True):
            swarm.add_worker(name, engine=engine)
        summary = await swarm.finished()
    ticking.cancel()
    assert sum(engine.lost for engine in engines) > 10
    rejected = Counter(summary["rejected"])
    assert rejected.keys() <= {"stale", "withdrawn"}, rejected
    # withdrawn by their workers: begun anew after a new policy had come
    assert rejected["withdrawn"] < 0.1 * summary["accepted"]
