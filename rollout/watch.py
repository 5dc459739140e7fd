"""Health by progress: a replica that stands still leaves rotation, though its process and its connection live."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rollout.config import Settings
from rollout.errors import ReplicaUnavailable, RolloutError
from rollout.slot import Slot

_LOOKS = 4
"""An answer's deadline is waited for in so many parts, so that a gateway that was itself stopped blames nobody."""


@dataclass(frozen=True, slots=True)
class ProgressLimits:
    """Deadlines on progress, in seconds."""

    interval_s: float = 1.0
    """between two looks at a replica"""
    answer_s: float = 30.0
    """for the worker's process to answer anything at all"""
    step_s: float = 300.0
    """for one turn of the engine: commands and one step"""


def progress_limits(settings: Settings) -> ProgressLimits:
    """As configured; looks are frequent against the shorter deadline."""
    worker = settings.worker
    interval = min(1.0, worker.answer_timeout_s / 4, worker.step_timeout_s / 4)
    return ProgressLimits(interval, worker.answer_timeout_s, worker.step_timeout_s)


async def watch(slot: Slot, limits: ProgressLimits, fence: Callable[[Slot, RolloutError], None]) -> None:
    """Look again and again, until the slot leaves or is fenced here."""
    while slot.alive:
        error = await _look(slot, limits)
        if error is not None:
            fence(slot, error)
            return
        await asyncio.sleep(limits.interval_s)


async def _look(slot: Slot, limits: ProgressLimits) -> RolloutError | None:
    call = asyncio.ensure_future(slot.call("busy_s"))
    try:
        for _ in range(_LOOKS):
            done, _ = await asyncio.wait({call}, timeout=limits.answer_s / _LOOKS)
            if done:
                break
        else:
            return ReplicaUnavailable(
                f"worker {slot.name} has not answered for {limits.answer_s:g} s (worker.answer_timeout_s): its process "
                "hangs or its node is cut off"
            )
        busy: float = call.result()
    except RolloutError as error:
        return error
    except Exception as error:
        return ReplicaUnavailable(f"worker {slot.name} answers nonsense: {error}")
    finally:
        call.cancel()
    if busy > limits.step_s:
        return ReplicaUnavailable(
            f"worker {slot.name} has been in one step for {busy:.0f} s, the limit is {limits.step_s:g} s "
            "(worker.step_timeout_s)"
        )
    return None
