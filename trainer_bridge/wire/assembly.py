"""Generate streams put together again, C6 checked on the way: no token lost, repeated or relabelled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from rollout.codec import GenerateEvent, join_tops
from rollout.errors import ParityError
from rollout.spans import NOT_BEGUN, BegunSample
from rollout.types import (
    Completion,
    GenerateRequest,
    PromptChunk,
    SampleSummary,
    ScoreRequest,
    ScoreResult,
    TokenChunk,
    TopLogprobs,
    VersionSpan,
)
from trainer_bridge.wire.echo import echo_difference, same_temperature
from trainer_bridge.wire.result import GenerateResult, PromptScore, SampledSequence

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(slots=True)
class _Partial:
    begun: BegunSample
    """what came over an earlier stream"""
    chunks: list[TokenChunk] = field(default_factory=list)
    length: int = 0
    """tokens that came, over all streams"""
    summary: SampleSummary | None = None


class Assembler:
    """Takes the events of one stream in order; ``result`` only when all of them fit together.

    Args:
        request: what was asked; an empty ``prompt_ids`` stands for a text prompt.

    Raises:
        ParityError: from ``add`` and ``result``, when the stream breaks conservation.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        begun = request.resume or NOT_BEGUN
        came = len(begun.token_ids)
        self._samples = {request.sample_index + i: _Partial(begun, length=came) for i in range(request.n)}
        self._prompt: list[PromptChunk] = []
        self._completion: Completion | None = None

    def add(self, event: GenerateEvent) -> None:
        """Take the next event."""
        if self._completion is not None:
            self._refuse(f"a {type(event).__name__} follows the Completion")
        match event:
            case PromptChunk():
                self._add_prompt(event)
            case TokenChunk():
                self._add_chunk(event)
            case SampleSummary():
                self._add_summary(event)
            case Completion():
                self._add_completion(event)

    def result(self) -> GenerateResult:
        """The samples, by index; of a resumed sample what came over this stream."""
        completion = self._completion
        if completion is None:
            self._refuse("the stream ended without a Completion")
        return GenerateResult(
            request_id=completion.request_id,
            prompt_ids=completion.prompt_ids,
            samples=tuple(
                _sequence(self._samples[index], with_digests=self._request.row_digests)
                for index in sorted(self._samples)
            ),
            sampling=completion.sampling,
            mode=completion.sampling.logprob_mode,
            manifest_digest=completion.manifest_digest,
            prompt=_prompt_score(self._prompt),
        )

    def _refuse(self, what: str) -> NoReturn:
        raise ParityError(f"Generate stream of request {self._request.request_id!r}: {what}")

    def _open(self, index: int, what: str) -> _Partial:
        sample = self._samples.get(index)
        if sample is None:
            self._refuse(f"{what} names sample {index}, which was not asked for ({sorted(self._samples)})")
        if sample.summary is not None:
            self._refuse(f"{what} of sample {index} comes after its end")
        return sample

    def _add_prompt(self, chunk: PromptChunk) -> None:
        name = f"prompt log-probs at {chunk.start}"
        expected = 1 + sum(len(part.logprobs) for part in self._prompt)
        if not self._request.prompt_logprobs:
            self._refuse(f"{name}: none were asked for")
        if self._samples[self._request.sample_index].chunks:
            self._refuse(f"{name}: they come after the first token")
        if chunk.start != expected or any(part.weight_version != chunk.weight_version for part in self._prompt):
            self._refuse(f"{name}: position {expected} was due, of the same weight version")
        if (chunk.row_digests is not None) != self._request.row_digests:
            self._refuse(f"{name}: row_digests = {self._request.row_digests} was asked, the chunk has it otherwise")
        self._check_top(chunk.top, name)
        if not np.isfinite(chunk.logprobs).all():
            self._refuse(f"{name}: a log-prob is not finite")
        self._prompt.append(chunk)

    def _check_top(self, top: TopLogprobs | None, name: str) -> None:
        width = 0 if top is None else top.token_ids.shape[1]
        if width != self._request.top_logprobs:
            self._refuse(f"{name}: {self._request.top_logprobs} alternatives were asked, {width} came")

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        """All of the prompt, unless its sample ended before a first token."""
        first = self._samples[self._request.sample_index]
        came = sum(len(part.logprobs) for part in self._prompt)
        due = len(prompt) - 1 if self._request.prompt_logprobs and first.chunks else came
        if came != due or came not in (0, len(prompt) - 1):
            self._refuse(f"{came} prompt log-probs came for a prompt of {len(prompt)} tokens")

    def _add_chunk(self, chunk: TokenChunk) -> None:
        sample = self._open(chunk.sample_index, "a chunk")
        name = f"sample {chunk.sample_index} at token {chunk.offset}"
        lengths = {len(chunk.token_ids), len(chunk.policy_logprobs), len(chunk.behavior_logprobs)}
        if chunk.row_digests is not None:
            lengths.add(len(chunk.row_digests))
        if len(lengths) != 1:
            self._refuse(f"{name}: ids, log-probs and digests differ in number ({sorted(lengths)})")
        if (chunk.row_digests is not None) != self._request.row_digests:
            self._refuse(f"{name}: row_digests = {self._request.row_digests} was asked, the chunk has it otherwise")
        self._check_top(chunk.top, name)
        if chunk.offset != sample.length:
            self._refuse(f"{name}: {sample.length} tokens came before")
        for values in (chunk.policy_logprobs, chunk.behavior_logprobs):
            if not np.isfinite(values).all():
                self._refuse(f"{name}: the log-prob of a sampled token is not finite")
        sample.chunks.append(chunk)
        sample.length += len(chunk.token_ids)

    def _add_summary(self, summary: SampleSummary) -> None:
        sample = self._open(summary.sample_index, "a summary")
        name = f"sample {summary.sample_index}"
        if summary.num_tokens != sample.length:
            self._refuse(f"{name}: its end counts {summary.num_tokens} tokens, {sample.length} came")
        here = [VersionSpan(c.weight_version, c.offset, c.offset + len(c.token_ids)) for c in sample.chunks]
        sampled = _merge([*sample.begun.spans, *here])
        if _merge(summary.spans) != sampled:
            self._refuse(f"{name}: its spans say {_merge(summary.spans)}, its chunks {sampled}")
        sample.summary = summary

    def _add_completion(self, completion: Completion) -> None:
        request = self._request
        open_samples = [index for index, sample in self._samples.items() if sample.summary is None]
        if open_samples:
            self._refuse(f"the Completion comes before the end of samples {open_samples}")
        if completion.samples != tuple(self._samples[index].summary for index in sorted(self._samples)):
            self._refuse("the Completion repeats the samples' ends in another order or with other values")
        if request.request_id and completion.request_id != request.request_id:
            self._refuse(f"the Completion is that of request {completion.request_id!r}")
        if request.prompt_ids and completion.prompt_ids != request.prompt_ids:
            self._refuse("the echoed prompt is not the one that was sent")
        self._check_prompt(completion.prompt_ids)
        if different := echo_difference(request.sampling, completion.sampling):
            self._refuse(different)
        most = completion.sampling.max_tokens
        longest = max((sample.length for sample in self._samples.values()), default=0)
        if most is not None and longest > most:
            self._refuse(f"a sample has {longest} tokens, max_tokens was {most}")
        self._completion = completion


def _merge(spans: Iterable[VersionSpan]) -> list[tuple[int, int, int]]:
    merged: list[tuple[int, int, int]] = []
    for span in spans:
        if span.start == span.end:
            continue
        if merged and merged[-1][0] == span.version and merged[-1][2] == span.start:
            merged[-1] = (span.version, merged[-1][1], span.end)
        else:
            merged.append((span.version, span.start, span.end))
    return merged


def _sequence(sample: _Partial, *, with_digests: bool) -> SampledSequence:
    summary = sample.summary
    assert summary is not None, "a Completion is only taken once every sample has ended"
    digests = [chunk.row_digests for chunk in sample.chunks if chunk.row_digests is not None]
    return SampledSequence(
        sample_index=summary.sample_index,
        token_ids=_join([chunk.token_ids for chunk in sample.chunks], np.int32),
        policy_logprobs=_join([chunk.policy_logprobs for chunk in sample.chunks], np.float32),
        behavior_logprobs=_join([chunk.behavior_logprobs for chunk in sample.chunks], np.float32),
        row_digests=_join(digests, np.uint64) if with_digests else None,
        mask=np.ones(sample.length - len(sample.begun.token_ids), dtype=np.uint8),
        finish=summary.finish,
        spans=summary.spans,
        text=summary.text,
        replica=summary.replica,
        num_cached_tokens=summary.num_cached_tokens,
        top=join_tops([chunk.top for chunk in sample.chunks]),
    )


def _prompt_score(parts: list[PromptChunk]) -> PromptScore | None:
    if not parts:
        return None
    digests = [part.row_digests for part in parts if part.row_digests is not None]
    return PromptScore(
        logprobs=_join([part.logprobs for part in parts], np.float32),
        weight_version=parts[0].weight_version,
        row_digests=_join(digests, np.uint64) if digests else None,
        top=join_tops([part.top for part in parts]),
    )


def _join(parts: list[npt.NDArray[Scalar]], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    return np.concatenate(parts) if parts else np.empty(0, dtype=dtype)


def check_scores(request: ScoreRequest, result: ScoreResult) -> ScoreResult:
    """The result, if it answers each sequence of the request with one log-prob per position.

    Raises:
        ParityError: it does not.
    """
    expected = [len(sequence.token_ids) - sequence.start for sequence in request.sequences]
    found = [len(score.logprobs) for score in result.scores]
    if found != expected:
        raise ParityError(f"Score of request {result.request_id!r}: {expected} positions were asked, {found} came")
    if any((score.row_digests is not None) != request.row_digests for score in result.scores):
        raise ParityError(f"Score of request {result.request_id!r}: row_digests = {request.row_digests} was asked")
    if any((0 if s.top is None else s.top.token_ids.shape[1]) != request.top_logprobs for s in result.scores):
        raise ParityError(
            f"Score of request {result.request_id!r}: {request.top_logprobs} alternatives a position were asked"
        )
    if not same_temperature(request.temperature, result.temperature):
        raise ParityError(
            f"Score of request {result.request_id!r}: temperature {request.temperature} was asked, "
            f"{result.temperature} was used"
        )
    if request.request_id and result.request_id != request.request_id:
        raise ParityError(f"Score of request {request.request_id!r} was answered as {result.request_id!r}")
    return result
