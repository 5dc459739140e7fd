"""Go on with a sample that was aborted: the same tokens and log-probs as if nothing had happened (C2)."""

from __future__ import annotations

from dataclasses import replace

from rollout.errors import NotFound, UnsupportedFeature
from rollout.types import FinishReason, GenerateRequest
from trainer_bridge.wire import GenerateResult


def resume_request(result: GenerateResult, sample_index: int, *, request_id: str = "") -> GenerateRequest | None:
    """Prompt and tokens so far as the new prompt, same seed and sample index, what is left of the budget as max_tokens.

    The parts' records join with ``turns.merge_turns``. Options besides sampling are the defaults; set them with
    ``dataclasses.replace``.

    Returns:
        None when the sample was not aborted, or its budget is spent: there is nothing to go on with.

    Raises:
        NotFound: the result has no such sample. UnsupportedFeature: with stop strings, since one that began before the
            abort would not be seen; use ``stop_token_ids``.
    """
    sample = next((s for s in result.samples if s.sample_index == sample_index), None)
    if sample is None:
        have = [s.sample_index for s in result.samples]
        raise NotFound(
            f"request {result.request_id!r} has no sample {sample_index}; it has {have}", field="sample_index"
        )
    budget = result.sampling.max_tokens
    assert budget is not None, "a Completion echoes max_tokens"
    left = budget - len(sample.token_ids)
    if sample.finish.reason is not FinishReason.ABORTED or left < 1:
        return None
    if result.sampling.stop:
        raise UnsupportedFeature(
            f"sample {sample_index} of request {result.request_id!r} has stop strings {result.sampling.stop}: one that "
            "began before the abort would be missed; use stop_token_ids, or start again from the prompt",
            field="sampling.stop",
        )
    return GenerateRequest(
        request_id=request_id,
        prompt_ids=(*result.prompt_ids, *sample.token_ids.tolist()),
        sampling=replace(result.sampling, max_tokens=left),
        sample_index=sample_index,
    )
