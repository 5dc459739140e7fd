"""`rollout/garbage.py`: what a served process has at its start is not looked at again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rollout.garbage import OLDEST_EVERY, settle_heap


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_what_is_there_is_left_alone_and_the_oldest_generation_comes_rarely() -> None:
    kept: list[object] = []
    kept.append(kept)
    # Control: before, a collection looks at it.
    assert any(one is kept for generation in range(3) for one in gc.get_objects(generation=generation))
    settle_heap()
    assert gc.get_freeze_count() > 0
    assert not any(one is kept for generation in range(3) for one in gc.get_objects(generation=generation))
    assert gc.get_threshold()[2] == OLDEST_EVERY


def test_garbage_made_later_is_still_collected() -> None:
    settle_heap()
    loop: list[object] = []
    loop.append(loop)
    del loop
    assert gc.collect() >= 1
