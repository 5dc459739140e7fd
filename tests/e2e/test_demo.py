"""The demo's loop on the real model, at a small size: exact when nothing is broken, and each fault is named."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from rollout.config import Settings, load_settings
from rollout.serving import Service, running_service
from trainer_bridge.demo.records import RunRecord
from trainer_bridge.demo.run import DemoOptions, DemoRun
from trainer_bridge.demo.sabotage import SABOTAGED_TENSOR, Sabotage
from trainer_bridge.demo.view import View

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
SMALL = DemoOptions(steps=1, prompts=2, group=2, max_tokens=12, micro_batch=3)


@pytest.fixture
async def service(smollm2_path: Path) -> AsyncIterator[tuple[Service, Settings]]:
    settings = load_settings(None, [f"model.path={smollm2_path}", "server.port=0", "engine.kv_cache_tokens=8192"])
    async with running_service(settings, in_process=True) as running:
        yield running, settings


async def _run(service: tuple[Service, Settings], options: DemoOptions) -> tuple[RunRecord, str]:
    console = Console(file=io.StringIO(), width=160)
    view = View(console)
    record = await DemoRun(*service, options, view).run(1)
    view.finished(record)
    assert isinstance(console.file, io.StringIO)
    return record, console.file.getvalue()


async def test_faults_are_named_and_a_clean_run_is_exact(service: tuple[Service, Settings]) -> None:
    """One service for all: a broken run sends no weights, so every run meets version 0."""
    expected = {
        Sabotage.WEIGHTS: f"first '{SABOTAGED_TENSOR}'",
        Sabotage.ORDER: "kernels.page_size",
        Sabotage.ATTENTION: "kernels.op.attention",
        Sabotage.TEMPERATURE: "temperature: sampled at 0.69999",
    }
    for sabotage, said in expected.items():
        temperature = 0.7 if sabotage is Sabotage.TEMPERATURE else 1.0
        record, shown = await _run(service, dataclasses.replace(SMALL, sabotage=sabotage, temperature=temperature))
        assert not record.exact and any(said in finding for finding in record.findings), sabotage
        # Blocks of 64 and 128 round alike on a few short samples; the manifest names them all the same.
        assert sabotage is Sabotage.ORDER or not record.steps[0].aligned.bitwise_equal, sabotage
        assert "UNEQUAL" in shown
    record, shown = await _run(service, dataclasses.replace(SMALL, steps=2, full=True))
    assert record.exact and "bitwise equal" in shown
    assert [s.weight_version for s in record.steps] == [0, 1]
    assert record.steps[0].weight_digest != record.steps[1].weight_digest or record.steps[0].mixed_groups == 0
    for step in record.steps:
        assert step.aligned.digests_equal == step.aligned.digests_total == step.aligned.tokens
        assert step.ordinary.equal_tokens < step.ordinary.tokens, "control: an ordinary trainer differs"
        assert step.distinct_siblings
    assert record.to_json()["exact"] is True
