"""Routers of mixtures of experts: which modules they are, what they chose, and other experts in place of those.

A router of transformers scores every expert, takes the highest by one torch.topk over all of them, and returns
(logits [N, E], weights [N, k], chosen [N, k]). Nothing else of a model's own code is assumed or replaced. The
experts of a token, layer by layer, are its route; -1 stands for an expert that the router chooses itself.
Imports torch: import this file lazily.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...protocol.manifests import RouteShape
from ..ops.errors import EngineError
from . import huggingface

ROUTERS = ("gate", "router")
"""What models call the module beside their `experts` that chooses among them."""


def mixtures(causal: nn.Module) -> Iterator[tuple[Any, Any]]:
    """(router, experts) of each layer of `causal` that has them, from the lowest on."""
    for module in causal.modules():
        experts: Any = getattr(module, "experts", None)
        routers: list[Any] = [getattr(module, name, None) for name in ROUTERS]
        router = next((one for one in routers if isinstance(one, nn.Module)), None)
        if router is not None and isinstance(getattr(experts, "num_experts", None), int):
            yield router, experts


def route_shape(model_dir: Path) -> RouteShape | None:
    """The shape of the routes of a model, None of one without experts. Raises EngineError.

    The model is built without weights: config.json alone does not say which layers are mixtures.
    """
    found = [router for router, _ in mixtures(huggingface.empty_model(model_dir))]
    if not found:
        return None
    sizes = {(int(one.num_experts), int(one.top_k)) for one in found}
    if len(sizes) != 1:
        raise EngineError(
            f"the layers of {model_dir} have different numbers of experts: "
            "set training.enable_router_replay to false"
        )
    [(experts, top_k)] = sizes
    return RouteShape(layers=len(found), experts=experts, top_k=top_k)


# -- choosing what was chosen ----------------------------------------------------------------------


class ReplayedRoutes(TorchFunctionMode):
    """Within it a router of `experts` takes the `chosen` [N, k] int64 in place of its own; below 0: its own.

    What it makes of their scores stays its own code, so weights have gradients as ever (rollout routing replay,
    R3, arXiv 2510.11370).
    """

    def __init__(self, experts: int, chosen: Tensor) -> None:
        super().__init__()
        self._experts = experts
        self._chosen = chosen

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> tuple[Tensor, Tensor] | Any:
        """Replace the one choice among all experts."""
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores, (_, own) = args[0], found
        if scores.shape != (len(self._chosen), self._experts) or own.shape != self._chosen.shape:
            return found  # a choice among groups of experts
        chosen = torch.where(self._chosen < 0, own, self._chosen)
        return scores.gather(1, chosen), chosen


# -- watching ----------------------------------------------------------------------------------------


Seen = Callable[[int, Tensor, Tensor], None]
"""Is told the layer (among those with experts), the scores [N, E] of its experts, and the chosen [N, k]."""


class RouterTap:
    """Hooks of all routers of a model that tell of each choice while it is watched."""

    def __init__(self, causal: nn.Module) -> None:
        self._seen: Seen | None = None
        for layer, (router, _) in enumerate(mixtures(causal)):
            router.register_forward_hook(self._hook(layer))

    @contextmanager
    def watched(self, seen: Seen | None) -> Generator[None]:
        """Tell `seen` of every choice that is made within."""
        self._seen = seen
        try:
            yield
        finally:
            self._seen = None

    def _hook(self, layer: int) -> Callable[[Any, Any, tuple[Tensor, ...]], None]:
        def hook(router: Any, _: Any, found: tuple[Tensor, ...]) -> None:
            if self._seen is not None:
                self._seen(layer, ranked(found[0], router), found[2])

        return hook


def ranked(logits: Tensor, router: Any) -> Tensor:
    """The scores [N, E] by which `router` ranks experts of these `logits`: logits, or what a bias makes of
    them."""
    bias = getattr(router, "e_score_correction_bias", None)
    return logits.float() if bias is None else logits.float().sigmoid() + bias


def off_route(scores: Tensor, own: Tensor, claimed: Tensor) -> tuple[Tensor, Tensor]:
    """How far experts `claimed` [N, k] of a layer are from the choice `own` [N, k] by `scores` [N, E].

    Returns how many of them were not chosen [N] int64, and the margin [N] fp32 by which the worst of these
    misses the lowest score that was chosen: 0 where all were. Claims below 0 are no claims.
    """
    outside = ~(claimed[:, :, None] == own[:, None, :]).any(2) & (claimed >= 0)
    lowest = scores.gather(1, own).amin(1, keepdim=True)
    missing = (lowest - scores.gather(1, claimed.clamp_min(0))).clamp_min(0)
    return outside.sum(1), torch.where(outside, missing, 0.0).amax(1)


def off_routes(outside: Sequence[Tensor], margins: Sequence[Tensor], top_k: int) -> Tensor:
    """How far routes are from what routers chose [N, 2] fp32, from off_route() of each layer, [N] each.

    The share of a token's experts that were not chosen, and by how much the worst of these misses it.
    """
    share = torch.stack(list(outside)).sum(0).float() / (len(outside) * top_k)
    return torch.stack([share, torch.stack(list(margins)).amax(0).float()], 1)
