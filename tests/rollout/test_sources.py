"""A manifest is bound to the sources that log-probs go through."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rollout import manifest, sources
from rollout.manifest import build_manifest
from rollout.manifest_diff import diff_manifests, in_words
from tests.engines import shared_model


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return shutil.copytree(sources.PACKAGE, tmp_path / "rollout", ignore=shutil.ignore_patterns("__pycache__"))


def test_a_copy_has_the_same_digests(package: Path) -> None:
    assert sources.digests_under(package) == dict(sources.source_digests())


@pytest.mark.parametrize(
    ("edited", "key"),
    [
        ("model.py", "model"),
        ("logprobs.py", "logprobs"),
        ("sampling.py", "sampling"),
        ("kernels/npu/fa3.py", "kernels"),
        ("kernels/cpu/dot.py", "kernels"),
    ],
)
def test_one_byte_shows_under_its_name(package: Path, edited: str, key: str) -> None:
    file = package / edited
    file.write_bytes(file.read_bytes() + b"\n")
    changed = sources.digests_under(package)
    assert {k for k, v in sources.source_digests().items() if changed[k] != v} == {key}


def test_what_decides_no_bit_is_left_out(package: Path) -> None:
    for name in ("cli.py", "metrics.py", "server.py"):
        (package / name).write_text("")
    assert sources.digests_under(package) == dict(sources.source_digests())


def test_the_manifest_says_so_in_words(package: Path, tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model(tiny_qwen3_path, torch.float32)
    before = build_manifest(model)
    (package / "logprobs.py").write_text("# another formula\n")
    monkeypatch.setattr(manifest, "source_digests", lambda: sources.digests_under(package))
    differences = diff_manifests(before, build_manifest(model))
    assert [d.key for d in differences] == ["source.logprobs"]
    assert "this source file of zerodrift differs" in in_words(differences)
