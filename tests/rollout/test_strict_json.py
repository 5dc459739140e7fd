"""JSON of others: what readers disagree on is refused, in every file that is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.activation_log import read_activations
from rollout.certify.certificate import read_certificate
from rollout.checkpoint import read_config
from rollout.cli_certify import read_manifest
from rollout.config import load_settings
from rollout.errors import ConfigError, RolloutError
from rollout.strict_json import strict_loads
from trainer_bridge.cli_weights import read_digests
from trainer_bridge.single_use import read_prompts

ODD = {
    "a key twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
    "nested": (b"[" * 100_000, "nested too deeply"),
    "not UTF-8": (b'{"a": "\xff"}', "utf-8"),
    "cut": (b'{"a": ', "Expecting value"),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda file: read_config(file.parent),
    "certificate": read_certificate,
    "manifest": read_manifest,
    "digests": read_digests,
    "prompts": read_prompts,
    "activations": lambda file: list(read_activations(file)),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_by_a_typed_error_that_names_the_fault(tmp_path: Path, reader: str, case: str) -> None:
    text, fault = ODD[case]
    file = tmp_path / ("config.json" if reader == "config.json" else "file.json")
    file.write_bytes(text)
    with pytest.raises(RolloutError, match=fault) as caught:
        READERS[reader](file)
    assert str(tmp_path) in caught.value.message


def test_what_is_no_fault_is_read() -> None:
    assert strict_loads('{"a": {"x": 1}, "b": {"x": 2}}') == {"a": {"x": 1}, "b": {"x": 2}}
    assert strict_loads("[1, null]") == [1, None]


def test_settings_say_one_thing_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'NPU' stands twice"):
        load_settings(None, ['worker.resources={"NPU": 1, "NPU": 2}'])
    with pytest.raises(ConfigError, match="greater than or equal to 0"):
        load_settings(None, ['worker.resources={"NPU": -1}'])
    deep = tmp_path / "deep.yaml"
    deep.write_text("a: " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"deep\.yaml is not YAML"):
        load_settings(deep)
    monkeypatch.setenv("ZERODRIFT_ENGINE__THREADS", "2")
    assert load_settings(None).engine.threads == 2
    monkeypatch.setenv("ZERODRIFT_engine__threads", "3")
    with pytest.raises(ConfigError, match=r"both set engine\.threads; remove one"):
        load_settings(None)


@pytest.mark.parametrize(("text", "read"), [("010", 8), ("1:30", 90), ("-012", -10), ("0_7", 7)])
def test_numbers_that_yaml_reads_in_another_base_are_refused(tmp_path: Path, text: str, read: int) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(f"server: {{port: {text}}}\n")
    with pytest.raises(ConfigError, match=f"{text} would be read as {read}; write the number in decimal"):
        load_settings(file)
    for fine, port in (("10", 10), ("0", 0), ("1_000", 1000), ("0x10", 16)):
        file.write_text(f"server: {{port: {fine}}}\n")
        assert load_settings(file).server.port == port
