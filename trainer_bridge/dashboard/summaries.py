"""What the page shows of a run before anyone asks for details."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from trainer_bridge.handshake import diff_manifests
from trainer_bridge.store.reader import RunStore

TRENDS = (
    "tokens", "equal_tokens", "max_abs", "mean_abs", "p50_abs", "p90_abs", "p99_abs", "k1", "k3", "probs_diff_max",
    "probs_diff_mean", "pearson", "ess", "max_ulp", "mean_reward", "tokens_per_s", "weight_version", "recorded_at",
)  # fmt: skip


def run_summary(store: RunStore, run: str) -> dict[str, Any]:
    """One row of the run list. Errors: NotFound."""
    head = store.head(run)
    steps = store.figures(run)
    tokens = sum(f["tokens"] for f in steps.values())
    equal = sum(f["equal_tokens"] for f in steps.values())
    digests = sum(f["digests_total"] for f in steps.values())
    digests_equal = sum(f["digests_equal"] for f in steps.values())
    return {
        "run": run,
        "source": head.source,
        "model": head.model,
        "note": head.note,
        "sibling": head.sibling,
        "created": head.created,
        "steps": len(steps),
        "first_step": next(iter(steps), None),
        "last_step": next(reversed(steps), None),
        "tokens": tokens,
        "equal_tokens": equal,
        "digests_total": digests,
        "digests_equal": digests_equal,
        "bitwise_equal": tokens > 0 and equal == tokens and digests == digests_equal,
        "max_abs": max((f["max_abs"] for f in steps.values() if f["max_abs"] is not None), key=float, default=None),
        "first_unequal": _first_unequal(steps),
        "findings": _first_findings(steps),
        "recorded_at": max((f["recorded_at"] for f in steps.values()), default=None),
    }


def run_page(store: RunStore, run: str) -> dict[str, Any]:
    """Summary, trends as columns, manifests with their differences, certificate. Errors: NotFound."""
    # Read first: what comes meanwhile makes it old, never too new.
    revision = store.revision(run)
    head = store.head(run)
    steps = store.figures(run)
    differences = diff_manifests(head.manifest, head.trainer_manifest) if head.trainer_manifest else []
    last = next(reversed(steps), None)
    return run_summary(store, run) | {
        "revision": revision,
        "last": None if last is None else steps[last] | {"step": last},
        "bytes": store.size_bytes(run),
        "trends": {"step": list(steps), **{name: [f.get(name) for f in steps.values()] for name in TRENDS}},
        "kept_samples": sum(f["kept_samples"] for f in steps.values()),
        "kept_tokens": sum(f["kept_tokens"] for f in steps.values()),
        "writers": max((f["parts"] for f in steps.values()), default=0),
        "scalars": sorted({name for f in steps.values() for name in f["scalars"]}),
        "manifest": dict(head.manifest),
        "trainer_manifest": dict(head.trainer_manifest),
        "differences": [dataclasses.asdict(d) for d in differences],
        "certificate": dict(head.certificate),
    }


def _first_unequal(steps: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    for step, figures in steps.items():
        if figures["equal_tokens"] != figures["tokens"] or figures["digests_equal"] != figures["digests_total"]:
            found = figures["first_mismatch"] or figures["first_unequal_digest"]
            return {
                "step": step,
                "tokens": figures["tokens"],
                "unequal_tokens": figures["unequal_tokens"],
                "token": found,
                "findings": figures["findings"],
            }
    return None


def _first_findings(steps: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """The first step with a known cause; it may lie before the first unequal token."""
    return next(({"step": s, "findings": f["findings"]} for s, f in steps.items() if f["findings"]), None)


def step_page(store: RunStore, run: str, step: int) -> dict[str, Any] | None:
    """Every figure of one step; None when there is no such step. Errors: NotFound for the run."""
    figures = store.figures(run).get(step)
    return None if figures is None else figures | {"step": step}


def sample_page(store: RunStore, run: str, step: int, request_id: str, sample_index: int) -> dict[str, Any]:
    """One sample, its tokens as columns ready for JSON. Errors: NotFound."""
    found = store.sample(run, step, request_id, sample_index)
    columns = found.pop("token_columns").to_pydict()
    for name in ("rollout_bits", "trainer_bits"):
        columns[name] = [f"0x{value & 0xFFFFFFFF:08x}" for value in columns[name]]
    for name in ("rollout_digest", "trainer_digest"):
        columns[name] = [None if value is None else f"0x{value:016x}" for value in columns[name]]
    for name in ("rollout_logprob", "trainer_logprob", "behavior_logprob", "abs_delta"):
        columns[name] = [None if v is None or not math.isfinite(v) else v for v in columns[name]]
    return found | {"step": step, "columns": columns}
