"""verl's sampling dictionary as ``SamplingParams``. What the service cannot honour is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import InvalidRequest, UnsupportedFeature
from rollout.types import SamplingParams

_PASSED = ("temperature", "top_p", "min_p", "ignore_eos")
_LIMITS = ("max_tokens", "max_new_tokens")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "n": (None, 1),
    "best_of": (None, 1),
    "prompt_logprobs": (None, False),
    "skip_special_tokens": (None, True, False),
    "spaces_between_special_tokens": (None, True, False),
    "detokenize": (None, True, False),
    "min_tokens": (None, 0),
}
"""Parameters that the service lacks, with the values that ask for nothing."""


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
            InvalidRequest: the prompt fills the context.
        """
        room = self.context_length - prompt
        if room < 1:
            raise InvalidRequest(
                f"a prompt of {prompt} tokens leaves no room in a context of {self.context_length}; raise "
                "rollout.max_model_len or shorten the prompt",
                field="prompt_ids",
            )
        if asked is None:
            asked = min(self.response_length, self.prompt_length + self.response_length - prompt)
        return max(1, min(asked, room))


def to_sampling(given: Mapping[str, Any], prompt: int, budget: LengthBudget) -> tuple[SamplingParams, bool]:
    """Parameters for a prompt of ``prompt`` tokens, and whether log-probs are wanted. ``given`` is not changed.

    Raises:
        UnsupportedFeature: a parameter that the service lacks has a value that asks for something.
        InvalidRequest: two limits that differ.
    """
    known = {*_PASSED, *_LIMITS, *_NEUTRAL, "top_k", "seed", "stop", "stop_token_ids", "logprobs"}
    known |= {"include_stop_str_in_output", "no_stop_trim"}
    for name, value in given.items():
        if name not in known or (name in _NEUTRAL and value not in _NEUTRAL[name]):
            raise UnsupportedFeature(
                f"sampling parameter {name} = {value!r} is not supported by zerodrift; leave it out. Supported: "
                f"{', '.join(sorted(known - set(_NEUTRAL)))}",
                field=f"sampling.{name}",
            )
    limits = {int(given[name]) for name in _LIMITS if given.get(name) is not None}
    if len(limits) > 1:
        raise InvalidRequest(f"max_tokens and max_new_tokens differ: {sorted(limits)}; give one", field="sampling")
    fields = {name: given[name] for name in _PASSED if given.get(name) is not None}
    top_k = given.get("top_k")
    sampling = SamplingParams(
        **fields,
        top_k=0 if top_k is None else int(top_k),
        seed=given.get("seed"),
        max_tokens=budget.max_tokens(prompt, limits.pop() if limits else None),
        stop=_strings(given.get("stop")),
        stop_token_ids=tuple(int(i) for i in given.get("stop_token_ids") or ()),
        include_stop=bool(given.get("include_stop_str_in_output", False)),
    )
    return sampling, _wants_logprobs(given.get("logprobs", False))


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


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
