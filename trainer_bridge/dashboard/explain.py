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
CONNECT_S = 1.0


@dataclass(frozen=True, slots=True)
class Explainer:
    """Runs a command on a file of rollouts and returns the JSON it writes. One at a time: it loads a model."""

    command: tuple[str, ...]
    """Program and arguments; ``{rollouts}``, ``{trainer}`` and ``{out}`` stand for the three files."""
    limit_s: float = LIMIT_S
    address: str | None = None
    """host:port of the service that the command asks; None: it loads models of its own."""

    async def trouble(self) -> str:
        """Why it cannot run now, "" if it can: a service that is asked must answer at its address."""
        if self.address is None:
            return ""
        host, _, port = self.address.rpartition(":")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), CONNECT_S)
        except (OSError, ValueError, TimeoutError):
            return f"the service {self.address} does not answer"
        writer.close()
        return ""

    async def __call__(self, rollout: str, trainer: str) -> dict[str, Any]:
        """Explain one sample, given as the JSONL line of each side.

        Errors: ReplicaUnavailable when the command fails or takes over ``limit_s`` seconds, with its last words.
        """
        with tempfile.TemporaryDirectory(prefix="zerodrift-explain-") as folder:
            names = {"{rollouts}": "sample.jsonl", "{trainer}": "trainer.jsonl", "{out}": "explanation.json"}
            places = {place: str(Path(folder) / name) for place, name in names.items()}
            Path(places["{rollouts}"]).write_text(rollout + "\n", encoding="utf-8")
            Path(places["{trainer}"]).write_text(trainer + "\n", encoding="utf-8")
            out = Path(places["{out}"])
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


def default_explainer(
    verbs: Sequence[str], further: Sequence[str] = (), *, address: str | None = None
) -> Explainer | None:
    """The command of this installation, if it has the verb ``explain``.

    Args:
        further: options and overrides.
        address: the service that sampled, with ``server.debug``; None: the model of the settings stands for it.
    """
    if "explain" not in verbs:
        return None
    asked = ["--address", address] if address is not None else []
    words = ("explain", "{rollouts}", "--trainer", "{trainer}", "--json", "{out}", *asked, *further)
    return Explainer((sys.executable, "-m", "rollout", *words), address=address)


def require(explainer: Explainer | None) -> Explainer:
    """Errors: UnsupportedFeature when there is none."""
    if explainer is None:
        raise UnsupportedFeature(
            "this installation has no `zerodrift explain`; download the sample and run it where the model is"
        )
    return explainer
