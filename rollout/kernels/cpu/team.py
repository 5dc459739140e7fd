"""Compiled kernels on torch's own threads.

A second pool of threads would wait for cores on which torch's OpenMP threads still spin, and they for it. So kernels
here are entered through ``GOMP_parallel`` of the very OpenMP library that torch loaded: handing work to a second thread
then takes about two microseconds. Jobs are taken from a shared counter; which thread computes a job cannot change its
bits. Where torch came with another runtime, a small pool of Python threads enters the same code.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types

from rollout.kernels.cpu.compiler import caching, intrinsic
from rollout.kernels.cpu.parallel import python_threads
from rollout.openmp import loaded_library

log = logging.getLogger(__name__)
NEXT_JOB, JOBS, GRAIN, FIRST = 0, 1, 2, 3
"""Words of a call block: jobs handed out so far, jobs there are, jobs handed out at once; arguments from FIRST on."""
LONG = 2_000_000
"""Rough number of elementary operations from which other Python threads may run meanwhile."""


@intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer that ``carray`` takes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _fetch_add(typing: Any, words: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", data, args[1], "monotonic")

    return types.int64(words, types.int64), generate


@numba.njit(error_model="numpy")
def take_jobs(block: np.ndarray) -> Any:
    """[first, last) of the next share of jobs; empty when none is left."""
    first = _fetch_add(block, block[GRAIN])
    return first, min(first + block[GRAIN], block[JOBS])


def entry(function: Callable[..., Any]) -> Any:
    """Compile ``function(address of a call block)`` to a C function that needs no GIL; keep what is returned."""
    with caching():
        return numba.cfunc("void(voidptr)", cache=True, error_model="numpy")(function)


@functools.lru_cache(maxsize=2)
def _gomp(library: type[ctypes.CDLL]) -> Callable[..., None] | None:
    """``GOMP_parallel`` of the library that torch runs on; None, and a line in the log, where there is none."""
    path = loaded_library()
    call: Any = None if path is None else getattr(library(str(path)), "GOMP_parallel", None)
    if call is None:
        log.warning("torch's OpenMP library has no GOMP_parallel (%s): kernels run on Python threads, slower", path)
        return None
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return call  # type: ignore[no-any-return]


def _on_python_threads(address: int, block: int, threads: int) -> None:
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    others = [python_threads().submit(function, block) for _ in range(threads - 1)]
    function(block)
    for other in others:
        other.result()


class Call:
    """A reusable call of one kernel: packs arguments, then runs all jobs on torch's number of threads.

    Not for two threads at once.
    """

    def __init__(self, compiled: Any, fields: str) -> None:
        """compiled: from ``entry``. fields: ``struct`` codes of the arguments, q (integer or address) or d (float)."""
        self._compiled = compiled
        self._address: int = compiled.address
        self._pack = struct.Struct("=qqq" + fields).pack_into
        self._block = np.zeros(3 + len(fields), np.int64)
        self._at = self._block.ctypes.data
        self._view = memoryview(self._block)  # type: ignore[arg-type]
        self._short, self._long = _gomp(ctypes.PyDLL), _gomp(ctypes.CDLL)

    def __call__(self, jobs: int, cost: int, worth: int, *arguments: float) -> None:
        """Run ``jobs`` jobs of ``cost`` elementary operations in all; every ``worth`` of them justify a thread."""
        threads = max(1, min(torch.get_num_threads(), jobs, cost // worth))
        grain = jobs if threads == 1 else max(1, jobs // (8 * threads))
        self._pack(self._view, 0, 0, jobs, grain, *arguments)
        run = self._long if cost > LONG else self._short
        if run is None:
            _on_python_threads(self._address, self._at, threads)
        else:
            run(self._address, self._at, threads, 0)
