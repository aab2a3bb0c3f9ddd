"""Run pipeline steps inside vLLM's workers, and apply prepared weights.

HeadExtension serves the ranks of stage 0, StageExtension those of later stages; StageSteps executes the frames
of a later stage. vLLM imports this module by name (`worker_extension_cls`), as it does vllm_worker.py.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
from vllm.sampling_params import SamplingParams  # pyright: ignore
from vllm.v1.core.sched.output import (  # pyright: ignore
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

from ..errors import EngineError
from ..inference.boundary_states import agrees, project
from ..inference.place import StagePlace, read_place
from ..inference.policy_file import PolicyFile
from ..inference.vllm_arguments import SAMPLING
from ..inference.vllm_sampling import read_step
from ..inference.vllm_worker import Staged, WorkerExtension
from ..models.device import Mark, download
from . import activations, trails
from .frames import Array, Frame, FrameLimits, Kind
from .ports import SocketOutlet
from .stage_loop import Later
from .step_codec import (
    ContinuedSequence,
    DrawnTokens,
    KnownSequences,
    NewSequence,
    StageStep,
    decode_step,
    draws,
    encode,
)
from .vllm_recorders import LastStageRecorder, StepTokens, number_of
from .vllm_runner import (
    IncomingStates,
    Ints,
    OutgoingStates,
    StateBuffers,
    gather,
    order_of,
    residual_stream,
    rows_of,
    sampled_rows,
)


class HeadExtension(WorkerExtension):
    """Extension of stage 0's workers, which sample nothing and send states to the next stage."""

    _primerl_place: StagePlace
    _primerl_handles: Connection
    _primerl_outlet: SocketOutlet | None = None
    """On the first rank only."""

    def primerl_handles(self, handles: Connection) -> None:
        """Make this the first rank, which receives sockets through `handles`."""
        self._primerl_place, self._primerl_handles = read_place(os.environ), handles
        self._primerl_outlet = SocketOutlet(FrameLimits.of(self._primerl_place.shape))

    def primerl_connect(self) -> None:
        """Receive a socket from the handles, and send later frames through it."""
        assert self._primerl_outlet is not None, "called on the first rank only"
        with socket.socket(fileno=recv_handle(self._primerl_handles)) as received:
            self._primerl_outlet.connect(received)

    def primerl_finish(self) -> None:
        """Close the connection after the steps computed so far."""
        assert self._primerl_outlet is not None, "called on the first rank only"
        self._primerl_outlet.finish()

    def primerl_pass(self, frame: Frame) -> None:
        """Send `frame` unchanged, after the steps computed so far."""
        assert self._primerl_outlet is not None, "called on the first rank only"
        self._primerl_outlet.put(frame)

    def primerl_compute(
        self, output: Any, frame: Frame | None = None, rows: Ints | None = None
    ) -> None:
        """Compute this rank's part of a step, and send its states in `frame` (None: send nothing).

        Tokens are sampled from the `rows` of the states; None for all.
        """
        began, runner = time.monotonic(), self.model_runner
        with torch.inference_mode():
            states = runner.execute_model(output, None)
            if frame is None or self._primerl_outlet is None:
                return
            counts = output.num_scheduled_tokens
            index = gather(order_of(runner), list(counts), counts)
            stream = residual_stream(states.tensors, output.total_num_scheduled_tokens, index)
            shape = self._primerl_place.shape
            outgoing = OutgoingStates(stream, rows, shape.encoding, proven=bool(shape.fingerprint))
        self._primerl_outlet.put(frame, outgoing.wait, began)


MOST_PREPARED = 4
_Output: Any = SchedulerOutput
_New: Any = NewRequestData
_Cached: Any = CachedRequestData
_Sampling: Any = SamplingParams
_STEP_ERRORS = (RuntimeError, ValueError, KeyError, IndexError, AssertionError, TypeError)


class StageExtension(WorkerExtension):
    """Extension of a later stage's workers: weights are prepared, and applied on a SWITCH frame."""

    primerl_recorder_type = LastStageRecorder
    _primerl_prepared: list[tuple[int, Staged]]
    _primerl_version: int
    _primerl_place: StagePlace
    _primerl_buffers: StateBuffers

    def primerl_record(self, fingerprint: str, served: bool = False) -> str:
        """Set up sampling as in a single engine, but without keeping records; see WorkerExtension."""
        self._primerl_prepared, self._primerl_version = [], -1
        if fault := super().primerl_record(fingerprint, served):
            return fault
        place = self._primerl_place = read_place(os.environ)
        dtype = self.vllm_config.model_config.dtype
        self._primerl_buffers = StateBuffers(self.model_runner, place.shape.hidden_size, dtype)
        return ""

    # -- steps, on every rank ----------------------------------------------------------------------

    def primerl_drop(self, names: list[str]) -> None:
        """Drop all sequences, whose names are given."""
        self._primerl_release(names)
        with torch.inference_mode():
            self.model_runner.execute_model_state = None
            self.model_runner.execute_model(_output((), [], names), None)

    def primerl_step(self, output: Any, stream: torch.Tensor) -> Any:
        """Compute a step from states in the order of `output`; return the runner's result."""
        self._primerl_release(list(output.finished_req_ids))
        counts = output.num_scheduled_tokens
        incoming = IncomingStates(self._primerl_buffers, stream, list(counts), counts)
        return self.model_runner.execute_model(output, incoming)

    def primerl_compute(self, output: Any, tensors: tuple[Array, ...]) -> None:
        """Compute a follower rank's part of a step, which the first rank has checked."""
        with torch.inference_mode():
            self.primerl_step(output, self.primerl_unpack(tensors))
            self.model_runner.execute_model_state = None  # the first rank samples

    def primerl_draw(self) -> StepTokens:
        """Sample the tokens of the computed step. Raises EngineError.

        Not by the runner's sample_tokens(), which waits for the tokens and keeps them for its next step.
        """
        runner: Any = self.model_runner
        state, runner.execute_model_state = runner.execute_model_state, None
        recorder = self._primerl_recorder
        if state is None or state.logits is None or not isinstance(recorder, LastStageRecorder):
            raise EngineError("vLLM computed no logits to sample from")
        return recorder.sample(read_step(runner, state), state.logits.float())

    def primerl_unpack(self, tensors: tuple[Array, ...]) -> torch.Tensor:
        """Decode the states of a frame. Raises EngineError."""
        shape = self._primerl_place.shape
        return activations.unpack(
            tensors,
            shape.encoding,
            dtype=self.vllm_config.model_config.dtype,
            device=self.model_runner.device,
            width=shape.hidden_size,
        )

    def _primerl_release(self, names: list[str]) -> None:
        if isinstance(self._primerl_recorder, LastStageRecorder):  # on the last stage
            self._primerl_recorder.release(names)

    # -- weights -----------------------------------------------------------------------------------

    def primerl_prepare(self, version: int, path: str = "") -> None:
        """Keep the full state in a file, or the staged update, for primerl_switch().

        Raises EngineError.
        """
        if len(self._primerl_prepared) >= MOST_PREPARED:
            raise EngineError(
                f"{MOST_PREPARED} versions are prepared and not switched to: the pipeline is stuck"
            )
        if path:
            staged = Staged([], list(PolicyFile(path).unmerged()))
        else:
            staged = self._primerl_staging.result(timeout=0)
            del self._primerl_staging
        self._primerl_prepared.append((version, staged))

    def primerl_find(self, version: int) -> int:
        """Return the index of `version` among the prepared ones; -1 if it is in effect.

        Raises EngineError.
        """
        versions = [prepared for prepared, _ in self._primerl_prepared]
        if version in versions:
            return versions.index(version)
        if version != self._primerl_version:
            raise EngineError(
                f"policy {version} is not here: {self._primerl_version} is in effect, {versions} are prepared"
            )
        return -1

    def primerl_switch(self, version: int) -> None:
        """Apply the prepared versions up to `version`. Raises EngineError if it was not prepared."""
        index = self.primerl_find(version)
        if index < 0:
            return
        for _ in range(index + 1):
            self._primerl_put(self._primerl_prepared.pop(0)[1])
        self._primerl_loaded = True
        self._primerl_written(version)

    def _primerl_written(self, version: int) -> None:
        super()._primerl_written(version)
        self._primerl_version = version


class StageSteps:
    """Implements StageCompute on the ranks of a stage.

    load() and write() are called by another thread.
    """

    def __init__(self, place: StagePlace, ranks: Any) -> None:
        """`ranks` is the StageExecutor of vllm_rank.py."""
        self._place, self._ranks = place, ranks
        self._worker = ranks.worker
        self._runner = self._worker.model_runner
        self._sequences = KnownSequences(place.shape)
        self._ended: list[str] = []
        """Ended sequences that vLLM does not know of yet."""
        self._turn = threading.Lock()
        self._joined = False
        """Whether a ring epoch has begun."""
        self._parameters = _Sampling(temperature=0.0, max_tokens=1, detokenize=False)

    @property
    def version(self) -> int:
        """The version in effect."""
        return self._worker._primerl_version

    # -- weights -----------------------------------------------------------------------------------

    def load(self, version: int, path: str) -> None:
        """Load a full state; after the first ring epoch began, prepare it for its SWITCH."""
        with self._turn:
            if not self._joined:
                self._ranks.collective_rpc("primerl_load", args=(version, path))
                return
        self._ranks.call_concurrently("primerl_prepare", version, path)

    def write(self, version: int) -> None:
        """Write the staged update; after the first ring epoch began, prepare it for its SWITCH."""
        with self._turn:
            if not self._joined:
                self._ranks.collective_rpc("primerl_write", args=(version,))
                return
        self._ranks.call_concurrently("primerl_prepare", version)

    # -- the ring ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop all sequences."""
        with self._turn:
            self._joined = True
            names = [*self._sequences.names(), *self._ended]
            self._sequences.reset()
            self._ranks.collective_rpc("primerl_drop", args=(names,))
            self._ended.clear()

    def switch(self, version: int) -> None:
        """See StageCompute."""
        with self._turn:
            self._worker.primerl_find(version)  # a version that this rank has is on all ranks
            self._ranks.collective_rpc("primerl_switch", args=(version,))

    def step(self, frame: Frame) -> Later:
        """See StageCompute.

        With several ranks vLLM's errors are raised: the other ranks wait in a collective.
        """
        errors = contextlib.nullcontext if len(self._ranks.followers) else _engine_errors
        with self._turn, torch.inference_mode():
            with _engine_errors():
                step = decode_step(frame.body)
                stream = self._worker.primerl_unpack(frame.tensors)
                claimed = self._claimed(frame, step, stream)
                names, ended = self._sequences.apply(step)
            self._ended += ended
            output = _output(step.parts, names, self._ended, self._parameters)
            self._ranks.followers.ordered.notify("primerl_compute", output, frame.tensors)
            with errors():
                result = self._worker.primerl_step(output, stream)
                self._ended.clear()
                if self._place.last:
                    answer = self._sample(frame, step, names)
                else:
                    answer = self._send(frame, step, names, result)
                # queued last, so that the device does not wait for it
                check = self._fingerprint_check(claimed, step, stream)

        def later() -> Frame:
            with errors():
                result = answer()
                check()
                return result

        return later

    def _claimed(self, frame: Frame, step: StageStep, stream: torch.Tensor) -> bytes | None:
        """Return the previous stage's fingerprints; None if the plan has none.

        Raises EngineError if states or trail do not match the step.
        """
        if len(stream) != sum(part.scheduled for part in step.parts):
            raise EngineError("the previous stage sent states that do not match the step's tokens")
        if not self._place.shape.fingerprint:
            return None
        rank, count = self._place.rank, sum(map(draws, step.parts))
        try:
            return trails.latest(frame.trail, count, rank)
        except trails.BadTrail as error:
            raise EngineError(f"stage {rank - 1} sent an invalid trail ({error})") from error

    def _fingerprint_check(
        self, claimed: bytes | None, step: StageStep, stream: torch.Tensor
    ) -> Callable[[], None]:
        """Fingerprint the received states; return a function that waits and compares.

        That function raises EngineError if the fingerprints differ.
        """
        if claimed is None:
            return lambda: None
        rows = rows_of(stream, sampled_rows(step.parts))
        own, mark = download(project(rows)), Mark(stream.device)

        def check() -> None:
            mark.wait()
            if not agrees(claimed, own.numpy()):
                raise EngineError(
                    f"stage {self._place.rank - 1} sent states that do not match its fingerprints"
                )

        return check

    def _send(self, frame: Frame, step: StageStep, names: list[str], result: Any) -> Later:
        """Begin to copy the states to the host.

        Return a function that waits and makes the STEP frame.
        """
        counts = {name: part.scheduled for name, part in zip(names, step.parts, strict=True)}
        index = gather(order_of(self._runner), names, counts)
        stream = residual_stream(result.tensors, sum(counts.values()), index)
        shape = self._place.shape
        outgoing = OutgoingStates(
            stream, sampled_rows(step.parts), shape.encoding, proven=bool(shape.fingerprint)
        )

        def later() -> Frame:
            packed, own = outgoing.wait()
            trail = trails.append(frame.trail, own)
            return Frame(Kind.STEP, frame.epoch, frame.number, frame.body, packed, trail)

        return later

    def _sample(self, frame: Frame, step: StageStep, names: list[str]) -> Later:
        """Sample the step's tokens; return a function that waits for them and makes the DRAWN frame."""
        sampled = self._worker.primerl_draw()
        wanted = [name for name, part in zip(names, step.parts, strict=True) if draws(part)]

        def later() -> Frame:
            tokens, rows = sampled.wait(wanted)
            body = encode(DrawnTokens(tokens))
            return Frame(Kind.DRAWN, frame.epoch, frame.number, body, (rows,), frame.trail)

        return later


@contextlib.contextmanager
def _engine_errors() -> Generator[None]:
    """Convert vLLM's errors in a step to EngineError: a RESET makes the worker usable again."""
    try:
        yield
    except _STEP_ERRORS as error:
        raise EngineError(f"vLLM failed in a step ({type(error).__name__} {error})") from error


def _output(
    parts: tuple[NewSequence | ContinuedSequence, ...],
    names: list[str],
    ended: list[str],
    parameters: Any = None,
) -> Any:
    """Make vLLM's SchedulerOutput of a step.

    Token ids are placeholders: only stage 0 reads them.
    """
    new: list[Any] = []
    cached = _Cached.make_empty()
    for name, part in zip(names, parts, strict=True):
        if isinstance(part, NewSequence):
            new.append(_new(name, part, parameters))
        else:
            cached.req_ids.append(name)
            cached.new_token_ids.append([0] * part.scheduled)
            cached.new_block_ids.append((list(part.blocks),) if part.blocks else None)
            cached.num_computed_tokens.append(part.computed)
            cached.num_output_tokens.append(part.tokens)
    scheduled = {name: part.scheduled for name, part in zip(names, parts, strict=True)}
    output = _Output.make_empty()
    output.scheduled_new_reqs = new
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = scheduled
    output.total_num_scheduled_tokens = sum(scheduled.values())
    output.finished_req_ids = set(ended)
    output.num_common_prefix_blocks = [0]  # no cascade attention
    return output


def _new(name: str, part: NewSequence, parameters: Any) -> Any:
    chosen = parameters.clone()
    extra = [number_of(name), part.seed, part.temperature, part.top_k, part.top_p]
    chosen.extra_args = {SAMPLING: extra}
    tokens = [0] * part.tokens
    return _New(
        req_id=name,
        prompt_token_ids=tokens,
        prefill_token_ids=tokens,
        mm_features=[],
        sampling_params=chosen,
        pooling_params=None,
        block_ids=(list(part.blocks),),
        num_computed_tokens=part.computed,
        lora_request=None,
    )
