"""The ledger's own promises: one node at a time, readers beside it, verdicts bounded and by owner."""

import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from primerl.crypto.hashing import digest, short
from primerl.node.errors import BusyError, StorageError
from primerl.node.storage import ledger as module
from primerl.node.storage.ledger import Ledger, LedgerView, ReceiptRecord

A, B = b"a" * 32, b"b" * 32


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An open ledger."""
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    yield ledger
    ledger.close()


class PausedLedger(Ledger):
    """A ledger that stops in the middle of a large row."""

    def __init__(self, path: Path) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        super().__init__(path, fsync=False)

    def _write(
        self, statement: str, values: tuple[object, ...], db: sqlite3.Connection | None = None
    ) -> sqlite3.Cursor:
        if db is not None:
            db.set_progress_handler(self._pause, 1)
        return super()._write(statement, values, db)

    def _pause(self) -> int:
        self.begun.set()
        return 0 if self.goes_on.wait(60.0) else 1


def test_a_ledger_is_read_while_a_large_row_is_written(tmp_path: Path) -> None:
    ledger = PausedLedger(tmp_path / "ledger.db")
    ledger.set("key", b"value")
    try:
        with ThreadPoolExecutor(2) as threads:
            writing = threads.submit(ledger.receive, A, 1, A, bytes(1 << 20), 7)
            assert ledger.begun.wait(10.0), "on a connection of its own"
            reading = threads.submit(ledger.get, "key")
            try:
                assert reading.result(timeout=10.0) == b"value"
                assert not writing.done()
            finally:
                ledger.goes_on.set()
        assert ledger.received(A) == ReceiptRecord(1, A, 7)
        assert ledger.last_arrival() == writing.result() == 1
    finally:
        ledger.close()


def test_a_second_node_is_refused_and_a_reader_is_not(ledger: Ledger, tmp_path: Path) -> None:
    ledger.add_verdict(A, b"one")
    with pytest.raises(BusyError, match="in use by another node: stop it"):
        Ledger(tmp_path / "ledger.db")
    view = LedgerView(tmp_path / "ledger.db")
    assert [one.sealed for one in view.verdicts()] == [b"one"]
    ledger.add_verdict(B, b"two")
    assert [(one.node, one.sealed) for one in view.verdicts()] == [(B, b"two"), (A, b"one")]
    view.close()
    ledger.close()
    Ledger(tmp_path / "ledger.db").close()


KILLED = """
import os, sys
from pathlib import Path
from primerl.node.storage.ledger import Ledger
ledger = Ledger(Path(sys.argv[1]))
ledger.set("manifest", b"run")
ledger.add_verdict(b"a" * 32, b"last words")
os.kill(os.getpid(), 9)
"""


def test_a_node_that_was_killed_leaves_no_lock_and_its_verdicts_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert killed.returncode == -9
    view = LedgerView(path)
    assert view.get("manifest") == b"run"
    assert [one.sealed for one in view.verdicts()] == [b"last words"]
    view.close()
    Ledger(path).close()


def test_a_reader_makes_no_ledger_and_writes_nothing(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        LedgerView(tmp_path / "nowhere.db")
    assert not (tmp_path / "nowhere.db").exists()
    (tmp_path / "noise.db").write_bytes(b"noise" * 1000)
    with pytest.raises(StorageError, match="cannot read"):
        LedgerView(tmp_path / "noise.db")


def test_a_damaged_ledger_is_an_error_that_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"noise" * 1000)
    for _ in range(2):
        with pytest.raises(StorageError, match="move it away"):
            Ledger(path)
    path.unlink()
    Ledger(path).close()


def test_verdicts_are_sent_to_their_owner_in_pieces(ledger: Ledger) -> None:
    for number in range(6):
        ledger.add_verdict(A if number % 2 else B, bytes([number]) * 10)
    first = ledger.verdicts_after(A, 0, count=2, size=100)
    assert [sealed[0] for _, sealed in first] == [1, 3]
    rest = ledger.verdicts_after(A, first[-1][0], count=2, size=100)
    assert [sealed[0] for _, sealed in rest] == [5]
    assert ledger.verdicts_after(A, rest[-1][0], count=2, size=100) == []
    assert len(ledger.verdicts_after(B, 0, count=9, size=25)) == 2
    assert len(ledger.verdicts_after(B, 0, count=9, size=1)) == 1  # else it could never be told


def test_old_verdicts_make_room(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VERDICTS_KEPT", 3)
    for number in range(5):
        assert ledger.add_verdict(A, bytes([number]))
    assert not ledger.add_verdict(A, bytes([4]))
    kept = ledger.verdicts_after(A, 0, count=9, size=100)
    assert [sealed for _, sealed in kept] == [b"\x02", b"\x03", b"\x04"]


def test_a_verdict_is_kept_together_with_the_reputations_that_it_changed_or_not_at_all(
    ledger: Ledger,
) -> None:
    assert ledger.add_verdict(A, b"one", 7, {A: b"suspect", B: b"named"})
    unkeepable: dict[bytes, Any] = {A: b"banned", B: object()}
    with pytest.raises(sqlite3.Error):
        ledger.add_verdict(A, b"two", 8, unkeepable)
    assert ledger.add_verdict(A, b"three", 9, {A: b"banned"})
    assert [ledger.verdict_on(number) for number in (7, 8, 9)] == [b"one", None, b"three"]
    assert ledger.judged_up_to() == 9
    assert ledger.reputations() == {A: (9, b"banned"), B: (7, b"named")}


def test_a_submission_has_one_verdict(ledger: Ledger) -> None:
    assert ledger.add_verdict(A, b"rejected", 7, {A: b"banned"})
    assert not ledger.add_verdict(A, b"accepted", 7, {A: b"praised"})
    assert ledger.verdict_on(7) == b"rejected"
    assert ledger.reputations() == {A: (7, b"banned")}


def flip(path: Path, data: bytes, *, which: int) -> None:
    """Change a bit in one of the places where a file has `data`."""
    whole = bytearray(path.read_bytes())
    places = [one.start() for one in re.finditer(re.escape(data), whole)]
    whole[places[which]] ^= 1
    path.write_bytes(whole)


@pytest.mark.parametrize("which", [0, 1])
def test_a_ledger_whose_rows_and_indices_differ_is_refused_with_what_to_do(
    tmp_path: Path, which: int
) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    for number in range(9):
        ledger.add_verdict(A, bytes([number]) * 40, number)
    ledger.close()
    Ledger(path).close()
    flip(path, digest(bytes([4]) * 40), which=which)
    with pytest.raises(StorageError, match=r"ledger.db is damaged .*: put back a whole copy") as no:
        Ledger(path)
    assert "\n" not in str(no.value)


def trainers_ledger(path: Path) -> Ledger:
    """A ledger that counts its starts, with three submissions."""
    ledger = Ledger(path, fsync=False)
    ledger.count_boot()
    for number in range(1, 4):
        ledger.receive(digest(bytes([number])), number, A, bytes([number]) * 6000, 7)
    return ledger


def test_any_changed_byte_in_the_ledger_of_a_trainer_that_ended_in_order_is_noticed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    trainers_ledger(path).close()
    whole = path.read_bytes()
    no_text = whole.index(b"PRIMARY KEY, sealed") + 11, 0x81  # in what SQLite says of it
    for place, bit in ((8192 + 777, 1), (len(whole) - 1, 1), (96, 1), no_text):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
        with pytest.raises(StorageError, match=r"ledger\.db is damaged"):
            Ledger(path)
    path.write_bytes(whole)
    ledger = Ledger(path)
    assert ledger.last_arrival() == 3
    ledger.set("more", b"is written, and the checksum of before is not compared after a kill")
    copy = tmp_path / "copy.db"
    copy.write_bytes(path.read_bytes())
    (tmp_path / "copy.db-wal").write_bytes((tmp_path / "ledger.db-wal").read_bytes())
    ledger.close()
    Ledger(copy).close()


def test_a_release_that_makes_no_checksums_may_write_a_ledger_in_between(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    trainers_ledger(path).close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = x'0000000000000002' WHERE key = 'boots'")
    db.close()
    ledger = Ledger(path)
    assert ledger.count_boot() == 3
    ledger.close()


def test_a_damaged_log_is_refused_before_the_transactions_behind_it_are_dropped(
    tmp_path: Path,
) -> None:
    made, killed = tmp_path / "made", tmp_path / "killed"
    ledger = trainers_ledger(made / "ledger.db")
    shutil.copytree(made, killed)
    ledger.close()
    log = killed / "ledger.db-wal"
    whole = log.read_bytes()
    frame = 24 + int.from_bytes(whole[8:12], "big")
    ends = [at for at in range(32, len(whole), frame) if any(whole[at + 4 : at + 8])]
    salt_of_last_but_one = ends[-2] + 8  # SQLite takes what follows for the rest of an older log
    for place in (3, 2000, len(whole) // 2, salt_of_last_but_one):
        log.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        for _ in range(2):  # the first refusal drops nothing
            with pytest.raises(StorageError, match=r"ledger.db is damaged \(.*ledger.db-wal"):
                Ledger(killed / "ledger.db")
    log.write_bytes(whole[:-1])  # the power went while the last transaction was written
    ledger = Ledger(killed / "ledger.db")
    assert ledger.last_arrival() == 2
    ledger.close()


def test_a_directory_where_the_ledger_belongs_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").mkdir()
    with pytest.raises(StorageError, match=r"ledger.db: .*move it away"):
        Ledger(tmp_path / "ledger.db")


def test_a_row_with_a_changed_bit_is_reported_once_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.db"
    ledger = Ledger(path)
    bodies = [bytes([number]) * 40 for number in range(1, 4)]
    for number, body in enumerate(bodies, 1):
        ledger.receive(digest(body), number, A, body, 7)
        ledger.add_verdict(A, b"on %d" % number, number)
    ledger.close()
    flip(path, b"on 2", which=0)
    flip(path, bodies[1], which=0)
    ledger = Ledger(path)
    for _ in range(2):
        told = ledger.verdicts_after(A, 0, count=9, size=10_000)
        assert told == [(1, b"on 1"), (3, b"on 3")]
        assert [one.arrival for one in ledger.arrived_after(0)] == [1, 3]
    lines = [
        record.message for record in caplog.records if "was damaged on the disk" in record.message
    ]
    assert len(lines) == 2
    assert ledger.verdict_on(1) == b"on 1"
    assert ledger.verdict_on(2) is None
    assert ledger.add_verdict(A, b"judged again", 2), "the damaged one is forgotten"
    assert ledger.verdict_on(2) == b"judged again"
    ledger.close()


def test_another_key_in_a_ledgers_directory_is_reported_at_each_start(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.claim(A)
    ledger.claim(A)
    assert not caplog.records
    for _ in range(2):
        ledger.claim(B)
    assert [short(A) in record.message for record in caplog.records] == [True, True]
    assert "put that node's key.pem back" in caplog.text


FORMAT_3 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE inbox (
    arrival INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB UNIQUE NOT NULL,
    lease_id INTEGER UNIQUE NOT NULL, node BLOB NOT NULL, sealed BLOB, receipt BLOB NOT NULL);
CREATE TABLE verdicts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, node BLOB NOT NULL, sealed BLOB NOT NULL, name BLOB,
    arrival INTEGER);
INSERT INTO meta VALUES ('format', x'0003'), ('id', x'07');
"""


def test_a_ledger_of_an_earlier_format_keeps_submissions_and_verdicts_and_takes_less_space(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    old = sqlite3.connect(path)
    old.executescript(FORMAT_3)
    bodies = [bytes([number]) * 3600 for number in range(200)]
    for number, body in enumerate(bodies, 1):
        old.execute(
            "INSERT INTO inbox VALUES (?, ?, ?, ?, ?, ?)",
            (number, digest(body), number, A, body, bytes(272)),
        )
    old.execute("UPDATE inbox SET sealed = NULL WHERE arrival < 199")
    old.execute("INSERT INTO verdicts VALUES (1, ?, ?, ?, 199)", (A, b"one", digest(b"one")))
    old.commit()
    old.close()
    before = path.stat().st_size
    for _ in range(2):
        ledger = Ledger(path)
        assert [one.sealed for one in ledger.arrived_after(0)] == bodies[198:]
        assert ledger.verdict_on(199) == b"one"
        assert ledger.ledger_id() == "07"
        known = ledger.received(digest(bodies[0]))
        assert known is not None
        assert (known.lease_id, known.node) == (1, A)
        ledger.close()
    assert path.stat().st_size < before / 4
    ledger = Ledger(path)
    assert ledger.receive(A, 201, A, b"next", 7) == 201
    ledger.close()


def test_a_verdict_that_found_no_fault_makes_room_once_every_checkpoint_contains_its_submission(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLEAN_KEPT", 2)
    for number in range(1, 7):
        ledger.receive(digest(bytes([number])), number, A, bytes([number]), 7)
        ledger.add_verdict(A, bytes([number]), number, clean=number != 2)
    ledger.forget_covered(3)
    assert [ledger.verdict_on(number) for number in range(1, 5)] == [None, b"\2", None, b"\4"]
    assert [one.arrival for one in ledger.arrived_after(0)] == [4, 5, 6]
    ledger.forget_covered(6)
    assert [sealed for _, sealed in ledger.verdicts_after(A, 0, count=9, size=100)] == [
        b"\2",
        b"\5",
        b"\6",
    ]
    assert ledger.judged_up_to() == ledger.last_arrival() == 6
    assert ledger.lease_done(1)
    assert ledger.received(digest(b"\1")) == ReceiptRecord(1, A, 7)


def test_forgotten_submissions_leave_a_file_without_their_space(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.db", fsync=False)
    for number in range(1, 17):
        ledger.receive(bytes([number]), number, A, bytes(1 << 20), 7)
    for _ in range(16):
        ledger.forget_covered(16)
    ledger.close()
    assert (tmp_path / "ledger.db").stat().st_size < 6 << 20
