"""verl's sampling dictionary and options: honoured or refused, never ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import ConfigError, InvalidRequest, UnsupportedFeature
from rollout.types import SamplingParams
from trainer_bridge.verl.hosted import hosted_settings
from trainer_bridge.verl.options import read_options
from trainer_bridge.verl.sampling import LengthBudget, to_sampling

BUDGET = LengthBudget(prompt_length=16, response_length=12, context_length=40)
VERL = {"temperature": 0.7, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""What verl 0.9.1's agent loop sends."""


def test_verls_own_dictionary() -> None:
    params, wants = to_sampling(VERL, 10, BUDGET)
    assert params == SamplingParams(temperature=0.7, top_p=1, top_k=-1, max_tokens=12) and wants
    assert not params.filtered
    assert to_sampling(VERL | {"logprobs": False}, 10, BUDGET)[1] is False
    greedy, _ = to_sampling(VERL | {"temperature": 0}, 10, BUDGET)
    assert greedy.greedy


@pytest.mark.parametrize(
    ("prompt", "asked", "want"), [(10, None, 12), (20, None, 8), (27, None, 1), (30, None, 1), (10, 5, 5), (38, 9, 2)]
)
def test_max_tokens_defaults_as_verl_expects(prompt: int, asked: int | None, want: int) -> None:
    """min(response, prompt + response - length), within the context, never below 1."""
    assert to_sampling(VERL | ({} if asked is None else {"max_tokens": asked}), prompt, BUDGET)[0].max_tokens == want
    assert (
        to_sampling(VERL | ({} if asked is None else {"max_new_tokens": asked}), prompt, BUDGET)[0].max_tokens == want
    )


def test_a_full_context_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="leaves no room in a context of 40"):
        to_sampling(VERL, 40, BUDGET)
    with pytest.raises(InvalidRequest, match="differ"):
        to_sampling(VERL | {"max_tokens": 1, "max_new_tokens": 2}, 3, BUDGET)


def test_the_rest_of_what_is_supported() -> None:
    given = {"seed": 5, "stop": "x", "stop_token_ids": [3], "min_p": 0.1, "ignore_eos": True, "top_k": 4}
    params, wants = to_sampling(given | {"include_stop_str_in_output": True, "logprobs": 0}, 3, BUDGET)
    assert params == SamplingParams(
        seed=5, stop=("x",), stop_token_ids=(3,), min_p=0.1, ignore_eos=True, top_k=4, max_tokens=12, include_stop=True
    )
    assert wants


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"n": 2},
        {"prompt_logprobs": 5},
        {"logprobs": 5},
        {"guided_json": {}},
        {"min_tokens": 3},
        {"temprature": 0.5},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFeature, match=next(iter(given))):
        to_sampling(VERL | given, 3, BUDGET)


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 2.7},
        {"top_k": float("inf")},
        {"top_k": True},
        {"max_tokens": 10.9},
        {"max_tokens": "10"},
        {"max_tokens": 0},
        {"max_new_tokens": -1},
        {"stop_token_ids": [2.5]},
        {"stop_token_ids": 5},
        {"stop": [3]},
        {"stop": 3},
        {"temperature": "0.7"},
        {"temperature": True},
        {"seed": "x"},
        {"ignore_eos": "false"},
        {"include_stop_str_in_output": "false"},
        {"no_stop_trim": "no"},
        {"prompt_logprobs": 0},
        {"n": np.array([1, 2])},
    ],
    ids=str,
)
def test_values_of_another_kind_are_refused_and_never_rounded(given: dict[str, Any]) -> None:
    """They were cut to an integer, taken for true, clamped to one token, or ended in a TypeError."""
    with pytest.raises((InvalidRequest, UnsupportedFeature), match=next(iter(given)).replace("_new", "")):
        to_sampling(VERL | given, 3, BUDGET)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    given = {"temperature": np.float64(0.5), "top_k": np.int64(5), "max_tokens": torch.tensor(4), "seed": np.int64(3)}
    given |= {"stop_token_ids": np.array([1, 2]), "ignore_eos": np.bool_(True), "repetition_penalty": np.float32(1)}
    params, _ = to_sampling(given, 3, BUDGET)
    assert params == SamplingParams(
        temperature=0.5, top_k=5, max_tokens=4, seed=3, stop_token_ids=(1, 2), ignore_eos=True
    )
    assert all(type(value) in (int, float, bool, tuple) for value in (params.temperature, params.top_k, params.seed))
    assert to_sampling({"top_k": -1.0, "detokenize": 1, "min_tokens": 0}, 3, BUDGET)[0].top_k == -1


def test_the_callers_dictionary_is_not_changed() -> None:
    given = dict(VERL, max_tokens=3)
    to_sampling(given, 3, BUDGET)
    assert given == dict(VERL, max_tokens=3)


def test_options_name_what_they_refuse() -> None:
    assert read_options(None).handshake == "strict" and read_options({"vllm": {"x": 1}}).router
    assert read_options({"zerodrift": {"addresses": ["a:1"], "run_seed": 3}}).addresses == ("a:1",)
    with pytest.raises(ConfigError, match=r"engine_kwargs\.zerodrift\.adresses.*addresses"):
        read_options({"zerodrift": {"adresses": []}})
    with pytest.raises(ConfigError, match="handshake"):
        read_options({"zerodrift": {"handshake": "maybe"}})


def test_settings_of_a_hosted_service() -> None:
    settings = hosted_settings(
        {"engine": {"page_size": 16, "kv_cache_tokens": 1024}},
        model_path="/m",
        dtype="float32",
        context_length=64,
        max_running=8,
    )
    assert (settings.model.path, settings.model.dtype, settings.engine.page_size) == ("/m", "float32", 16)
    assert settings.engine.max_running == 8 and settings.server.port == 0
    with pytest.raises(ConfigError, match=r"engine\.page"):
        hosted_settings({"engine": {"page": 1}}, model_path="/m", dtype="float32", context_length=None, max_running=8)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("x", "dictionary"),
        (5, "dictionary"),
        ([1], "dictionary"),
        ({"addresses": ["a:1"], "settings": {"engine": {"threads": 2}}}, "leave one of the two out"),
        ({"addresses": ["a:1", "b:1", "a:1"]}, "name a:1 twice"),
        ({"addresses": ["http://a:1"]}, "is a URL"),
        ({"addresses": ["a"]}, "host:port"),
        ({"run_seed": True}, "neither a number"),
        ({"resources": {"NPU": -1}}, "greater than or equal to 0"),
        ({"timeout_s": float("inf")}, "finite"),
    ],
    ids=str,
)
def test_options_are_honoured_or_refused(given: Any, match: str) -> None:
    """Settings beside addresses were passed over; a service named twice got two senders; others were a TypeError."""
    with pytest.raises(ConfigError, match=match):
        read_options({"zerodrift": given})


def test_sections_of_a_hosted_service_are_mappings() -> None:
    sizes: Any = {"model_path": "/m", "dtype": "float32", "context_length": None, "max_running": 8}
    for fields in (5, "x", [1]):
        with pytest.raises(ConfigError, match=r"engine = .* must be a mapping"):
            hosted_settings({"engine": fields}, **sizes)
    assert hosted_settings({"engine": None}, **sizes).engine.max_running == 8
