"""What a verl server actor does, without Ray and verl: admission, generation over gRPC, aborts, weight versions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.errors import NotFound, ReplicaUnavailable
from rollout.types import FinishReason, ServerInfo
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.ids import token_ids
from trainer_bridge.verl.gate import Gate, GateState
from trainer_bridge.verl.options import VerlOptions
from trainer_bridge.verl.sampling import LengthBudget, to_sampling
from trainer_bridge.verl.seeds import SampleTag, derive_seed, prompt_digest
from trainer_bridge.wire import GenerateResult

log = logging.getLogger(__name__)
_ABORT_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class TurnOutput:
    """One generate call, in plain values that pickle and fit verl's ``TokenOutput``."""

    token_ids: list[int]
    """[L]"""
    log_probs: list[float] | None
    """[L] nats: the policy's, over the whole vocabulary; what a trainer recomputes. None when not wanted."""
    stop_reason: str
    """verl's: "completed" or "aborted" """
    fields: dict[str, Any]
    """verl's ``extra_fields``: global_steps, min_ and max_global_steps, num_cached_tokens and ``zerodrift``"""


class Session:
    """The state of one server actor: gate, client, and which global step each weight version belongs to."""

    def __init__(
        self, client: AsyncRolloutClient, info: ServerInfo, options: VerlOptions, budget: LengthBudget, run_seed: int
    ) -> None:
        self._client = client
        self._options = options
        self._budget = replace(budget, context_length=min(budget.context_length, info.context_length))
        self._run_seed = run_seed
        self._gate = Gate()
        self._asleep = False
        self._halted: GateState | None = None
        """what an abort does to arrivals until generation is resumed"""
        self._unique = secrets.token_hex(4)
        self._count = itertools.count()
        self._steps = {info.weights.version: 0}
        self._step = 0
        self._warned = False

    # ---- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], request_id: str, tag: SampleTag | None
    ) -> TurnOutput:
        """Sample one turn.

        Raises:
            UnsupportedFeature, InvalidRequest: parameters. ReplicaUnavailable: the service is gone.
        """
        prompt = token_ids(prompt_ids, "prompt_ids")
        params, wants = to_sampling(sampling, len(prompt), self._budget)
        seed, source = self._seed(params.seed, tag, prompt, request_id)
        # verl repeats ids over steps and turns, and a service may be shared, so the service gets one of our own.
        name = f"{request_id}.{self._unique}.{next(self._count)}"
        async with self._gate.enter(name) as admitted:
            if not admitted:
                return TurnOutput([], [] if wants else None, "aborted", {"global_steps": self._step})
            result = await self._client.generate(
                prompt, replace(params, seed=seed), request_id=name, row_digests=self._options.row_digests
            )
        return self._output(result, wants, source, tag)

    def _seed(
        self, given: int | None, tag: SampleTag | None, prompt: Sequence[int], request_id: str
    ) -> tuple[int, str]:
        if given is not None:
            return given, "request"
        if tag is not None:
            return derive_seed(self._run_seed, tag), "sample"
        if not self._warned:
            self._warned = True
            log.warning(
                "no sample tag came with the request, so seeds follow verl's request ids: siblings differ, but a rerun "
                "repeats only if the ids do. Route through trainer_bridge.verl.router (rollout.router_config_path)"
            )
        substitute = SampleTag(self._step, prompt_digest([*prompt, *request_id.encode()]), 0, 0, 0)
        return derive_seed(self._run_seed, substitute), "request_id"

    def _output(self, result: GenerateResult, wants: bool, source: str, tag: SampleTag | None) -> TurnOutput:
        sample = result.samples[0]
        steps = [self._steps.get(span.version, span.version) for span in sample.spans]
        details: dict[str, Any] = {
            "seed": result.sampling.seed,
            "seed_source": source,
            "turn": 0 if tag is None else tag.turn,
            "spans": [(span.version, span.start, span.end) for span in sample.spans],
            "global_steps": steps,
            "manifest_digest": result.manifest_digest,
            "mode": result.mode.name,
            "temperature": result.sampling.temperature,
            "filtered": result.sampling.filtered,
            "replica": sample.replica,
            "finish": sample.finish.reason.value,
            "limit": sample.finish.limit,
            "prompt_tokens": len(result.prompt_ids),
            "behavior_logprobs": sample.behavior_logprobs.tolist() if result.sampling.filtered else None,
            "row_digests": None if sample.row_digests is None else sample.row_digests.tolist(),
        }
        return TurnOutput(
            token_ids=sample.token_ids.tolist(),
            log_probs=sample.policy_logprobs.tolist() if wants else None,
            stop_reason="aborted" if sample.finish.reason is FinishReason.ABORTED else "completed",
            fields={
                "global_steps": steps[-1] if steps else self._step,
                "min_global_steps": min(steps, default=self._step),
                "max_global_steps": max(steps, default=self._step),
                "zerodrift": details,
            },
        )

    # ---- control ------------------------------------------------------------------------------------------------

    async def abort_all(self, *, refuse: bool) -> int:
        """Close the gate, end every sample of this session, and return once all are answered; how many there were.

        Raises:
            ReplicaUnavailable: they did not end within the options' timeout.
        """
        self._halted = GateState.REFUSING if refuse else GateState.PARKED
        await self._set_gate()
        ended = len(self._gate.inside)
        deadline = asyncio.get_running_loop().time() + self._options.timeout_s
        while self._gate.inside:
            for name in tuple(self._gate.inside):
                # Not found: the service has not seen it yet, or has just answered it.
                with contextlib.suppress(NotFound):
                    await self._client.abort(name)
            await self._gate.wait_empty(_ABORT_RETRY_S)
            if asyncio.get_running_loop().time() > deadline:
                raise ReplicaUnavailable(
                    f"{len(self._gate.inside)} samples did not end within {self._options.timeout_s} s of an abort"
                )
        return ended

    async def resume(self) -> None:
        """Undo ``abort_all``; a sleeping session goes on sleeping."""
        self._halted = None
        await self._set_gate()

    async def sleep(self) -> None:
        """Arrivals wait until ``wake_up``; those inside go on. Arrivals that are refused stay refused."""
        self._asleep = True
        await self._set_gate()

    async def wake_up(self) -> None:
        """Undo ``sleep``; an aborted session stays closed until ``resume``."""
        self._asleep = False
        await self._set_gate()

    async def _set_gate(self) -> None:
        awake = GateState.PARKED if self._asleep else GateState.OPEN
        await self._gate.set(awake if self._halted is None else self._halted)

    async def drained(self, timeout_s: float = 1.0) -> bool:
        """Whether nobody is inside after at most ``timeout_s`` seconds."""
        return await self._gate.wait_empty(timeout_s)

    def set_step(self, step: int, version: int | None) -> None:
        """The trainer's global step now being served, and the weight version that carries it."""
        self._step = step
        if version is not None:
            self._steps[version] = step

    @property
    def step(self) -> int:
        """Global step of the weights being served."""
        return self._step

    async def info(self) -> ServerInfo:
        """What the service says of itself."""
        return await self._client.info()
