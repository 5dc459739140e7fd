"""Regenerate a stored sample from its record, and say equal or where not."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from functools import partial

import numpy as np

from rollout.errors import InvalidRequest
from rollout.types import FinishReason, GenerateRequest
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.collect import records_of
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.room import gather_in_room
from trainer_bridge.ulp import bits, ulp_distance
from trainer_bridge.wire import GenerateResult
from trainer_bridge.wire.channel import ClientSecurity


@dataclass(frozen=True, slots=True)
class Replay:
    """How a record compares with its second life."""

    request_id: str
    sample_index: int
    tokens: int
    """tokens in the record"""
    equal: bool
    """ids, log-probs and, where recorded, row digests hold the same bits, and it ended alike"""
    difference: str
    """the first difference in plain words; "" when equal"""
    position: int | None
    """generated token at which it differs"""
    warning: str = ""
    """what is not the same around it: another manifest or weight version"""


def replay_request(record: RolloutRecord, number: int) -> GenerateRequest:
    """The request that must give the record again.

    Raises:
        InvalidRequest: the record lacks parameters or a seed, or spans several weight versions.
    """
    where = f"request {record.request_id!r} sample {record.sample_index}"
    if record.sampling is None or record.seed is None:
        missing = "sampling parameters" if record.sampling is None else "a seed"
        raise InvalidRequest(f"{where} has no {missing}: nothing can be regenerated from it; record them with generate")
    versions = {span.version for span in record.spans}
    if len(versions) > 1:
        raise InvalidRequest(
            f"{where} was sampled under weight versions {sorted(versions)}; a replay holds one: replay its parts apart"
        )
    if not record.mask.all():
        raise InvalidRequest(f"{where} holds tokens that no model sampled (mask 0); replay its turns one by one")
    sampling = dataclasses.replace(record.sampling, seed=record.seed)
    if record.finish is FinishReason.ABORTED:
        sampling = dataclasses.replace(sampling, max_tokens=max(len(record.token_ids), 1))
    return GenerateRequest(
        # Others may replay on the same service.
        f"replay{number}-{secrets.token_hex(8)}",
        tuple(int(t) for t in record.prompt_ids),
        sampling,
        sample_index=record.sample_index,
        row_digests=record.row_digests is not None,
    )


def compare_replay(record: RolloutRecord, again: RolloutRecord) -> Replay:
    """Bits of the two; a record that was aborted is compared over what it has."""
    difference, position = _difference(record, again)
    return Replay(
        record.request_id, record.sample_index, len(record.token_ids), not difference, difference, position,
        _surroundings(record, again),
    )  # fmt: skip


def _difference(record: RolloutRecord, again: RolloutRecord) -> tuple[str, int | None]:
    size = min(len(record.token_ids), len(again.token_ids))
    unequal = np.flatnonzero(record.token_ids[:size] != again.token_ids[:size])
    values = np.flatnonzero(bits(record.policy_logprobs[:size]) != bits(again.policy_logprobs[:size]))
    hashed = np.empty(0, np.int64)
    if record.row_digests is not None and again.row_digests is not None:
        hashed = np.flatnonzero(record.row_digests[:size] != again.row_digests[:size])
    # A log-prob or a row that differs comes before the token that differs because of it.
    first = min((int(found[0]) for found in (unequal, values, hashed) if found.size), default=None)
    if first is not None:
        if first in values:
            ulp = int(
                ulp_distance(record.policy_logprobs[first : first + 1], again.policy_logprobs[first : first + 1])[0]
            )
            was, now = float(record.policy_logprobs[first]), float(again.policy_logprobs[first])
            what = f"log-prob {was!r} became {now!r} ({ulp} ULP)"
        elif first in unequal:
            what = f"id {record.token_ids[first]} became {again.token_ids[first]} at an equal log-prob"
        else:
            what = "the logits row differs although the token's log-prob does not"
        return f"token {first}: {what}", first
    if len(record.token_ids) > size or (len(again.token_ids) > size and record.finish is not FinishReason.ABORTED):
        return f"{len(record.token_ids)} tokens became {len(again.token_ids)}", size
    if record.finish not in (None, FinishReason.ABORTED, again.finish):
        assert record.finish is not None and again.finish is not None
        return f"it ended by {record.finish.value}, now by {again.finish.value}", None
    return "", None


def _surroundings(record: RolloutRecord, again: RolloutRecord) -> str:
    found = []
    if record.manifest_digest is not None and record.manifest_digest != again.manifest_digest:
        found.append(f"recorded under manifest {record.manifest_digest}, replayed under {again.manifest_digest}")
    if record.weight_version is not None and record.weight_version != again.weight_version:
        found.append(f"recorded under weights v{record.weight_version}, replayed under v{again.weight_version}")
    return "; ".join(found)


async def _generate(client: AsyncRolloutClient, request: GenerateRequest) -> GenerateResult:
    (result,) = await client.generate_many([request])
    return result


async def replay_records(
    records: list[RolloutRecord],
    address: str,
    *,
    weights_digest: str | None = None,
    security: ClientSecurity | None = None,
) -> list[Replay]:
    """Regenerate records on a running service.

    Args:
        weights_digest: root digest of the weights they were sampled under; None: not checked.
        security: TLS and token towards the service.

    Raises:
        InvalidRequest: a record that cannot be regenerated, or a service that holds other weights.
    """
    requests = [replay_request(record, i) for i, record in enumerate(records)]
    async with AsyncRolloutClient(address, security=security) as client:
        served = (await client.info()).weights.digest
        if weights_digest is not None and served != weights_digest:
            raise InvalidRequest(
                f"the service holds weights {served}, the records were sampled under {weights_digest}; load those "
                "(model.path=FOLDER) or send them with update_weights",
                field="weights_digest",
            )
        again = records_of(await gather_in_room([partial(_generate, client, request) for request in requests]))
    return [compare_replay(record, other) for record, other in zip(records, again, strict=True)]
