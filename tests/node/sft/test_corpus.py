import gzip
import importlib
import json
from pathlib import Path

import pytest
from sft_cases import write_rows

from primerl.node.errors import NetworkError, StorageError, UsageError
from primerl.node.sft.conversion import as_lines, find_files
from primerl.node.sft.corpus import Corpus, RowFile
from primerl.node.sft.hub import download, of_split
from primerl.node.sft.rows import BadRow


def corpus(*paths: Path, limit: int = 1000) -> Corpus:
    return Corpus([RowFile(path, path.name) for path in paths], max_row_bytes=limit)


def test_rows_are_numbered_through_the_files_and_named_by_their_lines(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_bytes(b'{"n": 0}\n\n{"n": 1}\r\n\r\n')
    b.write_bytes(b'\n{"n": 2}')  # no newline at the end
    rows = corpus(a, b)
    assert [json.loads(rows.read(n)) for n in range(len(rows))] == [{"n": n} for n in range(3)]
    assert [rows.where(n) for n in range(3)] == ["a.jsonl:1", "a.jsonl:3", "b.jsonl:2"]
    with pytest.raises(IndexError):
        rows.read(3)
    rows.close()


def test_an_empty_file_is_no_row_and_no_rows_are_an_error(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    assert len(corpus(write_rows(tmp_path / "a.jsonl", [1]), empty)) == 1
    with pytest.raises(UsageError, match=r"empty\.jsonl"):
        corpus(empty)


def test_a_row_that_is_too_long_is_a_bad_row(tmp_path: Path) -> None:
    rows = corpus(write_rows(tmp_path / "a.jsonl", ["x" * 50, "y"]), limit=20)
    with pytest.raises(BadRow, match="52 bytes"):
        rows.read(0)
    assert rows.read(1) == b'"y"'


def test_other_data_have_another_identity(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [1, 2])
    before = corpus(path).identity()
    assert corpus(path).identity() == before
    assert corpus(write_rows(path, [1, 2, 3])).identity() != before


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


def test_every_kind_of_file_gives_the_same_lines(tmp_path: Path) -> None:
    wanted = [{"n": 1}, {"n": "\u00e4"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in wanted).encode()
    whole = json.dumps(wanted).encode()
    files = {
        "a.jsonl": lines,
        "b.json": lines,
        "c.json": b" \n" + whole,
        "d.jsonl.gz": gzip.compress(lines),
        "e.json.gz": gzip.compress(whole),
    }
    for name, data in files.items():
        path = tmp_path / name
        path.write_bytes(data)
        found = as_lines(path, tmp_path / "cache")
        assert [json.loads(line) for line in found.read_bytes().splitlines()] == wanted, name


def test_a_file_is_converted_once_and_again_when_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[1]")
    first = as_lines(path, tmp_path / "cache")
    stamp = first.stat().st_mtime_ns
    assert as_lines(path, tmp_path / "cache") == first
    assert first.stat().st_mtime_ns == stamp
    path.write_text("[1, 2]")
    assert as_lines(path, tmp_path / "cache").read_text() == "1\n2\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b"[1, "),
        ("a.jsonl.gz", b"no gzip"),
        ("a.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-9]),
    ],
)
def test_a_broken_file_is_named_and_leaves_nothing_behind(
    tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(StorageError, match=name):
        as_lines(tmp_path / name, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_parquet_gives_a_line_a_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = as_lines(tmp_path / "a.parquet", tmp_path / "cache")
    assert [json.loads(line) for line in found.read_bytes().splitlines()] == rows
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(StorageError, match=r"b\.parquet"):
        as_lines(tmp_path / "b.parquet", tmp_path / "cache")


def hub_files(*names: str) -> list[Path]:
    return [Path("root", name) for name in names]


def test_a_split_is_a_word_of_the_path() -> None:
    files = hub_files("data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet")
    assert of_split(files, "test", root=Path("root"), name="x") == [files[1]]
    assert of_split(files, "train", root=Path("root"), name="x") == [files[0]]
    sub = hub_files("train/a.jsonl", "test_sft/b.jsonl")
    assert of_split(sub, "sft", root=Path("root"), name="x") == [sub[1]]


def test_files_without_a_split_are_the_training_split() -> None:
    files = hub_files("a.jsonl", "b.jsonl")
    assert of_split(files, "train", root=Path("root"), name="x") == files
    with pytest.raises(UsageError, match="no split 'test'"):
        of_split(files, "test", root=Path("root"), name="x")
    with pytest.raises(UsageError, match="test"):
        of_split(hub_files("test.jsonl"), "train", root=Path("root"), name="x")


def test_offline_a_hub_id_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NetworkError, match=r"data\.files"):
        download("nobody/no-such-data", "main", "train")
    with pytest.raises(UsageError, match=r"correct data\.hub"):
        download("not a hub id!", "main", "train")
