"""A chunk store in memory."""

from collections.abc import Set as AbstractSet
from threading import Lock

from primerl.crypto.hashing import digest
from primerl.node.storage.chunk_store import QuotaExceeded


class MemoryStore:
    """A Store in memory."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blobs: dict[bytes, bytes] = {}
        self._lock = Lock()

    def put(self, data: bytes) -> bytes:
        """Keep `data`."""
        name = digest(data)
        with self._lock:
            if name not in self._blobs:
                held = sum(map(len, self._blobs.values()))
                if held + len(data) > self._max_bytes:
                    raise QuotaExceeded(f"limit of {self._max_bytes}: raise weights.max_disk_gib")
                self._blobs[name] = bytes(data)
        return name

    def get(self, name: bytes) -> bytes | None:
        """The bytes of `name`."""
        return self._blobs.get(name)

    def has(self, name: bytes) -> bool:
        """Whether `name` is kept."""
        return name in self._blobs

    def size(self, name: bytes) -> int | None:
        """Bytes of `name`."""
        data = self._blobs.get(name)
        return None if data is None else len(data)

    def delete(self, name: bytes) -> None:
        """Drop `name`."""
        with self._lock:
            self._blobs.pop(name, None)

    def names(self) -> set[bytes]:
        """All digests."""
        with self._lock:
            return set(self._blobs)

    def total_bytes(self) -> int:
        """Bytes of everything."""
        with self._lock:
            return sum(map(len, self._blobs.values()))

    def collect(self, keep: AbstractSet[bytes]) -> int:
        """Delete everything but `keep`."""
        before = self.total_bytes()
        for name in self.names() - keep:
            self.delete(name)
        return before - self.total_bytes()
