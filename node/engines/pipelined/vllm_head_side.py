"""Stage 0 apart from what its ranks compute: it keeps what comes back, and switches with the other stages.

It lives in the process of vLLM's engine. Methods that are called by name there (`primerl_...`) are looked for
here first (vllm_head_executor.py).
"""

import os
from typing import Any

import torch

from ....protocol.pipelines import PipelinePlan
from ...errors import EngineError
from .chain import Chain
from .vllm_followers import Followers
from .vllm_recorders import Keeper

SWITCH_S = 30.0
"""For all stages to write; what is not over then is done when the next chain begins."""
BEGIN_S = 30.0


class HeadSide:
    """Answers for the whole of stage 0, its ranks included."""

    keeper: Keeper
    """Once primerl_record() was called."""

    def __init__(self, config: Any, plan: PipelinePlan, chain: Chain, ranks: Followers) -> None:
        """`config` is vLLM's; `ranks` may be started later."""
        self._config, self._plan, self._chain, self._ranks = config, plan, chain, ranks
        self._version = -1

    def primerl_attach(self, node_pid: int) -> list[int]:
        """As everywhere; this process ends with its ranks."""
        return [os.getpid(), *self._ranks.turns.ask("primerl_attach", node_pid)]

    def primerl_record(self, fingerprint: str) -> list[str]:
        """Keep what comes back from now on. Returns what speaks against it."""
        self._version = -1
        if fingerprint not in ("", "projection"):
            return [
                f"a pipeline carries no proofs of {fingerprint}: the run's fingerprint must be projection"
            ]
        model, plan = self._config.model_config, self._plan
        proven = plan.shape.fingerprint == "projection"
        self.keeper = Keeper(
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
