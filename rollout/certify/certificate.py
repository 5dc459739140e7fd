"""The certificate: what was tried on this machine, bound to the manifest it was tried under."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollout.assets import cache_root
from rollout.errors import CertificateError
from rollout.manifest import manifest_digest
from rollout.manifest_diff import diff_manifests
from rollout.strict_json import strict_loads
from rollout.whole_files import write_whole

FORMAT = "zerodrift.certificate/1"
WAY_OUT = "run `zerodrift certify` on this machine with the same settings"


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """How one family ended."""

    name: str
    title: str
    checks: int
    """comparisons made"""
    compared: int
    """elements in them"""
    failures: tuple[str, ...]
    """what did not hold, first ones first"""
    control: str
    """the planted fault"""
    control_caught: bool
    """whether the fault was seen; a family that cannot fail proves nothing"""
    cpu_s: float
    """processor seconds"""

    @property
    def holds(self) -> bool:
        """Checks were made, all held, and the control failed as it must."""
        return self.checks > 0 and not self.failures and self.control_caught


@dataclass(frozen=True, slots=True)
class Certificate:
    """Result of ``zerodrift certify``."""

    manifest: Mapping[str, str]
    manifest_digest: str
    level: str
    families: tuple[FamilyResult, ...]
    threads: tuple[int, ...]
    """CPU thread counts tried"""
    plan: Mapping[str, str]
    """what the kernel set chose by measurement, such as from how many rows a product runs packed"""
    created: str
    """UTC, ISO 8601"""
    model: str = ""
    digest: str = field(default="")
    """BLAKE2b over everything above; an edited file shows"""

    @property
    def holds(self) -> bool:
        """Every family held."""
        return bool(self.families) and all(family.holds for family in self.families)

    def to_json(self) -> dict[str, Any]:
        """Ready for ``json.dumps``."""
        return {"format": FORMAT, "holds": self.holds, **_plain(asdict(self))}


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(value) if isinstance(value, Mapping) else value for key, value in fields.items()}


def body_digest(certificate: Certificate) -> str:
    """Hex digest of everything but the digest itself."""
    body = _plain(asdict(certificate)) | {"digest": ""}
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def default_path(digest: str) -> Path:
    """Where a certificate for this manifest is kept unless a path is given."""
    return cache_root() / "certificates" / f"{digest}.json"


def write_certificate(certificate: Certificate, path: Path) -> None:
    """Write whole or not at all; a device or a pipe, such as /dev/stdout, is written to as it is."""
    text = json.dumps(certificate.to_json(), indent=1) + "\n"
    write_whole(path, lambda file: file.write(text.encode()), parents=True)


def read_certificate(path: Path) -> Certificate:
    """Read and check a certificate's own integrity.

    Raises:
        CertificateError: no such file, not a certificate, or edited since it was written.
    """
    try:
        value = strict_loads(path.read_text(encoding="utf-8"))
        if value.pop("format") != FORMAT:
            raise ValueError("another format")
        value.pop("holds")
        families = tuple(FamilyResult(**{**f, "failures": tuple(f["failures"])}) for f in value.pop("families"))
        certificate = Certificate(**{**value, "families": families, "threads": tuple(value["threads"])})
    except FileNotFoundError:
        raise CertificateError(f"there is no certificate {path}; {WAY_OUT}", field="engine.certificate") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CertificateError(
            f"{path} is not a certificate ({type(error).__name__}: {error}); {WAY_OUT}", field="engine.certificate"
        ) from error
    if body_digest(certificate) != certificate.digest:
        raise CertificateError(f"{path} was changed after it was written; {WAY_OUT}", field="engine.certificate")
    return certificate


def _changed(certificate: Certificate, manifest: Mapping[str, str]) -> str:
    differences = diff_manifests(certificate.manifest, manifest)
    shown = "; ".join(f"{d} ({d.words})" for d in differences[:3])
    return f"certified | here: {shown}{' and more' if len(differences) > 3 else ''}"


def _nearest(manifest: Mapping[str, str], folder: Path) -> tuple[Path, Certificate] | None:
    """Of the certificates of this model in a folder, the one whose manifest differs least."""
    found: list[tuple[int, Path, Certificate]] = []
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(CertificateError):
            other = read_certificate(path)
            if other.manifest.get("model.config_digest") == manifest.get("model.config_digest"):
                found.append((len(diff_manifests(other.manifest, manifest)), path, other))
    return min(found, key=lambda item: item[:2])[1:] if found else None


def _absent(manifest: Mapping[str, str], where: Path) -> str:
    """There is none for this manifest; the nearest one of this model says what changed since."""
    nearest = _nearest(manifest, where.parent)
    if nearest is None:
        return f"there is no certificate {where}; {WAY_OUT}"
    path, certificate = nearest
    return (
        f"there is no certificate {where}; {path.name} of {certificate.created} no longer matches: "
        f"{_changed(certificate, manifest)}; {WAY_OUT}"
    )


def require_certificate(manifest: Mapping[str, str], *, path: Path | None, threads: int) -> Certificate:
    """The certificate that lets a worker with this manifest serve in strict mode.

    Args:
        path: file of the certificate; None: where ``zerodrift certify`` puts it.
        threads: CPU threads the engine will use.

    Raises:
        CertificateError: none, an edited one, one that does not hold, of another manifest or of other threads.
    """
    digest = manifest_digest(manifest)
    where = path or default_path(digest)
    if path is None and not where.exists():
        raise CertificateError(_absent(manifest, where), field="engine.certificate")
    certificate = read_certificate(where)
    if certificate.manifest_digest != digest or manifest_digest(certificate.manifest) != certificate.manifest_digest:
        raise CertificateError(
            f"certificate {where} was made for another manifest; {_changed(certificate, manifest)}; {WAY_OUT}",
            field="engine.certificate",
        )
    if not certificate.holds:
        failed = ", ".join(f.name for f in certificate.families if not f.holds) or "no family was run"
        raise CertificateError(
            f"certificate {where} does not hold ({failed}); nothing served here would be exact: see its failures, "
            f"then {WAY_OUT}",
            field="engine.certificate",
        )
    if threads not in certificate.threads:
        raise CertificateError(
            f"engine.threads = {threads}, certificate {where} tried {list(certificate.threads)}; {WAY_OUT}",
            field="engine.threads",
        )
    return certificate
