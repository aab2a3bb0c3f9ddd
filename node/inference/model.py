"""Causal model of transformers for the hf engine and the hf auditor: one thread, no asyncio.

A hidden state here is always the head's input, after the last norm: fingerprints are made of these. Only
update() changes a model, between sessions, and checks everything before it writes anything: a refused update
leaves the old weights untouched.
"""

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..config.engine import Quantization
from ..errors import EngineError
from ..models import huggingface
from ..models.routers import RouterTap
from ..models.tensors import to_torch, torch_dtype
from ..weights.state import Changed, State
from .parameter_placement import write
from .quantization import dequantized_state, is_quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = 5
"""Tokens read at the start to test whether the head can be tapped."""
ROOMY = 2**10
"""Tokens that keep a device busy; larger batches do not pad short sequences to a long one."""
FILLED = 0.75
"""Least share of a batch's longest width that each of its sequences fills."""


class LayerHooks(Protocol):
    """Observer of the residual stream between layers, which may replace it."""

    @property
    def layers(self) -> frozenset[int]:
        """Layer counts after which take() is called: at least 1, fewer than the model has."""
        ...

    def take(self, layer: int, x: Tensor) -> Tensor:
        """Read the residual stream `x` [T, d] after `layer` layers; return `x` or its replacement.

        One pass may make several calls for a layer, each for the next tokens.
        """
        ...


class RouterHooks(Protocol):
    """Observer of the experts that the routers of a mixture of experts choose."""

    def take(self, layer: int, scores: Tensor, own: Tensor) -> None:
        """Read a router's scores [T, E] and its choice `own` [T, k].

        `layer` counts the layers with experts. One pass may make several calls for a layer, each for the tokens
        after those of the call before.
        """
        ...


@dataclass(frozen=True)
class ModelOutput:
    """Output of a model after the last token of each of B sequences."""

    hidden: Tensor | None
    """Hidden states [B, d] that led to `logits`; None if the model does not show them."""
    logits: Tensor
    """Logits [B, V] of the next token."""
    routes: Tensor | None = None
    """Experts [B, layers with experts, k] that read the last token; None unless requested."""


class LanguageModel:
    """A transformers model in eval mode, built from a state.

    hidden() and logits() need a head (get_output_embeddings()) that is called once per pass with the states as
    its first argument. Anything else that the architecture does to the head's output (caps, scales) stays its
    own task, so nothing here depends on it. A probe at the start checks that hidden() and logits() together
    give the model's own logits.
    """

    _quantized: torch.dtype | None = None
    """Dtype of the weights if they were quantized, as those of an update then are, too."""

    def __init__(self, model: "PreTrainedModel", state: State) -> None:
        self._model: Any = model
        self._shapes = {name: tensor.shape for name, tensor in state.items()}
        self._places = _places(model, state)
        # models with relative position encodings of their own take no position_ids
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        # transformers 5.24 has renamed this argument and output
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._tap = Tap()
        head: Any = model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(self._tap.feed)
        self._routers = RouterTap(model)
        self._shown = True
        self._shown = _shows(self, self._tap)

    @classmethod
    def build(
        cls,
        model_dir: Path,
        state: State,
        *,
        dtype: str,
        device: str,
        quantization: Quantization = "none",
    ) -> Self:
        """Build the model of `model_dir` with the weights `state`, rounded by `quantization`.

        Raises EngineError if the tensors of `state` are not exactly those of the architecture.
        """
        place = pick_device(device)
        quantized = torch_dtype(dtype) if quantization == "fp8" else None
        if quantized is not None:
            state = dequantized_state(state, quantized)
        model = huggingface.model_from_state(model_dir, state, dtype=dtype, device=place)
        network = cls(model, state)
        network._quantized = quantized
        return network

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding."""
        return self._model.get_input_embeddings().weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._model.device

    def prefill(
        self, tokens: Tensor, mask: Tensor, *, keep_routes: bool = False
    ) -> tuple["Session", ModelOutput]:
        """Read prompts `tokens` [P, T], padded on the left where `mask` [P, T] is False.

        Returns the session of these P sequences and the output after each prompt. With `keep_routes` every
        output of a mixture of experts has routes.
        """
        session = Session(self, mask, keep_routes)
        return session, session.extend(tokens)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the states [B, T, d] that feed the head, for `tokens` [B, T].

        Padding on the right needs no mask. Raises EngineError for an architecture that does not show them.
        """
        self._check_shown()
        with self._tap.cut():  # logits of every position would be large and are not needed
            self._model(input_ids=tokens, use_cache=False)
        return self._tap.taken()

    def packed(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        taps: LayerHooks | None = None,
        routes: RouterHooks | None = None,
    ) -> Tensor:
        """Return the states [T, d] that feed the head, for sequences concatenated in `tokens` [T].

        `lengths` are their tokens. No sequence sees another one: neighbours of similar length are padded to one
        width, and causal attention sees no padding. Does not wait for a GPU. `taps` observe the states between
        layers, `routes` the experts that routers choose. Raises as hidden().
        """
        states: list[Tensor] = []
        rest = list(tokens.split(list(lengths)))
        while rest:
            count = _alike([len(sequence) for sequence in rest])
            batch, rest = rest[:count], rest[count:]
            watched = None if routes is None else partial(_take_unpadded, routes, batch)
            hooked = nullcontext() if taps is None else self._hooked(taps, batch)
            with hooked, self._routers.watched(watched):
                hidden = self.hidden(pad_sequence(batch, batch_first=True))
            states += _unpadded(hidden, batch)
        return torch.cat(states)

    @contextmanager
    def _hooked(self, taps: LayerHooks, batch: Sequence[Tensor]) -> Generator[None]:
        """Call `taps` with the states between layers of the padded sequences of `batch`."""

        def take(layer: int, states: Tensor) -> Tensor:
            unpadded = torch.cat(_unpadded(states, batch))
            replaced = taps.take(layer, unpadded)
            if replaced is unpadded:
                return states
            return pad_sequence(
                list(replaced.split([len(sequence) for sequence in batch])), batch_first=True
            )

        def hook(layer: int) -> Any:
            def seen(_: Any, __: Any, output: Any) -> Any:
                if isinstance(output, tuple):
                    return take(layer, output[0]), *output[1:]
                return take(layer, output)

            return seen

        blocks = huggingface.layers_of(self._model)
        handles = [blocks[layer - 1].register_forward_hook(hook(layer)) for layer in taps.layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of states [..., d] with the model's own head. Raises as hidden().

        The model reads one token, and its head gets `hidden` as input.
        """
        self._check_shown()
        with self._tap.put(hidden.reshape(1, -1, hidden.shape[-1])):
            logits = self.read(torch.zeros(1, 1, dtype=torch.int64, device=self.device))
        return logits.view(*hidden.shape[:-1], -1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits [B, T, V] of `tokens` [B, T]; padding on the right needs no mask."""
        logits = self.read(tokens)
        self._tap.forget()
        return logits

    def update(self, state: State, changed: Changed) -> bool:
        """Write the elements of `state` that `changed` names in place; see check_update().

        Returns False, and writes nothing, if the model keeps a tensor in another layout, or if `state` does not
        fit: building another model then reports the error. No session may be in progress.
        """
        if {name: tensor.shape for name, tensor in state.items()} != self._shapes:
            return False
        if not changed.keys() <= self._places.keys():
            return False
        if self._quantized is not None:
            # a row's scale may change with one of its weights
            state = dequantized_state(state, self._quantized, changed.keys())
            whole = {name for name, tensor in state.items() if is_quantized(name, tensor.shape)}
            changed = {name: None if name in whole else at for name, at in changed.items()}
        for name, positions in changed.items():
            write(self._places[name], state[name], positions)
        return True

    def read(self, tokens: Tensor) -> Tensor:
        """Run one plain pass, which fills the tap; return the model's own logits."""
        return self._model(input_ids=tokens, use_cache=False).logits

    def run(
        self, tokens: Tensor, mask: Tensor, cache: Any, keep_routes: bool = False
    ) -> tuple[ModelOutput, Any]:
        """Append `tokens` [B, N] to `cache` under `mask` [B, all]; return last output and cache."""
        extra: dict[str, Any] = {self._cache_name: cache}
        if self._takes_positions:
            positions = (mask.long().cumsum(1) - 1).clamp_min(0)
            extra["position_ids"] = positions[:, -tokens.shape[1] :]
        last: list[Tensor] = []

        def take(_layer: int, _scores: Tensor, chosen: Tensor) -> None:
            last.append(chosen.view(*tokens.shape, -1)[:, -1])

        with self._routers.watched(take if keep_routes else None):
            output = self._model(
                input_ids=tokens,
                attention_mask=mask.long(),
                use_cache=True,
                logits_to_keep=1,
                **extra,
            )
        # a contiguous copy: a view would keep the states of the whole prompt
        hidden = self._tap.taken()[:, -1].contiguous() if self._shown else None
        routes = torch.stack(last, 1) if last else None
        return ModelOutput(hidden, output.logits[:, -1], routes), output[self._cache_name]

    def _check_shown(self) -> None:
        if not self._shown:
            raise EngineError(
                f"{type(self._model).__name__} does not show the hidden states that feed its head: "
                "choose another model, or a run without fingerprints"
            )


class Session:
    """Sequences that are generated together, and the cache that the model made for them."""

    def __init__(self, network: LanguageModel, mask: Tensor, keep_routes: bool) -> None:
        self._network = network
        self._mask = mask
        self._keep_routes = keep_routes
        self._cache: Any = None

    def extend(self, tokens: Tensor) -> ModelOutput:
        """Append `tokens` [B, N], which the mask already counts."""
        output, self._cache = self._network.run(tokens, self._mask, self._cache, self._keep_routes)
        return output

    def select(self, rows: Tensor) -> None:
        """Keep rows `rows` [N] int64 of the cache, in that order; a row may be repeated."""
        self._mask = self._mask[rows]
        for layer in self._cache.layers:
            # states of linear attention can only be reordered, which also allows fewer rows (transformers 5.24)
            select = getattr(layer, "batch_select_indices", layer.reorder_cache)
            select(rows)

    def step(self, tokens: Tensor) -> ModelOutput:
        """Append `tokens` [B] and read them."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], 1)
        return self.extend(tokens[:, None])


class Tap:
    """Pre-hook of the head that keeps the head's input and may replace it."""

    def __init__(self) -> None:
        self._seen: Tensor | None = None
        self._cut = False
        self._instead: Tensor | None = None

    def feed(self, head: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the head's arguments in place of `inputs`, or None to keep them: the hook itself."""
        if self._instead is not None:
            return (self._instead, *inputs[1:])
        self._seen = inputs[0]
        return (inputs[0][:, -1:], *inputs[1:]) if self._cut else None

    def taken(self) -> Tensor:
        """Return the head's input [B, N, d] since the last call. Raises LookupError without one."""
        states, self._seen = self._seen, None
        if states is None:
            raise LookupError("the head was not called")
        return states

    def forget(self) -> None:
        """Release the stored tensor."""
        self._seen = None

    @contextmanager
    def cut(self) -> Generator[None]:
        """Give the head only the last position."""
        self._cut = True
        try:
            yield
        finally:
            self._cut = False

    @contextmanager
    def put(self, hidden: Tensor) -> Generator[None]:
        """Give the head `hidden` [B, N, d] in place of the model's own states."""
        self._instead = hidden
        try:
            yield
        finally:
            self._instead = None


def _shows(network: LanguageModel, tap: Tap) -> bool:
    """Return whether the head can be tapped and turns the states into the model's logits."""
    tokens = torch.arange(PROBE, device=network.device)[None] % network.vocab_size
    with torch.inference_mode():
        wanted = network.read(tokens)
        try:
            hidden = tap.taken()
        except LookupError:
            return False
        if hidden.ndim != 3 or hidden.shape[:2] != tokens.shape:
            return False
        logits = network.logits(hidden)
        near = 1e-3 * float(wanted.abs().nan_to_num(0.0, 0.0).max())
        same = torch.allclose(logits, wanted, rtol=0.0, atol=near, equal_nan=True)
        again = network.hidden(tokens)
        return same and torch.allclose(again, hidden, rtol=0.0, atol=0.0, equal_nan=True)


def _take_unpadded(
    routes: RouterHooks, batch: Sequence[Tensor], layer: int, *outputs: Tensor
) -> None:
    scores, own = (
        torch.cat(_unpadded(output.unflatten(0, (len(batch), -1)), batch)) for output in outputs
    )
    routes.take(layer, scores, own)


def _unpadded(padded: Tensor, batch: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of `padded` [B, T, d] without padding, each [tokens, d]."""
    return [row[: len(sequence)] for row, sequence in zip(padded, batch, strict=True)]


def _alike(lengths: Sequence[int]) -> int:
    """Return how many of the first sequences may be padded to one width."""
    shortest = longest = lengths[0]
    for count, length in enumerate(lengths):
        shortest, longest = min(shortest, length), max(longest, length)
        if longest * (count + 1) > ROOMY and shortest < FILLED * longest:
            return max(1, count)
    return len(lengths)


def _places(model: "PreTrainedModel", state: State) -> dict[str, Tensor]:
    """Map checkpoint names to flat views of the parameters that hold the same elements.

    transformers may keep a checkpoint's tensor under another name, transposed, or fused with others: the
    parameter of the same name counts only if it holds the same elements in the same order.
    """
    places: dict[str, Tensor] = {}
    for name, own in model.state_dict().items():
        tensor = state.get(name)
        if tensor is None or tensor.shape != own.shape or not own.is_contiguous():
            continue
        if own.equal(to_torch(tensor, own.device, own.dtype)):
            places[name] = own.view(-1)
    return places


def pick_device(device: str) -> torch.device:
    """Return the torch device; `auto` is cuda where available, else cpu."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)
