"""Engine and trainer through the NPU set: decode = Score = training forward, bit for bit, on an emulated device."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.kernels.npu.layout import differing_positions
from rollout.kernels.npu.package_ops import PackageOps
from rollout.kernels.npu.plans import ROW_BY_ROW
from rollout.kernels.npu.store import NpuKVStore
from rollout.model import SharedModel, load_model
from rollout.types import SampleRequest
from tests.engines import (
    Record,
    assert_three_ways_equal,
    build_engine,
    drain,
    random_prompt,
    run,
    sample,
    train_forward,
    training_sample,
    unequal,
)
from tests.rollout.kernels.npu.emulator.fa3 import EmulatedPackage
from tests.rollout.kernels.npu.emulator.host import LATER, TRAIN_INFER, EmulatedKernelSet, emulated
from tests.rollout.kernels.npu.emulator.package import emulated_ops
from trainer_bridge.forward import TrainingForward

EDGES = (1, 2, 17, 126, 127, 128, 129, 200, 254, 255, 256, 257, 384, 510, 511, 512, 513)
SETS = {
    "later": (LATER, "auto"),
    "train-infer": (TRAIN_INFER, "auto"),
    "row by row": (LATER, "row_by_row"),
}


@functools.cache
def loaded(path: Path, version: str, plan: str) -> SharedModel:
    return load_model(path, dtype=torch.bfloat16, kernels=emulated(version, plan))


@pytest.fixture(params=["qwen3", "llama"])
def path(request: pytest.FixtureRequest, tiny_qwen3_path: Path, tiny_llama_path: Path) -> Path:
    return tiny_qwen3_path if request.param == "qwen3" else tiny_llama_path


@pytest.fixture(params=list(SETS))
def model(request: pytest.FixtureRequest, path: Path) -> SharedModel:
    return loaded(path, *SETS[request.param])


@pytest.fixture
def qwen3(tiny_qwen3_path: Path) -> SharedModel:
    return loaded(tiny_qwen3_path, LATER, "auto")


def requests_of(lengths: tuple[int, ...], tokens: int = 3) -> list[SampleRequest]:
    return [sample(random_prompt(n, n), f"p{n}", n % 3, seed=n, max_tokens=tokens) for n in lengths]


def test_every_edge(model: SharedModel) -> None:
    kernels = model.kernels
    assert isinstance(kernels, EmulatedKernelSet)
    lengths = EDGES if kernels.plan is not ROW_BY_ROW else tuple(n for n in EDGES if n < 260)
    requests = requests_of(lengths)
    generated = run(build_engine(model, chunk=128, batch_tokens=256, kv_tokens=16384, shuffle=1), requests)
    other = build_engine(model, chunk=384, batch_tokens=700, kv_tokens=16384)
    assert assert_three_ways_equal(model, requests, generated, other) == 3 * len(lengths)


@pytest.mark.parametrize(("chunk", "batch_tokens"), [(128, 128), (100, 130), (37, 64), (600, 600)])
def test_chunks_aligned_or_not(qwen3: SharedModel, chunk: int, batch_tokens: int) -> None:
    """A budget may cut a chunk anywhere: the tile-aligned plan pads in front."""
    requests = requests_of((290, 300, 520, 600))
    wanted = run(build_engine(qwen3, chunk=640, batch_tokens=2000), requests)
    got = run(build_engine(qwen3, chunk=chunk, batch_tokens=batch_tokens), requests)
    assert {n: g.bits() for n, g in got.items()} == {n: g.bits() for n, g in wanted.items()}


def test_prefix_hits(model: SharedModel) -> None:
    prompt = random_prompt(300, 7)
    engine = build_engine(model, chunk=128, batch_tokens=256)
    first = run(engine, [sample(prompt, "a", max_tokens=3)])["a"]
    again = run(engine, [sample(prompt, "b", max_tokens=3), sample((*prompt[:256], 5, 6), "c", max_tokens=3)])
    assert again["b"].summary is not None and again["b"].summary.num_cached_tokens == 299
    assert again["b"].bits() == first.bits()
    alone = run(build_engine(model), [sample((*prompt[:256], 5, 6), "c", max_tokens=3)])["c"]
    assert again["c"].bits() == alone.bits()


def test_with_the_ascend_package(tiny_llama_path: Path) -> None:
    """Products and reductions by batch_invariant_ops, norms untiled."""
    kernels = EmulatedKernelSet(EmulatedPackage(LATER), "auto", PackageOps("2.0.0", emulated_ops()))
    model = load_model(tiny_llama_path, dtype=torch.bfloat16, kernels=kernels)
    requests = requests_of((1, 17, 128, 130, 200))
    generated = run(build_engine(model, chunk=128, batch_tokens=256), requests)
    assert_three_ways_equal(model, requests, generated, build_engine(model, chunk=256, batch_tokens=300))
    assert kernels.providers()["linear"] == "batch_invariant_ops"


FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "barred_token_ids": (3,
    9)},
)  # fmt: skip


def test_sampling_parameters(qwen3: SharedModel) -> None:
    """Log-probs of the device under every kind of filter; what was not filtered has the same two log-probs."""
    requests = [
        sample(random_prompt(20 + i, i), f"f{i}", max_tokens=6, **kind) for i, kind in enumerate((*FILTERS, {}))
    ]
    generated = run(build_engine(qwen3), requests)
    assert_three_ways_equal(qwen3, requests, generated, build_engine(qwen3))
    assert unequal(generated["f0"].behavior, generated["f0"].policy) == 0
    for i in (2, 3, 4):
        one = generated[f"f{i}"]
        assert all(b >= p for b, p in zip(one.behavior, one.policy, strict=True))
        assert any(b > p for b, p in zip(one.behavior, one.policy, strict=True))


def test_strangers_and_mixed_steps(qwen3: SharedModel) -> None:
    """Decode and prefill rows share steps, never a call of the kernel."""
    kernels = qwen3.kernels
    assert isinstance(kernels, EmulatedKernelSet)
    alone = run(build_engine(qwen3), [sample(random_prompt(200, 1), "s", max_tokens=12)])["s"]
    engine, record = build_engine(qwen3, chunk=64, batch_tokens=100), Record()
    engine.add(engine.effective_request(sample(random_prompt(200, 1), "s", max_tokens=12)))
    kernels.package.calls.clear()

    def join(taken: int) -> None:
        if taken in (4, 6, 9):
            request = sample(random_prompt(150, taken), f"x{taken}", max_tokens=4)
            engine.add(engine.effective_request(request))

    drain(engine, record, between=join)
    assert record.samples["s"].bits() == alone.bits()
    for call in kernels.package.calls:
        real = [min(q, k) for q, k in zip(call.q_lengths, call.k_lengths, strict=True)]
        assert call.arguments["num_splits"] == 1 and call.arguments["scheduler_metadata"] is None
        assert call.arguments["k"] is None and call.arguments["v"] is None and len(real) == len(call.k_lengths)


def test_lengths_are_prepared_once_a_step(qwen3: SharedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.kernels.npu import attention

    steps, made = 0, 0
    real = attention.paged_calls

    def counted(*args: object, **options: object) -> object:
        nonlocal made
        made += 1
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "paged_calls", counted)
    engine = build_engine(qwen3)
    engine.add(engine.effective_request(sample(random_prompt(40, 1), max_tokens=4)))

    def count(taken: int) -> None:
        nonlocal steps
        steps = taken

    drain(engine, between=count)
    assert qwen3.spec.num_layers == 2 and made == steps > 0


def test_siblings_copy_the_prompts_last_page(qwen3: SharedModel) -> None:
    """The prompt is computed once, of a page or of three, and every sample is as it is alone."""
    for length in (60, 300):
        prompt = random_prompt(length, 4)
        requests = [sample(prompt, f"s{i}", i, max_tokens=4) for i in range(3)]
        wanted = {r.sample_id: run(build_engine(qwen3), [r])[r.sample_id].bits() for r in requests}
        engine = build_engine(qwen3)
        engine.store.poison()
        said = run(engine, requests)
        assert {n: g.bits() for n, g in said.items()} == wanted
        assert engine.num_rows == length + 2 + 3 * 3
        assert engine.scheduler.tables.num_copied == 2 * ((length - 1) % 128)


def test_poison_before_every_step(qwen3: SharedModel) -> None:
    """NaN in every free page: what is read without having been written shows."""
    requests = [*requests_of((1, 100, 130, 260), tokens=5), sample(random_prompt(260, 260), "twin", 1, max_tokens=5)]
    wanted = {r.sample_id: run(build_engine(qwen3), [r])[r.sample_id].bits() for r in requests}
    engine, record = build_engine(qwen3, kv_tokens=1024, chunk=64, batch_tokens=80, running=2), Record()
    store = engine.store
    assert isinstance(store, NpuKVStore)
    for request in requests:
        engine.add(engine.effective_request(request))

    def poison(taken: int) -> None:
        held = {page for s in engine.scheduler.running for page in s.pages} | set(engine.pages.cached_pages)
        free = torch.tensor([p for p in range(engine.pages.num_pages) if p not in held], dtype=torch.int64)
        store.keys[:, free] = torch.nan
        store.values[:, free] = torch.nan

    drain(engine, record, between=poison)
    assert {n: g.bits() for n, g in record.samples.items()} == wanted


# ---- gradients --------------------------------------------------------------------------------------------------


def gradients(path: Path, version: str, plan: str, prompt: int) -> dict[str, torch.Tensor]:
    model = load_model(path, dtype=torch.bfloat16, kernels=emulated(version, plan), trainable=True)
    forward = TrainingForward(model)
    requests = requests_of((prompt,), tokens=4)
    generated = run(build_engine(model), requests)
    with forward.aligned():
        out = forward([training_sample(requests[0], generated[f"p{prompt}"])])
        assert unequal(out.logprobs.detach().numpy(), generated[f"p{prompt}"].policy) == 0
        (-out.logprobs.sum()).backward()
    return {name: p.grad for name, p in model.parameters() if p.grad is not None}


@pytest.mark.parametrize("plan", ["tile_aligned", "row_by_row"])
def test_training_has_gradients_whatever_the_plan(path: Path, plan: str) -> None:
    """Padding adds no gradient: against the train-infer line's unpadded call they agree to rounding."""
    wanted, got = gradients(path, TRAIN_INFER, "plain", 70), gradients(path, LATER, plan, 70)
    assert set(wanted) == set(got) and len(got) > 15
    for name, gradient in got.items():
        assert bool(gradient.isfinite().all()) and bool(gradient.any()), name
        error = (gradient.float() - wanted[name].float()).norm() / wanted[name].float().norm()
        assert error < 0.05, f"{name}: {error}"


# ---- negative controls ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight heads of 64 and flat attention: enough rounded outputs for one unit of a row sum to show in some."""
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        intermediate_size=64, vocab_size=64, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "wide-qwen3"
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_plain_on_the_later_line_differs_where_predicted(wide_path: Path) -> None:
    """Whole model in float16: only rows from the first predicted position on can differ, and some do."""
    model = load_model(wide_path, dtype=torch.float16, kernels=emulated(LATER, "plain"))
    requests = [sample(random_prompt(n, i), f"p{i}", max_tokens=75) for i, n in enumerate((182, 420))]
    generated = run(build_engine(model, chunk=128, batch_tokens=300), requests)
    trained = train_forward(model, [training_sample(r, generated[r.sample_id]) for r in requests])
    differing: list[int] = []
    for request, (logprobs, _) in zip(requests, trained, strict=True):
        mine = np.array(generated[request.sample_id].policy)
        rows = np.flatnonzero(mine.view(np.uint32) != logprobs.view(np.uint32))
        differing += (len(request.prompt_ids) - 1 + rows).tolist()
    assert differing and min(differing) >= min(differing_positions(512))


def test_without_the_fixed_shape_plan_decode_differs(tiny_qwen3_path: Path) -> None:
    from rollout.kernels.npu.invariant import InvariantMode

    kernels = emulated()
    kernels._mode = InvariantMode("CPU", {})
    model = load_model(tiny_qwen3_path, dtype=torch.bfloat16, kernels=kernels)
    requests = requests_of((60, 130), tokens=10)
    generated = run(build_engine(model), requests)
    trained = train_forward(model, [training_sample(r, generated[r.sample_id]) for r in requests])
    assert sum(unequal(generated[r.sample_id].policy, t[0]) for r, t in zip(requests, trained, strict=True)) > 0
