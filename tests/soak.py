"""``make soak``: random schedules for SOAK_MINUTES (10), every one with a new seed; exit 1 at the first that fails.

``python -m tests.soak --seed N --schedules 1`` plays one again.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import torch

from rollout.assets import tiny_model
from tests.jitter import Rig, Tally, check

BATCH = 50
"""Schedules between two lines of progress."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("SOAK_MINUTES", "10")))
    parser.add_argument("--seed", type=int, default=None, help="first seed; drawn and printed when not given")
    parser.add_argument("--schedules", type=int, default=None, help="stop after so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = secrets.randbelow(2**40) if options.seed is None else options.seed
    print(f"soak: seeds from {first}, {options.minutes:g} minutes", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        rigs = [
            Rig(tiny_model(kind, Path(folder) / f"{kind}-{dtype}"), dtype)
            for kind, dtype in (("qwen3", torch.float32), ("llama", torch.bfloat16))
        ]
        seed, batch = first, BATCH
        while time.monotonic() < deadline and (options.schedules is None or tally.schedules < options.schedules):
            if options.schedules is not None:
                batch = min(BATCH, options.schedules - tally.schedules)
            try:
                # A seed always meets the same model, so that it can be played again.
                for each in range(seed, seed + batch):
                    check(rigs[each % 2], (each,), tally)
            except AssertionError as error:
                print(f"FAILED {error}", flush=True)
                return 1
            seed += batch
            print(f"  {tally}", flush=True)
    print(f"soak: {tally}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
