"""Run ``zerodrift explain`` for a sample on the page's request, as its own process."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.errors import ReplicaUnavailable, UnsupportedFeature

LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Explainer:
    """Runs a command on a file of rollouts and returns the JSON it writes. One at a time: it loads a model."""

    command: tuple[str, ...]
    """Program and arguments; ``{rollouts}`` and ``{out}`` stand for the two files."""
    limit_s: float = LIMIT_S

    async def __call__(self, line: str) -> dict[str, Any]:
        """Explain one JSONL line.

        Errors: ReplicaUnavailable when the command fails or takes over ``limit_s`` seconds, with its last words.
        """
        with tempfile.TemporaryDirectory(prefix="zerodrift-explain-") as folder:
            rollouts, out = Path(folder) / "sample.jsonl", Path(folder) / "explanation.json"
            rollouts.write_text(line + "\n", encoding="utf-8")
            places = {"{rollouts}": str(rollouts), "{out}": str(out)}
            process = await asyncio.create_subprocess_exec(
                *(places.get(part, part) for part in self.command),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                said, _ = await asyncio.wait_for(process.communicate(), self.limit_s)
            except TimeoutError:
                process.kill()
                await process.wait()
                raise ReplicaUnavailable(f"explain took over {self.limit_s:.0f} s and was stopped") from None
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise
            text = said.decode(errors="replace")
            # Its exit code says whether something differs; the file says whether it ran.
            if not out.exists():
                raise ReplicaUnavailable(f"explain ended with {process.returncode}: {text[-500:].strip()}")
            return {"explanation": json.loads(out.read_text(encoding="utf-8")), "log": text[-4000:]}


def default_explainer(verbs: Sequence[str], further: Sequence[str] = ()) -> Explainer | None:
    """The command of this installation, if it has the verb ``explain``; ``further`` are options and overrides."""
    if "explain" not in verbs:
        return None
    return Explainer((sys.executable, "-m", "rollout", "explain", "{rollouts}", "--json", "{out}", *further))


def require(explainer: Explainer | None) -> Explainer:
    """Errors: UnsupportedFeature when there is none."""
    if explainer is None:
        raise UnsupportedFeature(
            "this installation has no `zerodrift explain`; download the sample and run it where the model is"
        )
    return explainer
