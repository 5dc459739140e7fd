"""What the gRPC service needs from whatever stands behind it: the Ray pool, or a fake in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from rollout.types import (
    Completion,
    GenerateRequest,
    PromptChunk,
    SampleSummary,
    ScoreRequest,
    ScoreResult,
    ServerInfo,
    TokenChunk,
    UpdatePart,
    WeightState,
    WeightUpdate,
)


class Backend(Protocol):
    """All methods raise errors of ``rollout.errors`` only."""

    def generate(
        self, request: GenerateRequest
    ) -> AsyncGenerator[PromptChunk | TokenChunk | SampleSummary | Completion, None]:
        """Stream chunks and sample ends in any interleaving of samples, then one ``Completion``.

        Prompt log-probs come before the first sample's first chunk.

        Closing the iterator (client cancel, deadline) aborts every sample of the request within one step.
        """
        ...

    async def score(self, request: ScoreRequest) -> ScoreResult:
        """Log-probs of given sequences by prefill, all under one weight version."""
        ...

    async def update_weights(self, update: WeightUpdate, chunks: AsyncIterator[UpdatePart]) -> WeightState:
        """All replicas serve the new version when this returns, or none does and it raises.

        Chunks come only where the head names no other source; an ``UpdateEnd`` comes last where it has no digest.
        """
        ...

    async def abort(self, request_id: str) -> int:
        """Abort every live sample of a request ("" = of all); their streams end with ABORTED. Returns how many."""
        ...

    async def pause(self) -> WeightState:
        """No token is sampled between the return of pause and the call of resume."""
        ...

    async def resume(self) -> WeightState:
        """Undo pause; returns the weights that sampling goes on with."""
        ...

    async def info(self, *, tensor_digests: bool = False) -> ServerInfo:
        """Describe the service; ``tensor_digests`` also hashes every tensor that each replica holds."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenize a text prompt, nothing added; UnsupportedFeature when the model has no tokenizer."""
        ...
