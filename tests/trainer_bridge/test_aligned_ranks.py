"""FSDP2 over two gloo processes: aligned shards give the rollout's bits, and the same gradients run after run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForCausalLM

import trainer_bridge
from tests.engines import build_engine, fresh_model, random_prompt, run, sample
from trainer_bridge.aligned import aligned_logprobs

PAGE, TEMPERATURE, RANKS = 16, 0.7, 2
LENGTHS = ((1, 12), (5, 12), (17, 12), (30, 9), (3, 4), (22, 7))


def scored(model: Any, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the generated tokens of rows packed into one call, and what the rollout said."""
    ids = [torch.tensor(row["prompt"] + row["tokens"]) for row in rows]
    positions = torch.cat([torch.arange(len(i)) for i in ids])
    logits = model(input_ids=torch.cat(ids)[None], position_ids=positions[None], use_cache=False).logits[0]
    starts = np.cumsum([0, *(len(i) for i in ids[:-1])]) + [len(row["prompt"]) - 1 for row in rows]
    at = torch.cat([torch.arange(s, s + len(row["tokens"])) for s, row in zip(starts.tolist(), rows, strict=True)])
    tokens = torch.tensor([token for row in rows for token in row["tokens"]])
    told = torch.tensor([value for row in rows for value in row["logprobs"]], dtype=torch.float32)
    return aligned_logprobs(logits[at], tokens, torch.full((len(at),), TEMPERATURE), 64), told


def train(model: Any, rows: list[dict[str, Any]], micro_batch: int) -> tuple[int, list[torch.Tensor]]:
    """Tokens that differ, and this rank's shards of the reduced gradients."""
    model.zero_grad()
    differ = 0
    for start in range(0, len(rows), micro_batch):
        found, told = scored(model, rows[start : start + micro_batch])
        differ += int((found.detach().view(torch.int32) != told.view(torch.int32)).sum())
        found.sum().backward()
    return differ, [p.grad.to_local().clone() for p in model.parameters()]


def rank_main(rank: int, folder: str, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # As verl splits a batch: each rank its own rows; every collective is met by both.
    rows = json.loads(Path(folder, "rows.json").read_text())[rank::RANKS]
    results: dict[str, Any] = {}
    with (
        trainer_bridge.align(model, page_size=PAGE, dtype=torch.bfloat16) as manifest,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        results["differ"], first = train(model, rows, micro_batch=3)
        results["split"], _ = train(model, rows, micro_batch=1)
        _, again = train(model, rows, micro_batch=3)
    results["repeats"] = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    results["shard"] = sum(g.numel() for g in first)
    results["dtype"] = manifest["dtype.model"]
    with torch.no_grad():
        found, told = scored(model, rows)
        results["plain"] = int((found.view(torch.int32) != told.view(torch.int32)).sum())
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def test_two_ranks_agree_with_the_rollout_and_repeat(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    engine = build_engine(fresh_model(tiny_qwen3_path, torch.bfloat16, page_size=PAGE))
    requests = [
        sample(random_prompt(p, i), f"s{i}", temperature=TEMPERATURE, max_tokens=n, seed=i)
        for i, (p, n) in enumerate(LENGTHS)
    ]
    done = run(engine, requests)
    rows = [
        {
            "prompt": list(r.prompt_ids),
            "tokens": [int(t) for t in done[r.sample_id].token_ids],
            "logprobs": [float(v) for v in done[r.sample_id].policy],
        }
        for r in requests
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    multiprocessing.spawn(rank_main, args=(str(tmp_path), str(tiny_qwen3_path)), nprocs=RANKS)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    total = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny_qwen3_path).parameters())
    assert sum(r["shard"] for r in results) == total, "each rank holds its half"
    for result in results:
        assert result["differ"] == result["split"] == 0 and result["repeats"] and result["dtype"] == "bfloat16"
        assert result["plain"] > 0, "not aligned it differs, so the test can fail"
