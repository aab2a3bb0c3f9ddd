"""vLLM's executor for stage 0: the engine is vLLM's own; it asks for a step, and gets a future of its tokens.

vLLM loads this module in its engine's process. What computes are ranks in processes of their own, as with
vLLM's own executor for several: scheduling takes as long as computing does, and both are mostly Python.
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

from vllm.v1.executor.abstract import Executor  # pyright: ignore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput  # pyright: ignore

from ...errors import EngineError
from ...pipeline.frame import Frame
from ...pipeline.frame_codec import FrameLimits
from ...pipeline.micro_batches import MicroBatches
from ...pipeline.port import Port
from ...threads import share_python
from ..vllm_options import SAMPLING
from .chain import Chain
from .split_port import SplitPort
from .step_codec import check_drawn, decode_drawn, draws, encode
from .vllm_encoder import Encoder
from .vllm_follower import main as follow
from .vllm_followers import Followers, Line
from .vllm_head_side import HeadSide
from .vllm_place import check_passes, read_place
from .vllm_rank import meeting_place
from .vllm_recorders import Keeper
from .vllm_scheduler import LaneScheduler
from .vllm_states import drawing

_Base: Any = Executor
_Output: Any = ModelRunnerOutput
_EMPTY: Any = EMPTY_MODEL_RUNNER_OUTPUT


class HeadExecutor(_Base):
    """Stage 0's."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """A step is scheduled when the tokens of the one before are there."""
        return False

    def _init_executor(self) -> None:
        share_python()  # scheduling is all Python: what comes back would wait for it thrice
        self.place = read_place(os.environ)
        config, shape = self.vllm_config, self.place.shape
        check_passes(config.compilation_config)
        self._encoder = Encoder()
        self._answer: Any = None
        self._handles, theirs = Pipe()
        self.followers = Followers(self.parallel_config.tensor_parallel_size, first=0)
        stages = len(self.place.plan.stages)
        graph_rows = config.compilation_config.max_cudagraph_capture_size or 0
        batches = MicroBatches(shape.micro_batches, stages=stages, graph_rows=graph_rows)
        self._chain = Chain(self._port, batches)
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
        """End the chain first: nobody waits for it then."""
        if hasattr(self, "_chain"):
            self._chain.close()
        if hasattr(self, "followers"):
            self.followers.close()

    def _port(self) -> Port:
        first = FirstRank(self.followers.turns, self._handles)
        return SplitPort(self.place.socket, FrameLimits.of(self.place.shape), first)

    def _go(self, output: Any) -> "Answer":
        keeper = self._side.keeper
        for new in output.scheduled_new_reqs:
            extra = new.sampling_params.extra_args[SAMPLING]
            keeper.admit(new.req_id, len(new.prompt_token_ids), *extra)
        step = self._encoder.encode(output)
        drawn = [draws(part) for part in step.parts]
        frame, future = self._chain.submit(encode(step), sum(drawn))
        self.followers.turns.tell("primerl_compute", output, frame, drawing(step.parts))
        names = list(output.num_scheduled_tokens)
        asked = Asked(names, drawn, [part.tokens for part in step.parts])
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        return Answer(self._chain, keeper, future, asked, vocabulary)


class FirstRank:
    """Implements Outlet: what leaves, leaves from there."""

    def __init__(self, turns: Line, handles: Connection) -> None:
        """`handles` is the other end of what the rank was started with."""
        self._turns, self._handles = turns, handles

    def connect(self, target: socket.socket) -> None:
        """Hand it over."""
        anybody = 0  # of whom only Windows has to be told which process it is
        send_handle(self._handles, target.fileno(), anybody)
        self._turns.tell_first("primerl_connect")

    def put(self, frame: Frame) -> None:
        """Send a frame that is whole."""
        self._turns.tell_first("primerl_pass", frame)

    def finish(self) -> None:
        """End the connection."""
        self._turns.tell_first("primerl_finish")


@dataclass(frozen=True)
class Asked:
    """The sequences of a step."""

    names: list[str]
    drawing: list[bool]
    """Whether a token comes back for it."""
    lengths: list[int]


class Answer:
    """A future of a step's tokens, as vLLM's engine waits for it; what came is filed by whoever waits."""

    def __init__(
        self,
        chain: Chain,
        keeper: Keeper,
        future: "Future[Frame | None]",
        asked: Asked,
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
