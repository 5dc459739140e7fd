"""What may be handed to an update, and the sender's own failure while it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rollout.errors import InvalidRequest, RolloutError
from tests.fakes.backend import FakeBackend
from tests.fakes.server import address, serving
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.client import RolloutClient
from trainer_bridge.wire import named_tensors, tensors, translated
from trainer_bridge.wire.outgoing import Outgoing

GOOD = ("a", np.arange(6, dtype=np.float32))


class Sharded(torch.Tensor):
    """As a DTensor looks: it has the shape of the whole and the bytes of a part."""

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("a collective operation, which only the caller can start on all ranks")


def shard() -> torch.Tensor:
    return torch.zeros(4).as_subclass(Sharded)


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.empty(4, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "to_dense"),
        (shard(), "full_tensor"),
        (fake(), "FakeTensor, which computes"),
        ([1.0, 2.0], "a list; send a torch tensor"),
        (np.float32(1), "numpy.float32; send"),
        (None, "NoneType; send"),
        (torch.zeros(2, dtype=torch.complex64), "complex64; an update carries"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "float8_e4m3fn; an update carries"),
        (np.array(["a"]), "str32; an update carries"),
        (np.array([object()]), "object; an update carries"),
    ],
)
def test_a_value_without_bytes_of_its_own_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"layer.weight is .*{words}") as caught:
        named_tensors([GOOD, ("layer.weight", value)])
    assert caught.value.field == "tensors.layer.weight"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([GOOD, ("", GOOD[1])], r"tensors\[1\] has the name ''"),
        ([(3, GOOD[1])], r"tensors\[0\] has the name 3"),
        ([(b"a", GOOD[1])], r"has the name b'a'"),
        ([("\ud800", GOOD[1])], r"has the name '\\ud800'"),
        (["ab"], r"tensors\[0\] is a str, not a pair"),
        ([GOOD[1]], r"is a numpy.ndarray, not a pair"),
        ([("a",)], r"is a tuple, not a pair"),
        ([GOOD, GOOD], "named twice: a"),
    ],
)
def test_what_is_no_pair_of_a_name_and_a_value(given: list[Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        named_tensors(given)


@pytest.mark.parametrize(
    "given", [{"a": GOOD[1]}, MappingProxyType({"a": GOOD[1]}), [GOOD], [list(GOOD)], iter([GOOD])]
)
def test_pairs_and_mappings(given: Any) -> None:
    ((name, value),) = named_tensors(given)
    assert name == "a" and value is GOOD[1]


def test_every_way_a_whole_tensor_lies() -> None:
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    lying: Mapping[str, Any] = {
        "parameter": torch.nn.Parameter(whole.clone()),
        "turned": whole.t().contiguous().t(),
        "negated": torch.imag(torch.complex(torch.zeros(3, 4), -whole).conj()),
        "numpy": whole.numpy(),
        "big-endian": whole.numpy().astype(">f4"),
    }
    assert lying["negated"].is_neg()
    for name, value in named_tensors(lying):
        assert tensors.layout(value) == ("float32", (3, 4)), name
        assert tensors.raw_bytes(value).tobytes() == whole.numpy().tobytes(), name


# ---- the sender's own failure ----------------------------------------------------------------------------------


class OutOfMemory(Exception):
    """As a device raises while a tensor is copied to the host."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Tensors whose last cannot be read, after messages of the others went out."""
    read = tensors.raw_bytes

    def raw_bytes(value: Any) -> Any:
        if value.dtype == np.int64:
            raise OutOfMemory("device out of memory")
        return read(value)

    monkeypatch.setattr("trainer_bridge.wire.buckets.raw_bytes", raw_bytes)
    return [("a", np.zeros(1 << 19, np.float32)), ("b", np.zeros(3, np.int64))]


async def test_the_senders_own_failure_is_what_both_clients_raise(failing: list[tuple[str, Any]]) -> None:
    backend = FakeBackend()
    async with serving(backend) as server, AsyncRolloutClient(address(server), timeout_s=30) as client:
        with pytest.raises(OutOfMemory, match="device out of memory"):
            await client.update_weights(failing, version=2)
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

        def blocking() -> None:
            with RolloutClient(address(server), timeout_s=30) as other, pytest.raises(OutOfMemory):
                other.update_weights(failing, version=2)

        await asyncio.to_thread(blocking)
        assert (await client.update_weights([GOOD], version=2)).version == 2


async def test_a_cancelled_caller_stays_cancelled() -> None:
    """Whoever ends the caller's task must see it end, whatever the sender met at the same time."""
    outgoing = Outgoing(iter(()))
    outgoing.failure = OutOfMemory()
    begun = asyncio.Event()

    async def sending() -> None:
        with outgoing.sent(), translated():
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(sending())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_what_the_service_raised_stays_what_it_was() -> None:
    def messages() -> Iterator[bytes]:
        yield b"x"

    outgoing = Outgoing(messages())
    assert list(outgoing) == [b"x"] and outgoing.failure is None
    with pytest.raises(RolloutError, match="theirs"), outgoing.sent():
        raise RolloutError("theirs")
