"""vLLM's executor for one rank of a stage, whose worker is in this process.

vLLM's own executor for several ranks has all workers in other processes; here the first rank has the port, and
what it computes has no way to go. For vLLM a rank is named as if all stages had as many (vllm_group.py).
"""

import os
from typing import Any

import torch
from vllm.envs import enable_envs_cache  # pyright: ignore
from vllm.utils import network_utils  # pyright: ignore
from vllm.v1.executor.uniproc_executor import UniProcExecutor  # pyright: ignore
from vllm.v1.worker import gpu_model_runner  # pyright: ignore

from ...pipeline.place import Place
from .vllm_batches import LaneBatches, remember_making
from .vllm_place import check_passes, read_place

_Base: Any = UniProcExecutor
_network: Any = network_utils
_settle_settings: Any = enable_envs_cache


class RankExecutor(_Base):
    """One rank of a stage: its worker is in this process."""

    supports_pp = True
    place: Place
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
    method: str = _Base._distributed_args(executor)[0]
    if method.startswith("file:"):
        return method
    # in 0.25: an address that others can reach
    here, port = _network.get_loopback_ip(), _network.get_open_port()
    return _network.get_distributed_init_method(here, port)


class FollowerExecutor(RankExecutor):
    """Of a rank that is told what to do (vllm_follower.py)."""

    def __init__(self, config: Any, member: int, method: str) -> None:
        self._member, self._method = member, method
        super().__init__(config)
