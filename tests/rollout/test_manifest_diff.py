"""Words for every key that a manifest can hold."""

from __future__ import annotations

from pathlib import Path

import torch

from rollout.manifest import build_manifest
from rollout.manifest_diff import can_change_bits, diff_manifests, in_words
from tests.engines import shared_model


def test_every_key_of_a_manifest_is_known(tiny_qwen3_path: Path) -> None:
    manifest = build_manifest(shared_model(tiny_qwen3_path, torch.float32))
    differences = diff_manifests(manifest, {})
    assert {d.key for d in differences} == set(manifest)
    assert all(d.words and not d.words.startswith("nobody") for d in differences)


def test_unknown_keys_can_change_bits() -> None:
    (unknown,) = diff_manifests({"gpu.mood": "1"}, {"gpu.mood": "2"})
    assert unknown.can_change_bits and "nobody has shown" in unknown.words


def test_order_and_words() -> None:
    left = {"device.name": "a", "kernels.page_size": "16", "x": "1"}
    differences = diff_manifests(left, {"device.name": "b", "kernels.page_size": "32", "x": "1"})
    assert [d.key for d in differences] == ["kernels.page_size", "device.name"]
    assert in_words(differences).startswith(
        "1 of 2 differing entries can change bits, first kernels.page_size: '16' | '32'"
    )
    assert in_words(differences[1:]) == "1 entries differ, none of which can change a bit"
    assert in_words(()) == "the manifests are equal"
    assert not can_change_bits("library.ray") and can_change_bits("library.torch")
