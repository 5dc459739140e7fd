"""Image prompts over gRPC: generated = scored = the trainer's forward, bit for bit; misfits get typed errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout.assets import tiny_model
from rollout.errors import InvalidRequest, RolloutError, UnsupportedFeature
from rollout.images import ImageInput
from rollout.types import GenerateRequest, ScoreSequence
from rollout.worker import load_served_model
from tests.images import IMAGE, VIDEO, prompt_of, random_image
from tests.services import assert_idle, bits, sampling, soon, tensors_of, tiny_service, tiny_settings
from trainer_bridge.forward import TrainingForward, TrainingSample

WIDE, TALL = random_image(1, 4, 6), random_image(2, 12, 8, torch.bfloat16)


def requests() -> list[GenerateRequest]:
    prompts = [(4, WIDE, 20), (WIDE, 2, TALL, 9), (TALL,), (30,)]
    return [
        GenerateRequest(
            f"r{i}",
            prompt_of(*parts, seed=i),
            sampling(seed=i, max_tokens=20),
            n=2,
            row_digests=True,
            images=tuple(p for p in parts if not isinstance(p, int)),
        )
        for i, parts in enumerate(prompts)
    ]


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
async def test_generate_score_and_training_forward_agree(kind: str, tmp_path: Path) -> None:
    path = tiny_model("qwen3_vl" if kind == "qwen3_vl" else "qwen2_5_vl", tmp_path / kind)
    asked = requests()
    async with tiny_service(path, replicas=2) as (_, client):
        results = await soon(client.generate_many(asked))
        samples = [(r, s) for r, result in zip(asked, results, strict=True) for s in result.samples]
        wanted = [(b.policy, b.digests) for result in results for b in bits(result)]
        sequences = [
            ScoreSequence((*r.prompt_ids, *s.token_ids.tolist()), len(r.prompt_ids), r.images) for r, s in samples
        ]
        scored = await soon(client.score(sequences, row_digests=True))
        crowd = await soon(client.generate_many(asked[::-1], concurrency=1))
        assert [bits(r) for r in crowd[::-1]] == [bits(r) for r in results]
        first = asked[0]
        direct = await soon(
            client.generate(first.prompt_ids, first.sampling, n=2, row_digests=True, images=first.images)
        )
        assert bits(direct) == bits(results[0])
        assert results[0].sampling.barred_token_ids == (IMAGE, VIDEO)
        await assert_idle(client)
    assert [
        (s.logprobs.tobytes(), s.row_digests.tobytes()) for s in scored.scores if s.row_digests is not None
    ] == wanted
    forward = TrainingForward(load_served_model(tiny_settings(path), path))
    batch = [TrainingSample(np.array(r.prompt_ids, np.int32), s.token_ids, 1.0, r.images) for r, s in samples]
    with torch.no_grad(), forward.aligned():
        out = forward(batch, digests=True)
        # Control: one value of one pixel.
        pixels = bytearray(WIDE.pixel_values)
        pixels[3] ^= 1
        changed = forward([replace(batch[0], images=(replace(WIDE, pixel_values=bytes(pixels)),))])
    digests = [d.tobytes() for d in out.split_digests() if d is not None]
    assert list(zip([x.numpy().tobytes() for x in out.split()], digests, strict=True)) == wanted
    assert changed.logprobs.numpy().tobytes() != wanted[0][0]


async def test_refusals_are_typed_and_harmless(tmp_path: Path, tiny_qwen3_path: Path) -> None:
    path = tiny_model("qwen3_vl", tmp_path / "model")
    good, other = requests()[:2]
    bad: list[tuple[GenerateRequest, type[RolloutError], str]] = [
        (replace(good, images=()), InvalidRequest, "0 images were sent"),
        (replace(good, images=(TALL,)), InvalidRequest, "placeholders"),
        (replace(good, images=(replace(WIDE, grid_thw=(2, 2, 6)),)), UnsupportedFeature, "videos"),
        (replace(good, prompt_ids=(4, VIDEO)), UnsupportedFeature, "videos"),
        (replace(good, images=(WIDE,) * 17), InvalidRequest, "server.max_images"),
    ]
    async with tiny_service(path) as (_, client):
        before = bits((await soon(client.generate_many([good])))[0])
        for request, error, match in bad:
            with pytest.raises(error, match=match):
                await soon(client.generate_many([request]))
        assert bits((await soon(client.generate_many([good])))[0]) == before
        with pytest.raises(InvalidRequest, match="0 images were sent"):
            await soon(client.score([ScoreSequence(other.prompt_ids)]))
        assert (await client.info()).limits["max_images"] == 16
        await assert_idle(client)
    async with tiny_service(tiny_qwen3_path) as (_, client):
        with pytest.raises(UnsupportedFeature, match="text model"):
            await soon(client.generate_many([good]))


async def test_an_update_reaches_the_tower(tmp_path: Path) -> None:
    """After UpdateWeights the service answers as one that was started with the new folder."""
    old, new = (tiny_model("qwen3_vl", tmp_path / f"seed-{seed}", seed=seed) for seed in (0, 1))
    asked = requests()[:2]
    async with tiny_service(new) as (_, client):
        wanted = [bits(r) for r in await soon(client.generate_many(asked))]
    async with tiny_service(old) as (_, client):
        before = [bits(r) for r in await soon(client.generate_many(asked))]
        await soon(client.update_weights(tensors_of(new), version=1))
        assert [bits(r) for r in await soon(client.generate_many(asked))] == wanted != before


async def test_a_large_image_fits_where_images_are_taken_and_nowhere_else(
    tmp_path: Path, tiny_qwen3_path: Path
) -> None:
    """17 MiB of pixels: read and judged by what they are, or refused unread by the name of the limit."""
    values = WIDE.shape[1]
    patches = 17 * 2**20 // (4 * values) // 4 * 4 + 4
    large = ImageInput(bytes(4 * patches * values), "float32", (patches, values), (1, 2, patches // 2))
    request = replace(requests()[0], images=(large,))
    async with tiny_service(tiny_model("qwen3_vl", tmp_path / "model")) as (_, client):
        with pytest.raises(InvalidRequest, match="placeholders"):
            await soon(client.generate_many([request]))
    async with tiny_service(tiny_qwen3_path) as (_, client):
        with pytest.raises(InvalidRequest, match=r"limit is 16777216 \(server\.max_request_bytes\)"):
            await soon(client.generate_many([request]))
