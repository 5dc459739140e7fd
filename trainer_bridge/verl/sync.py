"""One weight set from a trainer process to one service, with the handshake before the first."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from rollout.errors import ParityError
from rollout.model import DTYPES
from rollout.types import ServerInfo, UpdatePolicy, WeightState
from rollout.weights import digest_of, root_digest
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.handshake import Mode, require_equal

log = logging.getLogger(__name__)
HEAD = "lm_head.weight"


def served(tensors: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """Tensors on the host in the served dtype: floating ones rounded once, to nearest even, as the trainer's cast."""
    return [
        (name, t.detach().to(device="cpu", dtype=dtype if t.is_floating_point() else t.dtype)) for name, t in tensors
    ]


def check_manifests(info: ServerInfo, trainer: Mapping[str, str] | None, mode: Mode) -> None:
    """Compare the service's parity manifest with the trainer's; None: this process aligned no model.

    Raises:
        ParityError: in strict mode, when they differ or the trainer is not aligned.
    """
    if mode == "off":
        return
    if trainer is not None:
        require_equal(info.manifest, trainer, mode=mode)
        return
    message = (
        "the trainer is not aligned, so its log-probs cannot be expected to equal the rollout's: set "
        "actor_rollout_ref.model.external_lib=trainer_bridge.verl.align, or "
        "rollout.engine_kwargs.zerodrift.handshake=audit to measure the difference"
    )
    if mode == "strict":
        raise ParityError(message)
    log.warning(message)


async def push_weights(
    client: AsyncRolloutClient,
    tensors: Sequence[tuple[str, torch.Tensor]],
    *,
    step: int,
    policy: UpdatePolicy,
    info: ServerInfo,
) -> WeightState:
    """Send one whole set unless the service already serves these bytes; returns what it serves then.

    The version is the step where that is higher than the served one, else the next number.

    Raises:
        WeightUpdateError: the service refused; it goes on with what it had.
    """
    listed = served(tensors, DTYPES[info.manifest["dtype.model"]])
    names = [name for name, _ in listed if name != HEAD]
    held = dict(listed)
    if HEAD in held and _is_tied(held, names):
        # A tied head is one parameter: it goes, and is digested, under the embedding's name only.
        listed = [(name, tensor) for name, tensor in listed if name != HEAD]
    digest = root_digest({name: digest_of(name, tensor) for name, tensor in listed})
    if digest == info.weights.digest:
        log.info("step %d: the service already serves these weights (version %d)", step, info.weights.version)
        return info.weights
    version = max(info.weights.version + 1, step)
    return await client.update_weights(listed, version=version, digest=digest, policy=policy)


def _is_tied(held: Mapping[str, torch.Tensor], names: Sequence[str]) -> bool:
    head = held[HEAD]
    return any(
        name.endswith("embed_tokens.weight") and held[name].shape == head.shape and torch.equal(held[name], head)
        for name in names
    )
