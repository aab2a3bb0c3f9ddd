"""Trace leases by OpenTelemetry: a lease is a trace, to which its worker and its trainer each send their spans.

Off unless an OTLP endpoint is named by OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT). Ids follow from run and lease, so nothing of this travels between nodes. A
thread of the library sends spans, and drops them where nobody takes them: a node never waits for it. They have
ids, counts and errors, no prompts and no replies.
"""

import asyncio
import logging
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from ... import __version__
from ...crypto.hashing import derive

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
CLOSE_S = 3
"""Longest that a request to the endpoint takes, seconds."""

_current: "ContextVar[Tracing | None]" = ContextVar("tracing", default=None)
"""Tracing of the lease whose span is open in this task."""


class Tracing:
    """The spans of one node in its run."""

    def __init__(self, run_id: bytes = b"", role: str = "", node: bytes = b"") -> None:
        """Start the exporter if an endpoint is named; without arguments: never."""
        self._run = run_id
        self._sdk: _Sdk | None = None
        if not run_id or not any(os.environ.get(name) for name in ENDPOINTS):
            return
        try:
            self._sdk = _Sdk(role, node)
        except ImportError as error:
            logger.warning(
                "no traces are sent (%s): pip install 'primerl-node[tracing]', or unset %s",
                error,
                " and ".join(name for name in ENDPOINTS if os.environ.get(name)),
            )

    @contextmanager
    def lease(
        self, name: str, lease_id: int, *, root: bool = False, **attributes: int | str
    ) -> Generator[None]:
        """Trace a part of a lease; `root` is the span that the others of both nodes stand under."""
        if self._sdk is None:
            yield
            return
        token = _current.set(self)
        try:
            trace, span = self._ids(lease_id)
            parts = {"lease": lease_id, **attributes}
            with self._sdk.span(name, trace, span, parts, root=root):
                yield
        finally:
            _current.reset(token)

    @contextmanager
    def batch(self, name: str, leases: Iterable[int], **attributes: int | str) -> Generator[None]:
        """Trace work on what several leases brought, with a link to each of them."""
        if self._sdk is None:
            yield
            return
        with self._sdk.linked(name, map(self._ids, leases), attributes):
            yield

    def _ids(self, lease_id: int) -> tuple[int, int]:
        """Return trace id and root span id of a lease, the same on every node."""
        name = derive("trace", self._run, lease_id.to_bytes(8, "big"))
        trace = int.from_bytes(name[:TRACE_ID_BYTES], "big")
        return trace, int.from_bytes(name[TRACE_ID_BYTES:][:SPAN_ID_BYTES], "big")

    @contextmanager
    def below(self, name: str, attributes: dict[str, int | str]) -> Generator[None]:
        """Trace work below the span that is open in this task."""
        assert self._sdk is not None
        with self._sdk.tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False
        ):
            yield

    async def close(self) -> None:
        """Send what is left; an endpoint that does not answer is given CLOSE_S seconds."""
        if self._sdk is not None:
            await asyncio.to_thread(self._sdk.provider.shutdown)


@contextmanager
def part(name: str, **attributes: int | str) -> Generator[None]:
    """Trace a part of what is traced in this task; if nothing is, do nothing."""
    tracing = _current.get()
    if tracing is None:
        yield
    else:
        with tracing.below(name, attributes):
            yield


class _Sdk:
    """OpenTelemetry's SDK, with ids of spans that are given."""

    def __init__(self, role: str, node: bytes) -> None:
        """Start its thread. Raises ImportError."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        class Ids(RandomIdGenerator):
            """Random, but for the next root span."""

            given: tuple[int, int] | None = None

            def generate_trace_id(self) -> int:
                return self.given[0] if self.given else super().generate_trace_id()

            def generate_span_id(self) -> int:
                given, self.given = self.given, None
                return given[1] if given else super().generate_span_id()

        self._api, self._ids = trace, Ids()
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win
        own = {"service.version": __version__, "service.instance.id": node.hex()[:16]}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            own["service.name"] = f"primerl-{role}"
        self.provider = TracerProvider(
            resource=Resource.create(own), id_generator=self._ids, shutdown_on_exit=False
        )
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=CLOSE_S)))
        self.tracer = self.provider.get_tracer("primerl", __version__)

    @contextmanager
    def span(
        self, name: str, trace: int, span: int, attributes: dict[str, int | str], *, root: bool
    ) -> Generator[None]:
        """Open the root span of a trace, or one below it, which another node may send."""
        if root:
            self._ids.given = (trace, span)
            context = self._api.set_span_in_context(self._api.INVALID_SPAN)
        else:
            parent = self._api.NonRecordingSpan(self._context(trace, span))
            context = self._api.set_span_in_context(parent)
        with self.tracer.start_as_current_span(
            name, context, attributes=attributes, record_exception=False
        ):
            yield

    @contextmanager
    def linked(
        self, name: str, traces: Iterable[tuple[int, int]], attributes: dict[str, int | str]
    ) -> Generator[None]:
        """Open a span of a trace of its own, with links to the roots of others."""
        links = [self._api.Link(self._context(trace, span)) for trace, span in traces]
        with self.tracer.start_as_current_span(
            name, attributes=attributes, links=links, record_exception=False
        ):
            yield

    def _context(self, trace: int, span: int) -> "SpanContext":
        sampled = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(trace, span, is_remote=True, trace_flags=sampled)
