"""Rollouts as JSON Lines, one sample a line, exact to the bit.

Full line: ``"format": "zerodrift.rollout/2"`` and every key of ``jsonl_line.KEYS``, absent values as null;
``finish_reason`` is never null. Log-probs stand twice: as decimal numbers to read, and as one string of 8 hex digits a
value, which is what counts. Both must agree. NaN is null in the decimals. Digests are one string of 16 hex digits a
value, because JSON numbers above 2**53 are not safe everywhere. Alternatives (``top``) are flat lists, ``width`` a
position. Lines of version 1, which had neither ``top`` nor ``prompt_score``, are read as well.

Minimal line, from another engine: exactly ``prompt_ids, token_ids, logprobs, temperature`` and no ``format``. What it
does not say stays None; a null log-prob gets mask 0; decimals are rounded to the nearest float32.

Reading is strict: an unknown, repeated or missing key, a wrong type or length is an error that names line and key.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rollout.errors import InvalidRequest
from rollout.types import Float32Array, TopLogprobs
from rollout.whole_files import write_whole
from trainer_bridge.jsonl_line import FORMAT, LineReader
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.wire.result import PromptScore

__all__ = ["FORMAT", "RolloutRecord", "decode", "encode", "read_rollouts", "write_rollouts"]


def write_rollouts(path: str | os.PathLike[str], records: Iterable[RolloutRecord]) -> int:
    """Write a whole file and return the number of lines. It appears complete or not at all.

    A device or a pipe, such as /dev/stdout, is written to as it is.
    """

    def write(file: BinaryIO) -> int:
        count = 0
        for record in records:
            file.write(encode(record).encode() + b"\n")
            count += 1
        return count

    return write_whole(Path(path), write)


def read_rollouts(path: str | os.PathLike[str]) -> Iterator[RolloutRecord]:
    """Yield the records of a file in order. Errors: InvalidRequest that names line and key."""
    with Path(path).open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.endswith(b"\n"):
                raise InvalidRequest(f"line {number}: no newline at its end, so it may be cut; write the file again")
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InvalidRequest(f"line {number}: not UTF-8 at byte {error.start}") from error
            yield decode(line, number)


def encode(record: RolloutRecord) -> str:
    """One line without its newline. Errors: InvalidRequest for a record without a finish reason."""
    if record.finish is None:
        raise InvalidRequest(
            f"request {record.request_id!r} sample {record.sample_index} has no finish reason, which a full line must "
            "carry; set it with dataclasses.replace once it is known",
            field="finish_reason",
        )
    line = {
        "format": FORMAT,
        "request_id": record.request_id,
        "sample_index": record.sample_index,
        "prompt_ids": record.prompt_ids.tolist(),
        "token_ids": record.token_ids.tolist(),
        **_logprobs("logprobs", record.policy_logprobs),
        **_logprobs("behavior_logprobs", record.behavior_logprobs),
        "mask": record.mask.astype(np.uint8).tolist(),
        "sampling": None if record.sampling is None else asdict(record.sampling),
        "temperature": record.temperature,
        "mode": None if record.mode is None else record.mode.name,
        "spans": [[span.version, span.start, span.end] for span in record.spans],
        "finish_reason": record.finish.value,
        "row_digests": None if record.row_digests is None else _hex(record.row_digests, 16),
        "replica": record.replica,
        "seed": record.seed,
        "manifest_digest": record.manifest_digest,
        "weight_version": record.weight_version,
        "top": _top(record.top),
        "prompt_score": _prompt_score(record.prompt_score),
    }
    return json.dumps(line, allow_nan=False, separators=(",", ":"))


def decode(line: str, number: int) -> RolloutRecord:
    """Read one line; ``number`` is its place in the file, counted from 1, for messages."""
    reader = LineReader(number)
    try:
        value = json.loads(line, object_pairs_hook=reader.unique, parse_constant=reader.constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"line {number}: not JSON: {error}") from error
    if not isinstance(value, dict):
        reader.fail("", f"is {type(value).__name__}, must be a JSON object")
    try:
        return reader.full(value) if "format" in value else reader.minimal(value)
    except InvalidRequest as error:
        if error.message.startswith("line "):
            raise
        raise InvalidRequest(f"line {number}: {error.message}", field=error.field) from error


def _logprobs(key: str, values: Float32Array | None) -> dict[str, Any]:
    """Decimals to read and bits that count, under ``key`` and ``key_bits``."""
    if values is None:
        return {key: None, f"{key}_bits": None}
    return {key: _decimals(values), f"{key}_bits": _hex(values.view(np.uint32), 8)}


def _top(top: TopLogprobs | None) -> dict[str, Any] | None:
    if top is None:
        return None
    flat = {"width": top.token_ids.shape[1], "token_ids": top.token_ids.reshape(-1).tolist()}
    return flat | _logprobs("logprobs", np.ascontiguousarray(top.logprobs).reshape(-1))


def _prompt_score(score: PromptScore | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return _logprobs("logprobs", score.logprobs) | {
        "row_digests": None if score.row_digests is None else _hex(score.row_digests, 16),
        "top": _top(score.top),
        "weight_version": score.weight_version,
    }


def _decimals(values: Float32Array) -> list[float | str | None]:
    # float64 holds every float32 exactly, and its shortest decimal reads back as the same float32.
    return [_decimal(value) for value in values.tolist()]


def _decimal(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _hex(words: npt.NDArray[np.unsignedinteger[Any]], digits: int) -> str:
    return "".join(f"{word:0{digits}x}" for word in words.tolist())
