"""``make soak-service``: SOAK_MINUTES (30) of mixed traffic; memory of the idle service must not grow by 1 %.

Every half minute the traffic stops, the service drains, and its memory is read. Growth counts from the end of the third
minute on, a tenth of the whole: before it, allocators and caches fill. Each end is the median of three readings,
so that neither a lucky nor an unlucky one decides.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from statistics import median

import torch

from rollout.assets import tiny_model
from rollout.errors import RolloutError
from rollout.types import SamplingParams, ScoreSequence, UpdatePolicy
from tests.hostile.child import Child, Reading, child_settings
from tests.services import tensors_of
from trainer_bridge.aio_client import AsyncRolloutClient

ROUND_S = 30.0
CALLERS = 12
GROWTH = 0.01
WARM_ROUNDS = 6
Weights = Sequence[Sequence[tuple[str, torch.Tensor]]]


async def one(client: AsyncRolloutClient, rng: random.Random, counts: Counter[str]) -> None:
    """One call of a random kind; refusals and aborts are part of it."""
    kind = rng.choice(["generate"] * 5 + ["score", "leave", "hasty", "bad", "abort"])
    prompt = [rng.randint(2, 60) for _ in range(rng.randint(1, 40))]
    sampling = SamplingParams(seed=rng.getrandbits(32), max_tokens=rng.randint(1, 40), ignore_eos=True)
    try:
        if kind == "generate":
            await client.generate(prompt, sampling, n=rng.randint(1, 4), top_logprobs=rng.choice([0, 0, 8]))
        elif kind == "score":
            await client.score([ScoreSequence((3, *prompt)) for _ in range(rng.randint(1, 3))])
        elif kind == "leave":
            async with aclosing(client.stream(prompt, sampling, n=2)) as events:
                async for _ in events:
                    break
        elif kind == "hasty":
            await asyncio.wait_for(client.generate(prompt, sampling), rng.random() / 50)
        elif kind == "bad":
            await client.generate([*prompt, 2**31], sampling)
        else:
            await client.abort(f"nobody-{rng.getrandbits(16)}")
    except (RolloutError, TimeoutError) as error:
        kind += f" ended by {type(error).__name__}"
    counts[kind] += 1


async def traffic(address: str, seconds: float, seed: int, weights: Weights, first: int, counts: Counter[str]) -> None:
    """Callers and one trainer for so long."""
    until = time.monotonic() + seconds

    async def caller(number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        # Some keep one connection, some make a new one for every few calls.
        while time.monotonic() < until:
            async with AsyncRolloutClient(address, timeout_s=60, client_id=f"caller-{number % 5}") as client:
                for _ in range(20 if number % 2 else 10**9):
                    if time.monotonic() >= until:
                        return
                    await one(client, rng, counts)

    async def trainer() -> None:
        async with AsyncRolloutClient(address, timeout_s=60) as client:
            for number, policy in enumerate(UpdatePolicy):
                await asyncio.sleep(seconds / 5)
                await client.update_weights(weights[number % len(weights)], version=first + number, policy=policy)
                counts[f"update {policy.value}"] += 1

    await asyncio.gather(trainer(), *(caller(number) for number in range(CALLERS)))


def soak(folder: Path, minutes: float, seed: int) -> tuple[list[Reading], Counter[str]]:
    """A reading after every round, and what was called."""
    settings = child_settings(folder, max_waiting=16)
    other = tiny_model("qwen3", folder / "other", seed=5)
    weights = [tensors_of(Path(settings["model"]["path"])), tensors_of(other)]
    counts: Counter[str] = Counter()
    readings: list[Reading] = []
    with Child(settings, folder / "log") as child:
        until = time.monotonic() + 60 * minutes
        while not readings or time.monotonic() < until:
            seconds = min(ROUND_S, 60 * minutes / 3)
            first = 1 + (1 + len(readings)) * len(UpdatePolicy)
            asyncio.run(traffic(child.address, seconds, seed + len(readings), weights, first, counts))
            readings.append(child.measure())
            last = readings[-1]
            print(f"  {sum(counts.values()):7} calls, idle with {last.rss / 2**20:.2f} MiB, {last}", flush=True)
    return readings, counts


def growth_of(readings: list[Reading]) -> tuple[float, float]:
    """Bytes after warming up, and at the end; of runs too short for both, the last reading of the first third."""
    sizes = [float(reading.rss) for reading in readings]
    if len(sizes) < WARM_ROUNDS + 5:
        return sizes[len(sizes) // 3], sizes[-1]
    return median(sizes[WARM_ROUNDS - 1 : WARM_ROUNDS + 2]), median(sizes[-3:])


def report(readings: list[Reading], counts: Counter[str]) -> bool:
    """Print the counts; whether all is well."""
    start, end = growth_of(readings)
    growth = end / start - 1
    half = readings[len(readings) // 2 :]
    rise = (half[-1].rss - half[0].rss) / 2**20 / max(1, len(half) - 1)
    held = [r for r in readings if r.live or r.held_pages or r.buffered]
    print(f"soak-service: {sum(counts.values())} calls, {len(readings)} readings: {dict(counts.most_common())}")
    print(f"  idle memory {start / 2**20:.2f} -> {end / 2**20:.2f} MiB ({growth:+.2%}, must stay below {GROWTH:.0%}); "
          f"second half: {rise:+.3f} MiB a round")  # fmt: skip
    print(f"  readings with samples, pages or bytes left over: {len(held)} {held[:3]}")
    return growth < GROWTH and not held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES", "30")))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"soak-service: seed {options.seed}, {options.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        readings, counts = soak(Path(folder), options.minutes, options.seed)
    return 0 if report(readings, counts) else 1


if __name__ == "__main__":
    sys.exit(main())
