"""Metrics of the service and the bridge: one table of names, two exporters.

In a Ray job they go through Ray's own exporter (``ray_`` before each name, scraped with the rest of the cluster);
alone, a port answers Prometheus. Who counts does not know which: a ``Meter`` takes names of ``METRICS`` only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from rollout.errors import ConfigError

Kind = Literal["counter", "gauge", "histogram"]

_LATENCY_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Counters are exported with ``_total`` after their name."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric("zerodrift_rpc_requests", "counter", "Calls answered.", ("method", "code")),
        Metric("zerodrift_rpc_seconds", "histogram", "Time to answer a call.", ("method",), _LATENCY_S),
        Metric("zerodrift_requests_in_flight", "gauge", "Generate calls being answered."),
        Metric("zerodrift_prompt_tokens", "counter", "Prompt tokens of finished samples."),
        Metric("zerodrift_generation_tokens", "counter", "Sampled tokens."),
        Metric("zerodrift_prefix_cache_hit_tokens", "counter", "Prompt tokens whose KV came from the prefix cache."),
        Metric("zerodrift_samples", "counter", "Samples ended.", ("finish",)),
        Metric("zerodrift_time_to_first_token_seconds", "histogram", "Call to first token.", (), _LATENCY_S),
        Metric("zerodrift_inter_token_latency_seconds", "histogram", "Between tokens of a sample.", (), _LATENCY_S),
        Metric("zerodrift_e2e_request_latency_seconds", "histogram", "Call to last token.", (), _LATENCY_S),
        Metric("zerodrift_scored_tokens", "counter", "Tokens scored by prefill."),
        Metric("zerodrift_weight_update_seconds", "histogram", "Time of an update.", ("outcome",), _LATENCY_S),
        Metric("zerodrift_weight_version", "gauge", "Weight version being served.", ("replica",)),
        Metric("zerodrift_replica_up", "gauge", "1 while a replica is in rotation.", ("replica",)),
        Metric("zerodrift_requests_running", "gauge", "Samples being computed.", ("replica",)),
        Metric("zerodrift_requests_waiting", "gauge", "Samples queued.", ("replica",)),
        Metric("zerodrift_queue_limit", "gauge", "Samples that may wait before more are refused.", ("replica",)),
        Metric("zerodrift_kv_cache_usage_ratio", "gauge", "Share of KV pages that are held.", ("replica",)),
        Metric("zerodrift_engine_steps", "counter", "Forward passes.", ("replica",)),
        Metric("zerodrift_engine_rows", "counter", "Token rows computed; over steps: the batch size.", ("replica",)),
        Metric("zerodrift_preemptions", "counter", "Samples that gave their pages up.", ("replica",)),
        Metric("zerodrift_bridge_step", "gauge", "Last step that the bridge compared.", ("run",)),
        Metric("zerodrift_bridge_tokens", "counter", "Tokens compared.", ("run",)),
        Metric("zerodrift_bridge_unequal_tokens", "counter", "Tokens whose bits differ.", ("run",)),
        Metric("zerodrift_bridge_logprob_abs_diff_max", "gauge", "Largest |D| of the last step, nats.", ("run",)),
        Metric("zerodrift_bridge_probs_diff_max", "gauge", "Largest probability difference, last step.", ("run",)),
        Metric("zerodrift_bridge_k3_kl", "gauge", "k3 estimate of the last step, nats.", ("run",)),
        Metric("zerodrift_bridge_weight_version", "gauge", "Version that sampled the last step.", ("run",)),
        Metric("zerodrift_bridge_steps_recorded", "gauge", "Steps written to the record.", ("run",)),
        Metric("zerodrift_bridge_steps_dropped", "gauge", "Steps that could not be written.", ("run",)),
    )
}


class Meter(Protocol):
    """Takes measurements; thread-safe. Errors: KeyError for a name that ``METRICS`` does not have."""

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Count up by ``value`` >= 0."""
        ...

    def put(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add to a histogram."""
        ...

    def close(self) -> None:
        """Stop exporting; may be called again."""
        ...


class NoMeter:
    """Takes everything, keeps nothing."""

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """See ``Meter``."""

    def put(self, name: str, value: float, **labels: str) -> None:
        """See ``Meter``."""

    def observe(self, name: str, value: float, **labels: str) -> None:
        """See ``Meter``."""

    def close(self) -> None:
        """See ``Meter``."""


class PrometheusMeter:
    """Metrics in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server: Any = None
        classes: dict[Kind, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._metrics: dict[str, Any] = {}
        for m in METRICS.values():
            options = {"buckets": m.buckets} if m.buckets else {}
            self._metrics[m.name] = classes[m.kind](m.name, m.help, m.labels, registry=self.registry, **options)

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes at ``/metrics`` from a daemon thread; the port. Errors: ConfigError when it is taken."""
        try:
            self._server, _ = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"metrics.port = {port} on {host!r} cannot be bound ({error.strerror}); choose another or null",
                field="metrics.port",
            ) from error
        return int(self._server.server_port)

    def close(self) -> None:
        """See ``Meter``."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """See ``Meter``."""
        self._at(name, labels).inc(value)

    def put(self, name: str, value: float, **labels: str) -> None:
        """See ``Meter``."""
        self._at(name, labels).set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """See ``Meter``."""
        self._at(name, labels).observe(value)

    def _at(self, name: str, labels: Mapping[str, str]) -> Any:
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric


class RayMeter:
    """Metrics through the exporter of the Ray node this process runs on. Needs a connected Ray."""

    def __init__(self) -> None:
        from ray.util import metrics as ray_metrics

        self._classes: dict[Kind, Any] = {
            "counter": ray_metrics.Counter,
            "gauge": ray_metrics.Gauge,
            "histogram": ray_metrics.Histogram,
        }
        self._metrics: dict[str, Any] = {}
        self._lock = threading.Lock()

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """See ``Meter``."""
        if value > 0:  # Ray refuses 0
            self._at(name).inc(value, tags=labels)

    def put(self, name: str, value: float, **labels: str) -> None:
        """See ``Meter``."""
        self._at(name).set(value, tags=labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """See ``Meter``."""
        # Ray's histograms refuse a value of 0, which a coarse clock can give.
        self._at(name).observe(max(value, 1e-9), tags=labels)

    def close(self) -> None:
        """See ``Meter``; Ray's exporter belongs to the node and goes on."""

    def _at(self, name: str) -> Any:
        with self._lock:
            if name not in self._metrics:
                m = METRICS[name]
                options = {"boundaries": list(m.buckets)} if m.buckets else {}
                self._metrics[name] = self._classes[m.kind](name, description=m.help, tag_keys=m.labels, **options)
            return self._metrics[name]


def in_ray_job() -> bool:
    """Whether this process was started by ``ray job submit``."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def make_meter(exporter: str, host: str, port: int | None) -> tuple[Meter, str]:
    """The meter that the settings ask for, and where to find it, in words.

    Args:
        exporter: "ray", "prometheus", "off", or "auto": Ray's in a Ray job, else Prometheus if ``port`` is set.
        host: address of the Prometheus port.
        port: 0: any free one; None: no port.
    """
    if exporter == "ray" or (exporter == "auto" and in_ray_job()):
        return RayMeter(), "Ray's exporter"
    if exporter == "off" or port is None:
        if exporter == "prometheus":
            raise ConfigError("metrics.exporter = 'prometheus' needs metrics.port", field="metrics.port")
        return NoMeter(), "nowhere"
    meter = PrometheusMeter()
    return meter, f"http://{host}:{meter.serve(host, port)}/metrics"
