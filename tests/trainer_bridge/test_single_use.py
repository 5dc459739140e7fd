"""``generate`` and ``compare`` as functions: a file of rollouts in, a verdict out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from rollout.config import load_settings
from rollout.errors import InvalidRequest, ParityError
from rollout.logprobs import row_digests
from rollout.types import SamplingParams
from trainer_bridge.cli import register
from trainer_bridge.jsonl import write_rollouts
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.single_use import compare_rollouts, generate_rollouts, read_prompts, score_rollouts


async def test_generated_rollouts_compare_equal_and_a_changed_bit_does_not(
    tiny_qwen3_path: Path, tmp_path: Path
) -> None:
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}", "server.port=0", "engine.kv_cache_tokens=4096"])
    prompts = [(5, 6, 7), (9,) * 40]
    sampling = SamplingParams(seed=3, max_tokens=20, temperature=0.8, top_k=20)
    made = await generate_rollouts(prompts, sampling, n=2, digests=True, address=None, settings=settings)
    records = [record for record, _ in made]
    assert [r.seed for r in records] == [3, 3, 4, 4]
    write_rollouts(tmp_path / "r.jsonl", records)
    same = compare_rollouts(tmp_path / "r.jsonl", settings, micro_batch=3)
    assert same.bitwise_equal and same.tokens == sum(len(r.token_ids) for r in records)
    assert same.digests_equal == same.digests_total == same.tokens
    changed = records[2].policy_logprobs.copy()
    changed.view(np.int32)[1] += 1
    broken = RolloutRecord(
        **{
            f: getattr(records[2], f)
            for f in RolloutRecord.__dataclass_fields__
            if f not in ("policy_logprobs", "temperature", "behavior_logprobs", "row_digests")
        },
        policy_logprobs=changed,
    )
    write_rollouts(tmp_path / "b.jsonl", [*records[:2], broken])
    other = compare_rollouts(tmp_path / "b.jsonl", settings, micro_batch=2)
    assert other.unequal_tokens == 1 and other.first_mismatch is not None
    assert (other.first_mismatch.request_id, other.first_mismatch.position) == ("prompt1", 1)


async def test_a_file_of_another_engine_needs_the_callers_word_for_what_it_holds(
    tiny_qwen3_path: Path, tmp_path: Path
) -> None:
    """Minimal lines, as JSONL and as Parquet, greedy beside sampled: refused, and exact once the meaning is stated."""
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}", "server.port=0", "engine.kv_cache_tokens=4096"])
    rows: list[dict[str, Any]] = []
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(seed=3, max_tokens=6, temperature=temperature)
        ((record, _),) = await generate_rollouts(
            [(5, 6, 7)], sampling, n=1, digests=False, address=None, settings=settings
        )
        ids = {"prompt_ids": record.prompt_ids.tolist(), "token_ids": record.token_ids.tolist()}
        rows.append(ids | {"logprobs": record.policy_logprobs.tolist(), "temperature": temperature})
    jsonl, parquet = tmp_path / "theirs.jsonl", tmp_path / "theirs.parquet"
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow (extra verl or dashboard)")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), parquet)
    for path in (jsonl, parquet):
        with pytest.raises(ParityError, match="--policy-logprobs"):
            score_rollouts(path, settings, micro_batch=2)
        found = score_rollouts(path, settings, micro_batch=2, policy_logprobs=True)
        assert found.comparison.bitwise_equal and found.comparison.tokens == 12
    rows[1]["temperature"] = 1.0
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert not score_rollouts(jsonl, settings, micro_batch=2, policy_logprobs=True).comparison.bitwise_equal


async def test_compare_on_the_command_line_says_where_and_keeps_rows(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    options = [f"model.path={tiny_qwen3_path}", "server.port=0", "engine.kv_cache_tokens=4096"]
    sampling = SamplingParams(seed=3, max_tokens=20, temperature=0.8)
    made = await generate_rollouts(
        [(5, 6, 7)], sampling, n=2, digests=True, address=None, settings=load_settings(None, options)
    )
    records = [record for record, _ in made]
    assert records[1].row_digests is not None
    digests, logprobs = records[1].row_digests.copy(), records[1].policy_logprobs.copy()
    digests[17] += np.uint64(1)
    logprobs.view(np.int32)[17] += 3
    broken = replace(records[1], row_digests=digests, policy_logprobs=logprobs, behavior_logprobs=logprobs)
    write_rollouts(tmp_path / "r.jsonl", [records[0], broken])
    out, rows = tmp_path / "c.json", tmp_path / "rows.npz"
    app = typer.Typer()
    register(app)
    asked = ["--json", str(out), "--positions", "8", "--keep-rows", str(rows)]
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "r.jsonl"), *asked, *options])
    assert result.exit_code == 1, result.output
    assert "worst tokens" in result.output and "aligned; mean |d|" in result.output
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert figures["unequal_tokens"] == 1 and figures["breakdown"]["worst"][0]["ulp"] == 3
    positions = {s["key"]: s["tokens"] - s["equal_tokens"] for s in figures["breakdown"]["slices"]["position"]}
    assert positions == {"0-7": 0, "8-15": 0, "16-23": 1}
    assert figures["breakdown"]["verl"]["training/rollout_probs_diff_valid"] == 1.0
    with np.load(rows) as kept:
        assert kept["position"].tolist() == [17] and kept["logits"].dtype == np.float32
        assert int(row_digests(torch.from_numpy(kept["logits"]), 64)[0]) == int(kept["trainer_digest"][0])


async def test_the_priority_reaches_the_service(tiny_qwen3_path: Path) -> None:
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}", "server.port=0", "server.max_priority=3"])
    sampling = SamplingParams(seed=3, max_tokens=2)
    with pytest.raises(InvalidRequest, match=r"priority = 4 is outside \[-3, 3\]"):
        await generate_rollouts(
            [(5,)], sampling, n=1, digests=False, priority=4, address=None, settings=settings
        )  # fmt: skip
    made = await generate_rollouts([(5,)], sampling, n=1, digests=False, priority=3, address=None, settings=settings)
    assert len(made) == 1


def test_prompts_name_the_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt_ids": [1, 2]}\n')
    assert read_prompts(path) == ["a", (1, 2)]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(InvalidRequest, match="line 2"):
        read_prompts(path)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_ids": "34"}',
        '{"prompt_ids": [3.0]}',
        '{"prompt_ids": [true]}',
        '{"prompt": 5}',
        '{"prompt": "a", "propmt_ids": [1]}',
        '{"prompt": "a", "prompt_ids": [1]}',
        "[1]",
        "",
    ],
)
def test_prompts_are_read_strictly(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InvalidRequest, match="line 2: expected"):
        read_prompts(path)


def test_a_line_separator_within_a_prompt_parts_no_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c"}\n{"prompt_ids": [1]}\n', encoding="utf-8")
    assert read_prompts(path) == ["a\u2028b\x85c", (1,)]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"prompt": "a\xff"}', "utf-8"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' stands twice"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "BOM"),
        (b'{"prompt": ' + b"[" * 100_000, "nested too deeply"),
    ],
    ids=["not UTF-8", "a key twice", "a byte order mark", "nested"],
)
def test_prompts_that_readers_disagree_on_are_refused_by_line(tmp_path: Path, line: bytes, fault: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(InvalidRequest, match=f"line 2.*{fault}"):
        read_prompts(path)


async def test_a_bad_prompt_and_a_bad_line_are_named_as_the_file_has_them(
    tiny_qwen3_path: Path, tmp_path: Path
) -> None:
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}", "server.port=0", "engine.kv_cache_tokens=4096"])
    sampling = SamplingParams(max_tokens=2)
    for bad, fault in (((3, 99), r"prompt_ids\[1\] = 99"), ((), "empty"), ((2**40,), "no token id")):
        with pytest.raises(InvalidRequest, match=f"prompt2, number 3 of 3: .*{fault}"):
            await generate_rollouts(
                [(3,), (4,), bad], sampling, n=1, digests=False, address=None, settings=settings
            )  # fmt: skip
    # The fault lies in the second micro-batch.
    row = {"prompt_ids": [3], "token_ids": [5], "logprobs": [-1.0], "temperature": 1.0}
    path = tmp_path / "r.jsonl"
    for bad_row, fault in (({"token_ids": [64]}, "id 64"), ({"prompt_ids": []}, "0 prompt and 1 generated")):
        path.write_text("".join(json.dumps(r) + "\n" for r in [row] * 3 + [row | bad_row]), encoding="utf-8")
        with pytest.raises(InvalidRequest, match=f"request 'line-4' sample 0.*{fault}"):
            score_rollouts(path, settings, micro_batch=2, policy_logprobs=True)


async def test_seeds_of_later_prompts_go_round(tiny_qwen3_path: Path) -> None:
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}", "server.port=0", "engine.kv_cache_tokens=4096"])
    options: Any = {"n": 1, "digests": False, "address": None, "settings": settings}
    sampling = SamplingParams(seed=2**64 - 1, max_tokens=8, ignore_eos=True)
    last, first = await generate_rollouts([(3,), (3,)], sampling, **options)
    ((zero, _),) = await generate_rollouts([(3,)], replace(sampling, seed=0), **options)
    assert first[0].seed == 0 and first[0].token_ids.tolist() == zero.token_ids.tolist()
    assert last[0].token_ids.tolist() != zero.token_ids.tolist()


async def test_a_temperature_out_of_range_in_a_full_line_is_named(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    settings = load_settings(None, [f"model.path={tiny_qwen3_path}", "server.port=0", "engine.kv_cache_tokens=4096"])
    made = await generate_rollouts(
        [(3,), (4,)], SamplingParams(max_tokens=2), n=1, digests=False, address=None, settings=settings
    )
    records = [record for record, _ in made]
    assert records[1].sampling is not None
    odd = replace(records[1], sampling=replace(records[1].sampling, temperature=1e-9))
    write_rollouts(tmp_path / "r.jsonl", [records[0], odd])
    with pytest.raises(InvalidRequest, match=r"request 'prompt1' sample 0: temperature = 1e-09 is outside"):
        score_rollouts(tmp_path / "r.jsonl", settings, micro_batch=1)


@pytest.mark.parametrize(("verb", "option"), [("generate", "--out"), ("compare", "--json"), ("compare", "--keep-rows")])
def test_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, verb: str, option: str) -> None:
    """No model is named here: the work itself would fail otherwise."""
    app = typer.Typer()
    register(app)
    (tmp_path / "r.jsonl").write_text("")
    first = ["-p", "a"] if verb == "generate" else [str(tmp_path / "r.jsonl")]
    for where, fault in ((tmp_path / "nowhere" / "x", "no folder"), (tmp_path, "is a folder")):
        result = CliRunner().invoke(app, [verb, *first, option, str(where), "model.path=/nowhere"])
        assert isinstance(result.exception, InvalidRequest) and fault in result.exception.message
    assert not (tmp_path / "nowhere").exists()
