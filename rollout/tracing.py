"""One trace from client to worker, by W3C context. Without an OpenTelemetry SDK in a process its part costs nothing.

The context travels in gRPC metadata (``traceparent``) and, from server to worker, with each sample. ``configure`` sets
up an exporter at entry points where the environment names one; libraries never do.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from opentelemetry import propagate, trace

from rollout.errors import ConfigError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
KEY = "traceparent"
Attributes = Mapping[str, str | int]


def configure(service: str) -> bool:
    """Export spans to the OTLP endpoint that the environment names; whether there is one.

    Errors: ConfigError when the exporter is not installed.
    """
    if not os.environ.get(ENDPOINT):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(f"{ENDPOINT} is set, but the exporter is missing: pip install 'zerodrift[otel]'") from error
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True


def traceparent() -> str:
    """The current span's context as one header value; "" outside of any recorded span."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get(KEY, "")


def start(name: str, parent: str, attributes: Attributes | None = None) -> Any:
    """A span below ``parent`` (a ``traceparent``, or "" for a root) that the caller ends."""
    context = propagate.extract({KEY: parent}) if parent else None
    return trace.get_tracer("zerodrift").start_span(name, context=context, attributes=attributes)


@contextmanager
def span(name: str, parent: str = "") -> Iterator[Any]:
    """A current span for the length of the body; its errors are recorded on it."""
    started = start(name, parent)
    with trace.use_span(started, end_on_exit=True):
        yield started


@asynccontextmanager
async def call_span(details: grpc.HandlerCallDetails) -> AsyncIterator[None]:
    """The server's span of one call, below the client's."""
    parent = next((value for key, value in details.invocation_metadata or () if key == KEY), "")
    with span(f"zerodrift{str(details.method).rpartition('.')[2]}", str(parent)):
        yield
