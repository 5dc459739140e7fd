"""Messages of a stream that this side sends, and how their own failure reaches the caller.

What goes wrong while a message is made (a device out of memory, a file that is gone) happens inside gRPC's iteration.
grpc says of it "Exception iterating requests!", grpc.aio that the call was cancelled. So it is kept here and raised in
place of what gRPC made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Outgoing(Iterator[bytes]):
    """Serialized messages, each made when it is asked for."""

    failure: Exception | None
    """what ended them before their end"""

    def __init__(self, messages: Iterator[bytes]) -> None:
        self._messages = messages
        self.failure = None

    def __next__(self) -> bytes:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.failure = error
            raise

    @contextmanager
    def sent(self) -> Iterator[None]:
        """Around ``translated`` and the call that sends them: raises ``failure`` itself."""
        try:
            yield
        except Exception:
            if self.failure is None:
                raise
            raise self.failure from None
