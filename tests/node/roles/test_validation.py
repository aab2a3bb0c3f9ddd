"""A trainer, a worker and a validator: who audits, and what becomes of a validator that does not do its part."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from rogue import Rogue, altered_branch
from swarm import until
from validation import VALIDATOR, AuditedSwarm, BentAuditor, Found
from witness import Fakes

from primerl.node.proofs.auditor import Measured
from primerl.protocol.errors import Reason
from primerl.protocol.rollouts import pack_f32

ROLLOUTS = {"groups_per_lease": 1}


def praise(found: Found) -> Found:
    """Nothing is wrong with anything."""
    return [replace(one, **CLEAN) if isinstance(one, Measured) else one for one in found]


CLEAN = {
    name: 0.0
    for name in (
        "fingerprint",
        "sampling",
        "sampling_max",
        "logprob",
        "logprob_max",
        "other_policy",
    )
}


async def test_a_validator_audits_for_the_trainer(tmp_path: Path, model_dir: Path) -> None:
    fakes = Fakes()
    auditor = BentAuditor(fakes)
    async with AuditedSwarm(tmp_path, model_dir, fakes=fakes, max_steps=6) as swarm:
        await swarm.start_trainer()
        swarm.add_validator(auditor)
        await swarm.seated()
        swarm.add_worker("worker")
        summary = await swarm.finished()
        verdicts = swarm.verdicts()
    assert summary["steps"] == 6
    assert summary["rejected"] == {}
    remote = [one for one in verdicts if one.validator == VALIDATOR.node_id]
    assert len(remote) > len(verdicts) / 2
    assert auditor.items == sum(one.audited for one in remote)
    assert all(one.evidence and one.challenge for one in remote)
    # The first jobs of a new validator were audited again, and later ones were not.
    assert (
        4 * 8
        <= swarm.own[0].items
        < auditor.items + sum(one.audited for one in verdicts if not one.validator)
    )
