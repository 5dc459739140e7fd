"""Checks shared by the records: lengths, dtypes, finiteness, spans. Messages name sample, value and way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from rollout.types import Float32Array, VersionSpan

Mask = npt.NDArray[np.bool_]
MOST_LOGPROB = 0.125
"""nats; a probability is at most 1, but rounding in bfloat16 may pass it, by a step of its logits"""

_OPTIONAL = frozenset({"behavior_logprobs", "row_digests", "rollout_digests", "trainer_digests"})


def label(request_id: str, sample_index: int) -> str:
    """How messages name a sample."""
    return f"request {request_id!r} sample {sample_index}"


def freeze(record: object, name: str, dtype: type[np.generic], length: int | None, where: str) -> None:
    """Replace a field by a read-only view after checking dtype and length; None stays None where that is allowed."""
    value: npt.NDArray[Any] | None = getattr(record, name)
    if value is None and name in _OPTIONAL:
        return
    if name == "mask":
        value = _as_mask(value, where)
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
        got = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise InvalidRequest(
            f"{where}: {name} is {got}, must be a one-dimensional {np.dtype(dtype).name} array; convert at the source, "
            "where the exact value is known",
            field=name,
        )
    if length is not None and value.size != length:
        raise InvalidRequest(
            f"{where}: {length} token_ids but {value.size} values in {name}; every token needs one (NaN where absent, "
            "with mask 0): nothing is padded or cut",
            field=name,
        )
    view = value.view()
    view.flags.writeable = False
    object.__setattr__(record, name, view)


def _as_mask(value: npt.NDArray[Any] | None, where: str) -> npt.NDArray[Any] | None:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        return value
    return binary_mask(value, where)


def binary_mask(values: npt.ArrayLike, where: str) -> Mask:
    """A mask of any numeric type as bool, of the same shape.

    Raises:
        InvalidRequest: anything but 0 and 1, NaN included: what half a token means is not defined.
    """
    array = np.asarray(values)
    if array.dtype == np.bool_ or not array.size:
        return array.astype(np.bool_)
    if array.dtype.kind not in "iuf":
        raise InvalidRequest(f"{where}: mask is {array.dtype}, must be 0 and 1", field="mask")
    odd = array[(array != 0) & (array != 1)]
    if odd.size:
        raise InvalidRequest(f"{where}: mask holds {odd[0]}; only 0 and 1 are defined", field="mask")
    return array.astype(np.bool_)


def require_finite(name: str, values: Float32Array | None, mask: Mask, where: str) -> None:
    """Refuse at mask 1 a NaN, an infinity, and values none of which is negative: they are no log-probs.

    Single positive ones pass: they are what somebody's rounding made, and a comparison is there to show it. At mask 0
    anything goes.
    """
    if values is None:
        return
    above = np.flatnonzero(mask & (values > MOST_LOGPROB) & np.isfinite(values))
    if above.size and not (values[mask] < 0).any():
        position = int(above[0])
        raise InvalidRequest(
            f"{where}: {name} is {values[position]} at position {position} of {values.size}, a log-prob is at most 0 "
            f"({above.size} such positions); these look like probabilities or negated log-probs",
            field=name,
        )
    bad = np.flatnonzero(mask & ~np.isfinite(values))
    if bad.size:
        position = int(bad[0])
        meaning = "absent" if np.isnan(values[position]) else "not a finite log-prob"
        raise InvalidRequest(
            f"{where}: {name} is {values[position]} ({meaning}) at position {position} of {values.size}, where mask "
            f"is 1 ({bad.size} such positions); set mask 0 if the model did not sample this token",
            field=name,
        )


def check_spans(spans: tuple[VersionSpan, ...], mask: Mask, where: str) -> None:
    """Spans are ordered, disjoint, inside the sample, and cover every token with mask 1; no spans: unknown."""
    if not spans:
        return
    covered = np.zeros(mask.size, dtype=np.bool_)
    last = 0
    for span in spans:
        if not last <= span.start <= span.end <= mask.size:
            raise InvalidRequest(
                f"{where}: span [{span.start}, {span.end}) of version {span.version} does not follow {last} within "
                f"{mask.size} tokens; spans are ordered, disjoint and inside the sample",
                field="spans",
            )
        covered[span.start : span.end] = True
        last = span.end
    bare = np.flatnonzero(mask & ~covered)
    if bare.size:
        raise InvalidRequest(f"{where}: no span covers token {int(bare[0])}, which has mask 1", field="spans")
