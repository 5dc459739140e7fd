"""Which side is right at the first unequal tensor, by float64 arithmetic on the inputs they share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rollout.errors import UnsupportedFeature
from rollout.oracle import sizes_of
from rollout.taps import LOGITS
from trainer_bridge.explain.bisect import Place, Run
from trainer_bridge.explain.operation import Inputs, needs
from trainer_bridge.explain.reference import variants
from trainer_bridge.ulp import ulp_distance

_MOST_ROWS = 48
_ROW_ATTENTION = 6
_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_FEWER = 3.0
"""A fault is named when it leaves a third of the unequal elements, or of the error, that the right operation leaves."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What float64 says about one tensor. Left is the rollout, right the trainer."""

    shape: tuple[int, ...]
    """of one row"""
    dtype: str
    max_ulp: int
    unequal: int
    """elements that differ, in the first unequal row"""
    left_error: float | None
    """relative to the norm of the exact rows; None: the operation has no reference"""
    right_error: float | None
    left_right: bool | None
    """whether the left side agrees with float64 within rounding"""
    right_right: bool | None
    fault: str = ""
    """the usual fault that gives one side's values"""
    faulty: str = ""
    """ "left" or "right" """


def ulp_of(left: torch.Tensor, right: torch.Tensor) -> int:
    """Largest distance in units in the last place of their dtype."""
    if left.dtype == torch.bfloat16:
        # bfloat16 is the upper half of float32, so one of its units is 2**16 of float32's.
        return _most(left.float(), right.float()) >> 16
    return _most(left.float(), right.float())


def _most(left: torch.Tensor, right: torch.Tensor) -> int:
    a, b = (x.contiguous().view(-1).numpy().astype(np.float32, copy=False) for x in (left, right))
    return int(ulp_distance(a, b).max(initial=0))


def judge(place: Place, left: Run, right: Run, until: int, config: Mapping[str, Any]) -> Judgement:
    """Fetch the tensor and its inputs from both sides and weigh them."""
    layers = int(config["num_hidden_layers"])
    wanted = (place.tap, *needs(place.tap, place.layer, layers))
    inside = place.tap if place.layer is None else f"layers.{place.layer}."
    ours = left.trace(within=inside, tensors=wanted).tensors
    theirs = right.trace(within=inside, tensors=wanted).tensors
    if place.tap not in ours or place.tap not in theirs:
        return Judgement((), "", 0, 0, None, None, None, None)
    offset = left.request.logits_from if place.tap == LOGITS else 0
    a, b = ours[place.tap], theirs[place.tap]
    size = min(len(a), len(b))
    a, b = a[:size], b[:size].to(a.dtype) if b.dtype == a.dtype else b[:size]
    if a[0].numel() != b[0].numel():
        columns = min(a.size(-1), b.size(-1))
        a, b = a[..., :columns], b[..., :columns]
    a, b = a.reshape(size, -1), b.reshape(size, -1)
    row = place.row - offset
    facts = {
        "shape": tuple(ours[place.tap].shape[1:]),
        "dtype": str(a.dtype).removeprefix("torch."),
        "max_ulp": ulp_of(a[row], b[row]),
        "unequal": int((a[row] != b[row]).sum()),
    }
    exact = _weigh(place, left, right, ours, (a, b), until, config, offset)
    return Judgement(**facts, **exact)  # type: ignore[arg-type]


def _weigh(
    place: Place,
    left: Run,
    right: Run,
    ours: Mapping[str, torch.Tensor],
    both: tuple[torch.Tensor, torch.Tensor],
    until: int,
    config: Mapping[str, Any],
    offset: int,
) -> dict[str, Any]:
    nothing: dict[str, Any] = {"left_error": None, "right_error": None, "left_right": None, "right_right": None}
    try:
        sizes = sizes_of(config)
    except (UnsupportedFeature, KeyError):
        return nothing
    rows = _rows(place, both, until, offset)

    def weight(name: str) -> torch.Tensor | None:
        found = left.side.tensor(name)
        return found if found is not None else right.side.tensor(name)

    page = int(left.side.manifest().get("kernels.page_size", 0))
    inputs = Inputs(place.tap, place.layer, ours, rows, left.request.token_ids, sizes, both[0].dtype, weight, page)
    a, b = (x[rows - offset] for x in both)
    options = variants(inputs)
    right_one = next(options, None)
    if right_one is None:
        return nothing
    exact = right_one.compute(inputs).reshape(len(rows), -1)[:, : a.size(1)]
    bound = _bound(place, a.dtype, inputs)
    errors = [_error(x, exact) for x in (a, b)]
    verdict: dict[str, Any] = {
        "left_error": errors[0],
        "right_error": errors[1],
        "left_right": errors[0] <= bound,
        "right_right": errors[1] <= bound,
    }
    best, found = float("inf"), dict[str, Any]()
    for variant in options:
        value = variant.compute(inputs).reshape(len(rows), -1)[:, : a.size(1)]
        for side, x, error in (("left", a, errors[0]), ("right", b, errors[1])):
            left_over = _error(x, value)
            if left_over < best and _fits(x, value, exact, error):
                best = left_over
                found = {"fault": variant.words, "faulty": side, f"{side}_right": False}
    return verdict | found


def _rows(place: Place, both: tuple[torch.Tensor, torch.Tensor], until: int, offset: int) -> torch.Tensor:
    """The rows that differ most, a few of them, in order; inputs are equal at all of them."""
    a, b = (x[: until + 1 - offset].double() for x in both)
    apart = (a - b).abs().amax(1)
    differ = (a != b).any(1).nonzero()[:, 0]
    most = _ROW_ATTENTION if place.operation == "attention" else _MOST_ROWS
    if not len(differ):
        return torch.tensor([place.row])
    return differ[apart[differ].argsort(descending=True)[:most]].sort().values + offset


def _bound(place: Place, dtype: torch.dtype, inputs: Inputs) -> float:
    """Relative error that rounding explains: a few roundings, and a random walk along a sum."""
    terms = 1
    if place.operation.endswith("_proj") or place.tap == LOGITS:
        source = needs(place.tap, place.layer, inputs.sizes.layers)[0]
        terms = int(inputs.values[source][0].numel())
    if place.operation == "attention":
        terms = int(inputs.rows.max()) + inputs.sizes.head_dim
    return 4 * _UNIT.get(dtype, 2.0**-8) + 2 * math.sqrt(terms) * _UNIT[torch.float32]


def _error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def _fits(x: torch.Tensor, value: torch.Tensor, exact: torch.Tensor, error: float) -> bool:
    """Whether the faulty operation explains these values far better than the right one."""
    wrong = float((exact.to(x.dtype) != x).double().mean())
    still = float((value.to(x.dtype) != x).double().mean())
    if torch.equal(value.to(x.dtype), exact.to(x.dtype)):
        return False
    closer = _error(x, value) * _FEWER < error and still <= wrong
    return closer or (still * _FEWER < wrong and wrong > 0.002)
