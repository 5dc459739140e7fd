"""Refused callers come back one after another, within a bound."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.retry_pace import BACK_PER_S, EARLIEST_S, LATEST_S, RetryPace


def test_a_herd_is_spread_out() -> None:
    """All refused in one instant: so many a second come back, none before the earliest time."""
    pace = RetryPace(clock=lambda: 50.0)
    delays = [pace.next_delay_s() for _ in range(3 * BACK_PER_S)]
    assert delays == sorted(set(delays)) and delays[0] == EARLIEST_S
    for second in range(3):
        assert sum(EARLIEST_S + second <= d + 1e-9 < EARLIEST_S + second + 1 for d in delays) == BACK_PER_S


def test_whoever_is_refused_alone_comes_back_soon() -> None:
    now = [0.0]
    pace = RetryPace(clock=lambda: now[0])
    for _ in range(2000):
        pace.next_delay_s()
    now[0] = LATEST_S
    assert pace.next_delay_s() <= EARLIEST_S + 1 / BACK_PER_S


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 2), min_size=1, max_size=300))
def test_nobody_waits_longer_than_the_latest_time(gaps: list[float]) -> None:
    now = [0.0]
    pace = RetryPace(clock=lambda: now[0])
    for gap in gaps:
        now[0] += gap
        # Floods: far more than may come back.
        for _ in range(40):
            assert EARLIEST_S - 1e-9 <= pace.next_delay_s() <= LATEST_S + 1e-9


def test_beyond_the_bound_times_are_drawn() -> None:
    drawn: list[tuple[float, float]] = []

    def draw(least: float, most: float) -> float:
        drawn.append((least, most))
        return 4.5

    pace = RetryPace(clock=lambda: 0.0, draw=draw)
    places = int((LATEST_S - EARLIEST_S) * BACK_PER_S)
    for _ in range(places - 1):
        assert pace.next_delay_s() <= LATEST_S
    assert not drawn
    assert [pace.next_delay_s() for _ in range(5)][-1] == 4.5 and set(drawn) == {(EARLIEST_S, LATEST_S)}
