"""Parameters that still lie in their checkpoint file, mapped into memory.

transformers maps safetensors, so a parameter that needs no cast is the file's own pages. Once a kernel set has packed
it, or a digest was taken, nothing reads it for long: its pages need not stay resident, the file has them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable

import numpy as np
import torch

log = logging.getLogger(__name__)
_ENTRY = 8
"""Bytes a page in /proc/self/pagemap (Linux, Documentation/admin-guide/mm/pagemap.rst)."""
_PRESENT, _SWAPPED, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)


def let_go(tensors: Iterable[torch.Tensor]) -> int:
    """Give back the resident pages of tensors that lie in a mapped file; the next read takes them from the file again.

    Bytes never change: a range is left as it is when one of its pages was written since it was mapped, or is memory of
    no file. Nothing may write to the tensors meanwhile.

    Returns:
        Bytes given back. 0 where the system has no /proc/self/pagemap.
    """
    freed = 0
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            for tensor in tensors:
                if tensor.device.type == "cpu" and tensor.is_contiguous():
                    freed += _let_go(libc, pagemap.fileno(), tensor.data_ptr(), tensor.nbytes)
    except OSError as error:
        log.debug("pages of checkpoint files stay resident: %s", error)
    return freed


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole pages inside a contiguous tensor on the host that are in memory now.

    Raises:
        OSError: the system has no /proc/self/pagemap.
    """
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        first, last = _whole_pages(tensor.data_ptr(), tensor.nbytes)
        entries = _entries(pagemap.fileno(), first, last)
    return int(np.count_nonzero(entries & _PRESENT)) * mmap.PAGESIZE


def _whole_pages(address: int, size: int) -> tuple[int, int]:
    """Numbers of the first page inside and of the first one after."""
    return -(-address // mmap.PAGESIZE), (address + size) // mmap.PAGESIZE


def _entries(pagemap: int, first: int, last: int) -> np.ndarray:
    wanted = max(last - first, 0) * _ENTRY
    data = os.pread(pagemap, wanted, first * _ENTRY) if wanted else b""
    if len(data) != wanted:
        raise OSError(f"/proc/self/pagemap gave {len(data)} of {wanted} bytes")
    return np.frombuffer(data, np.uint64)


def _let_go(libc: ctypes.CDLL, pagemap: int, address: int, size: int) -> int:
    first, last = _whole_pages(address, size)
    entries = _entries(pagemap, first, last)
    present = (entries & _PRESENT) != 0
    # A written page of a private mapping is anonymous memory: dropping it would bring the file's bytes back.
    if (entries & _SWAPPED).any() or (present & ((entries & _OF_FILE) == 0)).any() or not present.any():
        return 0
    start, length = first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), f"madvise of {length} bytes")
    return int(np.count_nonzero(present)) * mmap.PAGESIZE
