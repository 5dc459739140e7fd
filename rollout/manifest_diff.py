"""Two manifests in, words out: what differs, whether it can change a log-prob, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Meaning:
    changes_bits: bool
    words: str


# Longest matching prefix decides; a key that matches none can change bits, since nobody has shown that it cannot.
_MEANINGS: Mapping[str, _Meaning] = {
    "attention.": _Meaning(True, "attention sums keys in another order or with another mask"),
    "device.": _Meaning(True, "other instructions round or sum differently"),
    "device.name": _Meaning(False, "the name itself changes nothing; the instruction set is compared apart"),
    "dtype.": _Meaning(True, "values are rounded to another type"),
    "dtype.lm_head": _Meaning(True, "logits are rounded to another type before the log-prob"),
    "environment.": _Meaning(True, "this variable chooses kernels or orders of summation"),
    "host.": _Meaning(False, "where a process runs enters no arithmetic"),
    "kernels.": _Meaning(True, "an operation is computed by another implementation"),
    "kernels.name": _Meaning(True, "another kernel set computes everything"),
    "kernels.op.attention": _Meaning(True, "attention runs another kernel or another block of keys"),
    "kernels.op.source": _Meaning(True, "the kernels' source differs: two builds of zerodrift"),
    "kernels.page_size": _Meaning(True, "attention reduces keys in blocks of one page, so the order of sums differs"),
    "library.": _Meaning(True, "another version may choose other kernels"),
    "library.grpcio": _Meaning(False, "transport only"),
    "library.protobuf": _Meaning(False, "transport only"),
    "library.ray": _Meaning(False, "transport only"),
    "lm_head.": _Meaning(True, "the head computes in another way"),
    "logprob.": _Meaning(True, "log-probs mean something else"),
    "model.": _Meaning(True, "the model itself is another one"),
    "model.config_digest": _Meaning(True, "a field of config.json differs: norm eps, RoPE, heads, sizes"),
    "model.vocab_size": _Meaning(True, "the softmax runs over other columns"),
    "parallel.": _Meaning(True, "sums over devices run in another order"),
    "process.": _Meaning(False, "which process it is enters no arithmetic"),
    "replica.": _Meaning(False, "which replica it is enters no arithmetic"),
    "server.": _Meaning(False, "how the server is reached enters no arithmetic"),
    "source.": _Meaning(True, "this source file of zerodrift differs: another build, or one that was edited"),
    "source.kernels": _Meaning(True, "the sources of the kernel sets differ: another build, or one that was edited"),
    "torch.float32_matmul_precision": _Meaning(True, "float32 products may round their inputs to bfloat16 or TF32"),
    "weights.": _Meaning(True, "the weights differ"),
    "weights.version": _Meaning(True, "one side holds weights of another step"),
}
_UNKNOWN = _Meaning(True, "nobody has shown that this cannot change a bit")


@dataclass(frozen=True, slots=True)
class ManifestDifference:
    """One key whose values differ."""

    key: str
    left: str | None
    """None: the key is absent on this side."""
    right: str | None
    can_change_bits: bool

    def __str__(self) -> str:
        """``key: left | right``, absent sides marked."""
        left = "(absent)" if self.left is None else repr(self.left)
        right = "(absent)" if self.right is None else repr(self.right)
        return f"{self.key}: {left} | {right}"

    @property
    def words(self) -> str:
        """Why it can or cannot change a bit."""
        return _meaning(self.key).words


def _meaning(key: str) -> _Meaning:
    matches = [prefix for prefix in _MEANINGS if key.startswith(prefix)]
    return _MEANINGS[max(matches, key=len)] if matches else _UNKNOWN


def can_change_bits(key: str) -> bool:
    """Whether a difference in this manifest key can change a log-prob; unknown keys can."""
    return _meaning(key).changes_bits


def diff_manifests(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[ManifestDifference, ...]:
    """Keys whose values differ or that one side lacks: those that can change bits first, then by key."""
    differences = [
        ManifestDifference(key=key, left=a.get(key), right=b.get(key), can_change_bits=can_change_bits(key))
        for key in a.keys() | b.keys()
        if a.get(key) != b.get(key)
    ]
    return tuple(sorted(differences, key=lambda d: (not d.can_change_bits, d.key)))


def in_words(differences: tuple[ManifestDifference, ...]) -> str:
    """One sentence."""
    if not differences:
        return "the manifests are equal"
    serious = [d for d in differences if d.can_change_bits]
    if not serious:
        return f"{len(differences)} entries differ, none of which can change a bit"
    first = serious[0]
    return f"{len(serious)} of {len(differences)} differing entries can change bits, first {first}: {first.words}"
