"""C4: digests over bytes, and the staging of an update: every tensor once, every parameter once, or nothing at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollout import weight_stage
from rollout.errors import ParityError, WeightUpdateError
from rollout.model import SharedModel
from rollout.types import TensorChunk, WeightState, WeightUpdate
from rollout.weight_stage import WeightStage
from rollout.weights import byte_view, digest_of, model_digest, root_digest, tensor_bytes, tensor_digest
from tests.engines import Generated, build_engine, fresh_model, run, sample, torch_threads
from tests.rollout.updates import chunks_of, digest_over

Tensors = dict[str, torch.Tensor]
NOW = WeightState(0, "")
HEAD = "lm_head.weight"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tiny_qwen3_path: Path, tiny_llama_path: Path) -> SharedModel:
    """Fresh, since tests here write into it. Qwen3 has tied embeddings, Llama has not."""
    return fresh_model(tiny_qwen3_path if request.param == "tied" else tiny_llama_path, torch.bfloat16)


@pytest.fixture
def tied(tiny_qwen3_path: Path) -> SharedModel:
    return fresh_model(tiny_qwen3_path, torch.bfloat16)


def scaled(model: SharedModel, factor: float) -> Tensors:
    return {n: (p.detach() * factor).clone() for n, p in model.parameters()}


def stage(
    model: SharedModel,
    tensors: Tensors,
    *,
    chunks: Iterator[TensorChunk] | None = None,
    digest: str | None = None,
    count: int | None = None,
) -> WeightStage:
    update = WeightUpdate(1, digest or digest_over(tensors), len(tensors) if count is None else count)
    staged = WeightStage(model, update, NOW)
    for chunk in chunks if chunks is not None else chunks_of(tensors, 1000):
        staged.add(chunk)
    return staged


def says(model: SharedModel) -> tuple[object, ...]:
    one: Generated = run(build_engine(model), [sample((2, 3, 4, 5))])["s"]
    return one.bits()


# ---- digests ----------------------------------------------------------------------------------------------------


def test_digest_covers_name_dtype_shape_and_bytes() -> None:
    plain = ("a.b", "float32", (2, 3), bytes(24))
    others = [
        ("a.c", *plain[1:]),
        ("a.b", "int32", *plain[2:]),
        (*plain[:2], (3, 2), plain[3]),
        (*plain[:2], (6,), plain[3]),
        (*plain[:3], bytes(23) + b"\1"),
    ]
    assert len({tensor_digest(*plain), *(tensor_digest(*o) for o in others)}) == 6
    # Fields cannot run into each other.
    assert tensor_digest("a", "b", (), b"c") != tensor_digest("ab", "", (), b"c")


def test_digest_of_a_tensor_sees_its_bits_only() -> None:
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    assert digest_of("x", x) == digest_of("x", x.t().contiguous().t()) == digest_of("x", torch.nn.Parameter(x.clone()))
    assert digest_of("x", torch.zeros(3)) != digest_of("x", -torch.zeros(3))
    assert bytes(tensor_bytes(torch.tensor([1.0]))) == b"\0\0\x80\x3f"


def test_root_digest() -> None:
    a, b = digest_of("a", torch.ones(2)), digest_of("b", torch.ones(2))
    assert root_digest({"a": a, "b": b}) == root_digest({"b": b, "a": a}) != root_digest({"a": a})
    tensors = {"a": torch.ones(2), "b": torch.ones(3).bfloat16()}
    assert root_digest({n: digest_of(n, t) for n, t in tensors.items()}) == digest_over(tensors)


def test_model_digest_is_the_senders(model: SharedModel) -> None:
    assert model_digest(model) == digest_over({n: p.detach() for n, p in model.parameters()})
    before = model_digest(model)
    with torch.no_grad():
        next(p for _, p in model.parameters()).view(torch.int16).view(-1)[0] ^= 1
    assert model_digest(model) != before


# ---- an update --------------------------------------------------------------------------------------------------


def test_an_update_reaches_the_forward(model: SharedModel) -> None:
    """F4: what counts is the forward, not the state dict. A, then B, then A again restores every bit."""
    tensors = {"A": scaled(model, 1.0), "B": scaled(model, 1.25)}
    spoken, states = [], []
    for version, name in enumerate("ABA", 1):
        staged = WeightStage(model, WeightUpdate(version, digest_over(tensors[name]), len(tensors[name])), NOW)
        for chunk in chunks_of(tensors[name]):
            staged.add(chunk)
        before = says(model)
        staged.verify()
        assert says(model) == before, "a staged update must not show before its commit"
        states.append(staged.commit())
        spoken.append(says(model))
    assert spoken[0] == spoken[2] != spoken[1]
    assert [s.version for s in states] == [1, 2, 3]
    assert [s.digest for s in states] == [digest_over(tensors[n]) for n in "ABA"]


def test_a_live_engine_follows(model: SharedModel) -> None:
    """The engine may hold packed copies of weights: it must take the new ones when told, on every path."""
    engine, tensors = build_engine(model), {"A": scaled(model, 1.0), "B": scaled(model, 1.25)}
    spoken = [run(engine, [sample((2, 3, 4, 5))])["s"].bits()]
    for version, name in enumerate("BA", 1):
        staged = WeightStage(model, WeightUpdate(version, digest_over(tensors[name]), len(tensors[name])), NOW)
        for chunk in chunks_of(tensors[name]):
            staged.add(chunk)
        staged.verify()
        staged.commit()
        engine.weights_changed(version)
        one = run(engine, [sample((2, 3, 4, 5))])["s"]
        assert one.bits() == says(model) and set(one.versions) == {version}
        spoken.append(one.bits())
    assert spoken[0] == spoken[2] != spoken[1]


def test_updated_equals_loaded(tied: SharedModel, tiny_qwen3_path: Path, tmp_path: Path) -> None:
    """Property 6: after an update the engine equals a fresh one that loaded the same weights from disk."""
    tensors = scaled(tied, 0.75)
    staged = stage(tied, tensors)
    staged.verify()
    staged.commit()
    tied.hf.save_pretrained(tmp_path)
    assert says(fresh_model(tmp_path, torch.bfloat16)) == says(tied)
    assert says(fresh_model(tiny_qwen3_path, torch.bfloat16)) != says(tied)


def test_chunks_may_come_in_any_order_and_size(model: SharedModel) -> None:
    tensors = scaled(model, 1.5)
    staged = stage(model, tensors, chunks=iter(list(chunks_of(tensors, 777))[::-1]))
    staged.verify()
    assert staged.commit().digest == digest_over(tensors)


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_write_that_is_lost_is_found(model: SharedModel, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """The commit reads back what it wrote: here one parameter's bytes go elsewhere."""
    staged = stage(model, scaled(model, 1.5))
    staged.verify()
    lost = list(dict(model.parameters()).values())[place]
    monkeypatch.setattr(weight_stage, "byte_view", lambda x: byte_view(x).copy() if x is lost else byte_view(x))
    with pytest.raises(ParityError, match="does not hold the committed bytes"):
        staged.commit()
    monkeypatch.undo()
    assert staged.commit().digest == model_digest(model), "control: written, it passes"


def test_a_tensor_that_is_not_laid_out_in_order_takes_its_bytes(tied: SharedModel) -> None:
    """As on a device: filled on the host, copied, and read back from where it lies."""
    tensors = scaled(tied, 1.5)
    name, parameter = next((n, p) for n, p in tied.parameters() if p.dim() == 2 and p.shape[0] != p.shape[1])
    parameter.data = parameter.data.t().contiguous().t()
    assert not parameter.is_contiguous()
    staged = stage(tied, tensors)
    staged.verify()
    assert staged.commit().digest == model_digest(tied) == digest_over(tensors)
    assert torch.equal(parameter, tensors[name])


def test_commit_needs_verification(model: SharedModel) -> None:
    with pytest.raises(WeightUpdateError, match="before verify"):
        stage(model, scaled(model, 1.5)).commit()


@pytest.mark.parametrize("version", [-1, 0, 6, 7])
def test_versions_must_grow(tied: SharedModel, version: int) -> None:
    with pytest.raises(WeightUpdateError, match="does not exceed version 7") as caught:
        WeightStage(tied, WeightUpdate(version, "", 1), WeightState(7, ""))
    assert caught.value.field == "begin.version"


# ---- refusals ---------------------------------------------------------------------------------------------------

NORM = "model.norm.weight"
Fault = Callable[[Tensors, list[TensorChunk]], tuple[list[TensorChunk], dict[str, object]]]


def without(name: str) -> Fault:
    return lambda tensors, chunks: ([c for c in chunks if c.name != name], {"count": len(tensors) - 1})


def changed(**fields: object) -> Fault:
    return lambda tensors, chunks: (
        [dataclasses.replace(c, **fields) if c.name == NORM else c for c in chunks],  # type: ignore[arg-type]
        {},
    )


def added(**fields: object) -> Fault:
    def fault(tensors: Tensors, chunks: list[TensorChunk]) -> tuple[list[TensorChunk], dict[str, object]]:
        norm = next(c for c in chunks if c.name == NORM)
        return [*chunks, dataclasses.replace(norm, **fields)], {}  # type: ignore[arg-type]

    return fault


FAULTS: list[tuple[str, Fault, str]] = [
    ("missing tensor", without(NORM), f"1 of .* parameters are missing, first '{NORM}'"),
    ("missing bytes", changed(data=bytes(100)), "100 of 128 bytes arrived"),
    ("missing first bytes", changed(offset=28, data=bytes(100)), "byte 0 arrived never"),
    ("doubled tensor", added(), "arrived twice"),
    ("doubled byte", added(offset=5, data=b"x"), "byte .* arrived twice"),
    ("outside", added(offset=128, data=b"x"), r"\[128, 129\) lie outside its 128 bytes"),
    ("negative offset", added(offset=-1, data=b"x"), "lie outside"),
    ("wrong dtype", changed(dtype="float16"), "arrived as float16"),
    ("wrong shape", changed(shape=(8, 8)), r"arrived as bfloat16 \[8, 8\], the model holds bfloat16 \[64\]"),
    ("unknown name", added(name="model.norm.wieght"), "no parameter 'model.norm.wieght'"),
    ("prefixed name beside the plain one", added(name="model.model.norm.weight"), f"{NORM} arrived twice: as '{NORM}'"),
    ("NaN", changed(data=b"\xc0\x7f" * 64), "holds NaN or infinity"),
    ("infinity", changed(data=b"\x80\x7f" * 64), "holds NaN or infinity"),
    ("other bytes", changed(data=bytes(128)), "differs from the sender's"),
    ("wrong count", lambda t, c: (c, {"count": len(t) + 1}), "tensors arrived"),
    ("wrong digest", lambda t, c: (c, {"digest": "00" * 32}), "differs from the sender's 0000"),
    ("nothing", lambda t, c: ([], {"count": 0}), "parameters are missing"),
]


@pytest.mark.parametrize(("fault", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_faulty_update_is_refused_whole(model: SharedModel, fault: Fault, message: str) -> None:
    tensors, before, digest = scaled(model, 1.25), says(model), model_digest(model)
    chunks, options = fault(tensors, list(chunks_of(tensors)))
    with pytest.raises(WeightUpdateError, match=message):
        stage(model, tensors, chunks=iter(chunks), **options).verify()  # type: ignore[arg-type]
    assert model_digest(model) == digest and says(model) == before


def test_the_same_update_without_the_fault_is_taken(model: SharedModel) -> None:
    tensors, before = scaled(model, 1.25), says(model)
    staged = stage(model, tensors)
    staged.verify()
    staged.commit()
    assert says(model) != before


def test_nothing_enters_after_verification(tied: SharedModel) -> None:
    tensors = scaled(tied, 1.25)
    staged = stage(tied, tensors)
    staged.verify()
    with pytest.raises(WeightUpdateError):
        staged.add(TensorChunk(NORM, "bfloat16", (64,), 0, bytes(128)))


# ---- heads (F6) -------------------------------------------------------------------------------------------------


def embedding(tensors: Tensors) -> torch.Tensor:
    return tensors["model.embed_tokens.weight"]


@pytest.mark.parametrize("head", ["left out", "the same", "different"])
def test_tied_head(tied: SharedModel, head: str) -> None:
    tensors = scaled(tied, 1.25)
    if head != "left out":
        tensors[HEAD] = embedding(tensors) * (1 if head == "the same" else 2)
    staged = stage(tied, tensors)
    if head == "different":
        with pytest.raises(WeightUpdateError, match=r"tied to .* but arrived with other bytes"):
            staged.verify()
        return
    staged.verify()
    staged.commit()
    shared = tied.hf.get_output_embeddings().weight
    assert shared.data_ptr() == tied.hf.get_input_embeddings().weight.data_ptr()
    assert torch.equal(shared, embedding(tensors))


def test_state_digest_names_the_canonical_set(tied: SharedModel) -> None:
    """A redundant head is checked and then left out: the digest served is that of ``SharedModel.parameters``."""
    tensors = scaled(tied, 1.25)
    staged = stage(tied, tensors | {HEAD: embedding(tensors)})
    staged.verify()
    assert staged.commit().digest == digest_over(tensors) == model_digest(tied)


def test_untied_head_must_come(tiny_llama_path: Path) -> None:
    model = fresh_model(tiny_llama_path, torch.bfloat16)
    tensors = scaled(model, 1.25)
    head = tensors.pop(HEAD)
    with pytest.raises(WeightUpdateError, match=f"missing, first '{HEAD}'"):
        stage(model, tensors).verify()
    staged = stage(model, tensors | {HEAD: head})
    staged.verify()
    staged.commit()
    assert torch.equal(model.hf.get_output_embeddings().weight, head)
    assert not torch.equal(model.hf.get_output_embeddings().weight, embedding(tensors))
