"""Text of sampled ids, piece by piece, by the tokenizers library's own decoding stream."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollout.errors import ConfigError, NotFound

log = logging.getLogger(__name__)


class TextStream:
    """Incremental decoder of one sample; a piece is empty while its bytes are incomplete. Never fails."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._last: int | None = None

    def push(self, token_id: int) -> str:
        """Text that the next id completes; "" while its last character is still open."""
        last, self._last = self._last, token_id
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:
            # A run of byte tokens is decoded as a whole, so a byte that is no UTF-8 turns the text of those before it,
            # passed on already, into replacement characters; the library then refuses to go on. What this id adds
            # stands behind such a character, so no stop string is found across it.
            return "\ufffd" + self._restarted(last, token_id)

    def _restarted(self, last: int | None, token_id: int) -> str:
        self._stream = DecodeStream(skip_special_tokens=False)
        if last is None:
            return ""
        # The id before it keeps a leading space, which decoders strip from the first id of a text.
        with contextlib.suppress(Exception):
            self._stream.step(self._tokenizer, last)
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception:
            self._stream = DecodeStream(skip_special_tokens=False)
            return ""


def _read(file: Path) -> Tokenizer:
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no exception of its own
        raise ConfigError(f"{file} is no tokenizer ({error}); copy the checkpoint again", field="model.path") from error
    return tokenizer


def _whole(tokenizer: Tokenizer, file: Path) -> Tokenizer:
    """Without what a training or embedding run saved into the file for itself: it would cut prompts, pad them, or
    encode equal texts differently."""
    saved = {"truncation": tokenizer.truncation, "padding": tokenizer.padding}
    saved["dropout"] = getattr(tokenizer.model, "dropout", None)
    if ignored := {name: value for name, value in saved.items() if value}:
        log.warning("%s asks for %s; prompts are encoded whole, unpadded and always alike", file, ignored)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if saved["dropout"]:
        tokenizer.model.dropout = None
    return tokenizer


class Detokenizer:
    """Encodes prompts and decodes samples with a checkpoint's tokenizer.json; adds nothing of its own.

    Raises:
        NotFound: no tokenizer.json. ConfigError: one that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path) / "tokenizer.json"
        if not file.exists():
            raise NotFound(
                f"{path} has no tokenizer.json: text prompts and stop strings need one; send token ids instead"
            )
        self._tokenizer = _whole(_read(file), file)

    @property
    def defined_ids(self) -> frozenset[int]:
        """Ids that stand for some token; the rest of the model's vocabulary is padding."""
        return frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of the text, without template or special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Whole text of ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def stream(self) -> TextStream:
        """A fresh decoder, for one sample."""
        return TextStream(self._tokenizer)
