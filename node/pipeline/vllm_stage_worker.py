"""Run steps inside vLLM's workers at a stage: those told and those that come down the ring; keep weights.

vLLM imports this module by name (`worker_extension_cls`), as it does vllm_worker.py.
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

from ..inference.boundary_states import agrees, project
from ..inference.device import Mark, download
from ..inference.policy_file import PolicyFile
from ..inference.vllm_arguments import SAMPLING
from ..inference.vllm_sampling import read_step
from ..inference.vllm_worker import Staged, WorkerExtension
from ..ops.errors import EngineError
from . import activations, trails
from .frames import Array, Frame, FrameLimits, Kind
from .place import StagePlace, read_place
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
    Ints,
    OutgoingStates,
    StateBuffers,
    drawing,
    gather,
    leaving,
    order_of,
    rows_of,
)


class HeadExtension(WorkerExtension):
    """As everywhere, but that nothing is drawn here."""

    _primerl_place: StagePlace
    _primerl_handles: Connection
    _primerl_outlet: SocketOutlet | None = None
    """Of the first rank."""

    def primerl_handles(self, handles: Connection) -> None:
        """Be the first rank; sockets come through `handles`."""
        self._primerl_place, self._primerl_handles = read_place(os.environ), handles
        self._primerl_outlet = SocketOutlet(FrameLimits.of(self._primerl_place.shape))

    def primerl_connect(self) -> None:
        """Send through the socket that waits in `handles`."""
        assert self._primerl_outlet is not None, "only the first rank is asked"
        with socket.socket(fileno=recv_handle(self._primerl_handles)) as given:
            self._primerl_outlet.connect(given)

    def primerl_finish(self) -> None:
        """End that connection behind the steps computed before."""
        assert self._primerl_outlet is not None, "only the first rank is asked"
        self._primerl_outlet.finish()

    def primerl_pass(self, frame: Frame) -> None:
        """Send `frame` as it is, behind the steps computed before."""
        assert self._primerl_outlet is not None, "only the first rank is asked"
        self._primerl_outlet.put(frame)

    def primerl_compute(
        self, output: Any, frame: Frame | None = None, drawing: Ints | None = None
    ) -> None:
        """Compute this rank's part of a step; `frame` goes to the other stages, None: nothing is sent.

        The rows `drawing` lead to tokens; None: all.
        """
        began, runner = time.monotonic(), self.model_runner
        with torch.inference_mode():
            found = runner.execute_model(output, None)
            if frame is None or self._primerl_outlet is None:
                return
            counts = output.num_scheduled_tokens
            index = gather(order_of(runner), list(counts), counts)
            stream = leaving(found.tensors, output.total_num_scheduled_tokens, index)
            shape = self._primerl_place.shape
            departure = OutgoingStates(
                stream, drawing, shape.encoding, proven=bool(shape.fingerprint)
            )
        self._primerl_outlet.put(frame, departure.wait, began)


MOST_PREPARED = 4
_Output: Any = SchedulerOutput
_New: Any = NewRequestData
_Cached: Any = CachedRequestData
_Sampling: Any = SamplingParams
_BROKEN = (RuntimeError, ValueError, KeyError, IndexError, AssertionError, TypeError)


class StageExtension(WorkerExtension):
    """As everywhere, but that weights are written when the ring says so."""

    primerl_recorder_type = LastStageRecorder
    _primerl_prepared: list[tuple[int, Staged]]
    _primerl_version: int
    _primerl_place: StagePlace
    _primerl_arrivals: StateBuffers

    def primerl_record(self, fingerprint: str, served: bool = False) -> str:
        """Draw as in a whole engine; keep nothing here."""
        self._primerl_prepared, self._primerl_version = [], -1
        if fault := super().primerl_record(fingerprint, served):
            return fault
        place = self._primerl_place = read_place(os.environ)
        dtype = self.vllm_config.model_config.dtype
        self._primerl_arrivals = StateBuffers(self.model_runner, place.shape.hidden_size, dtype)
        return ""

    # -- steps, on every rank ----------------------------------------------------------------------

    def primerl_forget(self, over: list[str]) -> None:
        """Forget all sequences, which are these."""
        self._primerl_leave(over)
        with torch.inference_mode():
            self.model_runner.execute_model_state = None
            self.model_runner.execute_model(_output((), [], over), None)

    def primerl_step(self, output: Any, stream: torch.Tensor) -> Any:
        """Compute a step whose states are `stream`, in the order of `output`; what the runner gives."""
        self._primerl_leave(list(output.finished_req_ids))
        counts = output.num_scheduled_tokens
        arrival = self._primerl_arrivals.lay(stream, list(counts), counts)
        return self.model_runner.execute_model(output, arrival)

    def primerl_compute(self, output: Any, tensors: tuple[Array, ...]) -> None:
        """The part of a rank that follows: the first one has looked at everything, and answers for all."""
        with torch.inference_mode():
            self.primerl_step(output, self.primerl_unpack(tensors))
            self.model_runner.execute_model_state = None  # the first one draws

    def primerl_draw(self) -> StepTokens:
        """What the step that was computed draws.

        Not by the runner's sample_tokens(): it waits for the tokens and keeps them, and they are not read here.
        """
        runner: Any = self.model_runner
        state, runner.execute_model_state = runner.execute_model_state, None
        recorder = self._primerl_recorder
        if state is None or state.logits is None or not isinstance(recorder, LastStageRecorder):
            raise EngineError("vLLM computed nothing that could be drawn from")
        return recorder.tell(read_step(runner, state), state.logits.float())

    def primerl_unpack(self, tensors: tuple[Array, ...]) -> torch.Tensor:
        """The states that a frame holds. Raises EngineError."""
        shape = self._primerl_place.shape
        return activations.unpack(
            tensors,
            shape.encoding,
            dtype=self.vllm_config.model_config.dtype,
            device=self.model_runner.device,
            width=shape.hidden_size,
        )

    def _primerl_leave(self, names: list[str]) -> None:
        if isinstance(self._primerl_recorder, LastStageRecorder):  # of the last stage
            self._primerl_recorder.leave(names)

    # -- weights -----------------------------------------------------------------------------------

    def primerl_prepare(self, version: int, path: str = "") -> None:
        """Keep a whole state of a file, or the staged update, for primerl_switch(). Raises EngineError."""
        if len(self._primerl_prepared) >= MOST_PREPARED:
            raise EngineError("too many versions wait for their moment: the pipeline stands still")
        if path:
            staged = Staged([], list(PolicyFile(path).unmerged()))
        else:
            staged = self._primerl_staging.result(timeout=0)
            del self._primerl_staging
        self._primerl_prepared.append((version, staged))

    def primerl_find(self, version: int) -> int:
        """Find `version` among the prepared ones; -1 if it is in effect. Raises EngineError if neither."""
        versions = [one for one, _ in self._primerl_prepared]
        if version in versions:
            return versions.index(version)
        if version != self._primerl_version:
            raise EngineError(
                f"policy {version} is not here: {self._primerl_version} is, {versions} wait"
            )
        return -1

    def primerl_switch(self, version: int) -> None:
        """Write the prepared versions up to `version`. Raises EngineError if it was not prepared."""
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
    """Implements StageCompute on the ranks of a stage; the weights' side is called by another thread."""

    def __init__(self, place: StagePlace, ranks: Any) -> None:
        """`ranks`: the executor of vllm_rank.py."""
        self._place, self._ranks = place, ranks
        self._worker = ranks.worker
        self._runner = self._worker.model_runner
        self._sequences = KnownSequences(place.shape)
        self._over: list[str] = []
        """Ended sequences that vLLM has not been told of yet."""
        self._turn = threading.Lock()
        self._chained = False
        self._parameters = _Sampling(temperature=0.0, max_tokens=1, detokenize=False)

    @property
    def version(self) -> int:
        """The version in effect."""
        return self._worker._primerl_version

    # -- weights -----------------------------------------------------------------------------------

    def load(self, version: int, path: str) -> None:
        """Write a whole state, or keep it for SWITCH once there was a chain."""
        with self._turn:
            if not self._chained:
                self._ranks.collective_rpc("primerl_load", args=(version, path))
                return
        self._ranks.beside("primerl_prepare", version, path)

    def write(self, version: int) -> None:
        """Write the staged update, or keep it for its SWITCH."""
        with self._turn:
            if not self._chained:
                self._ranks.collective_rpc("primerl_write", args=(version,))
                return
        self._ranks.beside("primerl_prepare", version)

    # -- the ring ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all sequences."""
        with self._turn:
            self._chained = True
            over = [*self._sequences.names(), *self._over]
            self._sequences.forget()
            self._ranks.collective_rpc("primerl_forget", args=(over,))
            self._over.clear()

    def switch(self, version: int) -> None:
        """See StageCompute."""
        with self._turn:
            self._worker.primerl_find(version)  # a version that is here is on all ranks
            self._ranks.collective_rpc("primerl_switch", args=(version,))

    def step(self, frame: Frame) -> Later:
        """See StageCompute. Where ranks wait for each other, what vLLM raises is raised: none can go on."""
        judged = contextlib.nullcontext if len(self._ranks.followers) else _judged
        with self._turn, torch.inference_mode():
            with _judged():
                step, stream = decode_step(frame.body), self._arrived(frame)
                claimed = self._claimed(frame, step, stream)
                names, over = self._sequences.take(step)
            self._over += over
            output = _output(step.parts, names, self._over, self._parameters)
            self._ranks.followers.turns.tell("primerl_compute", output, frame.tensors)
            with judged():
                found = self._worker.primerl_step(output, stream)
                self._over.clear()
                if self._place.last:
                    answer = self._drawn(frame, step, names)
                else:
                    answer = self._sent(frame, step, names, found)
                check = self._checked(
                    claimed, step, stream
                )  # the device has enough to do meanwhile

        def later() -> Frame:
            with judged():
                found = answer()
                check()
                return found

        return later

    def _arrived(self, frame: Frame) -> torch.Tensor:
        return self._worker.primerl_unpack(frame.tensors)

    def _claimed(self, frame: Frame, step: StageStep, stream: torch.Tensor) -> bytes | None:
        """The fingerprints that the stage before stated; None where the plan has none.

        Raises EngineError for states that are not the step's.
        """
        if len(stream) != sum(part.scheduled for part in step.parts):
            raise EngineError("the stage before sent other states than the step has tokens")
        if not self._place.shape.fingerprint:
            return None
        rank, count = self._place.rank, sum(map(draws, step.parts))
        try:
            return trails.latest(frame.trail, count, rank)
        except trails.BadTrail as error:
            raise EngineError(f"stage {rank - 1} sent no trail of this plan ({error})") from error

    def _checked(
        self, claimed: bytes | None, step: StageStep, stream: torch.Tensor
    ) -> Callable[[], None]:
        """The returned function waits for the device, and raises EngineError if the fingerprints are of
        other states."""
        if claimed is None:
            return lambda: None
        own, mark = download(project(rows_of(stream, drawing(step.parts)))), Mark(stream.device)

        def check() -> None:
            mark.wait()
            if not agrees(claimed, own.numpy()):
                raise EngineError(
                    f"stage {self._place.rank - 1} sent other states than it signed for"
                )

        return check

    def _sent(self, frame: Frame, step: StageStep, names: list[str], found: Any) -> Later:
        counts = {name: part.scheduled for name, part in zip(names, step.parts, strict=True)}
        index = gather(order_of(self._runner), names, counts)
        stream = leaving(found.tensors, sum(counts.values()), index)
        shape = self._place.shape
        departure = OutgoingStates(
            stream, drawing(step.parts), shape.encoding, proven=bool(shape.fingerprint)
        )

        def later() -> Frame:
            packed, own = departure.wait()
            trail = trails.append(frame.trail, own)
            return Frame(Kind.STEP, frame.epoch, frame.number, frame.body, packed, trail)

        return later

    def _drawn(self, frame: Frame, step: StageStep, names: list[str]) -> Later:
        told = self._worker.primerl_draw()
        wanted = [name for name, part in zip(names, step.parts, strict=True) if draws(part)]

        def later() -> Frame:
            tokens, rows = told.wait(wanted)
            body = encode(DrawnTokens(tokens))
            return Frame(Kind.DRAWN, frame.epoch, frame.number, body, (rows,), frame.trail)

        return later


@contextlib.contextmanager
def _judged() -> Generator[None]:
    """What vLLM raises in a step, as EngineError: after a reset it is of use again."""
    try:
        yield
    except _BROKEN as error:
        raise EngineError(f"vLLM failed in a step ({type(error).__name__} {error})") from error


def _output(
    parts: tuple[NewSequence | ContinuedSequence, ...],
    names: list[str],
    over: list[str],
    parameters: Any = None,
) -> Any:
    """A step in vLLM's words. Of tokens only the number is true: no stage but the first reads them."""
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
    output.finished_req_ids = set(over)
    output.num_common_prefix_blocks = [0]  # a shortcut of some kernels: never taken here
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
