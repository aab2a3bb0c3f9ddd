"""Traces of leases, as a collector receives them over HTTP."""

import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.swarm import Swarm, model_dir

from primerl.node.ops.tracing import ENDPOINTS, Tracing, part

__all__ = ["model_dir"]


@asynccontextmanager
async def collector(status: int = 200) -> AsyncGenerator[tuple[str, list[Any]]]:
    """A collector on loopback: its address, and the spans that it is sent, each with its service's name."""
    received: list[Any] = []

    async def take(request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                received.extend((names["service.name"], span) for span in scope.spans)
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}", received
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


async def test_a_lease_is_one_trace_of_spans_from_its_worker_and_its_trainer(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collector() as (address, received):
        monkeypatch.setenv(ENDPOINTS[0], address)
        async with Swarm(tmp_path, model_dir) as swarm:
            await swarm.start_trainer()
            swarm.add_worker("w1")
            await swarm.finished()
            await swarm.workers["w1"].ended()
    roots = {span.trace_id: span for _, span in received if span.name == "lease"}
    assert len(roots) == len([span for _, span in received if span.name == "lease"]) > 1
    batches = [span for _, span in received if span.name == "batch"]
    assert len(batches) == 3
    trained = {link.trace_id for span in batches for link in span.links}
    assert trained <= roots.keys()
    for trace in trained:
        spans = {span.name: (who, span) for who, span in received if span.trace_id == trace}
        assert {name: who for name, (who, _) in spans.items()} == {
            **dict.fromkeys(("lease", "generate", "prove", "upload"), "primerl-inference"),
            **dict.fromkeys(("receive", "verify", "audit"), "primerl-trainer"),
        }
        root = roots[trace]
        assert root.parent_span_id == b""
        for name, (_, span) in spans.items():
            if name not in ("lease", "audit"):
                assert span.parent_span_id == root.span_id, name
        assert spans["audit"][1].parent_span_id == spans["verify"][1].span_id


@pytest.mark.parametrize("status", [500, 0])
async def test_a_collector_that_fails_or_is_not_there_costs_its_spans_alone(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    async with collector(status or 200) as (address, _):
        monkeypatch.setenv(ENDPOINTS[1], f"{address if status else 'http://127.0.0.1:9'}/v1/traces")
        tracing = Tracing(b"r" * 32, "inference", b"n" * 32)
        with tracing.lease("lease", 7, root=True), part("generate", rollouts=2):
            pass
        await tracing.close()


async def test_an_error_passes_through_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    async with collector() as (address, received):
        monkeypatch.setenv(ENDPOINTS[0], address)
        tracing = Tracing(b"r" * 32, "inference", b"n" * 32)
        with pytest.raises(TimeoutError), tracing.lease("upload", 7):
            raise TimeoutError("late")
        await tracing.close()
    ((_, span),) = received
    assert span.status.message == "TimeoutError: late"
    assert not span.events


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    program = """
import sys
from primerl.node.ops.tracing import Tracing, part
tracing = Tracing(b"r" * 32, "trainer", b"n" * 32)
with tracing.lease("lease", 1, root=True), part("generate"), tracing.batch("batch", [1]):
    pass
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
