"""vLLM's executor for a stage: one worker in this process, and with engine.tp others that follow it.

vLLM loads this module in the process that computes, as it makes its executor. At stage 0 each step also goes
round the ring: the engine is all vLLM's own, it schedules, asks for a step, and gets a future of its tokens.
"""

import functools
import time
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from vllm.utils import network_utils  # pyright: ignore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput  # pyright: ignore

from ...errors import EngineError
from ...pipeline.frame import Frame
from ...pipeline.frame_codec import FrameLimits
from ...pipeline.micro_batches import MicroBatches
from ...pipeline.port import Port
from ...pipeline.socket_port import SocketPort
from ..vllm_options import SAMPLING
from .chain import Chain
from .step_codec import check_drawn, decode_drawn, draws, encode
from .vllm_encoder import Encoder
from .vllm_follower import main as follow
from .vllm_followers import Followers
from .vllm_rank import RankExecutor
from .vllm_recorders import Keeper
from .vllm_scheduler import LaneScheduler
from .vllm_states import Departure, gather, leaving, order_of

network: Any = network_utils
_Output: Any = ModelRunnerOutput
_EMPTY: Any = EMPTY_MODEL_RUNNER_OUTPUT
ALONE = frozenset({"primerl_rejoin", "primerl_lanes", "primerl_collect"})
"""Methods of the worker that are the first rank's alone."""


class StageExecutor(RankExecutor):
    """The first rank of a stage: it commands the others."""

    followers: Followers

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """On all ranks, their answers in order."""
        if not len(self.followers) or method in ALONE:
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        if kwargs or non_block or single_value:
            raise EngineError(f"vLLM calls {method} in a way that several ranks do not know")
        others = self.followers.turns.begin(method, *args)
        own = super().collective_rpc(method, timeout, args)
        return [*own, *others()]

    def beside(self, method: str, *arguments: Any) -> list[Any]:
        """On all ranks, beside what they compute; on this one last, so that what is here is everywhere."""
        others = self.followers.beside.ask(method, *arguments)
        return [getattr(self.worker, method)(*arguments), *others]

    def shutdown(self) -> None:
        """End the others first."""
        if hasattr(self, "followers"):
            self.followers.close()
        super().shutdown()

    def _init_executor(self) -> None:
        self._method = super(RankExecutor, self)._distributed_args()[0]
        if not self._method.startswith("file:"):  # in 0.25: an address that others can reach
            here, port = network.get_loopback_ip(), network.get_open_port()
            self._method = network.get_distributed_init_method(here, port)
        self.followers = Followers(self.parallel_config.tensor_parallel_size - 1)
        try:
            self.followers.start(follow, self.vllm_config, self._method)
            super()._init_executor()
        except BaseException:  # also when interrupted: they would wait for this one
            self.followers.close()
            raise


class HeadExecutor(StageExecutor):
    """Stage 0's."""

    def _init_executor(self) -> None:
        super()._init_executor()
        shape = self.place.shape
        self._encoder = Encoder()
        self._answer: Any = None
        stages = len(self.place.plan.stages)
        self._chain = Chain(self._port, MicroBatches(shape.micro_batches, stages=stages))
        self._chain.open()
        worker = self.worker
        worker._primerl_chain, worker._primerl_shape = self._chain, shape
        worker._primerl_stages = len(self.place.plan.stages)
        config = self.vllm_config
        config.scheduler_config.scheduler_cls = functools.partial(LaneScheduler, chain=self._chain)
        # vLLM has no setting for it, and means the number of stages; there is one engine in this process
        type(config).max_concurrent_batches = property(lambda _: shape.micro_batches)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Compute this stage's part of a step, and send it on."""
        result: Any = None
        if scheduler_output.total_num_scheduled_tokens:
            self._answer = self._go(scheduler_output)
        else:
            self._encoder.skip(scheduler_output)
            self.followers.turns.tell("primerl_compute", scheduler_output)
            self.worker.model_runner.execute_model(scheduler_output, None)
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

    def shutdown(self) -> None:
        """End the chain first: nobody waits for it then."""
        if hasattr(self, "_chain"):
            self._chain.close()
        super().shutdown()

    def _port(self) -> Port:
        return SocketPort(self.place.socket, FrameLimits.of(self.place.shape))

    def _go(self, output: Any) -> "Answer":
        began = time.monotonic()
        worker, shape = self.worker, self.place.shape
        runner, keeper = worker.model_runner, worker._primerl_recorder
        for new in output.scheduled_new_reqs:
            extra = new.sampling_params.extra_args[SAMPLING]
            keeper.admit(new.req_id, len(new.prompt_token_ids), *extra)
        step = self._encoder.encode(output)
        names, drawing = list(output.num_scheduled_tokens), [draws(part) for part in step.parts]
        self.followers.turns.tell("primerl_compute", output)
        with torch.inference_mode():
            found = runner.execute_model(output, None)
            index = gather(order_of(runner), names, output.num_scheduled_tokens)
            stream = leaving(found.tensors, output.total_num_scheduled_tokens, index)
            proven = bool(shape.fingerprint)
            departure = Departure(stream, step.parts, shape.encoding, proven=proven)
        future = self._chain.submit(encode(step), departure.wait, sum(drawing), began)
        asked = Asked(names, drawing, [part.tokens for part in step.parts])
        return Answer(self._chain, keeper, future, asked, worker.vocab_size)


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
