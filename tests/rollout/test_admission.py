"""What no queue could hold is refused at the door, before any engine is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.admission import Admission, AdmittingBackend, admission_of
from rollout.config import Settings
from rollout.errors import CapacityExceeded, InvalidRequest
from rollout.metrics import PrometheusMeter
from rollout.types import GenerateRequest, SamplingParams, ScoreRequest, ScoreSequence
from tests.fakes.backend import FakeBackend

SETTINGS = Settings.model_validate(
    {"engine": {"max_running": 2, "max_waiting": 4, "max_waiting_per_client": 2}, "worker": {"count": 2}}
)


def request(name: str, n: int = 1, client: str = "a") -> GenerateRequest:
    return GenerateRequest(name, (3,), SamplingParams(seed=1, max_tokens=4), n=n, client=client)


def test_what_the_engines_hold_together() -> None:
    admission = admission_of(SETTINGS)
    assert (admission._most, admission._most_per_client) == (12, 8)
    whole = admission_of(Settings())
    assert (whole._most, whole._most_per_client) == (32 + 4096, 32 + 4096 - 512)


def test_room_is_given_back_however_a_call_ends() -> None:
    admission = Admission(4, 3)
    with admission.hold("a", 3):
        with pytest.raises(CapacityExceeded, match="'a' has 3 live samples"), admission.hold("a", 1):
            pass
        with pytest.raises(CapacityExceeded, match="3 samples are live and 2 more"), admission.hold("b", 2):
            pass
        with pytest.raises(KeyError), admission.hold("b", 1):
            raise KeyError
        with admission.hold("b", 1):
            pass
    assert admission._live == 0 and admission._by_client == {}


async def test_the_backend_is_not_asked() -> None:
    backend = FakeBackend()
    backend.hold()
    inner: Any = backend
    admitting = AdmittingBackend(inner, PrometheusMeter(), SETTINGS)

    async def read(wanted: GenerateRequest) -> int:
        return len([event async for event in admitting.generate(wanted)])

    live = asyncio.create_task(read(request("one", n=8)))
    await asyncio.wait_for(backend.reached.wait(), 20)
    with pytest.raises(CapacityExceeded, match="max_waiting_per_client"):
        await read(request("two"))
    with pytest.raises(CapacityExceeded, match=r"engine\.max_waiting"):
        await read(request("three", n=5, client="b"))
    with pytest.raises(CapacityExceeded):
        await admitting.score(ScoreRequest("four", (ScoreSequence((3, 4)),) * 5, client="b"))
    assert [seen.request_id for seen in backend.seen] == ["one"]
    backend.gate.set()
    assert await live
    assert await read(request("two"))


async def test_what_never_fits_is_not_told_to_wait() -> None:
    """4,000 sequences were answered "wait for some to end" by an idle service; a client that did waited for ever."""
    admission = Admission(4, 3)
    with (
        pytest.raises(InvalidRequest, match=r"4 samples or sequences in one call.*hold 3.*send fewer"),
        admission.hold("a", 4),
    ):
        pass
    with admission.hold("a", 3):
        pass
    backend: Any = FakeBackend()
    admitting = AdmittingBackend(backend, PrometheusMeter(), SETTINGS)
    with pytest.raises(InvalidRequest, match="send fewer"):
        await admitting.score(ScoreRequest("s", (ScoreSequence((3, 4)),) * 9))
    assert not backend.seen
