"""An NPU on the CPU: operators under the real ``npu::`` schemas, and stock products whose order depends on the batch.

The stock kernels are deliberately not row-invariant, as the device's may be: the set under test has to make them so.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout.kernels.cpu import activation
from rollout.kernels.cpu.fused import mean_rows
from tests.rollout.kernels.npu.emulator.numerics import attend

SCHEMAS = Path(__file__).with_name("schemas.txt")
"""The operators that our code calls, a line each, as torch_npu 2.13.0 declares them; ``make test-npu-contract``
compares."""


# ---- npu:: operators --------------------------------------------------------------------------------------------


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms * gamma rounded once, rstd float32 [..., 1]), a row alone."""
    rows = input.reshape(-1, input.size(-1)).float().contiguous()
    means = torch.empty(len(rows))
    mean_rows((rows * rows).numpy(), means.numpy())
    rstd = 1.0 / torch.sqrt(means + epsilon)
    out = (rows * rstd[:, None] * gamma.float()).to(input.dtype)
    return out.reshape(input.shape), rstd.reshape(*input.shape[:-1], *[1] * gamma.dim())


def npu_rms_norm_backward(
    dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dgamma float32)."""
    x, grad, weight = input.float(), dy.float(), gamma.float()
    normed = x * rstd
    scaled = grad * weight
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    dims = tuple(range(x.dim() - 1))
    return dx.to(input.dtype), (grad * normed).sum(dims)


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fused operator, whose order of summation follows the number of rows; only a faulty set calls it."""
    total = x1 + x2
    rows = total.reshape(-1, total.size(-1)).float()
    pieces = 4 if len(rows) > 2 else 1
    # In numpy: no override of an aten sum may mend the order that a closed kernel has.
    parts = np.array_split(rows.square().numpy(), pieces, axis=1)
    squares = torch.from_numpy(sum(np.cumsum(part, axis=1)[:, -1] for part in parts)) / rows.size(-1)
    rstd = 1.0 / torch.sqrt(squares + epsilon)
    out = (rows * rstd[:, None] * gamma.float()).to(total.dtype).reshape(total.shape)
    return out, rstd.reshape(*total.shape[:-1], 1), total


_FUSION_OPTIONS = (
    "pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix",
    "actual_seq_qlen", "actual_seq_kvlen",
)  # fmt: skip


def npu_fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    """Layout TND without a mask, segment by segment; lengths are running ends without a leading 0."""
    options = dict(zip(_FUSION_OPTIONS, rest, strict=False))
    assert input_layout == "TND" and query.size(1) == head_num and options["atten_mask"] is None
    ends = list(options["actual_seq_qlen"])
    assert ends == list(options["actual_seq_kvlen"]) and options["keep_prob"] == 1.0
    out = np.empty(query.shape, np.float32)
    lse = np.empty((head_num, query.size(0)), np.float32)
    arrays = [np.ascontiguousarray(x.detach().float().numpy()) for x in (query, key, value)]
    for first, last in itertools.pairwise([0, *ends]):
        part = np.empty((head_num, last - first), np.float32)
        segment = [a[first:last] for a in arrays]
        attend(*segment, np.float32(options["scale"]), False, False, 1, 2**30, 0, out[first:last], part)
        lse[:, first:last] = part
    sums = torch.from_numpy(lse.T.copy())[..., None].expand(-1, -1, 8).contiguous()
    return torch.from_numpy(out).to(query.dtype), sums, torch.ones_like(sums), torch.empty(0), 0, 0, 0


OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": npu_rms_norm,
    "npu_rms_norm_backward": npu_rms_norm_backward,
    "npu_add_rms_norm": npu_add_rms_norm,
    "npu_fusion_attention": npu_fusion_attention,
}


@functools.lru_cache(maxsize=1)
def npu_operators() -> tuple[torch.library.Library, torch.library.Library]:
    """``torch.ops.npu`` under the real schemas with CPU implementations, once and for the life of the process."""
    define, implement = torch.library.Library("npu", "DEF"), torch.library.Library("npu", "IMPL")
    for line in SCHEMAS.read_text(encoding="utf-8").splitlines():
        define.define(line.removeprefix("npu::"))
    for name, function in OPERATORS.items():
        implement.impl(name, function, "CPU")
    return define, implement


# ---- stock aten kernels of the device ---------------------------------------------------------------------------


def split_product(a: torch.Tensor, b: torch.Tensor, plain: Callable[..., torch.Tensor]) -> torch.Tensor:
    """a [M, K] @ b [K, N] in float32, K in as many parts as M asks for: one for long inputs, four for a single row."""
    parts = 4 if a.size(0) == 1 else 2 if a.size(0) < 48 else 1
    rows = torch.cat((a, a.new_zeros(-a.size(0) % 16, a.size(1)))).float()
    pieces = zip(rows.chunk(parts, 1), b.float().chunk(parts, 0), strict=True)
    total = sum(plain(x.contiguous(), y.contiguous()) for x, y in pieces)
    return torch.as_tensor(total)[: a.size(0)].to(a.dtype)


class StockDevice:
    """Installs the emulated device's kernels at the CPU's keys."""

    def __init__(self) -> None:
        self.products = 0
        """stock products asked for"""

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)
            self._install(library)
        try:
            yield
        finally:
            library._destroy()

    def _install(self, library: torch.library.Library) -> None:
        original = torch.library.get_kernel("aten::mm", "CPU")

        def put(name: str, function: Callable[..., Any], key: str = "CPU") -> None:
            library.impl(name, function, key, with_keyset=True, allow_override=True)

        def mm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            self.products += 1
            if a.size(0) == 0 or a.size(1) == 0:
                return a.new_zeros(a.size(0), b.size(1))
            return split_product(a, b, lambda x, y: original.call_boxed(keys, x, y))

        def addmm(keys: Any, bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
            return mm(keys, a, b) * alpha + bias * beta

        def bmm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.stack([mm(keys, x, y) for x, y in zip(a, b, strict=True)])

        def matmul(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            raise AssertionError("the device's own matmul was reached: it does not decompose into mm on an NPU")

        put("mm", mm)
        put("addmm", addmm)
        put("bmm", bmm)
        for name, function in (("silu", activation.silu), ("sigmoid", activation.sigmoid)):
            put(name, _elementwise(function))
        put("cos", _elementwise(activation.cos))
        put("sin", _elementwise(activation.sin))
        put("rsqrt", _elementwise(lambda x: (1.0 / torch.sqrt(x.float())).to(x.dtype)))
        put("gelu", lambda keys, x, *, approximate="none": activation.gelu(x, approximate))
        put("matmul", matmul, "AutogradCPU")


def _elementwise(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda keys, x: function(x.float()).to(x.dtype) if x.dtype == torch.float16 else function(x)
