"""Text of each token, so that joining the pieces gives the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.detokenize import Detokenizer
from trainer_bridge.store.tables import Decode


def pieces_with(detokenizer: Detokenizer) -> Decode:
    """Decoder of ids by pieces; a character of several tokens belongs to the token that completes it."""

    def decode(ids: Sequence[int]) -> list[str]:
        stream = detokenizer.stream()
        return [stream.push(token) for token in ids]

    return decode
