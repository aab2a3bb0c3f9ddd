"""A worker that lies about what a tool said: found by the trainer's own tools, whatever else is right."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from support.chat_model import IM_END, TOOLED, make_chat_model
from support.hostile import proof_of
from support.listed_verifier import ListedVerifier
from support.protocol_cases import LEADERS, LEASE, MANIFEST, WORKER, head, played_otherwise

from primerl.crypto.hashing import digest
from primerl.node.config.run import EnvironmentConfig
from primerl.node.environments.environment import Branch, Demonstration
from primerl.node.environments.policies import turn_spans
from primerl.node.environments.verifiers import VerifiersEnvironment
from primerl.node.verification.auditor import AuditAnswer, AuditCall
from primerl.node.verification.duplicates import CopyDetector
from primerl.node.verification.verdict import ReceivedSubmission
from primerl.protocol import rollouts
from primerl.protocol.errors import Reason
from primerl.protocol.leases import TaskRef
from primerl.protocol.manifests import RunLimits

replace = msgspec.structs.replace


class NoAudits:
    """Nothing is drawn for an audit here."""

    async def audit_rollouts(self, call: AuditCall) -> AuditAnswer:
        raise AssertionError("an audit")


def proved_branch(token_ids: list[int], sampled: list[bool]) -> rollouts.BranchRecord:
    """A branch as a worker sends it, each reply proved after what it claims to have read."""
    count = sum(sampled)
    branch = Branch(token_ids, sampled, [0.0] * len(sampled), 3, 3, "stop")
    proofs = [proof_of(head(3).state, token_ids[:end], start) for start, end in turn_spans(branch)]
    return rollouts.BranchRecord(
        tokens=rollouts.pack_u32(token_ids),
        sampled=bytes(sampled),
        logprobs=rollouts.pack_f32([-1.0] * count),
        policy_first=3,
        policy_last=3,
        finish="stop",
        proof=b"".join(proofs),
    )


def honest(shown: Demonstration) -> rollouts.BranchRecord:
    return proved_branch(shown.token_ids, shown.sampled)


def result_at(shown: Demonstration) -> int:
    """Where the tool's result begins."""
    (_, asked), (before, _) = shown.turns()
    return before.index(ord(">"), shown.sampled.index(True) + len(asked)) + 1


def another_result(shown: Demonstration) -> rollouts.BranchRecord:
    """The tool says a number that the model then repeats: a wrong answer, claimed to be right."""
    ids, at = list(shown.token_ids), result_at(shown)
    ids[at] = ord("9") if ids[at] != ord("9") else ord("8")
    return proved_branch(ids, shown.sampled)


def longer_result(shown: Demonstration) -> rollouts.BranchRecord:
    """The tool says more than it did: a hint to the model."""
    ids, at = list(shown.token_ids), result_at(shown)
    return proved_branch(
        [*ids[:at], *b"1", *ids[at:]], [*shown.sampled[:at], False, *shown.sampled[at:]]
    )


def no_call(shown: Demonstration) -> rollouts.BranchRecord:
    """The answer at once, as if it had been read somewhere."""
    (prompt, _), (_, answer) = shown.turns()
    return proved_branch([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def sampled_result(shown: Demonstration) -> rollouts.BranchRecord:
    """The model is said to have written the result itself, so that it is learned."""
    at = result_at(shown)
    return proved_branch(
        list(shown.token_ids), [it or i == at for i, it in enumerate(shown.sampled)]
    )


@pytest.mark.parametrize(
    ("forge", "found"),
    [
        (honest, None),
        (another_result, Reason.BAD_PROMPT),
        (longer_result, Reason.BAD_PROMPT),
        (no_call, Reason.BAD_REWARD),
        (sampled_result, Reason.BAD_TERMINATION),
    ],
)
async def test_a_forged_result_of_a_tool_is_rejected_and_the_honest_one_accepted(
    tmp_path: Path, forge: Callable[[Demonstration], rollouts.BranchRecord], found: Reason | None
) -> None:
    environment = VerifiersEnvironment(
        EnvironmentConfig(id="calculator", args={"max_value": 99, "steps": 1}),
        model_dir=make_chat_model(tmp_path, TOOLED),
        seed=0,
        max_tokens=200,
        temperature=1.0,
    )
    await environment.start()
    run = replace(
        played_otherwise(MANIFEST, max_turns=4, max_tokens=200),
        limits=RunLimits(max_off_policy_steps=2, max_model_len=2048),
        model=replace(MANIFEST.model, vocab_size=512, stop_token_ids=(IM_END,)),
    )
    task = await environment.task(3)
    shown = await environment.demonstration(task)
    assert shown is not None
    lease = replace(LEASE, tasks=(TaskRef(task.index, task.digest),), min_version=0, group_size=1)
    group = rollouts.GroupRecord(
        task.index, task.digest, (rollouts.RolloutRecord((forge(shown),), 1.2, ""),)
    )
    submission = rollouts.Submission(lease=b"", groups=(group,), engine="hf")
    arrival = ReceivedSubmission(1, digest(b"bundle"), WORKER.node_id, b"", bytes(32))
    verifier = ListedVerifier(LEADERS, run, [environment], NoAudits(), {3: {}}, CopyDetector())
    verified = await verifier.verify(submission, lease, arrival, version=4, rate=0.0)
    assert verified.verdict.accepted == (found is None)
    assert verified.reasons() == ({} if found is None else {found: 1})
    assert verifier.fault == ""
    await environment.close()
