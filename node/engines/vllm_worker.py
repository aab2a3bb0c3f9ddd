"""What runs inside vLLM's worker process: checking and replacing the model's weights in place.

vLLM imports this module there by name (`worker_extension_cls`) before it builds the model; nothing
else may import it, which is why it may import vLLM and torch at the top. All its names start with
`primerl_`: vLLM refuses an extension whose names meet its own worker's.
"""

import logging
import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]

_WRITES = (torch.ops.aten.copy_, torch.ops.aten.fill_, torch.ops.aten.zero_)
_LOADER_FAULTS = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, ValueError)
"""What vLLM's weight loaders raise for a tensor that does not fit."""


def _keep_plain_weights() -> None:
    """On a CPU, keep every linear layer's weight where it can be replaced.

    vLLM moves it into an opaque oneDNN handler and leaves an empty tensor behind: a later update
    would fail, or for the output head silently do nothing. The plain product gives the same fp32
    numbers at the same speed. There is no option for this, so the dispatcher is replaced.
    """
    from vllm.model_executor.layers import utils  # pyright: ignore
    from vllm.platforms import current_platform  # pyright: ignore

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = _plain_linear


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


_keep_plain_weights()  # at import, because vLLM gives an extension no call before the model is built


class WorkerExtension:
    """Mixed into vLLM's worker class; its methods are called by name through collective_rpc."""

    model_runner: Any
    _primerl_shapes: Shapes

    def primerl_attach(self, node_pid: int) -> int:
        """Make this process end with the node's, however that ends. Returns this process's id."""
        # a daemon thread: it must die with the process, and has nothing to clean up
        threading.Thread(target=_end_with, args=(node_pid,), daemon=True).start()
        return os.getpid()

    def primerl_check(self, path: str) -> str:
        """Say what is wrong with the weights in a safetensors file; "" if nothing. Writes nothing."""
        shapes = _file_shapes(path)
        known: Shapes | None = getattr(self, "_primerl_shapes", None)
        if known is None:
            fault = _trace_fault(self.model_runner.get_model(), path)
            if not fault:
                self._primerl_shapes = shapes
            return fault
        return _difference(known, shapes)

    def primerl_load(self, path: str) -> None:
        """Copy the weights of a file that primerl_check() found right into the model."""
        with torch.no_grad():
            self.model_runner.get_model().load_weights(_tensors(path))
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _end_with(pid: int) -> None:
    """Block until process `pid` has ended, then end this one."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError as error:
        logger.warning("cannot watch the node (%s): after a crash of it, end this by hand", error)
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _file_shapes(path: str) -> Shapes:
    with safe_open(path, framework="pt") as reader:
        return {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as reader:
        for name in reader.keys():
            yield name, reader.get_tensor(name)


def _difference(known: Shapes, shapes: Shapes) -> str:
    if missing := known.keys() - shapes.keys():
        return f"tensor {min(missing)!r} is missing"
    if extra := shapes.keys() - known.keys():
        return f"tensor {min(extra)!r} is not the model's"
    for name, shape in shapes.items():
        if shape != known[name]:
            return f"tensor {name!r} has shape {list(shape)}, the model wants {list(known[name])}"
    return ""


# -- the first state: nothing but vLLM's own loader knows which names and shapes it wants -----------


class _Recorder(TorchDispatchMode):
    """Notes in-place writes instead of doing them: a dry run of a model's weight loader."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Size, torch.Size]] = []
        self.written: dict[int, int] = {}
        """Storage address -> elements that would have been written."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket not in _WRITES:
            return func(*args, **(kwargs or {}))
        target = args[0]
        storage = target.untyped_storage().data_ptr()
        self.written[storage] = self.written.get(storage, 0) + target.numel()
        if func.overloadpacket is torch.ops.aten.copy_:
            self.copies.append((target.shape, args[1].shape))
        return target


def _trace_fault(model: Any, path: str) -> str:
    """Send every tensor of `path` through the model's loader without writing; say what went wrong.

    Each tensor must be copied somewhere, unbroadcast, and together they must fill every parameter.
    """
    recorder = _Recorder()
    for name, tensor in _tensors(path):
        recorder.copies.clear()
        try:
            with torch.no_grad(), recorder:
                model.load_weights([(name, tensor)])
        except _LOADER_FAULTS as error:
            kind = type(error).__name__
            return f"tensor {name!r} of shape {list(tensor.shape)} does not fit: {kind} {error}"
        if not recorder.copies:
            return f"tensor {name!r} is not the model's"
        if any(target != source for target, source in recorder.copies):
            return f"tensor {name!r} has shape {list(tensor.shape)}, which the model does not want"
    for name, parameter in model.named_parameters():
        if recorder.written.get(parameter.untyped_storage().data_ptr(), 0) < parameter.numel():
            return f"what fills vLLM's parameter {name!r} is missing"
    return ""
