"""Training on several ranks: data, and the rank processes."""

import json
import multiprocessing
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from primerl.node.config.run import TrainingConfig
from primerl.node.errors import NodeError
from primerl.node.models import huggingface
from primerl.node.training.export import PolicyExporter
from primerl.node.training.gather import named_sources, policy_sources, whole_tensors
from primerl.node.training.world import World

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

TIMEOUT_S = 240.0
WORLDS = 24
"""That a job may join, one after the other."""
PORTS = "STORES_OF_TESTS"
HOST = "127.0.0.1"
Job = Callable[..., Any]


def on_ranks(size: int, job: Job, *args: Any) -> list[Any]:
    """Run `job(*args)` on `size` new ranks and return its results; a job calls join()."""
    stores = [TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in range(WORLDS)]
    ports = " ".join(str(store.port) for store in stores)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, size, ports, job, args, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(_result(results) for _ in processes)
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in range(size)]


def join(config: TrainingConfig) -> World:
    """The world of this rank for `config`; each world that was joined before must be closed."""
    port, _, rest = os.environ[PORTS].partition(" ")  # a store serves one world
    os.environ |= {"MASTER_PORT": port, PORTS: rest}
    return World.join(config)


def _rank(
    rank: int, size: int, ports: str, job: Job, args: tuple[Any, ...], results: "Queue[Any]"
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": HOST,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the test holds the stores
        PORTS: ports,
    }
    try:
        results.put((rank, job(*args), ""))
    except Exception:
        results.put((rank, None, traceback.format_exc()))
        raise


def _result(results: "Queue[Any]") -> tuple[int, Any]:
    try:
        rank, found, failure = results.get(timeout=TIMEOUT_S)
    except Empty:
        raise AssertionError("a rank said nothing in time") from None
    assert not failure, f"rank {rank}: {failure}"
    return rank, found


CHUNK = 500
SHARES = (0.0, 0.01, 0.6, 0.0, 0.1)
"""How much of each tensor moves before each snapshot after the first."""
RANKS = 2
DEADLINE = timedelta(seconds=240)


def make_moe(directory: Path) -> None:
    """A mixture of experts; a checkpoint has a file's tensor for each of them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_config: Any = Qwen3MoeConfig
    config = make_config(
        vocab_size=67,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_experts=5,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    torch.manual_seed(3)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)


def load(directory: Path) -> Any:
    """The model of a directory, fp32."""
    return huggingface.load_model(directory)


def shard(model: Any, shape: tuple[int, ...]) -> None:
    """fully_shard() every layer and the rest, over `shape` ranks: shards, or replicas x shards."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def move(parameters: Mapping[str, torch.Tensor], step: int) -> None:
    """Add noise to a share of each parameter, by its name and `step` alone."""
    share = SHARES[step % len(SHARES)]
    for name, parameter in parameters.items():
        rng = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
        chosen = torch.rand(parameter.shape, generator=rng) < share
        noise = torch.randn(parameter.shape, generator=rng) * chosen
        if isinstance(parameter, DTensor):
            noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.add_(noise)


def joined(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A conversion that is no view: projections of a layer become one, transposed."""
    del model
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last == "q":
            made[f"{stem}.qk"] = torch.cat([tensor, tensors[f"{stem}.k"]]).t().contiguous()
        elif last != "k":
            made[f"renamed.{name}"] = tensor
    return made


def refused(work: Iterable[object]) -> str:
    """Return the message of the NodeError that the call raises."""
    try:
        list(work)
    except NodeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def export(world: World, source: Path, out: Path, shape: tuple[int, ...]) -> None:
    """Snapshots of every step, one on demand, and a state."""
    model = load(source)
    shard(model, shape)
    tokens = torch.arange(6)[None]
    writer = PolicyExporter(world, chunk=CHUNK, bucket=4 * CHUNK)
    parameters = dict(model.named_parameters())  # as an optimizer has them
    sources = policy_sources(model, world.rank)
    writer.write_snapshot(sources, out / "0")
    for step in range(1, len(SHARES) + 1):
        move(parameters, step)
        with torch.no_grad():
            model(tokens)  # what a forward pass leaves unsharded is not what is exported
        writer.write_snapshot(sources, out / str(step))
    writer.write_snapshot(sources, out / "whole", whole=True)
    move(parameters, len(SHARES) + 1)
    writer.write_state(policy_sources(model, world.rank), out / "state")
    writer.write_snapshot(sources, out / "after")
    walked = dict(whole_tensors(sources, world.rank))
    if world.rank:
        assert not walked
        return
    exact = {name: tensor.clone().contiguous() for name, tensor in walked.items()}
    from safetensors.torch import save_file

    save_file(exact, out / "walked.safetensors")


def odd_tensors(step: int) -> dict[str, torch.Tensor]:
    """Tensors of shapes and types that are sharded in every way that there is."""
    rng = torch.Generator().manual_seed(step)
    shapes = {"columns": (5, 7), "copied": (4, 3), "rows": (5, 7), "short": (1, 40), "flat": (9,)}
    made = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    for name in ("layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k"):
        made[name] = torch.randn(5, 4, generator=rng)
    return made | {"counts": torch.arange(11) * step, "alone": torch.ones(3) * step}


class OddModel:
    """Its tensors as one rank has them."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        ways = {"columns": Shard(1), "copied": Replicate(), "layers.1.k": Shard(1)}
        self._held = {
            name: tensor
            if name == "alone"
            else distribute_tensor(tensor, mesh, [ways.get(name, Shard(0))])
            for name, tensor in odd_tensors(0).items()
        }

    def become(self, step: int) -> None:
        """Replace the values."""
        for name, tensor in odd_tensors(step).items():
            held = self._held[name]
            if isinstance(held, DTensor):
                tensor = distribute_tensor(tensor, held.device_mesh, held.placements)
            held.copy_(tensor)

    def state_dict(self, *, keep_vars: bool) -> dict[str, torch.Tensor]:
        """The tensors themselves."""
        assert keep_vars
        return self._held


def odd(world: World, out: Path) -> None:
    """Snapshots of tensors that no run of rows is a share of, and that are joined on the first rank."""
    huggingface.checkpoint_tensors = joined
    model: Any = OddModel()
    writer = PolicyExporter(world, chunk=10)
    sources = policy_sources(model, world.rank)
    for step in range(3):
        model.become(step)
        writer.write_snapshot(sources, out / str(step))


def faults(world: World, source: Path, out: Path) -> dict[str, str]:
    """Return the errors of a missing directory, and of ranks that disagree."""
    model = load(source)
    shard(model, (RANKS,))
    writer = PolicyExporter(world, chunk=CHUNK)
    writer.write_snapshot(policy_sources(model, world.rank), out / "0")
    said: dict[str, str] = {}

    def attempt(path: Path) -> Iterable[object]:
        yield writer.write_snapshot(policy_sources(model, world.rank), path)

    said["nowhere"] = refused(attempt(out / "nowhere" / "1"))
    writer.write_snapshot(policy_sources(model, world.rank), out / "2")

    def differ() -> Iterable[object]:
        named = {f"w{world.rank}": torch.zeros(3)}
        yield writer.write_snapshot(named_sources(named, world.rank), out / "3")

    said["differ"] = refused(differ())

    def claim() -> Iterable[object]:
        named = named_sources({"w": torch.zeros(3)}, 0)  # both think that they are the first
        yield writer.write_snapshot(named, out / "3")

    said["claim"] = refused(claim())
    writer.write_snapshot(policy_sources(model, world.rank), out / "4")
    return said


def main() -> None:
    """Arguments: rank, folder."""
    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    place = f"file://{folder / 'store'}"
    dist.init_process_group("cpu:gloo", place, DEADLINE, rank=rank, world_size=RANKS)
    world = World(rank, RANKS, torch.device("cpu"))
    for kind in ("tied", "experts"):
        for name, shape in (("sharded", (RANKS,)), ("replicated", (RANKS, 1))):
            export(world, folder / kind, folder / f"{kind}-{name}", shape)
    said = faults(world, folder / "tied", folder / "faults")
    odd(world, folder / "odd")
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.barrier()  # a rank that leaves first would break the connections of the other
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
