"""`primerl-node rl` in bfloat16 measures its own noise, and tells weights that are 3 % off from it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scenarios.processes import CONFIG, HERE, Nodes, nodes

from primerl.crypto.keys import SecretKey
from primerl.node.app.factories import Factories
from primerl.node.app.worker import WorkerNode
from primerl.node.config.run import EngineConfig, JoinConfig
from primerl.node.inference.engine import Engine
from primerl.node.inference.hf import HfEngine
from primerl.node.ops import control
from primerl.node.weights.state import Changed, State, Tensor

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.timeout(900)]

RANK = 4
SHARE = 0.03
"""Of each matrix' norm."""
PATIENCE_S = 300.0
SEQUENTIAL = "banned: rejected and suspect audits in a sequential test"
Row = dict[str, Any]


def moved(state: State) -> State:
    """The same model with an adapter of its worker's own: each projection moved by SHARE, of rank RANK."""
    chance = np.random.default_rng(5)
    found = dict(state)
    for name, tensor in state.items():
        if len(tensor.shape) != 2 or "proj" not in name:
            continue
        weights = (tensor.data.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
        rows, columns = tensor.shape
        step = chance.normal(size=(rows, RANK)) @ chance.normal(size=(RANK, columns))
        step *= SHARE * np.linalg.norm(weights) / np.linalg.norm(step)
        bits = (weights + step).astype(np.float32).view(np.uint32).reshape(-1)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        found[name] = Tensor("BF16", tensor.shape, rounded.astype("<u2"))
    return found


class MovedEngine(HfEngine):
    """Computes everything right, with weights that are not the policy's."""

    async def load(self, version: int, state: State) -> None:
        await super().load(version, moved(state))

    async def update(self, version: int, state: State, changed: Changed) -> None:
        await self.load(version, state)


def join(run: Nodes, name: str, engine: Callable[[EngineConfig], Engine]) -> WorkerNode:
    """A worker in this process with an engine of its own."""
    settings: Row = {
        "ticket": (run.run_dir / "ticket.txt").read_text(),
        "network": {"host": "127.0.0.1", "libp2p": False},
        "engine": {"device": "cpu", "dtype": "bfloat16"},
        "environments": {"allow": ["early_letters"]},
        "fsync": False,
    }
    config = JoinConfig.model_validate(settings)
    factories = replace(Factories(), engine=engine)
    return WorkerNode(config, SecretKey.generate(), run.directory / name, factories)


def rows(run: Nodes) -> dict[str, Row]:
    """The trainer's rows of its workers, by id."""
    return {row["id"]: row for row in control.ask(run.run_dir / "trainer", "peers")}


async def until(run: Nodes, what: str, found: Callable[[], Any]) -> Any:
    """Wait until `found` finds something."""
    end = time.monotonic() + PATIENCE_S
    while not (seen := await asyncio.to_thread(found)):
        assert time.monotonic() < end, f"no {what}: {await asyncio.to_thread(run.logs)}"
        await asyncio.sleep(0.1)
    return seen


async def test_a_run_calibrates_itself_and_refuses_weights_that_are_3_percent_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE / "tasksets"))
    monkeypatch.syspath_prepend(str(HERE / "tasksets"))
    with nodes(tmp_path) as run:
        begin(run, "rl", "--launch.workers", "2")
        made = await until(
            run,
            "bounds of both workers' class",
            lambda: [
                row
                for row in run.status().get("bounds", [])
                if row["number"] and row["workers"] == 2
            ],
        )
        assert made[0]["rollouts"] >= 64
        assert "bfloat16" in made[0]["numerics"]
        envelope = [row for row in run.status()["bounds"] if row["numerics"] == "any other class"]
        assert envelope[0]["rollouts"] >= 16
        own = await asyncio.to_thread(rows, run)
        assert not any(row["refused"] or row["top_reason"] == "wrong_model" for row in own.values())

        honest, cheat = join(run, "honest", HfEngine), join(run, "cheat", MovedEngine)
        working = [asyncio.create_task(one.run()) for one in (honest, cheat)]
        try:
            cheated = await until(
                run, "refusal", lambda: refused(rows(run), cheat.key.node_id.hex())
            )
            assert cheated["audited"] <= 64
            # the envelope judges it; the more readings made it, the narrower: to reject or to suspect only
            assert SEQUENTIAL in cheated["refused"], cheated
            assert cheated["top_reason"] in ("", "wrong_model", "bad_logprobs", "bad_sampling")
            row = await until(
                run, "accepted work", lambda: trusted(rows(run), honest.key.node_id.hex())
            )
            assert row["refused"] == ""
            assert row["rejected"] == 0 or row["top_reason"] == "stale"
            status = await asyncio.to_thread(run.status)
            assert status["warnings"] == []
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


async def test_strangers_alone_are_learned_from_and_weights_that_are_3_percent_off_are_banned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE / "tasksets"))
    monkeypatch.syspath_prepend(str(HERE / "tasksets"))
    with nodes(tmp_path) as run:
        begin(run, "train", "--network.host", "127.0.0.1")
        await until(run, "ticket", (run.run_dir / "ticket.txt").is_file)
        honest, cheat = join(run, "honest", HfEngine), join(run, "cheat", MovedEngine)
        working = [asyncio.create_task(one.run()) for one in (honest, cheat)]
        try:
            cheated = await until(
                run, "refusal", lambda: refused(rows(run), cheat.key.node_id.hex())
            )
            assert SEQUENTIAL in cheated["refused"]
            assert cheated["audited"] <= 64
            row = await until(
                run, "accepted work", lambda: trusted(rows(run), honest.key.node_id.hex())
            )
            assert row["refused"] == ""
            assert row["rejected"] == 0 or row["top_reason"] == "stale"
            status = await asyncio.to_thread(run.status)
            assert status["warnings"] == []
            assert [one["numerics"] for one in status["bounds"] if one["number"]] == [
                "any other class"
            ]
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)


def begin(run: Nodes, command: str, *flags: str) -> None:
    """Start a run of a tiny model in bfloat16."""
    run.start(
        command, command, "@", str(CONFIG), "--output-dir", str(run.directory / "outputs"),
        "--engine.dtype", "bfloat16", "--engine.device", "cpu",
        "--max-steps", "100000", "--training.lr", "1e-5", "--sampling.max-tokens", "24",
        "--model.create.hidden-size", "64", "--model.create.num-hidden-layers", "2",
        "--network.libp2p", "false", "--rollouts.lease-timeout-s", "60", *flags,
    )  # fmt: skip


def refused(found: dict[str, Row], node: str) -> Row | None:
    row = found.get(node)
    return row if row and row["refused"] else None


def trusted(found: dict[str, Row], node: str) -> Row | None:
    row = found.get(node)
    return row if row and row["accepted"] >= 32 else None
