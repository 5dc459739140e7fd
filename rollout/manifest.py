"""C5: the parity manifest, everything that can change a bit, as flat text both sides can compare."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping

import torch

from rollout.kernels.npu.environment import TABLE as NPU_ENVIRONMENT
from rollout.model import SharedModel, config_digest_source
from rollout.sources import source_digests
from rollout.types import LogprobMode
from rollout.weights import dtype_name

LIBRARIES = ("torch", "transformers", "numpy", "numba")
ENVIRONMENT = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", *(v.name for v in NPU_ENVIRONMENT if v.changes_bits))
"""Variables that select kernels or orders; empty where unset."""
HOST_ENVIRONMENT = tuple(v.name for v in NPU_ENVIRONMENT if not v.changes_bits)
"""Recorded beside them; the two sides may differ in these."""


def build_manifest(model: SharedModel) -> dict[str, str]:
    """What this process computes with: "section.key" -> value. Weights are not in it: see ``WeightState``."""
    spec, kernels = model.spec, model.kernels
    config = hashlib.blake2b(config_digest_source(model).encode(), digest_size=16).hexdigest()
    manifest = {
        "kernels.name": kernels.name,
        "kernels.page_size": str(kernels.page_size),
        "dtype.model": dtype_name(spec.dtype),
        "dtype.lm_head": dtype_name(model.head_dtype),
        "dtype.logits": "float32, cast once from lm_head's dtype",
        "logprob.mode": LogprobMode.TEMPERED.value,
        "model.config_digest": config,
        "model.vocab_size": str(spec.vocab_size),
        "parallel.tensor": "1",
        "device.name": _cpu_name(),
        "device.isa": str(torch.backends.cpu.get_cpu_capability()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    manifest |= {f"kernels.op.{op}": provider for op, provider in kernels.providers().items()}
    if model.vision is not None:
        manifest["kernels.op.vision_attention"] = model.vision.name
    manifest |= {f"source.{name}": digest for name, digest in source_digests().items()}
    manifest |= {f"library.{name}": importlib.metadata.version(name) for name in LIBRARIES}
    manifest |= {f"environment.{name}": os.environ.get(name, "") for name in ENVIRONMENT}
    manifest |= {f"host.environment.{name}": os.environ.get(name, "") for name in HOST_ENVIRONMENT}
    return dict(sorted(manifest.items()))


def manifest_digest(manifest: Mapping[str, str]) -> str:
    """Hex digest of a manifest, echoed in every response."""
    return hashlib.blake2b(json.dumps(dict(manifest), sort_keys=True).encode(), digest_size=16).hexdigest()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or platform.machine()
