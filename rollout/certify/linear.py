"""Family: every product of the model, at its real K and N, over row counts and places in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import linear

from rollout.certify.subject import Family, Outcome, Subject, compare
from rollout.kernels.probe import cancelling_product

_QUICK_ROWS = (1, 2, 3, 7, 9, 10, 16, 17, 33, 63)
_FULL_ROWS = (*range(1, 34), 63, 64, 65, 127)
_MOST_ROWS = 64
_MOST_ROWS_FULL = 128


def shapes(subject: Subject) -> dict[tuple[int, int], torch.nn.Linear]:
    """One layer for every (N, K) of the model."""
    layers = [module for module in subject.model.hf.modules() if isinstance(module, torch.nn.Linear)]
    return {(layer.out_features, layer.in_features): layer for layer in layers}


def _inputs(subject: Subject, outer: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _MOST_ROWS_FULL if subject.full else _MOST_ROWS
    x, weight = cancelling_product(rows, inner, outer, subject.spec.dtype, subject.seed)
    return x.to(subject.kernels.device), weight.to(subject.kernels.device)


@torch.no_grad()
def _checks(subject: Subject) -> Iterator[Outcome]:
    for (outer, inner), layer in shapes(subject).items():
        x, weight = _inputs(subject, outer, inner)
        bias = layer.bias
        with subject.kernels.invariant_mode():
            whole = linear(x, weight, bias)
            for rows in _FULL_ROWS if subject.full else _QUICK_ROWS:
                if rows < len(x):
                    yield compare(f"{outer}x{inner}, {rows} rows", linear(x[:rows], weight, bias), whole[:rows])
            order = torch.randperm(len(x), generator=subject.generator(1)).to(x.device)
            yield compare(f"{outer}x{inner}, rows in another order", linear(x[order], weight, bias), whole[order])
            # Three dimensions, as a padded trainer calls it.
            cube = linear(x.view(2, -1, inner), weight, bias)
            yield compare(f"{outer}x{inner}, [2, T, K]", cube.reshape(whole.shape), whole)
            if subject.full:
                real = subject.random(2, 33, inner)
                yield compare(f"{outer}x{inner}, real weights", layer(real[:3]), layer(real)[:3])

    yield from _planned(subject)


def _planned(subject: Subject) -> Iterator[Outcome]:
    """What the rollout multiplies, stacked and packed as it was planned, against the modules that training runs."""
    for product in subject.decoder.products() if subject.decoder is not None else ():
        x = subject.random(6, _MOST_ROWS, product.modules[0].in_features)
        with subject.kernels.invariant_mode():
            wanted = torch.cat([module(x) for module in product.modules], 1)
            for rows in _FULL_ROWS if subject.full else _QUICK_ROWS:
                if rows <= len(x):
                    name = f"{product.name} {product.shape} ({product.plan}), {rows} rows"
                    yield compare(name, product.run(x[:rows]), wanted[:rows])


@torch.no_grad()
def _control(subject: Subject) -> Outcome:
    """The longest sum split in two, as split-K kernels do at few rows."""
    outer, inner = max(shapes(subject), key=lambda shape: shape[1])
    x, weight = _inputs(subject, outer, inner)
    half = inner // 2
    with subject.kernels.invariant_mode():
        whole = linear(x.float(), weight.float()).to(x.dtype)
        parts = linear(x[:, :half].float(), weight[:, :half].float())
        parts += linear(x[:, half:].float(), weight[:, half:].float())
    return compare(f"{outer}x{inner}, K summed in two halves", parts.to(x.dtype), whole)


FAMILY = Family("linear", "products at every K and N of the model, plain and as planned", _checks, _control)
