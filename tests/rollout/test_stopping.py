"""When a sample ends: EOS, stop ids, stop strings that cross tokens (C3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rollout.detokenize import Detokenizer
from rollout.stopping import Stopper
from rollout.types import FinishDetail, FinishReason, SampleRequest, SamplingParams
from tests.rollout import tokenizers as small

STOP = FinishReason.STOP


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Detokenizer:
    return Detokenizer(small.letters(tmp_path_factory.mktemp("letters")))


def ending(
    ids: list[int] | tuple[int, ...], tokenizer: Detokenizer | None = None, eos: tuple[int, ...] = (), **sampling: Any
) -> tuple[int, FinishDetail] | None:
    """(number of tokens pushed, detail), or None."""
    stopper = Stopper(SampleRequest("s", (2,), SamplingParams(**sampling)), eos, tokenizer)
    for n, token in enumerate(ids, 1):
        detail = stopper.push(token)
        if detail is not None:
            return n, detail
    return None


@pytest.mark.parametrize("last", [2, 11])
def test_either_of_two_eos_ids(last: int) -> None:
    assert ending([5, 6, last, 7], eos=(2, 11)) == (3, FinishDetail(STOP, stop_token_id=last))
    assert ending([5, 6, last, 7], eos=(2, 11), ignore_eos=True) is None


def test_stop_ids_hold_also_when_eos_is_ignored() -> None:
    assert ending([5, 9], eos=(2,), stop_token_ids=(9,)) == (2, FinishDetail(STOP, stop_token_id=9))
    assert ending([2, 9], eos=(2,), stop_token_ids=(9,), ignore_eos=True) == (2, FinishDetail(STOP, stop_token_id=9))
    assert ending([2, 2], eos=(2,), stop_token_ids=(2,), ignore_eos=True) == (1, FinishDetail(STOP, stop_token_id=2))
    assert ending([5, 6], eos=(2,), stop_token_ids=(9,)) is None


def test_a_stop_string_may_cross_tokens(tokenizer: Detokenizer) -> None:
    ids = [tokenizer.encode(c)[0] for c in "xyzw"]
    assert ending(ids, tokenizer, stop=("yz",)) == (3, FinishDetail(STOP, stop_string="yz"))
    assert ending(ids, tokenizer, stop=("xyzw",)) == (4, FinishDetail(STOP, stop_string="xyzw"))
    assert ending(ids, tokenizer, stop=("zy",)) is None


def test_a_stop_string_inside_a_token(tokenizer: Detokenizer) -> None:
    (ab,) = tokenizer.encode("ab")
    assert ending([ab, ab], tokenizer, stop=("a",)) == (1, FinishDetail(STOP, stop_string="a"))
    assert ending([ab, ab], tokenizer, stop=("ba",)) == (2, FinishDetail(STOP, stop_string="ba"))


def test_a_stop_string_that_ends_in_a_split_character(tokenizer: Detokenizer) -> None:
    euro = tokenizer.encode("€")
    assert ending([2, *euro], tokenizer, stop=("a€",)) == (4, FinishDetail(STOP, stop_string="a€"))


def test_an_id_counts_before_a_string(tokenizer: Detokenizer) -> None:
    assert ending([2], tokenizer, eos=(2,), stop=("a",)) == (1, FinishDetail(STOP, stop_token_id=2))


def test_the_prompt_does_not_count(tokenizer: Detokenizer) -> None:
    """The prompt is "a"; a stop string that begins in it is not produced by the model."""
    assert ending(tokenizer.encode("b"), tokenizer, stop=("ab",)) is None


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(2, 32), max_size=14),
    stop=st.lists(st.text("abcd\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_ends_at_the_first_token_whose_text_holds_a_stop_string(
    tokenizer: Detokenizer, ids: list[int], stop: list[str]
) -> None:
    first = next((n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stop)), None)
    found = ending(ids, tokenizer, stop=tuple(stop))
    assert (found[0] if found else None) == first
    if found:
        assert found[1].stop_string in tokenizer.decode(ids[: found[0]])


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Detokenizer:
    return Detokenizer(small.byte_fallback(tmp_path_factory.mktemp("bytewise")))


@given(st.lists(st.one_of(st.sampled_from([2, 3, 4]), st.integers(2, 63)), min_size=1, max_size=30))
@settings(max_examples=300)
def test_bytes_that_are_no_text_never_end_an_engine(bytewise: Detokenizer, ids: list[int]) -> None:
    """With byte fallback a wrong byte rewrites the text of those before it, and the library's stream then raises."""
    stop = "b a"
    prefixes = (bytewise.decode(ids[:n]) for n in range(1, len(ids) + 1))
    first = next((n for n, text in enumerate(prefixes, 1) if stop in text), None)
    found = ending(ids, bytewise, stop=(stop,))
    assert (found and found[0]) == first


def test_the_library_does_refuse_such_bytes(bytewise: Detokenizer, tmp_path: Path) -> None:
    """Control: without the restart this raises."""
    stream = DecodeStream(skip_special_tokens=False)
    tokenizer = Tokenizer.from_file(str(small.byte_fallback(tmp_path) / "tokenizer.json"))
    with pytest.raises(Exception, match="Invalid prefix"):
        [stream.step(tokenizer, i) for i in (5, 40, 3)]
    assert ending([5, 40, 3], bytewise, stop=("b",)) == (3, FinishDetail(STOP, stop_string="b"))
