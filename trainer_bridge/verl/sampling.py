"""verl's sampling dictionary as ``SamplingParams``. What the service cannot honour is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.types import SamplingParams
from trainer_bridge.ids import token_ids

_NUMBERS = ("temperature", "top_p", "min_p")
_LIMITS = ("max_tokens", "max_new_tokens")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "n": (None, 1),
    "best_of": (None, 1),
    "prompt_logprobs": (None, False),
    "skip_special_tokens": (None, 0, 1),
    "spaces_between_special_tokens": (None, 0, 1),
    "detokenize": (None, 0, 1),
    "min_tokens": (None, 0),
}
"""Parameters that the service lacks, with the values that ask for nothing; ``False`` there is not 0."""


@dataclass(frozen=True, slots=True)
class LengthBudget:
    """verl's limits, in tokens."""

    prompt_length: int
    response_length: int
    context_length: int
    """prompt and response together: ``max_model_len``, or what the service holds if that is less"""

    def max_tokens(self, prompt: int, asked: int | None) -> int:
        """Tokens that may follow a prompt of this length; verl's default when ``asked`` is None.

        Source: ``vLLMHttpServer.generate`` of verl 0.9.1.

        Raises:
            InvalidRequest: the prompt fills the context, or ``asked`` is less than 1.
        """
        room = self.context_length - prompt
        if room < 1:
            raise InvalidRequest(
                f"a prompt of {prompt} tokens leaves no room in a context of {self.context_length}; raise "
                "rollout.max_model_len or shorten the prompt",
                field="prompt_ids",
            )
        if asked is not None and asked < 1:
            raise InvalidRequest(
                f"max_tokens = {asked} asks for no token; end the trajectory, or leave it out for verl's default",
                field="sampling.max_tokens",
            )
        if asked is None:
            asked = min(self.response_length, self.prompt_length + self.response_length - prompt)
        return max(1, min(asked, room))


def to_sampling(given: Mapping[str, Any], prompt: int, budget: LengthBudget) -> tuple[SamplingParams, bool]:
    """Parameters for a prompt of ``prompt`` tokens, and whether log-probs are wanted. ``given`` is not changed.

    Raises:
        UnsupportedFeature: a parameter that the service lacks has a value that asks for something.
        InvalidRequest: two limits that differ, or a value of another kind: nothing is rounded, and text is no number.
    """
    known = {*_NUMBERS, *_LIMITS, *_NEUTRAL, "top_k", "seed", "stop", "stop_token_ids", "logprobs"}
    known |= {"ignore_eos", "include_stop_str_in_output", "no_stop_trim"}
    given = {name: _plain(value) for name, value in given.items()}
    for name, value in given.items():
        if name not in known or (name in _NEUTRAL and not _asks_nothing(value, _NEUTRAL[name])):
            raise UnsupportedFeature(
                f"sampling parameter {name} = {value!r} is not supported by zerodrift; leave it out. Supported: "
                f"{', '.join(sorted(known - set(_NEUTRAL)))}",
                field=f"sampling.{name}",
            )
    limits = {_whole(given[name], name) for name in _LIMITS if given.get(name) is not None}
    if len(limits) > 1:
        raise InvalidRequest(f"max_tokens and max_new_tokens differ: {sorted(limits)}; give one", field="sampling")
    numbers: dict[str, Any] = {name: _number(given[name], name) for name in _NUMBERS if given.get(name) is not None}
    top_k, seed, ids = given.get("top_k"), given.get("seed"), given.get("stop_token_ids")
    _flag(given.get("no_stop_trim"), "no_stop_trim")
    sampling = SamplingParams(
        **numbers,
        top_k=0 if top_k is None else _whole(top_k, "top_k"),
        seed=None if seed is None else _whole(seed, "seed"),
        ignore_eos=_flag(given.get("ignore_eos"), "ignore_eos"),
        max_tokens=budget.max_tokens(prompt, limits.pop() if limits else None),
        stop=_strings(given.get("stop")),
        stop_token_ids=() if ids is None else token_ids(ids, "sampling.stop_token_ids"),
        include_stop=_flag(given.get("include_stop_str_in_output"), "include_stop_str_in_output"),
    )
    return sampling, _wants_logprobs(given.get("logprobs", False))


def _plain(value: Any) -> Any:
    """A value of numpy or torch as Python's own."""
    return value.tolist() if hasattr(value, "tolist") else value


def _asks_nothing(value: Any, neutral: Sequence[Any]) -> bool:
    if not isinstance(value, bool | int | float | None):
        return False
    # 0 == False, but vLLM's prompt_logprobs = 0 asks for log-probs.
    return any(value == one and (isinstance(value, bool) or not isinstance(one, bool)) for one in neutral)


def _refuse(value: Any, name: str, wanted: str) -> NoReturn:
    raise InvalidRequest(f"{name} = {value!r:.60} must be {wanted}", field=f"sampling.{name}")


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(value, name, "a number")
    return value


def _whole(value: Any, name: str) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        _refuse(value, name, "a whole number: nothing is rounded")
    return value


def _flag(value: Any, name: str) -> bool:
    # "false" is true in Python.
    if value is not None and value not in (0, 1):
        _refuse(value, name, "true or false")
    return bool(value)


def _strings(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        _refuse(value, "stop", "a string or a list of strings")
    return tuple(texts)


def _wants_logprobs(value: Any) -> bool:
    # verl's client sends a bool; 0 is vLLM's way to ask for the sampled token's log-prob alone.
    if value is None or isinstance(value, bool):
        return bool(value)
    if value == 0:
        return True
    raise UnsupportedFeature(
        f"logprobs = {value!r}: only the sampled token's log-prob is served; give true or false",
        field="sampling.logprobs",
    )
