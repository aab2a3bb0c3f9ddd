"""One rank of a stage: vLLM's worker, its executor, and the process of a rank that follows another one.

vLLM loads this module by name (`worker_cls`) before it builds the model. For the worker the pipeline is as
the plan says; for torch.distributed its stage is alone. Layers, weights and keys follow from the pipeline
group alone, whose peers are behind the node's lines; nothing of vLLM ever sends to them. For vLLM ranks
are numbered stage by stage, as if every stage had as many as this one.

vLLM's own executor for several ranks has all workers in other processes; here the first rank of a later
stage has the port, and its worker is in the same process.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Generator
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm.distributed import parallel_state  # pyright: ignore
from vllm.envs import enable_envs_cache  # pyright: ignore
from vllm.platforms import current_platform  # pyright: ignore
from vllm.utils import network_utils  # pyright: ignore
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # pyright: ignore
from vllm.v1.worker import gpu_model_runner  # pyright: ignore

from ..ops.errors import EngineError
from .place import StagePlace, check_passes, read_place
from .vllm_followers import FAILED, Followers, end_with_first, obey
from .vllm_runner import LaneBatches, remember_making

_state: Any = parallel_state
_platform: Any = current_platform
_Coordinator: Any = _state.GroupCoordinator
_INIT = "init_worker_distributed_environment"


def _worker() -> Any:
    if _platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker  # pyright: ignore

    return Worker


_WorkerBase: Any = _worker()


class FarGroup(_Coordinator):
    """A pipeline group whose other members are on other nodes."""

    def __init__(self, alone: Any, rank: int, size: int) -> None:
        self.__dict__.update(alone.__dict__)
        self.rank = self.rank_in_group = rank
        self.ranks = list(range(size))
        self.world_size = size

    def destroy(self) -> None:
        """It holds nothing of its own."""


class StageWorker(_WorkerBase):
    """One rank of a stage."""

    def init_device(self) -> None:
        """As vLLM's own, in a world of this stage's ranks."""
        with _alone(sys.modules[_WorkerBase.__module__], self.parallel_config, self.rank):
            super().init_device()


@contextlib.contextmanager
def _alone(module: Any, parallel: Any, rank: int) -> Generator[None]:
    """While vLLM's worker of `module` sets up its groups there is but one stage, and then the stage's group."""
    whole, stages = parallel.world_size, parallel.pipeline_parallel_size
    stage, member = divmod(rank, parallel.tensor_parallel_size)
    begin = getattr(module, _INIT)

    def begin_alone(config: Any, _rank: int, *arguments: Any, **named: Any) -> None:
        parallel.world_size, parallel.pipeline_parallel_size = whole // stages, 1
        try:
            begin(config, member, *arguments, **named)
        finally:
            parallel.world_size, parallel.pipeline_parallel_size = whole, stages
        _state._PP = FarGroup(_state._PP, stage, stages)

    setattr(module, _INIT, begin_alone)
    try:
        yield
    finally:
        setattr(module, _INIT, begin)


_ExecutorBase: Any = UniProcExecutor
_network: Any = network_utils
_settle_settings: Any = enable_envs_cache


class RankExecutor(_ExecutorBase):
    """One rank of a stage: its worker is in this process."""

    supports_pp = True
    place: StagePlace
    _member = 0
    """Which of its stage's ranks it is."""
    _method: str
    """Where they meet, for torch.distributed."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """A step is scheduled when the tokens of the one before are there."""
        return False

    @property
    def worker(self) -> Any:
        """vLLM's worker itself."""
        return self.driver_worker.worker

    def settle_thread(self) -> None:
        """Call it in the thread that computes: which device is meant is a matter of each thread."""
        if self.worker.device.type != "cpu":
            torch.accelerator.set_device_index(self.worker.device)

    def _init_executor(self) -> None:
        self.place = read_place(os.environ)
        check_passes(self.vllm_config.compilation_config)
        remember_making(gpu_model_runner)
        super()._init_executor()
        runner = self.worker.model_runner
        LaneBatches(runner, self.place.shape.micro_batches).install()
        if runner.device.type == "cuda" and runner.prepare_inputs_event is None:
            # steps are not waited for: what the device still reads of one must not be written over by the next
            runner.prepare_inputs_event = torch.cuda.Event(blocking=True)  # as vLLM's own
        _settle_settings()  # as in vLLM's own: they are asked for in every step

    def _distributed_args(self) -> tuple[str, int, int]:
        first = self.place.rank * self.parallel_config.tensor_parallel_size
        return self._method, first + self._member, self._member


def meeting_place(executor: Any) -> str:
    """Where the ranks of a stage meet, for torch.distributed; `executor` is vLLM's."""
    method: str = _ExecutorBase._distributed_args(executor)[0]
    if method.startswith("file:"):
        return method
    # in 0.25: an address that others can reach
    here, port = _network.get_loopback_ip(), _network.get_open_port()
    return _network.get_distributed_init_method(here, port)


class FollowerExecutor(RankExecutor):
    """Of a rank that is told what to do (follow())."""

    def __init__(self, config: Any, member: int, method: str) -> None:
        self._member, self._method = member, method
        super().__init__(config)


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
        if not len(self.followers):
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        if kwargs or non_block or single_value:
            raise EngineError(f"vLLM calls {method} in a way that several ranks do not know")
        others = self.followers.turns.begin(method, *args)
        own = super().collective_rpc(method, timeout, args)
        return [*own, *others()]

    def beside(self, method: str, *arguments: Any) -> list[Any]:
        """On all ranks, beside what they compute; on this one last: a version that is here is on all."""
        others = self.followers.beside.ask(method, *arguments)
        return [getattr(self.worker, method)(*arguments), *others]

    def shutdown(self) -> None:
        """End the others first."""
        if hasattr(self, "followers"):
            self.followers.close()
        super().shutdown()

    def _init_executor(self) -> None:
        self._method = meeting_place(self)
        self.followers = Followers(self.parallel_config.tensor_parallel_size - 1)
        try:
            self.followers.start(follow, self.vllm_config, self._method)
            super()._init_executor()
        except BaseException:  # also when interrupted: they would wait for this one
            self.followers.close()
            raise


def follow(
    rank: int,
    turns: Connection,
    beside: Connection,
    config: Any,
    method: str,
    handles: Connection | None = None,
) -> None:
    """Compute as rank `rank` of its stage with vLLM's `config`, together with the ranks that meet at `method`.

    Through `handles` the first rank of stage 0 is given the socket that it writes to.
    """
    try:
        _compute(rank, turns, beside, config, method, handles)
    except BaseException:  # the others cannot go on without this one
        traceback.print_exc()
        os._exit(FAILED)
    os._exit(0)


def _compute(
    rank: int,
    turns: Connection,
    beside: Connection,
    config: Any,
    method: str,
    handles: Connection | None,
) -> None:
    end_with_first()
    executor = FollowerExecutor(config, rank, method)
    if rank == 0:
        executor.worker.primerl_handles(handles)

    def call(name: str, arguments: Any) -> Any:
        (found,) = executor.collective_rpc(name, args=tuple(arguments))
        return found

    def work_beside() -> None:
        executor.settle_thread()
        obey(beside, call)

    threading.Thread(target=work_beside, name="primerl-beside", daemon=True).start()
    obey(turns, call)
