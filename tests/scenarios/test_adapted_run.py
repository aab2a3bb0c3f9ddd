"""Whole runs with adapters: a real trainer, real engines and real audits, over the memory transport."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.audits import AuditedSwarm
from support.counting_environment import EvenEnvironment
from support.sharp_model import make_sharp
from support.swarm import Running, Swarm
from support.waiting import until
from support.witness import WitnessAuditor

from primerl.node.app import factories
from primerl.node.config.run import EngineConfig, EnvironmentConfig, RunConfig
from primerl.node.environments.environment import Environment
from primerl.node.errors import UsageError
from primerl.node.inference.engine import Engine
from primerl.node.inference.hf import HfEngine
from primerl.node.models import base_weights, model_files
from primerl.node.training.backend import Snapshot
from primerl.node.training.local_backend import LocalBackend
from primerl.node.verification.auditor import Auditor
from primerl.node.weights.adapters import merge
from primerl.node.weights.state import Changed, State, digests, state_digest
from primerl.node.weights.state_history import state_bytes

LORA = {"rank": 2, "alpha": 16.0}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sharp(tmp_path_factory.mktemp("tiny"), layers=2)


class NotingEngine(HfEngine):
    """Notes what it was given."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.given: dict[int, bytes] = {}

    async def load(self, version: int, state: State) -> None:
        """See Engine."""
        self.given[version] = state_digest(digests(state))
        await super().load(version, state)

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine."""
        self.given[version] = state_digest(digests(state))
        await super().update(version, state, changed)


class LazyEngine(HfEngine):
    """Of a worker that never loads what is new, and says that it did."""

    async def update(self, version: int, state: State, changed: Changed) -> None:
        """See Engine."""
        none: Changed = {}
        await super().update(version, state, none)


class NotingBackend(LocalBackend):
    """Notes what it gave to be published."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.training, max_steps=config.max_steps, seed=config.seed)
        self.given: list[State] = []

    def snapshot(self) -> asyncio.Future[Snapshot]:
        """See TrainBackend."""
        found = super().snapshot()
        found.add_done_callback(lambda one: self.given.append(one.result().state))
        return found


class AdaptedSwarm(Swarm):
    """Real parts in place of fakes."""

    def __init__(self, directory: Path, model: Path, **settings: Any) -> None:
        training = {"lr": 3e-3, "weight_decay": 0.0, "threads": 1, "device": "cpu", "lora": LORA}
        engine = {"device": "cpu", "max_model_len": 64}
        super().__init__(directory, model, training=training, engine=engine, **settings)
        self.real: list[NotingBackend] = []

    def _factories(self, running: Running, ledger: Any = None) -> factories.Factories:
        def backend(config: RunConfig) -> NotingBackend:
            self.real.append(NotingBackend(config))
            return self.real[-1]

        def engine(config: EngineConfig) -> Engine:
            return running.engine or HfEngine(config)

        def environment(
            config: EnvironmentConfig, model: Path, seed: int, max_tokens: int, temperature: float
        ) -> Environment:
            return EvenEnvironment(max_tokens=max_tokens)

        return replace(
            super()._factories(running, ledger),
            backend=backend,
            engine=engine,
            evaluation_engine=factories.make_evaluation_engine,
            auditor=factories.make_auditor,
            environment=environment,
        )


class UnauditedSwarm(AdaptedSwarm):
    """Without a process that audits."""

    def _factories(self, running: Running, ledger: Any = None) -> factories.Factories:
        def auditor(config: EngineConfig, timeout_s: float) -> Auditor:
            return WitnessAuditor(self.fakes)

        return replace(super()._factories(running, ledger), auditor=auditor)


class WatchedSwarm(AdaptedSwarm, AuditedSwarm):
    """With a validator beside the trainer's own auditor."""


def noting() -> NotingEngine:
    return NotingEngine(EngineConfig(device="cpu", max_model_len=64))


@pytest.mark.slow
async def test_a_run_with_adapters_trains_publishes_and_audits_merged_weights(
    tmp_path: Path, tiny: Path
) -> None:
    fresh = {"max_off_policy_steps": 0}  # so that the trainer's policy is the one that sampled
    async with AdaptedSwarm(tmp_path, tiny, rollouts=fresh, evaluation={"prompts": 2}) as swarm:
        await swarm.start_trainer()
        engine: Any = noting()
        worker = swarm.add_worker("w", engine=engine)
        summary = await swarm.finished()
        await worker.ended()
        metrics, (backend,) = swarm.metrics(), swarm.real
    assert summary["steps"] == 3
    assert summary["rejected"].keys() <= {"stale"}
    assert summary["accepted"] >= 3 * 4 * 4  # every one of them audited
    # what travels is the adapters, what is loaded is what they make of the base
    base = model_files.read_state(tmp_path / "r" / "trainer" / "model")
    config = RunConfig.model_validate(swarm.settings).training.lora
    assert config is not None
    merged = [merge(base, adapters, config) for adapters in backend.given]
    named = {version: state_digest(digests(one)) for version, one in enumerate(merged)}
    assert len(set(named.values())) == len(named) == 4
    assert engine.given.items() <= named.items()
    assert len(engine.given) >= 2
    size = state_bytes(backend.given[0])
    assert size < state_bytes(base) / 10
    for row in metrics:
        assert row["weights/delta_bytes"] < size + 1000
        assert row["mismatch_kl/all/mean"] < 1e-3
        assert row["optim/skipped"] == 0
    # and the run leaves adapters that others can read
    weights = tmp_path / "r" / "weights" / "step_3"
    assert json.loads((weights / "adapter_config.json").read_text())["r"] == 2
    assert digests(model_files.read_state(weights)) == digests(backend.given[-1])


@pytest.mark.slow
async def test_a_worker_that_does_not_merge_what_is_new_is_found_out(
    tmp_path: Path, tiny: Path
) -> None:
    """Its proofs are of the policy before: the first steps are so large that this cannot be noise."""
    settings: dict[str, Any] = {"max_off_policy_steps": 0}
    async with AdaptedSwarm(tmp_path, tiny, rollouts=settings, max_steps=2) as swarm:
        await swarm.start_trainer()
        lazy: Any = LazyEngine(EngineConfig(device="cpu", max_model_len=64))
        swarm.add_worker("lazy", engine=lazy)
        await swarm.wait_step(1)
        assert (await _rejected(swarm)).keys() <= {"wrong_model", "wrong_policy", "stale"}


async def _rejected(swarm: Swarm) -> dict[str, int]:
    """What the trainer refused, once it has refused something that did not merely come too late."""
    async with asyncio.timeout(100.0):
        while True:
            found = (await swarm.trainer.status())["rejected"]
            if found.keys() - {"stale"}:
                return found
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_validator_fetches_the_base_and_finds_nothing_wrong(
    tmp_path: Path, tiny: Path
) -> None:
    async with WatchedSwarm(tmp_path, tiny, max_steps=2) as swarm:
        await swarm.start_trainer()
        auditor = factories.make_auditor(EngineConfig(device="cpu"), 60.0)
        validator = swarm.add_validator(auditor)
        await swarm.seated()
        engine: Any = noting()
        swarm.add_worker("w", engine=engine)
        async with asyncio.timeout(60.0):  # on a busy machine its first audit may outlast the run
            while not int((await validator.status())["detail"].split()[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        summary = await swarm.finished()
    assert summary["rejected"].keys() <= {"stale"}


async def test_workers_may_join_while_the_trainer_still_writes_its_copy_of_the_base(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, write = threading.Event(), threading.Event(), base_weights.write

    def slowly(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(60.0)
        write(*arguments)

    monkeypatch.setattr(base_weights, "write", slowly)
    async with UnauditedSwarm(tmp_path, tiny) as swarm:
        await swarm.start_trainer()
        assert await asyncio.to_thread(begun.wait, 60.0)
        engine: Any = noting()
        worker = swarm.add_worker("w", engine=engine)
        await swarm.until_row(worker, lambda row: row["role"] == "inference", 60.0)
        assert not (tmp_path / "r" / "trainer" / "model" / base_weights.FILE).exists()
        assert not engine.given
        go_on.set()
        await until(lambda: engine.given)


async def test_a_run_goes_on_with_the_adapters_that_it_began_with(
    tmp_path: Path, tiny: Path
) -> None:
    async with AdaptedSwarm(tmp_path, tiny) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0, 60.0)
        await swarm.stop_trainer()
        training: Any = swarm.settings["training"]
        for lora in ({"rank": 4, "alpha": 16.0}, None):
            swarm.settings["training"] = {**training, "lora": lora}
            with pytest.raises(UsageError, match=r"this run began with training\.lora"):
                await swarm.start_trainer(resume=True)
        swarm.settings["training"] = training
        await swarm.start_trainer(resume=True)
        await swarm.wait_step(0, 60.0)
