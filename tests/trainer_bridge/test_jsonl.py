"""Rollout files are exact and read strictly."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import InvalidRequest
from rollout.types import FinishReason, LogprobMode, SamplingParams, TopLogprobs, VersionSpan
from tests.trainer_bridge.samples import f32, record
from trainer_bridge.jsonl import RolloutRecord, decode, encode, read_rollouts, write_rollouts
from trainer_bridge.jsonl_line import _SAMPLING_TYPES
from trainer_bridge.wire.result import PromptScore


def same(left: Any, right: Any) -> bool:
    """Equal fields, arrays by dtype, shape and bytes, through the records inside."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    if type(left) is not type(right):
        return False
    if isinstance(left, (RolloutRecord, TopLogprobs, PromptScore)):
        return all(same(getattr(left, field.name), getattr(right, field.name)) for field in fields(left))
    return bool(left == right)


def alternatives(positions: int, width: int) -> TopLogprobs:
    """Ids, and log-probs with bits that no short decimal has."""
    values = np.linspace(-3, -0.1, positions * width, dtype=np.float32).reshape(positions, width)
    return TopLogprobs(np.arange(positions * width, dtype=np.int32).reshape(positions, width), values)


def rich() -> RolloutRecord:
    return record(
        [-0.1, -0.0, float("nan")],
        tokens=[1, 2, 3],
        mask=[1, 1, 0],
        request_id='weird "id"\u2028\n',
        sampling=SamplingParams(temperature=0.7, top_k=5, seed=2**63 - 1, stop=("x",), stop_token_ids=(4,)),
        seed=2**63 - 1,
        behavior_logprobs=f32([-0.05, -0.0, float("nan")]),
        row_digests=np.array([0, 2**64 - 1, 2**53 + 1], dtype=np.uint64),
        spans=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 3)),
        finish=FinishReason.STOP,
        replica="w0",
        weight_version=2,
        manifest_digest="ab",
        top=alternatives(3, 4),
        prompt_score=PromptScore(f32([-0.3, -7.0]), 2, np.array([2**64 - 1, 1], dtype=np.uint64), alternatives(2, 4)),
    )


def changed(**changes: Any) -> str:
    line = json.loads(encode(rich())) | changes
    return json.dumps({key: value for key, value in line.items() if value is not ...})


def test_round_trip_keeps_every_field_and_bit(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    records = [rich(), record([], sampling=None, mode=None, seed=None, temperature=0.5)]
    assert write_rollouts(path, records) == 2
    back = list(read_rollouts(path))
    assert len(back) == 2 and all(map(same, records, back))
    assert not same(records[0], back[1])
    assert [child.name for child in tmp_path.iterdir()] == ["rollouts.jsonl"]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8))
def test_any_float32_bits_survive_nan_payloads_and_infinities_included(words: list[int]) -> None:
    values = np.array(words, dtype=np.uint32).view(np.float32)
    source = record(values, mask=[0] * len(words))
    assert decode(encode(source), 1).policy_logprobs.tobytes() == values.tobytes()


def test_decimals_are_readable_and_nan_is_null() -> None:
    line = json.loads(encode(rich()))
    assert np.float32(line["logprobs"][0]) == np.float32(-0.1) and line["logprobs"][2] is None
    assert line["logprobs_bits"] == "bdcccccd" + "80000000" + "7fc00000"
    assert line["finish_reason"] == "stop"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [rich()])
    before = path.read_bytes()
    with pytest.raises(InvalidRequest, match="no finish reason"):
        write_rollouts(path, [record(), record(finish=None)])
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"logprob": 1}, "logprob"),
        ({"finish_reason": ...}, "finish_reason"),
        ({"finish_reason": None}, "finish_reason"),
        ({"finish_reason": "eos"}, "finish_reason"),
        ({"format": "other/1"}, "format"),
        ({"mode": "RAW"}, "mode"),
        ({"mode": []}, "mode"),
        ({"token_ids": [1, 2, -3]}, "token_ids"),
        ({"token_ids": [1, 2, True]}, "token_ids"),
        ({"token_ids": [1, 2, 2**31]}, "token_ids"),
        ({"prompt_ids": None}, "prompt_ids"),
        ({"mask": [1, 1, 2]}, "mask"),
        ({"sample_index": True}, "sample_index"),
        ({"sample_index": 0.0}, "sample_index"),
        ({"seed": "7"}, "seed"),
        ({"logprobs": [-0.1, 0.0, None]}, "logprobs_bits"),
        ({"logprobs": [-0.1, -0.0, "x"]}, "logprobs"),
        ({"logprobs_bits": "bdcccccd"}, "logprobs_bits"),
        ({"logprobs_bits": "BDCCCCCD" * 3}, "logprobs_bits"),
        ({"logprobs_bits": None}, "logprobs_bits"),
        ({"behavior_logprobs": None}, "behavior_logprobs"),
        ({"row_digests": "0" * 15}, "row_digests"),
        ({"spans": [[1, 0]]}, "spans"),
        ({"sampling": {"temperature": 1.0}}, "bar_undefined_tokens"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_bad_lines_name_line_and_key(changes: dict[str, Any], key: str) -> None:
    assert same(decode(changed(), 3), rich())
    with pytest.raises(InvalidRequest, match=rf"^line 3, key '{key}'") as caught:
        decode(changed(**changes), 3)
    assert caught.value.field == key


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", 1.5), ("stop", "x"), ("stop", [1]), ("ignore_eos", 0), ("temperature", "1")]
)
def test_sampling_values_have_their_types(name: str, value: Any) -> None:
    sampling = json.loads(encode(rich()))["sampling"] | {name: value}
    with pytest.raises(InvalidRequest, match=rf"^line 1, key '{name}'"):
        decode(changed(sampling=sampling), 1)


def test_every_sampling_field_is_written_and_has_a_type_to_read() -> None:
    assert json.loads(encode(rich()))["sampling"].keys() == _SAMPLING_TYPES.keys()
    assert {field.name for field in fields(SamplingParams)} == _SAMPLING_TYPES.keys()


def test_c6_a_missing_log_prob_is_an_error_with_line_and_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"^line 4: .*4 token_ids but 3 values in mask"):
        decode(changed(token_ids=[1, 2, 3, 4]), 4)
    with pytest.raises(InvalidRequest, match=r"^line 4: .*5 token_ids but 4 values in mask"):
        decode('{"prompt_ids":[1],"token_ids":[1,2,3,4,5],"logprobs":[-1,-1,-1,-1],"temperature":1}', 4)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"format":"zerodrift.rollout/1","format":"x"}', "'format': appears twice"),
        ('{"prompt_ids":[1],"token_ids":[1],"logprobs":[NaN],"temperature":1}', "NaN is not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_lines_that_are_not_records_are_refused(line: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^line 2.*{problem}"):
        decode(line, 2)


def test_a_file_that_was_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, [rich(), rich()])
    path.write_bytes(path.read_bytes()[:-1])
    reader = read_rollouts(path)
    next(reader)
    with pytest.raises(InvalidRequest, match=r"^line 2: no newline"):
        next(reader)
    path.write_bytes(b"\xff\n")
    with pytest.raises(InvalidRequest, match="line 1: not UTF-8"):
        next(read_rollouts(path))


def test_another_engines_minimal_line_leaves_absent_what_it_does_not_say() -> None:
    got = decode('{"prompt_ids":[1,2],"token_ids":[3,4],"logprobs":[-0.1,null],"temperature":0.7}', 9)
    assert got.policy_logprobs[0] == np.float32(-0.1) and got.mask.tolist() == [True, False]
    assert (got.request_id, got.temperature) == ("line-9", 0.7)
    absent = (got.finish, got.seed, got.mode, got.sampling, got.behavior_logprobs, got.replica, got.weight_version)
    assert absent == (None,) * 7
    assert got.scored(f32([-0.1, 0.0]), mode=LogprobMode.TEMPERED).finish is None


def test_lines_of_the_first_version_are_read_and_hold_no_alternatives() -> None:
    line = json.loads(encode(rich()))
    first = {key: value for key, value in line.items() if key not in ("top", "prompt_score")}
    got = decode(json.dumps(first | {"format": "zerodrift.rollout/1"}), 1)
    assert same(got, replace(rich(), top=None, prompt_score=None))
    with pytest.raises(InvalidRequest, match=r"'prompt_score': unknown in a zerodrift\.rollout/1 line"):
        decode(json.dumps(line | {"format": "zerodrift.rollout/1"}), 1)
    with pytest.raises(InvalidRequest, match=r"'prompt_score': missing from a zerodrift\.rollout/2 line"):
        decode(changed(prompt_score=...), 1)


def test_alternatives_must_fit_their_positions() -> None:
    top = json.loads(encode(rich()))["top"]
    with pytest.raises(InvalidRequest, match="top holds 2 positions, must hold 3"):
        decode(changed(top=top | {"width": 6}), 1)
    with pytest.raises(InvalidRequest, match="12 ids and 12 log-probs, must hold 5 each"):
        decode(changed(top=top | {"width": 5}), 1)
    with pytest.raises(InvalidRequest, match="logprobs_bits"):
        decode(changed(top=top | {"logprobs": [0.0, *top["logprobs"][1:]]}), 1)
    prompt = json.loads(encode(rich()))["prompt_score"]
    with pytest.raises(InvalidRequest, match=r"prompt_score\.logprobs holds 2 positions, must hold 1"):
        decode(changed(prompt_ids=[5, 6]), 1)
    with pytest.raises(InvalidRequest, match=r"prompt_score\.row_digests holds 1 positions"):
        decode(changed(prompt_score=prompt | {"row_digests": prompt["row_digests"][:16]}), 1)


@pytest.mark.parametrize("extra", ['"top_p":1', '"format":null'])
def test_a_minimal_line_takes_no_other_keys(extra: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^line 1, key"):
        decode(f'{{"prompt_ids":[1],"token_ids":[3],"logprobs":[-1],"temperature":1,{extra}}}', 1)


def test_a_minimal_line_must_state_its_temperature() -> None:
    with pytest.raises(InvalidRequest, match="key 'temperature'"):
        decode('{"prompt_ids":[1],"token_ids":[3],"logprobs":[-1],"temperature":null}', 1)


OTHER_ENGINE = {"prompt_ids": [1], "token_ids": [2, 3], "logprobs": [-1.0, -2.0], "temperature": 1.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": [-(10**400), -1]}, "key 'logprobs': item 0 has 402 digits"),
        ({"temperature": 10**400}, "key 'temperature'.*not a finite number"),
        ({"temperature": 1e39}, r"key 'temperature'.*outside \[0, 3.4e38\]"),
        ({"temperature": 1e-50}, "key 'temperature'.*use 0 for greedy"),
        ({"temperature": True}, "key 'temperature'"),
        ({"logprobs": [0.5, -1.0]}, "item 0 is 0.5, a log-prob is at most 0 .*probabilities or negated"),
        ({"logprobs": [1.0, 2.0]}, r"\(2 such\)"),
    ],
)
def test_numbers_of_other_engines_that_mean_nothing(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"line 7, {message}" if message.startswith("key") else message):
        decode(json.dumps(OTHER_ENGINE | fields), 7)


def test_rounding_above_zero_is_taken(tmp_path: Path) -> None:
    """Control; and nothing is clamped."""
    read = decode(json.dumps(OTHER_ENGINE | {"logprobs": [0.0625, -0.0]}), 1)
    assert read.policy_logprobs.tolist() == [0.0625, 0.0]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    """A file in the place of /dev/null would break the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert write_rollouts(pipe, [record([-0.5])]) == 1
        assert stat.S_ISFIFO(pipe.stat().st_mode) and [p.name for p in tmp_path.iterdir()] == ["pipe"]
        assert decode(os.read(reader, 1 << 16).decode(), 1).policy_logprobs.tolist() == [-0.5]
    finally:
        os.close(reader)


def test_a_link_is_followed_and_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    real.write_text("old")
    link.symlink_to(real)
    broken = iter([record([-0.5]), replace(record([-0.5]), finish=None)])
    with pytest.raises(InvalidRequest, match="no finish reason"):
        write_rollouts(link, broken)
    assert real.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    assert write_rollouts(link, [record([-0.5])]) == 1
    assert link.is_symlink() and len(list(read_rollouts(real))) == 1
