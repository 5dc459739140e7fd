"""The Parquet tables of a recorded run: columns, meaning, and where the files lie.

Layout under a runs folder, hive-partitioned so that DuckDB, Spark and pyarrow read it as it is::

    run=NAME/run.json                        head of the run, written once
    run=NAME/steps/step=12/PART.parquet      one row: figures, partial aggregates, worst tokens, findings
    run=NAME/samples/step=12/PART.parquet    one row a kept sample
    run=NAME/tokens/step=12/PART.parquet     one row a token of the kept samples

A part is what one writer records of one step. ``steps`` is written last: a part without it does not exist.
"""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa

from rollout.errors import InvalidRequest

SCHEMA_VERSION = 1
"""Raised when a column changes its meaning or goes; a new column alone does not raise it."""
TABLES = ("steps", "samples", "tokens")
HEAD_NAME = "run.json"
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

GROUP = pa.struct(
    [
        ("dimension", pa.string()),
        ("key", pa.string()),
        ("bin", pa.int32()),
        ("tokens", pa.int64()),
        ("unequal", pa.int64()),
        ("max_abs", pa.float64()),
        ("sum_abs", pa.float64()),
        ("sum_k3", pa.float64()),
    ]
)
"""One cell of a view, summable over parts. ``dimension`` names the view, ``key`` and ``bin`` the cell in it."""

WORST = pa.struct(
    [
        ("request_id", pa.string()),
        ("sample_index", pa.int32()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("rollout_logprob", pa.float32()),
        ("trainer_logprob", pa.float32()),
        ("abs_delta", pa.float64()),
        ("ulp", pa.int64()),
        ("weight_version", pa.int64()),
        ("replica", pa.string()),
        ("before", pa.string()),
        ("text", pa.string()),
        ("after", pa.string()),
    ]
)
"""An unequal token of the largest |D|, with decoded text around it (empty without a decoder)."""

STEPS = pa.schema(
    [
        ("schema_version", pa.int32()),
        ("part", pa.string()),
        ("writer", pa.string()),
        ("session_ns", pa.int64()),
        ("recorded_at", pa.timestamp("us", tz="UTC")),
        ("weight_version", pa.int64()),
        ("weight_digest", pa.string()),
        ("tokens", pa.int64()),
        ("equal_tokens", pa.int64()),
        ("max_abs", pa.float64()),
        ("k3", pa.float64()),
        ("ess", pa.float64()),
        ("rewards", pa.list_(pa.float64())),
        ("seconds", pa.map_(pa.string(), pa.float64())),
        ("scalars", pa.map_(pa.string(), pa.float64())),
        ("exact_sums", pa.map_(pa.string(), pa.list_(pa.float64()))),
        ("findings", pa.list_(pa.string())),
        ("comparison", pa.string()),
        ("groups", pa.list_(GROUP)),
        ("worst", pa.list_(WORST)),
        ("kept_samples", pa.int64()),
        ("kept_tokens", pa.int64()),
    ]
)
"""``comparison`` is the JSON of ``trainer_bridge.report.to_json``; the typed columns beside it repeat what SQL users
ask for most. ``exact_sums`` holds float64 expansions whose exact sum is the exact sum over the part's tokens, so that
means over several parts round once. ``session_ns`` orders a writer's restarts: its newest session of a step counts."""

SAMPLES = pa.schema(
    [
        ("request_id", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("prompt_text", pa.string()),
        ("pieces", pa.list_(pa.string())),
        ("tokens", pa.int32()),
        ("compared", pa.int32()),
        ("unequal", pa.int32()),
        ("max_abs", pa.float64()),
        ("reward", pa.float64()),
        ("seed", pa.string()),
        ("temperature", pa.float64()),
        ("mode", pa.string()),
        ("filter", pa.string()),
        ("sampling", pa.string()),
        ("finish", pa.string()),
        ("replica", pa.string()),
        ("manifest_digest", pa.string()),
        ("spans", pa.list_(pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())]))),
    ]
)
"""Kept: every sample with an unequal token, others by ``RecordOptions.keep_rate``. Sorted by request and sample.
``pieces`` is the text of each token, empty without a decoder; ``sampling`` the JSON of the effective parameters;
``seed`` decimal text, since 64 bits are more than a JSON number holds."""

TOKENS = pa.schema(
    [
        ("request_id", pa.dictionary(pa.int32(), pa.string())),
        ("sample_index", pa.int32()),
        ("position", pa.int32()),
        ("token_id", pa.int32()),
        ("mask", pa.bool_()),
        ("rollout_bits", pa.int32()),
        ("trainer_bits", pa.int32()),
        ("rollout_logprob", pa.float32()),
        ("trainer_logprob", pa.float32()),
        ("behavior_logprob", pa.float32()),
        ("rollout_digest", pa.uint64()),
        ("trainer_digest", pa.uint64()),
        ("abs_delta", pa.float64()),
        ("ulp", pa.int64()),
    ]
)
"""Every token of the kept samples. The ``_bits`` columns are the float32 bit patterns: they are what is compared, and
no reader's treatment of NaN can change them. ``abs_delta`` and ``ulp`` are null at mask 0."""


def run_folder(root: Path, run: str) -> Path:
    """Folder of a run. Errors: InvalidRequest for a name that could leave the runs folder or break the partitioning."""
    if not _RUN_NAME.fullmatch(run):
        raise InvalidRequest(
            f"run name {run!r}: use 1 to 128 letters, digits, '.', '_' and '-', the first a letter or digit",
            field="run",
        )
    return root / f"run={run}"


def step_folder(root: Path, run: str, table: str, step: int) -> Path:
    """Folder of one table's parts of one step."""
    return run_folder(root, run) / table / f"step={step}"
