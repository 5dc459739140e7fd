"""Names, exporters and what is counted, on a service with a real engine and on fakes."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rollout import metrics
from rollout.config import load_settings
from rollout.errors import ConfigError, InvalidRequest
from rollout.metrics import METRICS, NoMeter, PrometheusMeter, RayMeter, make_meter
from rollout.serving import running_service
from rollout.types import SamplingParams, ScoreSequence
from trainer_bridge.aio_client import AsyncRolloutClient

ROOT = Path(__file__).parents[2]


def scraped(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(address, timeout=30) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_follow_the_conventions() -> None:
    for name, metric in METRICS.items():
        assert re.fullmatch(r"zerodrift_[a-z0-9_]+", name), name
        assert metric.help.endswith(".") and not name.endswith("_total"), name
        assert bool(metric.buckets) == (metric.kind == "histogram"), name
        assert list(metric.buckets) == sorted(metric.buckets)
        if metric.kind == "histogram":
            assert name.endswith("_seconds"), f"{name}: a histogram names its unit"


async def test_a_service_counts_what_it_did(tiny_qwen3_path: Path) -> None:
    settings = load_settings(
        None,
        [f"model.path={tiny_qwen3_path}", "model.dtype=float32", "server.port=0", "engine.kv_cache_tokens=4096",
         "worker.count=2", "metrics.port=0"],
    )  # fmt: skip
    async with running_service(settings, in_process=True) as service, AsyncRolloutClient(service.address) as client:
        assert service.metrics.startswith("http://127.0.0.1:")
        result = await client.generate([5, 6, 7], SamplingParams(max_tokens=4, seed=1, ignore_eos=True), n=3)
        sampled = sum(len(s.token_ids) for s in result.samples)
        await client.score([ScoreSequence((5, 6, 7, 8))])
        with pytest.raises(InvalidRequest):
            await client.generate([5], SamplingParams(temperature=-1.0))
        await service.backend.look()
        seen = scraped(service.metrics)
        address = service.metrics

    def value(name: str, **labels: str) -> float:
        return seen[(name, tuple(sorted(labels.items())))]

    assert value("zerodrift_generation_tokens_total") == sampled == 12
    assert value("zerodrift_samples_total", finish="length") == 3
    assert value("zerodrift_prompt_tokens_total") == 9
    assert value("zerodrift_scored_tokens_total") == 3
    assert value("zerodrift_rpc_requests_total", method="Generate", code="OK") == 1
    assert value("zerodrift_rpc_requests_total", method="Generate", code="INVALID_ARGUMENT") == 1
    assert value("zerodrift_time_to_first_token_seconds_count") == 3
    assert 0 <= value("zerodrift_inter_token_latency_seconds_count") <= sampled - 3
    assert value("zerodrift_e2e_request_latency_seconds_count") == 1
    assert value("zerodrift_requests_in_flight") == 0
    for replica in ("replica-0", "replica-1"):
        assert value("zerodrift_replica_up", replica=replica) == 1
        assert value("zerodrift_weight_version", replica=replica) == 0
        assert value("zerodrift_queue_limit", replica=replica) == settings.engine.max_waiting
    rows = [value("zerodrift_engine_rows_total", replica=f"replica-{i}") for i in range(2)]
    assert sum(rows) >= 9, "prompt and decoded rows were computed somewhere"
    with pytest.raises(OSError):
        scraped(address)


def test_what_the_exporters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_meter("auto", "127.0.0.1", None)[0], NoMeter)
    assert isinstance(make_meter("off", "127.0.0.1", 0)[0], NoMeter)
    meter, where = make_meter("auto", "127.0.0.1", 0)
    assert isinstance(meter, PrometheusMeter) and where.endswith("/metrics")
    port = int(where.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=f"metrics.port = {port}"):
        make_meter("prometheus", "127.0.0.1", port)
    meter.close()
    meter.close()
    with pytest.raises(ConfigError, match=r"needs metrics\.port"):
        make_meter("prometheus", "127.0.0.1", None)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert metrics.in_ray_job() and isinstance(make_meter("auto", "127.0.0.1", 0)[0], RayMeter)


def test_an_unknown_name_is_a_programming_error() -> None:
    with pytest.raises(KeyError):
        PrometheusMeter().add("zerodrift_typo")


class FakeRay:
    """Stands in for ray.util.metrics and remembers."""

    seen: ClassVar[list[tuple[str, str, float, dict[str, str]]]] = []

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: Any = None) -> None:
        self.name = name

    def _note(self, how: str, value: float, tags: dict[str, str]) -> None:
        self.seen.append((self.name, how, value, tags))

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self._note("inc", value, tags)

    def set(self, value: float, tags: dict[str, str]) -> None:
        self._note("set", value, tags)

    def observe(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self._note("observe", value, tags)


def test_ray_gets_the_same_names_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util import metrics as ray_metrics

    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_metrics, name, FakeRay)
    FakeRay.seen = []
    meter = RayMeter()
    meter.add("zerodrift_generation_tokens", 0.0)
    meter.add("zerodrift_generation_tokens", 2.0)
    meter.put("zerodrift_replica_up", 1.0, replica="a")
    meter.observe("zerodrift_rpc_seconds", 0.0, method="Score")
    assert [s[:3] for s in FakeRay.seen] == [
        ("zerodrift_generation_tokens", "inc", 2.0),
        ("zerodrift_replica_up", "set", 1.0),
        ("zerodrift_rpc_seconds", "observe", 1e-9),
    ]


def expressions() -> dict[str, list[str]]:
    board = json.loads((ROOT / "deploy/grafana/dashboards/zerodrift.json").read_text())
    panels = [t["expr"] for p in board["panels"] for t in p.get("targets", ())]
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    alerts = [r["expr"] for g in rules["groups"] for r in g["rules"]]
    return {"board": panels, "rules": alerts}


def test_board_and_alerts_use_metrics_that_exist() -> None:
    for source, found in expressions().items():
        names = {n for text in found for n in re.findall(r"zerodrift_\w+", text)}
        assert len(names) >= 4, source
        known = set(METRICS) | {f"{n}_total" for n, m in METRICS.items() if m.kind == "counter"}
        known |= {f"{n}_{s}" for n, m in METRICS.items() if m.kind == "histogram" for s in ("bucket", "sum", "count")}
        assert names <= known, names - known


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    for m in METRICS.values():
        by = f" by {', '.join(m.labels)}" if m.labels else ""
        row = f"| `{m.name}`{by} | {m.kind} | {m.help.rstrip('.')} |".replace("|D|", "\\|D\\|")
        assert row in text, row
