"""Taps on every operation of a replayed sequence: digests row by row, and tensors where they are asked for.

A row's 64-bit digest costs a hash of its bytes, so two sides can compare everything without shipping activations, and
ask for one tensor once they know which. Names do not depend on the side: ``layers.3.q_proj``, ``layers.3.keys`` (after
rotation, as attention reads them), ``layers.3.output``, ``norm``, ``logits``. Replays use pages of their own, so a
server can answer between two steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from rollout.activation_log import digest_rows
from rollout.attention import AttentionStep, PackedStep, PagedStep
from rollout.errors import InvalidRequest
from rollout.kernels.base import Decoder
from rollout.model import SharedModel
from rollout.placement import place
from rollout.replay_pages import ReplayPages
from rollout.types import UInt64Array

ForwardPath = Literal["fused", "modules", "training"]
"""The kernel set's own forward, its modules over pages, or the packed forward of a trainer."""
LOGITS = "logits"
_LAYER_TAPS = ("keys", "values", "output")
_RENAMED = {"embed_tokens": "embed", "act_fn": "act"}
_INPUT_TAPS = {"post_attention_layernorm": "attn_residual", "down_proj": "gated"}
"""Values no module returns: they are seen where the next module takes them."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What to replay and what to look at. S: tokens of the sequence."""

    token_ids: tuple[int, ...]
    """[S]"""
    positions: tuple[int, ...] | None = None
    """[S]; None: 0, 1, 2, ..."""
    logits_from: int = 0
    """logits are computed from this row on"""
    path: ForwardPath = "modules"
    decode_from: int | None = None
    """rows from here on are computed one at a time, as decoding does; None: all in one pass. Not for training."""
    company: tuple[tuple[int, ...], ...] = ()
    """other sequences in every pass, before and after the one traced"""
    within: str | None = None
    """None: a few taps of every layer. Else all taps whose name starts with this, such as "layers.3.".  """
    tensors: tuple[str, ...] = ()
    """taps whose values are returned too"""
    chunk: int | None = None
    """rows before ``decode_from`` go in passes of this many, as a chunked prefill does; None: in one pass"""


@dataclass(frozen=True, slots=True)
class Trace:
    """What the taps saw, in order of execution."""

    digests: Mapping[str, UInt64Array]
    """tap -> uint64 [S]; 0 where a row was not computed"""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """tap -> [S, ...] in the dtype it was computed in; ``logits`` only rows from ``logits_from`` on"""


@dataclass(slots=True)
class _Recorder:
    """Collects the traced sequence's rows, pass by pass."""

    within: str | None
    tensors: frozenset[str]
    first: int = 0
    last: int = 0
    hashed: dict[str, list[UInt64Array]] = field(default_factory=dict)
    kept: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        if self.within is not None:
            return name.startswith(self.within) or name in self.tensors
        return not name.startswith("layers.") or name.split(".")[2] in _LAYER_TAPS or name in self.tensors

    def add(self, name: str, value: torch.Tensor) -> None:
        """``value``: [T, ...] rows of the pass."""
        if not self.wants(name):
            return
        rows = value[self.first : self.last]
        self.hashed.setdefault(name, []).append(digest_rows(rows))
        if name in self.tensors:
            self.kept.setdefault(name, []).append(rows.detach().clone())


@dataclass(frozen=True, slots=True)
class _TappedStep:
    """Attention metadata that also shows what attention read and gave."""

    inner: AttentionStep
    recorder: _Recorder

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """See ``AttentionStep.attend``; q, k, v, out [T, heads, D]."""
        for name, value in (("queries", q), ("keys", k), ("values", v)):
            self.recorder.add(f"layers.{layer}.{name}", value)
        out = self.inner.attend(layer, q, k, v, scale)
        self.recorder.add(f"layers.{layer}.attention", out)
        return out


def tap_name(module: str) -> str:
    """``model.layers.0.self_attn.q_proj`` -> ``layers.0.q_proj``."""
    parts = [p for p in module.removeprefix("model.").split(".") if p not in ("self_attn", "mlp")]
    return ".".join([*parts[:-1], _RENAMED.get(parts[-1], parts[-1])])


def module_name(tap: str, hf: Any) -> str:
    """The module behind a tap, for messages; the tap itself where it is no module's output."""
    return next((name for name, _ in hf.named_modules() if name and tap_name(name) == tap), tap)


@contextlib.contextmanager
def _hooked(model: SharedModel, recorder: _Recorder) -> Iterator[None]:
    handles: list[Any] = []

    def after(tap: str) -> Any:
        def hook(_: Any, __: Any, out: Any) -> None:
            if tap == "rotary_emb":
                for part, value in zip(("rope.cos", "rope.sin"), out, strict=True):
                    recorder.add(part, value[0])
            else:
                recorder.add(tap, (out[0] if isinstance(out, tuple) else out)[0])

        return hook

    def before(tap: str) -> Any:
        return lambda _, args: recorder.add(tap, args[0][0])

    try:
        for name, module in model.hf.get_decoder().named_modules():
            leaf = name.rpartition(".")[2]
            tap = tap_name(name) if name else ""
            if leaf in _INPUT_TAPS:
                handles.append(module.register_forward_pre_hook(before(tap.removesuffix(leaf) + _INPUT_TAPS[leaf])))
            is_layer = name.startswith("layers.") and name.count(".") == 1
            if is_layer or (name and not list(module.children())):
                handles.append(module.register_forward_hook(after(f"{tap}.output" if is_layer else tap)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check(request: TraceRequest, vocab: int, context: int) -> None:
    size = len(request.token_ids)
    if not size:
        raise InvalidRequest("a trace needs at least one token", field="token_ids")
    for name, ids in (("token_ids", request.token_ids), *(("company", c) for c in request.company)):
        if not ids or not (min(ids) >= 0 and max(ids) < vocab):
            raise InvalidRequest(f"{name} must be one or more ids below {vocab}", field=name)
        # Kernels look rotations up in a table as long as the context.
        if len(ids) > context:
            raise InvalidRequest(f"{name} has {len(ids)} ids, the context is {context}", field=name)
    positions = request.positions
    if positions is not None and (len(positions) != size or not (min(positions) >= 0 and max(positions) < context)):
        raise InvalidRequest(f"positions must be {size} numbers below the context of {context}", field="positions")
    if not 0 <= request.logits_from <= size:
        raise InvalidRequest(f"logits_from = {request.logits_from} is outside [0, {size}]", field="logits_from")
    if request.chunk is not None and request.chunk < 1:
        raise InvalidRequest(f"chunk = {request.chunk} must be at least 1", field="chunk")


class Tracer:
    """Replays sequences on one model. Call in that side's own mode (invariant or not), without gradients."""

    def __init__(self, model: SharedModel, decoder: Decoder | None = None) -> None:
        self._model = model
        self._decoder = decoder

    @torch.no_grad()
    def trace(self, request: TraceRequest) -> Trace:
        """Replay and look.

        Raises:
            InvalidRequest: an empty sequence, ids, positions or rows that the model does not have, or a path that this
                kernel set does not.
        """
        size = len(request.token_ids)
        _check(request, self._model.spec.vocab_size, self._model.spec.context_length)
        # A replay carries no images: placeholders would pass for text.
        place(request.token_ids, (), self._model.vision.rules if self._model.vision else None, "token_ids")
        if request.path == "fused" and self._decoder is None:
            raise InvalidRequest("this kernel set has no fused forward to trace; use path modules", field="path")
        recorder = _Recorder(request.within, frozenset(request.tensors))
        hidden = self._training(request, recorder) if request.path == "training" else self._rollout(request, recorder)
        logits = self._logits(request, hidden)
        digests = {name: np.concatenate(parts) for name, parts in recorder.hashed.items()}
        tensors = {name: torch.cat(parts) for name, parts in recorder.kept.items()}
        if recorder.wants(LOGITS) or request.within == LOGITS:
            vocab = self._model.spec.vocab_size
            digests[LOGITS] = np.zeros(size, np.uint64)
            digests[LOGITS][request.logits_from :] = digest_rows(logits[:, :vocab].float())
        if LOGITS in request.tensors:
            tensors[LOGITS] = logits
        return Trace(digests, tensors)

    def _logits(self, request: TraceRequest, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden[request.logits_from :]
        head = self._decoder.logits if request.path == "fused" and self._decoder is not None else self._model.logits
        # One pass a row where rows were decoded, as the engine does.
        if request.decode_from is None or request.path == "training":
            return head(rows)
        return torch.cat([head(row[None]) for row in rows]) if len(rows) else head(rows)

    def _ids(self, request: TraceRequest) -> tuple[torch.Tensor, torch.Tensor]:
        positions = request.positions if request.positions is not None else range(len(request.token_ids))
        return torch.tensor(request.token_ids), torch.tensor(tuple(positions))

    def _training(self, request: TraceRequest, recorder: _Recorder) -> torch.Tensor:
        ids, positions = self._ids(request)
        others = [torch.tensor(c) for c in request.company]
        # One alone goes in front: what leaks between sequences leaks to those behind.
        half = (len(others) + 1) // 2
        parts = [*others[:half], ids, *others[half:]]
        places = [torch.arange(len(p)) for p in others[:half]] + [positions]
        places += [torch.arange(len(p)) for p in others[half:]]
        edges = torch.tensor([0, *(len(p) for p in parts)]).cumsum(0)
        recorder.first, recorder.last = int(edges[half]), int(edges[half + 1])
        step = _TappedStep(PackedStep(self._model.kernels, edges.to(torch.int32)), recorder)
        with _hooked(self._model, recorder):
            hidden = self._model.hidden_states(torch.cat(parts), torch.cat(places), step)
        return hidden[recorder.first : recorder.last]

    # ---- the rollout's side -------------------------------------------------------------------------------------

    def _rollout(self, request: TraceRequest, recorder: _Recorder) -> torch.Tensor:
        ids, positions = self._ids(request)
        lengths = [len(ids), *(len(c) for c in request.company)]
        pages = ReplayPages(self._model.kernels, self._model.spec, lengths)
        start = len(ids) if request.decode_from is None else max(1, min(request.decode_from, len(ids)))
        chunk = min(request.chunk or start, start)
        ranges = [(n, min(n + chunk, start)) for n in range(0, start, chunk)]
        ranges += [(n, n + 1) for n in range(start, len(ids))]
        parts = [
            self._pass(request, recorder, pages, (ids[a:b], positions[a:b], a)) for a, b in ranges
        ]  # fmt: skip
        if request.path == "fused":
            recorder.first, recorder.last = 0, len(ids)
            for layer in range(self._model.spec.num_layers):
                keys, values = pages.store.read(layer, pages.slots(0, 0, len(ids)))
                recorder.add(f"layers.{layer}.keys", keys)
                recorder.add(f"layers.{layer}.values", values)
            recorder.add("norm", torch.cat(parts))
        return torch.cat(parts)

    def _pass(
        self,
        request: TraceRequest,
        recorder: _Recorder,
        pages: ReplayPages,
        rows: tuple[torch.Tensor, torch.Tensor, int],
    ) -> torch.Tensor:
        """One step: the traced rows first, then all of every stranger."""
        ids, positions, first = rows
        others = [torch.tensor(c) for c in request.company]
        input_ids = torch.cat([ids, *others])
        places = torch.cat([positions, *(torch.arange(len(o)) for o in others)])
        slots = torch.cat([pages.slots(0, first, first + len(ids)), *(
            pages.slots(i, 0, len(o)) for i, o in enumerate(others, 1)
        )])  # fmt: skip
        seqlens = torch.tensor([first + len(ids), *(len(o) for o in others)], dtype=torch.int32)
        cu = torch.tensor([0, len(ids), *(len(o) for o in others)]).cumsum(0).to(torch.int32)
        if request.path == "fused":
            assert self._decoder is not None
            hidden = self._decoder.hidden_states(input_ids, places, slots, pages.store, pages.table, seqlens, cu)
            return hidden[: len(ids)]
        recorder.first, recorder.last = 0, len(ids)
        step = PagedStep(self._model.kernels, pages.store, slots, pages.table, seqlens, cu)
        with _hooked(self._model, recorder):
            return self._model.hidden_states(input_ids, places, _TappedStep(step, recorder))[: len(ids)]
