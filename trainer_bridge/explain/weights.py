"""First question: do both sides hold the same weights? If not: which tensors, and how do they differ?"""

from __future__ import annotations

import torch

from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Finding, Notebook
from trainer_bridge.explain.sides import Side
from trainer_bridge.ulp import bits

STAGE = "weights"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_LOOKED_AT = 64
"""Unequal tensors that are fetched and classified; the rest are only counted."""
_PERMUTED_MOST = 1 << 27
_LEAST_OF_A_LAYER = 3
"""Tensors of a layer that must differ together before layers are thought to be swapped."""
_FEW_VALUES = 256
_SMALL = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


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
    moved = _swapped_layers(unequal, rollout, trainer)
    findings += (
        moved or _swapped(unequal, rollout, trainer) or [_how(name, rollout, trainer) for name in unequal[:_LOOKED_AT]]
    )
    for finding in findings[:5]:
        notes.note(STAGE, f"how does {finding.place} differ?", finding.sentence, False)
    return tuple(findings if moved else _merged(findings, len(unequal), len(left)))


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
        sentence = f"the {owner.name} has a head of its own, on the {other.name}'s side it is tied to the embedding"
        return Finding(Cause.WEIGHTS, "tied head", name, f"{sentence}{_own_head(owner, other)}")
    return Finding(Cause.WEIGHTS, "missing", name, f"only the {owner.name} has this tensor")


def _own_head(owner: Side, other: Side) -> str:
    """What an untied head holds, compared with the embedding that the other side uses."""
    head, embedding = owner.tensor(HEAD), other.tensor(EMBEDDING)
    if head is None or embedding is None or head.shape != embedding.shape:
        return ""
    if torch.equal(head, embedding):
        return "; the two hold the same values now, and part at the next update"
    kind, words, _ = describe(embedding, head, f"{other.name}'s embedding", f"{owner.name}'s head")
    if kind == "stale":
        return f"; it is a stale copy of the embedding: {words}"
    return f"; against the embedding: {words}"


def _layer_of(name: str) -> tuple[str, str] | None:
    """("model.layers.3", "mlp.up_proj.weight"); None outside the layers."""
    head, found, rest = name.partition(".layers.")
    if not found:
        return None
    number, _, leaf = rest.partition(".")
    return f"{head}.layers.{number}", leaf


def _swapped_layers(unequal: list[str], rollout: Side, trainer: Side) -> list[Finding]:
    """Whole layers in each other's place. A digest names its tensor, so a few small tensors are compared."""
    found = [_layer_of(name) for name in unequal]
    if not found or None in found:
        return []
    layers = sorted({f[0] for f in found if f}, key=lambda n: int(n.rpartition(".")[2]))
    common = set.intersection(*({f[1] for f in found if f and f[0] == layer} for layer in layers))
    # Norms are small, but alike in fresh models: then they are not among the unequal ones.
    leaves = sorted(common, key=lambda leaf: ("norm" not in leaf, "k_proj" not in leaf, leaf))[:2]
    if len(layers) < 2 or len(common) < _LEAST_OF_A_LAYER:
        return []
    ours = [[rollout.tensor(f"{layer}.{leaf}") for leaf in leaves] for layer in layers]
    theirs = [[trainer.tensor(f"{layer}.{leaf}") for leaf in leaves] for layer in layers]
    places = [
        next((j for j, other in enumerate(theirs) if all(map(_same, one, other))), None) for one in ours
    ]  # fmt: skip
    if None in places:
        return []
    moved = [f"{layers[i]} of the rollout is {layers[j]} of the trainer" for i, j in enumerate(places) if j is not None]
    sentence = f"whole layers are in another order on one side: {'; '.join(moved[:4])}"
    return [Finding(Cause.WEIGHTS, "swapped", ", ".join(layers[:4]), sentence)]


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
    for small in _SMALL:
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
    return _simply_changed(a, b, left, right) or _changed(a, b)


def _simply_changed(
    a: torch.Tensor, b: torch.Tensor, left: str, right: str
) -> tuple[str, str, dict[str, object]] | None:
    """One number added or multiplied, a part that is zero, few distinct values."""
    if a.numel() < 16 or not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return None
    wide, other = a.float(), b.float()
    moved = float((other - wide).mean())
    if abs(moved) > 0.05 and float((other - wide - moved).abs().max()) < 2e-2 * abs(moved):
        return "offset", f"the {right}'s values are the {left}'s plus {moved:.3g} (a norm kept as 1 + weight?)", {}
    factor = float((wide * other).sum() / (wide * wide).sum().clamp_min(1e-30))
    if abs(factor - 1) > 0.02 and float((other - factor * wide).norm()) < 1e-2 * float(other.norm()):
        return "scaled", f"the {right}'s values are the {left}'s times {factor:.3g}", {"factor": factor}
    for owner, full, holed in ((right, wide, other), (left, other, wide)):
        rows = (holed == 0).flatten(1).all(1) if holed.dim() > 1 else holed == 0
        count = int(rows.sum())
        if count and torch.equal(full[~rows], holed[~rows]):
            first = int(rows.nonzero()[0])
            words = f"{count} of {len(rows)} rows of the {owner}'s, first {first}, are zero: a part was never loaded"
            return "not loaded", words, {"rows": count}
    for owner, full, few in ((right, a, b), (left, b, a)):
        if full.numel() > 16 * _FEW_VALUES and few.unique().numel() <= _FEW_VALUES < full.unique().numel():
            return (
                "quantised",
                f"the {owner}'s values are {few.unique().numel()} different ones: quantised to 8 bits",
                {},
            )
    return None


def _permutation(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dim() == 2 and a.size(0) == a.size(1) and torch.equal(a.T, b):
        return "the same values, transposed"
    if a.dim() == 2 and (torch.equal(a.T.reshape(a.shape), b) or torch.equal(b.T.reshape(a.shape), a)):
        return "the same values, transposed and given the old shape"
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
    rows = differ.flatten(1).any(1) if differ.dim() > 1 else differ
    if differ.dim() > 1 and int(rows.sum()) <= max(4, len(rows) // 16) and len(rows) > 16:
        first = int(rows.nonzero()[0])
        details["rows"] = int(rows.sum())
        words = f"only {int(rows.sum())} of {len(rows)} rows differ, first {first}: a part of it was updated or lost"
        return "partial", words, details
    if relative < 0.2:
        words = f"{count} of {total} elements differ by {relative:.1e} of its norm: a version from another step"
        return "stale", words, details
    return "different", f"{count} of {total} elements differ by {relative:.2g} of its norm: another tensor", details


def several_versions(case: Case, notes: Notebook) -> Finding | None:
    """A sample that went on under new weights: one set of weights fits only its own part."""
    spans = case.record.spans
    if len({span.version for span in spans}) < 2 or len(case.trainer_logprobs) != len(case.generated):
        return None
    equal = bits(case.record.policy_logprobs) == bits(case.trainer_logprobs)
    equal = equal | ~case.record.mask
    fit = {span.version: True for span in spans}
    for span in spans:
        fit[span.version] &= bool(equal[span.start : span.end].all())
    others = [span for span in spans if not fit[span.version]]
    if not others or not any(fit.values()):
        return None
    told = ", ".join(f"v{s.version} tokens {s.start}-{s.end - 1}" for s in spans)
    kept = ", ".join(f"v{version}" for version, ok in fit.items() if ok)
    place = f"tokens {others[0].start}-{others[0].end - 1}"
    words = (
        f"the sample was made under several weight versions ({told}); the weights at hand are {kept}, {place} are older"
    )
    if others[0].start >= max(s.end for s in spans if fit[s.version]):
        words = words.replace("are older", "are newer")
    notes.note(STAGE, "one weight version?", told, False)
    return Finding(Cause.WEIGHTS, "several versions", place, words)
