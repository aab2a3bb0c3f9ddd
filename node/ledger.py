"""What a node must not forget when it is killed: heads, admitted peers, inbox, spool, verdicts (SQLite, WAL).

A row is committed before anything it promises is said aloud: a receipt only after its submission is here.
"""

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from .errors import BusyError, StorageError

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS heads (
    term INTEGER, version INTEGER, sealed BLOB NOT NULL, manifest BLOB NOT NULL,
    PRIMARY KEY (term, version)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS admitted (node BLOB PRIMARY KEY, since INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS inbox (
    arrival INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB UNIQUE NOT NULL,
    lease_id INTEGER UNIQUE NOT NULL, node BLOB NOT NULL, sealed BLOB, receipt BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, node BLOB NOT NULL, sealed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS spool (
    digest BLOB PRIMARY KEY, lease_id INTEGER NOT NULL, deadline REAL NOT NULL,
    sealed BLOB NOT NULL) WITHOUT ROWID;
"""
FORMAT = 1
VERDICTS_KEPT = 10_000


@dataclass(frozen=True)
class Arrived:
    """A submission in the inbox, numbered in order of arrival."""

    arrival: int
    digest: bytes
    lease_id: int
    node: bytes
    sealed: bytes


class Ledger:
    """One node's durable memory. Small synchronous calls; single-threaded like the event loop it serves."""

    def __init__(self, path: Path, *, fsync: bool = True) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=2
            )
            # EXCLUSIVE: two daemons on one data directory would contradict each other.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            # FULL survives a power cut, NORMAL a killed process.
            self._db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'NORMAL'}")
            self._db.executescript(SCHEMA)
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise BusyError(
                    f"{path.parent} is in use by another node: stop it first"
                ) from error
            raise StorageError(f"cannot open {path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StorageError(
                f"{path} is damaged ({error}): move it away to start anew"
            ) from error
        self._check_format(path)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._db.close()

    def get(self, key: str) -> bytes | None:
        """A remembered value."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def set(self, key: str, value: bytes) -> None:
        """Remember a value."""
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def count_boot(self) -> int:
        """How many times this ledger has been opened for running, this time included."""
        boots = int.from_bytes(self.get("boots") or b"", "big") + 1
        self.set("boots", boots.to_bytes(8, "big"))
        return boots

    def add_head(self, term: int, version: int, sealed: bytes, manifest: bytes) -> None:
        """Remember a head with its manifest document."""
        self._write(
            "INSERT OR REPLACE INTO heads VALUES (?, ?, ?, ?)", (term, version, sealed, manifest)
        )

    def heads(self) -> list[tuple[bytes, bytes]]:
        """(sealed head, manifest document), oldest first."""
        rows = self._db.execute("SELECT sealed, manifest FROM heads ORDER BY term, version")
        return [(bytes(sealed), bytes(manifest)) for sealed, manifest in rows]

    def drop_heads(self, term: int, below: int) -> None:
        """Forget heads of earlier terms, and of `term` below a version."""
        self._write(
            "DELETE FROM heads WHERE term < ? OR (term = ? AND version < ?)", (term, term, below)
        )

    def admit(self, node: bytes, now: int) -> None:
        """Remember that a node was admitted."""
        self._write("INSERT OR IGNORE INTO admitted VALUES (?, ?)", (node, now))

    def admitted(self) -> list[bytes]:
        """Nodes that were admitted, in order."""
        rows = self._db.execute("SELECT node FROM admitted ORDER BY since")
        return [bytes(row[0]) for row in rows]

    def receive(
        self, digest: bytes, lease_id: int, node: bytes, sealed: bytes, receipt: bytes
    ) -> int:
        """Put a submission into the inbox; returns its arrival number."""
        cursor = self._write(
            "INSERT INTO inbox (digest, lease_id, node, sealed, receipt) VALUES (?, ?, ?, ?, ?)",
            (digest, lease_id, node, sealed, receipt),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def receipt(self, digest: bytes) -> bytes | None:
        """The receipt given for a submission."""
        row = self._db.execute("SELECT receipt FROM inbox WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else bytes(row[0])

    def lease_done(self, lease_id: int) -> bool:
        """Whether something was received for this lease."""
        found = self._db.execute("SELECT 1 FROM inbox WHERE lease_id = ?", (lease_id,)).fetchone()
        return found is not None

    def arrived_after(self, arrival: int) -> list[Arrived]:
        """Submissions that arrived after number `arrival`, in order."""
        rows = self._db.execute(
            "SELECT arrival, digest, lease_id, node, sealed FROM inbox"
            " WHERE arrival > ? AND sealed IS NOT NULL ORDER BY arrival",
            (arrival,),
        )
        return [Arrived(a, bytes(d), lease, bytes(n), bytes(s)) for a, d, lease, n, s in rows]

    def forget_bodies(self, up_to: int) -> None:
        """Drop the bytes of submissions that a durable checkpoint contains; their digests stay."""
        self._write(
            "UPDATE inbox SET sealed = NULL WHERE arrival <= ? AND sealed IS NOT NULL", (up_to,)
        )

    def add_verdict(self, node: bytes, sealed: bytes) -> int:
        """Keep a verdict for its worker to pick up, and for `explain`; returns its number."""
        cursor = self._write("INSERT INTO verdicts (node, sealed) VALUES (?, ?)", (node, sealed))
        assert cursor.lastrowid is not None
        self._write("DELETE FROM verdicts WHERE id <= ?", (cursor.lastrowid - VERDICTS_KEPT,))
        return cursor.lastrowid

    def spool(self, digest: bytes, lease_id: int, deadline: float, sealed: bytes) -> None:
        """Keep a submission until its receipt comes."""
        self._write(
            "INSERT OR IGNORE INTO spool VALUES (?, ?, ?, ?)", (digest, lease_id, deadline, sealed)
        )

    def spooled(self) -> list[tuple[bytes, int, float, bytes]]:
        """(digest, lease id, deadline, sealed) still to be uploaded."""
        rows = self._db.execute(
            "SELECT digest, lease_id, deadline, sealed FROM spool ORDER BY deadline"
        )
        return [(bytes(d), lease, deadline, bytes(s)) for d, lease, deadline, s in rows]

    def spooled_leases(self) -> list[int]:
        """Ids of the leases whose work is still to be uploaded."""
        return [row[0] for row in self._db.execute("SELECT lease_id FROM spool")]

    def unspool(self, digest: bytes) -> None:
        """Its receipt came, or it was refused for good."""
        self._write("DELETE FROM spool WHERE digest = ?", (digest,))

    def _write(self, statement: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"cannot write the ledger ({error}): free some disk space"
            ) from error

    def _check_format(self, path: Path) -> None:
        known = self.get("format")
        if known is None:
            self.set("format", FORMAT.to_bytes(2, "big"))
        elif int.from_bytes(known, "big") != FORMAT:
            raise StorageError(f"{path} was written by another version of primerl-node")
