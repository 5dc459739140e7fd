"""Runs every family and its control, and signs the result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch

from rollout.certify import attention, forward, linear, logprob, rows, sampler, threads, weights
from rollout.certify.certificate import Certificate, FamilyResult, body_digest
from rollout.certify.subject import Family, Level, Subject
from rollout.errors import RolloutError
from rollout.manifest import build_manifest, manifest_digest
from rollout.model import SharedModel

FAMILIES: tuple[Family, ...] = (
    linear.FAMILY,
    rows.FAMILY,
    attention.FAMILY,
    forward.FAMILY,
    threads.FAMILY,
    sampler.FAMILY,
    logprob.FAMILY,
    weights.FAMILY,
)
_KEPT_FAILURES = 20


def run_family(family: Family, subject: Subject) -> FamilyResult:
    """All checks of a family, then its control. A typed error of the kernels is a failure, not a crash."""
    start = time.process_time()
    checks = compared = 0
    failures: list[str] = []
    try:
        for outcome in family.checks(subject):
            checks += 1
            compared += outcome.compared
            if not outcome.holds:
                failures.append(
                    f"{outcome.name}: {outcome.unequal} of {outcome.compared} unequal"
                    f"{f' ({outcome.detail})' if outcome.detail else ''}"
                )
    except RolloutError as error:
        failures.append(error.message)
    control = family.control(subject)
    return FamilyResult(
        name=family.name,
        title=family.title,
        checks=checks,
        compared=compared,
        failures=tuple(failures[:_KEPT_FAILURES]),
        control=control.name,
        control_caught=not control.holds,
        cpu_s=round(time.process_time() - start, 2),
    )


def _plan(subject: Subject) -> dict[str, str]:
    """What was chosen by measurement: by the kernel set, and for each product of its decoder."""
    products = subject.decoder.products() if subject.decoder is not None else ()
    return dict(subject.kernels.measured_plan(subject.model.hf)) | {
        f"linear.{p.name} {p.shape}": p.plan for p in products
    }


def certify(
    model: SharedModel,
    *,
    level: Level = "quick",
    thread_counts: Sequence[int] = (1, 2),
    families: Sequence[Family] | None = None,
    progress: Callable[[FamilyResult], None] | None = None,
) -> Certificate:
    """Run the battery on the machine and with the weights at hand. Changes torch's thread count only for its duration.

    ``families`` None: all of them.

    Raises:
        ParityError: the kernel set itself found that nothing here could be exact, or no open plan of it was.
    """
    model.kernels.choose_plan(model.hf)
    decoder = model.kernels.decoder(model.hf, min(model.spec.context_length, 4096))
    subject = Subject(model, decoder, level, tuple(dict.fromkeys(thread_counts)))
    before = torch.get_num_threads()
    results: list[FamilyResult] = []
    for family in families if families is not None else FAMILIES:
        results.append(run_family(family, subject))
        if progress is not None:
            progress(results[-1])
    torch.set_num_threads(before)
    manifest = build_manifest(model)
    certificate = Certificate(
        manifest=manifest,
        manifest_digest=manifest_digest(manifest),
        level=level,
        families=tuple(results),
        threads=subject.threads,
        plan=_plan(subject),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model=model.spec.name,
    )
    return dataclasses.replace(certificate, digest=body_digest(certificate))
