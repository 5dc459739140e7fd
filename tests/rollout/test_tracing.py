"""One trace from client to worker; nothing at all without an SDK."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
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
