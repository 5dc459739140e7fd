"""``make fuzz``: FUZZ_CALLS (10,000) malformed or hostile calls to a real service in a process of its own.

Afterwards it must run, answer the same bits as before, hold no sample and no page, and no more memory than before.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import hypothesis
from hypothesis import HealthCheck

from rollout.access import new_token
from rollout.call_scope import Role
from rollout.types import SamplingParams, ScoreSequence
from tests.hostile.calls import KNOCKS, SERVICE, HostileCall, Outcome, hostile_calls, knock, play
from tests.hostile.child import Child, Reading, child_settings
from trainer_bridge.client import RolloutClient
from trainer_bridge.wire.channel import ClientSecurity

ALLOWED = {
    grpc.StatusCode[name]
    for name in (
        "OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS", "CANCELLED",
        "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "UNIMPLEMENTED", "ABORTED", "DEADLINE_EXCEEDED",
    )
}  # fmt: skip
"""INTERNAL is judged by its id; UNKNOWN, UNAVAILABLE and DATA_LOSS would be faults of the service."""
LEAKS = re.compile(r"Traceback|File \"|\.py\b|/work|/home|/usr|/tmp| object at 0x|<class|Exception\b")
_ID = re.compile(r"internal error, id=(\S+)")
KNOCK_EVERY = 25
WARM = 0.2
"""Part of the calls after which memory is first read."""
HALF = 0.6
"""Half of the rest: growth that goes on shows in both halves, warming up in the first."""
GROWTH = 0.05
"""Of so short a run: allocators and caches still fill. `make soak-service` is the judge of slow growth."""


@dataclass
class Tally:
    """What came of the calls."""

    codes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    internal: int = 0
    """INTERNAL with an id that is in the log"""
    knocks: int = 0

    @property
    def calls(self) -> int:
        return sum(self.codes.values())


def fault_of(call: HostileCall, outcome: Outcome, log: Path) -> str:
    """What is wrong with an answer, "" if nothing."""
    if LEAKS.search(outcome.details):
        return "the text shows internals"
    if outcome.code is grpc.StatusCode.INTERNAL:
        named = _ID.fullmatch(outcome.details)
        if named is None:
            return "INTERNAL without an id"
        return "" if f"id={named[1]}" in log.read_text(errors="replace") else "the id is not in the log"
    return "" if outcome.code in ALLOWED else "a code that blames the service"


def reference(address: str, security: ClientSecurity) -> tuple[bytes, ...]:
    """Bits of well-mannered calls."""
    with RolloutClient(address, security=security, timeout_s=60) as client:
        client.resume()
        made = client.generate([3, 4, 5], SamplingParams(seed=9, max_tokens=20, ignore_eos=True), n=2, row_digests=True)
        scored = client.score([ScoreSequence((3, 4, 5, 6))])
        state = client.info().weights
    parts = [(s.token_ids.tobytes(), s.policy_logprobs.tobytes()) for s in made.samples]
    return (*(b for pair in parts for b in pair), scored.scores[0].logprobs.tobytes(), repr(state).encode())


def attack(child: Child, tokens: dict[str, str], calls: int, seed: int, tally: Tally) -> None:
    """``calls`` calls, some straight to the port."""
    control = (("authorization", f"Bearer {tokens['control']}"),)
    with grpc.insecure_channel(child.address, options=[("grpc.max_send_message_length", -1)]) as channel:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=calls, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(hostile_calls(tokens), KNOCKS)
        def run(call: HostileCall, junk: bytes) -> None:
            if tally.calls >= calls:
                return
            outcome = play(channel, call)
            tally.codes[outcome.code.name] += 1
            tally.internal += outcome.code is grpc.StatusCode.INTERNAL
            if fault := fault_of(call, outcome, child.log):
                tally.faults.append(f"{fault}: {outcome} {call}")
            if call.method.endswith("Pause"):
                channel.unary_unary(SERVICE + "Resume")(b"", metadata=control, timeout=20)
            if tally.calls % KNOCK_EVERY == 0:
                knock(child.address, junk)
                tally.knocks += 1
            assert child.alive(), f"the service died of {call}"

        while tally.calls < calls:
            run()


def fuzz(folder: Path, calls: int, seed: int) -> tuple[Tally, Reading, Reading, bool]:
    """The whole run: tally, memory early and late, whether the bits stayed the same."""
    lines, tokens = [], {}
    for role in Role:
        tokens[role.value], line = new_token(f"fuzz-{role.value}", role)
        lines.append(line)
    (folder / "tokens").write_text("\n".join(lines))
    server: dict[str, Any] = {"tokens": str(folder / "tokens"), "receive_timeout_s": 2, "log_requests": True}
    security = ClientSecurity(token=tokens["control"])
    tally = Tally()
    with Child(child_settings(folder, server=server), folder / "log") as child:
        before = reference(child.address, security)
        attack(child, tokens, int(calls * WARM), seed, tally)
        early = child.measure()
        attack(child, tokens, int(calls * HALF), seed + 1, tally)
        print(f"  after {tally.calls} calls idle with {child.measure().rss / 2**20:.1f} MiB", flush=True)
        attack(child, tokens, calls, seed + 2, tally)
        late = child.measure()
        same = reference(child.address, security) == before
        if child.close():
            tally.faults.append("the service did not end by itself")
    return tally, early, late, same


def report(tally: Tally, early: Reading, late: Reading, same: bool) -> bool:
    """Print the counts; whether all is well."""
    print(f"fuzz: {tally.calls} calls, {tally.knocks} more straight to the port: {dict(tally.codes.most_common())}")
    print(f"  INTERNAL with an id that is in the log: {tally.internal}; faults: {len(tally.faults)}")
    print(f"  well-mannered calls have the same bits as before: {same}")
    print(f"  live samples {late.live}, held pages {late.held_pages}, buffered bytes {late.buffered}")
    growth = late.rss / early.rss - 1
    print(
        f"  memory when idle: {early.rss / 2**20:.1f} MiB early, {late.rss / 2**20:.1f} MiB at the end ({growth:+.2%})"
    )
    for fault in tally.faults[:10]:
        print(f"  FAULT {fault[:600]}")
    return not tally.faults and same and (late.live, late.held_pages, late.buffered) == (0, 0, 0) and growth < GROWTH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=int(os.environ.get("FUZZ_CALLS", "10000")))
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    print(f"fuzz: seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        return 0 if report(*fuzz(Path(folder), options.calls, seed)) else 1


if __name__ == "__main__":
    sys.exit(main())
