"""One trace from client to worker; nothing at all without an SDK."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollout import tracing
from rollout.config import load_settings
from rollout.errors import ConfigError, InvalidRequest
from rollout.serving import running_service
from rollout.types import SamplingParams
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire import call_metadata


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans in memory, through a provider of this test alone."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield spans
    provider.shutdown()


async def test_one_trace_from_client_to_worker(exporter: InMemorySpanExporter, tiny_qwen3_path: Path) -> None:
    overrides = [f"model.path={tiny_qwen3_path}", "model.dtype=float32", "server.port=0", "engine.kv_cache_tokens=4096"]
    settings = load_settings(None, overrides)
    async with running_service(settings, in_process=True) as service, AsyncRolloutClient(service.address) as client:
        with tracing.span("trainer step"):
            await client.generate([5, 6, 7], SamplingParams(max_tokens=3, seed=1, ignore_eos=True), n=2)
        with pytest.raises(InvalidRequest):
            await client.generate([5], SamplingParams(temperature=-1.0))
    spans = {s.name: s for s in exporter.get_finished_spans() if s.name != "zerodrift/sample"}
    samples = [s for s in exporter.get_finished_spans() if s.name == "zerodrift/sample"]
    step = spans["trainer step"]
    (call,) = [
        s
        for s in exporter.get_finished_spans()
        if s.name.endswith("/Generate") and s.parent is not None and s.parent.span_id == step.context.span_id
    ]
    assert len(samples) == 2
    for sample in samples:
        assert sample.context.trace_id == call.context.trace_id == step.context.trace_id
        assert sample.parent is not None and sample.parent.span_id == call.context.span_id
        assert sample.attributes is not None and sample.attributes["zerodrift.tokens"] == 3


def test_nothing_is_sent_without_an_sdk() -> None:
    assert tracing.traceparent() == ""
    assert call_metadata("r1") == (("x-request-id", "r1"),)


def test_an_endpoint_without_its_exporter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    assert tracing.configure("test") is False
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match="the exporter is missing"):
        tracing.configure("test")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OpenTelemetry collector is to us: it takes spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.spans += [(names["service.name"], s.name) for scope in resource.scope_spans for s in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector_by_otlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as an entry point does it: the provider is global there."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", reason="the extra otel is missing")
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    program = (
        "from opentelemetry import trace\nfrom rollout import tracing\n"
        "assert tracing.configure('zerodrift-test')\nwith tracing.span('step'):\n    assert tracing.traceparent()\n"
        "trace.get_tracer_provider().shutdown()\n"
    )
    environment = os.environ | {tracing.ENDPOINT: f"http://127.0.0.1:{port}", "OTEL_EXPORTER_OTLP_INSECURE": "true"}
    try:
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    finally:
        server.stop(None).wait(10)
    assert collector.spans == [("zerodrift-test", "step")]
