"""A trainer and its workers from first version to last: joining, leaving, and what holds meanwhile."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.memory_network import MemoryNetwork
from support.swarm import MakeLedger, Running, Swarm, shaky, side_by_side
from support.waiting import until
from support.witness import Fakes, WitnessEngine, never_right, trained_ages

from primerl.crypto.hashing import short
from primerl.node.app.factories import Factories
from primerl.node.config.run import EngineConfig
from primerl.node.errors import NetworkError, NodeError, RunFailed
from primerl.node.inference.engine import Engine
from primerl.node.ops import control

KEEP = {"keep_versions": 1000}
"""So that every head is still there at the end."""


async def contributed(swarm: Swarm, workers: list[Running], timeout: float = 60.0) -> None:
    """Wait until the trainer has accepted rollouts of each."""
    wanted = {worker.node_id.hex() for worker in workers}
    async with asyncio.timeout(timeout):
        while True:
            if wanted <= {row["id"] for row in await swarm.trainer.peers() if row["accepted"]}:
                return
            await asyncio.sleep(0.05)


async def phase(node: Running) -> str:
    """What a node is doing; empty before it answers."""
    with suppress(NetworkError):
        return (await node.status())["phase"]
    return ""


async def for_ever() -> None:
    await asyncio.Event().wait()


def hesitant(seed: int, longest_s: float) -> Callable[[], Awaitable[None]]:
    chance = random.Random(seed)

    async def pause() -> None:
        await asyncio.sleep(chance.random() * longest_s)

    return pause


# -- the whole run -----------------------------------------------------------------------------------


async def test_a_run_ends_by_itself_everywhere_and_leaves_its_summary(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir) as swarm:
        await swarm.start_trainer()
        workers = [swarm.add_worker("w1"), swarm.add_worker("w2")]
        summary = await swarm.finished()
        for worker in workers:
            await worker.ended()
        heads = swarm.heads()
    assert sorted(heads) == [(0, version) for version in range(4)]
    assert summary["steps"] == 3
    assert summary["rejected"].keys() <= {"stale"}  # a slow worker may come too late
    assert summary["accepted"] >= 3 * 4 * 4  # every batch is made of accepted rollouts
    assert [step for step, _ in summary["reward_curve"]] == [1, 2, 3]
    assert (swarm.run_dir / "weights" / "step_3" / "model.safetensors").is_file()
    assert (swarm.run_dir / "reward.png").stat().st_size


async def test_ten_batches_without_signal_stop_the_run_with_advice(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, fakes=Fakes(reply=never_right)) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        with pytest.raises(RunFailed, match=r"10 batches in a row had no signal .*: use easier"):
            await swarm.trainer.ended()


async def test_ten_batches_that_nobody_fills_stop_the_run_with_advice(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, rollouts={"batch_timeout_s": 0.02}) as swarm:
        await swarm.start_trainer()
        with pytest.raises(
            RunFailed, match=r"no batch came in 10 x .*: check `primerl-node peers`"
        ):
            await swarm.trainer.ended()


# -- coming and going --------------------------------------------------------------------------------


async def test_workers_from_before_with_and_after_the_trainer_all_contribute(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(pause=hesitant(3, 0.01))
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=10_000) as swarm:
        await swarm.start_trainer()
        await swarm.wait_step(0)
        await swarm.crash_trainer()
        early = swarm.add_worker("early")
        async with asyncio.timeout(60.0):
            while True:
                if await phase(early) == "joining":
                    break
                await asyncio.sleep(0.02)
        await swarm.start_trainer(resume=True)
        prompt = swarm.add_worker("prompt")
        await swarm.wait_step(3)
        late = swarm.add_worker("late")
        await contributed(swarm, [early, prompt, late])


async def test_the_leases_of_a_worker_that_says_goodbye_go_to_others_at_once(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes()
    async with Swarm(
        tmp_path, model_dir, fakes=fakes, rollouts={"lease_timeout_s": 600.0}
    ) as swarm:
        await swarm.start_trainer()
        engine = WitnessEngine(fakes, "leaver", for_ever)
        swarm.add_worker("leaver", engine=engine)
        await until(lambda: engine.waiting == 2 * 4)  # a newcomer is granted one lease
        await swarm.stop_worker("leaver")
        swarm.add_worker("heir")
        await swarm.wait_step(3)
        assert swarm.metrics()[-1]["leases/expired"] == 1
    assert fakes.prompts("leaver") <= fakes.prompts("heir")


async def test_the_leases_of_a_worker_that_vanishes_go_to_others_once_they_run_out(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes()
    rollouts = {"lease_timeout_s": 0.5, "groups_per_batch": 4}
    async with Swarm(
        tmp_path, model_dir, fakes=fakes, max_steps=10_000, rollouts=rollouts
    ) as swarm:
        await swarm.start_trainer()
        engine = WitnessEngine(fakes, "lost", for_ever)
        lost = swarm.add_worker("lost", engine=engine)
        await until(lambda: engine.waiting == 2 * 4)  # a newcomer is granted one lease
        swarm.network.partition(lost.node_id, swarm.trainer.node_id)
        swarm.add_worker("heir")
        # the heir is proven soon and waits for nobody: the run goes on before the lease has run out
        await until(lambda: fakes.prompts("lost") <= fakes.prompts("heir"))
        await until(lambda: any(line["leases/expired"] for line in swarm.metrics()))
        await swarm.wait_step((await swarm.trainer.status())["version"] + 1)


async def test_a_worker_that_was_killed_comes_back_with_its_directory_and_contributes(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(
        tmp_path, model_dir, max_steps=10_000, rollouts={"lease_timeout_s": 0.5}
    ) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("phoenix")
        await swarm.wait_step(2)
        await swarm.crash_worker("phoenix")
        held = swarm.fakes.loads("phoenix")[-1].version
        swarm.add_worker("phoenix")
        await swarm.wait_step(held + 4)
    versions = [event.version for event in swarm.fakes.loads("phoenix")]
    assert versions == sorted(versions)


# -- weights -----------------------------------------------------------------------------------------


class SlowStart(WitnessEngine):
    """An engine that starts when it is told to."""

    def __init__(self, fakes: Fakes, name: str) -> None:
        super().__init__(fakes, name)
        self.starts = asyncio.Event()

    async def start(self, model_dir: Path, *, fingerprint: str = "") -> None:
        """See Engine."""
        await self.starts.wait()
        await super().start(model_dir, fingerprint=fingerprint)


async def test_a_worker_fetches_and_proves_versions_while_its_engine_starts(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fakes = Fakes()
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=10_000) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("early")
        engine = SlowStart(fakes, "late")
        late = swarm.add_worker("late", engine=engine)
        await swarm.wait_step(1)

        async def fetched() -> int:
            with suppress(NetworkError):
                return sum((await late.status())["chunk_bytes_by_source"].values())
            return 0

        for step in (2, 4):
            before = await fetched()
            async with asyncio.timeout(60.0):
                while True:
                    if await fetched() > before:
                        break
                    await asyncio.sleep(0.02)
            await swarm.wait_step(step)
        assert not fakes.loads("late")
        assert (await late.status())["waiting_for"] == "starting the engine and the environments"
        engine.starts.set()
        await contributed(swarm, [late])
        first, *_ = fakes.loads("late")
        assert (first.version >= 2, first.in_place) == (True, False)


async def test_every_worker_loads_exactly_what_was_signed_and_generates_with_nothing_else(
    tmp_path: Path, model_dir: Path
) -> None:
    fakes = Fakes(words=3000, pause=hesitant(5, 0.002))
    network = MemoryNetwork(delay=shaky(7, 0.002))
    async with Swarm(
        tmp_path, model_dir, network=network, fakes=fakes, max_steps=10_000, weights=KEEP
    ) as swarm:
        await swarm.start_trainer()
        swarm.add_worker("w1")
        swarm.add_worker("w2")
        await swarm.wait_step(2)
        swarm.add_worker("w3")
        names = ["w1", "w2", "w3"]
        await until(lambda: all(fakes.prompts(one) and fakes.newest(one) >= 2 for one in names))
        await swarm.stop_trainer()
        heads = swarm.heads()
    held = dict.fromkeys(names, -1)
    for event in fakes.events:
        if event.kind == "load":
            assert event.version > held[event.name]
            assert event.state == heads[0, event.version].state
            held[event.name] = event.version
        else:
            assert event.version == held[event.name] >= 0
    assert min(held.values()) >= 2


async def two_workers(
    tmp_path: Path, model_dir: Path, words: int
) -> tuple[Running, Running, dict[str, dict[str, int]]]:
    """A run with a worker, and one that came when the first had weights: chunk bytes by receiver and source."""
    fakes = Fakes(words=words, pause=hesitant(1, 0.01))
    async with Swarm(tmp_path, model_dir, fakes=fakes, max_steps=8) as swarm:
        await swarm.start_trainer()
        first = swarm.add_worker("first")
        await until(lambda: bool(fakes.loads("first")))
        second = swarm.add_worker("second")
        summary = await swarm.finished()
        await second.ended()
    return first, second, summary["chunk_bytes_by_source"]


async def test_the_second_worker_fetches_most_weights_from_the_first(
    tmp_path: Path, model_dir: Path
) -> None:
    first, second, by_worker = await two_workers(tmp_path, model_dir, words=40_000)
    sources = by_worker[short(second.node_id)]
    assert sources[short(first.node_id)] > sources["trainer"]
    last = json.loads((second.data_dir / "last_status.json").read_text())
    assert last["chunk_bytes_by_source"][short(first.node_id)] >= sources[short(first.node_id)]


@pytest.mark.slow
async def test_of_many_chunks_the_trainer_sends_each_about_once_to_two_workers(
    tmp_path: Path, model_dir: Path
) -> None:
    first, second, by_worker = await two_workers(tmp_path, model_dir, words=300_000)
    everything = sum(by_worker[short(second.node_id)].values())
    from_trainer = sum(by_worker[short(one.node_id)]["trainer"] for one in (first, second))
    assert from_trainer <= 1.5 * everything


# -- staleness ---------------------------------------------------------------------------------------


async def test_no_token_is_trained_that_is_older_than_the_bound(
    tmp_path: Path, model_dir: Path
) -> None:
    cases = [(0, 1), (2, 3)]
    await side_by_side(lambda case: nothing_too_old(tmp_path, model_dir, *case), cases)


async def nothing_too_old(tmp_path: Path, model_dir: Path, bound: int, seed: int) -> None:
    network = MemoryNetwork(delay=shaky(seed, 0.003))
    fakes = Fakes(pause=hesitant(seed, 0.006))
    async with Swarm(
        tmp_path / f"{seed}",
        model_dir,
        network=network,
        fakes=fakes,
        max_steps=8,
        rollouts={"max_off_policy_steps": bound},
    ) as swarm:
        await swarm.start_trainer()
        for name in ("w1", "w2", "w3"):
            swarm.add_worker(name)
        # Far slower than a step takes: what it brings is too old, some of it beyond the bound.
        swarm.add_worker("slow", engine=WitnessEngine(fakes, "slow", hesitant(seed, 0.15)))
        await swarm.wait_step(8)
        batches = swarm.backend.batches
    assert [batch.step for batch in batches] == list(range(1, 9))
    ages = set[int]().union(*map(trained_ages, batches))
    assert ages <= set(range(bound + 1))


# -- the length of a sequence ------------------------------------------------------------------------


class NotingSwarm(Swarm):
    """Notes the longest sequence of the engine of each worker."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lengths: dict[str, int] = {}

    def _factories(self, running: Running, ledger: MakeLedger | None = None) -> Factories:
        factories = super()._factories(running, ledger)

        def engine(config: EngineConfig) -> Engine:
            self.lengths[running.data_dir.name] = config.max_model_len
            return factories.engine(config)

        return replace(factories, engine=engine)


async def test_workers_serve_the_length_of_their_run(
    tmp_path: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The default of 1,024 once cut replies of a longer run short, and the trainer refused them."""
    swarm = NotingSwarm(tmp_path, model_dir, max_steps=10_000, training={"seq_len": 3000})
    async with swarm:
        await swarm.start_trainer()
        sections = {"default": {}, "short": {"max_model_len": 512}, "long": {"max_model_len": 4096}}
        for name, section in sections.items():
            swarm.add_worker(name, engine_section=section)
        await until(lambda: all(swarm.fakes.newest(name) >= 0 for name in sections))
    assert swarm.lengths == {"default": 3000, "short": 512, "long": 3000}
    assert caplog.text.count("engine.max_model_len is 512, and a sequence") == 1
    assert caplog.text.count("engine.max_model_len is ") == 1


# -- names and round trips ---------------------------------------------------------------------------


async def test_a_node_is_shown_by_the_name_it_gave_itself_and_answers_a_ping_from_either_side(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=10_000) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("w1", network={"name": "anna"})
        await swarm.wait_step(1)
        row = await swarm.until_row(worker, lambda row: row["name"], 5.0)
        assert row["name"] == "anna"
        asked = [(swarm.trainer, "anna"), (worker, swarm.trainer.node_id.hex()[:8])]
        for node, peer in asked:
            reply = await asyncio.to_thread(
                control.ask, node.data_dir, "ping", peer=peer, wait_s=5.0
            )
            assert reply["rtt_ms"] is not None
            assert (reply["path"], reply["why"]) == ("memory", "")
        with pytest.raises(NodeError, match="no peer is called 'bert'"):
            await asyncio.to_thread(control.ask, worker.data_dir, "ping", peer="bert", wait_s=5.0)
        assert (await swarm.trainer.status())["warnings"] == [], "no second session of a key"
