"""Run stage 0 in vLLM's engine process: scheduler, executor, futures of sampled tokens.

vLLM loads this module there. Its engine is unchanged: it asks for a step and gets a future of the tokens. Each
schedule() call sees one lane, so that several micro-batches are in flight; blocks, prefix caching, preemption
and request order stay vLLM's. The ranks that compute are separate processes, as in vLLM's multi-process
executor: scheduling and computing take similar time, and both are mostly Python.
"""

import functools
import os
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore
from vllm.v1.executor.abstract import Executor  # pyright: ignore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput  # pyright: ignore

from ...protocol.pipelines import PipelinePlan
from ..errors import EngineError
from ..inference.place import check_passes, read_place
from ..inference.vllm_arguments import SAMPLING
from ..process.threads import share_python
from .frames import Frame, FrameLimits
from .micro_batches import LaneAssignment, MicroBatches, RingClient, is_ready, without
from .ports import Port, SplitPort
from .step_codec import StepEncoder, check_drawn, decode_drawn, draws, encode
from .vllm_followers import Followers, RankPipes
from .vllm_rank import follow, init_method
from .vllm_recorders import HeadRecorder
from .vllm_runner import sampled_rows

_SchedulerBase: Any = Scheduler
_CAPS = ("max_num_running_reqs", "max_num_active_reqs")
"""Limits of running sequences in vLLM's scheduler; not all releases have the second one."""
_PRUNE_FROM = 256


class LaneScheduler(_SchedulerBase):
    """vLLM's scheduler, restricted to one lane per call, round-robin.

    Idle while the ring is not healthy.
    """

    def __init__(self, *arguments: Any, ring: RingClient, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._ring = ring
        self._lanes = LaneAssignment(ring.lanes)
        self._in_flight: dict[int, int | None] = {}
        """Scheduler outputs (by id) in flight -> their lane if they sample, else None."""
        self._exhausted = False
        """Whether nothing could be scheduled since the last return."""
        self._picked: tuple[tuple[int, int, int], int | None] | None = None
        """(running, waiting and free counts, picked lane): vLLM calls has_requests() twice before
        schedule()."""
        self._had_requests = False
        """Last result of has_requests()."""
        self._skip_check = False
        """Whether the next has_requests() call is vLLM's check before it sleeps."""

    def has_requests(self) -> bool:
        """Return whether schedule() should be called; else vLLM waits for a return or a new request.

        After a step that only processed a result vLLM calls once more, and sleeps a millisecond if there is
        work: that call gets False. While a micro-batch is in flight, False never makes vLLM wait for requests
        only.
        """
        skip, self._skip_check = self._skip_check, False
        self._had_requests = not skip and self._has_work()
        return self._had_requests

    def _has_work(self) -> bool:
        if not self._ring.healthy:
            return False
        if not super().has_requests():
            return False
        return not self._in_flight or (not self._exhausted and self._pick() is not None)

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """Schedule a micro-batch of the next lane with work; an empty output if no lane has any."""
        waiting, free = self._room()
        lane, self._picked = self._pick(), None
        members: list[Any] = []
        most = 0
        running: list[Any] = self.running
        if lane is not None:
            members, most = self._lanes.take(lane, running, waiting, free)
        others = without(running, members)
        caps = {name: getattr(self, name) for name in _CAPS if hasattr(self, name)}
        for name in caps:
            setattr(self, name, max(len(members), min(most, free + len(members))))
        self.running = members
        # ranks keep each lane's sequences (vllm_runner.py): else vLLM would resend all their tokens every step
        self.prev_step_scheduled_req_ids = {request.request_id for request in members}
        try:
            output = super().schedule(*arguments, **named)
        finally:
            for name, cap in caps.items():
                setattr(self, name, cap)
            members, self.running = self.running, others + self.running
        self._record(lane, members, output)
        return output

    def update_from_output(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        """Process a returned micro-batch."""
        lane = self._in_flight.pop(id(scheduler_output), None)
        if lane is not None:
            self._lanes.record_return(lane)
        self._exhausted, self._picked = False, None
        self._skip_check = not self._had_requests and bool(self._in_flight)
        if len(self._lanes) > _PRUNE_FROM + 2 * len(self.requests):
            self._lanes.prune(self.requests.__contains__)
        return super().update_from_output(scheduler_output, *arguments, **named)

    def _pick(self) -> int | None:
        now = (len(self.running), *self._room())
        if self._picked is None or self._picked[0] != now:
            self._picked = now, self._lanes.pick(self.running, *now[1:])
        return self._picked[1]

    def _room(self) -> tuple[int, int]:
        """Return the number of waiting requests, and how many more may run."""
        waiting: int = self.get_request_counts()[1]
        return waiting, self.max_num_running_reqs - len(self.running)

    def _record(self, lane: int | None, members: list[Any], output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        if lane is None or not scheduled:
            self._exhausted = True
            return
        self._lanes.set_members(lane, members)
        samples = any(
            request.request_id in scheduled and not is_ready(request) for request in members
        )
        self._in_flight[id(output)] = lane if samples else None
        if samples:
            self._lanes.record_send(lane)


SWITCH_S = 30.0
"""Longest wait for all stages to switch; a later one is repeated when the next ring epoch begins."""
BEGIN_S = 30.0


class HeadMethods:
    """The primerl_* methods of stage 0 that concern its engine process; they include its ranks."""

    recorder: HeadRecorder
    """Set by primerl_record()."""

    def __init__(self, config: Any, plan: PipelinePlan, ring: RingClient, ranks: Followers) -> None:
        """`config` is vLLM's; `ranks` may be started later."""
        self._config, self._plan, self._ring, self._ranks = config, plan, ring, ranks
        self._version = -1

    def primerl_attach(self, node_pid: int) -> list[int]:
        """Return the process ids of this process and its ranks; see WorkerExtension."""
        return [os.getpid(), *self._ranks.ordered.call("primerl_attach", node_pid)]

    def primerl_record(self, fingerprint: str) -> list[str]:
        """Begin to record returned tokens. Returns the faults that prevent it, "" for none."""
        self._version = -1
        if fingerprint not in ("", "projection"):
            return [
                f"a pipeline cannot prove by {fingerprint}: set the run's fingerprint to projection"
            ]
        model, plan = self._config.model_config, self._plan
        proven = plan.shape.fingerprint == "projection"
        self.recorder = HeadRecorder(
            boundaries=len(plan.stages) - 1 if proven else 0,
            width=model.get_hidden_size(),
            dtype=torch.float32,
            fingerprint=fingerprint,
            requests=self._config.scheduler_config.max_num_seqs,
            length=model.max_model_len,
        )
        return self._ranks.ordered.call("primerl_record", fingerprint)

    def primerl_collect(self, wanted: list[list[int]], forget: list[int]) -> list[Any]:
        """See Recorder.collect()."""
        return [self.recorder.collect(wanted, forget)]

    def primerl_load(self, version: int, path: str) -> list[Any]:
        """Load a full state on all ranks, while the other stages switch; see WorkerExtension."""
        return self._switch(version, "primerl_load", version, path)

    def primerl_write(self, version: int) -> list[Any]:
        """Write the staged update on all ranks, while the other stages switch; see WorkerExtension."""
        return self._switch(version, "primerl_write", version)

    def primerl_rejoin(self, epoch: int) -> list[str]:
        """Begin a ring epoch while generation is paused. Returns the fault, "" for none."""
        if self._version < 0:
            return ["stage 0 has no weights yet: load a policy first"]
        try:
            self._ring.begin(epoch, self._version, BEGIN_S)
        except EngineError as error:
            return [str(error)[:1000]]
        return [""]

    def primerl_lanes(self) -> list[Any]:
        """See RingClient.lane_stats."""
        return [list(self._ring.lane_stats)]

    def _switch(self, version: int, method: str, *arguments: Any) -> list[Any]:
        wait = self._ring.switch(version)
        results = self._ranks.ordered.call(method, *arguments)
        self._version = self.recorder.version = version
        wait(SWITCH_S)
        return results


_ExecutorBase: Any = Executor
_Output: Any = ModelRunnerOutput
_EMPTY: Any = EMPTY_MODEL_RUNNER_OUTPUT


class HeadExecutor(_ExecutorBase):
    """vLLM's executor on stage 0: sends steps to the ranks, returns futures of their tokens."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return False: a lane is scheduled only after its previous tokens have returned."""
        return False

    def _init_executor(self) -> None:
        share_python()  # scheduling holds the GIL, which would delay each answer several times
        self.place = read_place(os.environ)
        config, shape = self.vllm_config, self.place.shape
        check_passes(config.compilation_config)
        self._encoder = StepEncoder()
        self._answer: Any = None
        self._handles, theirs = Pipe()
        self.followers = Followers(self.parallel_config.tensor_parallel_size, first=0)
        stages = len(self.place.plan.stages)
        graph_rows = config.compilation_config.max_cudagraph_capture_size or 0
        batches = MicroBatches(shape.micro_batches, stages=stages, graph_rows=graph_rows)
        self._ring = RingClient(self._port, batches)
        self._methods = HeadMethods(config, self.place.plan, self._ring, self.followers)
        try:
            self.followers.start(follow, config, init_method(self), theirs)
            theirs.close()
            self.followers.ordered.call("check_health")  # returns once the model is built
            self._ring.open()
        except BaseException:  # on interrupts too: the ranks would wait for this process
            self.followers.close()
            raise
        config.scheduler_config.scheduler_cls = functools.partial(LaneScheduler, ring=self._ring)
        # vLLM has no setting for it: it uses the number of stages. There is one engine in this process
        type(config).max_concurrent_batches = property(lambda _: shape.micro_batches)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """Call a method of HeadMethods, or else on all ranks; return the results in order."""
        if kwargs or non_block or single_value:
            raise EngineError(
                f"vLLM calls {method} with options that pipeline stages do not support: use the vLLM release "
                "that the installation page names"
            )
        own = getattr(self._methods, method, None) if isinstance(method, str) else None
        return own(*args) if own is not None else self.followers.ordered.call(method, *args)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Have the ranks compute a step and send it to the next stage."""
        result: Any = None
        if scheduler_output.total_num_scheduled_tokens:
            self._answer = self._submit(scheduler_output)
        else:
            self._encoder.skip(scheduler_output)
            self.followers.ordered.notify("primerl_compute", scheduler_output)
            result = _EMPTY
        if not non_block:
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Return the tokens of the last executed step, or a future of them."""
        answer, self._answer = self._answer, None
        return answer if non_block else answer.result()

    def check_health(self) -> None:
        """Do nothing: this process ends when one of its ranks does."""

    def shutdown(self) -> None:
        """Close the ring client, so that no thread waits for it, then the ranks."""
        if hasattr(self, "_ring"):
            self._ring.close()
        if hasattr(self, "followers"):
            self.followers.close()

    def _port(self) -> Port:
        first = FirstRankOutlet(self.followers.ordered, self._handles)
        return SplitPort(self.place.socket, FrameLimits.of(self.place.shape), first)

    def _submit(self, output: Any) -> "StepFuture":
        recorder = self._methods.recorder
        for new in output.scheduled_new_reqs:
            extra = new.sampling_params.extra_args[SAMPLING]
            recorder.admit(new.req_id, len(new.prompt_token_ids), *extra)
        step = self._encoder.encode(output)
        samples = [draws(part) for part in step.parts]
        frame, future = self._ring.submit(encode(step), sum(samples))
        rows = sampled_rows(step.parts)
        self.followers.ordered.notify("primerl_compute", output, frame, rows)
        names = list(output.num_scheduled_tokens)
        sequences = StepSequences(names, samples, [part.tokens for part in step.parts])
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        return StepFuture(self._ring, recorder, future, sequences, vocabulary)


class FirstRankOutlet:
    """Implements Outlet: the first rank sends the frames."""

    def __init__(self, ranks: RankPipes, handles: Connection) -> None:
        """`handles` is our end of the pipe that the rank receives sockets on."""
        self._ranks, self._handles = ranks, handles

    def connect(self, target: socket.socket) -> None:
        """Pass the socket to the first rank."""
        any_process = 0  # only Windows needs the id of the receiving process
        send_handle(self._handles, target.fileno(), any_process)
        self._ranks.notify_first("primerl_connect")

    def put(self, frame: Frame) -> None:
        """Send a complete frame."""
        self._ranks.notify_first("primerl_pass", frame)

    def finish(self) -> None:
        """Close the connection after the queued frames."""
        self._ranks.notify_first("primerl_finish")


@dataclass(frozen=True)
class StepSequences:
    """The sequences of a step."""

    names: list[str]
    samples: list[bool]
    """Whether the step samples a token of the sequence."""
    lengths: list[int]


class StepFuture:
    """The future of a step's tokens that vLLM's engine waits for.

    The waiting thread records the tokens.
    """

    def __init__(
        self,
        ring: RingClient,
        recorder: HeadRecorder,
        future: "Future[Frame | None]",
        sequences: StepSequences,
        vocab_size: int,
    ) -> None:
        self._ring, self._recorder, self._future = ring, recorder, future
        self._sequences, self._vocab_size = sequences, vocab_size

    def done(self) -> bool:
        """Return whether result() returns at once."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        """Return vLLM's output; without tokens if the ring failed."""
        frame = self._future.result(timeout)
        names, samples = self._sequences.names, self._sequences.samples
        sampled: list[list[int]] = [[] for _ in names]
        if frame is not None:
            try:
                tokens = iter(self._recorded(frame))
                sampled = [[next(tokens)] if samples_token else [] for samples_token in samples]
            except EngineError as error:
                self._ring.fail(str(error))
        index = dict(zip(names, range(len(names)), strict=True))
        return _Output(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)

    def _recorded(self, frame: Frame) -> tuple[int, ...]:
        answer, sequences = decode_drawn(frame.body), self._sequences
        check_drawn(answer, sum(sequences.samples), self._vocab_size)
        if len(frame.tensors) != 1:
            raise EngineError("the last stage sent no records with its tokens")
        names = list(compress(sequences.names, sequences.samples))
        lengths = list(compress(sequences.lengths, sequences.samples))
        self._recorder.record(names, lengths, frame.tensors[0], frame.trail)
        return answer.tokens
