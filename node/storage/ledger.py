"""Keep a node's records over a kill: heads, admitted peers, submissions, verdicts (SQLite, WAL).

A row is committed before anything it promises is sent: a receipt only after its submission is stored, a
verdict only together with the reputations that it changed.
"""

import asyncio
import errno
import fcntl
import functools
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ParamSpec, TypeVar

from ...crypto.hashing import digest as digest_of
from ...crypto.hashing import short
from ...protocol.manifests import Ticket
from ..errors import BAD_FILE, BusyError, StorageError, file_error, one_line
from . import sqlite_file

logger = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS heads (
    term INTEGER, version INTEGER, sealed BLOB NOT NULL, manifest BLOB NOT NULL,
    PRIMARY KEY (term, version)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS admitted (
    node BLOB PRIMARY KEY, since INTEGER, ticket BLOB NOT NULL, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tickets (
    id BLOB PRIMARY KEY, label TEXT NOT NULL, issued INTEGER, expires INTEGER, uses INTEGER,
    revoked INTEGER, admitted INTEGER) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS inbox (
    arrival INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB UNIQUE NOT NULL,
    lease_id INTEGER UNIQUE NOT NULL, node BLOB NOT NULL, received INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS bodies (arrival INTEGER PRIMARY KEY, sealed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS verdicts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, node BLOB NOT NULL, sealed BLOB NOT NULL, name BLOB,
    arrival INTEGER, clean INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS reputations (
    node BLOB PRIMARY KEY, arrival INTEGER, snapshot BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS honest (
    id INTEGER PRIMARY KEY AUTOINCREMENT, class BLOB NOT NULL, node BLOB NOT NULL,
    version INTEGER NOT NULL, evidence BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS retired (node BLOB PRIMARY KEY, sealed BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS bounds (class BLOB PRIMARY KEY, sealed BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spool (
    digest BLOB PRIMARY KEY, lease_id INTEGER NOT NULL, deadline REAL NOT NULL,
    sealed BLOB NOT NULL) WITHOUT ROWID;
"""
INDICES = """
CREATE UNIQUE INDEX IF NOT EXISTS verdict_names ON verdicts (name);
CREATE INDEX IF NOT EXISTS verdict_nodes ON verdicts (node, id);
CREATE UNIQUE INDEX IF NOT EXISTS verdict_arrivals ON verdicts (arrival);
CREATE INDEX IF NOT EXISTS verdict_clean ON verdicts (id) WHERE clean;
CREATE INDEX IF NOT EXISTS honest_classes ON honest (class, id);
"""
UPGRADE = (
    "INSERT INTO bodies SELECT arrival, sealed FROM inbox WHERE sealed IS NOT NULL",
    "ALTER TABLE inbox RENAME TO inbox_3",
    "CREATE TABLE inbox (arrival INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB UNIQUE NOT NULL,"
    " lease_id INTEGER UNIQUE NOT NULL, node BLOB NOT NULL, received INTEGER NOT NULL)",
    "INSERT INTO inbox SELECT arrival, digest, lease_id, node, strftime('%s', 'now') FROM inbox_3",
    "DROP TABLE inbox_3",
    "ALTER TABLE verdicts ADD COLUMN clean INTEGER NOT NULL DEFAULT 0",
    "UPDATE meta SET value = x'0004' WHERE key = 'format'",
)
"""Statements that make a ledger of format 3 one of format 4, in one transaction."""
FORMAT = 4
"""Rises with the wire version too: sealed bytes in a ledger can be read by that version alone.

2: sealed in wire version 2. 3: tickets; verdicts by arrival, and reputations; an id. 4: bodies of submissions
in a table of their own, where deleting one frees its pages; receipts are signed again, not stored.
"""
UPGRADED = 3
"""The format that is upgraded where it is opened for writing."""
ID = "id"
"""Key of 16 random bytes that no other ledger has."""
ACCOUNTS = "SELECT id, label, issued, expires, uses, revoked, admitted FROM tickets"
OWNER = "node"
"""Key of the id of the node that began the ledger."""
VERDICTS_KEPT = 10_000
CLEAN_KEPT = 512
"""Verdicts behind the newest that are kept although they found no fault and no checkpoint needs them."""
SPARE_PAGES = 1024
"""Free pages (4 KiB each) that a ledger keeps for the next submissions; others are given back."""
SHRINK_PAGES = 256
"""Most pages that the file shrinks by at a time: some milliseconds."""
HONEST_KEPT = 2048
"""Measured rollouts of reference workers, of each numerics class."""
MANIFEST = "manifest"
"""Key of the sealed RunManifest of the run that the ledger is of."""
LEADERS = "leaders"
"""Key of the sealed LeaderList of that run, if its root has signed one."""
VALIDATORS = "validators"
"""Key of a trainer's records of validators (protocol/validators.py)."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class QueuedSubmission:
    """A submission in the queue, numbered in order of arrival."""

    arrival: int
    digest: bytes
    lease_id: int
    node: bytes
    sealed: bytes


@dataclass(frozen=True)
class ReceiptRecord:
    """A submission as its receipt states it."""

    lease_id: int
    node: bytes
    received: int
    """Unix seconds."""


@dataclass(frozen=True)
class IssuedTicket:
    """A ticket that the trainer issued, and its use. Times in Unix seconds."""

    id: bytes
    label: str
    issued: int
    expires: int
    uses: int
    """How many nodes it may admit; 0: any number."""
    revoked: int
    """Time of revocation; 0: valid."""
    admitted: int
    """How many nodes it has admitted."""


@dataclass(frozen=True)
class HonestRollout:
    """A measured rollout of a reference worker."""

    numerics: bytes
    """Encoded NumericsClass."""
    node: bytes
    version: int
    evidence: bytes
    """Encoded."""


@dataclass(frozen=True)
class AdmittedNode:
    """A node that was admitted."""

    node: bytes
    ticket: bytes
    """Id of its ticket; empty if it is not known."""
    record: bytes
    """The sealed PeerRecord of its last hello, perhaps expired; or empty."""


class Ledger:
    """One node's durable memory. Small synchronous calls, each a transaction of its own: from the event loop,
    or from the ledger's own thread where the loop must not wait for the disk."""

    def __init__(self, path: Path, *, fsync: bool = True) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # SQLite's own locks come and go: `explain` reads while we write, a second node must not.
        self._lock = _lock(path)
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._writing = threading.RLock()
        self._damaged: set[str] = set()
        """Rows that were found to be damaged."""
        self._fsync = fsync
        self._boots = 0
        """Starts so far, where those are counted: then the closed file gets a checksum."""
        self._large: sqlite3.Connection | None = None
        """Writes rows of many megabytes in the ledger's thread: while it does, the other one can be read."""
        try:
            _check_log(path)  # before SQLite opens it, and drops what it cannot read
            self._db = self.connect()
        except sqlite3.OperationalError as error:
            self._lock.close()
            raise _cannot_open(path, error) from error
        except StorageError:
            self._lock.close()
            raise
        try:
            self._begin(path, fsync)
        except StorageError:
            self.close()
            raise

    def _begin(self, path: Path, fsync: bool) -> None:
        try:
            _check_integrity(path, self._db)
            (shrinks,) = self._db.execute("PRAGMA auto_vacuum").fetchone()
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            _set_durability(self._db, fsync)
            self._db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # before the first table
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(f"BEGIN; {SCHEMA} COMMIT")
            self._check_format(path)
            self._db.executescript(f"BEGIN; {INDICES} COMMIT")
            self._check_stamp(path)
            if tables and not shrinks:
                self._db.execute("VACUUM")  # an older ledger shrinks from now on
        except sqlite3.OperationalError as error:
            raise _cannot_open(path, error) from error
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # SQLite quotes what it finds
            raise damaged(path, error) from error

    def connect(self) -> sqlite3.Connection:
        """Open a connection to the file, for any thread; a statement outside a transaction commits at once."""
        return sqlite3.connect(self.path, isolation_level=None, check_same_thread=False, timeout=2)

    def copy_to(self, path: Path) -> None:
        """Write all that is committed by now into a new database at `path`. Takes as long as reading it all.

        Raises StorageError.
        """
        try:
            with closing(self.connect()) as source, closing(sqlite3.connect(path)) as target:
                source.backup(target)
                target.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
        except sqlite3.Error as error:
            raise StorageError(f"{self.path} cannot be copied to {path}: {error}") from error

    def close(self) -> None:
        """Close the file when its thread has finished its current work; closing twice is fine."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._large is not None:
            self._large.close()
        self._db.close()
        if self._boots and not self._lock.closed:
            with suppress(OSError):  # then it is not checked at the next start
                sqlite_file.stamp(self.path, self._boots, fsync=self._fsync)
        self._lock.close()

    async def beside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, usually a call of this ledger, in its one thread; raises the errors of `work`.

        It is done even if the caller is cancelled meanwhile, unless the ledger is closed before it begins.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(work, *args, **kwargs))

    def get(self, key: str) -> bytes | None:
        """Return a remembered value."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def set(self, key: str, value: bytes) -> None:
        """Remember a value."""
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def count_boot(self) -> int:
        """Count the starts of a node on this ledger, this one included."""
        self._boots = boots = self.boots() + 1
        self.set("boots", boots.to_bytes(8, "big"))
        return boots

    def boots(self) -> int:
        """Return the last result of count_boot(); 0 before."""
        return int.from_bytes(self.get("boots") or b"", "big")

    def ledger_id(self) -> str:
        """Return the id of this ledger, hex: a copy has the same, a new ledger another."""
        return (self.get(ID) or b"").hex()

    def claim(self, node: bytes) -> None:
        """Note that `node` owns this ledger; log it at every start of a node with another key."""
        owner = self.get(OWNER)
        if owner is None:
            self.set(OWNER, node)
        elif owner != node:
            logger.warning("%s", other_key(self.path, owner, node))

    def add_head(self, epoch: int, version: int, sealed: bytes, manifest: bytes) -> None:
        """Remember a head with its manifest document."""
        self._write(
            "INSERT OR REPLACE INTO heads VALUES (?, ?, ?, ?)", (epoch, version, sealed, manifest)
        )

    def heads(self) -> list[tuple[bytes, bytes]]:
        """Return (sealed head, manifest document), oldest first."""
        rows = self._db.execute("SELECT sealed, manifest FROM heads ORDER BY term, version")
        return [(bytes(sealed), bytes(manifest)) for sealed, manifest in rows]

    def newest_head(self) -> tuple[int, int]:
        """Return (epoch, version) of the newest head; (0, 0) before the first."""
        rows = self._db.execute(
            "SELECT term, version FROM heads ORDER BY term DESC, version DESC LIMIT 1"
        )
        return rows.fetchone() or (0, 0)

    def drop_heads(self, epoch: int, below: int) -> None:
        """Forget heads of earlier epochs, and of `epoch` below a version."""
        self._write(
            "DELETE FROM heads WHERE term < ? OR (term = ? AND version < ?)", (epoch, epoch, below)
        )

    def admit(self, node: bytes, now: int, ticket: bytes = b"", record: bytes = b"") -> None:
        """Remember that a node was admitted, and under which ticket; `record` is its sealed PeerRecord.

        A node counts once among those that its ticket admitted, as long as it is not expelled.
        """
        with self._transaction():
            new = self._write(
                "INSERT OR IGNORE INTO admitted VALUES (?, ?, ?, ?)", (node, now, ticket, record)
            ).rowcount
            if new:
                self._write("UPDATE tickets SET admitted = admitted + 1 WHERE id = ?", (ticket,))
            else:
                self.keep_record(node, record)

    def keep_record(self, node: bytes, record: bytes) -> None:
        """Remember the newest sealed PeerRecord of an admitted node."""
        self._write("UPDATE admitted SET record = ? WHERE node = ?", (record, node))

    def expel(self, node: bytes) -> None:
        """Forget that a node was admitted, unless its ticket limits how many nodes it admits."""
        self._write(
            "DELETE FROM admitted WHERE node = ? AND NOT EXISTS"
            " (SELECT 1 FROM tickets WHERE id = admitted.ticket AND uses > 0)",
            (node,),
        )

    def admitted(self) -> list[AdmittedNode]:
        """List the admitted nodes, in order."""
        rows = self._db.execute("SELECT node, ticket, record FROM admitted ORDER BY since")
        return [AdmittedNode(bytes(node), bytes(t), bytes(record)) for node, t, record in rows]

    def admitted_node(self, node: bytes) -> AdmittedNode | None:
        """Return an admitted node; None if it was not admitted, or was expelled."""
        rows = self._db.execute("SELECT node, ticket, record FROM admitted WHERE node = ?", (node,))
        row = rows.fetchone()
        return None if row is None else AdmittedNode(*map(bytes, row))

    def ticket_of(self, node: bytes) -> bytes:
        """Return the id of the ticket that admitted a node; empty if it is not known."""
        row = self._db.execute("SELECT ticket FROM admitted WHERE node = ?", (node,)).fetchone()
        return b"" if row is None else bytes(row[0])

    def retire(
        self, node: bytes, sealed: bytes, successor: bytes = b"", reputation: bytes = b""
    ) -> None:
        """Remember for ever that the key of a node is retired.

        A successor has the node's admission and `reputation` from now on, the node itself none.
        """
        with self._transaction():
            self._write("INSERT OR IGNORE INTO retired VALUES (?, ?)", (node, sealed))
            if successor:
                self._write(
                    "UPDATE OR REPLACE admitted SET node = ?, record = x'' WHERE node = ?",
                    (successor, node),
                )
                self.drop_reputation(node)
                self.set_reputation(successor, reputation)

    def retired(self) -> dict[bytes, bytes]:
        """Return the sealed retirements of keys, by node."""
        rows = self._db.execute("SELECT node, sealed FROM retired")
        return {bytes(node): bytes(sealed) for node, sealed in rows}

    def add_ticket(self, name: bytes, ticket: Ticket) -> None:
        """Store a ticket under its id, unless it is stored already."""
        self._write(
            "INSERT OR IGNORE INTO tickets VALUES (?, ?, ?, ?, ?, 0, 0)",
            (name, ticket.label, ticket.issued, ticket.expires, ticket.uses),
        )

    def tickets(self) -> list[IssuedTicket]:
        """List all stored tickets, oldest first."""
        rows = self._db.execute(f"{ACCOUNTS} ORDER BY issued, id")
        return [IssuedTicket(bytes(name), *values) for name, *values in rows]

    def ticket(self, name: bytes) -> IssuedTicket | None:
        """Return a stored ticket."""
        row = self._db.execute(f"{ACCOUNTS} WHERE id = ?", (name,)).fetchone()
        return None if row is None else IssuedTicket(bytes(row[0]), *row[1:])

    def revoke_ticket(self, name: bytes, now: int) -> None:
        """Make a ticket admit no further node."""
        self._write("UPDATE tickets SET revoked = ? WHERE id = ? AND revoked = 0", (now, name))

    def receive(
        self, digest: bytes, lease_id: int, node: bytes, sealed: bytes, received: int
    ) -> int:
        """Put a submission into the queue; returns its arrival number. Takes a second for 50 MB."""
        with self._large_transaction() as db:
            arrival = self._write(
                "INSERT INTO inbox (digest, lease_id, node, received) VALUES (?, ?, ?, ?)",
                (digest, lease_id, node, received),
                db,
            ).lastrowid
            assert arrival is not None
            self._write("INSERT INTO bodies VALUES (?, ?)", (arrival, sealed), db)
        return arrival

    def received(self, digest: bytes) -> ReceiptRecord | None:
        """Return what the receipt for a submission says; None if it was not received."""
        row = self._db.execute(
            "SELECT lease_id, node, received FROM inbox WHERE digest = ?", (digest,)
        ).fetchone()
        return None if row is None else ReceiptRecord(row[0], bytes(row[1]), row[2])

    def lease_done(self, lease_id: int) -> bool:
        """Return whether a submission was received for this lease."""
        row = self._db.execute("SELECT 1 FROM inbox WHERE lease_id = ?", (lease_id,)).fetchone()
        return row is not None

    def last_arrival(self) -> int:
        """Return the number of the last submission received; 0 before the first."""
        return self._db.execute("SELECT MAX(arrival) FROM inbox").fetchone()[0] or 0

    def arrived_after(self, arrival: int) -> list[QueuedSubmission]:
        """List the submissions that arrived after number `arrival`, in order; damaged ones are left out."""
        rows = self._db.execute(
            "SELECT arrival, digest, lease_id, node, sealed FROM inbox JOIN bodies USING (arrival)"
            " WHERE arrival > ? ORDER BY arrival",
            (arrival,),
        )
        return [
            QueuedSubmission(a, bytes(d), lease, bytes(n), bytes(s))
            for a, d, lease, n, s in rows
            if self._is_whole(s, d, f"submission {a} of {short(n)}", "its tasks are leased again")
        ]

    def waiting(self, arrival: int) -> list[tuple[int, bytes, int]]:
        """List (arrival, node, lease) of the submissions that arrived after `arrival` and are still here."""
        return self._db.execute(
            "SELECT arrival, node, lease_id FROM inbox JOIN bodies USING (arrival) WHERE arrival > ?",
            (arrival,),
        ).fetchall()

    def forget_covered(self, up_to: int) -> None:
        """Drop what nobody needs of submissions that all durable checkpoints contain: their bytes, and verdicts
        that found no fault, but the newest.

        The digests and leases stay, so that each submission counts once.
        """
        with self._transaction():
            self._write("DELETE FROM bodies WHERE arrival <= ?", (up_to,))
            self._write(
                "DELETE FROM verdicts WHERE clean AND arrival <= ?"
                " AND id <= (SELECT MAX(id) FROM verdicts) - ?",
                (up_to, CLEAN_KEPT),
            )
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        if free > SPARE_PAGES:
            with self._writing:  # a script, as execute() would free one page only
                self._db.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")

    def add_verdict(
        self,
        node: bytes,
        sealed: bytes,
        arrival: int | None = None,
        reputations: Mapping[bytes, bytes] | None = None,
        honest: Sequence[HonestRollout] = (),
        bounds: Mapping[bytes, bytes] | None = None,
        *,
        clean: bool = False,
    ) -> bool:
        """Keep a verdict on work of `node`, to be picked up and explained; False if it is here already.

        For the trainer: it is the only verdict on submission number `arrival`. With it are written the
        `reputations` (snapshots) of all nodes that it concerns, the measurements `honest` of a reference
        worker, and `bounds`, sealed ClassBounds by encoded class. All of that is kept, or nothing. A `clean`
        one found no fault: forget_covered() may drop it.
        """
        with self._transaction():
            cursor = self._write(
                "INSERT OR IGNORE INTO verdicts (node, sealed, name, arrival, clean)"
                " VALUES (?, ?, ?, ?, ?)",
                (node, sealed, digest_of(sealed), arrival, clean),
            )
            if not cursor.rowcount:
                return False
            assert cursor.lastrowid is not None
            self._write("DELETE FROM verdicts WHERE id <= ?", (cursor.lastrowid - VERDICTS_KEPT,))
            for peer, snapshot in (reputations or {}).items():
                self._write(
                    "INSERT OR REPLACE INTO reputations VALUES (?, ?, ?)", (peer, arrival, snapshot)
                )
            for rollout in honest:
                self._write(
                    "INSERT INTO honest (class, node, version, evidence) VALUES (?, ?, ?, ?)",
                    (rollout.numerics, rollout.node, rollout.version, rollout.evidence),
                )
            for numerics in {rollout.numerics for rollout in honest}:
                self._write(
                    "DELETE FROM honest WHERE class = ?1 AND id <= (SELECT id FROM honest"
                    " WHERE class = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                    (numerics, HONEST_KEPT),
                )
            self._write_bounds(bounds or {})
        return True

    def honest(self) -> list[HonestRollout]:
        """List the kept measurements of reference workers, oldest first."""
        rows = self._db.execute("SELECT class, node, version, evidence FROM honest ORDER BY id")
        return [
            HonestRollout(bytes(name), bytes(node), version, bytes(evidence))
            for name, node, version, evidence in rows
        ]

    def bounds(self) -> list[bytes]:
        """Return the newest sealed ClassBounds of each class."""
        rows = self._db.execute("SELECT sealed FROM bounds ORDER BY class")
        return [bytes(sealed) for (sealed,) in rows]

    def drop_honest(
        self, bounds: Mapping[bytes, bytes], *, node: bytes = b"", above: int = 2**53
    ) -> None:
        """Forget the measured rollouts of `node`, and of versions `above` a number; keep new `bounds`."""
        with self._transaction():
            self._write("DELETE FROM honest WHERE node = ? OR version > ?", (node, above))
            self._write_bounds(bounds)

    def _write_bounds(self, bounds: Mapping[bytes, bytes]) -> None:
        for numerics, sealed in bounds.items():
            self._write("INSERT OR REPLACE INTO bounds VALUES (?, ?)", (numerics, sealed))

    def verdict_on(self, arrival: int) -> bytes | None:
        """Return the sealed verdict on submission number `arrival`; a damaged one is forgotten."""
        rows = self._db.execute("SELECT sealed, name FROM verdicts WHERE arrival = ?", (arrival,))
        row = rows.fetchone()
        if row is None:
            return None
        sealed, name = row
        if self._is_whole(
            sealed, name, f"the verdict on submission {arrival}", "it is judged again"
        ):
            return bytes(sealed)
        self._write("DELETE FROM verdicts WHERE arrival = ?", (arrival,))
        return None

    def judged_up_to(self) -> int:
        """Return the number of the last submission with a verdict; 0 without any."""
        return self._db.execute("SELECT MAX(arrival) FROM verdicts").fetchone()[0] or 0

    def reputations(self) -> dict[bytes, tuple[int, bytes]]:
        """Return by node (number of the last submission in its reputation, the snapshot)."""
        rows = self._db.execute("SELECT node, arrival, snapshot FROM reputations")
        return {bytes(node): (arrival, bytes(snapshot)) for node, arrival, snapshot in rows}

    def set_reputation(self, node: bytes, snapshot: bytes) -> None:
        """Keep a reputation that was changed by hand: all verdicts so far are in it, and no later one."""
        self._write(
            "INSERT OR REPLACE INTO reputations VALUES (?, ?, ?)",
            (node, self.judged_up_to() + 1, snapshot),
        )

    def drop_reputation(self, node: bytes) -> None:
        """Forget the reputation of a node."""
        self._write("DELETE FROM reputations WHERE node = ?", (node,))

    def verdicts_after(
        self, node: bytes, number: int, *, count: int, size: int
    ) -> list[tuple[int, bytes]]:
        """Return (number, sealed verdict) on work of `node` after a number, oldest first.

        At most `count` of them, and `size` bytes where the first is not larger. Damaged ones are left out.
        """
        rows = self._db.execute(
            "SELECT id, sealed, name FROM verdicts WHERE node = ? AND id > ? ORDER BY id LIMIT ?",
            (node, number, count),
        )
        verdicts: list[tuple[int, bytes]] = []
        for row, sealed, name in rows:
            if not self._is_whole(
                sealed, name, f"verdict {row} on {short(node)}", "its node gets the others"
            ):
                continue
            size -= len(sealed)
            if verdicts and size < 0:
                break
            verdicts.append((row, bytes(sealed)))
        return verdicts

    def _is_whole(self, data: bytes, name: bytes | None, what: str, then: str) -> bool:
        """Say whether `data` still has the digest under which it was stored; if not, log that once.

        SQLite's own check finds a damaged page, but no changed byte inside a row.
        """
        if name is None or digest_of(data) == bytes(name):
            return True
        if what not in self._damaged:
            self._damaged.add(what)
            logger.error("%s: %s was damaged on the disk: %s", self.path, what, then)
        return False

    def queue_upload(self, digest: bytes, lease_id: int, deadline: float, sealed: bytes) -> None:
        """Keep a submission until its receipt comes."""
        row = (digest, lease_id, deadline, sealed)
        with self._large_transaction() as db:
            self._write("INSERT OR IGNORE INTO spool VALUES (?, ?, ?, ?)", row, db)

    def queued_uploads(self) -> list[tuple[bytes, int, float]]:
        """Return (digest, lease id, deadline) of submissions to upload, the most urgent first."""
        rows = self._db.execute("SELECT digest, lease_id, deadline FROM spool ORDER BY deadline")
        return [(bytes(name), lease, deadline) for name, lease, deadline in rows]

    def queued_upload(self, digest: bytes) -> bytes | None:
        """Return a sealed submission that is still to be uploaded."""
        row = self._db.execute("SELECT sealed FROM spool WHERE digest = ?", (digest,)).fetchone()
        return None if row is None else bytes(row[0])

    def drop_upload(self, digest: bytes) -> None:
        """Delete a submission: its receipt came, or it was refused for good."""
        self._write("DELETE FROM spool WHERE digest = ?", (digest,))

    @contextmanager
    def _large_transaction(self) -> Generator[sqlite3.Connection]:
        """Commit rows of many megabytes, all or none; reading waits for none of it."""
        with self._writing:
            if self._large is None:
                try:
                    self._large = self.connect()
                    _set_durability(self._large, self._fsync)
                except sqlite3.OperationalError as error:
                    raise _cannot_open(self.path, error) from error
            with self._transaction(self._large):
                yield self._large

    def _write(
        self, statement: str, values: tuple[object, ...], db: sqlite3.Connection | None = None
    ) -> sqlite3.Cursor:
        try:
            with self._writing:
                return (db or self._db).execute(statement, values)
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"cannot write the ledger ({error}): free some disk space"
            ) from error

    @contextmanager
    def _transaction(self, db: sqlite3.Connection | None = None) -> Generator[None]:
        """Commit the writes of the block, all by this thread, as a whole or not at all."""
        db = db or self._db
        with self._writing:
            self._write("BEGIN IMMEDIATE", (), db)
            try:
                yield
                self._write("COMMIT", (), db)
            except BaseException:
                if db.in_transaction:  # SQLite itself ends it when the disk is full
                    db.execute("ROLLBACK")
                raise

    def _check_stamp(self, path: Path) -> None:
        """Compare the file with its checksum, if it has one; from now on it has none. Raises StorageError.

        A release that makes no checksums leaves an older one, and counts its starts.
        """
        (checksum,) = self._db.execute("PRAGMA user_version").fetchone()
        if not checksum:
            return
        (mark,) = self._db.execute("PRAGMA application_id").fetchone()
        if mark == self.boots() and sqlite_file.is_changed(path):
            raise damaged(path, "it was changed after it was closed")
        self._db.execute("PRAGMA user_version=0")

    def _check_format(self, path: Path) -> None:
        known = self.get("format")
        if known is None:
            self.set("format", FORMAT.to_bytes(2, "big"))
        else:
            check_format(path, known)
            if int.from_bytes(known, "big") == UPGRADED:
                with self._transaction():
                    for statement in UPGRADE:
                        self._write(statement, ())
        if self.get(ID) is None:
            self.set(ID, secrets.token_bytes(16))


def _set_durability(db: sqlite3.Connection, fsync: bool) -> None:
    """Set what a commit survives: with `fsync` a power cut, else a killed process."""
    db.execute(f"PRAGMA synchronous={'FULL' if fsync else 'NORMAL'}")


def check_format(path: Path, known: bytes) -> None:
    """Raise StorageError if a ledger is of another format than ours, or than that which is upgraded."""
    if int.from_bytes(known, "big") not in (UPGRADED, FORMAT):
        raise StorageError(
            f"{path} was written by another version of primerl-node (format {int.from_bytes(known, 'big')}, "
            f"this one reads {UPGRADED} and {FORMAT}): go on with the release that wrote it, or use another "
            "directory (UPGRADING.md)"
        )


def other_key(path: Path, owner: bytes, node: bytes) -> str:
    """Say that a directory's key is not the one that it was used with, and what to do."""
    return (
        f"key.pem is of node {short(node)}, but {path} was written by node {short(owner)}, to which its trust "
        "and its work belong: put that node's key.pem back, or go on as a newcomer"
    )


def damaged(path: Path, what: object) -> StorageError:
    """Say that a ledger is damaged, and what to do."""
    return StorageError(
        f"{path} is damaged ({one_line(what)}): put back a whole copy of it that is as new, or move it away; "
        "then a worker joins anew, and a trainer goes on from its checkpoints as another run (--name NEW "
        "--resume.dir DIRECTORY)"
    )


@contextmanager
def readable(path: Path, what: str) -> Generator[None]:
    """Explain which of a ledger's contents the block cannot decode. Raises StorageError."""
    try:
        yield
    except BAD_FILE as error:
        raise damaged(path, f"its {what}: {error}") from error


def _cannot_open(path: Path, error: sqlite3.Error) -> StorageError:
    if path.is_dir():
        return file_error(OSError(errno.EISDIR, os.strerror(errno.EISDIR)), path)
    return StorageError(
        f"cannot open {path}: {error}: check that this user may write to it and beside it"
    )


def _check_log(path: Path) -> None:
    """Raise StorageError where the log of a ledger is damaged in front of committed transactions."""
    try:
        damage = sqlite_file.log_damage(path)
    except OSError as error:
        raise file_error(error) from error
    if damage:
        raise damaged(path, damage)


def _check_integrity(path: Path, db: sqlite3.Connection) -> None:
    """Raise StorageError unless SQLite finds the whole file sound, indices included.

    A row that an index lacks would be written twice: a submission, or a verdict. It takes 1.4 s a GB from
    memory, three times as long as a check without the indices, and both read every page.
    """
    (result,) = db.execute("PRAGMA integrity_check(1)").fetchone()
    if result != "ok":
        raise damaged(path, result)


@dataclass(frozen=True)
class KeptVerdict:
    """A verdict in a ledger, in order of judgement."""

    number: int
    node: bytes
    """The node that did the work."""
    sealed: bytes


class LedgerView:
    """Reads a ledger, also while its node runs; writes nothing."""

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises StorageError."""
        self._path = path
        try:
            self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5)
            known = self.get("format")
            self._db.execute("SELECT 1 FROM verdicts LIMIT 1")
        except sqlite3.DatabaseError as error:
            raise StorageError(f"cannot read {path}: {error}") from error
        if known is not None:
            check_format(path, known)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def get(self, key: str) -> bytes | None:
        """Return a remembered value."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def heads(self) -> list[tuple[bytes, bytes]]:
        """Return (sealed head, manifest document), oldest first. Raises StorageError."""
        try:
            rows = self._db.execute("SELECT sealed, manifest FROM heads ORDER BY term, version")
            return [(bytes(sealed), bytes(manifest)) for sealed, manifest in rows]
        except sqlite3.DatabaseError as error:
            raise StorageError(f"cannot read {self._path}: {error}") from error

    def verdicts(self) -> Iterator[KeptVerdict]:
        """Yield all kept verdicts, newest first. Raises StorageError."""
        try:
            for number, node, sealed in self._db.execute(
                "SELECT id, node, sealed FROM verdicts ORDER BY id DESC"
            ):
                yield KeptVerdict(number, bytes(node), bytes(sealed))
        except sqlite3.DatabaseError as error:
            raise StorageError(f"cannot read {self._path}: {error}") from error


def _lock(path: Path) -> IO[bytes]:
    """Hold the ledger for this process alone until the file is closed; the system closes it with the process.

    Raises BusyError, StorageError.
    """
    name = path.with_suffix(".lock")
    try:
        file = name.open("ab")
    except OSError as error:
        raise StorageError(f"cannot open {name}: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise BusyError(
            f"{path.parent} is in use by another node: stop it, or choose another --data-dir"
        ) from error
    return file
