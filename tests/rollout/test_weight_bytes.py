"""The compiled passes over the bytes of weights, against torch and numpy, at every size around a block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.weight_bytes import all_finite, blocks_of, copied, same_bytes
from rollout.weights import byte_view, dtype_name

BLOCK = 1 << 18
SIZES = (0, 1, 63, 64, 65, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, BLOCK, BLOCK + 17)


def random_bytes(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_number_is_finite_and_nothing_else(dtype: torch.dtype) -> None:
    """All sixteen upper bits, with the lowest bit clear and set: each alone, and one among zeros."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int64) << (8 * dtype.itemsize - 16)
    values = torch.cat((upper, upper | 1)).to(kind).view(dtype)
    raw, width, name = byte_view(values), dtype.itemsize, dtype_name(dtype)
    wanted = torch.isfinite(values).tolist()
    assert [all_finite(raw[i : i + width], name) for i in range(0, raw.size, width)] == wanted
    assert all_finite(byte_view(values[torch.isfinite(values)]), name) and not all_finite(raw, name)
    for bad in values[~torch.isfinite(values)][:: 97 if dtype.itemsize > 2 else 7]:
        row = torch.zeros(70, dtype=dtype)
        row[67] = bad
        shifted = np.concatenate([np.zeros(1, np.uint8), byte_view(row)])[1:]
        assert not all_finite(byte_view(row), name) and not all_finite(shifted, name)


def test_what_no_element_can_be_is_finite() -> None:
    nothing = np.empty(0, np.uint8)
    assert all_finite(nothing, "bfloat16") and all_finite(np.full(8, 255, np.uint8), "int64")


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_the_whole_once(size: int) -> None:
    data = random_bytes(size, 1)
    blocks = list(blocks_of(data))
    assert np.array_equal(np.concatenate([np.empty(0, np.uint8), *blocks]), data)
    assert all(0 < block.size <= BLOCK for block in blocks)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 7])
def test_a_copy_is_the_whole_and_nothing_beside_it(size: int, shift: int) -> None:
    """Also out of bytes that nobody may write, and from and to odd addresses."""
    source = np.frombuffer(bytes(shift) + random_bytes(size, 2).tobytes(), np.uint8)[shift:]
    room = np.full(size + 64, 0xA5, np.uint8)
    target = room[shift : shift + size]
    assert copied(source, target, room[shift : shift + size])
    assert np.array_equal(target, source) and same_bytes(target, source)
    assert (room[:shift] == 0xA5).all() and (room[shift + size :] == 0xA5).all()


@settings(deadline=None, max_examples=200)
@given(size=st.integers(1, 3 * (1 << 16)), data=st.data())
def test_one_bit_anywhere_is_seen(size: int, data: st.DataObject) -> None:
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    source = random_bytes(size, 3)
    other = source.copy()
    assert same_bytes(source, other)
    other[at] ^= 1 << bit
    assert not same_bytes(source, other)
    # What is read back lies elsewhere: the write went astray.
    assert not copied(source, np.zeros(size, np.uint8), other)
    assert not copied(source, other, np.zeros(size, np.uint8)) or not source.any()


def test_sizes_that_differ() -> None:
    one, other = random_bytes(5, 4), random_bytes(6, 4)
    assert not same_bytes(one, other[:4]) and not same_bytes(other[:5], other)
    with pytest.raises(ValueError, match="5, 6 and 6 bytes"):
        copied(one, other, other)
