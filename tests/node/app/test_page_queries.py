"""Questions of a node's page, answered from the files of its run."""

import json
from pathlib import Path

import msgspec
import pytest
from support.kept_cases import row
from support.protocol_cases import STRANGER
from support.verdict_cases import CLEAN, VERDICT, fill, signed, tampered

from primerl.node.app.page_queries import MAX_AUDITS, MAX_ROLLOUTS, MAX_TEXT, PageQueries
from primerl.node.errors import StorageError, UsageError
from primerl.node.evaluation.online import Evaluated
from primerl.node.evaluation.statistics import Estimate, EvalFigures
from primerl.node.storage.rollouts import RolloutFiles, StepRecord


@pytest.fixture
def queries(tmp_path: Path) -> PageQueries:
    files = RolloutFiles(tmp_path / "run" / "rollouts", fsync=False)
    files.write(StepRecord(1, groups=1, kept=1), [row(1, 0, 0)])
    second = [row(2, 0, 0), row(2, 0, 1, prompt="<script>", completion="a\x1b[31mb", cuts=[9])]
    files.write(StepRecord(2, groups=1, kept=1), second)
    return PageQueries(tmp_path / "trainer", tmp_path / "run")


async def test_the_rollouts_of_the_newest_step_are_listed_and_one_is_read(
    queries: PageQueries,
) -> None:
    newest = await queries.rollouts()
    assert (newest.steps, newest.step, newest.more) == ([1, 2], 2, 0)
    assert [rollout["place"] for rollout in newest.rollouts] == ["2/0/0", "2/0/1"]
    assert (await queries.rollouts("1")).rollouts[0]["place"] == "1/0/0"
    msgspec.json.encode(newest)
    [branch] = await queries.rollout("2/0/1")
    assert branch.parts[:2] == [("<script>", False), ("a\x1b[31mb", True)]


async def test_of_a_huge_rollout_the_beginning_is_sent(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path / "rollouts", fsync=False)
    huge = row(1, 0, 0, prompt="p" * MAX_TEXT, completion="c" * MAX_TEXT, cuts=[MAX_TEXT])
    files.write(StepRecord(1, groups=1, kept=1), [huge, huge])
    branches = await PageQueries(tmp_path, tmp_path).rollout("1/0/0")
    assert sum(len(text) for branch in branches for text, _ in branch.parts) == MAX_TEXT


async def test_of_a_large_step_only_so_many_rollouts_are_sent(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path / "rollouts", fsync=False)
    many = [row(1, 0, at) for at in range(MAX_ROLLOUTS + 3)]
    files.write(StepRecord(1, groups=1, kept=1), many)
    answer = await PageQueries(tmp_path, tmp_path).rollouts()
    assert (len(answer.rollouts), answer.more) == (MAX_ROLLOUTS, 3)


@pytest.mark.parametrize("place", ["", "2", "2/0", "2/0/0/0", "../../x/0/0", "2/-1/0", "9" * 12])
async def test_a_place_that_is_none_is_refused(queries: PageQueries, place: str) -> None:
    with pytest.raises(UsageError):
        await queries.rollout(place)


@pytest.mark.parametrize("step", ["x", "-1", "../../x", "9" * 12])
async def test_a_step_that_is_no_number_is_refused(queries: PageQueries, step: str) -> None:
    with pytest.raises(UsageError):
        await queries.rollouts(step)


async def test_what_is_not_there_is_none_or_said(tmp_path: Path, queries: PageQueries) -> None:
    with pytest.raises(StorageError, match="not there"):
        await queries.rollouts("7")
    empty = PageQueries(tmp_path / "none", tmp_path / "none")
    assert (await empty.rollouts()).steps == []
    assert await empty.evaluations() == []
    assert await empty.verdicts("ab" * 32) == []
    assert "rollouts" not in PageQueries(tmp_path).all(), "a worker has no run's directory"


async def test_verdicts_on_a_peer_are_read_beside_the_running_node(tmp_path: Path) -> None:
    book = fill(tmp_path / "trainer" / "ledger.db", signed(VERDICT))
    queries = PageQueries(tmp_path / "trainer", tmp_path)
    [line] = await queries.verdicts()
    assert line.rejected == VERDICT.rejected
    assert await queries.verdicts(line.worker) == [line]
    assert await queries.verdicts("00" * 32) == []
    book.close()


async def test_audits_are_listed_with_the_measure_that_decided_and_their_cost(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trainer" / "ledger.db"
    suspect = msgspec.structs.replace(
        VERDICT, rejections=(), rejected=0, evidence=VERDICT.evidence[1:], validator=b""
    )
    book = fill(
        path, signed(VERDICT), signed(CLEAN), tampered(VERDICT, accepted=9), signed(suspect)
    )
    versions = {VERDICT.submission.hex(): 7}
    queries = PageQueries(tmp_path / "trainer", tmp_path, lambda: versions)
    newest, forged, guilty = await queries.audits()
    assert (newest.result, newest.reason, newest.tokens) == ("suspect", "", 121)
    assert newest.measure
    assert (newest.measure.name, newest.measure.mark) == ("logprob", "?")
    assert (forged.result, forged.measure, forged.tokens) == ("forged", None, 0)
    assert (guilty.result, guilty.audited, guilty.rollouts) == ("rejected", 3, 4)
    assert guilty.measure
    assert (guilty.measure.name, guilty.measure.value) == ("fingerprint", 1.2)
    assert guilty.reason == "wrong_model: fingerprint is 1.2 over 64 tokens"
    assert (guilty.validator, guilty.version) == (STRANGER.node_id.hex(), 7)
    msgspec.json.encode([newest, forged, guilty])
    book.close()


async def test_audits_are_the_newest_of_many_and_none_where_nothing_was_audited(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trainer" / "ledger.db"
    assert await PageQueries(tmp_path / "trainer").audits() == []
    many = [msgspec.structs.replace(VERDICT, lease_id=at) for at in range(MAX_AUDITS + 2)]
    book = fill(path, signed(CLEAN), *map(signed, many))
    lines = await PageQueries(tmp_path / "trainer").audits()
    assert [line.number for line in lines] == list(range(MAX_AUDITS + 3, 3, -1))
    assert {line.version for line in lines} == {-1}
    book.close()


async def test_evaluations_have_a_line_for_each_version_and_environment(tmp_path: Path) -> None:
    figures = EvalFigures(
        prompts=8,
        samples=4,
        success=1.0,
        avg=Estimate(0.5, 0.25, 0.75, "exact"),
        passes={"4": Estimate(0.75, None, None, "none")},
        reward=0.5,
        truncated=0.0,
        failed=0.0,
        completion_mean=3.0,
        reasons={},
        metrics={},
        prompt_tokens=9,
        completion_tokens=9,
    )
    lines = [Evaluated(number, 1.0, {"math": figures}) for number in (0, 5)]
    text = b"\n".join(map(msgspec.json.encode, lines))
    (tmp_path / "evaluations.jsonl").write_bytes(text)
    queries = PageQueries(tmp_path, tmp_path)
    answer = json.loads(msgspec.json.encode(await queries.evaluations()))
    assert [line["version"] for line in answer] == [0, 5]
    assert answer[0]["environment"] == "math"
    assert (answer[0]["reward"], answer[0]["low"]) == (0.5, 0.25)
    assert answer[0]["figures"]["pass@4"] == 0.75
    (tmp_path / "evaluations.jsonl").write_bytes(text[:-9])
    assert await queries.evaluations() == []
