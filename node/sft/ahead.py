"""Reads the next batch in a thread while this one is trained."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ..sft_config import SftConfig
from .order import Cursor
from .reader import Portion, Reader


class Ahead:
    """One batch ahead; close() waits for the thread."""

    def __init__(self, reader: Reader, config: SftConfig) -> None:
        self._reader = reader
        self._size, self._tokens = config.batch_size, config.batch_tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sft-data")
        self._asked: asyncio.Future[Portion] | None = None

    def ask(self, cursor: Cursor) -> None:
        """Begin to read the batch at `cursor`."""
        loop = asyncio.get_running_loop()
        self._asked = loop.run_in_executor(self._thread, self._read, cursor)

    async def answer(self) -> Portion:
        """The batch that was asked for. Raises what reading it raised."""
        assert self._asked is not None, "ask() comes first"
        asked, self._asked = self._asked, None
        return await asked

    async def close(self) -> None:
        """Wait for the thread; nobody needs what it still reads."""
        asked, self._asked = self._asked, None
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        if asked is not None:
            await asyncio.wait([asked])
            if not asked.cancelled():
                asked.exception()  # seen, and of no interest

    def _read(self, cursor: Cursor) -> Portion:
        return self._reader.batch(cursor, size=self._size, tokens=self._tokens)
