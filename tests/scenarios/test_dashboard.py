"""The page and /metrics of a trainer and a worker of one run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
from support.swarm import Running, Swarm

from primerl.crypto.hashing import short
from primerl.node.app.public_page import PublicRun
from primerl.node.ops import control
from primerl.node.ops.dashboard import Dashboard


async def fetched(node: Running, path: str) -> Any:
    """Ask the page of a node; text, or decoded JSON of api/."""
    answer = await asyncio.to_thread(control.ask, node.data_dir, "dashboard")
    url, _, token = answer["link"].partition("#token=")
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(url + path, headers=headers) as reply,
    ):
        text = await reply.text()
        assert reply.status == 200, text
        return json.loads(text) if path.startswith("api/") else text


async def test_nodes_of_a_run_show_it_and_what_their_files_hold(
    tmp_path: Path, model_dir: Path
) -> None:
    async with Swarm(tmp_path, model_dir, max_steps=100_000) as swarm:
        await swarm.start_trainer()
        worker = swarm.add_worker("worker", dashboard={"port": 0})
        await swarm.wait_step(3)
        text = await fetched(swarm.trainer, "metrics")
        assert 'primerl_workers{state="working"} 1.0' in text
        assert 'primerl_node_info{role="trainer"' in text
        assert 'role="inference"' in await fetched(worker, "metrics")
        peer = worker.node_id.hex()
        [newest, *_] = await fetched(swarm.trainer, f"api/verdicts?peer={peer}")
        assert newest["worker"] == peer
        [audit, *_] = await fetched(swarm.trainer, "api/audits")
        assert (audit["worker"], audit["result"]) == (peer, "clean")
        assert audit["version"] >= 0
        assert audit["tokens"] > 0
        async with asyncio.timeout(60):  # they are written beside the steps
            while not (rollouts := await fetched(swarm.trainer, "api/rollouts"))["rollouts"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        place = rollouts["rollouts"][0]["place"]
        assert (await fetched(swarm.trainer, f"api/rollout?place={place}"))[0]["parts"]
        assert (await fetched(swarm.trainer, "api/ticket"))["ticket"] == swarm.ticket
        assert await fetched(swarm.trainer, "api/evaluations") == []
        prompts = await fetched(swarm.trainer, f"api/rollout?place={place}")
        await _check_public(swarm, worker, [text for text, _ in prompts[0]["parts"]])
        figures = await asyncio.to_thread(control.ask, swarm.trainer.data_dir, "figures")
        [row], status = figures["peers"], figures["status"]
        assert sum(row["chunk_bytes"].values()) > 0
        assert status["history"][-1][0] >= 3
        assert status["step_s"] > 0
        assert status["bytes_received"] == row["bytes_received"]


async def _check_public(swarm: Swarm, worker: Running, texts: list[str]) -> None:
    """Read the world's page of a real run: its step, and nothing that leads to a node or a text."""
    page = Dashboard(PublicRun(swarm.trainer.data_dir), 0, public_host="127.0.0.1")
    page.open()
    async with aiohttp.ClientSession() as session, session.get(f"{page.url}events") as reply:
        text = "".join([(await reply.content.readline()).decode() for _ in range(5)])
    await page.close()
    figures = json.loads(text.splitlines()[1].removeprefix("data: "))
    assert figures["status"]["step"] >= 3
    assert figures["peers"][0]["short"] == short(worker.node_id)
    ticket = swarm.read_ticket()
    addresses = [*ticket.addresses, str(swarm.run_dir), swarm.ticket, ticket.run.hex()]
    ids = [ticket.trainer.hex(), worker.node_id.hex()]
    for secret in (*addresses, *ids, *filter(str.strip, texts)):
        assert secret not in text
