"""Pages of a mapped checkpoint are given back, and never a byte with them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout import file_pages
from rollout.assets import tiny_model
from rollout.file_pages import let_go, resident_bytes
from rollout.weights import digest_of, parameter_digests
from tests.engines import build_engine, fresh_model

pytestmark = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs Linux's /proc/self/pagemap")


@pytest.fixture
def mapped(tmp_path: Path) -> torch.Tensor:
    """100,000 float32 that lie in a file, private to this process, as transformers maps them."""
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.arange(100_000, dtype=torch.float32)}, file)
    return load_file(file)["x"]


def test_a_read_tensor_gives_its_pages_back_and_keeps_its_bytes(mapped: torch.Tensor) -> None:
    assert mapped.sum() > 0 and resident_bytes(mapped) > 0, "control: reading brings pages in"
    assert let_go([mapped]) >= 4 * 100_000 - 2 * mmap.PAGESIZE
    assert resident_bytes(mapped) == 0
    assert torch.equal(mapped, torch.arange(100_000, dtype=torch.float32)) and resident_bytes(mapped) > 0


@pytest.mark.parametrize("element", [1_100, 50_000, 98_000])
def test_a_written_tensor_stays_as_it_is(mapped: torch.Tensor, element: int) -> None:
    mapped[element] = -1.0
    wanted = mapped.clone()
    assert let_go([mapped]) == 0
    assert torch.equal(mapped, wanted)


@pytest.mark.parametrize("element", [0, 99_999])
def test_a_page_that_is_not_the_tensors_alone_stays(mapped: torch.Tensor, element: int) -> None:
    mapped[element] = -1.0
    wanted = mapped.clone()
    let_go([mapped[1:-1]])
    assert torch.equal(mapped, wanted)


def test_memory_of_no_file_stays(mapped: torch.Tensor) -> None:
    own = torch.full((100_000,), 3.0)
    assert let_go([own, mapped.t().expand(2, -1)]) == 0, "neither malloc's nor what is not contiguous"
    assert bool((own == 3.0).all())


def test_the_pages_at_its_ends_belong_to_others_too(mapped: torch.Tensor) -> None:
    """A tensor smaller than a page has no page of its own."""
    small = mapped[10:20]
    assert small.sum() > 0 and let_go([small]) == 0 and resident_bytes(small) == 0


def test_without_pagemap_nothing_happens(mapped: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise PermissionError("no /proc/self/pagemap")

    monkeypatch.setattr(file_pages, "open", refuse, raising=False)
    assert let_go([mapped]) == 0


def test_an_engine_does_not_hold_its_weights_twice(tmp_path: Path) -> None:
    """Packed weights and digests leave the file's pages out of memory; the parameters are the file's bytes still."""
    path = tiny_model("qwen3", tmp_path / "m", "bfloat16", hidden_size=256, intermediate_size=1024)
    model = fresh_model(path, torch.bfloat16)
    name, weight = next((n, p) for n, p in model.parameters() if n.endswith("down_proj.weight"))
    engine = build_engine(model)
    assert engine._decoder is not None
    if any("padded" in product.plan for product in engine._decoder.products()):
        pytest.skip("this processor multiplies the parameters themselves")
    assert resident_bytes(weight) == 0
    assert weight.float().abs().sum() > 0 and resident_bytes(weight) > 0, "control: whole pages, brought in by a read"
    digests = parameter_digests(model)
    assert resident_bytes(weight) == 0
    assert digests[name] == digest_of(name, load_file(path / "model.safetensors")[name])


def test_written_weights_are_digested_as_written(tmp_path: Path) -> None:
    model = fresh_model(tiny_model("qwen3", tmp_path / "m"), torch.bfloat16)
    before = parameter_digests(model)
    with torch.no_grad():
        for _, parameter in model.parameters():
            parameter.mul_(2)
    after = parameter_digests(model)
    assert all(before[n] != after[n] for n in before) and parameter_digests(model) == after
