"""Batches of samples from numbered examples, and how many bad rows are too many.

A reader remembers nothing: a batch is a function of the cursor, so that a resumed run reads what an unbroken
one would have read.
"""

import logging
from dataclasses import dataclass

import msgspec

from ..errors import RunFailed, UsageError
from ..training.backend import Sample
from .examples import HELD_OUT, Examples, Passed
from .order import Cursor, Shuffle
from .rows import BadRow

logger = logging.getLogger(__name__)

GRACE_ROWS = 1000
"""The share of bad rows is taken of at least so many rows, or of all where there are fewer."""
SHOWN = 10
"""Bad rows that are written to the log one by one."""


@dataclass(frozen=True)
class Portion:
    """The samples of one step, and where the data stand after it; no samples: the data have ended."""

    samples: list[Sample]
    cursor: Cursor


class Reader:
    """Reads batches; calls for the same cursor give the same batch."""

    def __init__(
        self,
        examples: Examples,
        *,
        seed: int,
        shuffle: bool,
        max_bad_rows: float,
        max_epochs: int = 0,
    ) -> None:
        """`max_epochs` 0 is no bound."""
        self._examples = examples
        self._seed = seed
        self._shuffle = shuffle
        self._max_bad_rows = max_bad_rows
        self._max_epochs = max_epochs
        self._order: Shuffle | None = None
        self._order_of = -1

    def batch(self, cursor: Cursor, *, size: int, tokens: int = 0) -> Portion:
        """The next `size` samples, or as many as make up `tokens` tokens, at least one.

        Raises RunFailed for too many bad rows, UsageError if a whole epoch holds no sample.
        """
        samples: list[Sample] = []
        held, barren = 0, 0
        while not self._ended(cursor) and (tokens or len(samples) < size):
            sample, after = self._next(cursor)
            if sample is None:
                barren += 1
                self._check_barren(barren, after)
            else:
                held += len(sample.token_ids)
                if samples and tokens and held > tokens:
                    break  # the row is read again for the next batch
                samples.append(sample)
                barren = 0
            cursor = after
        return Portion(samples, cursor)

    def _next(self, cursor: Cursor) -> tuple[Sample | None, Cursor]:
        """The sample at the cursor, if it gives one, and the cursor after it."""
        row = self._row(cursor)
        try:
            sample = self._examples.sample(row)
        except Passed as passed:
            seen = cursor if passed.reason == HELD_OUT else _seen(cursor, passed.reason)
            return None, self._advanced(seen)
        except BadRow as error:
            seen = _seen(cursor, error.reason, bad=1)
            self._check_bad(seen, row, error)
            return None, self._advanced(seen)
        grown = msgspec.structs.replace(
            cursor,
            rows=cursor.rows + 1,
            samples=cursor.samples + 1,
            tokens=cursor.tokens + len(sample.token_ids),
        )
        return sample, self._advanced(grown)

    def _row(self, cursor: Cursor) -> int:
        size = self._examples.size
        if size is None or not self._shuffle:
            return cursor.index
        if self._order is None or self._order_of != cursor.epoch:
            self._order = Shuffle.of(size, self._seed, cursor.epoch)
            self._order_of = cursor.epoch
        return self._order.at(cursor.index)

    def _advanced(self, cursor: Cursor) -> Cursor:
        index, epoch = cursor.index + 1, cursor.epoch
        if index == self._examples.size:
            index, epoch = 0, epoch + 1
        return msgspec.structs.replace(cursor, index=index, epoch=epoch)

    def _ended(self, cursor: Cursor) -> bool:
        return 0 < self._max_epochs <= cursor.epoch

    def _check_bad(self, seen: Cursor, row: int, error: BadRow) -> None:
        where = self._examples.where(row)
        if seen.bad <= SHOWN:
            logger.warning("bad row %s: %s", where, error)
        known = min(self._examples.size or GRACE_ROWS, GRACE_ROWS)
        if seen.bad > self._max_bad_rows * max(seen.rows, known):
            counts = ", ".join(f"{count} {reason}" for reason, count in seen.skipped.items())
            raise RunFailed(
                f"{seen.bad} of {seen.rows} rows are bad ({counts}), the last at {where}: {error}; "
                "mend the data, or raise data.max_bad_rows"
            )

    def _check_barren(self, barren: int, seen: Cursor) -> None:
        if barren < (self._examples.size or GRACE_ROWS):
            return
        counts = ", ".join(f"{count} {reason}" for reason, count in seen.skipped.items())
        raise UsageError(
            f"none of {barren} rows gives a sample ({counts or HELD_OUT}): see training.seq_len, "
            "data.too_long and data.loss_roles"
        )


def _seen(cursor: Cursor, reason: str, bad: int = 0) -> Cursor:
    """The cursor with one more row counted under `reason`."""
    skipped = {**cursor.skipped, reason: cursor.skipped.get(reason, 0) + 1}
    return msgspec.structs.replace(
        cursor, rows=cursor.rows + 1, skipped=skipped, bad=cursor.bad + bad
    )
