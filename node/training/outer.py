"""The outer step of a run with several learners: what each sends, and how that becomes the next version.

Local steps with error feedback and a bf16 gate are PULSELoCo's (arXiv 2602.03839), the outer step is DiLoCo's
(arXiv 2311.08105). Invariants: an outer state is never written to; equal states, contributions and weights
give equal bits on every machine, for each operation here is on single elements, in one order and rounded by
IEEE 754; nothing that a learner sends is merged unless it is finite; what a learner did not send it keeps.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...crypto.hashing import NO_DIGEST
from ...protocol.manifests import Artifact, LearnersContract, TensorInfo
from ..weights.adapters import narrow
from ..weights.codec import CODEC, apply_delta, encode_delta
from ..weights.replica import Policy, prove, tensor_table
from ..weights.sparse import where
from ..weights.state import Changed, CodecError, State, Tensor, floats, memory_threads

Floats = NDArray[np.float32]

MASTERS, MOMENTUM = "masters/", "momentum/"
"""Beginnings of the names of an outer state's tensors."""
SLAB = 1 << 22
"""Elements of a tensor that are merged at a time."""
CLIP, REFUSE = 3.0, 10.0
"""A contribution's norm is clipped to, and refused above, this many times the norm that it is compared with."""
MIN_COSINE = -0.2
"""Smallest cosine of the angle between a contribution and the sum of the others."""
SLACK = 1 << 20
"""Bytes that a contribution may have beyond those of dense masters."""


class ContributionError(Exception):
    """A contribution that is not merged; the message says why."""


@dataclass(frozen=True)
class OuterState:
    """The masters of a version and their momentum: fp32, by name."""

    whole: Policy
    """Both, proved together; its version is that of the run."""

    @classmethod
    def begin(cls, version: int, masters: State) -> "OuterState":
        """Make the outer state of `masters`, without momentum."""
        momentum = {
            name: Tensor("F32", tensor.shape, np.zeros(tensor.data.size, "<u4"))
            for name, tensor in masters.items()
        }
        return cls.of(version, {**_named(MASTERS, masters), **_named(MOMENTUM, momentum)})

    @classmethod
    def of(cls, version: int, state: State) -> "OuterState":
        """Prove a state with the names of an outer state. Raises CodecError for any other."""
        masters, momentum = _part(state, MASTERS), _part(state, MOMENTUM)
        shapes = {name: tensor.shape for name, tensor in masters.items()}
        if len(state) != 2 * len(shapes) or not shapes:
            raise CodecError("these tensors are no outer state")
        if shapes != {name: tensor.shape for name, tensor in momentum.items()}:
            raise CodecError("masters and momentum have different shapes")
        if {tensor.dtype for tensor in state.values()} != {"F32"}:
            raise CodecError("an outer state that is not fp32")
        return cls(prove(version, state, threads=memory_threads()))

    def check_layout(self, table: Sequence[TensorInfo]) -> None:
        """Raise CodecError unless `table` lists the tensors of an outer state of this layout."""
        own = {name: tensor.shape for name, tensor in self.whole.state.items()}
        if {info.name: info.shape for info in table} != own or len(table) != len(own):
            raise CodecError("an outer state of another model")
        if any(info.dtype != "F32" for info in table):
            raise CodecError("an outer state that is not fp32")

    @property
    def version(self) -> int:
        """Version of the policy that its masters round to."""
        return self.whole.version

    @property
    def digest(self) -> bytes:
        """Digest of all of it."""
        return self.whole.digest

    @property
    def name(self) -> tuple[int, bytes]:
        """Version and digest: steps that change nothing have equal digests."""
        return (self.version, self.digest)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.data.nbytes for tensor in self.whole.state.values())

    @property
    def masters(self) -> State:
        """The masters by the learner's names."""
        return _part(self.whole.state, MASTERS)

    @property
    def momentum(self) -> State:
        """The momentum by the learner's names."""
        return _part(self.whole.state, MOMENTUM)


@dataclass(frozen=True)
class Gated:
    """What a learner sends of its change, and what it keeps."""

    masters: State
    """The base's masters, and the learner's where bf16 shows a difference."""
    changed: Changed
    residual: Mapping[str, Floats]
    """Change that was not sent, to be added to the next."""
    fired: int
    """Elements that are sent."""


@dataclass(frozen=True)
class SparseChange:
    """A decoded contribution: base minus learner, at the elements that it changes."""

    positions: Mapping[str, NDArray[np.int64]]
    values: Mapping[str, Floats]
    norm: float
    """Euclidean."""


def gate(base: State, local: State, residual: Mapping[str, Floats]) -> Gated:
    """Split a learner's change, with the residual of earlier ones, into what bf16 can see and the rest.

    All states are fp32; an empty `residual` is zero.
    """
    names = sorted(base)

    def part(name: str) -> tuple[Tensor, NDArray[np.int64], Floats]:
        return _gate(base[name], local[name], residual.get(name))

    with ThreadPoolExecutor(memory_threads()) as pool:
        parts = list(pool.map(part, names))
    masters, changed, kept, fired = dict(base), dict[str, NDArray[np.int64]](), {}, 0
    for name, (tensor, positions, rest) in zip(names, parts, strict=True):
        kept[name] = rest
        if positions.size:
            masters[name], changed[name] = tensor, positions
            fired += positions.size
    return Gated(masters, changed, kept, fired)


def _gate(
    base: Tensor, local: Tensor, residual: Floats | None
) -> tuple[Tensor, NDArray[np.int64], Floats]:
    before = floats(base)
    change: Floats = before - floats(local)
    if residual is not None:
        change += residual
    target: Floats = before - change
    positions = where(narrow(target) != narrow(before))
    sent = before.copy()
    sent[positions] = target[positions]
    # what rounding took from the sent ones is kept, too
    change[positions] -= before[positions] - target[positions]
    return Tensor("F32", base.shape, sent.view("<u4")), positions, change


def encode(base: State, gated: Gated) -> Iterable[bytes]:
    """Encode what a learner sends, piece by piece."""
    return encode_delta(base, gated.masters, changed=gated.changed, threads=memory_threads())


def check_artifact(artifact: Artifact, outer: OuterState) -> None:
    """Raise ContributionError for a payload that cannot be one, before anything of it is fetched."""
    dense = outer.size // 2
    if artifact.codec != CODEC:
        raise ContributionError(f"the codec {artifact.codec!r} is unknown: update this node")
    if artifact.size > dense + SLACK:
        raise ContributionError(f"{artifact.size} B, and all masters have {dense}")


def decode(outer: OuterState, payload: Iterable[bytes]) -> SparseChange:
    """Decode a contribution to `outer`. Raises ContributionError, also for numbers that are not finite."""
    masters = outer.masters
    table = tensor_table(Policy(outer.version, masters, dict.fromkeys(masters, NO_DIGEST), b""))
    try:
        state, changed = apply_delta(masters, payload, table, threads=memory_threads())
    except CodecError as error:
        raise ContributionError(f"it cannot be decoded: {error}") from error
    positions: dict[str, NDArray[np.int64]] = {}
    values: dict[str, Floats] = {}
    squares: list[float] = []
    for name in sorted(changed):
        places = changed[name]
        if places is None:
            places = where(state[name].data != masters[name].data)
        with np.errstate(all="ignore"):
            value = floats(masters[name])[places] - floats(state[name])[places]
            norm = float(np.linalg.norm(value.astype(np.float64)))
        if not np.isfinite(value).all() or not math.isfinite(norm):
            raise ContributionError(f"numbers of {name} are not finite")
        positions[name], values[name] = places, value
        squares.append(norm * norm)
    return SparseChange(positions, values, math.sqrt(math.fsum(squares)))


def weigh(
    changes: Mapping[bytes, SparseChange], tokens: Mapping[bytes, int], own: bytes
) -> tuple[dict[bytes, float], dict[bytes, str]]:
    """Return the weight of each node's contribution, and why others have none.

    A weight is the share of the tokens, less where the norm is clipped. Norms are compared with the median, or
    with that of `own`, which is this node's and believed, if it is larger.
    """
    refused: dict[bytes, str] = {}
    norms = sorted(change.norm for change in changes.values())
    usual = norms[(len(norms) - 1) // 2] if norms else 0.0
    if own in changes:
        usual = max(usual, changes[own].norm)
    for node, change in changes.items():
        if node != own and change.norm > REFUSE * usual:
            refused[node] = f"its norm is {change.norm:.3g}, that of others {usual:.3g}"
    weights: dict[bytes, float] = {}
    for _ in range(2):  # once more without those that point elsewhere
        total = sum(tokens[node] for node in changes if node not in refused)
        weights = {
            node: (tokens[node] / total if total else 0.0)
            * min(1.0, CLIP * usual / change.norm if change.norm else 1.0)
            for node, change in changes.items()
            if node not in refused
        }
        against = {
            node: cosine
            for node, cosine in _cosines(changes, weights).items()
            if cosine < MIN_COSINE and node != own
        }
        if not against:
            break
        for node, cosine in against.items():
            refused[node] = f"it points against the others (cosine {cosine:.2f})"
    return {node: weight for node, weight in weights.items() if node not in refused}, refused


def _cosines(
    changes: Mapping[bytes, SparseChange], weights: Mapping[bytes, float]
) -> dict[bytes, float]:
    """Return the cosine of the angle between each weighed contribution and the sum of the others."""
    dots, squares = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    total = 0.0
    names = {name for node in weights for name in changes[node].positions}
    for name in sorted(names):
        size = 1 + max(
            int(places[-1])
            for node in weights
            if (places := changes[node].positions.get(name)) is not None and places.size
        )
        together = np.zeros(size)
        for node, weight in weights.items():
            if name in changes[node].positions:
                together[changes[node].positions[name]] += weight * changes[node].values[name]
        total += float(together @ together)
        for node, weight in weights.items():
            if name in changes[node].positions:
                mine = weight * changes[node].values[name].astype(np.float64)
                dots[node] += float(mine @ together[changes[node].positions[name]])
                squares[node] += float(mine @ mine)
    cosines: dict[bytes, float] = {}
    for node in weights:
        others = total - 2 * dots[node] + squares[node]
        scale = math.sqrt(max(0.0, others) * squares[node])
        cosines[node] = (dots[node] - squares[node]) / scale if scale else 0.0
    return cosines


def merge(
    outer: OuterState, parts: Sequence[tuple[SparseChange, float]], rule: LearnersContract
) -> OuterState:
    """Make the outer step: Nesterov's, on the weighed sum of the contributions, in their order.

    Equal arguments give equal bits on every machine. Without contributions nothing changes but the version.
    """
    if not parts:
        return OuterState(
            Policy(outer.version + 1, outer.whole.state, outer.whole.digests, outer.whole.digest)
        )
    masters, momentum = outer.masters, outer.momentum
    names = sorted(masters)

    def step(name: str) -> tuple[Tensor, Tensor]:
        return _merge(name, masters[name], momentum[name], parts, rule)

    with ThreadPoolExecutor(memory_threads()) as pool:
        made = dict(zip(names, pool.map(step, names), strict=True))
    state = {MASTERS + name: new for name, (new, _) in made.items()}
    state |= {MOMENTUM + name: new for name, (_, new) in made.items()}
    return OuterState(prove(outer.version + 1, state, known=outer.whole, threads=memory_threads()))


def _merge(
    name: str,
    masters: Tensor,
    momentum: Tensor,
    parts: Sequence[tuple[SparseChange, float]],
    rule: LearnersContract,
) -> tuple[Tensor, Tensor]:
    lr, decay = np.float32(rule.outer_lr), np.float32(rule.outer_momentum)
    size = masters.data.size
    new_masters, new_momentum = floats(masters).copy(), floats(momentum).copy()
    present = [
        (change.positions[name], change.values[name], np.float64(weight))
        for change, weight in parts
        if name in change.positions
    ]
    for start in range(0, size, SLAB):
        part = slice(start, min(size, start + SLAB))
        gradient = np.zeros(part.stop - start)
        for positions, values, weight in present:
            first, last = np.searchsorted(positions, (start, part.stop))
            gradient[positions[first:last] - start] += weight * values[first:last].astype(
                np.float64
            )
        change = gradient.astype(np.float32)
        held = new_momentum[part]
        held *= decay
        held += change
        change += decay * held
        change *= lr
        new_masters[part] -= change
    return _tensor(masters, new_masters), _tensor(momentum, new_momentum)


def _tensor(like: Tensor, values: Floats) -> Tensor:
    """Return `like` itself where the bits are the same: it is not hashed again then."""
    bits = values.view("<u4")
    return like if np.array_equal(bits, like.data) else Tensor("F32", like.shape, bits)


def _named(prefix: str, state: State) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def _part(state: State, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }
