"""Strict serving with workers in Ray actors: refused by name without a certificate, served with one that holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rollout.certify import weights
from rollout.certify.battery import certify
from rollout.certify.certificate import body_digest, write_certificate
from rollout.errors import CertificateError
from rollout.manifest import manifest_digest
from rollout.serving import running_service
from rollout.worker import load_served_model
from tests.services import PROMPT, sampling, tiny_settings
from trainer_bridge.aio_client import AsyncRolloutClient

pytestmark = [pytest.mark.ray, pytest.mark.slow]


async def test_an_actor_serves_only_with_its_certificate(
    ray_cluster: Any, tiny_qwen3_path: Path, tmp_path: Path
) -> None:
    path = tmp_path / "c.json"
    settings = tiny_settings(tiny_qwen3_path, strict=True, certificate=str(path))
    with pytest.raises(CertificateError, match=r"there is no certificate .*; run `zerodrift certify`"):
        async with running_service(settings):
            pass
    model = load_served_model(settings, tiny_qwen3_path)
    held = certify(model, thread_counts=(settings.engine.threads,), families=(weights.FAMILY,))
    manifest = {**held.manifest, "source.model": "before an edit"}
    stale = dataclasses.replace(held, manifest=manifest, manifest_digest=manifest_digest(manifest))
    write_certificate(dataclasses.replace(stale, digest=body_digest(stale)), path)
    with pytest.raises(CertificateError, match=r"source\.model: 'before an edit' .*this source file"):
        async with running_service(settings):
            pass
    write_certificate(held, path)
    async with running_service(settings) as service, AsyncRolloutClient(service.address, timeout_s=60) as client:
        result = await client.generate(PROMPT, sampling(max_tokens=3))
    assert len(result.samples[0].token_ids) == 3
