"""How much freed memory the process keeps for itself.

glibc gives memory back to the system as soon as a little of it is free at the end of its heap. An update frees and asks
for its messages all the time, and what comes back from the system is zeroed page by page: on a virtual machine that
costs more than all copies of the bytes together.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_GLIBC_TRIM, _GLIBC_MMAP, _MOST_MMAP = 128 << 10, 128 << 10, 32 << 20
"""Bytes: glibc's first values, and the largest that it takes for the second."""


@contextmanager
def kept_memory(most_bytes: int) -> Iterator[None]:
    """Inside, up to ``most_bytes`` of freed memory stay with the process. Without glibc nothing changes, and the log
    says so: updates are slower then, and the same."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        log.warning("this C library has no mallopt: freed memory goes back to the system as it decides")
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, min(most_bytes, _MOST_MMAP))
    libc.mallopt(_TRIM_THRESHOLD, most_bytes)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, _GLIBC_MMAP)
        libc.mallopt(_TRIM_THRESHOLD, _GLIBC_TRIM)
        libc.malloc_trim(0)
