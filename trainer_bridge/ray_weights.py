"""Weights from a trainer in the service's own Ray cluster: bytes through the object store, control through gRPC.

Example:
    with RolloutClient(address) as client, RayWeights(client) as weights:
        weights.push(trainer.tensors(), version=step)
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayActorError, RayTaskError

from rollout import codec
from rollout.errors import WeightUpdateError
from rollout.types import UpdatePolicy, WeightState, WeightUpdate
from rollout.weight_transfer import TransferActor
from trainer_bridge.client import RolloutClient
from trainer_bridge.wire import NamedTensor, NamedTensors, cut, end_of, named_tensors, plan_update

DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024
_OFFER_S = 1.0
"""How long an offer waits for room before the state of the update is looked at."""


class RayWeights:
    """Pushes weight sets; holds one actor without a CPU that hands out references. Close it, or use ``with``.

    Args:
        client: speaks to the service.
        namespace: the service's ``ray.namespace``; this process must be connected to the service's cluster.
    """

    def __init__(self, client: RolloutClient, *, namespace: str = "zerodrift") -> None:
        self._client = client
        self._name = f"zerodrift-transfer-{secrets.token_hex(16)}"
        self._pushes = 0
        options = {"name": self._name, "namespace": namespace, "num_cpus": 0}
        self._actor: Any = ray.remote(TransferActor).options(**options).remote()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the actor; a push in progress fails."""
        ray.kill(self._actor)

    def push(
        self,
        tensors: NamedTensors,
        *,
        version: int,
        policy: UpdatePolicy = UpdatePolicy.WAIT,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        allow_nonfinite: bool = False,
    ) -> WeightState:
        """As ``RolloutClient.update_weights``; buckets are hashed as they are put.

        Raises:
            RolloutError: as the service raised it; WeightUpdateError: the actor that hands out buckets died.
        """
        listed = named_tensors(tensors)
        self._pushes += 1
        transfer = f"{self._name}/{self._pushes}"
        update = plan_update(
            listed, version=version, digest=None, policy=policy, allow_nonfinite=allow_nonfinite, transfer=transfer
        )
        try:
            ray.get(self._actor.begin.remote(transfer))
        except RayActorError as error:
            raise WeightUpdateError("the actor that hands out buckets is gone; make a new RayWeights") from error
        return self._push(update, listed, bucket_bytes)

    def _push(self, update: WeightUpdate, listed: list[NamedTensor], bucket_bytes: int) -> WeightState:
        end: Future[bytes] = Future()

        def messages() -> Iterator[bytes]:
            yield codec.update_to_proto(update).SerializeToString()
            yield end.result()

        with ThreadPoolExecutor(1, thread_name_prefix="zerodrift-push") as thread:
            answer = thread.submit(self._client.send_update, messages())
            try:
                digests: dict[str, bytes] = {}
                for bucket in cut(listed, bucket_bytes, digests):
                    self._offer(update.transfer, [ray.put(bucket)], answer)
                ray.get(self._actor.finish.remote(update.transfer))
                end.set_result(codec.end_to_proto(end_of(digests)).SerializeToString())
            except BaseException as error:
                # Unblocks the stream, which ends without its end: nothing is committed.
                end.set_exception(error)
                if answer.done():
                    answer.result()
                if isinstance(error, RayTaskError | RayActorError):
                    raise WeightUpdateError(f"handing out buckets failed: {type(error).__name__}") from error
                raise
            return answer.result()

    def _offer(self, transfer: str, bucket: list[Any], answer: Future[WeightState]) -> None:
        while not ray.get(self._actor.offer.remote(transfer, bucket, _OFFER_S)):
            if answer.done():
                answer.result()
                raise WeightUpdateError("the service ended the update before it had all buckets")
