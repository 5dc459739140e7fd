"""When a sample ends: EOS ids, stop ids, stop strings."""

from __future__ import annotations

from rollout.detokenize import Detokenizer
from rollout.errors import InvalidRequest
from rollout.spans import BegunSample
from rollout.types import FinishDetail, FinishReason, SampleRequest


class Stopper:
    """Decides, token by token, whether a sample ends. Holds its decoding stream."""

    def __init__(self, request: SampleRequest, eos_token_ids: tuple[int, ...], tokenizer: Detokenizer | None) -> None:
        sampling = request.sampling
        self._stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        )
        self._stop = sampling.stop
        self._longest = max((len(s) for s in sampling.stop), default=0)
        self._stream = tokenizer.stream() if tokenizer is not None and sampling.stop else None
        self._tail = ""
        self.ended: FinishDetail | None = None
        """set where the last begun token ended the sample"""
        for index, token in enumerate(request.begun.token_ids):
            if self.ended is not None:
                raise InvalidRequest(
                    f"resume.tokens[{index - 1}] = {request.begun.token_ids[index - 1]} ended the sample, and "
                    f"{len(request.begun.token_ids) - index} tokens follow it; send the tokens as they were delivered",
                    field="resume.tokens",
                )
            self.ended = self.push(token)

    def push(self, token_id: int) -> FinishDetail | None:
        """Take the newest token; a FinishDetail when the sample ends with it."""
        if token_id in self._stop_ids:
            return FinishDetail(FinishReason.STOP, stop_token_id=token_id)
        if self._stream is None:
            return None
        piece = self._stream.push(token_id)
        window = self._tail + piece
        # The tail is shorter than the longest stop string, so a match is one that the new piece completes.
        found = [(at, text) for text in self._stop if (at := window.find(text)) >= 0]
        if found:
            return FinishDetail(FinishReason.STOP, stop_string=min(found, key=lambda match: match[0])[1])
        self._tail = window[-(self._longest - 1) :] if self._longest > 1 else ""
        return None


def check_room(begun: BegunSample, max_tokens: int) -> None:
    """InvalidRequest where a begun sample is longer than it may get. One that is just as long has ended."""
    if len(begun.token_ids) > max_tokens:
        raise InvalidRequest(
            f"the sample to resume has {len(begun.token_ids)} tokens and may have {max_tokens}; send the tokens and "
            "max_tokens of the first request",
            field="resume.tokens",
        )
