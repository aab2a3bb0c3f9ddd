"""A run whose loss compares with a teacher in a directory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.multimodal_cases import saved
from support.swarm import Running, Swarm
from support.witness import WitnessBackend

from primerl.node.app.factories import Factories
from primerl.node.config.run import RunConfig
from primerl.node.models import huggingface


class Looking(WitnessBackend):
    """Remembers which text models are in the cache when its ranks would start."""

    cache: Path
    found: list[Path]

    async def start(self, model_dir: Path) -> None:
        self.found = list(self.cache.rglob("model.safetensors"))
        await super().start(model_dir)


class LookingSwarm(Swarm):
    cache: Path

    def _factories(self, running: Running, ledger: Any = None) -> Factories:
        def backend(config: RunConfig) -> WitnessBackend:
            made = Looking(self.fakes)
            made.cache = self.cache
            self.backends.append(made)
            return made

        return replace(super()._factories(running, ledger), backend=backend)


async def test_the_text_model_of_a_teacher_is_written_before_the_ranks_start(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    saved("qwen3_5", tmp_path / "teacher")
    loss = {"type": "reverse_kl", "reference": str(tmp_path / "teacher")}
    async with LookingSwarm(tmp_path, model_dir, max_steps=1, training={"loss": loss}) as swarm:
        swarm.cache = tmp_path / "cache"
        await swarm.start_trainer()
        swarm.add_worker("w1")
        await swarm.finished()
        backend = swarm.backend
    assert isinstance(backend, Looking)
    directory = huggingface.text_directory(tmp_path / "teacher")
    assert backend.found == [directory / "model.safetensors"]
