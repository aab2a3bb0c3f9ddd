"""Rollouts that a trainer keeps: trained, unused and rejected; a disk that fails costs nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.kept_cases import WORKER, keeper, make_group
from support.protocol_cases import BRANCH, LEASE, SUBMISSION
from support.swarm import Swarm
from support.witness import Fakes, never_right

from primerl.node.config.training import TrainingConfig
from primerl.node.errors import RunFailed
from primerl.node.storage.rollouts import KeptRollout, RolloutFiles
from primerl.node.trainer import kept_rollouts
from primerl.node.trainer.kept_rollouts import kept_batch
from primerl.node.training.advantages import credit
from primerl.node.training.buffer import AgentShare
from primerl.node.verification.verdict import (
    AuditResults,
    ReceivedSubmission,
    Verified,
    make_verdict,
)
from primerl.protocol.envelope import Purpose, unseal
from primerl.protocol.errors import Reason
from primerl.protocol.manifests import PolicyHead
from primerl.protocol.rollouts import GroupRecord, Rejection, RolloutRecord

ARRIVAL = ReceivedSubmission(1, bytes(32), WORKER, b"", bytes(32))


def files(directory: Path) -> RolloutFiles:
    return RolloutFiles(directory / "rollouts")


def places(rows: list[KeptRollout]) -> list[tuple[int, int, str, str]]:
    return [(one.group, one.rollout, one.verdict, one.reason) for one in rows]


def judged(*rejections: Rejection) -> Verified:
    return Verified(
        make_verdict(ARRIVAL, LEASE, 0, list(rejections), AuditResults(), 0.0), [*rejections], []
    )


def test_a_step_keeps_its_batch_in_order_with_advantages_and_texts(
    tmp_path: Path, model_dir: Path
) -> None:
    kept = keeper(tmp_path, model_dir, share=1.0)
    groups = [
        make_group([1.0, 0.0], first=4),
        make_group([0.5, 0.5], first=3),
        make_group([2.0, 0.0, 1.0]),
    ]
    batch = credit(groups, TrainingConfig())
    kept.write(kept.trained(9, groups, batch.samples), b"head")
    kept.close()
    rows = files(tmp_path).read(9)
    assert [one.advantage for one in rows] == [0.5, -0.5, None, None, 1.0, -1.0, 0.0]
    assert places(rows)[1:3] == [(0, 1, "trained", ""), (1, 0, "unused", "zero_advantage")]
    first = rows[0]
    assert first.prompt_ids + first.completion_ids == groups[0].rollouts[0].branches[0].token_ids
    assert (first.prompt, first.completion) == ("w4 w5", "w6 w7 w9")
    assert first.completion_mask == [True, True, False]
    assert first.parts() == [("w4 w5", False), ("w6 w7", True), (" w9", False)]
    assert first.completion_logprobs == [-0.5, -1.5, 0.0]
    assert (first.policy_first, first.policy_last, first.worker) == (2, 3, WORKER.hex())
    record = files(tmp_path).record(9)
    assert (record.groups, record.whole, record.head) == (3, True, b"head")


def test_an_episode_of_several_agents_is_made_again_of_its_rows(
    tmp_path: Path, model_dir: Path
) -> None:
    config = TrainingConfig(advantage="rae")
    group = make_group([0.0, 0.5])
    for number, one in enumerate(group.rollouts):
        one.branches.extend(make_group([0.0], first=number).rollouts[0].branches * 2)
        one.agents.extend([AgentShare("a", 1.0, 1), AgentShare("b", number - 1.0, 2)])
    baselines = {"counting": {"a": 0.25, "b": -0.5}}
    batch = credit([group], config, {}, baselines)
    kept = keeper(tmp_path, model_dir, share=1.0)
    kept.write(kept.trained(9, [group], batch.samples, baselines), b"head")
    kept.close()
    rows, record = files(tmp_path).read(9), files(tmp_path).record(9)
    assert [(one.agent, one.reward) for one in rows[:3]] == [("a", 1.0), ("b", -1.0), ("b", -1.0)]
    assert [one.advantage for one in rows] == [one.advantage for one in batch.samples]
    assert credit(kept_batch(rows, 1), config, {}, record.baselines) == batch


def test_supports_are_kept_and_a_batch_is_made_again_with_them(
    tmp_path: Path, model_dir: Path
) -> None:
    group = make_group([1.0, 0.0])
    for one in group.rollouts:
        one.branches[:] = [replace(branch, support=b"\1\0" + bytes(4)) for branch in one.branches]
    batch = credit([group], TrainingConfig())
    kept = keeper(tmp_path, model_dir, share=1.0)
    kept.write(kept.trained(9, [group], batch.samples), b"head")
    kept.close()
    rows = files(tmp_path).read(9)
    assert {one.support for one in rows} == {b"\1\0" + bytes(4)}
    assert credit(kept_batch(rows, 1), TrainingConfig()) == batch


def test_what_is_not_learned_from_is_kept_with_its_reason(tmp_path: Path, model_dir: Path) -> None:
    """Groups that grew stale, rejected rollouts, and those whose whole group was rejected but for one."""
    kept = keeper(tmp_path, model_dir, share=1.0)
    kept.lost([make_group([1.0, 0.0])], "stale")
    assert LEASE.group_size >= 2
    rollout = RolloutRecord((BRANCH,), 0.75, "")
    groups = tuple(
        GroupRecord(task.index, task.digest, (rollout,) * LEASE.group_size) for task in LEASE.tasks
    )
    sent = structs.replace(SUBMISSION, groups=groups)
    rejections = [
        Rejection(0, index, Reason.BAD_REWARD, "claimed 1, recomputed 0")
        for index in range(1, LEASE.group_size)
    ]
    kept.judged(WORKER, sent, LEASE, judged(*rejections))
    kept.write(kept.trained(2, [], []), b"")
    kept.write(kept.trained(3, [], []), b"")
    kept.close()
    rows = files(tmp_path).read(2)
    assert places(rows[:2]) == [(0, 0, "unused", "stale"), (0, 1, "unused", "stale")]
    assert places(rows[2:]) == [
        (1, 0, "unused", "too_few"),
        *((1, index, "rejected", "bad_reward") for index in range(1, LEASE.group_size)),
    ]
    assert rows[3].detail == "claimed 1, recomputed 0"
    assert (rows[3].reward, rows[3].lease) == (0.75, LEASE.lease_id)
    assert rows[3].task == LEASE.tasks[0].digest.hex()
    assert files(tmp_path).record(2).rejected == 2 + LEASE.group_size
    assert files(tmp_path).read(3) == [], "each is kept once"


@pytest.mark.parametrize(
    "hostile",
    [
        {"tokens": b"\x01"},
        {"tokens": b"\xff" * 8, "sampled": b"\x07" * 99},
        {"sampled": b""},
        {"logprobs": b"\x00\x00\xc0\x7f"},
        {"policy_last": 2**53},
    ],
)
def test_a_rejected_rollout_may_be_of_any_form(
    tmp_path: Path, model_dir: Path, hostile: dict[str, Any]
) -> None:
    kept = keeper(tmp_path, model_dir, share=1.0)
    rollout = RolloutRecord((structs.replace(BRANCH, **hostile),), float("nan"), "")
    group = GroupRecord(LEASE.tasks[0].index, LEASE.tasks[0].digest, (rollout,))
    rejections = [
        Rejection(at, index, Reason.MALFORMED, "")
        for at in range(len(LEASE.tasks))
        for index in range(LEASE.group_size)
    ]
    sent = structs.replace(SUBMISSION, groups=(group,))
    kept.judged(WORKER, sent, LEASE, judged(*rejections))
    kept.write(kept.trained(1, [], []), b"")
    kept.close()
    assert len(files(tmp_path).read(1)) == len(rejections), "also indices that were never sent"


def test_what_is_rejected_is_bounded_in_bytes(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group([1.0, 0.0])
    monkeypatch.setattr(kept_rollouts, "LOST_BYTES", 3 * 2 * 5 * 8)
    kept = keeper(tmp_path, model_dir, share=1.0)
    kept.lost([group] * 5, "stale")
    kept.write(kept.trained(1, [], []), b"")
    kept.close()
    record = files(tmp_path).record(1)
    assert (record.rejected, record.left_out, len(files(tmp_path).read(1))) == (10, 4, 6)


def test_a_share_takes_whole_groups_and_the_same_ones_again(
    tmp_path: Path, model_dir: Path
) -> None:
    groups = [make_group([1.0, 0.0], lease=lease) for lease in range(64)]
    batch = credit(groups, TrainingConfig())
    found: list[set[int]] = []
    for name in ("a", "b"):
        kept = keeper(tmp_path / name, model_dir, share=0.25)
        kept.write(kept.trained(1, groups, batch.samples), b"")
        kept.close()
        rows = files(tmp_path / name).read(1)
        found.append({one.lease for one in rows})
        record = files(tmp_path / name).record(1)
        assert (len(rows), record.kept, record.whole) == (2 * len(found[-1]), len(found[-1]), False)
        assert all(one.group == one.lease for one in rows), "places are those in the batch"
    assert found[0] == found[1]
    assert 4 < len(found[0]) < 32


async def test_a_run_keeps_the_newest_steps_with_the_heads_that_they_made(
    tmp_path: Path, model_dir: Path
) -> None:
    keep = {"keep": {"steps": 3}}
    async with Swarm(tmp_path, model_dir, max_steps=5, rollouts=keep) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.finished()
        kept, heads = files(swarm.run_dir), swarm.heads()
        workers = {running.node_id.hex() for running in swarm.workers.values()}
    assert kept.steps() == [3, 4, 5]
    for step in kept.steps():
        record, rows = kept.record(step), kept.read(step)
        assert unseal(record.head, Purpose.HEAD, PolicyHead, now=0).body == heads[0, step]
        trained = [one for one in rows if one.verdict == "trained"]
        assert {one.worker for one in trained} == workers
        assert all(one.policy_first <= one.policy_last < step for one in trained)
        batch = {
            one.group for one in rows if one.verdict == "trained" or one.reason == "zero_advantage"
        }
        assert batch == set(range(record.groups))


async def test_a_run_that_learns_nothing_keeps_what_it_played(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(reply=never_right)
    few = {"max_empty_batches": 2}
    async with Swarm(tmp_path, model_dir, fakes=fakes, rollouts=few) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        with pytest.raises(RunFailed, match="no signal"):
            await swarm.finished()
    kept = files(swarm.run_dir)
    assert kept.steps() == [1]
    assert (kept.record(1).groups, kept.record(1).head) == (0, b"")
    found = [one for one in kept.read(1) if one.reason == "zero_advantage"]
    assert len(found) == 2 * 4 * 4, "every rollout of two batches"
    assert {one.verdict for one in found} == {"unused"}
    assert {one.reward for one in found} == {0.0}


async def test_a_disk_that_takes_no_rollouts_does_not_stop_the_run(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        (swarm.run_dir / "rollouts").write_text("a file where a directory should be")
        swarm.add_worker("w1")
        summary = await swarm.finished()
    assert summary["steps"] == 3
    assert "the writer of rollouts failed" in caplog.text
