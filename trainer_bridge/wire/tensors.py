"""Named tensors as they are handed to an update: which can be sent, and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout import codec
from rollout.errors import InvalidRequest

NamedTensor = tuple[str, Any]
"""Name and value: a numpy array or a torch tensor on any device."""
NamedTensors = Iterable[NamedTensor] | Mapping[str, Any]
"""Pairs, or what a ``state_dict`` gives."""


def named_tensors(tensors: NamedTensors) -> list[NamedTensor]:
    """The pairs, each of which can be sent; all are looked at before the first goes out.

    Raises:
        InvalidRequest: something that is no pair, a name twice or none, or a value that is no whole tensor with bytes
            of its own, of a dtype that the wire has.
    """
    listed = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    for number, pair in enumerate(listed):
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise InvalidRequest(
                f"tensors[{number}] is {_kind(pair)}, not a pair of name and tensor; pass named_parameters() or a "
                "state_dict",
                field="tensors",
            )
        _check_name(pair[0], number)
        _check_value(*pair)
    names = [name for name, _ in listed]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidRequest(f"tensors named twice: {', '.join(twice)}; send each parameter once", field="tensors")
    return listed


def layout(value: Any) -> tuple[str, tuple[int, ...]]:
    """Dtype name (torch's, without prefix) and shape."""
    dtype = value.dtype.name if isinstance(value, np.ndarray) else str(value.dtype).removeprefix("torch.")
    return dtype, tuple(int(size) for size in value.shape)


def raw_bytes(value: Any) -> npt.NDArray[np.uint8]:
    """Little-endian, C-order bytes [nbytes]; no copy where the value already lies so in host memory."""
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value).reshape(-1)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        return array.view(np.uint8)
    import torch

    flat: npt.NDArray[np.uint8] = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def _check_name(name: Any, number: int) -> None:
    try:
        if isinstance(name, str) and name and name.encode():
            return
    except UnicodeEncodeError:
        pass
    raise InvalidRequest(f"tensors[{number}] has the name {name!r:.200}; send a parameter's name", field="tensors")


def _check_value(name: str, value: Any) -> None:
    reason = None if isinstance(value, np.ndarray) else _unsendable(value)
    if reason is not None:
        raise InvalidRequest(f"{name} is {reason}", field=f"tensors.{name}")
    dtype, _ = layout(value)
    if dtype not in codec.DTYPES:
        raise InvalidRequest(
            f"{name} is {dtype}; an update carries {', '.join(sorted(codec.DTYPES))}", field=f"tensors.{name}"
        )


def _unsendable(value: Any) -> str | None:
    """Why a value that is no numpy array has no bytes to send; None: it has."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"{_kind(value)}; send a torch tensor or a numpy array"
    if hasattr(value, "full_tensor"):
        return "a shard of a DTensor; gather it first, on all ranks: full_tensor()"
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"{_kind(value)}, which computes its values when asked; send a plain tensor"
    if value.is_meta:
        return "on the meta device and has no values; load or initialise it first"
    if value.layout is not torch.strided:
        return f"of layout {value.layout}; send it dense: to_dense()"
    return None


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
