"""A sharded policy from the ranks to the daemon's memory: run by hand, prints a short table.

    torchrun --nproc-per-node 2 tests/gpu/measure_sharded_export.py [SCALE] [REPLICAS]

Shapes of a Qwen3 of 4B parameters, random weights, real AdamW steps at lr 1e-6 on random gradients. Needs
torch; with CUDA 40 GB on each of two devices and 40 GB on the host. SCALE (say 0.01) takes a share of the rows.
Exits with 1 if a bit of what arrives is not what gathering every tensor gives.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import measure_encode as whole
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from primerl.node.config.training import FsdpConfig, TrainingConfig
from primerl.node.models.tensors import from_torch
from primerl.node.training.backend import Snapshot
from primerl.node.training.export import PolicyExporter
from primerl.node.training.gather import Source, named_sources, whole_tensors
from primerl.node.training.snapshot import SnapshotReader, exchange_directory
from primerl.node.training.world import World
from primerl.node.weights.state import State, state_bytes

T = TypeVar("T")
STEPS = 5


def sharded(scale: float, world: World) -> dict[str, torch.nn.Parameter]:
    """fp32 masters under their checkpoint names, each cut into rows."""
    module = torch.nn.Module()
    for name, tensor in whole.weights(scale).items():
        module.register_parameter(name.replace(".", "/"), torch.nn.Parameter(tensor))
    assert world.mesh is not None
    fully_shard(module, mesh=world.mesh)
    return {name.replace("/", "."): one for name, one in module.named_parameters()}


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its seconds until every rank is done."""
    dist.barrier()
    done, seconds = whole.timed(work)
    dist.barrier()
    return done, seconds


def device_bytes() -> int:
    """Bytes that live on the device."""
    return torch.cuda.memory_allocated() if whole.CUDA else 0


def gathered(sources: list[Source], world: World) -> None:
    """What the plain way does at every step: all of it comes to the first rank's host."""
    for _, tensor in whole_tensors(sources, world.rank):
        tensor.cpu()


def equal(found: State, sources: list[Source], world: World) -> bool:
    """Whether `found` is what gathering gives; on the first rank."""
    same = True
    for name, tensor in whole_tensors(sources, world.rank):
        wanted = from_torch(tensor)
        same = same and wanted.data.tobytes() == found[name].data.tobytes()
    return same


def main() -> None:
    """Print the table."""
    scale = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    replicas = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    torch.set_num_threads(1)
    world = World.join(TrainingConfig(fsdp=FsdpConfig(replicas=replicas)))
    named = sharded(scale, world)
    sources = list(named_sources(named, world.rank))
    optimizer = torch.optim.AdamW(list(named.values()), lr=whole.LR, fused=whole.CUDA)
    writer, reader = PolicyExporter(world), SnapshotReader(ahead=True)
    size = 2 * sum(parameter.numel() for parameter in named.values())
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=exchange_directory(size)) as directory:
        path = Path(directory) / "snapshot"
        found: Snapshot | None = None
        for step in range(STEPS + 1):
            if step:
                whole.learn(named, optimizer)  # type: ignore[arg-type]
            before = device_bytes()
            _, wrote = timed(lambda: writer.write_snapshot(sources, path))
            kept = device_bytes() - before
            length = path.stat().st_size if world.is_first else 0
            last, (found, read) = found, timed(lambda: _read(reader, path, world))
            _, plain = timed(lambda: gathered(sources, world))
            if world.is_first:
                _line(step, found, last, wrote, read, plain, length, kept, size)
            for name, value in (("write", wrote), ("read", read), ("gather all", plain)):
                if step > 1:
                    rows.setdefault(name, []).append(value)
    good = equal(found.state if found else {}, sources, world)
    if world.is_first:
        for name, values in rows.items():
            print(f"{name:12} median {1e3 * statistics.median(values):8.1f} ms")
        print(f"bits equal those of gathering: {'yes' if good else 'NO'}")
    reader.close()
    world.close()
    if not good:
        raise SystemExit(1)


def _read(reader: SnapshotReader, path: Path, world: World) -> Snapshot | None:
    return reader.snapshot(path) if world.is_first else None


def _line(
    step: int,
    found: Snapshot | None,
    last: Snapshot | None,
    wrote: float,
    read: float,
    plain: float,
    length: int,
    kept: int,
    size: int,
) -> None:
    assert found is not None
    assert state_bytes(found.state) == size
    assert found.base is (last.state if last else None)
    told = sum(one.size for one in found.changed.values() if one is not None)
    print(
        f"step {step}: {told / size * 2:.2%} changed, file {length / 1e6:.1f} MB of {size / 1e6:.0f}, "
        f"write {wrote:.3f} s, read {read:.3f} s, gather all {plain:.3f} s, "
        f"{kept / 1e6:+.0f} MB on the first device"
    )


if __name__ == "__main__":
    main()
