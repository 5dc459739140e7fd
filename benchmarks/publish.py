"""``make bench-publish``: take results into the repository and write what the documents show of them.

The documents' figures lie between ``<!-- bench:NAME -->`` and ``<!-- /bench -->``; everything there comes from
``benchmarks/results/*.json``, and a test holds the two together.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.catalogue import BASELINE
from benchmarks.charts import curves_chart, engines_chart
from benchmarks.machine import ROOT
from benchmarks.models import TITLES
from benchmarks.results import Pair, Results, load_results
from benchmarks.tables import HEADS, QUIET_CORES, Grid, all_grids, number

STORE = ROOT / "benchmarks/results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs/performance.md")
ENGINES_CHART, CURVES_CHART = "engines.svg", "curves.svg"
MODELS = ("110m", "06b", "smollm2")
"""In the order of the documents."""
NOTHING = "*No results are kept here yet: `make bench`, then `make bench-publish`.*"
_BLOCK = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench -->)", re.S)


class Store:
    """The results that the repository keeps."""

    def __init__(self, folder: Path) -> None:
        found = [load_results(path) for path in sorted(folder.glob("*.json"))]
        self._by_key = {(results.model, results.kind): results for results in found}

    def engines(self) -> list[Results]:
        """Of each model that has any."""
        return [self._by_key[m, "engines"] for m in MODELS if (m, "engines") in self._by_key]

    def curves(self) -> list[Results]:
        """Of each model that has any."""
        return [self._by_key[m, "curves"] for m in MODELS if (m, "curves") in self._by_key]


def charts(store: Store) -> dict[str, str]:
    """File name -> SVG."""
    drawn = {}
    if store.engines():
        drawn[ENGINES_CHART] = engines_chart(store.engines())
    if store.curves():
        drawn[CURVES_CHART] = curves_chart(store.curves()[0])
    return drawn


def provenance(results: Results) -> str:
    """Machine, dates and commits of the figures."""
    sessions = list(results.sessions.values())
    machines = {
        f"{s['processor']}, {s['cores']} cores ({s['isa']}), {s['memory_gib']} GiB, {s['threads']} threads each"
        for s in sessions
    }
    dates = sorted({s["date"] for s in sessions})
    commits = list(dict.fromkeys(s["commit"] for s in sessions if s["commit"]))
    versions = [_versions(record) for name, record in results.runners.items() if name in ("vllm", "sglang", "hf")]
    return f"{'; '.join(sorted(machines))}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; " + "; ".join(
        [*(v for v in versions if v), f"commit {', '.join(commits)}" if commits else "no commit"]
    )


def _versions(record: dict[str, object]) -> str:
    facts = record.get("facts")
    if not isinstance(facts, dict):
        return ""
    return ", ".join(f"{name} {facts[name]}" for name in ("vllm", "sglang", "transformers", "torch") if name in facts)


def _failures(results: Results) -> list[str]:
    failed = {name: record["failure"] for name, record in results.runners.items() if "failure" in record}
    for pair in results.pairs.values():
        if pair.failure and pair.runner not in failed:
            failed[f"{pair.runner} at {pair.workload.name}"] = pair.failure
    return [f"{name} failed: {reason}" for name, reason in failed.items()]


_LEGEND = (
    "Beside another engine's speed stands how many times as fast zerodrift was: median of paired turns, range in "
    f"brackets. ° others used more than {QUIET_CORES} cores meanwhile. Peak memory: sum of VmHWM over the engine's "
    "processes."
)


def _section(grid: Grid) -> str:
    return f"**{grid.title}**\n\n{grid.markdown()}"


def _engines_block(store: Store, chart: str) -> str:
    if not store.engines():
        return NOTHING
    parts = [f"![Generated tokens per second of each engine]({chart})", _LEGEND]
    for results in store.engines():
        parts += [_section(grid) for grid in all_grids(results)]
        parts += [*_bandwidth(results), *_failures(results), f"Measured on {provenance(results)}."]
    return "\n\n".join(parts)


def _bandwidth(results: Results) -> list[str]:
    floor, rate = results.runners.get("floor", {}).get("facts"), results.ours("n1", lambda m: m.rate)
    if not floor or rate is None:
        return []
    size = floor["weight_bytes_per_step"]
    return [
        f"Memory: triad {floor['triad_gb_s']}, copy {floor['copy_gb_s']}, read {floor['read_gb_s']} GB/s in the same "
        f"run; at N = 1 zerodrift reads weights at {rate.median * size / 1e9:.1f} GB/s ({size / 1e6:.0f} MB a step)."
    ]


def _curves_block(store: Store, chart: str) -> str:
    if not store.curves():
        return NOTHING
    parts = [f"![Growth curves]({chart})"]
    for results in store.curves():
        parts += [_section(grid) for grid in all_grids(results)]
        parts += [*_failures(results), f"{TITLES[results.model]}, measured on {provenance(results)}."]
    return "\n\n".join(parts)


def _readme_block(store: Store, chart: str) -> str:
    if not store.engines():
        return NOTHING
    first = store.engines()[0]
    sentences = [_claim(first, *claim) for claim in _CLAIMS]
    parts = [
        f"![Generated tokens per second of each engine]({chart})",
        *(_section(all_grids(results)[0]) for results in store.engines()),
        _LEGEND,
        f"{TITLES[first.model]}: {'; '.join(s for s in sentences if s)}." if any(sentences) else "",
        f"Measured on {provenance(first)}.",
    ]
    return "\n\n".join(part for part in parts if part)


def _exactness(pair: Pair) -> str:
    return f"exactness costs {100 * (1 - pair.ratio.median):.1f} % of the speed without it"


def _service(pair: Pair) -> str:
    return f"the service keeps {100 / pair.ratio.median:.0f} % of the bare engine's speed"


def _floor(pair: Pair) -> str:
    return f"{100 * pair.ratio.median:.0f} % of the floor (the GEMMs alone, {number(pair.rate.median)} tokens/s)"


_CLAIMS: tuple[tuple[str, Callable[[Pair], str]], ...] = (
    ("inexact", _exactness),
    ("service", _service),
    ("floor", _floor),
)


def _claim(results: Results, runner: str, words: Callable[[Pair], str]) -> str:
    pair = results.pair(runner, "n32")
    return f"{words(pair)} at {HEADS['n32']}" if pair is not None and pair.turns else ""


def rendered(document: str, store: Store, folder: str) -> str:
    """The document with every block written anew; ``folder`` is the way from the document to the charts.

    Raises:
        KeyError: a block of an unknown name.
    """
    blocks = {
        "readme": _readme_block(store, f"{folder}/{ENGINES_CHART}"),
        "engines": _engines_block(store, f"{folder}/{ENGINES_CHART}"),
        "curves": _curves_block(store, f"{folder}/{CURVES_CHART}"),
    }
    return _BLOCK.sub(lambda m: f"{m[1]}{blocks[m[2]]}\n{m[3]}", document)


def way_to_charts(document: Path) -> str:
    """Relative path of the results' folder, as a link."""
    return "/".join([".."] * (len(document.relative_to(ROOT).parts) - 1) + ["benchmarks/results"])


def main() -> None:
    """Take results into the repository, draw the charts, write the documents' figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=main.__doc__)
    parser.add_argument("results", type=Path, nargs="*", help="JSON files, or folders of them, to take")
    for given in parser.parse_args().results:
        for path in sorted(given.glob("*.json")) if given.is_dir() else [given]:
            if load_results(path).model in MODELS:
                shutil.copy(path, STORE / path.name)
                print(f"{BASELINE}: took {path.name}")
    store = Store(STORE)
    for name, drawing in charts(store).items():
        (STORE / name).write_text(drawing, encoding="utf-8")
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        document.write_text(rendered(text, store, way_to_charts(document)), encoding="utf-8")
        print(f"wrote {document.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
