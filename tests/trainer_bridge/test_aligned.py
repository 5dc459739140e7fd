"""Hugging Face models, aligned: the rollout's bits in packed and padded calls, with autocast, checkpointing, FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import trainer_bridge
from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.logprobs import policy_logprobs
from tests.engines import Generated, build_engine, fresh_model, random_prompt, run, sample, unequal
from trainer_bridge.aligned import aligned_logprobs
from trainer_bridge.aligned_attention import INTERFACE_NAME, sequence_bounds

PAGE, TEMPERATURE = 16, 0.7
LENGTHS = ((1, 12), (5, 12), (17, 12), (30, 9))
"""prompt and generated tokens, across page edges"""
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
Row = tuple[tuple[int, ...], Generated]


@pytest.fixture(scope="module")
def rollouts(tiny_llama_path: Path, tiny_qwen3_path: Path) -> dict[tuple[str, torch.dtype], list[Row]]:
    """What the engine sampled, by model and dtype."""
    found = {}
    for name, path in (("llama", tiny_llama_path), ("qwen3", tiny_qwen3_path)):
        for dtype in (torch.bfloat16, torch.float32):
            engine = build_engine(fresh_model(path, dtype, page_size=PAGE))
            requests = [
                sample(random_prompt(p, i), f"s{i}", temperature=TEMPERATURE, max_tokens=n, seed=i)
                for i, (p, n) in enumerate(LENGTHS)
            ]
            done = run(engine, requests)
            found[name, dtype] = [(r.prompt_ids, done[r.sample_id]) for r in requests]
    return found


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """As a trainer loads it: transformers' own attention."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", **options)
    return model.train()


def packed(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """verl's remove-padding call: everything in one row, positions restart."""
    ids = [torch.tensor([*prompt, *g.token_ids]) for prompt, g in rows]
    return {"input_ids": torch.cat(ids)[None], "position_ids": torch.cat([torch.arange(len(i)) for i in ids])[None]}


def padded(rows: Sequence[Row], side: str) -> dict[str, torch.Tensor]:
    ids = [torch.tensor([*prompt, *g.token_ids]) for prompt, g in rows]
    width = max(map(len, ids)) + 3
    out = {
        name: torch.zeros(len(ids), width, dtype=torch.int64)
        for name in ("input_ids", "attention_mask", "position_ids")
    }
    for b, row in enumerate(ids):
        here = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        out["input_ids"][b] = 63
        out["input_ids"][b, here], out["attention_mask"][b, here] = row, 1
        out["position_ids"][b, here] = torch.arange(len(row))
    return out


def scores(logits: torch.Tensor, rows: Sequence[Row], flat: Sequence[int]) -> list[np.ndarray]:
    """Log-probs of the generated tokens; ``flat``: index of each sequence's first token among the rows of logits."""
    results = []
    for (prompt, g), start in zip(rows, flat, strict=True):
        first = start + len(prompt) - 1
        piece = logits[first : first + len(g.token_ids)]
        t = torch.full((len(g.token_ids),), TEMPERATURE)
        results.append(aligned_logprobs(piece, torch.tensor(g.token_ids), t, 64).detach().numpy())
    return results


def differing(found: Sequence[np.ndarray], rows: Sequence[Row]) -> int:
    return sum(unequal(a, g.policy) for a, (_, g) in zip(found, rows, strict=True))


def call_packed(model: Any, rows: Sequence[Row]) -> list[np.ndarray]:
    logits = model(**packed(rows), use_cache=False).logits[0]
    sizes = [len(p) + len(g.token_ids) for p, g in rows]
    return scores(logits, rows, np.cumsum([0, *sizes[:-1]]).tolist())


def call_padded(model: Any, rows: Sequence[Row], side: str) -> list[np.ndarray]:
    batch = padded(rows, side)
    logits = model(**batch, use_cache=False).logits
    starts = batch["attention_mask"].argmax(dim=1) + torch.arange(len(rows)) * logits.size(1)
    return scores(logits.reshape(-1, logits.size(-1)), rows, starts.tolist())


@DTYPES
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_call_gives_the_rollouts_bits(
    name: str, dtype: torch.dtype, rollouts: Any, tiny_llama_path: Path, tiny_qwen3_path: Path
) -> None:
    rows = rollouts[name, dtype]
    model = load(tiny_llama_path if name == "llama" else tiny_qwen3_path, dtype)
    with trainer_bridge.align(model, page_size=PAGE) as manifest:
        assert manifest["kernels.page_size"] == str(PAGE)
        assert differing(call_packed(model, rows), rows) == 0
        assert differing(call_packed(model, rows[::-1]), rows[::-1]) == 0
        assert differing(call_padded(model, rows, "right"), rows) == 0
        assert differing(call_padded(model, rows, "left"), rows) == 0
        for row in rows:
            assert differing(call_packed(model, [row]), [row]) == 0


@DTYPES
def test_not_aligned_it_differs_and_afterwards_it_is_as_before(
    dtype: torch.dtype, rollouts: Any, tiny_llama_path: Path
) -> None:
    rows = rollouts["llama", dtype]
    model = load(tiny_llama_path, dtype)
    before = [call_packed(model, [row])[0] for row in rows]
    assert differing(before, rows) > 0
    with trainer_bridge.align(model, page_size=PAGE):
        pass
    after = [call_packed(model, [row])[0] for row in rows]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))
    assert model.config._attn_implementation == "sdpa" and "forward" not in model.__dict__


def gradients(model: Any, rows: Sequence[Row]) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model(**packed(rows), use_cache=False).logits[0]
    ids = packed(rows)["input_ids"][0]
    t = torch.full((len(ids) - 1,), TEMPERATURE)
    aligned_logprobs(logits[:-1], ids[1:], t, 64).sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_float32_masters_are_cast_once_under_autocast_with_checkpointing(rollouts: Any, tiny_qwen3_path: Path) -> None:
    rows = rollouts["qwen3", torch.bfloat16]
    model = load(tiny_qwen3_path)
    with trainer_bridge.align(model, page_size=PAGE, dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        assert differing(call_packed(model, rows), rows) == 0
        plain = gradients(model, rows)
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, rows), strict=True)), "not repeatable"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert differing(call_packed(model, rows), rows) == 0
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, rows), strict=True))
    assert all(
        p.dtype == torch.float32 and g.dtype == torch.float32 for p, g in zip(model.parameters(), plain, strict=True)
    )
    assert set(dict(model.named_parameters())) == set(dict(load(tiny_qwen3_path).named_parameters()))


def test_autocast_alone_is_not_the_rollouts_cast(rollouts: Any, tiny_llama_path: Path) -> None:
    """Control of the test above: float32 masters under autocast, everything aligned but the cast."""
    rows = rollouts["llama", torch.bfloat16]
    model = load(tiny_llama_path)
    with trainer_bridge.align(model, page_size=PAGE, dtype=torch.float32):
        assert differing(call_packed(model, rows), rows) > 0


def test_the_gradient_is_that_of_the_ordinary_model(rollouts: Any, tiny_llama_path: Path) -> None:
    rows = rollouts["llama", torch.float32]
    model = load(tiny_llama_path)
    model.set_attn_implementation("eager")
    ordinary = [torch.zeros_like(p) for p in model.parameters()]
    for row in rows:
        ordinary = [a + b for a, b in zip(ordinary, gradients(model, [row]), strict=True)]
    with trainer_bridge.align(model, page_size=PAGE):
        aligned = [torch.zeros_like(p) for p in model.parameters()]
        for row in rows:
            aligned = [a + b for a, b in zip(aligned, gradients(model, [row]), strict=True)]
    for ours, theirs in zip(aligned, ordinary, strict=True):
        # Another order of float32 sums; no contract says equal.
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@contextlib.contextmanager
def one_process_group(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_fsdp2_with_mixed_precision(rollouts: Any, tiny_qwen3_path: Path, tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rows = rollouts["qwen3", torch.bfloat16]
    model = load(tiny_qwen3_path)
    with one_process_group(tmp_path):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        with (
            trainer_bridge.align(model, page_size=PAGE, dtype=torch.bfloat16),
            torch.autocast("cpu", dtype=torch.bfloat16),
        ):
            assert differing(call_packed(model, rows), rows) == 0
            assert all(g.to_local().dtype == torch.float32 for g in gradients(model, rows))
        assert differing(call_packed(model, rows), rows) > 0


def test_pieces_of_the_head_change_no_bit() -> None:
    logits = torch.randn(1100, 64, generator=torch.Generator().manual_seed(0))
    ids, t = torch.arange(1100) % 64, torch.full((1100,), 0.7)
    whole = policy_logprobs(logits, ids, t, 64)
    assert torch.equal(aligned_logprobs(logits, ids, t, 64), whole)
    assert torch.equal(aligned_logprobs(logits.requires_grad_(), ids, t, 64), whole)


def test_h5_an_all_ones_mask_hides_no_border() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    for mask in (None, torch.ones(1, 5, dtype=torch.int64)):
        rows, bounds = sequence_bounds((1, 5), positions, mask, torch.device("cpu"))
        assert rows is None and bounds.tolist() == [0, 3, 5]
    rows, bounds = sequence_bounds((2, 3), None, torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.device("cpu"))
    assert rows is not None and rows.tolist() == [0, 1, 3, 4, 5] and bounds.tolist() == [0, 2, 5]


def test_i6_positions_that_count_pads_are_refused() -> None:
    mask = torch.tensor([[0, 0, 1, 1]])
    with pytest.raises(UnsupportedFeature, match="starts at position 2"):
        sequence_bounds((1, 4), None, mask, torch.device("cpu"))
    _, bounds = sequence_bounds((1, 4), torch.tensor([[0, 0, 0, 1]]), mask, torch.device("cpu"))
    assert bounds.tolist() == [0, 2]
    with pytest.raises(InvalidRequest, match="no real token"):
        sequence_bounds((1, 4), None, torch.zeros(1, 4), torch.device("cpu"))


@pytest.mark.parametrize(
    "mask", [[[1, 1, 2, 2]], [[0.0, 0.0, float("-inf"), 0.0]], [[1.0, 0.5, 1.0, 1.0]], [[float("nan"), 1.0, 1.0, 1.0]]]
)
def test_h5_a_mask_is_1_and_0(mask: list[list[float]]) -> None:
    """Numbers of packed sequences were clamped to 1, so that the second one saw the first."""
    with pytest.raises(UnsupportedFeature, match="the attention mask holds"):
        sequence_bounds((1, 4), None, torch.tensor(mask), torch.device("cpu"))
    for dtype in (torch.bool, torch.int32, torch.float32):
        rows, bounds = sequence_bounds((1, 4), None, torch.ones(1, 4, dtype=dtype), torch.device("cpu"))
        assert rows is None and bounds.tolist() == [0, 4]


def test_what_cannot_be_exact_is_refused(tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path)
    model.config.attention_dropout = 0.1
    with pytest.raises(UnsupportedFeature, match=r"attention_dropout = 0\.1"), trainer_bridge.align(model):
        pass
    stray = load(tiny_llama_path)
    with trainer_bridge.align(load(tiny_llama_path), page_size=PAGE):
        stray.config._attn_implementation = INTERFACE_NAME
        with pytest.raises(InvalidRequest, match="without alignment"):
            stray(input_ids=torch.tensor([[1, 2]]), use_cache=False)
