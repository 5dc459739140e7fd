"""Strict serving takes the plan that ``zerodrift certify`` chose on this machine; the certificate keeps it."""

from __future__ import annotations

from pathlib import Path

from rollout.certify.certificate import default_path, read_certificate
from rollout.errors import CertificateError
from rollout.manifest import build_manifest, manifest_digest
from rollout.model import SharedModel

PLAN_KEY = "kernels.op.attention_plan"


def take_certified_plan(model: SharedModel, path: Path | None) -> None:
    """Where settings left the plan open, let the kernel set take the certified one; ``require_certificate`` judges.

    Without a certificate the set keeps the plan it came with, and strict serving is refused by name afterwards.

    Args:
        path: file of the certificate; None: where ``zerodrift certify`` puts it, for each plan in turn.
    """
    kernels = model.kernels
    open_plans = kernels.open_plans()
    if not open_plans:
        return
    if path is not None:
        certified = read_certificate(path).manifest.get(PLAN_KEY, "")
        if certified in open_plans:
            kernels.take_plan(certified)
        return
    before = build_manifest(model)[PLAN_KEY]
    for name in open_plans:
        kernels.take_plan(name)
        if _holds(default_path(manifest_digest(build_manifest(model)))):
            return
    kernels.take_plan(before)


def _holds(path: Path) -> bool:
    try:
        return path.exists() and read_certificate(path).holds
    except CertificateError:
        return False
