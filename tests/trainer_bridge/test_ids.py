"""Token ids of callers: every spelling of integers is taken, nothing is rounded, parsed or cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import InvalidRequest
from rollout.types import SamplingParams
from tests.services import soon, tiny_service
from trainer_bridge.forward import TrainingSample, pack, unpad
from trainer_bridge.ids import id_array, token_ids
from trainer_bridge.wire.request import make_request

SPELLINGS: list[Any] = [
    [3, 4, 5],
    (3, 4, 5),
    iter([3, 4, 5]),
    range(3, 6),
    np.array([3, 4, 5], np.int32),
    np.array([3, 4, 5], np.uint64),
    torch.tensor([3, 4, 5]),
    [np.int64(3), torch.tensor(4), 5],
]
OTHERS: list[Any] = [
    [3.0, 4.5],
    np.array([3.0, 4.0]),
    torch.tensor([3.0]),
    [True, False],
    torch.tensor([True]),
    [np.bool_(True)],
    ["3"],
    b"abc",
    [[3, 4]],
    np.array([[3, 4]]),
    [np.array([3])],
    None,
    5,
]


@pytest.mark.parametrize("values", SPELLINGS, ids=repr)
def test_integers_are_taken_however_they_are_held(values: Any) -> None:
    kept = list(values)
    found = token_ids(iter(kept) if not hasattr(values, "shape") else values, "x")
    assert found == (3, 4, 5) and all(type(item) is int for item in found)


@pytest.mark.parametrize("values", OTHERS, ids=repr)
def test_c1_anything_else_is_refused_by_its_place(values: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt_ids") as caught:
        make_request(values, SamplingParams(), {})
    assert caught.value.field == "prompt_ids"


@pytest.mark.parametrize("n", [1.0, 1.5, "2", True])
def test_n_is_an_integer(n: Any) -> None:
    with pytest.raises(InvalidRequest, match="n"):
        make_request([3], SamplingParams(), {"n": n})
    request, _ = make_request([3], SamplingParams(), {"n": np.int64(2)})  # type: ignore[typeddict-item]
    assert type(request.n) is int and request.n == 2


@pytest.mark.parametrize(
    "values",
    [[1.7, 2.0], np.array([1.5]), [[1, 2]], [2**31], [2**33 + 1], np.array([2**63], np.uint64), [-(2**31) - 1], ["a"]],
    ids=repr,
)
def test_rows_of_ids_lose_nothing(values: Any) -> None:
    with pytest.raises(InvalidRequest, match="ids"):
        id_array(values, "ids")
    assert id_array([0, 2**31 - 1, -100], "ids").tolist() == [0, 2**31 - 1, -100]
    assert id_array([], "ids").dtype == np.int32


@pytest.mark.parametrize("ids", [np.array([3.0, 4.5]), np.array([[3, 4]]), np.array([2**32 + 3])], ids=repr)
def test_the_training_forward_rounds_no_id(ids: Any) -> None:
    for sides in ((ids, np.array([5])), (np.array([5]), ids)):
        with pytest.raises(InvalidRequest, match=r"sample 0: (prompt|token)_ids"):
            pack([TrainingSample(*sides)])
    assert pack([TrainingSample([3, 4], torch.tensor([5]))]).input_ids.tolist() == [3, 4, 5]  # type: ignore[arg-type]


def test_padded_masks_are_0_and_1() -> None:
    ids, real = torch.tensor([[0, 3, 4, 5]]), torch.tensor([[0, 1, 1, 1]])
    for marks in ([0, 0, 0.5, 1], [0, 0, 2, 1], [0, 0, float("nan"), 1]):
        with pytest.raises(InvalidRequest, match="mask holds"):
            unpad(ids, real, torch.tensor([marks]))
    (sample,) = unpad(ids, real, torch.tensor([[0, 0, 1.0, 1.0]]))
    assert sample.token_ids.tolist() == [4, 5]


async def test_a_string_is_no_list_of_stop_strings_and_truth_is_no_number(
    tiny_qwen3_path: Path, tmp_path: Path
) -> None:
    """``stop="abc"`` was three stop strings, "a", "b" and "c"; ``temperature=True`` was 1."""
    odd: list[dict[str, Any]] = [
        {"stop": "abc"},
        {"temperature": True},
        {"top_k": False},
        {"seed": True},
        {"ignore_eos": 2},
    ]
    async with tiny_service(tiny_qwen3_path) as (_, client):
        for fields in odd:
            (name,) = fields
            with pytest.raises(InvalidRequest, match=name) as caught:
                await soon(client.generate((3, 4), SamplingParams(**{"max_tokens": 2} | fields)))
            assert caught.value.field == f"sampling.{name}"
        plain = SamplingParams(max_tokens=2, ignore_eos=1, temperature=np.float32(0.5))  # type: ignore[arg-type]
        assert len((await soon(client.generate((3, 4), plain))).samples[0].token_ids) == 2
