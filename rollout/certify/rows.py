"""Family: element-wise operations, norms and reductions: a row's bits must not depend on its company."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from rollout.certify.subject import Family, Outcome, Subject, compare

_ROWS = 33
_NORM_ROWS, _NORM_ROWS_FULL = (1024, 2**16), (8192, 2**19)
"""Most rows, and elements wanted."""


def _operations() -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        "silu": torch.nn.functional.silu,
        "sigmoid": torch.sigmoid,
        "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.5),
        "cos": torch.cos,
        "sin": torch.sin,
        "exp": torch.exp,
        "mean": lambda x: x.mean(-1, keepdim=True),
        "sum": lambda x: x.sum(-1, keepdim=True),
        "softmax": lambda x: torch.softmax(x, -1),
        "log_softmax": lambda x: torch.log_softmax(x, -1),
    }


def _of_towers() -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What only vision towers ask for."""
    gelu = torch.nn.functional.gelu
    return {"gelu": gelu, "gelu by tanh": lambda x: gelu(x, approximate="tanh")}


def _widths(subject: Subject) -> tuple[int, ...]:
    config = subject.model.hf.config.get_text_config()
    found = [subject.spec.head_dim, config.hidden_size, config.intermediate_size, subject.spec.vocab_size]
    # One width that no vector length divides: vector bodies and scalar tails must agree.
    return tuple(dict.fromkeys([*found, config.hidden_size + 7]))


def _norms(subject: Subject) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Every kind of norm module in the model, once."""
    seen: set[tuple[str, int]] = set()
    for name, module in subject.model.hf.named_modules():
        weight = getattr(module, "weight", None)
        if "norm" not in name.rpartition(".")[2] or weight is None or weight.dim() != 1:
            continue
        key = (type(module).__name__, weight.numel())
        if key not in seen:
            seen.add(key)
            yield name, module, weight.numel()


def _spread(subject: Subject, width: int) -> torch.Tensor:
    """Of many magnitudes: sums of squares of bfloat16 values that are all alike are exact in any order."""
    most, elements = _NORM_ROWS_FULL if subject.full else _NORM_ROWS
    rows = min(most, max(_ROWS, elements // width))
    powers = torch.randint(-5, 6, (rows, width), generator=subject.generator(7))
    x = torch.randn(rows, width, generator=subject.generator(6)).to(subject.spec.dtype)
    return torch.ldexp(x.float(), powers).to(subject.spec.dtype).to(subject.kernels.device)


def _company(name: str, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Iterator[Outcome]:
    whole = run(x)
    for first, last in ((0, 1), (len(x) - 1, len(x)), (1, 4), (0, len(x) - 1)):
        yield compare(f"{name}, rows {first}-{last - 1} alone", run(x[first:last].clone()), whole[first:last])


@torch.no_grad()
def _checks(subject: Subject) -> Iterator[Outcome]:
    operations = {**_operations(), **(_of_towers() if subject.model.vision is not None else {})}
    with subject.kernels.invariant_mode():
        for width in _widths(subject):
            x = 3 * subject.random(width, _ROWS, width)
            for name, run in operations.items():
                yield from _company(f"{name} of {width}", run, x)
                if name in ("mean", "sum", "softmax", "log_softmax"):
                    yield from _company(f"{name} of {width} in float32", run, subject.wide(width, _ROWS, width))
        for name, module, width in _norms(subject):
            yield from _company(f"{name} ({type(module).__name__})", module, subject.random(5, _ROWS, width))
            # A sum that is off by its last bit changes one rounded output in tens of thousands: many rows show it.
            x = _spread(subject, width)
            alone = torch.cat([module(x[i : i + 1]) for i in range(len(x))])
            yield compare(f"{name} ({type(module).__name__}), {len(x)} rows one at a time", alone, module(x))


@torch.no_grad()
def _control(subject: Subject) -> Outcome:
    """A row sum whose pieces depend on the number of rows."""
    x = subject.wide(9, _ROWS, subject.model.hf.config.get_text_config().intermediate_size)

    def pieces(rows: torch.Tensor) -> torch.Tensor:
        count = 2 if len(rows) == 1 else 3
        return torch.stack([part.sum(-1) for part in rows.tensor_split(count, -1)]).sum(0)

    with subject.kernels.invariant_mode():
        alone = torch.cat([pieces(x[i : i + 1]) for i in range(len(x))])
        return compare("row sum in pieces that depend on the batch", alone, pieces(x))


FAMILY = Family("rows", "element-wise operations, norms and reductions", _checks, _control)
