"""The certificate's file, and strict serving."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollout import cli
from rollout.certify.certificate import (
    Certificate,
    FamilyResult,
    body_digest,
    default_path,
    read_certificate,
    require_certificate,
    write_certificate,
)
from rollout.cli_certify import register
from rollout.config import Settings
from rollout.errors import CertificateError
from rollout.manifest import build_manifest, manifest_digest
from rollout.worker import Worker, load_served_model
from tests.services import tiny_service, tiny_settings

MANIFEST = {"kernels.name": "cpu", "dtype.model": "float32"}
SOUND = FamilyResult("linear", "", 3, 9, (), "fault", True, 0.1)


def signed(**changes: object) -> Certificate:
    fields = {
        "manifest": MANIFEST,
        "manifest_digest": manifest_digest(MANIFEST),
        "level": "quick",
        "families": (SOUND,),
        "threads": (1, 2),
        "plan": {},
        "created": "2026-01-01T00:00:00+00:00",
    } | changes
    certificate = Certificate(**fields)  # type: ignore[arg-type]
    return dataclasses.replace(certificate, digest=body_digest(certificate))


def test_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.json"
    write_certificate(signed(), path)
    assert read_certificate(path) == signed()
    assert require_certificate(MANIFEST, path=path, threads=2) == signed()
    assert [p.name for p in path.parent.iterdir()] == ["c.json"]


@pytest.mark.parametrize(
    ("certificate", "threads", "said"),
    [
        (signed(manifest=MANIFEST | {"kernels.name": "npu"}), 1, "another manifest"),
        (
            signed(
                manifest=MANIFEST | {"kernels.name": "npu"},
                manifest_digest=manifest_digest(MANIFEST | {"kernels.name": "npu"}),
            ),
            1,
            "kernels.name: 'npu' | 'cpu'",
        ),
        (signed(families=(dataclasses.replace(SOUND, failures=("x",)),)), 1, "does not hold (linear)"),
        (signed(families=(dataclasses.replace(SOUND, control_caught=False),)), 1, "does not hold"),
        (signed(families=()), 1, "no family was run"),
        (signed(), 8, "engine.threads = 8"),
    ],
)
def test_what_does_not_match_is_refused(tmp_path: Path, certificate: Certificate, threads: int, said: str) -> None:
    path = tmp_path / "c.json"
    write_certificate(certificate, path)
    with pytest.raises(CertificateError) as caught:
        require_certificate(MANIFEST, path=path, threads=threads)
    assert said in caught.value.message and "zerodrift certify" in caught.value.message


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_certificate(signed(families=(dataclasses.replace(SOUND, failures=("x",)),)), path)
    value = json.loads(path.read_text())
    value["families"][0]["failures"] = []
    path.write_text(json.dumps(value))
    with pytest.raises(CertificateError, match="changed after it was written"):
        read_certificate(path)
    path.write_text("{}")
    with pytest.raises(CertificateError, match="not a certificate"):
        read_certificate(path)


def strict(path: Path, certificate: Path | None) -> Settings:
    return tiny_settings(path, strict=True, certificate=None if certificate is None else str(certificate))


async def test_a_strict_worker_serves_only_with_a_certificate(
    tiny_qwen3_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest's own: written where certify puts it, so that no path needs to be named."""
    monkeypatch.setenv("ZERODRIFT_CACHE", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "zerodrift"))
    settings = strict(tiny_qwen3_path, None)
    with pytest.raises(CertificateError, match="run `zerodrift certify`"):
        Worker(settings, str(tiny_qwen3_path), "w")
    manifest = build_manifest(load_served_model(settings, tiny_qwen3_path))
    held = signed(manifest=manifest, manifest_digest=manifest_digest(manifest))
    write_certificate(held, default_path(held.manifest_digest))
    worker = Worker(settings, str(tiny_qwen3_path), "w")
    await worker.shutdown()


async def test_a_strict_service_does_not_start_without(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="there is no certificate"):
        async with tiny_service(tiny_qwen3_path, strict=True, certificate=str(tmp_path / "none.json")):
            pass


def test_command_line(tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """certify, then strict serving with what it wrote; a manifest diff against another page size."""
    if not any(c.callback is not None and c.callback.__name__ == "certify" for c in cli.app.registered_commands):
        register(cli.app)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    common = [f"model.path={tiny_llama_path}", "model.dtype=float32", "model.context_length=80"]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    done = CliRunner().invoke(cli.app, ["certify", "--out", str(first), *common, "engine.page_size=16"])
    torch.set_num_threads(before)
    assert done.exit_code == 0 and "holds:" in done.output, done.output
    assert read_certificate(first).holds
    shown = CliRunner().invoke(cli.app, ["manifest", "show", "--json", str(second), *common, "engine.page_size=32"])
    assert shown.exit_code == 0 and "kernels.page_size = 32" in shown.output
    diff = CliRunner().invoke(cli.app, ["manifest", "diff", str(first), str(second)])
    assert diff.exit_code == 1 and "can change bits, first kernels." in diff.output.replace("\n", " ")
    same = CliRunner().invoke(cli.app, ["manifest", "diff", str(first), str(first)])
    assert same.exit_code == 0 and "equal" in same.output
