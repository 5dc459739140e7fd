"""The two sides that are asked questions: a model in this process, or a server that answers its Debug service."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from rollout.kernels.base import Decoder
from rollout.manifest import build_manifest
from rollout.model import SharedModel
from rollout.taps import Trace, Tracer, TraceRequest
from rollout.types import Float32Array
from rollout.weights import digest_of
from trainer_bridge.collect import training_sample
from trainer_bridge.contrast import OrdinaryTrainer
from trainer_bridge.rollout_record import RolloutRecord


class Side(Protocol):
    """One side of the comparison."""

    name: str
    """how sentences call it: "rollout" or "trainer" """
    paths: tuple[str, ...]
    """forward paths it can trace, the one it really runs first"""

    def mode(self) -> contextlib.AbstractContextManager[None]:
        """In which its log-probs are read from logits; the log-softmax is part of it."""
        ...

    def manifest(self) -> Mapping[str, str]:
        """Its parity manifest."""
        ...

    def tensor_digests(self) -> Mapping[str, str]:
        """Parameter name -> digest, hex."""
        ...

    def tensor(self, name: str) -> torch.Tensor | None:
        """A parameter's values, or None where this side has none by that name or cannot show it."""
        ...

    def trace(self, request: TraceRequest) -> Trace:
        """Replay with taps."""
        ...

    def again(self, record: RolloutRecord) -> RolloutRecord | None:
        """The sample generated once more by what really serves, caches and all; None: this side serves nothing.

        Raises:
            InvalidRequest: the record does not say enough to be generated again.
        """
        ...

    def stock(self, record: RolloutRecord) -> Float32Array | None:
        """[L] nats by the architecture's own forward: SDPA, ordinary operations; None: this side has none.

        Call outside of ``mode``.
        """
        ...


class ModelSide:
    """A model in this process."""

    def __init__(
        self,
        name: str,
        model: SharedModel,
        *,
        training: bool,
        decoder: Decoder | None = None,
        engine: Callable[[RolloutRecord], RolloutRecord] | None = None,
    ) -> None:
        """``training``: replay by the packed forward; else over pages, fused where ``decoder`` is given.

        ``engine`` generates a record once more, on whatever caches it has.
        """
        self.name = name
        self.model = model
        self.paths: tuple[str, ...] = (
            ("training",) if training else ("fused", "modules") if decoder is not None else ("modules",)
        )
        self._tracer = Tracer(model, decoder)
        self._engine = engine

    def mode(self) -> contextlib.AbstractContextManager[None]:
        """See ``Side``."""
        return self.model.kernels.invariant_mode()

    def manifest(self) -> Mapping[str, str]:
        """See ``Side``."""
        return build_manifest(self.model)

    def tensor_digests(self) -> Mapping[str, str]:
        """See ``Side``."""
        return {name: digest_of(name, parameter).hex() for name, parameter in self.model.parameters()}

    def tensor(self, name: str) -> torch.Tensor | None:
        """See ``Side``."""
        found = dict(self.model.parameters()).get(name)
        return None if found is None else found.detach()

    def config(self) -> Mapping[str, Any]:
        """Fields of the model's config."""
        fields: Mapping[str, Any] = self.model.hf.config.to_dict()
        return fields

    def trace(self, request: TraceRequest) -> Trace:
        """See ``Side``; in the model's own mode."""
        with self.model.kernels.invariant_mode():
            return self._tracer.trace(request)

    def again(self, record: RolloutRecord) -> RolloutRecord | None:
        """See ``Side``."""
        return None if self._engine is None else self._engine(record)

    def stock(self, record: RolloutRecord) -> Float32Array | None:
        """See ``Side``."""
        if "training" not in self.paths:
            return None
        threads = torch.get_num_threads()
        return OrdinaryTrainer(self.model).logprobs([training_sample(record)], micro_batch=1, threads=threads)[0]
