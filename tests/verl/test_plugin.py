"""Registration with verl: through either door, and loud when it fails."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from typing import Any

import pytest
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

from rollout.errors import UnsupportedFeature
from trainer_bridge.verl import plugin
from trainer_bridge.verl.adapter import ServerAdapter
from trainer_bridge.verl.replica import ZerodriftReplica
from trainer_bridge.verl.server import ZerodriftServer


def test_importing_verl_was_enough() -> None:
    assert get_rollout_replica_class("zerodrift") is ZerodriftReplica
    assert get_rollout_class("zerodrift", "async") is ServerAdapter


def test_the_entry_point_names_a_module_that_registers() -> None:
    (point,) = [p for p in importlib.metadata.entry_points(group="verl.plugins") if p.name == "zerodrift"]
    assert point.load() is plugin


def test_an_unknown_verl_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.11.0")
    with pytest.raises(UnsupportedFeature, match=r"verl 0\.11\.0 is installed.*tested with 0\.9\.1"):
        plugin.register()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.9")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "0.9.9 was never tested" in caplog.text


def test_the_server_has_every_method_that_verls_replica_calls() -> None:
    source = inspect.getsource(RolloutReplica)
    called = {part.split(".remote(")[0] for part in source.split("server.")[1:] if ".remote(" in part.split("\n")[0]}
    assert {"wake_up", "sleep", "abort_all_requests", "release_kv_cache", "start_profile"} <= called
    assert [name for name in called if not hasattr(ZerodriftServer, name)] == []
    ours = inspect.signature(ZerodriftServer.generate).parameters
    assert {"prompt_ids", "sampling_params", "request_id", "image_data", "video_data", "audio_data"} <= set(ours)


@pytest.mark.parametrize(
    "given", [{"image_data": [1]}, {"kv_transfer_params": {}}, {"mm_processor_kwargs": {"fps": 1}}]
)
async def test_what_it_does_not_support_is_refused_by_name(given: dict[str, Any]) -> None:
    server = ZerodriftServer({}, None, {}, False)
    with pytest.raises(UnsupportedFeature, match=next(iter(given))):
        await server.generate([1, 2], {}, "r", **given)
