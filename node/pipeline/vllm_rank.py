"""One rank of a stage: vLLM's worker, its executor, and the process of a follower rank.

vLLM loads this module by name (`worker_cls`) before it builds the model. vLLM's worker sees the plan's pipeline
group, from which its layers and weights follow, while torch.distributed sees this stage's ranks only: vLLM
never sends to other stages. Ranks are numbered stage by stage, as if every stage had as many ranks as this one.

vLLM's multi-process executor runs all workers in other processes. Here the first rank of a later stage owns the
port, and its worker runs in the same process.
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

from ..errors import EngineError
from ..inference.place import StagePlace, check_passes, read_place
from .vllm_followers import FAILED, Followers, end_with_first, serve_calls
from .vllm_runner import LaneBatches, record_batch_arguments

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
    """A pipeline-parallel group whose other members are on other nodes."""

    def __init__(self, alone: Any, rank: int, size: int) -> None:
        self.__dict__.update(alone.__dict__)
        self.rank = self.rank_in_group = rank
        self.ranks = list(range(size))
        self.world_size = size

    def destroy(self) -> None:
        """Do nothing: the group has no resources of its own."""


class StageWorker(_WorkerBase):
    """vLLM's worker as one rank of a stage."""

    def init_device(self) -> None:
        """Initialize the device, and torch.distributed with this stage's ranks only."""
        with _alone(sys.modules[_WorkerBase.__module__], self.parallel_config, self.rank):
            super().init_device()


@contextlib.contextmanager
def _alone(module: Any, parallel: Any, rank: int) -> Generator[None]:
    """While vLLM's worker of `module` sets up its groups, show it one stage only.

    Then set the FarGroup.
    """
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
    """Executor of one rank of a stage, with its worker in this process."""

    supports_pp = True
    place: StagePlace
    _member = 0
    """This rank's number within its stage."""
    _method: str
    """init_method of torch.distributed."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return False: a lane is scheduled only after its previous tokens have returned."""
        return False

    @property
    def worker(self) -> Any:
        """vLLM's worker, without its wrapper."""
        return self.driver_worker.worker

    def settle_thread(self) -> None:
        """Set the calling thread's device; call it in each thread that computes."""
        if self.worker.device.type != "cpu":
            torch.accelerator.set_device_index(self.worker.device)

    def _init_executor(self) -> None:
        self.place = read_place(os.environ)
        check_passes(self.vllm_config.compilation_config)
        record_batch_arguments(gpu_model_runner)
        super()._init_executor()
        runner = self.worker.model_runner
        LaneBatches(runner, self.place.shape.micro_batches).install()
        if runner.device.type == "cuda" and runner.prepare_inputs_event is None:
            # steps are not waited for: the next one must not overwrite inputs that the device still reads
            runner.prepare_inputs_event = torch.cuda.Event(blocking=True)  # as vLLM does
        _settle_settings()  # caches them as vLLM does, since every step reads them

    def _distributed_args(self) -> tuple[str, int, int]:
        first = self.place.rank * self.parallel_config.tensor_parallel_size
        return self._method, first + self._member, self._member


def init_method(executor: Any) -> str:
    """Choose the init_method of torch.distributed for a stage's ranks; `executor` is vLLM's."""
    method: str = _ExecutorBase._distributed_args(executor)[0]
    if method.startswith("file:"):
        return method
    # vLLM 0.25 chooses an address that other hosts can reach: take the loopback instead
    here, port = _network.get_loopback_ip(), _network.get_open_port()
    return _network.get_distributed_init_method(here, port)


class FollowerExecutor(RankExecutor):
    """Executor of a follower rank; see follow()."""

    def __init__(self, config: Any, member: int, method: str) -> None:
        self._member, self._method = member, method
        super().__init__(config)


class StageExecutor(RankExecutor):
    """Executor of a stage's first rank, which commands the others."""

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
        """Call a method on all ranks; return the results in order."""
        if not len(self.followers):
            return super().collective_rpc(method, timeout, args, kwargs, non_block, single_value)
        if kwargs or non_block or single_value:
            raise EngineError(
                f"vLLM calls {method} with options that pipeline stages do not support: use the vLLM release "
                "that the installation page names"
            )
        others = self.followers.ordered.begin(method, *args)
        own = super().collective_rpc(method, timeout, args)
        return [*own, *others()]

    def call_concurrently(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all ranks beside the steps, on this one last.

        The order ensures that a version that this rank has is on all ranks.
        """
        others = self.followers.concurrent.call(method, *arguments)
        return [getattr(self.worker, method)(*arguments), *others]

    def shutdown(self) -> None:
        """End the followers, then this rank."""
        if hasattr(self, "followers"):
            self.followers.close()
        super().shutdown()

    def _init_executor(self) -> None:
        self._method = init_method(self)
        self.followers = Followers(self.parallel_config.tensor_parallel_size - 1)
        try:
            self.followers.start(follow, self.vllm_config, self._method)
            super()._init_executor()
        except BaseException:  # on interrupts too: the followers would wait for this process
            self.followers.close()
            raise


def follow(
    rank: int,
    ordered: Connection,
    concurrent: Connection,
    config: Any,
    method: str,
    handles: Connection | None = None,
) -> None:
    """Run rank `rank` of a stage with vLLM's `config`.

    `method` is the init_method of torch.distributed. The first rank of stage 0 receives the socket that it
    sends to through `handles`.
    """
    try:
        _compute(rank, ordered, concurrent, config, method, handles)
    except BaseException:  # the other ranks cannot continue without this one
        traceback.print_exc()
        os._exit(FAILED)
    os._exit(0)


def _compute(
    rank: int,
    ordered: Connection,
    concurrent: Connection,
    config: Any,
    method: str,
    handles: Connection | None,
) -> None:
    end_with_first()
    executor = FollowerExecutor(config, rank, method)
    if rank == 0:
        executor.worker.primerl_handles(handles)

    def call(name: str, arguments: Any) -> Any:
        (result,) = executor.collective_rpc(name, args=tuple(arguments))
        return result

    def serve_concurrent() -> None:
        executor.settle_thread()
        serve_calls(concurrent, call)

    threading.Thread(target=serve_concurrent, name="primerl-concurrent", daemon=True).start()
    serve_calls(ordered, call)
