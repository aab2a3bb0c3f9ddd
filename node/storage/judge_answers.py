"""Keep the answers of judges in a run's directory, so that a rollout that is scored again gets its old reward.

An answer is on the disk before a reward is made of it. SQLite; the newest KEPT answers stay.
"""

import sqlite3
import time
from pathlib import Path

from ..errors import StorageError

SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, request BLOB UNIQUE NOT NULL, model TEXT NOT NULL,
    asked TEXT NOT NULL, answer TEXT NOT NULL, cut INTEGER NOT NULL, time REAL NOT NULL);
"""
KEPT = 200_000
PRUNED_EVERY = 1000


class JudgeAnswers:
    """The answers in one file, by digest of the request. Small synchronous calls; several may share a file."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises StorageError."""
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(
                f"the judges' answers in {path} cannot be opened ({error}): repair or move the file"
            ) from error

    def get(self, request: bytes) -> tuple[str, bool] | None:
        """Return (answer, whether it was cut off) to a request with this digest. Raises StorageError."""
        try:
            row = self._db.execute(
                "SELECT answer, cut FROM answers WHERE request = ?", (request,)
            ).fetchone()
        except sqlite3.Error as error:
            raise self._broken(error) from error
        return None if row is None else (row[0], bool(row[1]))

    def add(self, request: bytes, model: str, question: str, answer: str, *, cut: bool) -> None:
        """Keep an answer; the first to a request stays. Raises StorageError."""
        try:
            added = self._db.execute(
                "INSERT OR IGNORE INTO answers (request, model, asked, answer, cut, time) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (request, model, question, answer, cut, time.time()),
            ).lastrowid
            if added and added % PRUNED_EVERY == 0:
                self._db.execute("DELETE FROM answers WHERE number <= ?", (added - KEPT,))
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _broken(self, error: sqlite3.Error) -> StorageError:
        return StorageError(
            f"the judges' answers in {self._path} cannot be read or written ({error}): free disk space, or "
            "repair the file"
        )
