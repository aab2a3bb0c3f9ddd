"""The part of a model that one stage holds, and what is prepared to become its weights.

Preparing checks everything and changes nothing; writing cannot fail for what the state is. Whoever writes says
when: between two micro-batches.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import models
from ...errors import EngineError, one_line
from ...pipeline.place import Place
from ...weights.state import Changed, State
from ...weights.state import Tensor as StateTensor
from ..network import pick_device
from ..placement import write
from ..qwen3 import Qwen3Network, computes
from ..qwen3_shapes import check_state, shapes
from ..requests import check_update


@dataclass(frozen=True)
class Values:
    """New elements of one tensor; `positions` None: all of it."""

    positions: Tensor | None
    values: Tensor


@dataclass(frozen=True)
class Prepared:
    """A version that can be written: all of it, or what differs from the one prepared before it."""

    version: int
    network: Qwen3Network | None
    values: dict[str, Values]


class Slice:
    """The layers of one stage of a plan. open() first; then prepare and write, in that order of versions."""

    def __init__(self, place: Place, device: str) -> None:
        self._place = place
        self._device = pick_device(device)
        self._config: Any = None
        self._own: dict[str, tuple[int, ...]] = {}
        self._all: dict[str, tuple[int, ...]] = {}
        self._network: Qwen3Network | None = None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    @property
    def network(self) -> Qwen3Network:
        """What was written last. Raises EngineError before that."""
        if self._network is None:
            raise EngineError("this stage holds no weights: load a policy version first")
        return self._network

    @property
    def holds(self) -> bool:
        """Whether anything was written."""
        return self._network is not None

    @property
    def vocab_size(self) -> int:
        """Of the whole model."""
        return self._config.vocab_size

    def open(self, model_dir: Path) -> None:
        """Read the model's config. Raises EngineError if the plan is not for it, or nobody here computes it."""
        config = models.load_config(model_dir)
        plan, stage = self._place.plan, self._place.stage
        if not computes(config):
            raise EngineError(
                f"engine.type hf computes stages of dense Qwen3 models only, not of {config.model_type}: "
                "choose engine.type vllm"
            )
        if (plan.layers, plan.shape.hidden_size) != (config.num_hidden_layers, config.hidden_size):
            raise EngineError(
                f"the plan is for a model of {plan.layers} layers of width {plan.shape.hidden_size}, this one "
                f"has {config.num_hidden_layers} of {config.hidden_size}: join the run of this plan"
            )
        self._config = config
        self._all = shapes(config)
        self._own = shapes(config, range(stage.first, stage.end))

    def prepare_load(self, version: int, state: State) -> Prepared:
        """A network of `state`, which has the stage's tensors or all. Raises EngineError."""
        own = self._part(state)
        stage = self._place.stage
        try:
            network = Qwen3Network(
                self._config,
                own,
                dtype=self._place.shape.dtype,
                device=self._device,
                layers=range(stage.first, stage.end),
            )
        except RuntimeError as error:  # torch's own: no memory, no such device
            raise EngineError(
                f"policy {version} cannot be loaded ({one_line(error)}): "
                "check engine.device and free memory"
            ) from error
        return Prepared(version, network, {})

    def prepare_update(self, version: int, state: State, changed: Changed) -> Prepared:
        """What of `changed` is ours, copied to the device. Raises EngineError."""
        own = self._part(state)
        if unknown := changed.keys() - self._all.keys():
            raise EngineError(f"the update changes {min(unknown)}, which the model lacks: load it")
        ours = {name: positions for name, positions in changed.items() if name in own}
        check_update(own, ours)
        return Prepared(
            version, None, {name: self._values(own[name], at) for name, at in ours.items()}
        )

    def write(self, prepared: Prepared) -> None:
        """Make `prepared` the weights. What was prepared before it must have been written before it."""
        if prepared.network is not None:
            self._network = prepared.network
        places = self.network.places
        for name, one in prepared.values.items():
            if one.positions is None:
                places[name].copy_(one.values)
            else:
                places[name].index_copy_(0, one.positions, one.values)

    def _part(self, state: State) -> State:
        if extra := state.keys() - self._all.keys():
            raise EngineError(f"the state has {min(extra)} too many: load a state of this model")
        own = {name: tensor for name, tensor in state.items() if name in self._own}
        check_state(own, self._own)
        return own

    def _values(self, tensor: StateTensor, positions: "np.ndarray[Any, Any] | None") -> Values:
        dtype = models.torch_dtype(self._place.shape.dtype)
        count = tensor.data.size if positions is None else len(positions)
        flat = torch.empty(count, dtype=dtype, device=self._device)
        if positions is None:
            write(flat, tensor, None)
            return Values(None, flat)
        taken = StateTensor(tensor.dtype, (count,), tensor.data[positions])
        write(flat, taken, None)
        return Values(torch.from_numpy(positions.copy()).to(self._device), flat)
