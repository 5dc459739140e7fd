"""``make licences``: the licence of every distribution that zerodrift brings along, from its own metadata.

Exit 1 when one is neither permissive nor in ``KNOWN``, the list of docs/security.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("demo", "dashboard", "otel", "bench", "dev")
PERMISSIVE = re.compile(
    r"apache|mit|bsd|isc|psf|python software foundation|python-2\.0|unlicense|zlib|hpnd|cnri|0bsd|boost|bsl-1\.0|"
    r"public domain|cc0|blueoak|wtfpl|mit-cmu|historical permission",
    re.I,
)
COPYLEFT = re.compile(r"(?<![a-z])(a?gpl|lgpl|mpl|mozilla|eupl|epl|cddl|sspl|gnu)", re.I)
KNOWN = {
    "certifi": "MPL-2.0: its files are not changed; brought by requests and httpx",
    "hypothesis": "MPL-2.0: its files are not changed; tests only",
    "pathspec": "MPL-2.0: its files are not changed; brought by mypy, tests only",
    "tqdm": "MPL-2.0 and MIT: its files are not changed; brought by transformers",
    "zss": "BSD by its licence file, the metadata says nothing; brought by reasoning-gym, demo only",
}
"""Distribution -> licence with conditions beyond notice, and why it may stay."""


def licence_of(name: str) -> str:
    """What a distribution says, in one line; "" where it says nothing."""
    said = metadata.metadata(name)
    classifiers = [c.rpartition(" :: ")[2] for c in said.get_all("Classifier") or () if c.startswith("License ::")]
    expression = said.get("License-Expression") or ""
    # Some put the whole text there.
    short = (said.get("License") or "").strip().splitlines()[:1]
    return expression or "; ".join(classifiers) or "".join(short)[:80]


def needed(name: str, extras: Iterable[str] = ()) -> Iterator[str]:
    """Canonical names of what is installed because of ``name``, itself included."""
    seen: set[tuple[str, str]] = set()
    pending = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while pending:
        here = pending.pop()
        if here in seen:
            continue
        seen.add(here)
        try:
            requires = metadata.requires(here[0]) or []
        except metadata.PackageNotFoundError:
            continue  # of another platform or Python
        for text in requires:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": here[1]}):
                pending += [(canonicalize_name(wanted.name), extra) for extra in ("", *wanted.extras)]
    for found in sorted({name for name, _ in seen}):
        try:
            metadata.version(found)
        except metadata.PackageNotFoundError:
            continue
        yield found


def judged(name: str, licence: str) -> str:
    """ "ok", "known" (in ``KNOWN``) or "unknown"."""
    if name in KNOWN:
        return "known"
    return "ok" if PERMISSIVE.search(licence) and not COPYLEFT.search(licence) else "unknown"


def main() -> int:
    names = list(needed("zerodrift", EXTRAS))
    bad = 0
    for name in names:
        licence = licence_of(name)
        verdict = judged(name, licence)
        bad += verdict == "unknown"
        note = f"  {verdict}: {KNOWN.get(name, 'look at it')}" if verdict != "ok" else ""
        print(f"{name:36} {metadata.version(name):18} {licence or '-'}{note}")
    print(f"{len(names)} distributions, {bad} to look at")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
