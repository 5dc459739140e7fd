"""More meanings of "log-prob": filters nobody asked for, roundings on the wire, other quantities."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from rollout.logprobs import policy_logprobs
from rollout.sampling import behavior_logprob, kept_tokens
from rollout.types import SamplingParams
from tests.explain.bench import Bench, fault
from tests.explain.faults_semantics import EVERY, SEMANTICS, computed, contract, gathered, tempered
from trainer_bridge.explain.case import Case

NONE = np.empty(0, np.int64)


def after_filters(rows: torch.Tensor, targets: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    barred = np.array(params.barred_token_ids, np.int64)
    values = [
        behavior_logprob(np.float32(row[t]), row, kept_tokens(row, params, barred))
        for row, t in zip(rows.numpy(), targets.tolist(), strict=True)
    ]
    return torch.tensor(values, dtype=torch.float32)


@fault(
    "the trainer applies a top-k nobody asked for", SEMANTICS, EVERY, "filter", words="trainer.*did not ask.*top_k = 20"
)
def _(bench: Bench) -> Case:
    params = SamplingParams(top_k=20)
    return computed(bench, lambda x, t, T: after_filters(torch.log_softmax(tempered(x, T), -1), t, params))


@fault("top-p filled in from generation_config", SEMANTICS, EVERY, "filter", words="rollout.*did not ask.*top_p = 0.9")
def _(bench: Bench) -> Case:
    record = bench.record()
    logits, targets, temperatures = bench.rows(record)
    rows = torch.log_softmax(logits[:, : bench.vocab].float() / temperatures[:, None], -1)
    values = after_filters(rows, targets, SamplingParams(top_p=0.9))
    # Tokens beyond the nucleus would not have been sampled.
    values = torch.where(values > 0, rows.gather(1, targets[:, None])[:, 0], values).numpy()
    return bench.case(dataclasses.replace(record, policy_logprobs=values, behavior_logprobs=None))


@fault("a repetition penalty filled in", SEMANTICS, EVERY, "filter", words="penalty of 1.1")
def _(bench: Bench) -> Case:
    record = bench.record()
    logits, targets, temperatures = bench.rows(record)
    wide = logits[:, : bench.vocab].float().clone()
    for i, row in enumerate(wide):
        seen = torch.tensor(sorted({*record.prompt_ids.tolist(), *record.token_ids[:i].tolist()}))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.1, row[seen] * 1.1)
    values = gathered(torch.log_softmax(wide / temperatures[:, None], -1), targets)
    return bench.case(dataclasses.replace(record, policy_logprobs=values.numpy(), behavior_logprobs=None))


@fault("barred ids left out of the policy", SEMANTICS, EVERY, "filter", words="trainer.*filtered distribution")
def _(bench: Bench) -> Case:
    record = bench.record(barred_token_ids=(5, 6, 7, 8))
    logits, targets, temperatures = bench.rows(record)
    rows = torch.log_softmax(logits[:, : bench.vocab].float() / temperatures[:, None], -1)
    assert record.sampling is not None
    return bench.case(record, after_filters(rows, targets, record.sampling).numpy())


@fault("log-probs rounded to bfloat16 on the wire", SEMANTICS, EVERY, "precision", words="rollout.*rounded to bfloat16")
def _(bench: Bench) -> Case:
    record = bench.record()
    values = torch.from_numpy(record.policy_logprobs.copy()).bfloat16().float().numpy()
    return bench.case(dataclasses.replace(record, policy_logprobs=values, behavior_logprobs=None))


@fault("log-probs written with four decimals", SEMANTICS, EVERY, "precision", words="4 decimals")
def _(bench: Bench) -> Case:
    record = bench.record()
    values = np.round(record.policy_logprobs.astype(np.float64), 4).astype(np.float32)
    return bench.case(dataclasses.replace(record, policy_logprobs=values, behavior_logprobs=None))


@fault("logits cast to float16", SEMANTICS, EVERY, "precision", words="logits were rounded to float16")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: contract(bench, x.half().float(), t, T))


@fault("log-softmax in float16", SEMANTICS, EVERY, "precision", words="ran in float16")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(torch.log_softmax(tempered(x, T).half(), -1), t))


@fault("base 10", SEMANTICS, EVERY, "units", words="base 10")
def _(bench: Bench) -> Case:
    record = bench.record()
    return bench.case(record, bench.score(record) / np.float32(np.log(10.0)))


@fault("the likeliest token's log-prob", SEMANTICS, EVERY, "formula", words="likeliest")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: contract(bench, x, x.argmax(-1), T))


@fault("running sums", SEMANTICS, EVERY, "formula", words="running sums")
def _(bench: Bench) -> Case:
    record = bench.record()
    return bench.case(record, np.cumsum(bench.score(record), dtype=np.float32))


@fault("entropies", SEMANTICS, EVERY, "formula", words="entropy")
def _(bench: Bench) -> Case:
    def entropy(x: torch.Tensor, _: torch.Tensor, T: float) -> torch.Tensor:
        rows = torch.log_softmax(tempered(x, T), -1)
        return -(rows.exp() * rows).sum(-1)

    return computed(bench, entropy)


@fault("logits in place of log-probs", SEMANTICS, EVERY, "formula", words="without a softmax")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(x, t))


@fault("another temperature, not on record", SEMANTICS, EVERY, "temperature", words="was 0.8, not 0.7")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: contract(bench, x, t, float(np.float32(0.8))))


@fault("multiplied by the temperature", SEMANTICS, EVERY, "temperature", words="multiplied by the temperature")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(torch.log_softmax(x * torch.tensor(T), -1), t))


@fault("softmax over the tokenizer's ids only", SEMANTICS, EVERY, "vocabulary padding", words="first 60 columns")
def _(bench: Bench) -> Case:
    record = bench.record(barred_token_ids=tuple(range(60, bench.vocab)))
    record = dataclasses.replace(record, sampling=dataclasses.replace(record.sampling, barred_token_ids=()))
    logits, targets, temperatures = bench.rows(record)
    return bench.case(record, policy_logprobs(logits, targets, temperatures, 60).numpy())


@fault("NaN where the trainer has no value", SEMANTICS, "token 5", "mask", words="nan in place")
def _(bench: Bench) -> Case:
    record = bench.record()
    values = bench.score(record).copy()
    values[5:8] = np.nan
    return bench.case(record, values)


@fault("the mask moved by one", SEMANTICS, "token 0", "mask")
def _(bench: Bench) -> Case:
    record = bench.record()
    mask = np.ones(len(record.token_ids), np.bool_)
    mask[0] = False
    return bench.case(record, trainer_mask=mask)
