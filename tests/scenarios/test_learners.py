"""Several nodes train one run: what they contribute becomes an ordinary version, and who cheats is left out."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from support.drifting_backend import NAMES, SCALE, DriftingBackend
from support.swarm import Swarm, key_of
from support.waiting import until

from primerl.node.config.run import LearnersConfig
from primerl.node.errors import NodeError, UsageError
from primerl.node.learner.loop import PROOF
from primerl.node.reports.merges import explain
from primerl.node.storage.ledger import Ledger
from primerl.node.trainer import backups, learners
from primerl.node.trainer.run_manifest import learners_contract
from primerl.node.training import outer
from primerl.node.training.outer import OuterState
from primerl.protocol.contributions import WrongMerge, open_contributions
from primerl.protocol.leaders import Leaders
from primerl.protocol.manifests import OuterStep, PolicyManifest

LONG = 100_000
STEPS = 2
"""Inner steps."""


def swarm_of(directory: Path, model: Path, *names: str, grace_s: float = 20.0) -> Swarm:
    """Return a swarm whose trainer names these learners."""
    return Swarm(
        directory,
        model,
        max_steps=LONG,
        learners={
            "nodes": [key_of(name).node_id.hex() for name in names],
            "inner_steps": STEPS,
            "grace_s": grace_s,
            "outer_lr": 1.0,
            "outer_momentum": 0.0,
        },
        checkpoint={"interval": 1},
        rollouts={"max_off_policy_steps": 5, "groups_per_batch": 8},
    )


def manifests(data_dir: Path) -> list[PolicyManifest]:
    """Return the manifests that a stopped trainer's ledger holds, by version."""
    ledger = Ledger(data_dir / "ledger.db")
    try:
        documents = [document for _, document in ledger.heads() if document]
    finally:
        ledger.close()
    return [msgspec.msgpack.decode(document, type=PolicyManifest) for document in documents]


def contributors(manifest: PolicyManifest, swarm: Swarm) -> set[bytes]:
    """Return whose contributions a version has."""
    assert isinstance(manifest.outer, OuterStep)
    leaders = Leaders(manifest.run, swarm.trainer.node_id)
    contract = learners_contract(LearnersConfig.model_validate(swarm.settings["learners"]))
    assert contract is not None
    opened = open_contributions(manifest.outer, manifest.run, contract, leaders)
    return {part.node for part in opened}


def outer_steps(made: list[PolicyManifest]) -> list[OuterStep]:
    """Return how the versions were made."""
    return [manifest.outer for manifest in made if isinstance(manifest.outer, OuterStep)]


async def test_versions_are_made_by_all_learners_and_each_makes_the_same_one(
    tmp_path: Path, model_dir: Path
) -> None:
    async with swarm_of(tmp_path, model_dir, "l1", "l2") as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        first, _ = swarm.add_learner("l1")
        second, _ = swarm.add_learner("l2")
        await until(lambda: min(first.merged, second.merged) >= 4)
        assert set((await worker.status())["rejected"]) <= {"stale"}
        await swarm.stop_trainer()
        made = manifests(swarm.trainer.data_dir)
        everybody = {node.node_id for node in (swarm.trainer, key_of("l1"), key_of("l2"))}
        assert everybody in [contributors(manifest, swarm) for manifest in made]
    steps = outer_steps(made)
    assert len(steps) > 4
    assert all(later.before == before.after for before, later in pairwise(steps))


@pytest.mark.slow
async def test_a_learner_that_is_gone_costs_nothing_and_comes_back(
    tmp_path: Path, model_dir: Path
) -> None:
    async with swarm_of(tmp_path, model_dir, "l1", grace_s=1.0) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.wait_step(2)
        learner, _ = swarm.add_learner("l1")
        await until(lambda: learner.merged >= 2)
        await swarm.kill_worker("l1")
        gone_at = (await swarm.trainer.status())["version"]
        await swarm.wait_step(gone_at + 3)
        again, _ = swarm.add_learner("l1")
        await until(lambda: again.merged >= 2)
        await swarm.stop_trainer()


@pytest.mark.slow
async def test_learners_go_on_with_a_trainer_that_was_killed(
    tmp_path: Path, model_dir: Path
) -> None:
    async with swarm_of(tmp_path, model_dir, "l1") as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        learner, running = swarm.add_learner("l1")
        await until(lambda: learner.merged >= 3)
        await swarm.crash_trainer()
        before = learner.merged
        await swarm.start_trainer(resume=True)
        await until(lambda: learner.merged >= before + 3)
        assert running.task is not None
        assert not running.task.done()
        await swarm.stop_trainer()
        steps = outer_steps(manifests(swarm.trainer.data_dir))
    assert all(
        later.before == before.after for before, later in pairwise(steps) if later.contributions
    )


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(-100.0, id="sign flip"),
        pytest.param(np.nan, id="not a number", marks=pytest.mark.slow),
        pytest.param(1e30, id="enormous", marks=pytest.mark.slow),
    ],
)
async def test_a_hostile_learner_is_set_aside_and_the_run_learns_as_without_it(
    tmp_path: Path, model_dir: Path, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm_of(tmp_path, model_dir, "l1", "l2", "bad", grace_s=1.0) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        good = [swarm.add_learner(name)[0] for name in ("l1", "l2")]
        bad, running = swarm.add_learner("bad", factor)
        await until(lambda: "it gets no more samples" in caplog.text)
        counts = [learner.merged for learner in good]
        await until(
            lambda: all(
                learner.merged >= count + 2 for learner, count in zip(good, counts, strict=True)
            )
        )
        await swarm.stop_trainer()
        made = manifests(swarm.trainer.data_dir)
        assert not any(running.node_id in contributors(manifest, swarm) for manifest in made)
        assert not bad.merged
        drift = masters_of(swarm.backend)
    # honest steps all go up, by about SCALE each
    assert 1 < drift.min() <= drift.max() < 1 + 3 * SCALE * STEPS * len(made)


async def test_a_trainer_that_merges_wrongly_is_left_by_every_learner_with_a_proof(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with swarm_of(tmp_path, model_dir, "l1", "l2") as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        nodes = [swarm.add_learner(name) for name in ("l1", "l2")]
        await until(lambda: min(node.merged for node, _ in nodes) >= 2)

        def by_half(state: OuterState, parts: Any, rule: Any) -> OuterState:
            return outer.merge(state, [(change, weight / 2) for change, weight in parts], rule)

        monkeypatch.setattr(learners, "merge", by_half)
        for _, running in nodes:
            with pytest.raises(NodeError, match="the trainer has merged wrongly"):
                await running.ended()
            (path,) = running.data_dir.rglob(PROOF)
            proof = explain(path)
            assert proof.signer == swarm.trainer.node_id.hex()
            assert proof.signed != proof.computed
            assert len(proof.contributions) >= 2
            changed = msgspec.msgpack.decode(path.read_bytes(), type=WrongMerge)
            forged = changed.step[:-1] + bytes([changed.step[-1] ^ 1])
            path.write_bytes(msgspec.msgpack.encode(structs.replace(changed, step=forged)))
            with pytest.raises(UsageError, match="proves nothing"):
                explain(path)
        monkeypatch.undo()


@pytest.mark.slow
async def test_learners_follow_a_standby_that_leads_after_the_trainer(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "LEAST_AGE_S", 0.2)
    async with swarm_of(tmp_path, model_dir, "l1") as swarm:
        await swarm.start_trainer()
        await swarm.certify("standby", lease_s=2)
        swarm.add_worker("w1")
        learner, running = swarm.add_learner("l1")
        standby, _ = swarm.add_standby()
        await until(lambda: standby.step >= 3 and learner.merged >= 2)
        await swarm.lose_disk()
        await swarm.succeed()
        before = learner.merged
        await until(lambda: learner.merged >= before + 3)
        assert running.task is not None
        assert not running.task.done()
        await swarm.stop_trainer()


def masters_of(backend: Any) -> "np.ndarray":
    """Return all masters of a drifting backend."""
    assert isinstance(backend, DriftingBackend)
    return np.concatenate([backend.masters[name] for name in NAMES])
