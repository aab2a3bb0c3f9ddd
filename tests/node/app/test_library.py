"""primerl as a library: its names, its examples, and attacks on what it verifies."""

import dataclasses
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.engine_cases import make_qwen3
from support.repository import ROOT

import primerl
from primerl.node.models import model_files
from primerl.protocol.errors import Reason
from primerl.protocol.trust import Equivocation

EXAMPLES = ROOT / "docs" / "examples" / "library"
NOW = 1_800_000_000
RUN = bytes(range(32))


def state(seed: int) -> primerl.State:
    values = np.random.default_rng(seed).normal(size=64).astype(np.float32)
    return {"layer": primerl.Tensor("F32", (8, 8), values.view(np.uint32))}


def updates(key: primerl.SecretKey, count: int = 2) -> list[primerl.WeightUpdate]:
    """The first versions of a run, each a delta to the one before."""
    made: list[primerl.WeightUpdate] = []
    for number in range(count):
        after = made[-1] if made else None
        made.append(
            primerl.make_update(key, RUN, state(number), after=after, now=NOW, expires=NOW + 60)
        )
    return made


def test_every_public_name_is_there_documented_and_loads_nothing_before_it_is_used() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    for name in primerl.__all__:
        assert getattr(primerl, name) is not None
        assert f"`{name}" in page
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        primerl.nonsense  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    program = "import primerl, sys; print(len(sys.modules)); print('numpy' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split()[1] == "False"


def test_a_follower_reaches_the_state_that_the_trainer_signed() -> None:
    key = primerl.SecretKey.generate()
    follower = primerl.WeightFollower(RUN, key.node_id)
    for number, update in enumerate(updates(key, 3)):
        policy = follower.apply(update.head, update.manifest, update.chunks, now=NOW)
        assert policy.digest == update.policy.digest
        assert np.array_equal(policy.state["layer"].data, state(number)["layer"].data)


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("another trainer", Reason.WRONG_SIGNER),
        ("another run", Reason.WRONG_RUN),
        ("an expired head", Reason.EXPIRED),
        ("a changed head", Reason.BAD_SIGNATURE),
        ("a changed manifest", Reason.WRONG_DIGEST),
        ("a changed chunk", Reason.WRONG_DIGEST),
        ("a missing chunk", Reason.WRONG_DIGEST),
    ],
)
def test_what_the_trainer_did_not_sign_changes_nothing(attack: str, reason: Reason) -> None:
    key = primerl.SecretKey.generate()
    first, second = updates(key)
    follower = primerl.WeightFollower(RUN, key.node_id)
    follower.apply(first.head, first.manifest, first.chunks, now=NOW)
    if attack == "another trainer":
        second = updates(primerl.SecretKey.generate())[1]
    head, manifest, chunks, now = second.head, second.manifest, list(second.chunks), NOW
    if attack == "another run":
        follower = primerl.WeightFollower(bytes(32), key.node_id)
    elif attack == "an expired head":
        now = NOW + 86_400
    elif attack == "a changed head":
        head = head[:-1] + bytes([head[-1] ^ 1])
    elif attack == "a changed manifest":
        manifest = manifest[:-1] + bytes([manifest[-1] ^ 1])
    elif attack == "a changed chunk":
        chunks[0] = chunks[0][:-1] + bytes([chunks[0][-1] ^ 1])
    else:
        chunks = chunks[:-1]
    before = follower.policy
    with pytest.raises(primerl.RemoteProtocolError) as refused:
        follower.apply(head, manifest, chunks, now=now)
    assert refused.value.reason is reason
    assert follower.policy is before


def test_two_different_versions_of_one_number_are_an_equivocation() -> None:
    key = primerl.SecretKey.generate()
    first, _ = updates(key)
    other = primerl.make_update(key, RUN, state(7), now=NOW, expires=NOW + 60)
    follower = primerl.WeightFollower(RUN, key.node_id)
    follower.apply(first.head, first.manifest, first.chunks, now=NOW)
    with pytest.raises(Equivocation):
        follower.apply(other.head, other.manifest, other.chunks, now=NOW)
    assert follower.policy.digest == first.policy.digest


def test_a_delta_is_refused_by_who_lacks_its_base_and_another_shape_by_who_makes_it() -> None:
    key = primerl.SecretKey.generate()
    first, second = updates(key)
    late = primerl.WeightFollower(RUN, key.node_id)
    with pytest.raises(primerl.WeightsError):
        late.apply(second.head, second.manifest, second.chunks, now=NOW)
    assert late.policy.version == -1
    wide = {"layer": primerl.Tensor("F32", (1,), np.zeros(1, np.uint32))}
    with pytest.raises(primerl.WeightsError, match="publish a snapshot"):
        primerl.make_update(key, RUN, wide, after=first, now=NOW, expires=NOW + 60)


def test_the_example_of_weights_says_what_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "weights.py"))
    out = capsys.readouterr().out
    assert "version 1: 17,868 bytes of 1,048,576" in out
    assert "refused: wrong_digest" in out
    assert "equal to the last bit: True" in out


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with its weights."""
    directory = tmp_path_factory.mktemp("library") / "model"
    weights = make_qwen3(directory, 0)
    model_files.export(weights, directory, directory.with_name("whole"))
    return directory.with_name("whole")


def test_the_example_of_proofs_accepts_what_is_honest_alone(
    model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["proof.py", str(model_dir)])
    runpy.run_path(str(EXAMPLES / "proof.py"))
    _, *verdicts = capsys.readouterr().out.splitlines()
    named = dict(line.split(": ", 1) for line in verdicts)
    assert named.pop("honest") == "accepted"
    assert {name: verdict.split()[0] for name, verdict in named.items()} == {
        "one token exchanged": "bad_sampling",
        "another seed": "bad_sampling",
        "logprobs made up": "bad_logprobs",
        "half a proof": "bad_proof",
    }


async def test_an_item_that_no_model_can_read_is_rejected_and_costs_the_others_nothing(
    model_dir: Path,
) -> None:
    weights = primerl.read_state(model_dir)
    item = await primerl.draw(model_dir, weights, list(b"hi"), seed=3, max_tokens=8)
    broken = [
        dataclasses.replace(item, token_ids=[*item.token_ids[:-1], 1 << 30]),
        dataclasses.replace(item, token_ids=[-1, *item.token_ids[1:]]),
        dataclasses.replace(item, logprobs=item.logprobs[:-1]),
        dataclasses.replace(item, versions=item.versions[:-1]),
        dataclasses.replace(item, replies=[primerl.SampledSpan(0, 3, 3)]),
        dataclasses.replace(item, proof=b""),
    ]
    verdicts = primerl.audit(model_dir, [*broken, item], {0: weights})
    assert [verdict.reason for verdict in verdicts[:-1]] == ["bad_proof"] * len(broken)
    assert verdicts[-1].reason == ""
    with pytest.raises(primerl.NodeError, match="the state of policy 0 is missing"):
        primerl.audit(model_dir, [item], {})


@pytest.mark.slow
def test_the_example_of_a_node_reads_its_status_and_stops_it(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "status.py")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "trainer" in ran.stdout
    assert "a ticket of" in ran.stdout


async def test_a_node_that_cannot_start_says_why(tmp_path: Path) -> None:
    args = ["--ticket", "primerl2-nonsense", "--data-dir", str(tmp_path / "d")]
    with pytest.raises(primerl.NodeError, match="ticket"):
        async with primerl.Node("join", args, environ={}):
            pass
    with pytest.raises(primerl.NodeError, match=r"did you mean max_steps\?"):
        primerl.Node("train", ["--max-step", "3"], environ={})
