"""Ids to text: whole, piece by piece, and nothing added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.detokenize import Detokenizer
from rollout.errors import ConfigError, NotFound
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


TEXT = "abababab" * 4
SAVED: dict[str, dict[str, Any]] = {
    "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    "padding": {
        "strategy": {"Fixed": 64},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    },
}


@pytest.mark.parametrize("option", [*SAVED, "dropout"])
def test_c9_what_a_run_saved_for_itself_changes_no_prompt(
    tokenizer: Detokenizer, tmp_path: Path, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a file cut prompts to three ids, put pads before them, or encoded one text in several ways."""
    file = small.letters(tmp_path) / "tokenizer.json"
    fields = json.loads(file.read_text())
    if option == "dropout":
        fields["model"]["dropout"] = 0.5
    else:
        fields[option] = SAVED[option]
    file.write_text(json.dumps(fields))
    odd = Detokenizer(tmp_path)
    assert {odd.encode(TEXT) for _ in range(20)} == {tokenizer.encode(TEXT)}
    assert f"asks for {{'{option}'" in caplog.text


def test_a_file_that_is_no_tokenizer_is_a_typed_error(tmp_path: Path) -> None:
    for text in ("", "{", "version https://git-lfs.github.com/spec/v1\n"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer\.json is no tokenizer"):
            Detokenizer(tmp_path)


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
