"""The formats that codec.py compares: ours, and what others move weights in.

All are given the same tensors and threads, make blocks of the same size, and end with the BLAKE3 digest of
every tensor that they wrote and of the state. What they decode is compared bit by bit by the caller.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from primerl.crypto.hashing import NO_DIGEST
from primerl.node.weights.blocks import BLOCK
from primerl.node.weights.codec import CODEC, encode_full
from primerl.node.weights.encoders import Encoders
from primerl.node.weights.payload import ordered
from primerl.node.weights.replica import Policy, WeightReplica
from primerl.node.weights.state import State, Tensor, state_digest, tensor_digest
from primerl.protocol.manifests import Artifact, PolicyManifest, TensorInfo

Bits = NDArray[np.uint16]
LEVEL = 1


@dataclass(frozen=True)
class Format:
    """A way to move a new state to somebody who holds a base."""

    name: str
    encode: Callable[[Policy, Policy, int], Iterable[bytes]]
    """Base, new, threads."""
    decode: Callable[[Policy, Policy, list[bytes], int], State]
    """Base, what is due (its layout and digests), payload, threads; decoded, applied and hashed."""


# -- ours ------------------------------------------------------------------------------------------


def _manifest(
    new: Policy, kind: Any, base: Policy | None, payload: list[bytes]
) -> tuple[PolicyManifest, Artifact]:
    infos = tuple(
        TensorInfo(name, tensor.dtype, tensor.shape, new.digests[name])
        for name, tensor in new.state.items()
    )
    held = (base.version, base.digest) if base else (-1, NO_DIGEST)
    artifact = Artifact(kind, *held, CODEC, sum(map(len, payload)), ())
    return PolicyManifest(NO_DIGEST, new.version, new.digest, infos, (artifact,)), artifact


def ours(encoders: Encoders) -> Format:
    """The codec as a trainer and a worker use it; threads decode and hash."""

    def encode(base: Policy, new: Policy, _threads: int) -> Iterator[bytes]:
        return encoders.encode_delta(base.state, new.state)

    return Format(CODEC, encode, _decode_ours)


def _decode_ours(base: Policy, new: Policy, payload: list[bytes], threads: int) -> State:
    manifest, artifact = _manifest(new, "delta", base, payload)
    return WeightReplica(base, threads=threads).prepare(manifest, artifact, payload).policy.state


def _encode_anchor(_base: Policy, new: Policy, threads: int) -> Iterator[bytes]:
    return encode_full(new.state, threads=threads)


def _decode_anchor(base: Policy, new: Policy, payload: list[bytes], threads: int) -> State:
    manifest, artifact = _manifest(new, "anchor", None, payload)
    return WeightReplica(base, threads=threads).prepare(manifest, artifact, payload).policy.state


# -- others: a coder of blocks, run over all of them -----------------------------------------------


def _squeeze(data: Any) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _expand(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def _encode_full(_base: Bits, new: Bits) -> bytes:
    return _squeeze(new.view(np.uint8).data)


def _decode_full(_base: Bits, body: bytes, out: Bits) -> None:
    out[:] = np.frombuffer(_expand(body), "<u2")


def _encode_xor(base: Bits, new: Bits) -> bytes:
    mixed = (base ^ new).view(np.uint8).reshape(-1, 2)
    return _squeeze(np.ascontiguousarray(mixed.T).data)


def _decode_xor(base: Bits, body: bytes, out: Bits) -> None:
    mixed = np.frombuffer(_expand(body), np.uint8).reshape(2, -1)
    out[:] = np.ascontiguousarray(mixed.T).view("<u2").ravel()
    out ^= base


def _encode_sparse(base: Bits, new: Bits) -> bytes:
    index = np.flatnonzero(base != new)
    gaps = np.diff(index, prepend=0).astype("<i4")
    return _squeeze(gaps.tobytes() + new[index].tobytes())


def _decode_sparse(base: Bits, body: bytes, out: Bits) -> None:
    plain = _expand(body)
    count = len(plain) // 6
    index = np.cumsum(np.frombuffer(plain, "<i4", count), dtype=np.int64)
    out[:] = base
    out[index] = np.frombuffer(plain, "<u2", count, 4 * count)


def _blockwise(
    name: str,
    encode: Callable[[Bits, Bits], bytes],
    decode: Callable[[Bits, bytes, Bits], None],
) -> Format:
    def parts(state: State) -> Iterator[tuple[str, slice]]:
        for key, tensor in state.items():
            for at in range(0, tensor.data.size, BLOCK):
                yield key, slice(at, at + BLOCK)

    def encode_all(base: Policy, new: Policy, threads: int) -> Iterator[bytes]:
        jobs = (
            (base.state[key].data[part], new.state[key].data[part])
            for key, part in parts(new.state)
        )
        return ordered(encode, jobs, threads)

    def decode_all(base: Policy, new: Policy, payload: list[bytes], threads: int) -> State:
        state = {
            key: Tensor(held.dtype, held.shape, np.empty_like(held.data))
            for key, held in base.state.items()
        }
        jobs = (
            (base.state[key].data[part], body, state[key].data[part])
            for (key, part), body in zip(parts(state), payload, strict=True)
        )
        for _ in ordered(decode, jobs, threads):
            pass
        with ThreadPoolExecutor(threads) as pool:
            hashes = dict(zip(state, pool.map(tensor_digest, state.values()), strict=True))
        if state_digest(hashes) != new.digest:
            raise SystemExit(f"{name} is not lossless")
        return state

    return Format(name, encode_all, decode_all)


ANCHOR = Format(f"{CODEC} full", _encode_anchor, _decode_anchor)
FULL = _blockwise("full bf16 + zstd-1", _encode_full, _decode_full)
XOR = _blockwise("xor + shuffle + zstd-1", _encode_xor, _decode_xor)
SPARSE = _blockwise("i32 gaps + values + zstd-1", _encode_sparse, _decode_sparse)
