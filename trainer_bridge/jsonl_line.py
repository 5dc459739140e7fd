"""Strict reading of one JSONL line: every value is checked for type and range, every error names line and key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from rollout.temperature import checked_temperature
from rollout.types import FinishReason, Float32Array, LogprobMode, SamplingParams, TopLogprobs, VersionSpan
from trainer_bridge.checks import MOST_LOGPROB
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.wire.result import PromptScore

FORMAT = "zerodrift.rollout/2"
FORMAT_1 = "zerodrift.rollout/1"
"""Without ``top`` and ``prompt_score``; read, not written."""

MINIMAL_KEYS = frozenset({"prompt_ids", "token_ids", "logprobs", "temperature"})
KEYS = frozenset(
    {
        "format",
        "request_id",
        "sample_index",
        "prompt_ids",
        "token_ids",
        "logprobs",
        "logprobs_bits",
        "behavior_logprobs",
        "behavior_logprobs_bits",
        "mask",
        "sampling",
        "temperature",
        "mode",
        "spans",
        "finish_reason",
        "row_digests",
        "replica",
        "seed",
        "manifest_digest",
        "weight_version",
        "top",
        "prompt_score",
    }
)
_SINCE_2 = frozenset({"top", "prompt_score"})
_TOP_KEYS = frozenset({"width", "token_ids", "logprobs", "logprobs_bits"})
_PROMPT_KEYS = frozenset({"logprobs", "logprobs_bits", "row_digests", "top", "weight_version"})

_SAMPLING_TYPES: Mapping[str, tuple[type, ...]] = {
    "temperature": (float, int),
    "top_k": (int,),
    "top_p": (float, int),
    "min_p": (float, int),
    "seed": (int, type(None)),
    "max_tokens": (int, type(None)),
    "stop_token_ids": (list,),
    "stop": (list,),
    "include_stop": (bool,),
    "ignore_eos": (bool,),
    "barred_token_ids": (list,),
    "bar_undefined_tokens": (bool,),
}
_SAMPLING_ITEMS: Mapping[str, type] = {"stop_token_ids": int, "stop": str, "barred_token_ids": int}
_HEX = frozenset("0123456789abcdef")

_Word = TypeVar("_Word", np.uint32, np.uint64)


class LineReader:
    """Typed access to the keys of one line."""

    def __init__(self, number: int) -> None:
        """``number``: place of the line in its file, from 1."""
        self.number = number

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise InvalidRequest naming line and key."""
        where = f"line {self.number}, key {key!r}" if key else f"line {self.number}"
        raise InvalidRequest(f"{where}: {problem}", field=key)

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Hook of json.loads: an object whose keys are unique."""
        value = dict(pairs)
        if len(value) != len(pairs):
            names = [name for name, _ in pairs]
            self.fail(next(name for name in names if names.count(name) > 1), "appears twice")
        return value

    def constant(self, name: str) -> NoReturn:
        """Hook of json.loads: NaN and Infinity literals are refused."""
        self.fail("", f"{name} is not JSON; an absent log-prob is null")

    def require_keys(self, value: Mapping[str, Any], keys: frozenset[str], kind: str) -> None:
        """Exactly these keys."""
        for key in sorted(value.keys() - keys):
            self.fail(key, f"unknown in a {kind}; known are {', '.join(sorted(keys))}")
        for key in sorted(keys - value.keys()):
            self.fail(key, f"missing from a {kind}; write null where a value is absent")

    def full(self, value: Mapping[str, Any]) -> RolloutRecord:
        """A line of our own format."""
        found = value["format"]
        if found not in (FORMAT, FORMAT_1):
            self.fail("format", f"is {found!r}, this reader knows {FORMAT!r} and {FORMAT_1!r}")
        self.require_keys(value, KEYS if found == FORMAT else KEYS - _SINCE_2, f"{found} line")
        digests = self.take(value, "row_digests", str, optional=True)
        behavior = value["behavior_logprobs"] is not None or value["behavior_logprobs_bits"] is not None
        return RolloutRecord(
            request_id=self.take(value, "request_id", str),
            sample_index=self.take(value, "sample_index", int),
            prompt_ids=self.integers(value, "prompt_ids"),
            token_ids=self.integers(value, "token_ids"),
            policy_logprobs=self.exact_logprobs(value, "logprobs"),
            behavior_logprobs=self.exact_logprobs(value, "behavior_logprobs") if behavior else None,
            mask=self.mask(value),
            sampling=self.sampling(value),
            temperature=self.temperature(value, optional=True),
            mode=None
            if value["mode"] is None
            else LogprobMode[self.name(value, "mode", [mode.name for mode in LogprobMode])],
            spans=self.spans(value),
            finish=FinishReason(self.name(value, "finish_reason", [reason.value for reason in FinishReason])),
            row_digests=None if digests is None else self.words(digests, "row_digests", 16, np.uint64),
            replica=self.take(value, "replica", str, optional=True),
            seed=self.take(value, "seed", int, optional=True),
            manifest_digest=self.take(value, "manifest_digest", str, optional=True),
            weight_version=self.take(value, "weight_version", int, optional=True),
            top=self.top(value) if "top" in value else None,
            prompt_score=self.prompt_score(value) if "prompt_score" in value else None,
        )

    def top(self, value: Mapping[str, Any]) -> TopLogprobs | None:
        """Alternatives [positions, width], or null."""
        found = self.take(value, "top", dict, optional=True)
        if found is None:
            return None
        self.require_keys(found, _TOP_KEYS, "top object")
        width = self.take(found, "width", int)
        ids, logprobs = self.integers(found, "token_ids"), self.exact_logprobs(found, "logprobs")
        if width < 1 or ids.size % width or ids.size != logprobs.size:
            self.fail("top", f"holds {ids.size} ids and {logprobs.size} log-probs, must hold {width} each a position")
        return TopLogprobs(ids.reshape(-1, width), logprobs.reshape(-1, width))

    def prompt_score(self, value: Mapping[str, Any]) -> PromptScore | None:
        """The prompt's own log-probs, or null."""
        found = self.take(value, "prompt_score", dict, optional=True)
        if found is None:
            return None
        self.require_keys(found, _PROMPT_KEYS, "prompt_score object")
        digests = self.take(found, "row_digests", str, optional=True)
        return PromptScore(
            logprobs=self.exact_logprobs(found, "logprobs"),
            weight_version=self.take(found, "weight_version", int),
            row_digests=None if digests is None else self.words(digests, "row_digests", 16, np.uint64),
            top=self.top(found),
        )

    def minimal(self, value: Mapping[str, Any]) -> RolloutRecord:
        """Another engine's line: what it does not say stays None."""
        self.require_keys(value, MINIMAL_KEYS, "minimal line (a full line carries 'format')")
        logprobs = self.decimals(value, "logprobs")
        above = np.flatnonzero(logprobs > MOST_LOGPROB)
        if above.size:
            self.fail(
                "logprobs",
                f"item {int(above[0])} is {logprobs[above[0]]}, a log-prob is at most 0 ({above.size} such); these "
                "look like probabilities or negated log-probs",
            )
        return RolloutRecord(
            request_id=f"line-{self.number}",
            sample_index=0,
            prompt_ids=self.integers(value, "prompt_ids"),
            token_ids=self.integers(value, "token_ids"),
            policy_logprobs=logprobs,
            mask=~np.isnan(logprobs),
            finish=None,
            seed=None,
            sampling=None,
            mode=None,
            temperature=self.temperature(value, optional=False),
        )

    def take(self, value: Mapping[str, Any], key: str, kind: type, *, optional: bool = False) -> Any:
        """Value of a key, of one type."""
        found = value[key]
        if found is None and optional:
            return None
        # bool is a subclass of int, but true is no token count.
        if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
            self.fail(key, f"is {found!r:.60}, must be {kind.__name__}{' or null' if optional else ''}")
        return found

    def integers(self, value: Mapping[str, Any], key: str) -> npt.NDArray[np.int32]:
        """List of integers in [0, 2**31) as int32 [n]."""
        found = self.take(value, key, list)
        for i, item in enumerate(found):
            if type(item) is not int or not 0 <= item < 2**31:
                self.fail(key, f"item {i} is {item!r:.60}, must be an integer in [0, 2**31)")
        return np.array(found, dtype=np.int32)

    def mask(self, value: Mapping[str, Any]) -> npt.NDArray[np.bool_]:
        """List of 0 and 1 as bool [n]."""
        found = self.integers(value, "mask")
        if found.size and found.max() > 1:
            self.fail("mask", f"holds {int(found.max())}, only 0 and 1 are defined")
        return found.astype(np.bool_)

    def temperature(self, value: Mapping[str, Any], *, optional: bool) -> float | None:
        """A temperature as it may be sampled at; see ``checked_temperature``."""
        found = value["temperature"]
        if found is None and optional:
            return None
        try:
            checked_temperature(found, "temperature")
        except InvalidRequest as error:
            wanted = f"must be a finite number >= 0{' or null' if optional else ''}"
            self.fail("temperature", f"is {str(found)[:40]!r}, {wanted}: {error.message}")
        return float(found)

    def name(self, value: Mapping[str, Any], key: str, names: Sequence[str]) -> str:
        """One of a fixed set of names."""
        found = value[key]
        if found not in names:
            self.fail(key, f"is {found!r:.60}, must be one of {', '.join(names)}")
        return str(found)

    def spans(self, value: Mapping[str, Any]) -> tuple[VersionSpan, ...]:
        """List of [version, start, end]."""
        found = self.take(value, "spans", list)
        for i, item in enumerate(found):
            if not isinstance(item, list) or len(item) != 3 or any(type(part) is not int for part in item):
                self.fail("spans", f"item {i} is {item!r:.60}, must be [version, start, end] in integers")
        return tuple(VersionSpan(version=item[0], start=item[1], end=item[2]) for item in found)

    def sampling(self, value: Mapping[str, Any]) -> SamplingParams | None:
        """Object with every field of SamplingParams, or null."""
        found = self.take(value, "sampling", dict, optional=True)
        if found is None:
            return None
        self.require_keys(found, frozenset(_SAMPLING_TYPES), "sampling object")
        for key, kinds in _SAMPLING_TYPES.items():
            if type(found[key]) not in kinds:
                self.fail(key, f"is {found[key]!r:.60}, must be {' or '.join(kind.__name__ for kind in kinds)}")
        for key, kind in _SAMPLING_ITEMS.items():
            if any(type(item) is not kind for item in found[key]):
                self.fail(key, f"is {found[key]!r:.60}, must be a list of {kind.__name__}")
        return SamplingParams(**found | {key: tuple(found[key]) for key in _SAMPLING_ITEMS})

    def decimals(self, value: Mapping[str, Any], key: str) -> Float32Array:
        """Numbers, null for NaN, "inf" and "-inf"; rounded to float32 [n]."""
        found = self.take(value, key, list)
        numbers = []
        for i, item in enumerate(found):
            if item is None:
                numbers.append(float("nan"))
            elif type(item) in (int, float) or item in ("inf", "-inf"):
                numbers.append(self._as_float(item, key, i))
            else:
                self.fail(key, f"item {i} is {item!r:.60}, must be a number, null, or an infinity as a string")
        with np.errstate(over="ignore"):
            return np.array(numbers, dtype=np.float64).astype(np.float32)

    def _as_float(self, item: Any, key: str, place: int) -> float:
        try:
            return float(item)
        except OverflowError:
            self.fail(key, f"item {place} has {len(str(item))} digits, which no float64 holds")

    def exact_logprobs(self, value: Mapping[str, Any], key: str) -> Float32Array:
        """float32 [n] from the bits, which must agree with the decimals."""
        decimals = self.decimals(value, key)
        bits = self.words(self.take(value, f"{key}_bits", str), f"{key}_bits", 8, np.uint32)
        if bits.size != decimals.size:
            self.fail(f"{key}_bits", f"holds {bits.size} values, {key} holds {decimals.size}")
        exact: Float32Array = bits.view(np.float32)
        agree = (decimals.view(np.uint32) == bits) | (np.isnan(decimals) & np.isnan(exact))
        if not agree.all():
            i = int(np.argmin(agree))
            self.fail(f"{key}_bits", f"item {i} is {int(bits[i]):08x} = {exact[i]!r}, but {key} says {value[key][i]!r}")
        return exact

    def words(self, text: str, key: str, digits: int, dtype: type[_Word]) -> npt.NDArray[_Word]:
        """One string of fixed-width hex words as an unsigned array [n]."""
        if len(text) % digits or not _HEX.issuperset(text):
            self.fail(key, f"must be {digits} lower-case hex digits a value, got {len(text)} characters: {text!r:.60}")
        words = [int(text[i : i + digits], 16) for i in range(0, len(text), digits)]
        return np.array(words, dtype=dtype)
