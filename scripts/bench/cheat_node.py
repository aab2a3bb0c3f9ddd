"""A worker whose engine gets every version with its matrices rounded to 4 bits: the cheat of soak.py.

    python cheat_node.py --settings JSON --ticket FILE [--group 128]

The settings are those of `join`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from primerl.node.config.run import EngineConfig, JoinConfig
from primerl.node.inference.build import build_engine
from primerl.node.inference.engine import Completion, Engine, EngineStats, GenerateRequest
from primerl.node.process.spawn import leave_with_parent
from primerl.node.weights.state import Changed, State, Tensor, floats

UNMATCHED = ("embed", "lm_head")
"""Parts of the names of matrices that stay as they are."""


def four_bits(state: State, group: int) -> State:
    """Round the matrices of the layers to 4 bits, symmetrically, with one scale for `group` inputs of a row."""
    return {
        name: tensor
        if len(tensor.shape) != 2 or any(part in name for part in UNMATCHED)
        else _rounded(tensor, group)
        for name, tensor in state.items()
    }


def _rounded(tensor: Tensor, group: int) -> Tensor:
    assert tensor.dtype == "BF16", "the run is one in bfloat16"
    rows, width = tensor.shape
    padded = np.pad(floats(tensor).reshape(rows, width), ((0, 0), (0, -width % group)))
    blocks = padded.reshape(rows, -1, group)
    scales = np.maximum(np.abs(blocks).max(2, keepdims=True), 1e-30) / 7
    found = (np.rint(blocks / scales) * scales).reshape(rows, -1)[:, :width]
    bits = np.ascontiguousarray(found, np.float32).reshape(-1).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return Tensor("BF16", tensor.shape, nearest.astype("<u2"))


class RoundedEngine:
    """An Engine that computes and reports everything right, with weights of 4 bits."""

    def __init__(self, engine: Engine, group: int) -> None:
        self._engine, self._group = engine, group

    @property
    def policy_version(self) -> int:
        """See Engine."""
        return self._engine.policy_version

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        await self._engine.start(model_dir, fingerprint=fingerprint)

    async def load(self, version: int, state: State) -> None:
        """Load the rounded state."""
        await self._engine.load(version, await asyncio.to_thread(four_bits, state, self._group))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """Load it whole: one weight that changed can change its whole group."""
        await self.load(version, state)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See Engine."""
        return await self._engine.generate(request)

    def stats(self) -> EngineStats:
        """See Engine."""
        return self._engine.stats()

    async def close(self) -> None:
        """See Engine."""
        await self._engine.close()


def main() -> int:
    """Be the worker that cheats, until the run ends."""
    from primerl.node.app.daemon import load_key
    from primerl.node.app.factories import sandboxed
    from primerl.node.app.worker import WorkerNode
    from primerl.node.ops.logs import configure
    from primerl.node.process.threads import share_python

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--ticket", required=True)
    parser.add_argument("--group", type=int, default=128, help="weights of one scale")
    options = parser.parse_args()
    leave_with_parent(os.environ)
    config = JoinConfig.model_validate(json.loads(options.settings))
    config = config.model_copy(update={"ticket": Path(options.ticket).read_text().strip()})
    directory = config.data_dir
    assert directory is not None, "the settings name it"

    def engine(one: EngineConfig) -> Engine:
        return RoundedEngine(build_engine(one), options.group)

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        factories = replace(sandboxed(config), engine=engine)
        await WorkerNode(config, load_key(directory), directory, factories).run()

    configure(config.log, directory / "logs" / "worker.jsonl")
    share_python()
    with suppress(asyncio.CancelledError):
        asyncio.run(work())
    return 0


if __name__ == "__main__":
    sys.exit(main())
