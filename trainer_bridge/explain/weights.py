"""First question: do both sides hold the same weights? If not: which tensors, and how do they differ?"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer_bridge.explain.findings import Cause, Finding, Notebook
from trainer_bridge.explain.sides import Side

STAGE = "weights"
HEAD = "lm_head.weight"
_LOOKED_AT = 64
"""Unequal tensors that are fetched and classified; the rest are only counted."""
_PERMUTED_MOST = 1 << 27


def examine(rollout: Side, trainer: Side, notes: Notebook) -> tuple[Finding, ...]:
    """Compare digests; where they differ, fetch tensors and say how. Empty: equal."""
    left, right = rollout.tensor_digests(), trainer.tensor_digests()
    if not left or not right:
        notes.note(STAGE, "same digest of every tensor?", "no digests from one side", None)
        return ()
    unequal = [name for name in left if name in right and left[name] != right[name]]
    missing = sorted(left.keys() ^ right.keys())
    if not unequal and not missing:
        notes.note(STAGE, "same digest of every tensor?", f"all {len(left)} equal", True)
        return ()
    notes.note(
        STAGE,
        "same digest of every tensor?",
        f"{len(unequal)} of {len(left)} differ, {len(missing)} on one side",
        False,
    )
    findings = [_absent(name, name in left, rollout, trainer) for name in missing]
    findings += _swapped(unequal, rollout, trainer) or [_how(name, rollout, trainer) for name in unequal[:_LOOKED_AT]]
    for finding in findings[:5]:
        notes.note(STAGE, f"how does {finding.place} differ?", finding.sentence, False)
    return tuple(_merged(findings, len(unequal), len(left)))


def _merged(findings: list[Finding], unequal: int, total: int) -> list[Finding]:
    """One finding in front when (nearly) all tensors differ: then no tensor is special."""
    if unequal <= max(3, total // 2):
        return findings
    kinds = {f.kind for f in findings}
    kind = kinds.pop() if len(kinds) == 1 else "stale"
    words = {
        "stale": "the two sides hold weights of different steps",
        "cast": "one side holds the other's weights rounded to a smaller type",
    }.get(kind, f"nearly all tensors differ alike ({kind})")
    whole = Finding(Cause.WEIGHTS, kind, "all tensors", f"{unequal} of {total} tensors differ: {words}")
    return [whole, *findings]


def _absent(name: str, in_rollout: bool, rollout: Side, trainer: Side) -> Finding:
    owner, other = (rollout, trainer) if in_rollout else (trainer, rollout)
    if name == HEAD:
        sentence = f"{owner.name} has a head of its own, on the {other.name}'s side it is tied to the embedding"
        return Finding(Cause.WEIGHTS, "tied head", name, sentence)
    return Finding(Cause.WEIGHTS, "missing", name, f"only the {owner.name} has this tensor")


def _swapped(unequal: list[str], rollout: Side, trainer: Side) -> list[Finding]:
    """Pairs of names whose contents changed places."""
    if not 2 <= len(unequal) <= _LOOKED_AT:
        return []
    ours = {name: rollout.tensor(name) for name in unequal}
    theirs = {name: trainer.tensor(name) for name in unequal}
    for i, one in enumerate(unequal):
        for two in unequal[i + 1 :]:
            if _same(ours[one], theirs[two]) and _same(ours[two], theirs[one]):
                sentence = f"{one} and {two} have changed places on one side"
                return [Finding(Cause.WEIGHTS, "swapped", f"{one}, {two}", sentence)]
    return []


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)


def _how(name: str, rollout: Side, trainer: Side) -> Finding:
    a, b = rollout.tensor(name), trainer.tensor(name)
    if a is None or b is None:
        return Finding(Cause.WEIGHTS, "different", name, "digests differ; its values could not be fetched")
    kind, words, details = describe(a, b, rollout.name, trainer.name)
    return Finding(Cause.WEIGHTS, kind, name, words, details)


def describe(
    a: torch.Tensor, b: torch.Tensor, left: str = "rollout", right: str = "trainer"
) -> tuple[str, str, dict[str, object]]:
    """(kind, words, figures) of how tensor ``b`` differs from ``a``; they are not equal."""
    if a.shape != b.shape:
        return "shape", f"{left} holds {list(a.shape)}, {right} {list(b.shape)}", {}
    a, b = a.contiguous(), b.contiguous()
    if a.dtype != b.dtype:
        return "cast", f"{left} holds {a.dtype}, {right} {b.dtype}", {}
    for small in (torch.bfloat16, torch.float16):
        for owner, wide, narrow in ((right, a, b), (left, b, a)):
            if wide.dtype != small and torch.equal(wide.to(small).to(wide.dtype), narrow):
                kind = str(small).removeprefix("torch.")
                return "cast", f"the {owner}'s values went through {kind}", {"through": kind}
    for owner, constant in ((left, a), (right, b)):
        if constant.numel() > 1 and bool((constant == constant.view(-1)[0]).all()):
            value = float(constant.view(-1)[0])
            return "not loaded", f"the {owner}'s values are all {value:g}: never loaded, or reset", {}
    if (
        a.numel() > 1
        and a.numel() <= _PERMUTED_MOST
        and torch.equal(a.view(-1).sort().values, b.view(-1).sort().values)
    ):
        return "permuted", _permutation(a, b), {}
    return _changed(a, b)


def _permutation(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dim() == 2 and a.size(0) == a.size(1) and torch.equal(a.T, b):
        return "the same values, transposed"
    if a.dim() == 2:
        for shift in (1, -1):
            if torch.equal(a.roll(shift, 0), b):
                return f"the same rows, moved by {shift:+d}"
        if torch.equal(_sorted_rows(a), _sorted_rows(b)):
            return "the same rows in another order (heads, or gate and up, or vocabulary)"
    return "the same values in another order"


def _sorted_rows(x: torch.Tensor) -> torch.Tensor:
    return x[x.float().sum(1).argsort()]


def _changed(a: torch.Tensor, b: torch.Tensor) -> tuple[str, str, dict[str, object]]:
    differ = a != b
    count, total = int(differ.sum()), a.numel()
    scale = float(a.float().norm()) or 1.0
    relative = float((a.float() - b.float()).norm()) / scale
    details: dict[str, object] = {"unequal": count, "elements": total, "relative": relative}
    if not bool(torch.isfinite(b).all()) or not bool(torch.isfinite(a).all()):
        return "not finite", f"holds NaN or infinity ({count} of {total} elements differ)", details
    if count <= 4 and total > 16:
        where = differ.nonzero()[0].tolist()
        return "corrupt", f"{count} of {total} elements differ, first at {where}: not a training step", details
    if relative < 0.2:
        words = f"{count} of {total} elements differ by {relative:.1e} of its norm: a version from another step"
        return "stale", words, details
    return "different", f"{count} of {total} elements differ by {relative:.2g} of its norm: another tensor", details


def digest_difference(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    """Names whose digests differ or that one side lacks."""
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
