"""What runs inside vLLM's worker at stage 0: it keeps what comes back, and switches together with the others.

vLLM imports this module by name (`worker_extension_cls`), as it does vllm_worker.py.
"""

from typing import Any

import torch

from ....protocol.pipelines import PipelineShape
from ...errors import EngineError
from ..vllm_worker import WorkerExtension
from .chain import Chain
from .vllm_recorders import Keeper

SWITCH_S = 30.0
"""For all stages to write; what is not over then is done when the next chain begins."""
BEGIN_S = 30.0


class HeadExtension(WorkerExtension):
    """As everywhere, but that tokens are drawn elsewhere."""

    _primerl_chain: Chain
    """Set by vllm_executor.py, which made it."""
    _primerl_stages: int
    _primerl_shape: PipelineShape
    _primerl_version: int

    def primerl_record(self, fingerprint: str) -> str:
        """Keep what comes back from now on. Returns what speaks against it; "" if nothing."""
        self._primerl_recorder, self._primerl_loaded = None, False
        self._primerl_version = -1
        model = self.vllm_config.model_config
        if fingerprint not in ("", "projection"):
            return f"a pipeline carries no proofs of {fingerprint}: the run's fingerprint must be projection"
        proven = self._primerl_shape.fingerprint == "projection"
        self._primerl_recorder = Keeper(
            boundaries=self._primerl_stages - 1 if proven else 0,
            width=model.get_hidden_size(),
            dtype=torch.float32,
            fingerprint=fingerprint,
            requests=self.vllm_config.scheduler_config.max_num_seqs,
            length=model.max_model_len,
        )
        return ""

    def primerl_load(self, version: int, path: str) -> None:
        """As everywhere; the other stages write theirs meanwhile."""
        chain = self._primerl_chain
        wait = chain.switch(version)
        super().primerl_load(version, path)
        wait(SWITCH_S)

    def primerl_write(self, version: int) -> int:
        """As everywhere; the other stages write theirs meanwhile."""
        wait = self._primerl_chain.switch(version)
        count = super().primerl_write(version)
        wait(SWITCH_S)
        return count

    def primerl_rejoin(self, epoch: int) -> str:
        """Begin a chain, while nothing is generated. Returns why it did not; "" if it did."""
        if self._primerl_version < 0:
            return "stage 0 has no weights yet: load a policy first"
        try:
            self._primerl_chain.begin(epoch, self._primerl_version, BEGIN_S)
        except EngineError as error:
            return str(error)[:1000]
        return ""

    def primerl_lanes(self) -> list[float]:
        """See Chain.cut."""
        return list(self._primerl_chain.cut)

    def _primerl_written(self, version: int) -> None:
        super()._primerl_written(version)
        self._primerl_version = version


class FollowerExtension(WorkerExtension):
    """At stage 0 on every rank but the first: it holds its part of the weights, and does what it is told."""

    def primerl_compute(self, output: Any) -> None:
        """Its part of a step."""
        with torch.inference_mode():
            self.model_runner.execute_model(output, None)
