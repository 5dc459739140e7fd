"""The rollout's fused forward against the modules' own forward in invariant mode: pages, hidden states and logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.attention import PagedStep
from rollout.kernels.base import KVLayout
from rollout.kernels.registry import resolve_kernels
from rollout.model import SharedModel, load_model


def _store(model: SharedModel) -> object:
    spec = model.spec
    return model.kernels.allocate_kv(KVLayout(spec.num_layers, 4, 128, spec.num_kv_heads, spec.head_dim, spec.dtype))


@torch.no_grad()
def _compare(model: SharedModel, chunks: list[int]) -> None:
    """Feed one sequence in chunks through both, and compare everything after each."""
    decoder = model.kernels.decoder(model.hf, model.spec.context_length)
    assert decoder is not None
    plain, fast = _store(model), _store(model)
    ids = torch.randint(0, model.spec.vocab_size, (sum(chunks),), generator=torch.Generator().manual_seed(0))
    table, start = torch.tensor([[2, 0, 3]], dtype=torch.int32), 0
    with model.kernels.invariant_mode():
        for count in chunks:
            positions = torch.arange(start, start + count)
            slots = table[0, positions // 128].long() * 128 + positions % 128
            lengths = torch.tensor([start + count], dtype=torch.int32)
            edges = torch.tensor([0, count], dtype=torch.int32)
            step = PagedStep(model.kernels, plain, slots, table, lengths, edges)  # type: ignore[arg-type]
            rows = ids[start : start + count]
            wanted = model.hidden_states(rows, positions, step)
            got = decoder.hidden_states(rows, positions, slots, fast, table, lengths, edges)  # type: ignore[arg-type]
            assert torch.equal(got, wanted), f"hidden states differ after {start + count} tokens"
            assert torch.equal(decoder.logits(got), model.logits(wanted))
            start += count
    assert torch.equal(plain.keys, fast.keys)  # type: ignore[attr-defined]
    assert torch.equal(plain.values, fast.values)  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_tiny_models(kind: str, dtype: torch.dtype, tiny_qwen3_path: Path, tiny_llama_path: Path) -> None:
    path = tiny_qwen3_path if kind == "qwen3" else tiny_llama_path
    _compare(load_model(path, dtype=dtype, kernels=resolve_kernels()), [1, 1, 30, 100, 1, 1, 64, 1, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_qwen2_with_biases(tmp_path: Path, dtype: torch.dtype) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    _compare(load_model(tmp_path, dtype=dtype, kernels=resolve_kernels()), [1, 40, 1, 1, 100, 1])


@pytest.mark.model
def test_smollm2_decodes_a_hundred_tokens_one_by_one(smollm2_path: Path) -> None:
    """One row a step is where a packed product once differed, at the first token whose bits showed it."""
    _compare(load_model(smollm2_path, dtype=torch.bfloat16, kernels=resolve_kernels()), [30, *([1] * 100), 2, 3, 16])


@pytest.mark.parametrize(
    "wanted",
    [range(9), [0, 6, 8], [4, 5, 6], [], [8], [1, 2, 8], [5, 7]],
    ids=["all", "ends", "one whole", "none", "last", "not at an end", "inside"],
)
def test_only_the_rows_that_are_wanted(wanted: list[int], tiny_qwen3_path: Path) -> None:
    """Three sequences of 1, 6 and 2 rows on top of what they have; keys and values are written for every row."""
    model = load_model(tiny_qwen3_path, dtype=torch.bfloat16, kernels=resolve_kernels())
    decoder = model.kernels.decoder(model.hf, model.spec.context_length)
    assert decoder is not None
    generator = torch.Generator().manual_seed(1)
    table = torch.tensor([[2], [0], [3]], dtype=torch.int32)
    before, edges = torch.tensor([5, 0, 40]), torch.tensor([0, 1, 7, 9], dtype=torch.int32)
    positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, (1, 6, 2), strict=True)])
    slots = torch.repeat_interleave(table[:, 0].long(), torch.tensor([1, 6, 2])) * 128 + positions
    ids = torch.randint(0, model.spec.vocab_size, (9,), generator=generator)
    lengths = (before + torch.tensor([1, 6, 2])).int()
    results = []
    for rows in (None, torch.tensor(list(wanted), dtype=torch.int64)):
        store = _store(model)
        store.keys.normal_(generator=torch.Generator().manual_seed(2))  # type: ignore[attr-defined]
        store.values.normal_(generator=torch.Generator().manual_seed(3))  # type: ignore[attr-defined]
        with model.kernels.invariant_mode(), torch.no_grad():
            hidden = decoder.hidden_states(ids, positions, slots, store, table, lengths, edges, rows)  # type: ignore[arg-type]
        results.append((hidden, store.keys, store.values))  # type: ignore[attr-defined]
    (whole, *all_pages), (part, *pages) = results
    assert torch.equal(part, whole[list(wanted)]) and part.shape == (len(wanted), whole.size(1))
    assert all(torch.equal(a, b) for a, b in zip(all_pages, pages, strict=True))
    # Control: neighbouring rows are other bits.
    assert len(wanted) in (0, 9) or not torch.equal(part, whole[[(i + 1) % 9 for i in wanted]])


def test_a_weight_that_moves_by_one_unit_shows(tiny_llama_path: Path) -> None:
    """Negative control: the fused side with one stale weight differs."""
    model = load_model(tiny_llama_path, dtype=torch.bfloat16, kernels=resolve_kernels())
    decoder = model.kernels.decoder(model.hf, 256)
    assert decoder is not None
    with torch.no_grad():
        dict(model.parameters())["model.layers.1.mlp.up_proj.weight"].view(torch.int16).add_(1)
        hidden = torch.randn(4, 64).bfloat16()
        before = decoder.logits(hidden)
        store = _store(model)
        ids, positions = torch.arange(4), torch.arange(4)
        tables = (
            torch.tensor([[0]], dtype=torch.int32),
            torch.tensor([4], dtype=torch.int32),
            torch.tensor([0, 4], dtype=torch.int32),
        )
        with model.kernels.invariant_mode():
            stale = decoder.hidden_states(ids, positions, positions, store, *tables)  # type: ignore[arg-type]
            decoder.refresh()
            fresh = decoder.hidden_states(ids, positions, positions, store, *tables)  # type: ignore[arg-type]
    assert not torch.equal(stale, fresh)
    assert torch.equal(before, decoder.logits(hidden))
