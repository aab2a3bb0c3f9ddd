"""Retention: what no live chain needs is forgotten and its chunks collected, by trainer and workers alike."""

import asyncio
from collections.abc import Set as AbstractSet

from ..p2p.heads import HeadStore
from ..storage.chunk_store import Store
from .chain import VersionChain


async def retain(
    chain: VersionChain, book: HeadStore, store: Store, keep: int, keep_chunks: AbstractSet[bytes]
) -> None:
    """Keep what the `keep` newest versions need, and `keep_chunks`; drop the rest. Raises StorageError."""
    live = chain.live_chunks(keep)
    book.forget(min(version for version, _ in chain.live(keep)))
    chain.forget(keep)
    documents = {head.head.manifest for head in book.held()}
    await asyncio.to_thread(store.collect, live | documents | keep_chunks)
