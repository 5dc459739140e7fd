"""A secret that can only be compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from typing import NoReturn, Self


class Secret:
    """SHA-256 of a token. It has no ``==`` and no text: what is left is ``matches``, which takes equally long for all.

    The digest may lie in files: a token of 32 random bytes cannot be found from it.
    """

    __slots__ = ("_digest",)
    __hash__ = None  # type: ignore[assignment]  # a dictionary would compare with ==

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    @classmethod
    def of(cls, token: str) -> Self:
        """The secret that ``token`` matches."""
        return cls(hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest())

    @property
    def hex(self) -> str:
        """The digest, for a tokens file."""
        return self._digest.hex()

    def matches(self, token: str) -> bool:
        """Whether this is the token, in time that does not depend on how much of it is right."""
        return hmac.compare_digest(hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest(), self._digest)

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("secrets are compared with matches(), in constant time")

    def __repr__(self) -> str:
        return "Secret(...)"
