"""What `status` says that a run or a worker waits for, while it does, and before anything ends for it."""

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bare_node import bare_services
from support.swarm import Running, Swarm
from support.waiting import until
from support.witness import Fakes, WitnessBackend, WitnessEngine, never_right

from primerl.crypto.keys import SecretKey
from primerl.node.app.factories import Factories
from primerl.node.config.run import RunConfig
from primerl.node.errors import EngineError, NetworkError, RankFailed
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.p2p.peers import PeerTable
from primerl.node.p2p.status_view import peer_rows

PATIENT: dict[str, Any] = {"max_empty_batches": 1000, "batch_timeout_s": 30.0}


async def status_of(node: Running) -> dict[str, Any]:
    """What `status` says; of a node that does not answer yet, as soon as it does."""
    while True:
        with suppress(NetworkError):
            return await node.status()
        await asyncio.sleep(0.02)


async def says(node: Running, *parts: str, other: Callable[[str], bool] = lambda said: True) -> str:
    """Wait until a node says that it waits for something of these words; seconds are enough."""
    said = ""
    try:
        async with asyncio.timeout(20.0):
            while not (all(part in said for part in parts) and other(said)):
                await asyncio.sleep(0.02)
                said = (await status_of(node))["waiting_for"]
    except TimeoutError:
        pytest.fail(f"{parts} is not said, but {said!r}")
    return said


async def test_groups_of_equal_rewards_are_named_while_they_gather_and_when_batches_were_empty(
    tmp_path: Path, model_dir: Path
) -> None:
    slow = asyncio.Event()
    answered = 0

    async def pause() -> None:
        nonlocal answered
        answered += 1
        if answered > 16:  # two tokens each for 2 groups of 4: the second lease stays out
            await slow.wait()
        await asyncio.sleep(0)

    fakes = Fakes(reply=never_right, pause=pause)
    async with Swarm(tmp_path, model_dir, fakes=fakes, rollouts=PATIENT) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w", engine_section={"max_batch": 4})
        said = await says(swarm.trainer, "of equal rewards (0.00)")
        assert "of 4 groups are in, all" in said
        slow.set()
        several = re.compile(r"every group of the last (\d+) batches had equal rewards \(0\.00\): ")
        said = await says(
            swarm.trainer,
            "stops after 1000 without signal",
            other=lambda said: several.search(said) is not None,
        )
        count = several.search(said)
        assert count is not None
        assert int(count[1]) > 1


class LyingEngine(WitnessEngine):
    """Its logprobs are not those of any policy."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, logprobs=[-9.0] * len(completion.token_ids))


async def test_a_run_whose_workers_are_all_refused_says_so_and_so_do_they(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, rollouts=PATIENT) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w", engine=LyingEngine(swarm.fakes, "w"))
        await says(swarm.trainer, "every worker is refused work (banned: ", "primerl-node explain")
        await says(worker, "resting", "refused work (", "primerl-node explain")


class NoisyEngine(WitnessEngine):
    """Its logprobs are a little further off than those of its numerics class, and not far off."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        return replace(completion, logprobs=[one - 0.004 for one in completion.logprobs])


async def test_where_some_workers_left_and_the_others_are_of_another_class_it_says_what_to_do(
    tmp_path: Path, model_dir: Path
) -> None:
    own = SecretKey.from_seed(b"own".rjust(32, b"\x00")).node_id.hex()
    bf16 = {"dtype": "bfloat16"}
    async with Swarm(
        tmp_path,
        model_dir,
        max_steps=4000,
        engine=bf16,
        verification={"references": [own]},
        rollouts={**PATIENT, "max_peer_share": 1.0},
    ) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("own", engine_section=bf16)
        await until_measured(swarm)
        noisy = swarm.add_worker(
            "noisy", engine=NoisyEngine(swarm.fakes, "noisy"), engine_section=bf16
        )
        await says(noisy, "refused work (wrong numerics class: it claims hf ")
        await swarm.stop_worker("own")
        await says(
            swarm.trainer,
            "1 of 2 workers are gone and the others are refused work",
            "(not of the numerics class that they claim): run the engine, release and GPU of a reference",
        )


async def test_where_all_workers_wait_for_their_noise_to_be_measured_it_says_so(
    tmp_path: Path, model_dir: Path
) -> None:
    bf16 = {"dtype": "bfloat16"}
    named = {"references": ["ab" * 32]}
    async with Swarm(
        tmp_path, model_dir, engine=bf16, verification=named, rollouts=PATIENT
    ) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w", engine_section=bf16)
        await says(
            swarm.trainer,
            "workers: 1 waiting for the bounds of noise of their class (`primerl-node status` names it)",
        )


async def until_measured(swarm: Swarm) -> None:
    """Wait until a class of workers has bounds."""
    async with asyncio.timeout(60.0):
        while True:
            if any(row["number"] for row in (await status_of(swarm.trainer))["bounds"]):
                return
            await asyncio.sleep(0.02)


async def test_a_trainer_without_workers_and_a_worker_without_a_trainer_say_so(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=1000) as swarm:
        await swarm.start_trainer()
        said = await says(swarm.trainer, "no worker has joined", "primerl-node join")
        assert said.startswith("0 of 4 groups are in")
        await swarm.stop_trainer()
        worker = swarm.add_worker("w")
        await says(worker, "the trainer is not reached")
        await swarm.start_trainer(resume=True)
        await until(lambda: swarm.fakes.newest("w") >= 0)
        await swarm.crash_trainer()
        await says(worker, "the trainer is not reached", other=lambda said: "resting" not in said)


async def test_a_worker_that_is_leased_nothing_says_why(tmp_path: Path, model_dir: Path) -> None:
    fakes = Fakes(
        last_step=0
    )  # the trainer learns nothing before `go`: all that it can use is made soon
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=1000) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w")
        await says(worker, "no work is leased: enough work is out for the next steps")
        fakes.go.set()
        await swarm.wait_step(1)


async def test_a_worker_knows_what_its_work_comes_to_and_has_left_when_it_is_stopped(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=1000) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w")
        async with asyncio.timeout(30.0):
            while True:
                status = await status_of(worker)
                if (status["trust"] or 0) > 0.8 and status["engine"]["tokens_per_s"] > 0:
                    break
                await asyncio.sleep(0.05)
        [row] = await swarm.trainer.peers()
        assert abs(row["trust"] - status["trust"]) < 0.2
        await swarm.stop_worker("w")
        [row] = await swarm.trainer.peers()
        assert row["left"]
        assert "failed" not in await says(swarm.trainer, "1 left")


async def test_a_peer_that_is_gone_is_silent_for_as_long_as_it_was_not_seen() -> None:
    table = PeerTable()
    for node, ago in ((b"a" * 32, 3.0), (b"b" * 32, 90.0), (b"c" * 32, None)):
        table.get(node).last_seen = 0.0 if ago is None else time.time() - ago
    rows = await peer_rows(bare_services(peers=table))
    assert [round(row.silent_s) for row in sorted(rows, key=lambda row: row.id)] == [0, 90, 0]


class UnfitEngine(WitnessEngine):
    """An engine that will never start."""

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        raise EngineError("max_model_len (2048) is beyond the model's 1024 positions\x1b[2J")


async def test_a_worker_that_dies_for_good_says_why_in_the_status_of_the_run(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", engine=UnfitEngine(swarm.fakes, "w1"))
        with pytest.raises(EngineError, match="1024 positions"):
            await worker.ended()
        said = await says(swarm.trainer, "1 failed (max_model_len (2048) is beyond the model's")
        assert said.isprintable()
        swarm.add_worker("w1")  # mended
        assert (await swarm.finished())["steps"] == 3


class SlowBackend(WitnessBackend):
    """Its model is loaded when the test says so."""

    def __init__(self, fakes: Fakes, loaded: asyncio.Event, fault: str) -> None:
        super().__init__(fakes)
        self._loaded, self._fault = loaded, fault

    async def start(self, model_dir: Path) -> None:
        await self._loaded.wait()
        if self._fault:
            raise RankFailed(self._fault)
        await super().start(model_dir)


class SlowSwarm(Swarm):
    """A swarm whose trainer loads its model slowly."""

    loaded: asyncio.Event
    fault = ""

    def _factories(self, running: Running, ledger: Any = None) -> Factories:
        def backend(config: RunConfig) -> WitnessBackend:
            self.backends.append(SlowBackend(self.fakes, self.loaded, self.fault))
            return self.backends[-1]

        return replace(super()._factories(running, ledger), backend=backend)


async def test_workers_are_admitted_while_the_trainer_loads_its_model(
    tmp_path: Path, model_dir: Path
) -> None:
    async with SlowSwarm(tmp_path, model_dir, max_steps=1) as swarm:
        swarm.loaded = asyncio.Event()
        await swarm.start_trainer()
        worker = swarm.add_worker("w1")
        await swarm.until_row(worker, lambda row: row["role"] == "inference", 30.0)
        status = await swarm.trainer.status()
        assert (status["phase"], status["version"]) == ("starting", -1)
        assert not swarm.fakes.loads("w1")
        swarm.loaded.set()
        await swarm.finished()
        await worker.ended()


async def test_ranks_that_die_while_the_model_is_loaded_end_the_run_at_once(
    tmp_path: Path, model_dir: Path
) -> None:
    async with SlowSwarm(tmp_path, model_dir) as swarm:
        swarm.loaded, swarm.fault = asyncio.Event(), "rank 1 of 2 failed: out of memory"
        await swarm.start_trainer()
        swarm.loaded.set()
        with pytest.raises(EngineError, match="out of memory") as failed:
            await swarm.trainer.ended()
        assert not isinstance(failed.value, RankFailed)
