"""Image prompts: decode = Score = training forward, bit for bit, on any schedule; near transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rollout.assets import TinyKind, tiny_model
from rollout.engine import Engine
from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.model import SharedModel
from rollout.multimodal import FeatureCache, pixels_of
from rollout.placement import Placement
from rollout.types import SampleRequest
from tests.engines import (
    Generated,
    assert_three_ways_equal,
    build_engine,
    drain,
    fresh_model,
    isolated,
    run,
    sample,
    shared_model,
    torch_threads,
    train_forward,
    training_sample,
    unequal,
)
from tests.images import IMAGE, VIDEO, image_sample, random_image
from trainer_bridge.aligned import install
from trainer_bridge.forward import TrainingForward, TrainingSample

KINDS: tuple[TinyKind, ...] = ("qwen2_5_vl", "qwen3_vl")
WIDE, TALL, DOT = random_image(1, 4, 6), random_image(2, 10, 4), random_image(3, 2, 2)


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, path: Path) -> SharedModel:
    return shared_model(path, getattr(torch, request.param))


@pytest.fixture
def exact(path: Path) -> SharedModel:
    """In float32, where the least disorder shows."""
    return shared_model(path, torch.float32)


def requests() -> list[SampleRequest]:
    """Images at the front, at page and chunk edges, several in one prompt, the same one twice, and text alone."""
    return [
        image_sample([WIDE, 3], "front", seed=1),
        image_sample([7, TALL, 21], "page edge", seed=2, temperature=0.7),
        image_sample([15, WIDE, 1, TALL, 2, DOT, 30], "three", 2, seed=3),
        image_sample([WIDE, 5, WIDE], "ends in an image", seed=4, top_k=9),
        image_sample([40], "text", seed=5),
        image_sample([2, random_image(9, 12, 8, torch.bfloat16), 4], "bfloat16", seed=6, temperature=0.0),
    ]


def bits(samples: dict[str, Generated]) -> dict[str, tuple[object, ...]]:
    return {name: one.bits() for name, one in samples.items()}


def test_decode_score_and_training_agree(model: SharedModel) -> None:
    asked = requests()
    alone = {r.sample_id: isolated(model, r) for r in asked}
    assert all(one.error is None for one in alone.values())
    engine = build_engine(model, chunk=64, batch_tokens=128, prefix_cache=False)
    assert assert_three_ways_equal(model, asked, alone, engine) == 12 * len(asked)
    # Control: a placeholder's own embedding, or another image, is not the same.
    request = asked[0]
    other = replace(request, images=(random_image(77, 4, 6),))
    assert isolated(model, other).bits() != alone[request.sample_id].bits()


def test_the_schedule_changes_no_bit(model: SharedModel) -> None:
    """Chunks that cut images, small budgets, shuffled pages, no cache, preemption, two threads, everyone together."""
    asked = requests()
    wanted = bits({r.sample_id: isolated(model, r) for r in asked})
    for options in (
        {"chunk": 3, "batch_tokens": 8},
        {"chunk": 64, "batch_tokens": 256, "shuffle": 3, "prefix_cache": False},
    ):
        assert bits(run(build_engine(model, **options), asked)) == wanted, options  # type: ignore[arg-type]
    engine = build_engine(model, chunk=7, batch_tokens=40, prefix_cache=False)

    def preempt(taken: int) -> None:
        if taken % 3 == 2 and taken < 40 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])

    for request in asked:
        engine.add(engine.effective_request(request))
    assert bits(drain(engine, between=preempt).samples) == wanted
    assert engine.scheduler.num_preemptions > 5
    with torch_threads(2):
        assert bits(run(build_engine(model), asked[::-1])) == wanted


def test_packing_changes_no_bit(exact: SharedModel) -> None:
    asked = requests()
    samples = [training_sample(r, isolated(exact, r)) for r in asked]
    together = train_forward(exact, samples)
    for size in (1, 2):
        for (a, da), (b, db) in zip(together, train_forward(exact, samples, micro_batch=size), strict=True):
            assert unequal(a, b) == 0 and np.array_equal(da, db)


def test_the_prefix_cache_knows_pixels(exact: SharedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ids, another image: no hit from the image's page on. Equal image: hits, and the same bits."""
    first, second = (replace(r, sample_id=n) for n, r in zip("ab", _twins(), strict=True))
    wanted = {r.sample_id: isolated(exact, r) for r in (first, second)}
    assert wanted["a"].bits() != wanted["b"].bits()

    def one_after_other(engine: Engine) -> list[Generated]:
        return [run(engine, [r])[r.sample_id] for r in (first, second, replace(first, sample_id="c"))]

    a, b, c = one_after_other(build_engine(exact))
    assert (a.bits(), b.bits(), c.bits()) == (wanted["a"].bits(), wanted["b"].bits(), wanted["a"].bits())
    cached = [one.summary.num_cached_tokens for one in (a, b, c) if one.summary is not None]
    whole = len(first.prompt_ids) - 1
    assert cached == [0, 21, whole], "20 tokens of text and the mark before an image, then pixels, in the second page"
    # Control: a cache that looks at ids alone serves the first image's pages to the second.
    monkeypatch.setattr(Placement, "marks", lambda *_: ())
    _, wrong, _ = one_after_other(build_engine(exact))
    assert wrong.summary is not None and wrong.summary.num_cached_tokens == whole
    assert wrong.bits() != wanted["b"].bits()


def _twins() -> tuple[SampleRequest, SampleRequest]:
    return tuple(image_sample([20, random_image(s, 8, 4), 30], seed=8) for s in (40, 41))  # type: ignore[return-value]


def test_siblings_share_features_and_pages(exact: SharedModel) -> None:
    asked = [image_sample([20, TALL, 30], f"s{i}", i, seed=8) for i in range(4)]
    engine = build_engine(exact, batch_tokens=256)
    together = run(engine, asked)
    assert bits(together) == bits({r.sample_id: isolated(exact, r) for r in asked})
    assert len({one.bits() for one in together.values()}) == 4
    assert engine._features is not None and engine._features.num_encoded == 1


@pytest.mark.parametrize("steps", [1, 2, 4, 9])
def test_abort_and_resume(exact: SharedModel, steps: int) -> None:
    """Within the images, right after them, and among sampled tokens."""
    request = image_sample([9, TALL, 12, WIDE, 2], max_tokens=12, seed=4)
    wanted = isolated(exact, request)
    engine = build_engine(exact, chunk=16)
    engine.add(engine.effective_request(request))
    part = drain(engine, steps=steps).samples.get("s", Generated())
    engine.abort("s", "test")
    assert engine.pages.num_free == engine.pages.num_pages
    left = replace(request.sampling, max_tokens=12 - len(part.token_ids))
    rest = replace(request, prompt_ids=(*request.prompt_ids, *part.token_ids), sampling=left)
    again = run(engine, [rest])["s"]
    assert part.token_ids + again.token_ids == wanted.token_ids
    assert unequal([*part.policy, *again.policy], wanted.policy) == 0


def test_new_weights_make_new_features(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update in place the engine is a fresh one; control: features kept from the old weights show."""
    request = image_sample([3, TALL, 4])

    def updated(engine: Engine) -> Generated:
        run(engine, [request])
        with torch.no_grad():
            for name, parameter in engine.model.parameters():
                if "visual" in name:
                    parameter.mul_(1.5)
        engine.weights_changed(1)
        return run(engine, [request])["s"]

    first = fresh_model(path, torch.float32)
    got = updated(build_engine(first))
    assert got.bits() == isolated(first, request).bits()
    monkeypatch.setattr(FeatureCache, "clear", lambda _: None)
    assert updated(build_engine(fresh_model(path, torch.float32))).bits() != got.bits()


def test_placeholders_are_barred_and_echoed(exact: SharedModel) -> None:
    """A sampled placeholder would stand for no pixels; the filter shows in the effective values."""
    engine = build_engine(exact)
    request = engine.effective_request(sample((5, 6), barred_token_ids=(7,)))
    assert request.sampling.barred_token_ids == (7, IMAGE, VIDEO)
    assert engine.effective_request(request) == request
    sampled = run(engine, [sample((5, 6), f"s{i}", i, max_tokens=60, temperature=3.0) for i in range(8)])
    seen = {t for one in sampled.values() for t in one.token_ids}
    assert len(seen) > 50 and not seen & {IMAGE, VIDEO}


# ---- a third reference ------------------------------------------------------------------------------------------


def plain_logprobs(path: Path, request: SampleRequest, ids: list[int], change: Callable[[dict[str, Any]], None]) -> Any:
    """transformers' own forward in float32: its SDPA, its positions, its scatter; nothing of ours."""
    hf = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokens = torch.tensor([[*request.prompt_ids, *ids]])
    inputs: dict[str, Any] = {
        "input_ids": tokens,
        "pixel_values": torch.cat([pixels_of(i).float() for i in request.images]),
        "image_grid_thw": torch.tensor([i.grid_thw for i in request.images]),
        "mm_token_type_ids": (tokens == IMAGE).to(torch.int32),
    }
    change(inputs)
    with torch.no_grad():
        logits = hf(**inputs).logits[0, len(request.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def test_near_transformers_own_forward(path: Path) -> None:
    model = shared_model(path, torch.float32)
    request = image_sample([5, WIDE, 2, TALL, 9], max_tokens=30)
    ours = isolated(model, request)
    wanted = plain_logprobs(path, request, ours.token_ids, lambda _: None)
    assert (torch.tensor(np.array(ours.policy)).double() - wanted).abs().max() < 1e-4

    def text_positions(inputs: dict[str, Any]) -> None:
        inputs["position_ids"] = torch.arange(inputs["input_ids"].size(1)).expand(3, 1, -1)

    def turned(inputs: dict[str, Any]) -> None:
        inputs["image_grid_thw"] = inputs["image_grid_thw"][:, [0, 2, 1]]

    for wrong in (text_positions, turned):
        far = plain_logprobs(path, request, ours.token_ids, wrong)
        assert (far - wanted).abs().max() > 1e-2, wrong.__name__


def test_gradients_reach_the_tower_and_the_text(path: Path) -> None:
    """The training forward with gradients has the rollout's bits, and every parameter that took part learns."""
    request = image_sample([3, WIDE, 4])
    ours = isolated(shared_model(path, torch.float32), request)
    trained = fresh_model(path, torch.float32, trainable=True)
    forward = TrainingForward(trained)
    with forward.aligned():
        out = forward([training_sample(request, ours)] * 2)
        assert unequal(out.split()[0].detach().numpy(), ours.policy) == 0
        out.logprobs.sum().backward()
    idle = [n for n, p in trained.parameters() if p.grad is None or not bool(p.grad.any())]
    assert not idle and all(bool(p.grad.isfinite().all()) for _, p in trained.parameters() if p.grad is not None)


def test_a_sample_without_its_images_is_refused(path: Path) -> None:
    request = image_sample([3, WIDE, 4])
    ids, one = np.array(request.prompt_ids, np.int32), np.array([5], np.int32)
    forward = TrainingForward(shared_model(path, torch.float32))
    with pytest.raises(InvalidRequest, match=r"1 runs of image placeholders .* and 0 images were sent"):
        forward([TrainingSample(ids, one)])
    with pytest.raises(UnsupportedFeature, match="videos are not supported"):
        forward([TrainingSample(np.array([4, VIDEO], np.int32), one)])


def test_aligning_in_place_is_refused(exact: SharedModel) -> None:
    """The bridge's other way to the rollout's bits knows text models only, and says so."""
    with pytest.raises(UnsupportedFeature, match="cannot be aligned in place"):
        install(exact.hf, exact.kernels, torch.float32)
