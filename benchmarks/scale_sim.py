"""``make scale``: one RL step simulated on 8 to 4,096 NPUs; what breaks first. Design and figures: docs/scale.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.scale_cluster import OURS, POLICIES, Cluster, Parameters

SIZES = (8, 64, 512, 4096)


def broadcast_s(size: int, p: Parameters, shape: str, fanout: int = 2) -> float:
    """Seconds until every replica has the weights.

    star: the trainer sends all copies through one link. tree: a host passes each chunk on to ``fanout`` others as it
    comes, so only the first chunk pays for the depth.
    """
    once = p.weights_bytes / p.link_bytes_s
    if shape == "star":
        return size * once
    depth = math.ceil(math.log(size * (fanout - 1) + 1, fanout)) if fanout > 1 else size
    return fanout * once + (depth - 1) * fanout * p.chunk_bytes / p.link_bytes_s


def servers_needed(tokens_s: float, p: Parameters, chunk_tokens: int) -> int:
    """Server processes that relay this many tokens a second."""
    return max(1, math.ceil(tokens_s / chunk_tokens / p.relay_chunks_s))


def simulate(sizes: tuple[int, ...], parameters: Parameters, seed: int) -> list[dict[str, Any]]:
    """Every size under every policy, and every size without deaths."""
    rows = []
    for size in sizes:
        for policy in POLICIES:
            outcome = Cluster(size, policy, parameters, seed).run()
            calm = Cluster(size, policy, parameters, seed, deaths=False).run() if policy == OURS else None
            rows.append(
                {"npus": size, "policy": policy, **dataclasses.asdict(outcome), "tokens_s": outcome.tokens_s}
                | ({"makespan_without_deaths_s": calm.makespan_s} if calm else {})
            )
    return rows


def main() -> None:
    """Simulate, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parameters", type=Path, help="JSON with fields of Parameters to change")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/scale.json"))
    args = parser.parse_args()
    changed = json.loads(args.parameters.read_text()) if args.parameters else {}
    p = Parameters(**changed)
    rows = simulate(tuple(args.sizes), p, args.seed)
    table = Table(title="one RL step")
    for name in (
        "NPUs",
        "policy",
        "makespan s",
        "95 % s",
        "tokens/s/NPU",
        "busy",
        "tail",
        "prefix hits",
        "deaths",
        "replayed",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for r in rows:
        shares = (f"{r[name]:.0%}" for name in ("busy", "tail", "hits"))
        times = (f"{r['makespan_s']:.0f}", f"{r['most_s']:.0f}", f"{r['tokens_s'] / r['npus']:.0f}")
        table.add_row(str(r["npus"]), r["policy"], *times, *shares, str(r["deaths"]), f"{r['replayed']:.2%}")
    console = Console(width=140)
    console.print(table)
    spread = Table(title="weights and servers")
    for name in ("NPUs", "star s", "tree s", "servers, 1 token a message", f"servers, {p.chunk_tokens}"):
        spread.add_column(name, justify="right")
    extra: list[dict[str, Any]] = []
    for size in args.sizes:
        rate = next(r["tokens_s"] for r in rows if r["npus"] == size and r["policy"] == OURS)
        star, tree = (broadcast_s(size, p, shape) for shape in ("star", "tree"))
        extra.append({"npus": size, "star_s": star, "tree_s": tree, "servers": {}})
        for chunk in (1, p.chunk_tokens):
            extra[-1]["servers"][chunk] = servers_needed(rate, p, chunk)
        counts = (str(n) for n in extra[-1]["servers"].values())
        spread.add_row(str(size), f"{star:.1f}", f"{tree:.1f}", *counts)
    console.print(spread)
    result = {"seed": args.seed, "parameters": dataclasses.asdict(p), "steps": rows, "spread": extra}
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
