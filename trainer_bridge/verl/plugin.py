"""Registers zerodrift with verl when imported: entry point ``verl.plugins`` or ``VERL_USE_EXTERNAL_MODULES``.

verl only writes a debug line when an entry point fails and later says "Unknown rollout mode". So a failure here is an
error in the log, and through ``VERL_USE_EXTERNAL_MODULES`` an exception.
"""

from __future__ import annotations

import importlib.metadata
import logging

from rollout.errors import UnsupportedFeature
from trainer_bridge.verl import sample_index
from trainer_bridge.verl.options import NAME
from trainer_bridge.verl.record import install as record_steps

TESTED = ("0.9.1",)
"""verl versions that ``make test-verl`` ran against."""
_SERIES = "0.9."

log = logging.getLogger(__name__)


def register() -> None:
    """Write zerodrift into verl's registries: replica, adapter, checkpoint engine.

    Raises:
        UnsupportedFeature: a verl whose interfaces were never checked.
    """
    version = importlib.metadata.version("verl")
    if not version.startswith(_SERIES):
        raise UnsupportedFeature(
            f"verl {version} is installed; the zerodrift plugin was tested with {', '.join(TESTED)} and takes "
            f"{_SERIES}x: verl moves these interfaces between minor versions"
        )
    if version not in TESTED:
        log.warning("verl %s was never tested with zerodrift; tested: %s", version, ", ".join(TESTED))
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    record_steps()
    RolloutReplicaRegistry.register(NAME, _replica_class)
    _ROLLOUT_REGISTRY[NAME, "async"] = "trainer_bridge.verl.adapter.ServerAdapter"
    sample_index.install()


def _replica_class() -> type:
    from trainer_bridge.verl.replica import ZerodriftReplica

    return ZerodriftReplica


try:
    register()
except Exception:
    log.exception("the zerodrift plugin could not register with verl; rollout.name=%s will be unknown", NAME)
    raise
