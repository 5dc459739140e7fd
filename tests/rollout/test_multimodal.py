"""The vision part: what is loaded and refused, features kept by image, processor output to records, the wire."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout import codec
from rollout.assets import tiny_model
from rollout.certify import rows, threads
from rollout.certify.battery import run_family
from rollout.certify.subject import Subject
from rollout.engine import Engine
from rollout.errors import InvalidRequest, RolloutError, UnsupportedFeature
from rollout.kernels.registry import resolve_kernels
from rollout.manifest import build_manifest
from rollout.model import SharedModel, load_model
from rollout.multimodal import FeatureCache, images_of, pixels_of, visual_rows
from rollout.placement import VisionRules, place
from rollout.scheduler import SchedulerLimits
from rollout.taps import Tracer, TraceRequest
from rollout.types import GenerateRequest, SamplingParams, ScoreRequest, ScoreSequence
from rollout.v1 import rollout_pb2 as pb
from tests.engines import torch_threads
from tests.images import IMAGE, PATCH_VALUES, VIDEO, prompt_of, random_image

WIDE, TALL = random_image(1, 4, 6), random_image(2, 8, 4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3_vl", tmp_path_factory.mktemp("models") / "qwen3_vl")


@pytest.fixture(scope="module")
def model(path: Path) -> SharedModel:
    return load_model(path, dtype=torch.float32, kernels=resolve_kernels("cpu"))


def edited(path: Path, out: Path, change: dict[str, Any], section: str | None = None) -> Path:
    """The folder with another config."""
    out.mkdir()
    for file in path.iterdir():
        (out / file.name).symlink_to(file)
    config = json.loads((path / "config.json").read_text())
    (config if section is None else config[section]).update(change)
    (out / "config.json").unlink()
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_resolution_is_kept_and_recorded(path: Path, model: SharedModel, tmp_path: Path) -> None:
    """Explicit > model > platform, once; the manifest reads the resolved name (C3)."""
    kernels = resolve_kernels("cpu")
    named = edited(path, tmp_path / "sdpa", {"zerodrift_attention": "sdpa"}, "vision_config")
    by_model = load_model(named, dtype=torch.float32, kernels=kernels)
    explicit = load_model(named, dtype=torch.float32, kernels=kernels, vision_attention="kernel_set")
    names = [m.vision.name for m in (model, by_model, explicit) if m.vision is not None]
    assert names == ["kernel_set", "sdpa", "kernel_set"]
    manifests = [build_manifest(m)["kernels.op.vision_attention"] for m in (model, by_model, explicit)]
    assert manifests == names
    with pytest.raises(UnsupportedFeature, match="'cpu' was resolved"):
        load_model(path, dtype=torch.float32, kernels=kernels, vision_attention="npu_fusion")


def test_other_inputs_are_refused_by_name(path: Path, tmp_path: Path) -> None:
    kernels = resolve_kernels("cpu")
    other = edited(path, tmp_path / "other", {"architectures": ["Qwen3VLMoeForConditionalGeneration"]})
    with pytest.raises(UnsupportedFeature, match=r"architecture Qwen3VLMoe.* not proven"):
        load_model(other, dtype=torch.float32, kernels=kernels)
    hearing = edited(path, tmp_path / "hearing", {"audio_config": {"d_model": 8}})
    with pytest.raises(UnsupportedFeature, match="audio_config"):
        load_model(hearing, dtype=torch.float32, kernels=kernels)
    window = edited(
        path, tmp_path / "rope", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "text_config"
    )
    with pytest.raises(RolloutError, match="dynamic"):
        load_model(window, dtype=torch.float32, kernels=kernels)


def test_a_replay_refuses_placeholders(model: SharedModel) -> None:
    """A trace carries no pixels: it must not take the placeholder's embedding for them."""
    tracer = Tracer(model)
    with pytest.raises(InvalidRequest, match="runs of image placeholders"):
        tracer.trace(TraceRequest(prompt_of(WIDE)))


def test_features_are_kept_by_image(model: SharedModel) -> None:
    assert model.vision is not None
    rules = model.vision.rules
    ids = prompt_of(2, WIDE, 3, TALL, 4)
    spans = place(ids, (WIDE, TALL), rules, "").spans
    with torch_threads(1), torch.no_grad(), model.kernels.invariant_mode():
        cache = FeatureCache(model.vision)
        first = cache.get(spans[0])
        assert cache.get(spans[0]) is first and cache.num_encoded == 1
        small = FeatureCache(model.vision, max_bytes=first.num_bytes)
        for span in (*spans, *spans):
            assert small.get(span).embeds.shape == (span.end - span.start, 64)
        assert small.num_encoded == 4, "room for one only"
        placement = place(ids, (WIDE, TALL), rules, "")
        whole = visual_rows([(placement, 0, len(ids))], cache.get)
        cut = [visual_rows([(placement, i, 1)], cache.get) for i in range(len(ids))]
    assert whole.features is not None and whole.rows.tolist() == [i for i, t in enumerate(ids) if t == IMAGE]
    assert torch.equal(torch.cat([c.rope_positions for c in cut], 1), whole.rope_positions)
    parts = [c.features for c in cut if c.features is not None]
    assert torch.equal(torch.cat([p.embeds for p in parts]), whole.features.embeds)
    assert torch.equal(torch.cat([p.deepstack[0] for p in parts]), whole.features.deepstack[0])
    assert all((c.features is None) == (ids[i] != IMAGE) for i, c in enumerate(cut))


def test_processor_output() -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((56, PATCH_VALUES)).astype(np.float32))
    grid = torch.tensor([[1, 4, 6], [1, 8, 4]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = images_of(values.to(dtype), grid)
        assert (a.grid_thw, b.grid_thw) == ((1, 4, 6), (1, 8, 4))
        assert torch.equal(torch.cat((pixels_of(a), pixels_of(b))), values.to(dtype))
    for bad in ((values[1:], grid), (values[None], grid), (values, grid[0]), (values.double(), grid)):
        with pytest.raises(InvalidRequest):
            images_of(*bad)


def test_a_real_processors_output_fits() -> None:
    """transformers' own image processor, its placeholders counted as its chat template does."""
    pytest.importorskip("PIL")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=4096, merge_size=2)
    pictures = [np.random.default_rng(i).integers(0, 255, (40 + 8 * i, 24, 3), dtype=np.uint8) for i in range(2)]
    out = processor(images=pictures, return_tensors="pt")
    images = images_of(out["pixel_values"], out["image_grid_thw"])
    rules = VisionRules(IMAGE, (IMAGE, VIDEO), VIDEO, 2, PATCH_VALUES)
    spans = place(prompt_of(3, images[0], 4, images[1], 5), images, rules, "prompt_ids").spans
    assert [s.end - s.start for s in spans] == [int(g.prod()) // 4 for g in out["image_grid_thw"]]


def test_an_engine_of_a_text_model_refuses_images(tiny_qwen3_path: Path) -> None:
    text = load_model(tiny_qwen3_path, dtype=torch.float32, kernels=resolve_kernels("cpu"))
    engine = Engine(text, SchedulerLimits(64, 4, 4, 16, 128), kv_cache_tokens=1024)
    with pytest.raises(UnsupportedFeature, match="text model"):
        engine.add_score("s", ScoreSequence((1, 2), 1, (WIDE,)), temperature=1.0, want_digests=False)


# ---- the wire ---------------------------------------------------------------------------------------------------


def test_requests_survive_the_wire() -> None:
    images = (WIDE, random_image(3, 2, 2, torch.bfloat16), random_image(4, 2, 4, torch.float16))
    request = GenerateRequest("r", prompt_of(*images), SamplingParams(seed=1), images=images)
    message = pb.GenerateRequest.FromString(codec.generate_request_to_proto(request).SerializeToString())
    assert codec.generate_request_from_proto(message, encode=lambda _: ()).images == images
    assert pickle.loads(pickle.dumps(request)) == request, "as Ray ships it"
    asked = ScoreRequest("s", (ScoreSequence((1, 2)), ScoreSequence(prompt_of(*images), 1, images)))
    scored = pb.ScoreRequest.FromString(codec.score_request_to_proto(asked).SerializeToString())
    assert codec.score_request_from_proto(scored) == asked


def wire(**changes: Any) -> pb.GenerateRequest:
    """One image, parts of it replaced."""
    tensor = {"dtype": pb.DTYPE_FLOAT32, "shape": WIDE.shape, "data": WIDE.pixel_values}
    grid = changes.pop("grid_thw", WIDE.grid_thw)
    image = pb.Image(pixel_values=pb.Tensor(**(tensor | changes)), grid_thw=grid)
    return pb.GenerateRequest(tokens=pb.TokenIds(ids=[1]), images=[image])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": 0}, "images[0].pixel_values.dtype"),
        ({"dtype": 99}, "images[0].pixel_values.dtype"),
        ({"dtype": pb.DTYPE_INT64}, "images[0].pixel_values"),
        ({"dtype": pb.DTYPE_BFLOAT16}, "images[0].pixel_values"),
        ({"shape": [24]}, "images[0]"),
        ({"shape": []}, "images[0]"),
        ({"shape": [-24, -96]}, "images[0].pixel_values"),
        ({"shape": [2**62, 2**62]}, "images[0].pixel_values"),
        ({"shape": [0, 96], "data": b""}, "images[0].pixel_values"),
        ({"data": WIDE.pixel_values[:-1]}, "images[0].pixel_values"),
        ({"data": WIDE.pixel_values[:-4] + b"\xff" * 4}, "images[0].pixel_values"),
        ({"grid_thw": [1, 24]}, "images[0]"),
        ({"grid_thw": [1, 4, 7]}, "images[0].grid_thw"),
        ({"grid_thw": [1, -4, -6]}, "images[0].grid_thw"),
        ({"grid_thw": [0, 0, 0]}, "images[0].grid_thw"),
    ],
)
def test_a_bad_image_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.generate_request_from_proto(wire(**changes), encode=lambda _: ())
    assert caught.value.field == field
    assert codec.generate_request_from_proto(wire(), encode=lambda _: ()).images == (WIDE,)


def test_a_client_refuses_before_it_sends() -> None:
    request = GenerateRequest("r", (1,), SamplingParams(), images=(replace(WIDE, grid_thw=(1, 2, 2)),))
    with pytest.raises(InvalidRequest, match="product is the number of patches"):
        codec.generate_request_to_proto(request)


def test_a_video_field_is_unknown() -> None:
    """There is none: what a client of another server sends is refused, never ignored."""
    message = wire()
    message.MergeFromString(b"\x7a\x00")  # field 15, empty bytes
    with pytest.raises(InvalidRequest, match="field with number 15"):
        codec.refuse_unknown_fields(message)


def test_the_certificate_covers_the_tower(model: SharedModel) -> None:
    """Its norms, its GELU, and the features of an image under every thread count."""
    subject = Subject(model, None, "quick", (1, 2))
    with torch_threads(1):
        results = {f.name: run_family(f, subject) for f in (rows.FAMILY, threads.FAMILY)}
        assert all(r.holds for r in results.values()), [r.failures for r in results.values()]
        names = [o.name for f in (rows.FAMILY, threads.FAMILY) for o in f.checks(subject)]
    assert any("gelu by tanh" in n for n in names) and any("LayerNorm" in n for n in names)
    assert [n for n in names if "features of an image" in n] == [
        "features of an image, again with 1 thread", "features of an image, 2 threads"
    ]  # fmt: skip
