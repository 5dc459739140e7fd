"""A trainer in a process of the service's Ray cluster, which can stop in the middle of a push."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rollout.types import WeightState
from tests.services import tensors_of
from trainer_bridge.client import RolloutClient
from trainer_bridge.ray_weights import RayWeights


class Trainer:
    """A trainer's process; ``stuck`` resolves once it stands in the middle of a push that will never end."""

    def __init__(self, address: str, namespace: str) -> None:
        self._client = RolloutClient(address, timeout_s=60)
        self._weights = RayWeights(self._client, namespace=namespace)
        self._stuck = threading.Event()

    def push(self, path: Path, version: int) -> WeightState:
        return self._weights.push(tensors_of(path), version=version, bucket_bytes=4096)

    def push_half(self, path: Path, version: int) -> None:
        offer, left = self._weights._offer, [6]

        def slow(*args: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                self._stuck.set()
                threading.Event().wait()
            offer(*args)

        self._weights._offer = slow  # type: ignore[method-assign]
        self.push(path, version)

    def stuck(self) -> bool:
        return self._stuck.wait(30)
