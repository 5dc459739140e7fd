"""Makes dashboards/zerodrift.json: ``python deploy/grafana/board.py > deploy/grafana/dashboards/zerodrift.json``.

Names match with and without Ray's prefix. Uid, title and variables carry our own name, so the board loads beside
RL-Insight's and Ray's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

LABELS = "{{replica}}"


def named(metric: str, labels: str = "") -> str:
    """Selector of a metric, exported by Ray or alone."""
    return f'{{__name__=~"(ray_)?{metric}"{", " + labels if labels else ""}}}'


def rate(metric: str, by: str = "") -> str:
    """Sum of per-second rates."""
    return f"sum{f' by ({by})' if by else ''} (rate({named(metric)}[$__rate_interval]))"


def quantile(q: float, metric: str) -> str:
    """Quantile of a histogram over all replicas."""
    return f"histogram_quantile({q}, sum by (le) (rate({named(metric + '_bucket')}[$__rate_interval])))"


def panel(
    title: str, place: tuple[int, int, int, int], targets: list[tuple[str, str]], **options: Any
) -> dict[str, Any]:
    """A panel at (x, y, width, height) of (expression, legend)."""
    unit, kind = options.pop("unit", "short"), options.pop("kind", "timeseries")
    defaults: dict[str, Any] = {"unit": unit, **options}
    return {
        "type": kind,
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": dict(zip("xywh", place, strict=True)),
        "targets": [
            {"refId": chr(65 + i), "expr": expr, "legendFormat": legend} for i, (expr, legend) in enumerate(targets)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if kind == "timeseries" else {},
    }


def red_above(value: float) -> dict[str, Any]:
    """Green below, red from ``value`` on."""
    steps = [{"color": "green", "value": None}, {"color": "red", "value": value}]
    return {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}


def board() -> dict[str, Any]:
    """The whole board."""
    unequal = f"sum({named('zerodrift_bridge_unequal_tokens_total')})"
    behind = f"max({named('zerodrift_weight_version')}) - min({named('zerodrift_weight_version')})"
    rows, steps = (rate(f"zerodrift_engine_{what}_total", "replica") for what in ("rows", "steps"))
    panels = [
        panel("Unequal tokens", (0, 0, 6, 5), [(unequal, "")], kind="stat", **red_above(1)),
        panel("Tokens compared", (6, 0, 6, 5), [(f"sum({named('zerodrift_bridge_tokens_total')})", "")], kind="stat"),
        panel("Replicas in rotation", (12, 0, 6, 5), [(f"sum({named('zerodrift_replica_up')})", "")], kind="stat"),
        panel("Weight versions apart", (18, 0, 6, 5), [(behind, "")], kind="stat", **red_above(1)),
        panel("Largest |D log p| of the last step", (0, 5, 8, 7), [
            (named("zerodrift_bridge_logprob_abs_diff_max"), "{{run}}"),
        ]),
        panel("k3 KL", (8, 5, 8, 7), [(named("zerodrift_bridge_k3_kl"), "{{run}}")]),
        panel("Steps recorded and dropped", (16, 5, 8, 7), [
            (named("zerodrift_bridge_steps_recorded"), "{{run}} recorded"),
            (named("zerodrift_bridge_steps_dropped"), "{{run}} dropped"),
        ]),
        panel("Tokens per second", (0, 12, 8, 7), [
            (rate("zerodrift_generation_tokens_total"), "sampled"),
            (rate("zerodrift_prompt_tokens_total"), "prompt"),
            (rate("zerodrift_scored_tokens_total"), "scored"),
        ]),
        panel("Time to first token", (8, 12, 8, 7), [
            (quantile(0.5, "zerodrift_time_to_first_token_seconds"), "p50"),
            (quantile(0.99, "zerodrift_time_to_first_token_seconds"), "p99"),
        ], unit="s"),
        panel("Inter-token latency", (16, 12, 8, 7), [
            (quantile(0.5, "zerodrift_inter_token_latency_seconds"), "p50"),
            (quantile(0.99, "zerodrift_inter_token_latency_seconds"), "p99"),
        ], unit="s"),
        panel("Running and waiting", (0, 19, 8, 7), [
            (named("zerodrift_requests_running"), f"{LABELS} running"),
            (named("zerodrift_requests_waiting"), f"{LABELS} waiting"),
        ]),
        panel("KV cache held", (8, 19, 8, 7), [(named("zerodrift_kv_cache_usage_ratio"), LABELS)], unit="percentunit"),
        panel("Rows a step", (16, 19, 8, 7), [
            (f"{rows} / {steps}", LABELS),
        ]),
        panel("Prefix cache hit share", (0, 26, 8, 7), [
            (f"{rate('zerodrift_prefix_cache_hit_tokens_total')} / {rate('zerodrift_prompt_tokens_total')}", "hit"),
        ], unit="percentunit"),
        panel("Preemptions", (8, 26, 8, 7), [(rate("zerodrift_preemptions_total", "replica"), LABELS)]),
        panel("Weight update", (16, 26, 8, 7), [
            (quantile(0.5, "zerodrift_weight_update_seconds"), "p50"),
            (quantile(0.99, "zerodrift_weight_update_seconds"), "p99"),
        ], unit="s"),
        panel("Calls by outcome", (0, 33, 24, 7), [
            (rate("zerodrift_rpc_requests_total", "method, code"), "{{method}} {{code}}"),
        ]),
    ]  # fmt: skip
    for i, one in enumerate(panels):
        one["id"] = i + 1
    return {
        "uid": "zerodrift-rollout",
        "title": "zerodrift",
        "tags": ["zerodrift", "rl"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": panels,
    }


if __name__ == "__main__":
    json.dump(board(), sys.stdout, indent=1)
    print()
