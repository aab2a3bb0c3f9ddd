import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.chat_model import COMPACT, make_chat_model
from support.sft_cases import WEATHER, pairs, qwen_chat, trained_texts, write_rows
from support.training_cases import TINY

from primerl.node.config.run import RunConfig
from primerl.node.config.sft import DataConfig, SftConfig
from primerl.node.config.training import MixedSftConfig
from primerl.node.errors import NetworkError, RunFailed, StorageError, UsageError
from primerl.node.models import huggingface
from primerl.node.sft.data import (
    BLANK,
    HELD_OUT,
    PEEKED_ROWS,
    TOO_LONG,
    UNTRAINED,
    BatchReader,
    DataCursor,
    MixedReader,
    RowExamples,
    SkippedRow,
    Table,
    check_mixed,
    epoch_order,
    find_files,
    is_held_out,
    make_sample,
    open_rows,
    read_file,
    read_hub,
    tell_unread,
)
from primerl.node.sft.rows import BadRow
from primerl.node.sft.tokens import TemplateTokenizer, Tokens
from primerl.node.training.backend import Sample

TOKENIZER: Any = None
"""Rows are read without one."""


def examples(*paths: Path, limit: int = 1000) -> RowExamples:
    tables = [read_file(path, path.parent / "cache") for path in paths]
    return RowExamples(SftConfig(), tables, TOKENIZER, max_row=limit)


def rows_of(table: Table) -> list[Any]:
    return [json.loads(table.read(n)) for n in range(len(table.rows))]


def test_rows_are_numbered_through_the_files_and_named_by_their_lines(tmp_path: Path) -> None:
    a, b = tmp_path / "a[1].jsonl", tmp_path / "b.jsonl"
    a.write_bytes(b'{"n": 0}\n\n{"n": "\xe2\x80\xa8\xc2\x85"}\r\n')  # other line breaks in a text
    b.write_bytes(b'{"n": 2}')  # no newline at the end
    found = examples(a, b)
    assert [found.read(n) for n in (0, 1, 3)] == [b'{"n": 0}', b"", b'{"n": 2}']
    assert json.loads(found.read(2)) == {"n": "\u2028\x85"}
    assert [found.where(n).rpartition("/")[2] for n in range(4)] == [
        "a[1].jsonl:1",
        "a[1].jsonl:2",
        "a[1].jsonl:3",
        "b.jsonl:1",
    ]
    with pytest.raises(IndexError):
        found.read(4)


def test_an_empty_file_is_no_row_and_no_rows_are_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    assert examples(write_rows(tmp_path / "a.jsonl", [1]), empty).size == 1
    with pytest.raises(UsageError, match=r"empty\.jsonl"):
        examples(empty)


def test_a_row_that_is_too_long_is_a_bad_row(tmp_path: Path) -> None:
    found = examples(write_rows(tmp_path / "a.jsonl", ["x" * 50, "y"]), limit=20)
    with pytest.raises(BadRow, match="52 bytes"):
        found.read(0)
    assert found.read(1) == b'"y"'


def test_bytes_that_are_no_text_are_a_bad_row_and_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": "\xff"}\n\xfe\n{"n": 1}\n')
    found = examples(path)
    for n in (0, 1):
        with pytest.raises(ValueError, match=r"JSON|Expecting|escape"):
            json.loads(found.read(n))
    assert json.loads(found.read(2)) == {"n": 1}


def test_other_data_have_another_identity(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [1, 2])
    before = examples(path).identity()
    assert examples(path).identity() == before
    assert examples(write_rows(path, [1, 2, 3])).identity() != before


def test_directories_are_searched_and_what_is_no_data_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "data" / "deep"
    inside.mkdir(parents=True)
    write_rows(inside / "b.jsonl", [1])
    write_rows(tmp_path / "data" / "a.json", [1])
    (inside / "README.md").write_text("no data")
    assert [path.name for path in find_files([str(tmp_path / "data")])] == ["a.json", "b.jsonl"]
    with pytest.raises(UsageError, match="convert it"):
        find_files([str(inside / "README.md")])
    with pytest.raises(UsageError, match=r"data\.hub"):
        find_files(["some/hub-id"])
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match="holds no data"):
        find_files([str(tmp_path / "bare")])


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    wanted = [{"n": 1}, {"n": "\u00e4"}, 5, {"m": [{"a": {"b": None}}, "x"]}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in wanted).encode()
    whole = json.dumps(wanted).encode()
    files = {
        "a.jsonl": lines,
        "b.json": lines,
        "c.json": b" \n" + json.dumps(wanted, indent=2).encode(),
        "d.jsonl.gz": gzip.compress(lines),
        "e.json.gz": gzip.compress(whole),
        "f.json.gz": gzip.compress(lines),
    }
    for name, data in files.items():
        path = tmp_path / name
        path.write_bytes(data)
        assert rows_of(read_file(path, tmp_path / "cache")) == wanted, name


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_a_file_is_converted_once_and_again_when_it_changed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("[1]")
    first = read_file(path, tmp_path / "cache")
    assert read_file(path, tmp_path / "cache").rows.cache_files == first.rows.cache_files
    assert Path(first.rows.cache_files[0]["filename"]).is_relative_to(tmp_path / "cache")
    path.write_text("[1, 2]")
    changed = rows_of(read_file(path, tmp_path / "cache"))
    assert changed == ([1, 2] if name == "a.json" else [[1, 2]])


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b"[1, "),
        ("a.jsonl.gz", b"no gzip"),
        ("a.json.gz", b"no gzip"),
        ("a.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-9]),
        ("b.parquet", b"PAR1 no"),
    ],
)
def test_a_broken_file_is_named_and_leaves_nothing_behind(
    tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / name).write_bytes(data)
    for _ in range(2):  # a second time, too: what was begun is not taken for a copy
        with pytest.raises(StorageError, match=name):
            read_file(tmp_path / name, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    from datasets import Dataset

    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(str(path))
    return path


def test_parquet_gives_a_row_a_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]},
        {"prompt": "c", "completion": None},
    ]
    path = parquet(tmp_path / "a.parquet", rows)
    table = read_file(path, tmp_path / "cache")
    assert rows_of(table) == rows


def test_a_reply_that_a_table_made_a_date_of_is_text_again(tmp_path: Path) -> None:
    from datasets import Dataset

    row = {"prompt": "When?", "completion": "2021-01-02"}
    lines = write_rows(tmp_path / "a.jsonl", [row])
    table = Dataset.from_json(str(lines), cache_dir=str(tmp_path / "cache"))
    assert isinstance(table, Dataset)
    assert not isinstance(table[0]["completion"], str), "the library still makes dates of them"
    assert rows_of(Table("a", table, 0)) == [row]


def test_an_argument_that_only_another_row_has_is_not_trained(tmp_path: Path) -> None:
    chat = qwen_chat(tmp_path / "model")
    calls = [[{"function": {"name": "f", "arguments": {key: "v"}}}] for key in "xy"]
    talks = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": it}]
        for it in calls
    ]
    tools = {"tools": None, "tool_defs": json.dumps([{"name": "f"}])}
    path = parquet(tmp_path / "a.parquet", [{"messages": it, **tools} for it in talks])
    read = RowExamples(
        SftConfig.model_validate({"training": {"seq_len": 512}}),
        [read_file(path, tmp_path / "cache")],
        TemplateTokenizer(chat, frozenset({"assistant"})),
    )
    sample = read.sample(1)
    trained = trained_texts(chat, Tokens(sample.token_ids, sample.mask))
    assert trained == [
        '<tool_call>\n{"name": "f", "arguments": {"y": "v"}}\n</tool_call><|im_end|>'
    ]


def test_columns_that_are_not_read_are_named_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = {"prompt": "a", "completion": "b"}
    rows = [{**pair, "id": 1, "tool_defs": None}, {**pair, "source": "x"}]
    table = read_file(parquet(tmp_path / "a.parquet", rows[:1]), tmp_path / "cache")
    lines = read_file(write_rows(tmp_path / "a.jsonl", [*rows, "no object"]), tmp_path / "cache")
    tell_unread([table, lines])
    assert [record.message for record in caplog.records] == [
        "columns of the data that are not read: 2 (id, source)"
    ]
    caplog.clear()
    tell_unread([read_file(write_rows(tmp_path / "b.jsonl", [pair]), tmp_path / "cache")])
    assert not caplog.records


def test_a_data_set_of_the_hub_is_read_by_its_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory in the form of one stands for it."""
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    parquet(Path("some/data/data/train-00000-of-00001.parquet"), pairs(3))
    parquet(Path("some/data/data/test-00000-of-00001.parquet"), pairs(2))
    data = DataConfig(hub="some/data")
    assert rows_of(read_hub(data, "train")) == pairs(3)
    assert rows_of(read_hub(data, "test")) == pairs(2)
    assert len(read_hub(data, "train[:1]").rows) == 1
    with pytest.raises(UsageError, match=r"data\.split"):
        read_hub(data, "nothing")
    Path("some/script").mkdir()
    Path("some/script/script.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(UsageError, match=r"no data files|cannot be read"):
        read_hub(DataConfig(hub="some/script"), "train")


def test_offline_a_hub_id_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants
    from datasets import config

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    with pytest.raises(NetworkError, match=r"data\.files"):
        read_hub(DataConfig(hub="nobody/no-such-data"), "train")


def test_a_part_that_the_template_loses_ends_the_data_before_the_first_step(tmp_path: Path) -> None:
    make_chat_model(tmp_path / "m", COMPACT)
    reply = {"role": "assistant", "content": "b"}
    row = {"messages": [{"role": "user", "content": "a"}, reply], "tools": [WEATHER]}
    plain = {"prompt": "a", "completion": "b"}
    file = write_rows(tmp_path / "rows.jsonl", [plain, {"no": "row"}, row])
    config = SftConfig.model_validate({"data": {"files": [str(file)]}})
    with pytest.raises(UsageError, match=r"rows\.jsonl:3: the chat template leaves out the schema"):
        open_rows(config, tmp_path / "m", tmp_path / "cache")
    write_rows(file, [plain] * PEEKED_ROWS + [row])
    found = open_rows(config, tmp_path / "m", tmp_path / "cache").training
    with pytest.raises(BadRow, match="the schema of a tool"):
        found.sample(PEEKED_ROWS)


def test_rows_have_the_date_that_training_began_with(tmp_path: Path) -> None:
    make_chat_model(tmp_path / "m", "{{ strftime_now('%Y') }}" + COMPACT)
    file = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    config = SftConfig.model_validate({"data": {"files": [str(file)]}})
    found = open_rows(config, tmp_path / "m", tmp_path / "cache", "2020-02-20").training
    assert bytes(found.sample(0).token_ids[:4]) == b"2020"


def test_blank_lines_and_bad_rows_cost_themselves(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*pairs(20), {"prompt": 1}])
    path.write_text(path.read_text().replace("\n", "\n \n"))
    config = SftConfig.model_validate({"data": {"files": [str(path)]}, "max_epochs": 1})
    huggingface.create(tmp_path / "model", TINY, seed=0)
    data = open_rows(config, tmp_path / "model", tmp_path / "cache")
    batch = BatchReader(data.training, config).batch(DataCursor(), size=99)
    assert len(batch.samples) == 20
    assert batch.cursor.skipped == {"fields": 1}
    assert batch.cursor.rows == 21


class Numbers:
    """Row n is a sample of n % 5 + 2 tokens n; some rows are bad or passed over."""

    def __init__(
        self,
        size: int | None,
        *,
        bad: frozenset[int] = frozenset(),
        passed: str = "",
        every: int = 0,
    ) -> None:
        self.size = size
        self.bad = bad
        self.passed = passed
        self.every = every

    def sample(self, index: int) -> Sample:
        if index in self.bad:
            raise BadRow("role", "an odd role")
        if self.every and index % self.every == 0:
            raise SkippedRow(self.passed)
        length = index % 5 + 2
        return Sample([index] * length, [False] + [True] * (length - 1), [0.0] * length, 1.0)

    def where(self, index: int) -> str:
        return f"numbers:{index + 1}"

    def identity(self) -> str:
        return "numbers"


def reader(numbers: Numbers, *, max_epochs: int = 0, **data: object) -> BatchReader:
    config = SftConfig.model_validate({"seed": 3, "max_epochs": max_epochs, "data": data})
    return BatchReader(numbers, config)


def rows(samples: list[Sample]) -> list[int]:
    return [sample.token_ids[0] for sample in samples]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_an_order_has_every_row_once(size: int) -> None:
    assert sorted(epoch_order(size, seed=5, epoch=2)) == list(range(size))


def test_orders_differ_by_seed_and_epoch_and_look_random() -> None:
    orders = {
        tuple(map(int, epoch_order(500, seed, epoch))) for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    }
    assert len(orders) == 3
    for order in orders:
        # the correlation of place and row of a random permutation has a standard deviation of 0.045
        mean = sum(range(500)) / 500
        covariance = sum((n - mean) * (row - mean) for n, row in enumerate(order))
        assert abs(covariance / sum((n - mean) ** 2 for n in range(500))) < 0.2


def test_the_order_is_the_same_for_ever() -> None:
    """A run resumes in it, also after an update of this program."""
    assert epoch_order(10, seed=0, epoch=0).tolist() == GOLDEN


GOLDEN = [6, 3, 9, 5, 2, 0, 4, 7, 8, 1]


def test_batches_walk_through_the_epochs_without_loss() -> None:
    read = reader(Numbers(10))
    cursor, seen = DataCursor(), list[int]()
    for _ in range(5):
        batch = read.batch(cursor, size=4)
        assert len(batch.samples) == 4
        seen += rows(batch.samples)
        cursor = batch.cursor
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    assert (cursor.epoch, cursor.index, cursor.samples) == (2, 0, 20)
    assert cursor.tokens == 2 * sum(n % 5 + 2 for n in range(10))


def test_a_cursor_alone_says_what_comes_next() -> None:
    read = reader(Numbers(22, bad=frozenset({4})))
    first = read.batch(DataCursor(), size=7)
    again = reader(Numbers(22, bad=frozenset({4})))
    read.batch(first.cursor, size=20)  # a reader that has gone on is no other one
    assert again.batch(first.cursor, size=7) == read.batch(first.cursor, size=7)


def test_without_shuffling_rows_come_in_their_order() -> None:
    batch = reader(Numbers(4), shuffle=False).batch(DataCursor(), size=6)
    assert rows(batch.samples) == [0, 1, 2, 3, 0, 1]


def test_a_batch_of_tokens_is_never_more_and_loses_nothing() -> None:
    read = reader(Numbers(20))
    cursor, seen = DataCursor(), list[int]()
    while cursor.epoch == 0:
        batch = read.batch(cursor, size=1, tokens=13)
        held = sum(len(sample.token_ids) for sample in batch.samples)
        assert 13 - 6 < held <= 13
        seen += rows(batch.samples)
        cursor = batch.cursor
    assert sorted(seen[:20]) == list(range(20))


def test_a_row_longer_than_the_batch_is_a_batch_of_its_own() -> None:
    assert len(reader(Numbers(5)).batch(DataCursor(), size=1, tokens=1).samples) == 1


def test_max_epochs_ends_the_data_with_a_short_batch_and_then_nothing() -> None:
    read = reader(Numbers(10), max_epochs=1)
    last = read.batch(read.batch(DataCursor(), size=7).cursor, size=7)
    assert len(last.samples) == 3
    assert read.batch(last.cursor, size=7).samples == []


def test_bad_rows_cost_themselves_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        batch = reader(Numbers(100, bad=frozenset({7, 8}))).batch(DataCursor(), size=98)
    assert len(batch.samples) == 98
    assert batch.cursor.skipped == {"role": 2}
    assert batch.cursor.bad == 2
    assert {"numbers:8", "numbers:9"} == {
        record.getMessage().split()[2][:-1] for record in caplog.records
    }


def test_too_many_bad_rows_end_the_run_and_name_one() -> None:
    with pytest.raises(
        RunFailed, match=r"6 of \d+ rows are bad \(6 role\), the last at numbers:\d"
    ):
        reader(Numbers(100, bad=frozenset(range(6)))).batch(DataCursor(), size=100)


def test_the_first_bad_rows_of_many_rows_end_nothing() -> None:
    """The share is one of a thousand rows, not of the first three."""
    read = reader(Numbers(5000, bad=frozenset(range(5))), shuffle=False)
    assert read.batch(DataCursor(), size=10).cursor.bad == 5


def test_rows_passed_over_are_nobodys_fault() -> None:
    read = reader(Numbers(10, passed=TOO_LONG, every=2))
    cursor = read.batch(DataCursor(), size=10).cursor
    assert cursor.skipped[TOO_LONG] >= 5
    assert cursor.bad == 0
    for reason in (HELD_OUT, BLANK):
        uncounted = reader(Numbers(10, passed=reason, every=2)).batch(DataCursor(), size=10)
        assert uncounted.cursor.skipped == {}
        assert uncounted.cursor.rows == 10


@pytest.mark.parametrize("size", [6, None])
def test_data_without_any_sample_end_with_the_reason(size: int | None) -> None:
    with pytest.raises(UsageError, match=f"{size or 1000} too_long"):
        reader(Numbers(size, passed=TOO_LONG, every=1)).batch(DataCursor(), size=1)


def tokens(length: int, trained: int) -> Tokens:
    return Tokens(list(range(length)), [n >= length - trained for n in range(length)])


def of_8(too_long: str) -> SftConfig:
    values = {"training": {"seq_len": 8}, "data": {"too_long": too_long}}
    return SftConfig.model_validate(values)


def test_long_rows_are_dropped_or_cut() -> None:
    with pytest.raises(SkippedRow, match=TOO_LONG):
        make_sample(tokens(9, 4), of_8("drop"))
    cut = make_sample(tokens(9, 4), of_8("truncate"))
    assert len(cut.token_ids) == len(cut.mask) == len(cut.logprobs) == 8
    assert sum(cut.mask) == 3
    with pytest.raises(SkippedRow):  # nothing that is trained is left of it
        make_sample(tokens(12, 3), of_8("truncate"))
    assert len(make_sample(tokens(8, 1), of_8("drop")).token_ids) == 8


def test_nothing_predicts_the_first_token() -> None:
    assert make_sample(tokens(3, 3), of_8("drop")).mask == [False, True, True]
    with pytest.raises(SkippedRow, match=UNTRAINED):
        make_sample(Tokens([1, 2], [True, False]), of_8("drop"))


def test_a_holdout_takes_its_share_and_doubles_stay_together() -> None:
    taken = [is_held_out(b"row %d" % n, 0.25) for n in range(2000)]
    assert 400 < sum(taken) < 600  # five standard deviations
    assert [is_held_out(b"row %d\r" % n, 0.25) for n in range(2000)] == taken
    assert not any(is_held_out(b"row %d" % n, 0.0) for n in range(50))


def mixed(share: float) -> MixedReader:
    return MixedReader(Numbers(20), SftConfig.model_validate({"seed": 3}), share)


def test_demonstrations_take_their_share_of_a_step_and_go_on_where_a_cursor_says() -> None:
    subject, cursor, read = mixed(0.25), DataCursor(), 0
    for _ in range(40):
        batch = subject.batch(cursor, 90)  # 90 tokens of rollouts: room for 30 of demonstrations
        assert 30 - 6 < sum(len(one.token_ids) for one in batch.samples) <= 30
        assert all(one.given for one in batch.samples)
        assert mixed(0.25).batch(cursor, 90) == batch
        read, cursor = read + len(batch.samples), batch.cursor
    assert (cursor.samples, cursor.epoch) == (read, read // 20)


def test_a_share_without_room_for_a_row_is_one_row() -> None:
    assert len(mixed(0.001).batch(DataCursor(), 10).samples) == 1


def test_mixed_data_that_are_missing_are_named_with_their_section(tmp_path: Path) -> None:
    missing = MixedSftConfig(files=[str(tmp_path / "none.jsonl")])
    with pytest.raises(UsageError, match=r"training\.sft: no such file"):
        check_mixed(missing)
    with pytest.raises(ValidationError, match="give one of"):
        RunConfig.model_validate({"training": {"sft": {"weight": 0.1}}})
