"""Ids to text: whole, piece by piece, and nothing added."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.detokenize import Detokenizer
from rollout.errors import NotFound
from tests.rollout import tokenizers as small


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Detokenizer:
    return Detokenizer(small.letters(tmp_path_factory.mktemp("letters")))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no tokenizer\.json.*send token ids"):
        Detokenizer(tmp_path)


def test_text_to_ids_and_back(tokenizer: Detokenizer) -> None:
    ids = tokenizer.encode("zab\n\n€")
    assert ids[:3] == (27, 28, 32)
    assert tokenizer.decode(list(ids)) == "zab\n\n€"
    assert tokenizer.encode("") == ()


def test_special_tokens_are_kept_and_never_added(tokenizer: Detokenizer) -> None:
    assert tokenizer.decode([2, 1]) == "a<eos>"
    assert tokenizer.encode("a") == (2,)


def test_defined_ids(tokenizer: Detokenizer) -> None:
    assert tokenizer.defined_ids == frozenset(range(36))


def test_pieces_join_to_the_whole(tokenizer: Detokenizer) -> None:
    ids = [*tokenizer.encode("zabcd\n€a"), 1, 28]
    stream = tokenizer.stream()
    assert "".join(stream.push(i) for i in ids) == tokenizer.decode(ids)


def test_an_incomplete_character_is_an_empty_piece(tokenizer: Detokenizer) -> None:
    stream = tokenizer.stream()
    euro = tokenizer.encode("€")
    assert len(euro) == 3
    assert [stream.push(i) for i in euro] == ["", "", "€"]


def test_streams_are_independent(tokenizer: Detokenizer) -> None:
    first, second = tokenizer.stream(), tokenizer.stream()
    euro = tokenizer.encode("€")
    first.push(euro[0])
    assert second.push(2) == "a"
    assert first.push(euro[1]) + first.push(euro[2]) == "€"


@pytest.mark.model
def test_the_real_tokenizer(smollm2_path: Path) -> None:
    tokenizer = Detokenizer(smollm2_path)
    text = "The capital is Paris,\n\n2024 naïve 🙂!"
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    assert tokenizer.decode(list(ids)) == text == "".join(stream.push(i) for i in ids)
    assert len(tokenizer.defined_ids) <= 49152
