"""From a compared step to its three tables."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rollout.types import Float32Array
from trainer_bridge.metrics import Float64Array, exact_mean, k3_terms, probabilities
from trainer_bridge.records import Comparison, ScoredSample, version_at
from trainer_bridge.report import to_json
from trainer_bridge.store.exact import expansion
from trainer_bridge.store.facts import SampleFacts, StepFacts, filter_name
from trainer_bridge.store.partials import TokenColumns, columns_of, effective_sample_size, groups_of
from trainer_bridge.store.schema import SAMPLES, SCHEMA_VERSION, STEPS, TOKENS, WORST
from trainer_bridge.ulp import bits, ulp_distance

Decode = Callable[[Sequence[int]], list[str]]
"""Ids -> the text of each."""

WORST_KEPT = 64
CONTEXT_TOKENS = 12


@dataclass(frozen=True, slots=True)
class StepTables:
    """One part, ready to be written."""

    steps: pa.Table
    samples: pa.Table
    tokens: pa.Table


@dataclass(frozen=True, slots=True)
class PartName:
    """Who records, in which life."""

    writer: str
    session_ns: int
    """Time of the writer's start, ns since 1970."""
    part: str


def build_tables(
    name: PartName,
    step: StepFacts,
    samples: Sequence[ScoredSample],
    comparison: Comparison,
    facts: Sequence[SampleFacts],
    *,
    keep_rate: float,
    decode: Decode | None,
) -> StepTables:
    """Figures, partial aggregates and kept tokens of a step. ``facts``: one a sample."""
    columns = columns_of(samples)
    unequal = np.bincount(columns.sample[columns.ulp != 0], minlength=len(samples))
    kept = [i for i, s in enumerate(samples) if unequal[i] or _drawn(s, keep_rate)]
    kept.sort(key=lambda i: (samples[i].request_id, samples[i].sample_index))
    token_table = pa.concat_tables([_tokens(samples[i]) for i in kept]) if kept else TOKENS.empty_table()
    sample_rows = [_sample_row(samples[i], facts[i], decode) for i in kept]
    row = {
        "schema_version": SCHEMA_VERSION,
        "part": name.part,
        "writer": name.writer,
        "session_ns": name.session_ns,
        "recorded_at": time.time_ns() // 1000,
        "weight_version": step.weight_version,
        "weight_digest": step.weight_digest,
        "tokens": comparison.tokens,
        "equal_tokens": comparison.equal_tokens,
        "max_abs": comparison.max_abs,
        "k3": comparison.k3,
        "ess": effective_sample_size(columns.delta),
        "rewards": list(step.rewards),
        "seconds": list(step.seconds.items()),
        "scalars": list(step.scalars.items()),
        "exact_sums": list(_exact_sums(columns, samples).items()),
        "findings": list(step.findings),
        "comparison": json.dumps(to_json(comparison), allow_nan=False),
        "groups": groups_of(columns, samples, facts),
        "worst": _worst(columns, samples, decode),
        "kept_samples": len(kept),
        "kept_tokens": token_table.num_rows,
    }
    return StepTables(
        pa.Table.from_pylist([row], schema=STEPS), pa.Table.from_pylist(sample_rows, schema=SAMPLES), token_table
    )


def _drawn(sample: ScoredSample, rate: float) -> bool:
    """Whether a sample without unequal tokens is kept: by its name, so every writer and every rerun agrees."""
    digest = hashlib.blake2b(f"{sample.request_id}/{sample.sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < rate * 2.0**64


def _exact_sums(columns: TokenColumns, samples: Sequence[ScoredSample]) -> dict[str, list[float]]:
    p, q = probabilities(columns.trainer), probabilities(columns.rollout)
    weights = np.exp(np.minimum(columns.delta, 300.0))
    difference = np.abs(p - q)
    entering = [s for s in samples if s.mask.any()]
    kept = [s for s in entering if s.filtered and s.behavior_logprobs is not None]
    masses = [
        s.rollout_logprobs[s.mask].astype(np.float64) - s.behavior_logprobs[s.mask].astype(np.float64)
        for s in kept
        if s.behavior_logprobs is not None
    ]
    sums = {
        "abs": columns.absolute,
        "negated": -columns.delta,
        "k3": k3_terms(columns.delta),
        "probs_diff": difference,
        "probs_diff_squared": difference * difference,
        "p": p,
        "q": q,
        "pp": p * p,
        "qq": q * q,
        "pq": p * q,
        "weight": weights,
        "weight_squared": weights * weights,
        "rollout_ppl": _perplexities([s.rollout_logprobs[s.mask] for s in entering]),
        "trainer_ppl": _perplexities([s.trainer_logprobs[s.mask] for s in entering]),
        "log_kept_mass": np.concatenate(masses) if masses else np.empty(0),
    }
    return {name: expansion(values) for name, values in sums.items()}


def _perplexities(rows: Sequence[Float32Array]) -> Float64Array:
    """exp(-mean log-prob) of each row, none of them empty: what ``metrics.perplexity`` averages."""
    means = np.array([exact_mean(row.astype(np.float64)) for row in rows], dtype=np.float64)
    with np.errstate(over="ignore"):
        return np.exp(-means)


def _tokens(sample: ScoredSample) -> pa.Table:
    length = sample.token_ids.size
    absent = ~sample.mask
    with np.errstate(invalid="ignore"):
        delta = np.abs(sample.trainer_logprobs.astype(np.float64) - sample.rollout_logprobs.astype(np.float64))
    ulp = ulp_distance(sample.rollout_logprobs, sample.trainer_logprobs)
    name = pa.DictionaryArray.from_arrays(pa.array(np.zeros(length, np.int32)), pa.array([sample.request_id]))

    def optional(values: Any, kind: pa.DataType) -> pa.Array:
        return pa.nulls(length, kind) if values is None else pa.array(values, kind)

    return pa.Table.from_arrays(
        [
            name,
            pa.array(np.full(length, sample.sample_index, np.int32)),
            pa.array(np.arange(length, dtype=np.int32)),
            pa.array(sample.token_ids),
            pa.array(sample.mask),
            pa.array(bits(sample.rollout_logprobs)),
            pa.array(bits(sample.trainer_logprobs)),
            pa.array(sample.rollout_logprobs),
            pa.array(sample.trainer_logprobs),
            optional(sample.behavior_logprobs, pa.float32()),
            optional(sample.rollout_digests, pa.uint64()),
            optional(sample.trainer_digests, pa.uint64()),
            pa.array(delta, mask=absent),
            pa.array(ulp, mask=absent),
        ],
        schema=TOKENS,
    )


def _sample_row(sample: ScoredSample, facts: SampleFacts, decode: Decode | None) -> dict[str, Any]:
    rollout, trainer = sample.rollout_logprobs[sample.mask], sample.trainer_logprobs[sample.mask]
    delta = np.abs(trainer.astype(np.float64) - rollout.astype(np.float64))
    return {
        "request_id": sample.request_id,
        "sample_index": sample.sample_index,
        "prompt_ids": sample.prompt_ids,
        "prompt_text": "".join(decode(sample.prompt_ids.tolist())) if decode else "",
        "pieces": decode(sample.token_ids.tolist()) if decode else [],
        "tokens": sample.token_ids.size,
        "compared": rollout.size,
        "unequal": int(np.count_nonzero(bits(rollout) != bits(trainer))),
        "max_abs": float(delta.max(initial=0.0)),
        "reward": facts.reward,
        "seed": None if sample.seed is None else str(sample.seed),
        "temperature": sample.temperature,
        "mode": sample.mode.name,
        "filter": filter_name(facts.sampling),
        "sampling": None if facts.sampling is None else json.dumps(asdict(facts.sampling)),
        "finish": None if sample.finish is None else sample.finish.value,
        "replica": sample.replica,
        "manifest_digest": facts.manifest_digest,
        "spans": [{"version": s.version, "start": s.start, "end": s.end} for s in sample.spans],
    }


def _worst(columns: TokenColumns, samples: Sequence[ScoredSample], decode: Decode | None) -> list[dict[str, Any]]:
    """The unequal tokens of largest |D|, ties by place."""
    unequal = np.flatnonzero(columns.ulp)
    order = unequal[np.argsort(-columns.absolute[unequal], kind="stable")][:WORST_KEPT]
    rows = []
    for i in order.tolist():
        sample, position = samples[columns.sample[i]], int(columns.position[i])
        before, text, after = _context(sample, position, decode)
        values = (
            sample.request_id, sample.sample_index, position, int(sample.token_ids[position]),
            float(columns.rollout[i]), float(columns.trainer[i]), float(columns.absolute[i]), int(columns.ulp[i]),
            version_at(sample.spans, position), sample.replica, before, text, after,
        )  # fmt: skip
        rows.append(dict(zip(WORST.names, values, strict=True)))
    return rows


def _context(sample: ScoredSample, position: int, decode: Decode | None) -> tuple[str, str, str]:
    if decode is None:
        return "", "", ""
    start = max(0, position - CONTEXT_TOKENS)
    ids = sample.token_ids[start : position + CONTEXT_TOKENS + 1].tolist()
    pieces = decode(ids)
    if start == 0:
        missing = CONTEXT_TOKENS - position
        prompt = decode(sample.prompt_ids[-missing:].tolist()) if missing > 0 else []
        return "".join(prompt + pieces[:position]), pieces[position], "".join(pieces[position + 1 :])
    return "".join(pieces[:CONTEXT_TOKENS]), pieces[CONTEXT_TOKENS], "".join(pieces[CONTEXT_TOKENS + 1 :])
