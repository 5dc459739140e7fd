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

from rollout.errors import InvalidRequest, ParityError
from rollout.logprobs import effective_temperature
from rollout.temperature import checked_temperature
from rollout.types import Float32Array, Int32Array, LogprobMode, UInt64Array, VersionSpan
from trainer_bridge.checks import binary_mask, label
from trainer_bridge.ids import id_array
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
    temperature: float | None,
    otherwise: float | None = None,
    token_ids: Sequence[npt.ArrayLike] | None = None,
    prompt_ids: Sequence[npt.ArrayLike] | None = None,
    details: Sequence[Mapping[str, Any] | None] | None = None,
    names: Sequence[str] | None = None,
    trainer_digests: Sequence[npt.NDArray[np.uint64] | None] | None = None,
) -> list[ScoredSample]:
    """One sample a row: float32 [L] log-probs of both sides, mask [L]; rows may differ in length.

    Args:
        temperature: what the trainer used; 0 is greedy. Details that tell of another one are refused. None: theirs.
        otherwise: label of rows whose temperature neither side states; None: they are refused.
        token_ids, prompt_ids: [L] and [P] a row; 0 where not given, and then only positions can be named.
        details: what the rollout said of each sample (seed, spans, replica, ...), if anything.
        names: request ids; "row-i" where not given.
        trainer_digests: uint64 [L] row digests of the trainer's side; they count where the details hold the rollout's.

    Errors: InvalidRequest for lengths or dtypes that disagree (a cast would change the bits that are compared), a mask
    other than 0 and 1, ids that are no integers; ParityError for log-probs of two temperatures.
    """
    _require_equal_counts(
        trainer=trainer, rollout=rollout, masks=masks, token_ids=token_ids, prompt_ids=prompt_ids, details=details,
        names=names, trainer_digests=trainer_digests,
    )  # fmt: skip
    samples = []
    for i, (ours, theirs, mask) in enumerate(zip(trainer, rollout, masks, strict=True)):
        name = f"row-{i}" if names is None else names[i]
        told: Mapping[str, Any] = (details[i] if details is not None else None) or {}
        entering = binary_mask(_plain(mask, "masks"), label(name, 0))
        degrees, mode = _meaning(told, temperature, otherwise, label(name, 0))
        filtered = bool(told.get("filtered", False))
        digests = _digests(told, entering) if trainer_digests is not None and trainer_digests[i] is not None else None
        samples.append(
            ScoredSample(
                request_id=name,
                sample_index=0,
                prompt_ids=_ids(prompt_ids, i, "prompt_ids", 0),
                token_ids=_ids(token_ids, i, "token_ids", entering.size),
                rollout_logprobs=_plain(theirs, "rollout_logprobs"),
                trainer_logprobs=_plain(ours, "trainer_logprobs"),
                mask=entering,
                mode=mode,
                temperature=degrees,
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

    Errors: InvalidRequest when a tensor is missing or of another shape, the temperature is unknown, or the response
    mask marks a pad; else as ``samples_from_arrays``.
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
    checked_temperature(temperature, "temperature")
    digested = (DIGESTS,) if DIGESTS in batch.keys() else ()  # noqa: SIM118
    columns = {name: _plain(batch[name], name) for name in (*needed, *digested)}
    _require_shapes(columns)
    attention = binary_mask(columns["attention_mask"], "attention_mask")
    real = attention[:, prompts:]
    marked = np.argwhere((columns["response_mask"] != 0) & ~real)
    if len(marked):
        raise InvalidRequest(
            f"row {marked[0][0]}: response_mask marks token {marked[0][1]}, which attention_mask calls a pad",
            field="response_mask",
        )

    def kept(name: str) -> list[npt.NDArray[Any]]:
        return [row[keep] for row, keep in zip(columns[name], real, strict=True)]

    return samples_from_arrays(
        kept("old_log_probs"),
        kept("rollout_log_probs"),
        kept("response_mask"),
        temperature=float(temperature),
        token_ids=kept("responses"),
        prompt_ids=[row[keep] for row, keep in zip(columns["prompts"], attention[:, :prompts], strict=True)],
        details=column(data.non_tensor_batch, DETAILS),
        names=_names(data.non_tensor_batch, len(real)),
        trainer_digests=[row.view(np.uint64) for row in kept(DIGESTS)] if digested else None,
    )


def samples_from_nested(fields: Mapping[str, Any], *, temperature: float | None) -> list[ScoredSample]:
    """Rows of verl V1 fields: nested (jagged) tensors or lists of tensors, one a trajectory, unpadded.

    Args:
        fields: ``old_log_probs``, ``rollout_log_probs``, ``response_mask``; where known ``responses``, ``prompts``,
            ``uid``, our details (``zerodrift``) and the trainer's ``row_digests`` (int64 views).
        temperature: see ``samples_from_arrays``.
    """
    rows = {name: _unbound(fields[name], name) for name in ("old_log_probs", "rollout_log_probs", "response_mask")}
    extra = {name: _unbound(fields[name], name) for name in ("responses", "prompts", DIGESTS) if name in fields}
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


def _require_equal_counts(**columns: Sequence[Any] | None) -> None:
    counts = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{count} in {name}" for name, count in counts.items())
        raise InvalidRequest(f"numbers of rows differ: {told}; give one each", field="masks")


def _require_shapes(columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """A row that is wider than the others would lose its end, or its values would stand beside other tokens."""
    shapes = {name: array.shape for name, array in columns.items()}
    rows, width = shapes["responses"]
    wanted = dict.fromkeys(shapes, (rows, width)) | {
        "prompts": (rows, shapes["prompts"][-1]),
        "attention_mask": (rows, shapes["prompts"][-1] + width),
    }
    if shapes != wanted:
        name = next(name for name in shapes if shapes[name] != wanted[name])
        raise InvalidRequest(
            f"{name} has the shape {shapes[name]}, beside responses {shapes['responses']} and prompts "
            f"{shapes['prompts']} it must be {wanted[name]}; nothing is padded or cut",
            field=name,
        )


def _plain(value: Any, name: str) -> npt.NDArray[Any]:
    """A tensor's or a list's values as an array of the same type."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    try:
        array: npt.NDArray[Any] = value.detach().cpu().numpy()
    except TypeError:
        raise InvalidRequest(
            f"{name} is {value.dtype}, must be float32: a cast changed the bits that are compared; take the values "
            "before it",
            field=name,
        ) from None
    return array


def _ids(rows: Sequence[npt.ArrayLike] | None, i: int, name: str, absent: int) -> Int32Array:
    return np.zeros(absent, np.int32) if rows is None else id_array(_plain(rows[i], name), name)


def _unbound(value: Any, name: str) -> list[npt.NDArray[Any]]:
    return [_plain(row, name) for row in (value.unbind() if hasattr(value, "unbind") else list(value))]


def _meaning(
    told: Mapping[str, Any], trainer: float | None, otherwise: float | None, where: str
) -> tuple[float, LogprobMode]:
    """Temperature and mode of a row. What the rollout says of it counts, and must be what the trainer used."""
    said = told.get("temperature")
    known = next((value for value in (said, trainer, otherwise) if value is not None), None)
    if known is None:
        raise InvalidRequest(f"{where}: no temperature is known; pass temperature=", field="temperature")
    if said is not None and trainer is not None:
        if effective_temperature(said) != effective_temperature(trainer):
            raise ParityError(
                f"{where} was sampled at temperature {said:g}, the trainer scored at {trainer:g}; score each "
                "temperature with its own value"
            )
        known = trainer if np.float32(trainer) == np.float32(said) else said
    mode = LogprobMode.GREEDY_T1 if known == 0.0 else LogprobMode.TEMPERED
    if told.get("mode") not in (None, mode.name):
        raise ParityError(
            f"{where}: the rollout says that its log-probs are {told['mode']}, at temperature {known:g} they are "
            f"compared as {mode.name}"
        )
    return known, mode


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
