"""Small tokenizers for tests: one character a token, byte pieces, and a merge."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
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


def byte_fallback(folder: Path, vocab_size: int = 64) -> Path:
    """tokenizer.json in Llama's manner: "▁a", "b" and "▁", then bytes, half of them no UTF-8 by themselves."""
    pieces = ["<unk>", EOS, "▁a", "b", "▁"]
    space = vocab_size - len(pieces)
    raw = [*range(0x41, 0x41 + space // 2), *range(0xE0, 0xE0 + space - space // 2)]
    vocab = {p: i for i, p in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in raw)])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
