"""Faults in what a log-prob means on one side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from rollout.logprobs import policy_logprobs
from rollout.types import LogprobMode
from tests.explain.bench import Bench, fault, fed
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause

SEMANTICS = Cause.SEMANTICS
EVERY = "every token"
Compute = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def computed(bench: Bench, compute: Compute) -> Case:
    """The trainer reads its logits by ``compute(logits float32 [L, V], targets [L], T)``."""
    record = bench.record()
    logits, targets, temperatures = bench.rows(record)
    values = compute(logits[:, : bench.vocab].float(), targets, float(temperatures[0]))
    return bench.case(record, values.float().numpy())


def gathered(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return rows.gather(1, targets[:, None])[:, 0]


def tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits / torch.full((len(logits), 1), temperature)


def contract(bench: Bench, logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    return policy_logprobs(logits, targets, torch.full((len(targets),), temperature), bench.vocab)


@fault("temperature rounded to bfloat16", SEMANTICS, EVERY, "temperature", words="trainer.*bfloat16")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: contract(bench, x, t, float(torch.tensor(T).bfloat16())))


@fault("temperature rounded to float16", SEMANTICS, EVERY, "temperature", "llama-bf16", words="float16")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: contract(bench, x, t, float(torch.tensor(T).half())))


@fault("raw log-probs on the trainer's side", SEMANTICS, EVERY, "temperature", words="trainer.*raw")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: contract(bench, x, t, 1.0))


@fault("raw log-probs on the rollout's side", SEMANTICS, EVERY, "temperature", words="rollout.*raw")
def _(bench: Bench) -> Case:
    record = bench.record()
    logits, targets, _ = bench.rows(record)
    raw = contract(bench, logits, targets, 1.0).numpy()
    return bench.case(dataclasses.replace(record, policy_logprobs=raw, behavior_logprobs=None))


@fault("temperature after the log-softmax", SEMANTICS, EVERY, "temperature", words="after the softmax")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(torch.log_softmax(x, -1) / torch.tensor(T), t))


@fault("multiplied by the reciprocal", SEMANTICS, EVERY, "temperature", words="reciprocal")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(torch.log_softmax(x * torch.tensor(1 / T), -1), t))


@fault("temperature applied twice", SEMANTICS, EVERY, "temperature", words="twice")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(torch.log_softmax(tempered(tempered(x, T), T), -1), t))


@fault("divided in bfloat16", SEMANTICS, EVERY, "temperature", "qwen3-bf16", words="own dtype")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(torch.log_softmax((x.bfloat16() / T).float(), -1), t))


@fault("another temperature on record", SEMANTICS, EVERY, "temperature", words="scored at 1")
def _(bench: Bench) -> Case:
    record = bench.record()
    logits, targets, _ = bench.rows(record)
    values = contract(bench, logits, targets, 1.0).numpy()
    return bench.case(record, values, fed=fed(record, temperature=1.0))


@fault("processed against raw: filtered log-probs recorded", SEMANTICS, EVERY, "filter", words="rollout.*filtered")
def _(bench: Bench) -> Case:
    record = bench.record(top_k=5, top_p=0.9)
    assert record.behavior_logprobs is not None
    spoiled = dataclasses.replace(record, policy_logprobs=record.behavior_logprobs, behavior_logprobs=None)
    return bench.case(spoiled)


@fault("greedy scored as if at a temperature", SEMANTICS, EVERY, "temperature", words="scored at 0.5")
def _(bench: Bench) -> Case:
    record = bench.record(temperature=0.0)
    assert record.mode is LogprobMode.GREEDY_T1
    logits, targets, _ = bench.rows(record)
    return bench.case(record, contract(bench, logits, targets, 0.5).numpy(), fed=fed(record, temperature=0.5))


@fault("log-probs shifted by one", SEMANTICS, EVERY, "shift", words="token i \\+ 1")
def _(bench: Bench) -> Case:
    record = bench.record()
    return bench.case(record, np.roll(bench.score(record), -1))


@fault("log-probs shifted back by one", SEMANTICS, EVERY, "shift", words="token i - 1")
def _(bench: Bench) -> Case:
    record = bench.record()
    return bench.case(record, np.roll(bench.score(record), 1))


@fault("labels not shifted against the logits", SEMANTICS, EVERY, "shift", words="not aligned")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = [*record.prompt_ids.tolist(), *record.token_ids.tolist()]
    logits = bench.logits(ids)[-len(record.token_ids) :]
    _, targets, temperatures = bench.rows(record)
    return bench.case(record, policy_logprobs(logits, targets, temperatures, bench.vocab).numpy())


@fault("the sampled EOS masked", SEMANTICS, "token 11", "mask", words="EOS")
def _(bench: Bench) -> Case:
    record = bench.record()
    mask = np.ones(len(record.token_ids), np.bool_)
    mask[-1] = False
    return bench.case(record, trainer_mask=mask)


@fault("the last token filled with 0.0", SEMANTICS, "token 11", "mask", words="0 in place")
def _(bench: Bench) -> Case:
    record = bench.record()
    values = bench.score(record).copy()
    values[-1] = 0.0
    return bench.case(record, values)


@fault("tool tokens counted as the model's", SEMANTICS, "token 4", "mask", words="counted")
def _(bench: Bench) -> Case:
    record = bench.record()
    ours = np.ones(len(record.token_ids), np.bool_)
    ours[4:7] = False
    record = dataclasses.replace(record, mask=ours)
    return bench.case(record, trainer_mask=np.ones(len(ours), np.bool_))


@fault("vocabulary padding counted", SEMANTICS, EVERY, "vocabulary padding", words="8 of them")
def _(bench: Bench) -> Case:
    head = bench.trainer.hf.lm_head
    plain = head.forward
    head.forward = lambda x: torch.nn.functional.pad(plain(x), (0, 8))
    record = bench.record()
    logits, targets, temperatures = bench.rows(record)
    return bench.case(record, policy_logprobs(logits, targets, temperatures, bench.vocab + 8).numpy())


@fault("log-softmax in bfloat16", SEMANTICS, EVERY, "precision", words="log-softmax ran in bfloat16")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(torch.log_softmax(tempered(x, T).bfloat16(), -1), t))


@fault("logits rounded to bfloat16", SEMANTICS, EVERY, "precision", words="logits were rounded")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: contract(bench, x.bfloat16().float(), t, T))


@fault("log of softmax", SEMANTICS, EVERY, "formula", words="log of softmax")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: gathered(torch.softmax(tempered(x, T), -1).log(), t))


@fault("the sign of a loss", SEMANTICS, EVERY, "sign")
def _(bench: Bench) -> Case:
    return computed(bench, lambda x, t, T: -contract(bench, x, t, T))


@fault("probabilities in place of log-probs", SEMANTICS, EVERY, "units")
def _(bench: Bench) -> Case:
    record = bench.record()
    return bench.case(record, np.exp(bench.score(record)))


@fault("another engine's raw log-probs, other kernels too", SEMANTICS, EVERY, "temperature", words="rollout.*raw.*nat")
def _(bench: Bench) -> Case:
    record = bench.record()
    logits, targets, _ = bench.rows(record)
    raw = contract(bench, logits, targets, 1.0).numpy()
    noise = np.random.default_rng(0).normal(0, 1e-3, len(raw)).astype(np.float32)
    return bench.case(dataclasses.replace(record, policy_logprobs=raw + noise, behavior_logprobs=None))


@fault("a record that neither side computes", Cause.UNKNOWN, "rollout", "not reproduced", words="when it was recorded")
def _(bench: Bench) -> Case:
    record = bench.record()
    noise = np.random.default_rng(0).normal(0, 1e-2, len(record.token_ids)).astype(np.float32)
    values = record.policy_logprobs + noise
    return bench.case(dataclasses.replace(record, policy_logprobs=values, behavior_logprobs=None))
