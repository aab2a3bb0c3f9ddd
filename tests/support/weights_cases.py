"""States, manifests and hypothesis strategies for the tests of node/weights."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from primerl.crypto.hashing import NO_DIGEST, digest
from primerl.node.weights.adapters import PREFIX, A, B, narrow
from primerl.node.weights.blocks import SPARSE, decode_block, move
from primerl.node.weights.codec import CODEC, apply_delta
from primerl.node.weights.payload import Payload
from primerl.node.weights.sparse import decode_changes
from primerl.node.weights.state import BITS, State, Tensor, digests, numel, state_digest
from primerl.protocol.manifests import (
    AdapterContract,
    Artifact,
    ChunkRef,
    PolicyManifest,
    TensorInfo,
)

RUN = digest(b"run")


def tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    """A tensor of these bytes, its own copy."""
    return Tensor(dtype, shape, np.frombuffer(data, BITS[dtype]).copy())


def bf16(*values: int) -> Tensor:
    """A flat BF16 tensor of these bit patterns."""
    return Tensor("BF16", (len(values),), np.array(values, "<u2"))


def same(left: State, right: State) -> bool:
    """Equal names, types, shapes and bits."""
    return left.keys() == right.keys() and all(
        (t.dtype, t.shape) == (right[n].dtype, right[n].shape)
        and t.data.tobytes() == right[n].data.tobytes()
        for n, t in left.items()
    )


def infos(state: State) -> tuple[TensorInfo, ...]:
    """Make the manifest's tensor table of `state`."""
    hashes = digests(state)
    return tuple(TensorInfo(n, t.dtype, t.shape, hashes[n]) for n, t in state.items())


def chunks(parts: Sequence[bytes]) -> tuple[ChunkRef, ...]:
    """References to `parts`."""
    return tuple(ChunkRef(digest(part), len(part)) for part in parts)


def snapshot(payload: bytes) -> Artifact:
    """A snapshot of one chunk."""
    return Artifact("anchor", -1, NO_DIGEST, CODEC, len(payload), chunks([payload]))


def delta(base_version: int, base_state: bytes, payload: bytes) -> Artifact:
    """A delta of one chunk."""
    return Artifact("delta", base_version, base_state, CODEC, len(payload), chunks([payload]))


def manifest(version: int, state: State, *artifacts: Artifact) -> PolicyManifest:
    """The manifest of `state`."""
    return PolicyManifest(RUN, version, state_digest(digests(state)), infos(state), artifacts)


def like_a_model(seed: int, elements: int) -> Tensor:
    """BF16 weights, normal with deviation 0.02, as a matrix row."""
    weights = np.random.default_rng(seed).normal(0, 0.02, elements).astype(np.float32)
    return Tensor("BF16", (elements,), (weights.view(np.uint32) >> 16).astype("<u2"))


def stepped(base: Tensor, seed: int, share: float) -> Tensor:
    """`base` with a share of its elements moved by a few units in the last place, some far."""
    rng = np.random.default_rng(seed)
    data = base.data.copy()
    chosen = rng.random(data.size) < share
    far = rng.random(data.size) < 0.01
    step = np.where(far, rng.integers(0, 2**16, data.size), rng.integers(1, 4, data.size))
    data[chosen] += step[chosen].astype(data.dtype)
    return Tensor(base.dtype, base.shape, data)


def small_pair() -> tuple[State, State]:
    """A few tensors that between them use every method of the codec."""
    base = {
        "a.dense": like_a_model(1, 6000),
        "b.sparse": like_a_model(2, 9000),
        "c.skip": bf16(0x8000, 0x7FC1, 0xFFFF),
        "d.raw": tensor("F32", (50,), bytes(200)),
        "e.empty": tensor("F16", (0, 4), b""),
        "f.scalar": tensor("I64", (), bytes(8)),
    }
    noise = random.Random(3).randbytes(200)
    new = base | {
        "a.dense": stepped(base["a.dense"], 4, 0.95),
        "b.sparse": stepped(base["b.sparse"], 5, 0.02),
        "d.raw": tensor("F32", (50,), noise),
        "f.scalar": tensor("I64", (), b"\xff" * 8),
    }
    return base, new


def golden_pair() -> tuple[State, State]:
    """From integer arithmetic alone, so that no library can change it."""
    mixed = (np.arange(12_000, dtype=np.uint64) * 2654435761 >> 13).astype("<u4")
    base = {
        "dense": Tensor("BF16", (60, 50), (mixed[:3000] & 0xFF).astype("<u2") + 0x3C00),
        "sparse": Tensor("BF16", (9000,), (mixed[:9000] & 0x81FF).astype("<u2")),
        "single": Tensor("F32", (1,), mixed[5:6].copy()),
        "half": Tensor("BF16", (8000,), (mixed[:8000] & 0x9FFF).astype("<u2")),
        "wide": Tensor("F32", (5000,), mixed[:5000].copy()),
        "same": Tensor("F16", (3,), np.array([0x8000, 0x7E01, 1], "<u2")),
    }
    sparse = base["sparse"].data.copy()
    sparse[:: 37 * 8] += 3
    sparse[4000] = 0x7FC0
    half = base["half"].data + (mixed[2000:10_000] % 5 // 3 * (mixed[:8000] % 31)).astype("<u2")
    dense = base["dense"].data + (mixed[3000:6000] & 3).astype("<u2")
    new = base | {
        "dense": Tensor("BF16", (60, 50), dense),
        "sparse": Tensor("BF16", (9000,), sparse),
        "single": Tensor("F32", (1,), ~base["single"].data),
        "half": Tensor("BF16", (8000,), half),
        "wide": Tensor("F32", (5000,), base["wide"].data * 7),
    }
    return base, new


SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (4, 0, 2), (17,), (5, 1, 7), (300,)])
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable())


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, any small shape, any bits: NaN, -0.0 and denormals come by themselves."""
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = draw(SHAPES)
    size = numel(shape) * BITS[dtype].itemsize
    return tensor(dtype, shape, draw(st.binary(min_size=size, max_size=size)))


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[State, State]:
    """Two states of one layout; the second differs nowhere, in places, or everywhere."""
    base = draw(st.dictionaries(NAMES, tensors(), max_size=5))
    new: dict[str, Tensor] = {}
    for name, held in base.items():
        data = held.data.copy()
        for index in draw(st.lists(st.integers(0, max(0, data.size - 1)), max_size=8)):
            if data.size:
                bits = draw(st.integers(0, 2 ** (8 * data.itemsize) - 1))
                data[index] = bits
        if draw(st.booleans()):
            data = ~data
        new[name] = Tensor(held.dtype, held.shape, data)
    return base, new


def applied(
    base: State, payload: Payload, tensors: Sequence[TensorInfo], *, threads: int = 1
) -> State:
    """Apply a delta; drop the changed positions."""
    return apply_delta(base, payload, tensors, threads=threads)[0]


LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")
ADAPTER_SHAPES = {"model.embed.weight": (7, 24), "model.norm.weight": (24,)} | {
    f"{layer}.weight": (40, 24) for layer in LAYERS
}


def decoded_block(
    method: int, body: bytes, base: NDArray[Any], dtype: str
) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
    """Decode one block of any method: the new bits, and where they changed, if that is known."""
    out = base.copy()
    if method != SPARSE:
        decode_block(method, memoryview(body), base, out, dtype)
        return out, None
    changes, _ = decode_changes([(memoryview(body), slice(0, base.size))], base.dtype)
    out[changes.index] = move(base[changes.index], changes.moves, dtype)
    return out, changes.index


def contract(**changes: Any) -> AdapterContract:
    """Adapters of rank 4 on both layers."""
    fields: dict[str, Any] = {
        "rank": 4,
        "alpha": 6.0,
        "target_modules": ("q_proj", "up_proj"),
        "base": ChunkRef(digest(b"table"), 5),
    }
    return AdapterContract(**{**fields, **changes})


def random_tensor(
    chance: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0
) -> Tensor:
    """Normal numbers in bf16."""
    values = chance.standard_normal(shape).astype(np.float32) * np.float32(scale)
    return Tensor("BF16", shape, narrow(values.reshape(-1)))


def make_base(seed: int = 0) -> State:
    """A base with two layers that adapters fit."""
    chance = np.random.default_rng(seed)
    return {name: random_tensor(chance, shape, 0.2) for name, shape in ADAPTER_SHAPES.items()}


def make_adapters(seed: int = 1, rank: int = 4) -> State:
    """Adapters of both layers, none of them zero."""
    chance = np.random.default_rng(seed)
    found: State = {}
    for layer in LAYERS:
        found = {
            **found,
            PREFIX + layer + A: random_tensor(chance, (rank, 24)),
            PREFIX + layer + B: random_tensor(chance, (40, rank), 0.02),
        }
    return found
