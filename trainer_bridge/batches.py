"""Scored samples out of trainers' batches: plain arrays, verl's padded DataProto (V0), verl's nested tensors (V1).

verl's objects are used through their mappings, so verl need not be installed. Padding goes by masks alone: what
stands in a pad, NaN or 0.0, never enters. verl writes 0.0 where a token has no log-prob (tool tokens); mask 0 keeps
that out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from rollout.types import Float32Array, LogprobMode, UInt64Array, VersionSpan
from trainer_bridge.records import ScoredSample

DETAILS = "zerodrift"
"""Key of what our rollout adds to every verl sample; see ``trainer_bridge.verl.session``."""
_EXTRA = "extra_fields"
DIGESTS = "row_digests"
"""Key of the trainer's row digests: verl knows no unsigned integers, so int64 views of them."""


def samples_from_arrays(
    trainer: Sequence[npt.ArrayLike],
    rollout: Sequence[npt.ArrayLike],
    masks: Sequence[npt.ArrayLike],
    *,
    temperature: float,
    token_ids: Sequence[npt.ArrayLike] | None = None,
    prompt_ids: Sequence[npt.ArrayLike] | None = None,
    details: Sequence[Mapping[str, Any] | None] | None = None,
    names: Sequence[str] | None = None,
    trainer_digests: Sequence[npt.NDArray[np.uint64] | None] | None = None,
) -> list[ScoredSample]:
    """One sample a row: float32 [L] log-probs of both sides, mask [L]; rows may differ in length.

    Args:
        temperature: what both sides used; 0 is greedy.
        token_ids, prompt_ids: [L] and [P] a row; 0 where not given, and then only positions can be named.
        details: what the rollout said of each sample (seed, spans, replica, ...), if anything.
        names: request ids; "row-i" where not given.
        trainer_digests: uint64 [L] row digests of the trainer's side; they count where the details hold the rollout's.

    Errors: InvalidRequest for lengths or dtypes that disagree (a cast would change the bits that are compared).
    """
    _require_equal_counts(trainer, rollout, masks)
    samples = []
    for i, (ours, theirs, mask) in enumerate(zip(trainer, rollout, masks, strict=True)):
        length = np.asarray(mask).size
        told: Mapping[str, Any] = (details[i] if details is not None else None) or {}
        ids = np.zeros(length, np.int32) if token_ids is None else np.asarray(token_ids[i]).astype(np.int32)
        prompt = np.zeros(0, np.int32) if prompt_ids is None else np.asarray(prompt_ids[i]).astype(np.int32)
        entering = np.asarray(mask).astype(np.bool_)
        filtered = bool(told.get("filtered", False))
        digests = _digests(told, entering) if trainer_digests is not None and trainer_digests[i] is not None else None
        samples.append(
            ScoredSample(
                request_id=f"row-{i}" if names is None else names[i],
                sample_index=0,
                prompt_ids=prompt,
                token_ids=ids,
                rollout_logprobs=np.asarray(theirs),
                trainer_logprobs=np.asarray(ours),
                mask=entering,
                mode=LogprobMode.GREEDY_T1 if temperature == 0.0 else LogprobMode.TEMPERED,
                temperature=temperature,
                filtered=filtered,
                finish=None,
                seed=told.get("seed"),
                spans=_spans(told, entering),
                replica=told.get("replica"),
                behavior_logprobs=_behavior(told, entering) if filtered else None,
                rollout_digests=digests,
                trainer_digests=None if digests is None or trainer_digests is None else trainer_digests[i],
            )
        )
    return samples


def samples_from_dataproto(data: Any, *, temperature: float | None = None) -> list[ScoredSample]:
    """Rows of a verl V0 ``DataProto`` with ``old_log_probs`` and ``rollout_log_probs``.

    Args:
        temperature: None takes ``meta_info["temperature"]``.

    Errors: InvalidRequest when a tensor is missing, or the temperature is unknown.
    """
    batch, meta = data.batch, dict(data.meta_info)
    needed = ("prompts", "responses", "response_mask", "attention_mask", "old_log_probs", "rollout_log_probs")
    missing = [name for name in needed if name not in batch.keys()]  # noqa: SIM118 - a TensorDict iterates over rows
    if missing:
        raise InvalidRequest(
            f"the batch lacks {', '.join(missing)}; set rollout.calculate_log_probs=true and compare after verl has "
            "computed old_log_probs",
            field=missing[0],
        )
    temperature = meta.get("temperature") if temperature is None else temperature
    if temperature is None:
        raise InvalidRequest("the batch carries no meta_info['temperature']; pass temperature=", field="temperature")
    prompts = batch["prompts"].shape[1]
    attention = batch["attention_mask"].bool().cpu().numpy()
    lengths = attention[:, prompts:].sum(axis=1)
    columns = {name: batch[name].cpu().numpy() for name in needed if name != "attention_mask"}
    cut = {name: [row[:n] for row, n in zip(columns[name], lengths, strict=True)] for name in needed[1:3] + needed[4:]}
    return samples_from_arrays(
        cut["old_log_probs"],
        cut["rollout_log_probs"],
        cut["response_mask"],
        temperature=float(temperature),
        token_ids=cut["responses"],
        prompt_ids=[row[keep] for row, keep in zip(columns["prompts"], attention[:, :prompts], strict=True)],
        details=column(data.non_tensor_batch, DETAILS),
        names=_names(data.non_tensor_batch, len(lengths)),
        trainer_digests=None
        if DIGESTS not in batch.keys()  # noqa: SIM118
        else [row[:n].view(np.uint64) for row, n in zip(batch[DIGESTS].cpu().numpy(), lengths, strict=True)],
    )


def samples_from_nested(fields: Mapping[str, Any], *, temperature: float) -> list[ScoredSample]:
    """Rows of verl V1 fields: nested (jagged) tensors or lists of tensors, one a trajectory, unpadded.

    Args:
        fields: ``old_log_probs``, ``rollout_log_probs``, ``response_mask``; where known ``responses``, ``prompts``,
            ``uid``, our details (``zerodrift``) and the trainer's ``row_digests`` (int64 views).
    """
    rows = {name: _unbound(fields[name]) for name in ("old_log_probs", "rollout_log_probs", "response_mask")}
    extra = {name: _unbound(fields[name]) for name in ("responses", "prompts", DIGESTS) if name in fields}
    return samples_from_arrays(
        rows["old_log_probs"],
        rows["rollout_log_probs"],
        rows["response_mask"],
        temperature=temperature,
        token_ids=extra.get("responses"),
        prompt_ids=extra.get("prompts"),
        details=column(fields, DETAILS),
        names=_names(fields, len(rows["old_log_probs"])),
        trainer_digests=[row.view(np.uint64) for row in extra[DIGESTS]] if DIGESTS in extra else None,
    )


def _require_equal_counts(*columns: Sequence[Any]) -> None:
    counts = [len(column) for column in columns]
    if len(set(counts)) > 1:
        raise InvalidRequest(
            f"{counts[0]} rows of the trainer, {counts[1]} of the rollout, {counts[2]} masks; give one each",
            field="masks",
        )


def _unbound(value: Any) -> list[npt.NDArray[Any]]:
    rows = value.unbind() if hasattr(value, "unbind") else list(value)
    return [row.detach().cpu().numpy() if hasattr(row, "detach") else np.asarray(row) for row in rows]


def _spans(told: Mapping[str, Any], mask: npt.NDArray[np.bool_]) -> tuple[VersionSpan, ...]:
    spans = tuple(VersionSpan(*span) for span in told.get("spans", ()))
    # A row of several turns carries the first turn's spans only: then the versions are unknown.
    covered = np.zeros(mask.size, np.bool_)
    for span in spans:
        covered[span.start : span.end] = True
    whole = all(span.end <= mask.size for span in spans) and not (mask & ~covered).any()
    return spans if whole else ()


def _behavior(told: Mapping[str, Any], mask: npt.NDArray[np.bool_]) -> Float32Array | None:
    values = told.get("behavior_logprobs")
    return np.asarray(values, np.float32) if values is not None and len(values) == mask.size else None


def _digests(told: Mapping[str, Any], mask: npt.NDArray[np.bool_]) -> UInt64Array | None:
    # A row of several turns carries the first turn's digests only.
    values = told.get("row_digests")
    return np.asarray(values, np.uint64) if values is not None and len(values) == mask.size else None


def column(data: Mapping[str, Any], name: str) -> list[Any] | None:
    """One value a row, out of an array, a tensor, a stack of objects or a list; None: there is no such column.

    verl V0 makes a column of every extra field of a sample, V1 leaves them together in ``extra_fields``.
    """
    if name in data:
        value = data[name]
        return list(value.tolist() if hasattr(value, "tolist") else value)
    together = None if name == _EXTRA else column(data, _EXTRA)
    values = [(row or {}).get(name) for row in together or ()]
    return values if any(value is not None for value in values) else None


def _names(columns: Mapping[str, Any], rows: int) -> list[str]:
    uids = column(columns, "uid")
    return [f"row-{i}" if uids is None else f"{uids[i]}/{i}" for i in range(rows)]
