"""Faults on the rollout's side: pages, chunks, positions after a cached prefix, keys kept over an update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollout.engine import Engine
from rollout.kernels.cpu.kernel_set import CpuKernelSet
from rollout.logprobs import policy_logprobs
from rollout.types import VersionSpan
from tests.engines import build_engine, fresh_model, random_prompt
from tests.explain.bench import Bench, fault
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause
from trainer_bridge.rollout_record import RolloutRecord

NUMERICS, INPUTS = Cause.NUMERICS, Cause.INPUTS
LONG = 40


def spoiled(bench: Bench, spoil: Any, prompt: Sequence[int], **engine: Any) -> Case:
    """A record of an engine whose rollout attention is spoiled."""

    class Kernels(CpuKernelSet):
        def attention_with_kvcache(self, q: torch.Tensor, store: Any, layer: int, **options: Any) -> torch.Tensor:
            store, options = spoil(store, dict(options))
            return super().attention_with_kvcache(q, store, layer, **options)

    bench.own_rollout().kernels = Kernels(bench.page)
    bench.decoder = None
    made = build_engine(bench.rollout, kv_tokens=2048, fused=False, **engine)
    return bench.case(bench.record(prompt, engine=made))


@fault(
    "KV pages of a sequence swapped", NUMERICS, r"layers\.0\.attention", "wrong value", words="pages 0 and 1 in each"
)
def _(bench: Bench) -> Case:
    def spoil(store: Any, options: dict[str, Any]) -> Any:
        table = options["page_table"]
        if table.size(1) > 1:
            options["page_table"] = table[:, [1, 0, *range(2, table.size(1))]].contiguous()
        return store, options

    return spoiled(bench, spoil, random_prompt(LONG, 5), batch_tokens=128, chunk=128)


@fault("later chunks see one key too few", NUMERICS, r"layers\.0\.attention", "not invariant", words="rollout.*chunks")
def _(bench: Bench) -> Case:
    def spoil(store: Any, options: dict[str, Any]) -> Any:
        rows, seen = options["cu_seqlens_q"].diff(), options["cache_seqlens"]
        later = (rows > 1) & (seen > rows)
        options["cache_seqlens"] = (seen - later.to(seen.dtype)).contiguous()
        return store, options

    return spoiled(bench, spoil, random_prompt(LONG, 5), batch_tokens=64, chunk=16)


@fault("decoding sees one key too few", NUMERICS, r"layers\.0\.attention", "wrong value|not invariant", words="rollout")
def _(bench: Bench) -> Case:
    def spoil(store: Any, options: dict[str, Any]) -> Any:
        rows, seen = options["cu_seqlens_q"].diff(), options["cache_seqlens"]
        options["cache_seqlens"] = (seen - ((rows == 1) & (seen > 1)).to(seen.dtype)).contiguous()
        return store, options

    return spoiled(bench, spoil, random_prompt(LONG, 5), batch_tokens=64, chunk=64)


@fault("KV kept in bfloat16", NUMERICS, r"layers\.0\.attention", "wrong value", words="rollout.*rounded to bfloat16")
def _(bench: Bench) -> Case:
    class Rounding(CpuKernelSet):
        def bind_paged(self, store: Any, *tables: Any) -> Any:
            inner = super().bind_paged(store, *tables)

            class Bound:
                def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
                    inner.write(layer, k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype))

                def read(self, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
                    return inner.read(layer, q, scale)

            return Bound()

    bench.own_rollout().kernels = Rounding(bench.page)
    bench.decoder = None
    return bench.case(bench.record(engine=build_engine(bench.rollout, kv_tokens=2048, fused=False)))


# ---- what the rollout fed ---------------------------------------------------------------------------------------


def recorded(bench: Bench, record: RolloutRecord, ids: Sequence[int], positions: Sequence[int] | None = None) -> Case:
    """The rollout recorded the log-probs of another feed; the trainer computes the right ones."""
    _, targets, temperatures = bench.rows(record)
    logits = bench.logits(ids, positions)[-len(targets) :]
    values = policy_logprobs(logits, targets, temperatures, bench.vocab).numpy()
    wrong = dataclasses.replace(record, policy_logprobs=values, behavior_logprobs=None, row_digests=None)
    return bench.case(wrong, bench.score(record))


def fed_ids(record: RolloutRecord) -> list[int]:
    return [*record.prompt_ids.tolist(), *record.token_ids.tolist()][:-1]


@fault("positions start again after a cached prefix", INPUTS, "position 32", "positions", words="rollout.*again at 0")
def _(bench: Bench) -> Case:
    record = bench.record(random_prompt(LONG, 5))
    ids = fed_ids(record)
    return recorded(bench, record, ids, [*range(32), *range(len(ids) - 32)])


@fault("positions one too low after a cached prefix", INPUTS, "position 16", "positions", words="rollout.*too low")
def _(bench: Bench) -> Case:
    record = bench.record(random_prompt(LONG, 5))
    ids = fed_ids(record)
    return recorded(bench, record, ids, [*range(16), *range(15, len(ids) - 1)])


@fault("decoded tokens at positions one too high", INPUTS, "position 21", "positions", words="rollout.*generated")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = fed_ids(record)
    return recorded(bench, record, ids, [*range(21), *range(22, len(ids) + 1)])


@fault("a token lost at the edge of a chunk", INPUTS, "position 23", "chunk edge", words="rollout.*token 23.*left out")
def _(bench: Bench) -> Case:
    record = bench.record(random_prompt(LONG, 5))
    ids = fed_ids(record)
    return recorded(bench, record, [*ids[:23], *ids[24:]])


@fault(
    "a token fed twice at the edge of a chunk", INPUTS, "position 24", "chunk edge", words="rollout.*token 24.*twice"
)
def _(bench: Bench) -> Case:
    record = bench.record(random_prompt(LONG, 5))
    ids = fed_ids(record)
    return recorded(bench, record, [*ids[:25], *ids[24:]])


@fault("an id of vocabulary padding sampled", Cause.SEMANTICS, "token 3", "vocabulary padding", words="id 66")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = record.token_ids.copy()
    ids[3] = bench.vocab + 2
    return bench.case(dataclasses.replace(record, token_ids=ids), bench.score(record))


# ---- what it kept -----------------------------------------------------------------------------------------------


def updated(bench: Bench) -> Engine:
    """An engine whose prefix cache was filled under other weights, which then changed behind its back."""
    old = fresh_model(bench.path, bench.dtype, page_size=bench.page)
    with torch.no_grad():
        for parameter in old.hf.parameters():
            parameter.mul_(1.05)
    engine = build_engine(old, kv_tokens=2048)
    bench.record(random_prompt(LONG, 5), engine=engine)
    with torch.no_grad():
        for mine, right in zip(old.hf.parameters(), bench.rollout.hf.parameters(), strict=True):
            mine.copy_(right)
    assert engine._decoder is not None
    engine._decoder.refresh()
    return engine


@fault("KV of a cached prefix kept over an update", NUMERICS, "kv cache", "engine state", words="kept over an update")
def _(bench: Bench) -> Case:
    engine = updated(bench)
    bench.engine = lambda record: bench.record(record.prompt_ids.tolist(), engine=engine)
    return bench.case(bench.record(random_prompt(LONG, 5), engine=engine))


@fault("the same, and the service is gone", Cause.UNKNOWN, "rollout", "not reproduced", words="kept from before")
def _(bench: Bench) -> Case:
    return bench.case(bench.record(random_prompt(LONG, 5), engine=updated(bench)))


@fault("weights packed before an update", NUMERICS, "keys|values|norm", "fused forward", words="before the last update")
def _(bench: Bench) -> Case:
    model = fresh_model(bench.path, bench.dtype, page_size=bench.page)
    engine = build_engine(model, kv_tokens=2048)
    # The stacked products hold copies; nobody told them.
    with torch.no_grad():
        for mine in (*model.hf.parameters(),):
            mine.mul_(1.03)
    bench.rollout, bench.decoder = model, engine._decoder
    bench.trainer = fresh_model(bench.path, bench.dtype, page_size=bench.page)
    with torch.no_grad():
        for mine in bench.trainer.hf.parameters():
            mine.mul_(1.03)
    return bench.case(bench.record(engine=engine))


@fault("a sample made under two versions", Cause.WEIGHTS, "tokens 0-4", "several versions", words="v3 tokens 0-4")
def _(bench: Bench) -> Case:
    record = bench.record()
    old = fresh_model(bench.path, bench.dtype, page_size=bench.page)
    with torch.no_grad():
        for parameter in old.hf.parameters():
            parameter.mul_(1.01)
    other = Bench(bench.path, bench.dtype, bench.page)
    other.trainer = old
    values = np.concatenate((other.score(record)[:5], bench.score(record)[5:]))
    spans = (VersionSpan(3, 0, 5), VersionSpan(4, 5, 12))
    mixed = dataclasses.replace(
        record, policy_logprobs=values, behavior_logprobs=None, row_digests=None, spans=spans, weight_version=4
    )
    return bench.case(mixed, bench.score(record))
