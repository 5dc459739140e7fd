"""The certificate's file, and strict serving."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from rollout import cli
from rollout.certify import battery
from rollout.certify.certificate import (
    Certificate,
    FamilyResult,
    body_digest,
    default_path,
    read_certificate,
    require_certificate,
    write_certificate,
)
from rollout.certify.subject import Family, Outcome, Subject
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


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    """``--out /dev/stdout`` must not put a file where the device was."""
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit((tmp_path / "pipe").read_text)
        write_certificate(signed(), tmp_path / "pipe")
        assert json.loads(read.result())["digest"] == signed().digest
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "deep" / "c.json")
    write_certificate(signed(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and read_certificate(tmp_path / "deep" / "c.json") == signed()


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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, so that certificates of this machine's user do not count; compiled kernels stay."""
    monkeypatch.setenv("ZERODRIFT_CACHE", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", os.environ.get("NUMBA_CACHE_DIR", str(Path.home() / ".cache" / "zerodrift")))
    return tmp_path


def held_for(manifest: dict[str, str]) -> Certificate:
    return signed(manifest=manifest, manifest_digest=manifest_digest(manifest))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("source.model", "this source file of zerodrift differs"),
        ("source.logprobs", "this source file"),
        ("source.kernels", "sources of the kernel sets"),
        ("kernels.op.source", "two builds"),
        ("device.isa", "other instructions"),
    ],
)
async def test_a_stale_or_foreign_certificate_is_refused_by_name(
    tiny_qwen3_path: Path, cache: Path, key: str, said: str
) -> None:
    """Made before a source was edited, or on another machine: refused, and the message says which it was."""
    settings = strict(tiny_qwen3_path, None)
    manifest = build_manifest(load_served_model(settings, tiny_qwen3_path))
    assert key in manifest
    other = held_for(manifest | {key: "before"})
    write_certificate(other, default_path(other.manifest_digest))
    with pytest.raises(CertificateError) as caught:
        Worker(settings, str(tiny_qwen3_path), "w")
    words = caught.value.message
    assert f"no longer matches: certified | here: {key}: 'before'" in words and said in words
    assert "run `zerodrift certify`" in words
    # Named outright it fares no better.
    with pytest.raises(CertificateError, match="made for another manifest"):
        Worker(strict(tiny_qwen3_path, default_path(other.manifest_digest)), str(tiny_qwen3_path), "w")


async def test_a_strict_service_does_not_start_without(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="there is no certificate"):
        async with tiny_service(tiny_qwen3_path, strict=True, certificate=str(tmp_path / "none.json")):
            pass


def test_command_line(tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """certify, then strict serving with what it wrote; a manifest diff against another page size."""
    app_with_certify()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    common = [f"model.path={tiny_llama_path}", "model.dtype=float32", "model.context_length=80"]
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    done = CliRunner().invoke(cli.app, ["certify", "--out", str(first), *common, "engine.page_size=16"])
    torch.set_num_threads(before)
    assert done.exit_code == 0 and "holds:" in done.output, done.output
    assert read_certificate(first).holds
    gate = ["certify", "--check", f"engine.certificate={first}", *common]
    passed = CliRunner().invoke(cli.app, [*gate, "engine.page_size=16"])
    assert passed.exit_code == 0 and "holds:" in passed.output, passed.output
    refused = CliRunner().invoke(cli.app, [*gate, "engine.page_size=32"])
    assert refused.exit_code == 1 and "kernels.page_size" in str(refused.exception)
    shown = CliRunner().invoke(cli.app, ["manifest", "show", "--json", str(second), *common, "engine.page_size=32"])
    assert shown.exit_code == 0 and "kernels.page_size = 32" in shown.output
    diff = CliRunner().invoke(cli.app, ["manifest", "diff", str(first), str(second)])
    assert diff.exit_code == 1 and "can change bits, first kernels." in diff.output.replace("\n", " ")
    same = CliRunner().invoke(cli.app, ["manifest", "diff", str(first), str(first)])
    assert same.exit_code == 0 and "equal" in same.output


def test_a_battery_that_fails_is_a_closed_gate(
    tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, the failure in words, and a file that strict serving refuses."""
    monkeypatch.setattr(battery, "FAMILIES", (Family("blind", "a check that fails", failing, seen),))
    out = tmp_path / "c.json"
    before = torch.get_num_threads()
    done = CliRunner().invoke(
        app_with_certify(), ["certify", "--out", str(out), f"model.path={tiny_llama_path}", "model.context_length=80"]
    )
    torch.set_num_threads(before)
    assert done.exit_code == 1 and "DOES NOT HOLD" in done.output and "1 of 2 unequal" in done.output
    certificate = read_certificate(out)
    with pytest.raises(CertificateError, match=r"does not hold \(blind\)"):
        require_certificate(certificate.manifest, path=out, threads=1)


def failing(_: Subject) -> Iterator[Outcome]:
    yield Outcome("a row", 2, 1)


def seen(_: Subject) -> Outcome:
    return Outcome("fault", 1, 1)


def app_with_certify() -> typer.Typer:
    if not any(c.callback is not None and c.callback.__name__ == "certify" for c in cli.app.registered_commands):
        register(cli.app)
    return cli.app
