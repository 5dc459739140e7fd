"""numba for this package: strict arithmetic, no GIL, and a cache that knows all the sources a kernel is made of.

numba's own cache looks at the file of the decorated function only. Kernels here inline functions of other files, so a
changed formula could go on running from an old cache: two hosts with equal sources would then differ in bits. The cache
folder therefore carries a digest of every source of the package, which is also part of the parity manifest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numba.core.cgutils
import numba.extending


@functools.lru_cache(maxsize=1)
def source_digest() -> str:
    """Hex digest of every Python source beside this one, and of numba's version."""
    state = hashlib.blake2b(numba.__version__.encode(), digest_size=12)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


@functools.lru_cache(maxsize=1)
def cache_folder() -> Path:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR, ZERODRIFT_CACHE or ~/.cache; else the temporary folder."""
    chosen = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("ZERODRIFT_CACHE")
    home = Path(chosen) if chosen else Path.home() / ".cache" / "zerodrift"
    for base in (home, Path(tempfile.gettempdir()) / f"zerodrift-{os.getuid()}"):
        folder = base / "numba" / source_digest()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="zerodrift-numba-"))


@contextlib.contextmanager
def caching() -> Iterator[None]:
    """What is decorated inside is cached under ``cache_folder``; other users of numba keep their own setting."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_folder())
    try:
        yield
    finally:
        config.CACHE_DIR = before


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.njit`` without fast-math, with numpy's division, without the GIL, cached under ``cache_folder``."""
    with caching():
        kernel: Callable[..., Any] = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    return kernel


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.extending.intrinsic``, as what it is to its callers: a function of compiled code."""
    made: Callable[..., Any] = numba.extending.intrinsic(function)
    return made


cgutils: Any = numba.core.cgutils
"""numba's helpers for LLVM code"""
carray: Callable[..., Any] = vars(numba)["carray"]
"""An array at an address, inside compiled code."""
