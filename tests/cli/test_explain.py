import json
from pathlib import Path

import msgspec
import pytest
from support.protocol_cases import BOUNDS, LEASE, PLAN, STRANGER, SUBMITTED, TRAINER, WORKER
from support.verdict_cases import (
    CHALLENGE,
    CLEAN,
    GUILTY,
    HONEST,
    ODD,
    RATE,
    VERDICT,
    fill,
    is_challenged,
    signed,
    tampered,
)

from primerl.node.reports.explain import MEANINGS, meaning
from primerl.node.storage.ledger import MANIFEST, VALIDATORS
from primerl.protocol.errors import Reason
from primerl.protocol.rollouts import Blamed, PipelineVerdict
from primerl.protocol.validators import ValidatorRecord, encode_records

from .conftest import Cli

ID = str(LEASE.lease_id)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The data directory of a worker that was told two verdicts, the rejected one first."""
    fill(ledger(tmp_path), signed(VERDICT), signed(CLEAN)).close()
    return tmp_path / "node"


def ledger(directory: Path) -> Path:
    """Where a worker keeps the ledger of a run."""
    return directory / "node" / "runs" / "ab" / "ledger.db"


def test_the_latest_rejected_one_is_explained_unless_another_is_named(cli: Cli, node: Path) -> None:
    for names in ((), (ID,), (SUBMITTED.hex(),), (SUBMITTED.hex()[:4].upper(),)):
        ran = cli("explain", *names, "--data-dir", str(node))
        assert ran.code == 0, ran.err
        assert f"lease {ID}" in ran.out
    clean = cli("explain", str(CLEAN.lease_id), "-d", str(node))
    assert "4 accepted, 0 rejected" in clean.out


def test_a_trainer_explains_the_latest_rejected_one_of_a_worker_by_its_id(
    cli: Cli, tmp_path: Path
) -> None:
    later = msgspec.structs.replace(VERDICT, submission=bytes(32), lease_id=78)
    other = signed(later, recipient=STRANGER.node_id)
    book = fill(tmp_path / "run" / "trainer" / "ledger.db", signed(VERDICT), signed(CLEAN))
    book.add_verdict(STRANGER.node_id, other)
    book.close()
    run = ("-d", str(tmp_path / "run"))
    ids = {one.node_id.hex()[:10]: lease for one, lease in ((WORKER, ID), (STRANGER, "78"))}
    for node, lease in ids.items():
        assert f"of node {node}, lease {lease}" in cli("explain", node.upper(), *run).out
        assert f"lease {lease}" in cli("explain", lease, *run).out
    rows = cli("explain", "--list", WORKER.node_id.hex()[:10], *run).out.splitlines()[1:]
    assert [row.split()[1] for row in rows] == [str(CLEAN.lease_id), ID]
    cli("explain", WORKER.node_id.hex()[:3], *run).refused(1, "--list")


def test_an_explanation_says_what_was_found_and_what_it_means(cli: Cli, node: Path) -> None:
    out = cli("explain", "-d", str(node)).out
    words = " ".join(out.split())
    assert "wrong_model: 1 rollout group 0, rollout 0: fingerprint is 1.2 over 64 tokens" in words
    for part in ("activation fingerprint", "does not show", "look at", "overclocked", "vLLM"):
        assert part in words
    assert "missing_index: 1 rollout group 1, rollout 0 " in words
    assert f"by validator {STRANGER.node_id.hex()[:10]}" in words
    assert CHALLENGE.hex() in words
    assert "hf against vllm (20000 honest rollouts, 1280000 tokens)" in words


def test_the_evidence_stands_beside_the_bounds_of_the_run(cli: Cli, node: Path) -> None:
    lines = [line.split() for line in cli("explain", "-d", str(node)).out.splitlines()]
    rows = {line[0]: line for line in lines if line and line[0] in ("0/0", "0/1", "1/1")}
    assert rows["0/0"][1:7] == ["1.2!", "-3", "0.2", "0.01", "0.2", "0.01"]
    assert rows["0/1"][1:7] == ["0.01", "-9", "0.01", "0.001", "0.01", "0.001"]
    assert rows["1/1"][1:7] == ["0.01", "-9", "0.01", "0.001", "0.01", "0.04?"]
    bounds = [line for line in lines if line[1:2] == ["above"]]
    assert [line[0] for line in bounds] == ["suspect", "reject"]
    assert bounds[1][2:] == ["0.1", "12", "1", "0.05", "1.5", "0.06"]


def test_bounds_that_the_run_measured_stand_in_the_place_of_the_manifests(
    cli: Cli, tmp_path: Path
) -> None:
    narrow = msgspec.structs.replace(BOUNDS.suspect, fingerprint=0.005)
    bounds = msgspec.structs.replace(BOUNDS, suspect=narrow)
    fill(ledger(tmp_path), signed(msgspec.structs.replace(VERDICT, bounds=bounds))).close()
    out = " ".join(cli("explain", "-d", str(tmp_path / "node")).out.split())
    assert "bounds are those of vllm 0.25.1 on H100, tp 2, bfloat16 in this run: number 3" in out
    assert "policies 2 to 9 (640 honest rollouts, 40960 tokens; at most 0.47% of honest" in out
    assert "0.01?" in out, "a rollout that the manifest's bounds do not suspect"
    found = json.loads(cli("explain", "-d", str(tmp_path / "node"), "--json").out)
    assert found["numerics"] == "vllm 0.25.1 on H100, tp 2, bfloat16"
    assert (found["honest_rollouts"], found["rejected_at_most"]) == (640, 0.0047)


def test_provisional_bounds_say_that_nothing_was_measured(cli: Cli, tmp_path: Path) -> None:
    bounds = msgspec.structs.replace(BOUNDS, number=0, rollouts=0, tokens=0)
    fill(ledger(tmp_path), signed(msgspec.structs.replace(VERDICT, bounds=bounds))).close()
    out = " ".join(cli("explain", "-d", str(tmp_path / "node")).out.split())
    assert "provisional, as its noise was not measured when this was judged" in out


def test_what_was_audited_is_computed_again_from_the_challenge(cli: Cli, node: Path) -> None:
    found = json.loads(cli("explain", "-d", str(node), "--json").out)
    places = [(row["group"], row["rollout"]) for row in found["evidence"]]
    assert places == [GUILTY, HONEST, ODD]
    assert [row["drawn"] for row in found["evidence"]] == [
        is_challenged(*place) for place in places
    ]
    assert {row["drawn"] for row in found["evidence"]} == {True, False}
    out = " ".join(cli("explain", "-d", str(node)).out.split())
    assert f"64 0.711 < {RATE}" in out
    assert "61 another failed (0.794)" in out


def test_json_has_all_of_it(cli: Cli, node: Path) -> None:
    found = json.loads(cli("explain", ID, "-d", str(node), "--json").out)
    assert found["run"]["trainer"] == TRAINER.node_id.hex()
    assert (found["worker"], found["submission"]) == (WORKER.node_id.hex(), SUBMITTED.hex())
    assert (found["accepted"], found["rejected"], found["audited"]) == (2, 2, 3)
    assert [one["reason"] for one in found["findings"]] == ["wrong_model", "missing_index"]
    marks = [[one["mark"] for one in row["measures"]] for row in found["evidence"]]
    assert marks == [["!", *[""] * 5], [""] * 6, [*[""] * 5, "?"]]


def test_a_list_has_one_line_for_each_verdict_the_newest_first(cli: Cli, node: Path) -> None:
    out = cli("explain", "--list", "-d", str(node)).out.splitlines()
    assert [line.split()[1] for line in out] == ["LEASE", str(CLEAN.lease_id), ID]
    assert out[2].split()[4:] == ["2", "2", "3", "wrong_model"]
    assert len(cli("explain", "--list", "--last", "1", "-d", str(node)).out.splitlines()) == 2
    lines = json.loads(cli("explain", "--list", "--json", "-d", str(node)).out)
    assert [line["lease"] for line in lines] == [CLEAN.lease_id, LEASE.lease_id]


@pytest.mark.parametrize(
    "forged",
    [
        tampered(VERDICT, accepted=9, rejected=0, rejections=()),
        tampered(VERDICT, evidence=()),
        signed(VERDICT, STRANGER),
        signed(VERDICT, recipient=STRANGER.node_id),
    ],
    ids=["acquitted", "without evidence", "by a stranger", "on another's work"],
)
def test_what_the_trainer_did_not_sign_is_not_explained(
    cli: Cli, tmp_path: Path, forged: bytes
) -> None:
    fill(ledger(tmp_path), forged).close()
    where = ("-d", str(tmp_path / "node"))
    for names in ((), (ID,), (SUBMITTED.hex()[:8],)):
        ran = cli("explain", *names, *where)
        assert (ran.code, ran.out) == (5, "")
        assert "is not this run's trainer's" in ran.err
    assert "NOT GENUINE" in cli("explain", "--list", *where).out


def test_a_forged_verdict_does_not_hide_the_genuine_one(cli: Cli, tmp_path: Path) -> None:
    fill(ledger(tmp_path), signed(VERDICT), tampered(VERDICT, accepted=9), b"\xc1").close()
    ran = cli("explain", ID, "-d", str(tmp_path / "node"))
    assert "2 accepted, 2 rejected" in ran.out
    assert len(cli("explain", "-l", "-d", str(tmp_path / "node")).out.splitlines()) == 4


def test_a_ledger_whose_manifest_was_exchanged_explains_nothing(cli: Cli, tmp_path: Path) -> None:
    """Else a verdict that a stranger signed for its own run would pass."""
    mine = fill(ledger(tmp_path), signed(VERDICT))
    sealed = msgspec.msgpack.decode(mine.get(MANIFEST) or b"")
    sealed[2] = STRANGER.node_id
    mine.set(MANIFEST, msgspec.msgpack.encode(sealed))
    mine.close()
    ran = cli("explain", "-d", str(tmp_path / "node"))
    assert ran.code == 5
    assert "is not genuine" in ran.err


def test_a_node_that_runs_is_read_beside_it(cli: Cli, tmp_path: Path) -> None:
    running = fill(ledger(tmp_path), signed(CLEAN))
    where = ("-d", str(tmp_path / "node"))
    shown = cli("explain", *where).out
    assert shown.startswith("nothing was rejected; the latest accepted submission:")
    assert "0 rejected" in shown
    running.add_verdict(WORKER.node_id, signed(VERDICT))
    assert "2 rejected" in cli("explain", *where).out
    running.close()


@pytest.mark.parametrize("place", ["node", "run/trainer", "run"])
def test_a_trainers_ledger_is_found_by_its_own_and_by_the_runs_directory(
    cli: Cli, tmp_path: Path, place: str
) -> None:
    path = {"node": "node/ledger.db"}.get(place, "run/trainer/ledger.db")
    fill(tmp_path / path, signed(VERDICT)).close()
    assert cli("explain", "-d", str(tmp_path / place)).code == 0


def test_of_several_runs_the_one_with_the_verdict_is_found(cli: Cli, node: Path) -> None:
    third = msgspec.structs.replace(CLEAN, lease_id=77)
    fill(node / "runs" / "cd" / "ledger.db", signed(third)).close()
    assert "lease 77" in cli("explain", "77", "-d", str(node)).out
    assert f"lease {ID}" in cli("explain", ID, "-d", str(node)).out
    assert len(cli("explain", "-l", "-d", str(node)).out.splitlines()) == 4


def test_mistakes_are_one_line_that_says_what_to_do(cli: Cli, tmp_path: Path, node: Path) -> None:
    wrong = {
        ("explain", "-d", str(tmp_path / "nowhere")): (2, "--data-dir"),
        ("explain", "4711", "-d", str(node)): (1, "no verdict on 4711"),
        ("explain", SUBMITTED.hex()[:3], "-d", str(node)): (1, "--list"),
        ("explain",): (2, "give --data-dir"),
        ("explain", "--last", "0", "-d", str(node)): (2, "--last"),
    }
    for args, (code, part) in wrong.items():
        cli(*args).refused(code, part)
    fill(tmp_path / "new" / "ledger.db", manifest=False).close()
    ran = cli("explain", "-d", str(tmp_path / "new"))
    assert (ran.code, "no trainer has admitted this node yet" in ran.err) == (5, True)
    (tmp_path / "new" / "ledger.db").write_bytes(b"noise" * 1000)
    assert cli("explain", "-d", str(tmp_path / "new")).code == 5
    fill(tmp_path / "empty" / "ledger.db").close()
    assert cli("explain", "-d", str(tmp_path / "empty")).code == 1
    assert cli("explain", "--list", "-d", str(tmp_path / "empty")).out == "no verdicts yet\n"


def test_text_of_peers_does_not_reach_the_terminal_as_commands(cli: Cli, tmp_path: Path) -> None:
    rejection = msgspec.structs.replace(VERDICT.rejections[0], detail="\x1b[2Jgone [red]x")
    fill(
        ledger(tmp_path), signed(msgspec.structs.replace(VERDICT, rejections=(rejection,)))
    ).close()
    out = cli("explain", "-d", str(tmp_path / "node")).out
    assert "\x1b" not in out
    assert "gone [red]x" in out


def test_every_reason_that_a_rollout_is_rejected_for_has_a_meaning() -> None:
    """The others refuse a message, or a whole submission."""
    others = set(Reason) - set(MEANINGS)
    assert {Reason.WRONG_MODEL, Reason.DUPLICATE, Reason.STALE, Reason.TOO_LARGE} <= set(MEANINGS)
    assert len(MEANINGS) == 22, others
    for reason in Reason:
        means = meaning(reason)
        assert all((means.check, means.proves, means.proves_not, means.look_at)), reason


# -- pipelines -------------------------------------------------------------------------------------

SAID = PipelineVerdict(
    PLAN.group,
    PLAN.generation,
    (WORKER.node_id, STRANGER.node_id),
    (Blamed(0, 0, (0.012,), (1,)), Blamed(1, 1, (0.07,), (0, 1)), Blamed(1, 2, (), ())),
)


def test_the_stages_that_it_can_be_of_are_counted(cli: Cli, tmp_path: Path) -> None:
    together = signed(msgspec.structs.replace(VERDICT, pipeline=SAID))
    fill(ledger(tmp_path), together, signed(CLEAN)).close()
    node = tmp_path / "node"
    ran = cli("explain", "-d", str(node))
    assert ran.code == 0, ran.err
    lines = [line.split() for line in ran.out.splitlines()]
    assert f"made by 2 stages of pipeline {PLAN.group.hex()[:10]}:2" in ran.out
    assert ["0", WORKER.node_id.hex()[:10], "1", "0"] in lines
    assert ["1", STRANGER.node_id.hex()[:10], "2", "1"] in lines
    words = " ".join(ran.out.split())
    assert "0/0: distances behind stages 0.. are 0.012: 1" in words
    assert "1/1: distances behind stages 0.. are 0.07: 0 or 1" in words
    assert "1/2: no boundaries are stated: no stage can be named" in words
    assert "above 0.1, odd above 0.05" in words
    found = json.loads(cli("explain", str(CLEAN.lease_id), "-d", str(node), "--json").out)
    assert found["stages"] is None
    found = json.loads(cli("explain", "-d", str(node), "--json").out)
    assert found["stages"]["blamed"][1]["stages"] == [0, 1]


def test_a_trainer_shows_how_far_it_believes_a_validator(cli: Cli, tmp_path: Path) -> None:
    validator = STRANGER.node_id.hex()
    record = ValidatorRecord(
        jobs=12,
        rollouts=90,
        compared=7,
        rechecked=3,
        overturned=1,
        disqualified="it called clean what the trainer finds rejected",
        passed=(WORKER.node_id.hex(),),
    )
    book = fill(tmp_path / "run" / "trainer" / "ledger.db", signed(VERDICT))
    book.set(VALIDATORS, encode_records({validator: record}))
    book.close()
    run = ("-d", str(tmp_path / "run"))
    words = " ".join(cli("explain", validator[:10], *run).out.split())
    assert "90 rollouts in 12 jobs" in words
    assert "10: 7 drawn by lot, 3 that it did not call clean; 1 judged differently" in words
    assert "disqualified: it called clean what the trainer finds rejected" in words
    assert f"covered for {WORKER.node_id.hex()[:10]}" in words
    assert json.loads(cli("explain", validator, "--json", *run).out)["overturned"] == 1
    verdict = " ".join(cli("explain", ID, *run).out.split())
    assert "validator 90 rollouts in 12 jobs; disqualified: it called clean" in verdict


def test_records_of_validators_that_cannot_be_read_are_one_line(cli: Cli, tmp_path: Path) -> None:
    book = fill(tmp_path / "run" / "trainer" / "ledger.db", signed(VERDICT))
    book.set(VALIDATORS, b"{")
    book.close()
    cli("explain", ID, "-d", str(tmp_path / "run")).refused(5, "restore the file from a copy")
