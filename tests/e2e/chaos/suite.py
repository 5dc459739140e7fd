"""``make chaos``: seeded fault schedules against a real service; exit 1 where anything is lost, doubled or differs.

``python -m tests.e2e.chaos.suite --first 7 --schedules 1`` plays one again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rollout.assets import tiny_model
from tests.e2e.chaos.reference import Reference
from tests.e2e.chaos.schedule import KINDS, Rig, Schedule, request_of
from tests.e2e.chaos.tally import Tally
from tests.e2e.chaos.world import running_world
from tests.services import tensors_of, version_path


async def run_schedules(folder: Path, model: Path, seeds: range, tally: Tally) -> None:
    """All on one service; the cluster is there. AssertionError at the first schedule that hangs."""
    other = version_path(model, 1)
    rig_weights = [tensors_of(model), tensors_of(other)]
    reference = Reference([model, other])
    # Compiles the kernels, which on a fresh machine takes two replicas at a time longer than any wait here may be.
    reference.whole(request_of(seeds[0]), 0, 0)
    async with running_world(folder, model) as world:
        rig = Rig(world, reference, rig_weights, folder)
        for seed in seeds:
            before = tally.seconds
            await Schedule(rig, seed, tally).run()
            print(f"  seed {seed} ({'+'.join(KINDS[seed % len(KINDS)])}): {tally.seconds - before:.1f} s", flush=True)


@contextmanager
def local_cluster() -> Iterator[None]:
    """A Ray cluster of this process."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.pop("RAY_ADDRESS", None)
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield
    finally:
        ray.shutdown()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=int(os.environ.get("CHAOS_SCHEDULES", "200")))
    parser.add_argument("--first", type=int, default=0, help="first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally = Tally()
    seeds = range(options.first, options.first + options.schedules)
    with tempfile.TemporaryDirectory() as name, local_cluster():
        folder = Path(name)
        try:
            asyncio.run(run_schedules(folder, tiny_model("qwen3", folder / "tiny-qwen3"), seeds, tally))
        except (AssertionError, TimeoutError) as error:
            print(f"FAILED after {tally.schedules} schedules: {type(error).__name__} {error}", flush=True)
            return 1
        finally:
            print(f"chaos: {tally}", flush=True)
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())
