"""The battery on tiny models: it holds where it should, and fails where an operation depends on its company."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.certify import attention, forward, linear, logprob, rows, sampler, served, threads, weights
from rollout.certify.battery import FAMILIES, certify, run_family
from rollout.certify.certificate import Certificate
from rollout.certify.subject import Family, Outcome, Subject, compare, count_unequal
from rollout.errors import ParityError
from rollout.kernels.base import Product
from rollout.kernels.cpu.kernel_set import CpuKernelSet
from rollout.kernels.cpu.store import CpuKVStore
from rollout.model import SharedModel
from tests.engines import fresh_model, torch_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def subject(tiny_llama_path: Path) -> Subject:
    """bfloat16, fused."""
    model = fresh_model(tiny_llama_path, torch.bfloat16)
    return Subject(model, model.kernels.decoder(model.hf, 512), "quick", (1, 2))


@pytest.fixture(scope="module")
def certificate(tiny_qwen3_path: Path) -> Certificate:
    """float32, all families."""
    with torch_threads(1):
        return certify(fresh_model(tiny_qwen3_path, torch.float32), thread_counts=(1, 2))


def test_all_families_hold(certificate: Certificate) -> None:
    assert certificate.holds, [f.failures for f in certificate.families]
    assert [f.name for f in certificate.families] == [f.name for f in FAMILIES]
    assert all(f.checks > 5 or f.name == "weights" for f in certificate.families)
    assert certificate.threads == (1, 2)
    assert certificate.plan["linear.row_padding"] == "16"
    # Every product that serving runs, stacked as it runs it; in float32 all are padded.
    assert {key.partition(" ")[0] for key in certificate.plan} >= {
        "linear.o_proj",
        "linear.down_proj",
        "linear.lm_head",
    }
    assert sum("q_proj" in key for key in certificate.plan) == 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_each_holds_in_bfloat16_and_sees_its_fault(family: Family, subject: Subject) -> None:
    result = run_family(family, subject)
    assert result.holds, result.failures
    assert result.control_caught


def spoiled(subject: Subject, **fields: Any) -> Subject:
    return dataclasses.replace(subject, **fields)


class ByBatch(CpuKernelSet):
    """Attention whose scale depends on how many sequences there are: the least batch dependence."""

    def attention_with_kvcache(self, q: torch.Tensor, *args: Any, softmax_scale: float, **options: Any) -> torch.Tensor:
        scale = softmax_scale * (1 + 2.0**-12 * (len(options["cache_seqlens"]) > 1))
        return super().attention_with_kvcache(q, *args, softmax_scale=scale, **options)


class Blocks(CpuKernelSet):
    """Training reduces keys in other blocks than the rollout."""

    def attention_varlen(self, *args: Any, **options: Any) -> torch.Tensor:
        return CpuKernelSet(2 * self.page_size).attention_varlen(*args, **options)


def with_kernels(path: Path, kernels: CpuKernelSet) -> Subject:
    model = fresh_model(path, torch.float32)
    model.kernels = kernels
    return Subject(model, None, "quick", (1,))


def test_attention_that_depends_on_the_batch_is_seen(tiny_qwen3_path: Path) -> None:
    result = run_family(attention.FAMILY, with_kernels(tiny_qwen3_path, ByBatch(16)))
    assert not result.holds and result.failures[0].startswith("decode at")


@pytest.mark.parametrize("wrong", [-1, 1])
def test_copied_rows_that_are_not_those_asked_for_are_seen(
    tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """A row left out is NaN; rows one place off are another token's."""

    def copy_rows(self: CpuKVStore, source: int, target: int, count: int) -> None:
        if wrong < 0:
            real(self, source, target, count - 1)
        else:
            self.keys[:, target, ..., :count] = self.keys[:, source, ..., :count].roll(1, -1)
            self.values[:, target, :, :count] = self.values[:, source, :, :count]

    real = CpuKVStore.copy_rows
    monkeypatch.setattr(CpuKVStore, "copy_rows", copy_rows)
    result = run_family(attention.FAMILY, with_kernels(tiny_qwen3_path, CpuKernelSet(16)))
    assert result.failures and all("behind copied rows" in failure for failure in result.failures)


def test_other_blocks_in_training_are_seen(tiny_qwen3_path: Path) -> None:
    subject = with_kernels(tiny_qwen3_path, Blocks(16))
    assert not run_family(attention.FAMILY, subject).holds
    result = run_family(forward.FAMILY, subject)
    assert any("then decode" in failure for failure in result.failures)


def test_an_unpadded_product_is_seen(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that rounds differently at few rows stands for a processor on which padding does not help."""
    plain = torch.nn.functional.linear

    def few_rows(x: torch.Tensor, *args: Any) -> torch.Tensor:
        out = plain(x, *args)
        return out * (1 + 2.0**-7) if x[..., 0].numel() == 3 else out

    monkeypatch.setattr(linear, "linear", few_rows)
    result = run_family(linear.FAMILY, subject)
    assert result.failures and all(", 3 rows" in failure for failure in result.failures)


def test_a_planned_product_that_is_not_its_modules_is_seen(subject: Subject) -> None:
    """What was measured at load is measured again: the products as the decoder runs them."""
    inner = subject.decoder
    assert inner is not None

    class Off:
        def products(self) -> list[Product]:
            return [
                dataclasses.replace(p, run=lambda x, run=p.run: run(x) * (1 + 2.0**-7 * (len(x) == 7)))
                for p in inner.products()
            ]

    result = run_family(linear.FAMILY, spoiled(subject, decoder=Off()))
    assert len(result.failures) == len(inner.products()) and all(", 7 rows" in f for f in result.failures)


@pytest.mark.parametrize("spoil", ["policy", "behavior", "company"])
def test_a_sampler_that_answers_other_logprobs_is_seen(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    """What serving runs, not only the function that training calls."""

    class Spoiled(served.TokenSampler):
        def run(self, logits: torch.Tensor, outputs: Any) -> Any:
            found = super().run(logits, outputs)
            if spoil == "company":
                # The least dependence on company: a row alone is one unit away.
                return [nudged(t, "policy") if len(found) == 1 else t for t in found]
            return [nudged(t, spoil) for t in found]

    def nudged(token: Any, which: str) -> Any:
        name = f"{which}_logprob"
        return dataclasses.replace(token, **{name: np.nextafter(getattr(token, name), np.float32(0))})

    monkeypatch.setattr(served, "TokenSampler", Spoiled)
    result = run_family(logprob.FAMILY, subject)
    assert result.failures and all(f.startswith("served") for f in result.failures)


def test_served_draws_that_are_not_the_definition_are_seen(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    late = dataclasses.replace

    class Late(served.TokenSampler):
        def run(self, logits: torch.Tensor, outputs: Any) -> Any:
            return super().run(logits, tuple(late(o, position=o.position + 1) for o in outputs))

    monkeypatch.setattr(served, "TokenSampler", Late)
    result = run_family(sampler.FAMILY, subject)
    assert [f for f in result.failures if f.startswith("served draws")]


def test_a_row_that_depends_on_its_company_is_seen(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = rows._operations()
    faulty = {"silu": lambda x: sound["silu"](x) * (1 + 2.0**-7 * (len(x) == 1))}
    monkeypatch.setattr(rows, "_operations", lambda: faulty)
    assert run_family(rows.FAMILY, subject).failures[0].startswith("silu of")


def test_threads_that_change_a_sum_are_seen(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = threads._run

    def by_count(s: Subject, count: int) -> dict[str, torch.Tensor]:
        return {name: t + count for name, t in sound(s, count).items()}

    monkeypatch.setattr(threads, "_run", by_count)
    assert any("2 threads" in f for f in run_family(threads.FAMILY, subject).failures)


def test_a_sampler_that_draws_otherwise_is_seen(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(sampler.CpuSampler):
        def draw(self, logprobs: Any, keep: Any, seed: int, position: int) -> int:
            return super().draw(logprobs, keep, seed, position + 1)

    monkeypatch.setattr(sampler, "CpuSampler", Late)
    assert not run_family(sampler.FAMILY, subject).holds


def test_a_second_log_softmax_is_seen(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(logits: torch.Tensor, temperatures: torch.Tensor, vocab: int) -> torch.Tensor:
        return torch.softmax(logits[:, :vocab].float() / temperatures[:, None], -1).log()

    monkeypatch.setattr(logprob, "policy_logprob_rows", other)
    assert not run_family(logprob.FAMILY, subject).holds


def test_weights_that_change_on_the_way_are_refused(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = weights._chunks

    def flipped(name: str, tensor: torch.Tensor) -> Iterator[Any]:
        for chunk in sound(name, tensor):
            yield dataclasses.replace(chunk, data=bytes([chunk.data[0] ^ 1]) + chunk.data[1:])

    monkeypatch.setattr(weights, "_chunks", flipped)
    result = run_family(weights.FAMILY, subject)
    assert not result.holds and "root digest" in result.failures[0]


def test_a_family_whose_fault_goes_unseen_does_not_hold(subject: Subject) -> None:
    sound = Outcome("equal", 3, 0)
    blind = Family("blind", "", lambda _: iter([sound]), lambda _: sound)
    result = run_family(blind, subject)
    assert not result.failures and not result.control_caught and not result.holds


def test_a_family_without_checks_does_not_hold(subject: Subject) -> None:
    empty = Family("empty", "", lambda _: iter(()), lambda _: Outcome("fault", 1, 1))
    assert not run_family(empty, subject).holds


def test_a_refusal_of_the_kernels_is_a_failure(subject: Subject) -> None:
    def refuse(_: Subject) -> Iterator[Outcome]:
        yield Outcome("first", 1, 0)
        raise ParityError("nothing here could be exact")

    result = run_family(Family("refused", "", refuse, lambda _: Outcome("fault", 1, 1)), subject)
    assert result.failures == ("nothing here could be exact",)


def test_comparison_is_of_bits() -> None:
    zeros = torch.tensor([0.0, 1.0, float("nan")])
    assert count_unequal(zeros, torch.tensor([-0.0, 1.0, float("nan")])) == 1
    assert compare("same", zeros, zeros.clone()).holds
    assert not compare("nothing", zeros[:0], zeros[:0]).holds


def test_lengths_come_from_the_kernel_set(subject: Subject) -> None:
    assert {15, 16, 17, 31, 32, 33} <= set(subject.lengths)
    model: SharedModel = subject.model
    assert max(spoiled(subject, level="full").lengths) == min(1100, model.spec.context_length)
