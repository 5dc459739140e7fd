"""Family: decode, chunk, full prefill and varlen training of one attention, at lengths around every declared edge."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rollout.certify.subject import STRANGER_ROWS, Family, Outcome, Subject, compare
from rollout.kernels.base import KernelSet, KVLayout, KVStore

_CHUNKS = (2, 9, 31, 33, 64)
_MOST_ERROR = 2.0**-6
"""Of the largest value, against float64: far above rounding, far below a dropped mask or a wrong scale."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    q: torch.Tensor
    """[N, H, D]"""
    k: torch.Tensor
    """[N, H_kv, D]"""
    v: torch.Tensor
    scale: float


def _inputs(subject: Subject) -> _Inputs:
    spec, heads = subject.spec, int(subject.model.hf.config.get_text_config().num_attention_heads)
    n = subject.longest
    k = subject.random(2, n, spec.num_kv_heads, spec.head_dim)
    v = subject.random(3, n, spec.num_kv_heads, spec.head_dim)
    # Not 1 / sqrt(D): a kernel that brings its own scale shows.
    return _Inputs(2 * subject.random(1, n, heads, spec.head_dim), k, v, 0.75 * spec.head_dim**-0.5)


def _edges(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


class _Pages:
    """The inputs' K and V in a poisoned cache, pages in a given order; every sequence shares them."""

    def __init__(self, subject: Subject, inputs: _Inputs, seed: int | None) -> None:
        page = subject.kernels.page_size
        count = -(-len(inputs.k) // page)
        spec = subject.spec
        layout = KVLayout(1, count + 3, page, spec.num_kv_heads, spec.head_dim, spec.dtype)
        self.store: KVStore = subject.kernels.allocate_kv(layout)
        self.store.poison()
        order = torch.arange(count + 3)
        if seed is not None:
            order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(seed))
        self.table = order[:count].to(torch.int32)
        self.spare = int(order[count])
        position = torch.arange(len(inputs.k))
        slots = self.table[position // page].to(torch.int64) * page + position % page
        self.store.write(0, inputs.k, inputs.v, slots)

    def with_copied_rows(self, inputs: _Inputs, n: int) -> _Pages:
        """The same with n - 1 tokens' rows of the last page copied to another, where token n - 1 is then written."""
        number, count = divmod(n - 1, self.store.layout.page_size)
        self.store.copy_rows(int(self.table[number]), self.spare, count)
        slot = torch.tensor([self.spare * self.store.layout.page_size + count])
        self.store.write(0, inputs.k[n - 1 : n], inputs.v[n - 1 : n], slot)
        other = copy.copy(self)
        other.table = self.table.clone()
        other.table[number] = self.spare
        return other

    def attend(self, subject: Subject, inputs: _Inputs, rows: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Rows [first, last) of the sequence, each range as a sequence of its own in one call."""
        q = torch.cat([inputs.q[first:last] for first, last in rows])
        out = subject.kernels.attention_with_kvcache(
            q,
            self.store,
            0,
            page_table=self.table.expand(len(rows), -1).contiguous(),
            cache_seqlens=torch.tensor([last for _, last in rows], dtype=torch.int32),
            cu_seqlens_q=_edges([last - first for first, last in rows]),
            softmax_scale=inputs.scale,
        )
        return list(out.split([last - first for first, last in rows]))


def _varlen(
    subject: Subject, parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], scale: float
) -> torch.Tensor:
    q, k, v = (torch.cat([part[i] for part in parts]) for i in range(3))
    cu = _edges([len(part[0]) for part in parts])
    return subject.kernels.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, softmax_scale=scale)


@torch.no_grad()
def _checks(subject: Subject) -> Iterator[Outcome]:
    inputs = _inputs(subject)
    yield _against_float64(inputs, _varlen(subject, [(inputs.q, inputs.k, inputs.v)], inputs.scale))
    yield from _around_edges(subject, inputs)
    for name, kernels in subject.kernels.closer_views():
        for outcome in _around_edges(_seen_by(subject, kernels), inputs):
            yield dataclasses.replace(outcome, name=f"{outcome.name}, {name}")


def _seen_by(subject: Subject, kernels: KernelSet) -> Subject:
    """The same subject with another set's results."""
    model = copy.copy(subject.model)
    model.kernels = kernels
    return dataclasses.replace(subject, model=model)


def _around_edges(subject: Subject, inputs: _Inputs) -> Iterator[Outcome]:
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    full = _varlen(subject, [(q, k, v)], scale)
    for seed in (None, 1, 2):
        pages = _Pages(subject, inputs, seed)
        order = "pages in order" if seed is None else f"pages shuffled ({seed})"
        decoded = pages.attend(subject, inputs, [(n - 1, n) for n in subject.lengths])
        for n, row in zip(subject.lengths, decoded, strict=True):
            yield compare(f"decode at {n}, {order}", row, full[n - 1 : n])
    pages = _Pages(subject, inputs, 3)
    for n in subject.lengths:
        (alone,) = pages.attend(subject, inputs, [(n - 1, n)])
        yield compare(f"decode at {n} alone", alone, full[n - 1 : n])
        if (n - 1) % subject.kernels.page_size:
            (copied,) = pages.with_copied_rows(inputs, n).attend(subject, inputs, [(n - 1, n)])
            yield compare(f"decode at {n} behind copied rows", copied, full[n - 1 : n])
    for rows in _CHUNKS:
        spans = [(n - rows, n) for n in subject.lengths if n >= rows]
        for (first, last), out in zip(spans, pages.attend(subject, inputs, spans), strict=True):
            yield compare(f"chunk of {rows} ending at {last}", out, full[first:last])
    yield from _strangers(subject, inputs, pages, full)
    short = [n for n in subject.lengths if n < subject.longest]
    for n in short if subject.full else short[-6:]:
        yield compare(f"training at {n}", _varlen(subject, [(q[:n], k[:n], v[:n])], scale), full[:n])
        packed = _varlen(subject, [(q[:5], v[:5], k[:5]), (q[:n], k[:n], v[:n]), (q[-3:], k[:3], k[-3:])], scale)
        yield compare(f"training at {n}, packed between others", packed[5 : 5 + n], full[:n])


def _strangers(subject: Subject, inputs: _Inputs, pages: _Pages, full: torch.Tensor) -> Iterator[Outcome]:
    """A decode row beside another sequence's prefill."""
    n = subject.lengths[len(subject.lengths) // 2]
    for rows in STRANGER_ROWS:
        count = min(rows, subject.longest)
        before, _ = pages.attend(subject, inputs, [(n - 1, n), (0, count)])
        _, after = pages.attend(subject, inputs, [(subject.longest - count, subject.longest), (n - 1, n)])
        yield compare(f"decode at {n} before {count} prefill rows", before, full[n - 1 : n])
        yield compare(f"decode at {n} after {count} prefill rows", after, full[n - 1 : n])


def _against_float64(inputs: _Inputs, out: torch.Tensor) -> Outcome:
    """Two paths can agree and both be wrong: a dense float64 attention stands beside them."""
    wanted = reference_attention(inputs.q.cpu(), inputs.k.cpu(), inputs.v.cpu(), inputs.scale)
    error = float((out.cpu().double() - wanted).abs().max() / wanted.abs().max())
    return Outcome("against float64", out.numel(), int(not error <= _MOST_ERROR), f"largest error {error:.1e} of max")


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Dense causal attention in float64: q [N, H, D]; k, v [N, H_kv, D] -> [N, H, D]."""
    group = q.size(1) // k.size(1)
    q64, k64, v64 = (x.double().transpose(0, 1) for x in (q, k, v))
    k64, v64 = k64.repeat_interleave(group, 0), v64.repeat_interleave(group, 0)
    future = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    scores = (q64 @ k64.transpose(1, 2) * scale).masked_fill(future, -torch.inf)
    return (torch.softmax(scores, -1) @ v64).transpose(0, 1)


def _split(inputs: _Inputs, n: int, splits: int) -> torch.Tensor:
    """Flash decoding by hand: the last row's keys in ``splits`` parts, merged by their log-sums; float32."""
    group = inputs.q.size(1) // inputs.k.size(1)
    query = inputs.q[n - 1].float()
    keys, values = (x[:n].float().repeat_interleave(group, 1).transpose(0, 1) for x in (inputs.k, inputs.v))
    scores = (query[:, None] * keys).sum(-1) * inputs.scale
    lse, outs = [], []
    for part, value in zip(scores.tensor_split(splits, 1), values.tensor_split(splits, 1), strict=True):
        lse.append(part.logsumexp(1))
        outs.append((torch.softmax(part, 1)[:, :, None] * value).sum(1))
    weights = torch.softmax(torch.stack(lse), 0)
    return (weights[:, :, None] * torch.stack(outs)).sum(0)


@torch.no_grad()
def _control(subject: Subject) -> Outcome:
    """num_splits = 2 against 1 on the battery's own inputs, in float32 before the last rounding hides anything."""
    inputs = _inputs(subject)
    pairs = [(_split(inputs, n, 1), _split(inputs, n, 2)) for n in subject.lengths if n > 2]
    one, two = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
    return compare("keys split in two (num_splits = 2)", two, one)


FAMILY = Family("attention", "decode, chunk, prefill and training around every edge", _checks, _control)
