"""A loss of the operator's own, by import path. Imports torch: import this file lazily.

Code is only ever named by the operator's config file, never by a peer; what it returns is checked, so that a
slip in it is one line that says so and not a broadcast that trains something else.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ...ops.errors import UsageError
from .formulas import TokenInputs, TokenLoss


def load_custom(path: str, arguments: dict[str, Any]) -> Callable[[TokenInputs], TokenLoss]:
    """The function that `path` ("package.module:function") names, given `arguments` at each call.

        function(inputs: TokenInputs, **arguments) -> TokenLoss

    Its values [N] need the gradient of inputs.logprobs. It is not called where there is no token. Raises
    UsageError if it cannot be had, and at a call whose result does not fit.
    """
    function = _find(path)
    try:
        inspect.signature(function).bind(None, **arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"training.loss.custom = {path!r} cannot be called with the inputs and custom_args "
            f"{sorted(arguments)}: {error}"
        ) from error

    def checked(inputs: TokenInputs) -> TokenLoss:
        result = function(inputs, **arguments)
        if fault := _fault(result, inputs):
            raise UsageError(f"training.loss.custom = {path!r} {fault}")
        return result

    return checked


def _find(path: str) -> Callable[..., Any]:
    name, _, attribute = path.partition(":")
    try:
        module = import_module(name)  # once: later calls find it in sys.modules
    except (ImportError, SyntaxError) as error:
        raise UsageError(
            f"training.loss.custom = {path!r} does not import ({error}): install the package, or name "
            "its folder in PYTHONPATH of this node and of its ranks"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise UsageError(f"training.loss.custom = {path!r}: {name} has no {attribute!r}; define it")
    if not callable(found):
        raise UsageError(f"training.loss.custom = {path!r} is not a function: name one")
    return found


def _fault(result: object, inputs: TokenInputs) -> str | None:
    """What is wrong with what a custom loss returned, or None."""
    if not isinstance(result, TokenLoss):
        return f"returned {type(result).__name__}: return a TokenLoss (TokenLoss.unmasked(values))"
    shape = inputs.logprobs.shape
    for name in ("values", "masked_low", "masked_high"):
        tensor = getattr(result, name)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            found = list(getattr(tensor, "shape", ())) or type(tensor).__name__
            return f"returned {name} of {found}: one number per token is wanted, {list(shape)}"
    if result.masked_low.dtype != torch.bool or result.masked_high.dtype != torch.bool:
        return (
            "returned masks that are not torch.bool: use comparisons or TokenLoss.unmasked(values)"
        )
    if (
        inputs.logprobs.requires_grad
        and torch.is_grad_enabled()
        and not result.values.requires_grad
    ):
        return "returned values without gradient: compute them from inputs.logprobs, not detached"
    if _finite(result.values):
        return None
    if not _finite(inputs.logprobs, inputs.behaviour, inputs.advantages):
        return None  # not its fault, and the learner skips a step that is not finite
    count = int((~result.values.detach().isfinite()).sum())
    return f"returned {count} values that are not finite from finite inputs: clamp log ratios"


def _finite(*tensors: torch.Tensor) -> bool:
    return all(bool(tensor.detach().isfinite().all()) for tensor in tensors)
