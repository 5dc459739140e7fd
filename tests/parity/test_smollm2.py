"""The same on the real SmolLM2-135M-Instruct: three paths, strangers, threads, and the float64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.detokenize import Detokenizer
from rollout.engine import Engine
from rollout.model import SharedModel
from rollout.types import FinishReason, SampleRequest
from tests.engines import (
    Generated,
    assert_three_ways_equal,
    build_engine,
    random_prompt,
    run,
    sample,
    shared_model,
    torch_threads,
    train_forward,
    training_sample,
    unequal,
    wipe,
)
from tests.oracle.dense import DenseOracle
from trainer_bridge.contrast import OrdinaryTrainer

pytestmark = pytest.mark.model

CHAT = "<|im_start|>user\nWhat is {} plus 3?<|im_end|>\n<|im_start|>assistant\n"
SIZES: dict[str, Any] = {"kv_tokens": 4096, "batch_tokens": 192, "chunk": 100}


@pytest.fixture(scope="module")
def bf16(smollm2_path: Path) -> SharedModel:
    return shared_model(smollm2_path, torch.bfloat16, 128)


@pytest.fixture(scope="module")
def engine(bf16: SharedModel, tokenizer: Detokenizer) -> Engine:
    """One for the module: starting it measures its linear layers, which takes a while."""
    return build_engine(bf16, tokenizer=tokenizer, shuffle=1, **SIZES)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Detokenizer:
    return Detokenizer(smollm2_path)


def mixed(tokenizer: Detokenizer) -> list[SampleRequest]:
    """Random prompts at page edges, and real ones whose distributions are sharp."""
    requests = [
        sample(random_prompt(n, n, 49152), f"p{n}", seed=n, max_tokens=3 + n % 2, temperature=(1.0, 0.7)[n % 2])
        for n in (1, 127, 128, 130, 257)
    ]
    kinds: tuple[dict[str, Any], ...] = ({}, {"top_k": 20, "top_p": 0.9}, {"temperature": 0.0})
    for i, kind in enumerate(kinds):
        requests.append(sample(tokenizer.encode(CHAT.format(i)), f"chat{i}", i, max_tokens=8, **kind))
    return requests


def test_three_ways(bf16: SharedModel, engine: Engine, tokenizer: Detokenizer) -> None:
    """Also: what each says alone (a sample of them), and the contrast of an ordinary trainer."""
    requests = mixed(tokenizer)
    with torch_threads(2):
        generated = run(engine, requests)
    with torch_threads(1):
        wipe(engine)
        assert_three_ways_equal(bf16, requests, generated, engine)
        for request in (requests[2], requests[-2]):
            wipe(engine)
            assert run(engine, [request])[request.sample_id].bits() == generated[request.sample_id].bits()
    chats = requests[-3:]
    samples = [training_sample(r, generated[r.sample_id]) for r in chats]
    ordinary = OrdinaryTrainer(bf16).logprobs(samples, micro_batch=3, threads=1)
    differing = sum(unequal(generated[r.sample_id].policy, o) for r, o in zip(chats, ordinary, strict=True))
    assert differing > sum(len(s.token_ids) for s in samples) // 2


def test_float32(smollm2_path: Path, tokenizer: Detokenizer) -> None:
    model = shared_model(smollm2_path, torch.float32, 128)
    requests = [
        sample(random_prompt(130, 1, 49152), "random", max_tokens=3),
        sample(tokenizer.encode(CHAT.format(5)), "chat", max_tokens=4, temperature=0.8),
        sample((5,), "one", max_tokens=3),
    ]
    one = build_engine(model, **SIZES)
    generated = run(one, requests)
    wipe(one)
    assert_three_ways_equal(model, requests, generated, one)
    samples = [training_sample(r, generated[r.sample_id]) for r in requests]
    outside = train_forward(model, samples, aligned=False, micro_batch=1)
    assert any(unequal(generated[r.sample_id].policy, o[0]) for r, o in zip(requests, outside, strict=True))


def test_an_answer_ends_by_itself(bf16: SharedModel, engine: Engine, tokenizer: Detokenizer) -> None:
    prompt = tokenizer.encode("<|im_start|>user\nSay OK.<|im_end|>\n<|im_start|>assistant\n")
    one = run(engine, [sample(prompt, temperature=0.0, ignore_eos=False, max_tokens=40)])["s"]
    assert one.summary is not None and one.summary.finish.reason is FinishReason.STOP
    assert one.summary.finish.stop_token_id == one.token_ids[-1] in bf16.spec.eos_token_ids
    assert one.summary.text is not None and one.summary.text.endswith("<|im_end|>")


def test_the_reference_agrees(bf16: SharedModel, smollm2_path: Path, tokenizer: Detokenizer) -> None:
    """Bound: 16 roundings a layer of 2^-8, 30 layers, adding like a random walk into logits of deviation about 2.5:
    0.21 root mean square; a base of 10,000 instead of 100,000 on both sides lies outside."""
    request = sample(tokenizer.encode(CHAT.format(4)) + random_prompt(70, 3, 49152), max_tokens=2)
    ids = request.prompt_ids
    trained = train_forward(bf16, [training_sample(sample(ids[:20]), Generated(token_ids=list(ids[20:])))])[0][
        0
    ].astype(np.float64)
    bound = 2.0**-8 * (16 * 30) ** 0.5 * 2.5
    oracle = DenseOracle(smollm2_path, torch.bfloat16)
    right = oracle.logprobs(ids, 20).numpy()
    oracle.theta /= 10
    wrong = oracle.logprobs(ids, 20).numpy()
    error = float(np.sqrt(((trained - right) ** 2).mean()))
    fault = float(np.sqrt(((trained - wrong) ** 2).mean()))
    assert error < bound < fault, (error, bound, fault)
