"""Find, record and replay the routers of mixtures of experts.

A transformers router scores all experts, selects the highest with one torch.topk over them, and returns (logits
[N, E], weights [N, k], chosen [N, k]). Nothing else about a model's code is assumed or replaced. A token's
route is its experts, layer by layer; -1 leaves the choice to the router. Imports torch: import this file
lazily.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...protocol.manifests import RouteShape
from ..errors import EngineError
from . import huggingface

ROUTERS = ("gate", "router")
"""Attribute names of the router beside a module's `experts`."""


def mixtures(causal: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield (router, experts) of each mixture layer of `causal`, from the first one on."""
    for module in causal.modules():
        experts: Any = getattr(module, "experts", None)
        routers: list[Any] = [getattr(module, name, None) for name in ROUTERS]
        router = next((router for router in routers if isinstance(router, nn.Module)), None)
        if router is not None and isinstance(getattr(experts, "num_experts", None), int):
            yield router, experts


def route_shape(model_dir: Path) -> RouteShape | None:
    """Return the route shape of a model; None without experts. Raises EngineError.

    Builds the model without weights, as config.json does not say which layers are mixtures.
    """
    routers = [router for router, _ in mixtures(huggingface.empty_model(model_dir))]
    if not routers:
        return None
    sizes = {(int(router.num_experts), int(router.top_k)) for router in routers}
    if len(sizes) != 1:
        raise EngineError(
            f"the layers of {model_dir} have different numbers of experts: "
            "set training.enable_router_replay to false"
        )
    [(experts, top_k)] = sizes
    return RouteShape(layers=len(routers), experts=experts, top_k=top_k)


def check_route_shape(model_dir: Path, wanted: RouteShape) -> None:
    """Raise EngineError unless the model can take routes of the shape `wanted` of a run's manifest."""
    own = route_shape(model_dir)
    if own != wanted:
        model = "no experts" if own is None else _shown(own)
        raise EngineError(
            f"this run's manifest has routes of {_shown(wanted)}, and its model has {model}: leave it, and "
            "tell its operator to begin another one"
        )


def _shown(shape: RouteShape) -> str:
    return f"{shape.top_k} of {shape.experts} experts in {shape.layers} layers"


# -- replay ----------------------------------------------------------------------------------------


class ReplayedRoutes(TorchFunctionMode):
    """Makes routers of `experts` experts select `chosen` [N, k] int64.

    Entries below 0 keep their choice. The router still computes the weights from its own scores, so gradients
    flow as usual (rollout routing replay, R3, arXiv 2510.11370).
    """

    def __init__(self, experts: int, chosen: Tensor) -> None:
        super().__init__()
        self._experts = experts
        self._chosen = chosen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> tuple[Tensor, Tensor] | Any:
        """Replace the result of the topk over all experts."""
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, (_, own) = args[0], result
        if scores.shape != (len(self._chosen), self._experts) or own.shape != self._chosen.shape:
            return result  # a topk over groups of experts
        chosen = torch.where(self._chosen < 0, own, self._chosen)
        return scores.gather(1, chosen), chosen


# -- recording ---------------------------------------------------------------------------------------


OnChoice = Callable[[int, Tensor, Tensor], None]
"""Called with the index of the mixture layer, the scores [N, E] of its experts, and the chosen ones [N, k]."""


class RouterTap:
    """Forward hooks on all routers of a model, which report choices inside watched()."""

    def __init__(self, causal: nn.Module) -> None:
        self._on_choice: OnChoice | None = None
        for layer, (router, _) in enumerate(mixtures(causal)):
            router.register_forward_hook(self._hook(layer))

    @contextmanager
    def watched(self, on_choice: OnChoice | None) -> Generator[None]:
        """Call `on_choice` for every router's choice in the block; None reports nothing."""
        self._on_choice = on_choice
        try:
            yield
        finally:
            self._on_choice = None

    def _hook(self, layer: int) -> Callable[[Any, Any, tuple[Tensor, ...]], None]:
        def hook(router: Any, _: Any, outputs: tuple[Tensor, ...]) -> None:
            if self._on_choice is not None:
                self._on_choice(layer, ranked(outputs[0], router), outputs[2])

        return hook


def ranked(logits: Tensor, router: Any) -> Tensor:
    """Return a router's scores [N, E] of the experts: its logits, or their biased sigmoids."""
    bias = getattr(router, "e_score_correction_bias", None)
    return logits.float() if bias is None else logits.float().sigmoid() + bias


def off_route(scores: Tensor, own: Tensor, claimed: Tensor) -> tuple[Tensor, Tensor]:
    """Compare a layer's claimed experts [N, k] with the router's choice `own` by its scores [N, E].

    Returns the number of claimed experts that were not chosen, [N] int64, and the largest margin by which one
    of them misses the lowest chosen score, [N] fp32; 0 if all were chosen. Entries below 0 are ignored.
    """
    outside = ~(claimed[:, :, None] == own[:, None, :]).any(2) & (claimed >= 0)
    lowest = scores.gather(1, own).amin(1, keepdim=True)
    missing = (lowest - scores.gather(1, claimed.clamp_min(0))).clamp_min(0)
    return outside.sum(1), torch.where(outside, missing, 0.0).amax(1)


def off_routes(outside: Sequence[Tensor], margins: Sequence[Tensor], top_k: int) -> Tensor:
    """Combine off_route()'s results of all layers, [N] each, to [N, 2] fp32.

    Columns: the share of a token's claimed experts that were not chosen, and the largest margin.
    """
    share = torch.stack(list(outside)).sum(0).float() / (len(outside) * top_k)
    return torch.stack([share, torch.stack(list(margins)).amax(0).float()], 1)
