"""Extension of vLLM's worker: replaces weights in place, and draws tokens with our sampler.

vLLM imports this module in its worker process by name (`worker_extension_cls`) before it builds the model;
otherwise only the extension of a pipeline stage imports it. All its names start with `primerl_`: vLLM refuses
an extension whose names collide with its own worker's.
"""

import itertools
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from ...protocol.manifests import RouteShape
from ..errors import named_line, one_line
from ..process.threads import share_python
from .handover import POSITIONS, VALUES, WHOLE, WHOLE_FROM, read_spans
from .parameter_placement import ParameterPlacement, PendingWrite, difference, trace
from .policy_file import KeptBase, PolicyFile
from .quantization import FP8, is_quantized, quantize
from .vllm_arguments import DRAFT_HEAD, FP8_METHOD, INVARIANT, ROUTES, ROUTES_AUDITED
from .vllm_prefill import PromptReader
from .vllm_sampling import (
    HiddenProjection,
    Hooks,
    RankPlace,
    Recorder,
    RouteBuffer,
    drafts_by_model,
    drafts_of,
)
from .weight_copies import ROOM, WeightCopies

logger = logging.getLogger(__name__)


def _keep_plain_weights() -> None:
    """On a CPU, keep the weights of linear layers and of experts where they can be replaced.

    vLLM moves the weights of a linear layer into an opaque oneDNN handler and leaves an empty tensor behind: a
    later update would fail or, for the output head, silently do nothing. It packs the weights of experts and of
    the convolutions of linear attention. Plain products give the same fp32 numbers, for linear layers at equal
    speed. vLLM has no option for this, so its dispatcher and the methods of the experts are replaced.
    """
    from vllm.platforms import current_platform  # pyright: ignore

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils  # pyright: ignore
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe  # pyright: ignore

    utils.dispatch_cpu_unquantized_gemm = _plain_linear
    experts: Any = cpu_moe.CPUUnquantizedExperts
    experts.process_weights_after_loading = _keep_experts
    experts.apply = _plain_experts
    with suppress(ImportError):  # before vLLM 0.32 linear attention is for GPUs
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention  # pyright: ignore

        for name in ("_causal_conv1d_fwd_cpu", "_causal_conv1d_update_cpu"):
            setattr(gdn_attention, name, _plain_convolution(getattr(gdn_attention, name)))


def _plain_convolution(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a convolution of linear attention: it takes the weights [width, 1, kernel] as they are."""

    def computed(*, weight: torch.Tensor, is_weight_packed: bool, **named: Any) -> Any:
        return compute(weight=weight.squeeze(1), is_weight_packed=False, **named)

    return computed


def _plain_linear(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _keep_experts(experts: Any, layer: Any) -> None:
    """Pack nothing."""


def _plain_experts(
    experts: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Write the weighted sum of each token's experts on this rank into `output` [N, d].

    Sums are in the order of the experts, whatever other tokens are beside a token.
    """
    here = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    total = torch.zeros_like(output, dtype=torch.float32)
    for expert in range(len(w1)):
        rows, place = (here == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        both = torch.nn.functional.linear(hidden_states[rows], w1[expert])
        inner = both.new_empty(len(both), both.shape[1] // 2)
        experts.activation(activation, inner, both)
        outputs = torch.nn.functional.linear(inner, w2[expert]).float()
        if not apply_router_weight_on_input:
            outputs *= topk_weights[rows, place, None]
        total.index_add_(0, rows, outputs)
    output.copy_(total)


def _keep_rows_apart() -> None:
    """Make vLLM's batch-invariant kernels independent of the number of rows where they are not.

    In vLLM the norm of a residual sum adds up in another order from 256 rows on. On Hopper, where vLLM keeps
    cuBLAS from splitting sums, cuBLAS has the same bits for any number of rows, and more speed than vLLM's own
    product.
    """
    if os.environ.get(INVARIANT) != "1":
        return
    from vllm.model_executor.layers import layernorm, linear, vocab_parallel_embedding  # pyright: ignore
    from vllm.platforms import current_platform  # pyright: ignore

    plain = layernorm.rms_norm_batch_invariant

    def norm(input: Any, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
        if residual is None:
            return plain(input, weight, eps)
        total = input + residual
        return plain(total, weight, eps), total

    layernorm.rms_norm_batch_invariant = norm
    if current_platform.is_device_capability_family(90):
        linear.linear_batch_invariant = torch.nn.functional.linear
        vocab_parallel_embedding.linear_batch_invariant = torch.nn.functional.linear


ROUTE_BUFFER = RouteBuffer(keeps_logits=os.environ.get(ROUTES) == ROUTES_AUDITED)
"""Choices of this process's routers."""


def _watch_routers() -> None:
    """With ROUTES in the environment, make every router report its choices to ROUTE_BUFFER.

    Routers do so from their construction on, so that CUDA graphs include it. vLLM's own return of routes
    differs between releases, and travels with its outputs.
    """
    if ROUTES not in os.environ:
        return
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter  # pyright: ignore

    plain: Any = BaseRouter.__init__

    def init(router: Any, *arguments: Any, **named: Any) -> None:
        plain(router, *arguments, **named)
        router._compute_routing = _told(router._compute_routing, ROUTE_BUFFER.hook(router))

    BaseRouter.__init__ = init


def _told(compute: Any, take: Callable[[torch.Tensor, torch.Tensor], None]) -> Any:
    def computed(states: Any, logits: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        weights, chosen = compute(states, logits, *arguments, **named)
        take(logits, chosen)
        return weights, chosen

    return computed


def _compile_draft_heads() -> None:
    """With DRAFT_HEAD in the environment, have vLLM compile the MTP heads that it would not.

    It compiles those of most families. Others run kernel by kernel, 4 ms for a draft of one layer on an H100
    where the whole model takes 3 (vLLM 0.25.1 and 0.32).
    """
    if DRAFT_HEAD not in os.environ:
        return
    from vllm.compilation.decorators import support_torch_compile  # pyright: ignore
    from vllm.model_executor.models import glm4_moe_mtp  # pyright: ignore

    support_torch_compile(glm4_moe_mtp.Glm4MoeMTP)


# at import, because vLLM gives an extension no call before the model is built
_keep_plain_weights()
_keep_rows_apart()
_watch_routers()
_compile_draft_heads()


class WorkerExtension:
    """Mixin of vLLM's worker class; its methods are called by name through collective_rpc."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _primerl_recorder: Recorder | None
    _primerl_reader: PromptReader | None
    _primerl_placement: ParameterPlacement
    """Placement of the weights that were loaded last; until then, of those checked last."""
    _primerl_scales: "RowScales"
    """Scales of these weights, of those among them that are quantized."""
    _primerl_loaded: bool
    _primerl_staging: "Future[Staged]"
    _primerl_base: KeptBase | None = None
    _primerl_stream: torch.cuda.Stream | None = None
    _primerl_routes: tuple[RouteBuffer, RouteShape] | None = None
    _primerl_copies: WeightCopies | None = None
    primerl_recorder_type: type[Recorder] = Recorder

    def primerl_attach(self, node_pid: int) -> int:
        """Make this process end with the node's, however that ends. Returns this process's id."""
        # threads that read requests or a new version must not delay the one that runs steps for long
        share_python()
        # a daemon thread: it must die with the process, and has nothing to clean up
        threading.Thread(target=_end_with, args=(node_pid,), daemon=True).start()
        return os.getpid()

    def primerl_routes(self, shape: bytes) -> str:
        """Record routes of this shape (RouteShape) with every token; after primerl_record().

        Returns the reason why that is impossible; "" if there is none.
        """
        wanted = msgspec.msgpack.decode(shape, type=RouteShape)
        more = ROUTE_BUFFER.layers - wanted.layers  # of a drafter
        if more < 0 or (more > 0 and not drafts_by_model(self.model_runner)):
            return (
                f"{ROUTE_BUFFER.layers} routers of vLLM report their choices, and the model has "
                f"{wanted.layers}: use vLLM 0.25.1 or 0.32"
            )
        self._primerl_routes = ROUTE_BUFFER, wanted
        if self._primerl_recorder is not None:
            self._primerl_recorder.record_routes(*self._primerl_routes)
        return ""

    def primerl_record(self, fingerprint: str, served: bool = False) -> str:
        """Draw tokens with this node's sampler from now on, and record their fingerprints.

        `served`: also for requests of vLLM's own server. In a pipeline only the last stage draws. Returns the
        reason why that is impossible; "" if there is none.
        """
        runner, model = self.model_runner, self.vllm_config.model_config
        self._primerl_recorder, self._primerl_loaded = None, False
        if fault := _outlives(self.vllm_config.kv_transfer_config):
            return fault
        place = RankPlace.of(self.rank, self.vllm_config.parallel_config)
        if not place.first:
            _make_room(runner)
        if not place.last:
            return ""
        width = model.get_hidden_size()
        recorder = self.primerl_recorder_type(
            runner.device,
            width=width,
            dtype=model.dtype,
            fingerprint=fingerprint,
            requests=self.vllm_config.scheduler_config.max_num_seqs,
            length=model.max_model_len,
            drafts=drafts_of(runner),
        )
        # every rank of a stage draws the same tokens from the same logits; one of them keeps them
        recorder.collecting = place.collecting
        hooks = Hooks(runner, recorder)
        try:
            hooks.install()
        except RuntimeError as error:
            return one_line(error)
        kinds = {model.dtype if hooks.second else torch.float32}
        kinds |= {torch.float32} if served else set()  # vLLM converts the logits of these to fp32
        kinds |= {model.dtype} if drafts_by_model(runner) else set()
        for rows, kind in itertools.product((1, 2, 16), kinds):  # triton compiles for each of these
            recorder.warm_up(
                torch.zeros((rows, model.get_vocab_size()), dtype=kind, device=runner.device),
                torch.zeros((rows, width), dtype=model.dtype, device=runner.device),
            )
        self._primerl_recorder = recorder
        return ""

    def primerl_collect(self, wanted: list[list[int]], forget: list[int]) -> list[list[Any]]:
        """See Recorder.collect(); empty on the ranks that keep no records."""
        if self._primerl_recorder is None:
            return []
        records = self._primerl_recorder.collect(wanted, forget)
        return records if self._primerl_recorder.collecting else []

    def primerl_versions(self, keys: list[int]) -> list[list[int]]:
        """See Recorder.versions(); empty on the ranks that keep no records."""
        recorder = self._primerl_recorder
        return recorder.versions(keys) if recorder is not None and recorder.collecting else []

    def primerl_undrawn(self, keys: list[int]) -> list[int]:
        """See Recorder.undrawn(); empty on the ranks that keep no records."""
        recorder = self._primerl_recorder
        return recorder.undrawn(keys) if recorder is not None and recorder.collecting else []

    def primerl_read(self) -> str:
        """Measure prompts that ask for it from now on; after primerl_record(), between steps.

        Returns the reason why that is impossible; "" if there is none.
        """
        model = self.vllm_config.model_config
        place = RankPlace.of(self.rank, self.vllm_config.parallel_config)
        self._primerl_reader = None
        if not place.last:
            return ""
        runner = self.model_runner
        projection = HiddenProjection(runner.device, model.get_hidden_size(), model.dtype)
        reader = PromptReader(runner, projection, model.get_vocab_size(), self._primerl_routes)
        reader.collecting = place.collecting
        try:
            reader.install()
        except RuntimeError as error:
            return one_line(error)
        self._primerl_reader = reader
        return ""

    def primerl_rows(self, keys: list[int]) -> list[list[Any]]:
        """See PromptReader.collect(); the recorder forgets these requests, too."""
        if self._primerl_recorder is not None:
            self._primerl_recorder.collect([], keys)
        return [] if self._primerl_reader is None else self._primerl_reader.collect(keys)

    def primerl_check(self, path: str) -> list[Any]:
        """Check a safetensors file of weights on this rank; see vllm.join_checks(). Writes nothing."""
        if self._primerl_loaded:
            known = self._primerl_placement
            fault = difference(known.shapes, PolicyFile(path).shapes())
            return [fault, sorted(known.absent), self._primerl_whole()]
        model, policy = self.model_runner.get_model(), PolicyFile(path)
        placement = trace(model.load_weights, dict(model.named_parameters()), policy.unmerged())
        if isinstance(placement, str):
            return [placement, [], []]
        self._primerl_placement = placement
        quantized = self.vllm_config.model_config.quantization == FP8_METHOD
        self._primerl_scales = RowScales(model, placement, quantized=quantized)
        return [self._primerl_scales.fault(), sorted(placement.absent), self._primerl_whole()]

    def _primerl_whole(self) -> list[str]:
        """Return the tensors that an update has to bring whole: a row's scale depends on all of it."""
        return self._primerl_placement.placeless + self._primerl_scales.names

    def primerl_load(self, version: int, path: str) -> None:
        """Copy the weights of a file that passed primerl_check() into the model.

        If the model already has the base of the file's adapters, only weights that adapters can change are
        copied.
        """
        device, policy = self.model_runner.device, self._primerl_policy(path)
        with torch.no_grad(), self._primerl_beside():
            again = self._primerl_loaded and policy.adapted
            tensors = policy.changing(device) if again else policy.tensors(device)
            loaded = self._primerl_scales.loaded(tensors, device)
            self.model_runner.get_model().load_weights(loaded)
        self._primerl_loaded = True
        self._primerl_written(version)

    def primerl_stage(self, path: str) -> None:
        """Begin to prepare an update, in a thread beside generation; see primerl_staged()."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="primerl-stage")
        self._primerl_staging = pool.submit(self._primerl_prepare, path)
        pool.shutdown(wait=False)

    def primerl_staged(self) -> str | None:
        """Return None while the update is being prepared, then the error; "" if there is none."""
        if not self._primerl_staging.done():
            return None
        error = self._primerl_staging.exception()
        return "" if error is None else named_line(error)

    def primerl_write(self, version: int) -> int:
        """Write the prepared update, while no step runs. Returns how many elements it wrote singly."""
        staged = self._primerl_staging.result(timeout=0)
        del self._primerl_staging
        self._primerl_put(staged)
        self._primerl_written(version)
        return sum(len(write.offsets) for write in staged.writes)

    def primerl_keep(self, key: int) -> list[int]:
        """Copy the weights, which primerl_recall() writes again; see WeightCopies.keep()."""
        if self._primerl_copies is None:
            self._primerl_copies = WeightCopies(self.model_runner.device)
        return self._primerl_copies.keep(key, self.model_runner.get_model().parameters())

    def primerl_recall(self, version: int, key: int) -> None:
        """Write a copy that primerl_keep() has made, while no step runs."""
        if self._primerl_copies is None:
            raise LookupError("no weights were copied")
        with torch.no_grad():
            self._primerl_copies.recall(key, self.model_runner.get_model().parameters())
        self._primerl_written(version)

    def primerl_forget(self) -> None:
        """Drop all copies of weights."""
        if self._primerl_copies is not None:
            self._primerl_copies.clear()

    def _primerl_put(self, staged: "Staged") -> None:
        with torch.no_grad():
            for write in staged.writes:
                write.run()
            if staged.whole:
                self.model_runner.get_model().load_weights(staged.whole)

    def _primerl_written(self, version: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._primerl_recorder is not None:
            self._primerl_recorder.version = version

    def _primerl_prepare(self, path: str) -> "Staged":
        placement = self._primerl_placement
        if not placement.still_holds(dict(self.model_runner.get_model().named_parameters())):
            raise RuntimeError("vLLM has moved its parameters")
        policy, device = self._primerl_policy(path), self.model_runner.device
        with torch.no_grad(), self._primerl_beside():
            return _stage(self._primerl_scales, policy, device)

    @contextmanager
    def _primerl_beside(self) -> Generator[None]:
        """Queue what follows on a stream that a GPU prefers to its other work, and wait for it at the end.

        One stream serves all calls: torch keeps memory that was freed on one apart from that of others.
        """
        device = self.model_runner.device
        if device.type != "cuda":
            yield
            return
        if self._primerl_stream is None:
            self._primerl_stream = torch.cuda.Stream(device, priority=-1)
        self._primerl_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._primerl_stream):
            yield
        self._primerl_stream.synchronize()

    def _primerl_policy(self, path: str) -> PolicyFile:
        if self._primerl_base is None:
            ranks = self.vllm_config.parallel_config.world_size
            self._primerl_base = KeptBase.for_device(self.model_runner.device, ranks)
        return PolicyFile(path, self._primerl_base)


@dataclass(frozen=True)
class Staged:
    """A prepared update."""

    writes: list[PendingWrite]
    whole: list[tuple[str, torch.Tensor]]


class RowScales:
    """Scales of the weights that the model holds in FP8 (vllm_fp8.py), found by their placement."""

    def __init__(
        self, model: torch.nn.Module, placement: ParameterPlacement, *, quantized: bool
    ) -> None:
        """Find the scales of `model`. `quantized`: whether it is of a run of FP8 weights."""
        self.placement = placement
        shapes = placement.shapes.items() if quantized else ()
        self.names = sorted(name for name, shape in shapes if is_quantized(name, shape))
        """Tensors to be quantized; a pipeline's rank may not hold all of them."""
        self._here = frozenset(self.names) - placement.absent
        self._scales: dict[int, tuple[torch.Tensor, int]] = {}
        """Address of a weight's storage -> (scales [rows], columns of the weight)."""
        for module in model.modules():
            weight, scale = (getattr(module, name, None) for name in ("weight", "weight_scale"))
            if isinstance(weight, torch.Tensor) and weight.dtype == FP8 and scale is not None:
                address = weight.untyped_storage().data_ptr()
                self._scales[address] = scale.view(-1), weight.shape[1]

    def fault(self) -> str:
        """Return how the tensors held in FP8 differ from those to be quantized; "" if they do not."""
        for name in self.placement.shapes:
            if name in self.placement.absent:
                continue
            parts, wanted = self.placement.parts(name), name in self._here
            held_in_fp8 = {part.flat.untyped_storage().data_ptr() in self._scales for part in parts}
            if held_in_fp8 != {wanted} and (held_in_fp8 or wanted):
                return f"vLLM would quantize {name!r} otherwise than audits do: leave engine.quantization out"
        return ""

    def loaded(
        self, tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over what the model's loader takes for `tensors`, quantized on `device`.

        Writes the scales, too.
        """
        for name, tensor in tensors:
            if name not in self._here:
                yield name, tensor
                continue
            codes, scales = quantize(tensor.to(device))
            for write in self.writes(name, scales):
                write.run()
            yield name, codes

    def writes(self, name: str, scales: torch.Tensor) -> list[PendingWrite]:
        """Prepare the writes of the scales [out] of a weight's rows to where the model has them."""
        width = self.placement.shapes[name][1]
        writes: list[PendingWrite] = []
        for part in self.placement.parts(name):
            flat, columns = self._scales[part.flat.untyped_storage().data_ptr()]
            rows = torch.arange(len(scales), device=scales.device)
            offsets, inside = part.locate(rows * width + part.source % width)
            own = scales if inside is None else scales[inside]
            writes.append(PendingWrite(flat, offsets // columns, own))
        return writes

    def stage(self, staged: Staged, name: str, tensor: torch.Tensor) -> None:
        """Add the differences of `tensor` to the weights that the model has now."""
        codes = None
        if name in self._here:
            codes, scales = quantize(tensor)
            staged.writes.extend(self.writes(name, scales))
            tensor = codes.view(torch.int8)
        writes = self.placement.differing(name, tensor)
        if (
            writes is None
            or WHOLE_FROM * sum(len(write.offsets) for write in writes) > tensor.numel()
        ):
            staged.whole.append((name, _kept(tensor if codes is None else codes)))
        else:
            staged.writes.extend(
                PendingWrite(write.flat, _kept(write.offsets), _kept(write.values))
                for write in writes
            )


def _stage(scales: RowScales, policy: PolicyFile, device: torch.device) -> Staged:
    staged = Staged([], [])
    if policy.adapted:
        for name, tensor in policy.changing(device):
            scales.stage(staged, name, tensor)
        return staged
    with safe_open(policy.path, framework="pt") as reader:
        for key in reader.keys():
            name = key.removeprefix(WHOLE)
            if name in scales.names:
                scales.stage(staged, name, reader.get_tensor(key).to(device))
            elif name != key:
                staged.whole.append((name, reader.get_tensor(key)))
        for dtype, spans in (reader.metadata() or {}).items():
            positions, values = (reader.get_tensor(part + dtype) for part in (POSITIONS, VALUES))
            staged.writes.extend(scales.placement.prepare(read_spans(spans), positions, values))
    return staged


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, on the host if the device has little memory left, until it is written."""
    if tensor.is_cuda and torch.cuda.mem_get_info(tensor.device)[0] < ROOM:
        return tensor.cpu()
    return tensor


def _outlives(transfer: Any) -> str:
    """Return why keys and values kept outside vLLM would outlive an update; "" if they do not."""
    if transfer is None or transfer.kv_connector is None:
        return ""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # pyright: ignore
        KVConnectorFactory,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # pyright: ignore
        KVConnectorBase_V1,
    )

    kind: Any = KVConnectorFactory.get_connector_class(transfer)
    if kind.reset_cache is not KVConnectorBase_V1.reset_cache:
        return ""
    return (
        f"this vLLM's {transfer.kv_connector} cannot be emptied, and would give keys and values of an old "
        "policy to a new one: remove kv_offloading_size and kv_transfer_config"
    )


def _make_room(runner: Any) -> None:
    """Make buffers for the output of the stage before.

    vLLM makes them when it profiles, which on a CPU it does not.
    """
    if getattr(runner, "intermediate_tensors", "none") is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


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
