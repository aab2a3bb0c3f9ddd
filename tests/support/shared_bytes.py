"""What many simulated nodes of one process would keep or compute alike is kept and computed once.

Every chunk travels as bytes and is hashed by each node that receives it, as always. Shared are: the memory of a
chunk (each node has its own set of names), the decoding and hashing of a whole state (each node must have the
chunks for it, and the base), and the outcome of a signature check of the same bytes.
"""

from collections import OrderedDict
from collections.abc import Generator, Iterable
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch
from weakref import WeakValueDictionary

from primerl.crypto.hashing import digest
from primerl.crypto.keys import verify
from primerl.node.app import services
from primerl.node.storage.chunk_store import QuotaExceeded
from primerl.node.weights.replica import PreparedPolicy, WeightReplica
from primerl.protocol import envelope
from primerl.protocol.manifests import Artifact, PolicyManifest

STATES = 4
"""Decoded states remembered."""
SIGNATURES = 1 << 16


class _Chunk:
    """Bytes that leave memory with the last store that has them."""

    def __init__(self, data: bytes) -> None:
        self.data = data


class SharedStores:
    """The chunks of all nodes, by digest."""

    def __init__(self) -> None:
        self._chunks: WeakValueDictionary[bytes, _Chunk] = WeakValueDictionary()
        self._directories: dict[Path, SharedStore] = {}

    def open(
        self, directory: Path, *, max_bytes: int, fsync: bool = True, disk: object = None
    ) -> "SharedStore":
        """Open the store of a directory: a node that starts again has what it had."""
        del fsync, disk
        return self._directories.setdefault(directory, SharedStore(self, max_bytes))

    def keep(self, data: bytes) -> _Chunk:
        """Return the one chunk of these bytes."""
        return self._chunks.setdefault(digest(data), _Chunk(data))


class SharedStore:
    """The Store of one node."""

    def __init__(self, shared: SharedStores, max_bytes: int) -> None:
        self._shared = shared
        self._max_bytes = max_bytes
        self._chunks: dict[bytes, _Chunk] = {}
        self._total = 0

    def put(self, data: bytes) -> bytes:
        """See Store."""
        name = digest(data)
        if name not in self._chunks:
            if self._total + len(data) > self._max_bytes:
                raise QuotaExceeded(f"limit of {self._max_bytes}: raise weights.max_disk_gib")
            self._chunks[name] = self._shared.keep(data)
            self._total += len(data)
        return name

    def get(self, name: bytes) -> bytes | None:
        """See Store."""
        chunk = self._chunks.get(name)
        return None if chunk is None else chunk.data

    def has(self, name: bytes) -> bool:
        """See Store."""
        return name in self._chunks

    def size(self, name: bytes) -> int | None:
        """See Store."""
        data = self.get(name)
        return None if data is None else len(data)

    def delete(self, name: bytes) -> None:
        """See Store."""
        chunk = self._chunks.pop(name, None)
        self._total -= 0 if chunk is None else len(chunk.data)

    def names(self) -> set[bytes]:
        """See Store."""
        return set(self._chunks)

    def total_bytes(self) -> int:
        """See Store."""
        return self._total

    def collect(self, keep: AbstractSet[bytes]) -> int:
        """See Store."""
        before = self._total
        for name in self.names() - keep:
            self.delete(name)
        return before - self._total


@contextmanager
def shared_bytes() -> Generator[None]:
    """Let all nodes that start in the block share."""
    prepare = WeightReplica.prepare
    prepared: OrderedDict[tuple[bytes, ...], PreparedPolicy] = OrderedDict()

    def prepare_once(
        replica: WeightReplica,
        manifest: PolicyManifest,
        artifact: Artifact,
        payload: bytes | Iterable[bytes],
    ) -> PreparedPolicy:
        chunks = [payload] if isinstance(payload, bytes) else list(payload)  # LostChunk, if it is
        key = (replica.policy.digest, manifest.state, *(chunk.digest for chunk in artifact.chunks))
        if key not in prepared:
            prepared[key] = prepare(replica, manifest, artifact, chunks)
            if len(prepared) > STATES:
                prepared.popitem(last=False)
        return prepared[key]

    with ExitStack() as patched:
        patched.enter_context(patch.object(services, "FileStore", SharedStores().open))
        patched.enter_context(patch.object(WeightReplica, "prepare", prepare_once))
        once = lru_cache(SIGNATURES)(verify)
        patched.enter_context(patch.object(envelope, "verify", once))
        yield
