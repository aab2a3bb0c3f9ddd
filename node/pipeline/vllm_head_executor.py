"""Run stage 0 in the process of vLLM's engine: its scheduler, its executor, and the tokens that come back.

vLLM loads this module there. The engine is vLLM's own; it asks for a step, and gets a future of its
tokens. Each call of the scheduler sees one lane, so that several micro-batches are in flight; blocks,
prefixes, preemption and the order of requests stay vLLM's own. What computes are ranks in processes of
their own, as with vLLM's own executor for several: scheduling takes as long as computing does, and both
are mostly Python.
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
from ..inference.vllm_arguments import SAMPLING
from ..ops.errors import EngineError
from ..process.threads import share_python
from .frames import Frame, FrameLimits
from .micro_batches import LaneAssignment, MicroBatches, RingClient, is_ready, rest
from .place import check_passes, read_place
from .ports import Port, SplitPort
from .step_codec import StepEncoder, check_drawn, decode_drawn, draws, encode
from .vllm_followers import Followers, RankPipes
from .vllm_rank import follow, meeting_place
from .vllm_recorders import HeadRecorder
from .vllm_runner import drawing

_SchedulerBase: Any = Scheduler
_CAPS = ("max_num_running_reqs", "max_num_active_reqs")
"""Most sequences that run; the second one is not in all releases."""
_FORGET_FROM = 256


class LaneScheduler(_SchedulerBase):
    """One lane a call, in turns; nothing while the pipeline is broken."""

    def __init__(self, *arguments: Any, chain: RingClient, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._chain = chain
        self._lanes = LaneAssignment(chain.lanes)
        self._flying: dict[int, int | None] = {}
        """Scheduled micro-batches that are not back -> their lane, if they draw."""
        self._tried = False
        """Whether nothing could be scheduled since something came back."""
        self._picked: tuple[tuple[int, int, int], int | None] | None = None
        """(running, waiting and free counts, lane picked): has_requests() is asked twice before schedule()."""
        self._said = False
        """What has_requests() answered last."""
        self._hushed = False
        """Whether the next question is that of a caller that would sleep."""

    def has_requests(self) -> bool:
        """Whether schedule() should be called: else vLLM waits for a micro-batch in flight, or for news.

        A step that only took a result in asks once more, to sleep a millisecond if there is work: that is
        answered by no. While something is in flight a no never makes vLLM wait for news alone.
        """
        hushed, self._hushed = self._hushed, False
        self._said = not hushed and self._has_work()
        return self._said

    def _has_work(self) -> bool:
        if not self._chain.whole:
            return False
        if not super().has_requests():
            return False
        return not self._flying or (not self._tried and self._pick() is not None)

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """A micro-batch of the lane whose turn it is; an empty one if none can do anything."""
        waiting, free = self._room()
        lane, self._picked = self._pick(), None
        mine: list[Any] = []
        most = 0
        running: list[Any] = self.running
        if lane is not None:
            mine, most = self._lanes.take(lane, running, waiting, free)
        others = rest(running, mine)
        caps = {name: getattr(self, name) for name in _CAPS if hasattr(self, name)}
        for name in caps:
            setattr(self, name, max(len(mine), min(most, free + len(mine))))
        self.running = mine
        # ranks keep each lane's sequences (vllm_runner.py): else vLLM would send all their tokens every time
        self.prev_step_scheduled_req_ids = {one.request_id for one in mine}
        try:
            output = super().schedule(*arguments, **named)
        finally:
            for name, cap in caps.items():
                setattr(self, name, cap)
            mine, self.running = self.running, others + self.running
        self._note(lane, mine, output)
        return output

    def update_from_output(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        """Take the tokens that have come back."""
        lane = self._flying.pop(id(scheduler_output), None)
        if lane is not None:
            self._lanes.back(lane)
        self._tried, self._picked = False, None
        self._hushed = not self._said and bool(self._flying)
        if len(self._lanes) > _FORGET_FROM + 2 * len(self.requests):
            self._lanes.forget(self.requests.__contains__)
        return super().update_from_output(scheduler_output, *arguments, **named)

    def _pick(self) -> int | None:
        now = (len(self.running), *self._room())
        if self._picked is None or self._picked[0] != now:
            self._picked = now, self._lanes.pick(self.running, *now[1:])
        return self._picked[1]

    def _room(self) -> tuple[int, int]:
        """(requests that wait, how many more may run)."""
        waiting: int = self.get_request_counts()[1]
        return waiting, self.max_num_running_reqs - len(self.running)

    def _note(self, lane: int | None, mine: list[Any], output: Any) -> None:
        scheduled = output.num_scheduled_tokens
        if lane is None or not scheduled:
            self._tried = True
            return
        self._lanes.settle(lane, mine)
        draws = any(one.request_id in scheduled and not is_ready(one) for one in mine)
        self._flying[id(output)] = lane if draws else None
        if draws:
            self._lanes.sent(lane)


SWITCH_S = 30.0
"""For all stages to write; a switch that is not over then is done when the next chain begins."""
BEGIN_S = 30.0


class HeadSide:
    """Answers for the whole of stage 0, its ranks included."""

    keeper: HeadRecorder
    """Once primerl_record() was called."""

    def __init__(
        self, config: Any, plan: PipelinePlan, chain: RingClient, ranks: Followers
    ) -> None:
        """`config` is vLLM's; `ranks` may be started later."""
        self._config, self._plan, self._chain, self._ranks = config, plan, chain, ranks
        self._version = -1

    def primerl_attach(self, node_pid: int) -> list[int]:
        """As everywhere; this process ends with its ranks."""
        return [os.getpid(), *self._ranks.turns.ask("primerl_attach", node_pid)]

    def primerl_record(self, fingerprint: str) -> list[str]:
        """Keep the tokens that come back from now on. Returns the faults that forbid it, "" for none."""
        self._version = -1
        if fingerprint not in ("", "projection"):
            return [
                f"a pipeline carries no proofs of {fingerprint}: the run's fingerprint must be projection"
            ]
        model, plan = self._config.model_config, self._plan
        proven = plan.shape.fingerprint == "projection"
        self.keeper = HeadRecorder(
            boundaries=len(plan.stages) - 1 if proven else 0,
            width=model.get_hidden_size(),
            dtype=torch.float32,
            fingerprint=fingerprint,
            requests=self._config.scheduler_config.max_num_seqs,
            length=model.max_model_len,
        )
        return self._ranks.turns.ask("primerl_record", fingerprint)

    def primerl_collect(self, wanted: list[list[int]], forget: list[int]) -> list[Any]:
        """See Recorder.collect()."""
        return [self.keeper.collect(wanted, forget)]

    def primerl_load(self, version: int, path: str) -> list[Any]:
        """As everywhere; the other stages write theirs meanwhile."""
        return self._written(version, "primerl_load", version, path)

    def primerl_write(self, version: int) -> list[Any]:
        """As everywhere; the other stages write theirs meanwhile."""
        return self._written(version, "primerl_write", version)

    def primerl_rejoin(self, epoch: int) -> list[str]:
        """Begin a chain, while nothing is generated. Returns why it did not; "" if it did."""
        if self._version < 0:
            return ["stage 0 has no weights yet: load a policy first"]
        try:
            self._chain.begin(epoch, self._version, BEGIN_S)
        except EngineError as error:
            return [str(error)[:1000]]
        return [""]

    def primerl_lanes(self) -> list[Any]:
        """See Chain.cut."""
        return [list(self._chain.cut)]

    def _written(self, version: int, method: str, *arguments: Any) -> list[Any]:
        wait = self._chain.switch(version)
        found = self._ranks.turns.ask(method, *arguments)
        self._version = self.keeper.version = version
        wait(SWITCH_S)
        return found


_ExecutorBase: Any = Executor
_Output: Any = ModelRunnerOutput
_EMPTY: Any = EMPTY_MODEL_RUNNER_OUTPUT


class HeadExecutor(_ExecutorBase):
    """Stage 0's."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """A step is scheduled when the tokens of the one before are there."""
        return False

    def _init_executor(self) -> None:
        share_python()  # scheduling is all Python: an answer would wait for it three times
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
        self._chain = RingClient(self._port, batches)
        self._side = HeadSide(config, self.place.plan, self._chain, self.followers)
        try:
            self.followers.start(follow, config, meeting_place(self), theirs)
            theirs.close()
            self.followers.turns.ask("check_health")  # answered once the model is built
            self._chain.open()
        except BaseException:  # also when interrupted: they would wait for this process
            self.followers.close()
            raise
        config.scheduler_config.scheduler_cls = functools.partial(LaneScheduler, chain=self._chain)
        # vLLM has no setting for it, and means the number of stages; there is one engine in this process
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
        """By this side of it, if that is its matter; else on all ranks. Answers in order."""
        if kwargs or non_block or single_value:
            raise EngineError(f"vLLM calls {method} in a way that ranks elsewhere do not know")
        own = getattr(self._side, method, None) if isinstance(method, str) else None
        return own(*args) if own is not None else self.followers.turns.ask(method, *args)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Have this stage's part of a step computed, and sent on."""
        result: Any = None
        if scheduler_output.total_num_scheduled_tokens:
            self._answer = self._go(scheduler_output)
        else:
            self._encoder.skip(scheduler_output)
            self.followers.turns.tell("primerl_compute", scheduler_output)
            result = _EMPTY
        if not non_block:
            return result
        future: Future[Any] = Future()
        future.set_result(result)
        return future

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The tokens of the step that was sent last, or a future of them."""
        answer, self._answer = self._answer, None
        return answer if non_block else answer.result()

    def check_health(self) -> None:
        """A rank that ends, ends this process."""

    def shutdown(self) -> None:
        """End the chain first, so that no thread waits for it."""
        if hasattr(self, "_chain"):
            self._chain.close()
        if hasattr(self, "followers"):
            self.followers.close()

    def _port(self) -> Port:
        first = FirstRankOutlet(self.followers.turns, self._handles)
        return SplitPort(self.place.socket, FrameLimits.of(self.place.shape), first)

    def _go(self, output: Any) -> "StepFuture":
        keeper = self._side.keeper
        for new in output.scheduled_new_reqs:
            extra = new.sampling_params.extra_args[SAMPLING]
            keeper.admit(new.req_id, len(new.prompt_token_ids), *extra)
        step = self._encoder.encode(output)
        drawn = [draws(part) for part in step.parts]
        frame, future = self._chain.submit(encode(step), sum(drawn))
        self.followers.turns.tell("primerl_compute", output, frame, drawing(step.parts))
        names = list(output.num_scheduled_tokens)
        asked = StepSequences(names, drawn, [part.tokens for part in step.parts])
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        return StepFuture(self._chain, keeper, future, asked, vocabulary)


class FirstRankOutlet:
    """Implements Outlet: what leaves, leaves from there."""

    def __init__(self, turns: RankPipes, handles: Connection) -> None:
        """`handles` is the other end of what the rank was started with."""
        self._turns, self._handles = turns, handles

    def connect(self, target: socket.socket) -> None:
        """Hand it over."""
        any_process = 0  # only Windows needs the id of the receiving process
        send_handle(self._handles, target.fileno(), any_process)
        self._turns.tell_first("primerl_connect")

    def put(self, frame: Frame) -> None:
        """Send a frame that is whole."""
        self._turns.tell_first("primerl_pass", frame)

    def finish(self) -> None:
        """End the connection."""
        self._turns.tell_first("primerl_finish")


@dataclass(frozen=True)
class StepSequences:
    """The sequences of a step."""

    names: list[str]
    drawing: list[bool]
    """Whether a token comes back for it."""
    lengths: list[int]


class StepFuture:
    """A future of a step's tokens, as vLLM's engine waits for it; the waiting thread files the answer."""

    def __init__(
        self,
        chain: RingClient,
        keeper: HeadRecorder,
        future: "Future[Frame | None]",
        asked: StepSequences,
        vocab_size: int,
    ) -> None:
        self._chain, self._keeper, self._future = chain, keeper, future
        self._asked, self._vocab_size = asked, vocab_size

    def done(self) -> bool:
        """Whether result() does not wait."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        """vLLM's output; without a token where the chain broke."""
        frame = self._future.result(timeout)
        names, drawing = self._asked.names, self._asked.drawing
        sampled: list[list[int]] = [[] for _ in names]
        if frame is not None:
            try:
                tokens = iter(self._filed(frame))
                sampled = [[next(tokens)] if one else [] for one in drawing]
            except EngineError as error:
                self._chain.fail(str(error))
        index = dict(zip(names, range(len(names)), strict=True))
        return _Output(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)

    def _filed(self, frame: Frame) -> tuple[int, ...]:
        drawn, asked = decode_drawn(frame.body), self._asked
        check_drawn(drawn, sum(asked.drawing), self._vocab_size)
        if len(frame.tensors) != 1:
            raise EngineError("the last stage sent no numbers with its tokens")
        names = list(compress(asked.names, asked.drawing))
        lengths = list(compress(asked.lengths, asked.drawing))
        self._keeper.file(names, lengths, frame.tensors[0], frame.trail)
        return drawn.tokens
