"""Low-rank adapters as a State, and merging them into a base model: W + alpha / rank x B A.

Every node merges by itself, and audits compare the results: so the same bits must result everywhere,
on any processor, with any number of threads.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from .payload import ordered
from .sparse import where
from .state import BITS, Changed, State, Tensor
from .state_history import TensorLayout, layout

PREFIX = "base_model.model."
"""Prefix of a module's name in PEFT's files and ours."""
A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of a module's name: [rank, in] and [out, rank]."""
WEIGHT = ".weight"
BLOCK = 1 << 18
"""Elements merged at once, at 14 bytes each: as many as fit a processor's cache."""
DENSE = 8
"""No positions are given of a tensor with more than one changed element in this many."""


class LowRank(Protocol):
    """Rank, alpha and targets of adapters: a run's AdapterContract, or the LoraConfig that it is made of."""

    @property
    def rank(self) -> int:
        """Columns of B."""
        ...

    @property
    def alpha(self) -> float:
        """Numerator of the product's factor alpha / rank."""
        ...

    @property
    def target_modules(self) -> tuple[str, ...]:
        """Last parts of the names of the layers that have adapters."""
        ...


@dataclass(frozen=True)
class MergedAdapters:
    """A merged state and its inputs: the same objects are not merged again."""

    adapters: State
    state: State


def adapter_shapes(
    shapes: Mapping[str, tuple[int, ...]], contract: LowRank
) -> dict[str, tuple[int, int]]:
    """Name -> shape of every adapter tensor on a base with tensors of these `shapes`; allocates nothing.

    Raises EngineError where the contract names layers that the base does not have.
    """
    adapter: dict[str, tuple[int, int]] = {}
    unknown = set(contract.target_modules)
    for name in sorted(shapes):
        module = name.removesuffix(WEIGHT)
        target = module.rpartition(".")[2]
        if module == name or target not in contract.target_modules:
            continue
        if len(shapes[name]) != 2:
            raise EngineError(
                f"{name} has shape {list(shapes[name])}, and adapters are for matrices: take {target} "
                "out of training.lora.target_modules"
            )
        unknown.discard(target)
        rows, columns = shapes[name]
        adapter[PREFIX + module + A] = (contract.rank, columns)
        adapter[PREFIX + module + B] = (rows, contract.rank)
    if unknown:
        raise EngineError(
            f"the model has no layers {', '.join(sorted(unknown))}: correct "
            "training.lora.target_modules"
        )
    return adapter


def merge(
    base: State,
    adapters: State,
    contract: LowRank,
    *,
    before: MergedAdapters | None = None,
    threads: int = 1,
) -> State:
    """Merge the adapters into the base; both states are bf16 and stay as they are.

    Tensors without adapters, or with a B of zeros, are the base's own objects; those whose adapters are the
    very objects of `before` are its own. Raises EngineError if the adapters are not those of the contract.
    """
    check_adapters(layout(base), adapters, contract)
    modules = [name[len(PREFIX) : -len(A)] for name in adapters if name.endswith(A)]
    scale = contract.alpha / contract.rank

    def one(module: str) -> Tensor:
        a, b = (adapters[PREFIX + module + part] for part in (A, B))
        if before is not None and all(
            before.adapters.get(PREFIX + module + part) is tensor
            for part, tensor in ((A, a), (B, b))
        ):
            return before.state[module + WEIGHT]
        return add_product(base[module + WEIGHT], a, b, scale)

    with ThreadPoolExecutor(max(1, threads)) as pool:
        done = dict(zip(modules, pool.map(one, modules), strict=True))
    return {**base, **{module + WEIGHT: tensor for module, tensor in done.items()}}


def check_adapters(base: Mapping[str, TensorLayout], adapters: State, contract: LowRank) -> None:
    """Raises EngineError if the adapters are not those of the contract on a base of this layout."""
    wanted = adapter_shapes({name: tensor.shape for name, tensor in base.items()}, contract)
    if odd := sorted(wanted.keys() ^ adapters.keys()):
        which = "lack" if odd[0] in wanted else "have"
        raise EngineError(
            f"the adapters {which} {odd[0]}, against the run's manifest: update the trainer"
        )
    for name, shape in wanted.items():
        module, tensor = name[len(PREFIX) :].removesuffix(A).removesuffix(B), adapters[name]
        if tensor.shape != shape or {tensor.dtype, base[module + WEIGHT].dtype} != {"BF16"}:
            raise EngineError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on a {base[module + WEIGHT].dtype} base, "
                f"the run's manifest says BF16 {list(shape)}: update the trainer"
            )


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute bf16(fp32(W) + fp32(scale x B A)), all three bf16: W [out, in], A [rank, in], B [out, rank].

    Products of two bf16 numbers are exact in float64, and so is their sum unless they are 2^27 apart: the order
    in which a library adds them makes no difference (it may, to one element in 10^13). Not finite stays so.
    """
    if not b.data.any():
        return weight
    rows, columns = weight.shape
    right = widen(a.data).reshape(a.shape).astype(np.float64)
    factor = widen(b.data).reshape(b.shape).astype(np.float64)
    out = np.empty_like(weight.data)
    step = max(1, BLOCK // max(1, columns))
    with np.errstate(all="ignore"):  # overflows become infinite, as in any engine
        for row in range(0, rows, step):
            product = factor[row : row + step] @ right
            product *= scale
            total = product.astype(np.float32).reshape(-1)
            part = slice(row * columns, row * columns + total.size)
            total += widen(weight.data[part])
            out[part] = narrow(total)
    return Tensor(weight.dtype, weight.shape, out)


def changes(old: State, new: State, *, threads: int = 1) -> Changed:
    """Find where `new` differs from `old`, a state of the same layout, by comparing bits."""
    names = [name for name in new if new[name] is not old[name]]
    positions_of_each = ordered(_changed, ((old[name], new[name]) for name in names), threads)
    return {
        name: positions
        for name, positions in zip(names, positions_of_each, strict=True)
        if positions is None or positions.size
    }


def _changed(old: Tensor, new: Tensor) -> NDArray[np.int64] | None:
    """Find the positions at which two tensors differ; None: more than the limit, so the whole tensor counts
    as changed."""
    flags = new.data != old.data
    return None if DENSE * np.count_nonzero(flags) > flags.size else where(flags)


def widen(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Convert bf16 bits to float32 values."""
    wide = bits.astype("<u4")
    wide <<= 16
    return wide.view("<f4")


def narrow(values: NDArray[np.float32]) -> NDArray[Any]:
    """Round float32 values to bf16 bits, to nearest, ties to even; NaN stays NaN."""
    bits = values.view("<u4")
    odd = (bits >> 16) & 1
    odd += bits
    odd += 0x7FFF
    odd >>= 16
    rounded = odd.astype(BITS["BF16"])
    broken = np.isnan(values)
    if broken.any():
        rounded[broken] = 0x7FC0
    return rounded
