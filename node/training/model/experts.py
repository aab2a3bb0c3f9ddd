"""Mixtures of experts: routers in fp32, and how evenly tokens are spread over experts. Imports torch lazily.

What is counted is only good for shares: what is computed again in backward may be counted twice.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..world import World

ROUTERS = ("gate", "router")
"""What models call the module beside their `experts` that says who of them reads a token."""
COLD = 0.1
"""An expert that gets less than this share of the mean is cold."""


class ExpertLoad:
    """How many tokens each expert of each layer has read on this rank since reset()."""

    def __init__(self, counts: list[Tensor], world: World) -> None:
        self._counts = counts
        self._world = world

    def reset(self) -> None:
        """A step begins."""
        for one in self._counts:
            one.zero_()

    def figures(self) -> dict[str, float]:
        """Over the tokens of all ranks, by prime-rl's names: mean and maximum over layers. Collective.

        `max_mean` is the busiest expert's share of the mean (1 is balance), `cv` the standard deviation's,
        `cold_frac` the fraction of experts that read next to nothing. Empty without experts or tokens.
        """
        if not self._counts:
            return {}
        flat = torch.cat(self._counts).tolist()
        whole = torch.tensor(self._world.total(flat), dtype=torch.float64)
        layers = [one for one in whole.split([len(one) for one in self._counts]) if one.any()]
        found = [_spread(one / one.mean()) for one in layers]
        return {
            f"expert_load/{name}/{fold}": value
            for name in (found[0] if found else ())
            for fold, value in _folds([one[name] for one in found])
        }


def prepare(causal: nn.Module, world: World, *, freeze_router: bool, count: bool) -> ExpertLoad:
    """Have every router of `causal` compute in fp32 and, with `count`, every expert's tokens be counted.

    Before compilation and sharding. A model without experts is left as it is.
    """
    counts: list[Tensor] = []
    for router, experts in _mixtures(causal):
        if freeze_router:
            router.requires_grad_(False)
        router.forward = _exactly(router)
        if count:
            read = torch.zeros(experts.num_experts, dtype=torch.int64, device=world.device)
            experts.forward = _counting(experts.forward, read)
            counts.append(read)
    return ExpertLoad(counts, world)


def _mixtures(causal: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(router, experts) of each layer that has them."""
    for module in causal.modules():
        experts: Any = getattr(module, "experts", None)
        routers: list[Any] = [getattr(module, name, None) for name in ROUTERS]
        router = next((one for one in routers if isinstance(one, nn.Module)), None)
        if router is not None and isinstance(getattr(experts, "num_experts", None), int):
            yield router, experts


# -- routers ---------------------------------------------------------------------------------------


class _Exact:
    """A module as its forward sees it, its parameters in fp32.

    Where parameters are bf16 in forward they stay those that are published: the router chooses by the
    weights that samplers have, only products and sums are exact.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _exactly(router: Any) -> Callable[[Tensor], Any]:
    """The forward of `router` in fp32, logits and weights of the chosen included."""
    inner: Callable[..., Any] = type(router).forward

    def forward(hidden: Tensor) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return inner(_Exact(router), hidden.float())

    return forward


# -- counting --------------------------------------------------------------------------------------


@torch.library.custom_op("primerl::count_chosen", mutates_args=("counts",))
def count_chosen(counts: Tensor, chosen: Tensor) -> None:
    """Add to `counts` [E] how often each expert is in `chosen`; no device is waited for.

    One operator, so that compilation and checkpointing do not look at what it writes.
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
    """Of one layer's tokens by expert, over their mean."""
    return {
        "max_mean": float(shares.max()),
        "cv": float(shares.std(correction=0)),
        "cold_frac": float((shares < COLD).double().mean()),
    }


def _folds(values: list[float]) -> list[tuple[str, float]]:
    return [("mean", sum(values) / len(values)), ("max", max(values))]
