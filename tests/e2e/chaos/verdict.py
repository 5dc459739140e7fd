"""One answer against the calm run, token by token."""

from __future__ import annotations

from typing import Any

from rollout.types import FinishReason, GenerateRequest
from tests.e2e.chaos.reference import Reference
from tests.e2e.chaos.tally import Tally
from tests.services import Bits, bits
from trainer_bridge.wire import GenerateResult


def judge(request: GenerateRequest, result: GenerateResult, reference: Reference, tally: Tally) -> None:
    """Add to the tally what the answer to a request is worth."""
    indices = [s.sample_index for s in result.samples]
    asked = list(range(request.sample_index, request.sample_index + request.n))
    tally.samples += len(asked)
    tally.lost += len(set(asked) - set(indices))
    tally.duplicated += len(indices) - len(set(indices))
    for sample, got in zip(result.samples, bits(result), strict=True):
        count = len(got.ids)
        tally.tokens += count
        if sample.finish.reason is FinishReason.ABORTED:
            tally.aborted += 1
        elif count != request.sampling.max_tokens:
            tally.lost += 1
        tally.crossed += len(sample.spans) > 1
        _judge_spans(request, got, [(s.version, s.start, s.end) for s in sample.spans], reference, tally)


def _judge_spans(
    request: GenerateRequest, got: Bits, spans: list[tuple[int, int, int]], reference: Reference, tally: Tally
) -> None:
    covered = 0
    for version, start, end in spans:
        if start != covered:
            tally.duplicated += 1
        covered = end
        if len(spans) == 1 and end == request.sampling.max_tokens:
            calm = reference.whole(request, got.sample, version)
        else:
            calm = reference.stretch(request, got.sample, got.ids[:start], end - start, version)
        wrong = differing(part(got, start, end), calm)
        tally.unequal += wrong
        if wrong:
            other = reference.stretch(request, got.sample, got.ids[:start], end - start, version + 1)
            if not differing(part(got, start, end), other):
                tally.mislabelled += end - start
    tally.lost += covered != len(got.ids)


def part(whole: Bits, start: int, end: int) -> Bits:
    """Tokens [start, end)."""
    return Bits(
        whole.sample,
        whole.ids[start:end],
        whole.policy[4 * start : 4 * end],
        whole.behavior[4 * start : 4 * end],
        whole.digests[8 * start : 8 * end],
    )


def differing(a: Bits, b: Bits) -> int:
    """Tokens that differ in any bit, or that one of the two lacks."""
    size = max(len(a.ids), len(b.ids))
    return sum(_token(a, i) != _token(b, i) for i in range(size))


def _token(of: Bits, i: int) -> tuple[Any, ...]:
    return part(of, i, i + 1)[1:]
