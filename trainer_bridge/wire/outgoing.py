"""Messages of a stream that goes out, and what making them failed by: gRPC keeps that to itself.

Its synchronous side answers "Exception iterating requests!", its asyncio side cancels the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator

from rollout.errors import InvalidRequest, RolloutError


class Outgoing:
    """One stream of messages, made while it is sent."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self._messages = messages
        self._failure: Exception | None = None

    def stream(self) -> Generator[bytes, None, None]:
        """The messages, for gRPC."""
        try:
            yield from self._messages
        except Exception as error:
            self._failure = error
            raise

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Around the call: a message that could not be made is why it failed.

        Raises:
            RolloutError: as it was raised while the messages were made. InvalidRequest: of anything else.
        """
        try:
            yield
        except BaseException:
            failure = self._failure
            if failure is None:
                raise
            if isinstance(failure, RolloutError):
                raise failure from None
            raise InvalidRequest(
                f"the update could not be sent ({type(failure).__name__}: {failure}); nothing of it is served"
            ) from failure
