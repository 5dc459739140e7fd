"""Small tokenizers for tests: one character a token, byte pieces, and a merge."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = ("ab", "cd", "bc")
"""Multi-character tokens, after the letters."""
EOS = "<eos>"
DOUBLE_BREAK = "\n\n"
EURO = "€"


def letters(folder: Path) -> Path:
    """tokenizer.json: ids 2..27 are a..z, then "ab", "cd", "bc", one break, two breaks, three bytes of a euro sign."""
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [*LETTERS, *PAIRS, "Ċ", "ĊĊ"]
    euro_bytes = list(level.pre_tokenize_str(EURO)[0][0])
    vocab = {EOS: 1, "<pad>": 0} | {p: i + 2 for i, p in enumerate([*pieces, *euro_bytes])}
    merges = [("a", "b"), ("c", "d"), ("b", "c"), ("Ċ", "Ċ")]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = level
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True), AddedToken("<pad>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
