"""Adapters that torch merges into a base's files have the bits that numpy gives them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.weights_cases import contract, make_adapters, make_base

from primerl.node.inference import policy_file
from primerl.node.inference.handover import AdapterBase
from primerl.node.inference.policy_file import KeptBase, PolicyFile
from primerl.node.models.tensors import from_torch
from primerl.node.weights.adapters import PREFIX, WEIGHT, A, B, merge
from primerl.node.weights.checkpoint import write_checkpoint
from primerl.node.weights.state import State, Tensor, digests
from primerl.node.weights.state_history import layout

CPU = torch.device("cpu")
SPECIAL = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x7F7F], "<u2")
"""Zeros, infinities, the smallest and the largest number."""


def write(tmp_path: Path, base: State, adapters: State, files: int = 1) -> PolicyFile:
    """The base in some files, and a file of adapters on it."""
    directory = tmp_path / "model"
    directory.mkdir()
    names = sorted(base)
    for number in range(files):
        part = {name: base[name] for name in names[number::files]}
        write_checkpoint(directory / f"model-{number}.safetensors", part)
    told = AdapterBase(directory, contract(), layout(base))
    path = tmp_path / "adapters.safetensors"
    write_checkpoint(path, adapters, metadata=told.metadata)
    return PolicyFile(str(path))


def merged(policy: PolicyFile) -> dict[str, bytes]:
    return digests({name: from_torch(tensor) for name, tensor in policy.tensors(CPU)})


@pytest.mark.parametrize("files", [1, 3])
def test_every_tensor_of_the_base_is_there_with_its_adapters(tmp_path: Path, files: int) -> None:
    base, adapters = make_base(), make_adapters()
    policy = write(tmp_path, base, adapters, files)
    assert policy.adapted
    assert merged(policy) == digests(merge(base, adapters, contract()))
    assert policy.shapes() == {name: tensor.shape for name, tensor in base.items()}
    unmerged = {name: from_torch(tensor) for name, tensor in policy.unmerged()}
    assert digests(unmerged) == digests(base)
    modules = {name[len(PREFIX) : -len(A)] for name in adapters if name.endswith(A)}
    assert {name for name, _ in policy.changing(CPU)} == {one + WEIGHT for one in modules}


def test_numbers_at_the_edges_are_merged_alike(tmp_path: Path) -> None:
    base = dict(make_base())
    rng = np.random.default_rng(3)
    for name, tensor in base.items():
        data = tensor.data.copy()
        places = rng.choice(data.size, min(len(SPECIAL), data.size), replace=False)
        data[places] = SPECIAL[: len(places)]
        base[name] = Tensor(tensor.dtype, tensor.shape, data)
    adapters = make_adapters()
    policy = write(tmp_path, base, adapters)
    assert merged(policy) == digests(merge(base, adapters, contract()))


@pytest.mark.parametrize("zero", [0x0000, 0x8000])
def test_a_b_of_zeros_of_either_sign_gives_the_bits_that_numpy_gives(
    tmp_path: Path, zero: int
) -> None:
    base, adapters = dict(make_base()), dict(make_adapters())
    first = next(name for name in adapters if name.endswith(B))
    shape = adapters[first].shape
    adapters[first] = Tensor("BF16", shape, np.full(adapters[first].data.size, zero, "<u2"))
    layer = first[len(PREFIX) : -len(B)] + WEIGHT
    data = base[layer].data.copy()
    data[0] = 0x8000
    base[layer] = Tensor("BF16", base[layer].shape, data)
    policy = write(tmp_path, base, adapters)
    assert merged(policy) == digests(merge(base, adapters, contract()))
    kept = merge(base, adapters, contract())[layer].data[0]
    assert kept == (0x8000 if zero == 0 else 0x0000), "a B without a bit leaves a weight as it is"


@pytest.mark.parametrize("files", [1, 3])
def test_a_base_is_kept_once_in_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    pinned: list[torch.Tensor] = []

    def pin(flat: torch.Tensor) -> bool:
        pinned.append(flat)
        return True

    monkeypatch.setattr(policy_file, "pin", pin)
    base, adapters = make_base(), make_adapters()
    write(tmp_path, base, adapters, files)
    paths = sorted(map(str, (tmp_path / "model").glob("*.safetensors")))
    names = [name for name in base if PREFIX + name.removesuffix(WEIGHT) + A in adapters]
    kept = KeptBase(1 << 20)
    found = kept.read(paths, names)
    assert digests({name: from_torch(one) for name, one in found.items()}) == digests(
        {name: base[name] for name in names}
    )
    (memory,) = pinned
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    assert all(start <= one.data_ptr() <= end - one.nbytes for one in found.values())
    assert {one.data_ptr() % policy_file.ALIGN for one in found.values()} == {0}
    assert kept.read([], []) is found
    assert KeptBase(memory.nbytes - 1).read(paths, names) == {}, "there is no room for it"
    monkeypatch.setattr(policy_file, "pin", lambda _: False)  # pyright: ignore[reportUnknownLambdaType]
    assert KeptBase(1 << 20).read(paths, names) == {}, "this machine does not lock it"


def test_a_file_of_a_whole_policy_is_read_as_it_is(tmp_path: Path) -> None:
    base = make_base()
    write_checkpoint(tmp_path / "whole.safetensors", base)
    policy = PolicyFile(str(tmp_path / "whole.safetensors"))
    assert not policy.adapted
    assert merged(policy) == digests(base)
