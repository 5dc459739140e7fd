"""Digests of the sources that log-probs go through: a manifest, and with it a certificate, is bound to them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parent
MODULES = ("attention", "device_sampler", "logprobs", "model", "sampling", "token_sampler", "vision")
"""Modules of this package whose arithmetic, or order of operations, decides a bit."""
KERNELS = "kernels"
"""The package of all kernel sets, as one digest."""


def digest_files(paths: list[Path], root: Path) -> str:
    """Hex digest of names and bytes, in order of the names relative to ``root``."""
    state = hashlib.blake2b(digest_size=12)
    for path in sorted(paths):
        state.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


def digests_under(package: Path) -> dict[str, str]:
    """Name -> hex digest of each of ``MODULES`` and of the kernels below ``package``."""
    found = {name: digest_files([package / f"{name}.py"], package) for name in MODULES}
    found[KERNELS] = digest_files(list((package / KERNELS).rglob("*.py")), package)
    return found


@functools.lru_cache(maxsize=1)
def source_digests() -> Mapping[str, str]:
    """Digests of this installation, read once: what is edited later is not what this process runs."""
    return digests_under(PACKAGE)
