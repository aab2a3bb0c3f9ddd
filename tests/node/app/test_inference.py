"""The node of `primerl-node inference`: weights of a directory, adapters, or those of a run as they come."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from support.api_cases import Client
from support.engine_cases import make_qwen3, request, started
from support.swarm import CONFIG, Running, Swarm, make_model, quiet_registry
from support.waiting import until
from support.witness import Fakes, WitnessEngine

from primerl.crypto.keys import SecretKey
from primerl.node.api.server import ApiLimits
from primerl.node.app.factories import Factories
from primerl.node.app.inference import FollowedPolicy, OwnPolicy, api_limits
from primerl.node.app.running_node import Node
from primerl.node.config.run import EngineConfig
from primerl.node.config.serving import ServeConfig
from primerl.node.config.training import LoraConfig
from primerl.node.errors import BusyError, EngineError, UsageError
from primerl.node.inference.hf import HfEngine
from primerl.node.models import model_files
from primerl.node.ops import control
from primerl.node.weights.adapters import adapter_shapes, merge
from primerl.node.weights.checkpoint import write_checkpoint
from primerl.node.weights.state import State, Tensor

__all__ = ["quiet_registry"]


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A directory as a run leaves one behind, and what is in it."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("run")
    state = make_qwen3(run / "model", 3)
    model_files.export(state, run / "model", run / "weights" / "step_12")
    return run / "weights" / "step_12", state


def serve_config(directory: Path, **settings: Any) -> ServeConfig:
    base: dict[str, Any] = {
        "data_dir": directory,
        "fsync": False,
        "network": CONFIG["network"],
        "engine": {"device": "cpu", "max_model_len": 64},
        "api": {"port": 0},
    }
    return ServeConfig.model_validate(base | settings)


def key() -> SecretKey:
    return SecretKey.from_seed(b"s" * 32)


class Announced:
    """What a node says once it serves."""

    def __init__(self) -> None:
        self.url = ""
        self.name = ""
        self.times = 0

    def __call__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.times += 1


@asynccontextmanager
async def running(node: Node, told: Announced) -> AsyncGenerator[Client]:
    """A node until the block ends, and a client of it."""
    task = asyncio.create_task(node.run())  # type: ignore[attr-defined]
    try:
        async with asyncio.timeout(60.0):
            while not told.url:
                if task.done():
                    task.result()
                await asyncio.sleep(0.02)
        async with aiohttp.ClientSession() as http:
            yield Client(told.url, http)
        await node.request_stop()
        await task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def generated_ids(client: Client, prompt: list[int]) -> list[int]:
    reply = await client.generate(prompt, sampling_params={"max_tokens": 9, "seed": 4})
    assert reply.status == 200, reply.text
    return reply.json["choices"][0]["token_ids"]


async def wanted(directory: Path, state: State) -> list[int]:
    """What an engine of our own says."""
    engine = await started(HfEngine(EngineConfig(device="cpu", max_model_len=64)), directory, state)
    try:
        return (await engine.generate(request("ab", seed=4, max_tokens=9))).token_ids
    finally:
        await engine.close()


async def test_the_step_weights_of_a_run_are_served_as_what_they_are(
    tmp_path: Path, own_model: tuple[Path, State]
) -> None:
    directory, state = own_model
    told = Announced()
    config = serve_config(tmp_path / "n", model={"name": str(directory)})
    node = OwnPolicy(config, key(), told)
    async with running(node, told) as client:
        found = await generated_ids(client, [97, 98])
        [card] = (await client.get("/v1/models")).json["data"]
        status = await asyncio.to_thread(control.ask, tmp_path / "n", "status")
    assert (card["id"], card["policy_version"], card["max_model_len"]) == (str(directory), 12, 64)
    assert (status["phase"], status["version"]) == ("running", 12)
    assert told.url in status["detail"]
    assert status["engine"]["type"] == "hf"
    assert found == await wanted(directory, state)


def random_bf16(shape: tuple[int, int], seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return Tensor("BF16", shape, values.flatten().view(torch.int16).numpy().view("<u2"))


async def test_adapters_are_served_merged_into_their_base(
    tmp_path: Path, own_model: tuple[Path, State]
) -> None:
    base, state = own_model
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj",))
    shapes = adapter_shapes({name: one.shape for name, one in state.items()}, lora)
    adapters = {name: random_bf16(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    directory = tmp_path / "adapters"
    directory.mkdir()
    write_checkpoint(directory / "adapter_model.safetensors", adapters, metadata={"format": "pt"})
    told = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    announced = Announced()
    model = {"name": str(directory), "base": str(base)}
    node = OwnPolicy(serve_config(tmp_path / "n", model=model), key(), announced)
    async with running(node, announced) as client:
        found = await generated_ids(client, [97, 98])
    assert found == await wanted(base, merge(state, adapters, lora))
    assert found != await wanted(base, state)


async def test_a_run_is_followed_version_by_version_without_a_lease(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    fakes = Fakes(last_step=1)  # nobody learns the second step before `go`
    async with Swarm(tmp_path / "swarm", model, fakes=fakes) as swarm:
        await swarm.start_trainer()
        own = Running(SecretKey.from_seed(b"o" * 32), tmp_path / "o")
        own.engine = WitnessEngine(fakes, "server")
        told = Announced()
        config = serve_config(own.data_dir, ticket=swarm.ticket)
        factories: Factories = swarm._factories(own)  # pyright: ignore[reportPrivateUsage]
        node = FollowedPolicy(config, own.key, told, factories)
        async with running(node, told) as client:
            assert told.name == "r"
            assert (await client.get("/health")).json["policy_version"] == 0
            swarm.add_worker("w1")
            await swarm.wait_step(1)
            engine = own.engine
            await until(lambda: engine.policy_version == 1)
            reply = await client.generate([3, 4], sampling_params={"max_tokens": 4})
            assert reply.json["policy_version"] == {"first": 1, "last": 1}
            # it is no worker: it has a version, and nothing is waited for
            row = await swarm.until_row(own, lambda row: row["version"] == 1, 20.0)
            assert (row["role"], row["lag"], row["starting"]) == ("server", 0, False)
            assert (row["leases"], row["accepted"], row["rejected"]) == (0, 0, 0)
            fakes.go.set()
            summary = await swarm.finished()
            # the run is over: its last version is served on
            await until(lambda: engine.policy_version == summary["steps"])
            reply = await client.generate([3, 4], sampling_params={"max_tokens": 4})
            assert reply.headers["X-Policy-Version"] == str(summary["steps"])
            status = await asyncio.to_thread(control.ask, own.data_dir, "status")
            assert status["version"] == summary["steps"]
    assert told.times == 1


async def test_a_port_that_is_taken_ends_the_node_before_anything_is_loaded(
    tmp_path: Path, own_model: tuple[Path, State]
) -> None:
    told = Announced()
    config = serve_config(tmp_path / "n", model={"name": str(own_model[0])})
    async with running(OwnPolicy(config, key(), told), told):
        port = int(told.url.rsplit(":", 1)[1])
        taken = serve_config(tmp_path / "m", model={"name": str(own_model[0])}, api={"port": port})
        with pytest.raises(BusyError, match=str(port)):
            await OwnPolicy(taken, key(), Announced()).run()


def test_the_api_takes_no_more_than_the_engine_lets_wait() -> None:
    assert api_limits(EngineConfig(max_batch=2)).max_inflight == 32
    assert api_limits(EngineConfig(max_batch=2, type="vllm")) == ApiLimits()


async def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    empty = {"name": str(tmp_path / "empty")}
    for model, message in ((empty, "cannot be served"), ({}, "nothing to serve")):
        node = OwnPolicy(serve_config(tmp_path / "n", model=model), key(), Announced())
        with pytest.raises(UsageError, match=message):
            await node.run()


async def test_an_engine_that_is_given_up_ends_the_node(
    tmp_path: Path, own_model: tuple[Path, State]
) -> None:
    class Lost(HfEngine):
        gone = False

        def stats(self) -> Any:
            if self.gone:
                raise EngineError("vLLM was started 5 times in a row")
            return super().stats()

    made: list[Lost] = []

    def engine(config: EngineConfig) -> Lost:
        made.append(Lost(config))
        return made[0]

    told = Announced()
    config = serve_config(tmp_path / "n", model={"name": str(own_model[0])})
    node = OwnPolicy(config, key(), told, Factories(engine=engine))
    task = asyncio.create_task(node.run())
    await until(lambda: bool(told.url))
    made[0].gone = True
    async with aiohttp.ClientSession() as http:
        assert (await Client(told.url, http).get("/health")).status == 503
    with pytest.raises(EngineError, match="5 times in a row"):
        await asyncio.wait_for(task, 60.0)
