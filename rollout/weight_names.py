"""C4: what a sent tensor's name means. Every rule about names stands here, and nothing is skipped in silence.

In this order; the first that fits decides:
1. Wrappers (``_orig_mod``, ``_fsdp_wrapped_module``, ``_checkpoint_wrapped_module``, a leading ``module``) are dropped.
2. A canonical name (``SharedModel.parameters``) is that parameter.
3. ``lm_head.weight`` of a tied model is a second copy of the embedding: compared with it, not written.
4. ``qkv_proj`` and ``gate_up_proj`` are their parts one below the other, in that order.
5. A buffer (``inv_freq``) follows from the config: compared with the model's own, not written.
6. ``model.`` in front may be missing, or be there once too often; then 2 to 5 again.
Anything else is refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollout.errors import WeightUpdateError

HEAD_NAME = "lm_head.weight"
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_LAYER_ROTARY = re.compile(r"model\.layers\.(\d+)\.self_attn\.(rotary_emb\.inv_freq)")
"""Where older checkpoints keep a copy a layer."""
_PREFIX = "model."


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one sent tensor is."""

    parameters: tuple[str, ...] = ()
    """canonical names that it fills, one below the other"""
    same_as: str = ""
    """canonical parameter whose bytes it must have"""
    buffer: str = ""
    """buffer of the model whose bytes it must have"""
    claim: str = ""
    """what may come once only; canonical names are claimed by ``parameters``"""


class NameRules:
    """The rules for one model.

    Args:
        parameters: canonical names.
        buffers: names of the model's buffers.
        tied_to: canonical name of the embedding that the head shares; "": the head is a parameter of its own.
    """

    def __init__(self, parameters: Iterable[str], *, buffers: Iterable[str] = (), tied_to: str = "") -> None:
        self._parameters = frozenset(parameters)
        self._buffers = frozenset(buffers)
        self._tied_to = tied_to

    def meaning(self, name: str) -> Meaning:
        """What a tensor of this name is.

        Raises:
            WeightUpdateError: no rule fits.
        """
        for candidate in _spellings(name):
            found = self._plain(candidate)
            if found is not None:
                return found
        near = difflib.get_close_matches(name, self._parameters, n=1)
        known = f"did you mean {near[0]!r}?" if near else f"it has {len(self._parameters)}"
        raise WeightUpdateError(
            f"the model has no parameter {name[:200]!r}; {known} (rules for names: docs/weights.md)", field=name[:200]
        )

    def _plain(self, name: str) -> Meaning | None:
        if name in self._parameters:
            return Meaning(parameters=(name,))
        if name == HEAD_NAME and self._tied_to:
            return Meaning(same_as=self._tied_to, claim=name)
        for fused, parts in _FUSED.items():
            if f".{fused}." in name:
                names = tuple(name.replace(f".{fused}.", f".{part}.") for part in parts)
                return Meaning(parameters=names) if self._parameters.issuperset(names) else None
        if name in self._buffers:
            return Meaning(buffer=name, claim=name)
        layered = _LAYER_ROTARY.fullmatch(name)
        if layered and f"{_PREFIX}{layered[2]}" in self._buffers and self._has_layer(layered[1]):
            return Meaning(buffer=f"{_PREFIX}{layered[2]}", claim=name)
        return None

    def _has_layer(self, number: str) -> bool:
        # As the model spells it: "007" is no layer.
        return any(name.startswith(f"{_PREFIX}layers.{number}.") for name in self._parameters)


def _spellings(name: str) -> Iterator[str]:
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    plain = ".".join(parts[1:] if parts[:1] == ["module"] else parts)
    yield plain
    yield _PREFIX + plain
    if plain.startswith(_PREFIX):
        yield plain.removeprefix(_PREFIX)
