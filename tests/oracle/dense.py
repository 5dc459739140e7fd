"""The independent float64 reference, where tests look for it; it ships in the package for certify and explain."""

from __future__ import annotations

from rollout.oracle import DenseOracle, rms_norm, rotate

__all__ = ["DenseOracle", "rms_norm", "rotate"]
