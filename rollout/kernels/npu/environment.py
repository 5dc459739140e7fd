"""Determinism environment of the Ascend stack: one table, applied before the first communicator, checked on both sides.

Sources: hiascend envref (HCCL), verl's precision alignment guide (CLOSE_MATMUL_K_SHIFT, ATB), vllm-ascend's
batch-invariant mode (LCCL, NZ). None of it was run on a device here.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from rollout.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of the stack."""

    name: str
    value: str | None
    """what it must be; None: any value, recorded only"""
    why: str
    changes_bits: bool = True


TABLE: tuple[Variable, ...] = (
    Variable("HCCL_DETERMINISTIC", "strict", "collectives add in rank order; read when a communicator is made"),
    Variable("LCCL_DETERMINISTIC", "1", "the same for the small-message collectives"),
    Variable("ATB_LLM_LCOC_ENABLE", "0", "no overlap of products and collectives, whose order varies"),
    Variable("CLOSE_MATMUL_K_SHIFT", "1", "products start at the same K on every core"),
    Variable("ATB_MATMUL_SHUFFLE_K_ENABLE", "0", "the same inside ATB operators"),
    Variable("VLLM_ASCEND_ENABLE_NZ", "0", "weights stay in ND layout: NZ takes other kernels"),
    Variable("TASK_QUEUE_ENABLE", None, "order of launches on the host"),
    Variable("INF_NAN_MODE_ENABLE", None, "overflow gives inf or saturates; strict collectives need inf"),
    Variable("ASCEND_RT_VISIBLE_DEVICES", None, "which devices this process sees", changes_bits=False),
    Variable("PYTORCH_NPU_ALLOC_CONF", None, "allocator", changes_bits=False),
    Variable("ASCEND_LAUNCH_BLOCKING", None, "synchronous launches, for debugging", changes_bits=False),
)


def required() -> dict[str, str]:
    """Name -> value that every process of both sides must have, for a runtime environment or a shell."""
    return {v.name: v.value for v in TABLE if v.value is not None}


def recorded(environ: Mapping[str, str]) -> dict[str, str]:
    """Every variable of the table as it is, empty where unset: for the manifest."""
    return {v.name: environ.get(v.name, "") for v in TABLE}


def wrong(environ: Mapping[str, str]) -> list[tuple[Variable, str | None]]:
    """Required variables that are unset or have another value, with the value found."""
    return [(v, environ.get(v.name)) for v in TABLE if v.value is not None and environ.get(v.name) != v.value]


def apply(environ: MutableMapping[str, str], *, device_started: bool, communicators: bool) -> tuple[str, ...]:
    """Set what is unset; returns the names that were set.

    Args:
        device_started: the NPU is initialised in this process. communicators: a process group exists.

    Raises:
        ConfigError: a variable has another value, or something is unset and it is too late to set it.
    """
    problems = wrong(environ)
    if contrary := [(v, found) for v, found in problems if found is not None]:
        raise ConfigError(
            "; ".join(f"{v.name}={found} must be {v.value} ({v.why})" for v, found in contrary)
            + ": unset or correct it in the environment of the rollout and of the trainer"
        )
    if problems and (device_started or communicators):
        started = "a process group exists" if communicators else "the NPU is initialised"
        exports = " ".join(f"{v.name}={v.value}" for v, _ in problems)
        raise ConfigError(
            f"{', '.join(v.name for v, _ in problems)} must be set before the device starts, and {started} already; "
            f"start the process with {exports}"
        )
    for variable, _ in problems:
        assert variable.value is not None
        environ[variable.name] = variable.value
    return tuple(v.name for v, _ in problems)
