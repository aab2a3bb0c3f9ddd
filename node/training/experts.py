"""Mixtures of experts: fp32 routers, replay of the samplers' routes, expert load.

Imports torch: import lazily. Counts are only good as shares: tokens recomputed in backward may be counted
twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ...protocol.manifests import RouteShape
from ..errors import EngineError
from ..models.device import upload_array
from ..models.routers import ReplayedRoutes, mixtures
from ..models.routes import route_fault, unpack_routes
from .packing import MicroBatch
from .world import World

COLD = 0.1
"""An expert with less than this share of the mean is cold."""


class ExpertLoad:
    """Tokens that each expert of each layer has read on this rank since reset()."""

    def __init__(self, counts: list[Tensor], world: World) -> None:
        self._counts = counts
        self._world = world

    def reset(self) -> None:
        """Set all counts to 0 for a new step."""
        for counts in self._counts:
            counts.zero_()

    def figures(self) -> dict[str, float]:
        """Return load metrics over the tokens of all ranks, by prime-rl's names. Collective.

        Each is folded over layers into mean and maximum. `max_mean` is the busiest expert's load over the mean
        (1 is balance), `cv` the standard deviation over the mean, `cold_frac` the fraction of experts that read
        next to nothing. Empty without experts or tokens.
        """
        if not self._counts:
            return {}
        flat = torch.cat(self._counts).tolist()
        whole = torch.tensor(self._world.total(flat), dtype=torch.float64)
        layers = [
            layer for layer in whole.split([len(layer) for layer in self._counts]) if layer.any()
        ]
        spreads = [_spread(layer / layer.mean()) for layer in layers]
        return {
            f"expert_load/{name}/{fold}": value
            for name in (spreads[0] if spreads else ())
            for fold, value in _folds([spread[name] for spread in spreads])
        }


class RouterReplay:
    """Routes for a model's next forward pass, and for its recomputation in backward.

    Rollout routing replay (R3, arXiv 2510.11370).
    """

    def __init__(self) -> None:
        self.shape: RouteShape | None = None
        """Shape of the model's routes; None without experts."""
        self.routes: Tensor | None = None
        """[layers, T, top_k] int64, below 0 where the router chooses; None: the routers choose everywhere."""

    def fault(self, routes: bytes, tokens: int) -> str:
        """Return why `routes` do not fit `tokens` tokens of this model; empty if they do."""
        if not routes:
            return ""
        return "no mixture" if self.shape is None else route_fault(routes, tokens, self.shape)

    def set(self, row: MicroBatch, device: torch.device) -> None:
        """Set the routes of a row, or of a rank's part of one."""
        self.routes = None
        if self.shape is None or not len(row.routed):
            return
        own = upload_array(unpack_routes(row.routes, self.shape), device)
        whole = own.new_full((len(row.token_ids), *own.shape[1:]), -1)
        whole[upload_array(row.routed, device)] = own
        self.routes = whole.transpose(0, 1).long()


def prepare(
    causal: nn.Module, world: World, *, freeze_router: bool, count: bool
) -> tuple[ExpertLoad, RouterReplay]:
    """Make every router of `causal` compute in fp32 and replay the routes it is given.

    With `count`, count the tokens of every expert. Call before compilation and sharding. A model without
    experts is not changed.
    """
    counts: list[Tensor] = []
    replay = RouterReplay()
    for layer, (router, experts) in enumerate(mixtures(causal)):
        if freeze_router:
            router.requires_grad_(False)
        router.forward = _exactly(router, replay, layer)
        replay.shape = RouteShape(layer + 1, int(experts.num_experts), int(router.top_k))
        if count:
            read = torch.zeros(experts.num_experts, dtype=torch.int64, device=world.device)
            experts.forward = _counting(experts.forward, read)
            counts.append(read)
    return ExpertLoad(counts, world), replay


# -- routers ---------------------------------------------------------------------------------------


class _Exact:
    """A view of a module for its forward, with parameters in fp32.

    Parameters that are bf16 in forward keep their published values: the router chooses by the weights that
    samplers have; only products and sums are exact.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _exactly(router: Any, replay: RouterReplay, layer: int) -> Callable[[Tensor], Any]:
    """Make an fp32 forward of `router`, logits and top-k weights included.

    `replay` may prescribe the experts.
    """
    inner: Callable[..., Any] = type(router).forward
    experts = int(router.num_experts)

    def forward(hidden: Tensor) -> Any:
        routes = replay.routes
        with torch.autocast(hidden.device.type, enabled=False):
            if routes is None:
                return inner(_Exact(router), hidden.float())
            with ReplayedRoutes(experts, routes[layer]):
                return inner(_Exact(router), hidden.float())

    return forward


# -- counting --------------------------------------------------------------------------------------


@torch.library.custom_op("primerl::count_chosen", mutates_args=("counts",))
def count_chosen(counts: Tensor, chosen: Tensor) -> None:
    """Add to `counts` [E] how often each expert is in `chosen`, without waiting for the device.

    A custom operator, so that compilation and checkpointing do not see its writes.
    """
    flat = chosen.flatten().long()
    counts.scatter_add_(0, flat, torch.ones_like(flat))


@count_chosen.register_fake
def _(counts: Tensor, chosen: Tensor) -> None:
    return None


def _counting(forward: Callable[..., Tensor], counts: Tensor) -> Callable[..., Tensor]:
    def counted(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        torch.ops.primerl.count_chosen(counts, top_k_index)
        return forward(hidden_states, top_k_index, top_k_weights)

    return counted


def _spread(shares: Tensor) -> dict[str, float]:
    """Return the spread of one layer's tokens by expert; `shares` are counts over their mean."""
    return {
        "max_mean": float(shares.max()),
        "cv": float(shares.std(correction=0)),
        "cold_frac": float((shares < COLD).double().mean()),
    }


def _folds(values: list[float]) -> list[tuple[str, float]]:
    return [("mean", sum(values) / len(values)), ("max", max(values))]


def share_out(causal: nn.Module, ranks: int, world: World, dtype: torch.dtype) -> set[nn.Parameter]:
    """Give each of `ranks` its part of all experts of `causal`, which compute in `dtype`.

    Returns the parameters that must not be sharded again. Call before compilation and sharding. Raises
    EngineError.
    """
    if ranks == 1:
        return set()
    mesh = world.mesh
    if mesh is None or mesh.ndim != 1 or mesh.size() != ranks:
        raise EngineError(
            f"expert_parallel is {ranks}: set it to the number of ranks, {world.size}, and fsdp.replicas to 1"
        )
    expert_modules: list[Any] = [module for module in causal.modules() if _has_experts(module)]
    if not expert_modules:
        raise EngineError(f"{type(causal).__name__} has no experts: set expert_parallel to 1")
    for experts in expert_modules:
        if experts.num_experts % ranks:
            raise EngineError(
                f"{experts.num_experts} experts are not divisible by expert_parallel {ranks}: take a divisor"
            )
        for name, whole in list(experts.named_parameters(recurse=False)):
            setattr(experts, name, _own_rows(whole, mesh, world.device))
        own = _Own(experts, experts.num_experts // ranks, dtype)
        experts.forward = torch.compiler.disable(_travelling(own, mesh))  # reads sizes in Python
    return {parameter for experts in expert_modules for parameter in experts.parameters()}


def _has_experts(module: Any) -> bool:
    """Return whether all experts' weights are one tensor, by transformers' convention."""
    return hasattr(module, "_apply_gate") and isinstance(getattr(module, "num_experts", None), int)


def _own_rows(whole: nn.Parameter, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    mine = whole.detach().chunk(mesh.size())[mesh.get_local_rank()]
    mine = mine.clone().to(device)  # a view would keep the whole tensor alive
    shard = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
    owned = nn.Parameter(shard, requires_grad=whole.requires_grad)
    if owned.requires_grad:
        # experts read tokens of all ranks, so their gradients are sums; elsewhere FSDP takes the mean
        owned.register_hook(_divided_by(mesh.size()))
    return owned


def _divided_by(ranks: int) -> Callable[[Tensor], Tensor]:
    return lambda grad: grad / ranks


class _Own:
    """A view of a module of experts for its forward: only this rank's experts."""

    def __init__(self, experts: Any, count: int, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype
        self.num_experts = count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to_local().to(self._dtype) if isinstance(value, DTensor) else value

    def run(self, hidden: Tensor, chosen: Tensor) -> Tensor:
        """Apply to each row of `hidden` [N, d] its expert `chosen` [N]."""
        forward: Callable[..., Tensor] = type(self._experts).forward
        return forward(self, hidden, chosen[:, None], hidden.new_ones(len(hidden), 1))


@dataclass(frozen=True)
class _Journey:
    """Numbers of rows, sorted by expert, exchanged between ranks."""

    there: list[int]
    """Rows sent to each rank."""
    here: list[int]
    """Rows received from each rank."""
    chosen: Tensor
    """[sum(here)]: index of this rank's expert for each received row."""


def _travelling(own: _Own, mesh: DeviceMesh) -> Callable[..., Tensor]:
    """Make the forward of experts that are divided among ranks."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        flat = top_k_index.flatten()
        order = flat.argsort(stable=True)
        journey = _plan(flat, own.num_experts, mesh)
        sent = hidden_states[order // top_k_index.shape[1]]
        came = all_to_all_single_autograd(sent, journey.here, journey.there, mesh)
        if len(journey.chosen):
            computed = own.run(came, journey.chosen)
        else:  # no rows received: a row of zeros keeps collective operations in step
            alone = torch.cat([came, came.new_zeros(1, came.shape[1])])
            computed = own.run(alone, journey.chosen.new_zeros(1))[:0]
        back = all_to_all_single_autograd(computed.contiguous(), journey.there, journey.here, mesh)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)).to(order))
        parts = back[places].view(*top_k_index.shape, -1)
        return (parts * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)

    return forward


def _plan(chosen: Tensor, count: int, mesh: DeviceMesh) -> _Journey:
    """Exchange the row counts of all experts, `count` on each rank: a layer's only wait."""
    ranks = mesh.size()
    there = chosen.new_zeros(ranks * count).scatter_add_(0, chosen, torch.ones_like(chosen))
    here = torch.empty_like(there)
    dist.all_to_all_single(here, there, group=mesh.get_group())
    counts = torch.stack([there, here]).view(2, ranks, count)
    sent, came = counts.sum(2).tolist()
    experts = torch.arange(count, device=chosen.device).repeat(ranks)
    return _Journey(sent, came, experts.repeat_interleave(here, output_size=sum(came)))
