"""Settings: precedence, sources, and errors that name the key."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from rollout import config
from rollout.config import ResolvedSetting, Settings, describe, is_loopback, load_settings, schema
from rollout.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(config.ENV_PREFIX):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def source_of(key: str, settings: tuple[ResolvedSetting, ...]) -> str:
    return next(setting.source for setting in settings if setting.key == key)


def test_defaults() -> None:
    settings = load_settings()
    assert settings == Settings()
    assert (settings.model.path, settings.model.dtype) == ("smollm2-135m-instruct", "bfloat16")
    assert (settings.engine.page_size, settings.engine.max_batch_tokens) == (128, 512)
    assert (settings.server.host, settings.server.port, settings.ray.namespace) == ("127.0.0.1", 50051, "zerodrift")
    assert (settings.log.level, settings.log.as_json) == ("info", False)


def test_each_source_beats_the_one_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "server:\n  port: 1\n  max_n: 2\n  drain_s: 3\n")
    monkeypatch.setenv("ZERODRIFT_SERVER__PORT", "4")
    monkeypatch.setenv("ZERODRIFT_SERVER__MAX_N", "5")
    settings = load_settings(path, ["server.port=6"])
    assert (settings.server.port, settings.server.max_n, settings.server.drain_s) == (6, 5, 3)
    resolved = describe(path, ["server.port=6"])
    assert source_of("server.port", resolved) == "command line"
    assert source_of("server.max_n", resolved) == "environment ZERODRIFT_SERVER__MAX_N"
    assert source_of("server.drain_s", resolved) == f"file {path}"
    assert source_of("server.host", resolved) == "default"


def test_describe_lists_every_leaf_once_with_its_resolved_value() -> None:
    resolved = describe(overrides=["worker.count=3", "log.json=true"])
    values = {setting.key: setting.value for setting in resolved}
    assert len(values) == len(resolved) == sum(len(fields) for fields in Settings().model_dump().values())
    assert (values["worker.count"], values["log.json"], values["worker.resources"]) == (3, True, {})


def test_the_last_override_wins() -> None:
    assert load_settings(None, ["worker.count=2", "--worker.count=4"]).worker.count == 4


def test_all_streams_together_may_hold_a_burst_of_one() -> None:
    """512 samples of 64 tokens with 64 alternatives: 17 MB."""
    load_settings(None, ["server.max_n=512", "server.stream_buffers_bytes=17432576"])
    with pytest.raises(ConfigError, match=r"stream_buffers_bytes = 17432575 .* are 17432576 bytes; raise it, or lower"):
        load_settings(None, ["server.max_n=512", "server.stream_buffers_bytes=17432575"])
    load_settings(None, ["server.stream_buffers_bytes=65536", "server.max_n=4", "server.max_top_logprobs=0"])


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("model.path=123", "path", "123"),
        ("model.path=a=b", "path", "a=b"),
        ("model.tokenizer=null", "tokenizer", None),
        ("model.context_length=512", "context_length", 512),
    ],
)
def test_override_text_becomes_the_field_type(override: str, key: str, value: object) -> None:
    assert load_settings(None, [override]).model.model_dump()[key] == value


def test_mappings_are_json_on_the_command_line_and_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(None, ['worker.resources={"NPU": 1}']).worker.resources == {"NPU": 1.0}
    monkeypatch.setenv("ZERODRIFT_WORKER__RESOURCES", '{"NPU": 2}')
    assert load_settings().worker.resources == {"NPU": 2.0}
    assert source_of("worker.resources", describe()) == "environment ZERODRIFT_WORKER__RESOURCES"


def test_null_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZERODRIFT_MODEL__CONTEXT_LENGTH", "null")
    assert load_settings(write(tmp_path, "model: {context_length: 64}")).model.context_length is None


def test_empty_file_and_empty_section_keep_defaults(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, "")) == Settings()
    assert load_settings(write(tmp_path, "server:\n")) == Settings()


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("server: {prot: 1}", "server.prot", ["server.prot", "did you mean server.port?", "settings.yaml"]),
        ("servr: {port: 1}", "servr", ["servr", "did you mean server?"]),
        ("server: {port: many}", "server.port", ["server.port = 'many'", "valid integer", "settings.yaml"]),
        ("server: {port: 70000}", "server.port", ["70000", "65535"]),
        ("worker: {count: 0}", "worker.count", ["worker.count = 0"]),
        ("worker: {num_cpus: .nan}", "worker.num_cpus", ["worker.num_cpus = nan"]),
        ("model: {dtype: float16}", "model.dtype", ["float16", "bfloat16", "float32"]),
        ("engine: {page_size: 100}", "engine", ["kv_cache_tokens = 65536", "page_size = 100", "65600"]),
        ("server: {host: 0.0.0.0}", "server", ["0.0.0.0", "server.allow_insecure=true"]),
        ("engine: {threads: yes}", "engine.threads", ["engine.threads", "true is neither a number"]),
        ("model: {context_length: off}", "model.context_length", ["model.context_length", "false is neither"]),
        ("server: 5", "", ["server", "mapping", "5"]),
        ("- a\n- b", "", ["settings.yaml", "mapping"]),
        ("a: [", "", ["settings.yaml", "YAML"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, field: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path, text))
    assert caught.value.field == field
    assert [word for word in words if word not in caught.value.message] == []


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("server:\n  port: 1\nserver:\n  host: 127.0.0.1\n", "'server'.*line 3"),
        ("engine:\n  chunk_size: 10\n  chunk_size: 20\n", "'chunk_size'.*line 3"),
    ],
)
def test_a_key_written_twice_is_refused(tmp_path: Path, text: str, again: str) -> None:
    """YAML's reader would keep the last and lose the first."""
    with pytest.raises(ConfigError, match=f"(?s){again}"):
        load_settings(write(tmp_path, text))
    load_settings(write(tmp_path, "engine:\n  chunk_size: 10\nserver:\n  port: 10\n"))


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"worker\.count.*; server\.port"):
        load_settings(write(tmp_path, "worker: {count: 0}\nserver: {port: -1}"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ZERODRIFT_SERVER__PROT", "1", ["server.prot", "environment", "server.port"]),
        ("ZERODRIFT_SERVR__PORT", "1", ["servr.port", "ZERODRIFT_SERVR__PORT", "server.port"]),
        ("ZERODRIFT_SERVER__PORT", "x", ["server.port = 'x'", "environment ZERODRIFT_SERVER__PORT"]),
        ("ZERODRIFT_WORKER__RESOURCES__NPU", "1", ["worker.resources__npu", "worker.resources?"]),
        ("ZERODRIFT_WORKER__RESOURCES", "{", ["worker.resources", "environment ZERODRIFT_WORKER__RESOURCES"]),
    ],
)
def test_a_bad_variable_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: list[str]
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert [word for word in words if word not in caught.value.message] == []


def test_variables_that_are_not_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERODRIFT_CACHE", "/somewhere")
    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("worker.count", ["worker.count", "section.key=value"]),
        ("worker.cuont=2", ["worker.cuont", "command line", "worker.count"]),
        ("count=2", ["count", "is not a setting"]),
        ("worker.count=two", ["worker.count = 'two'", "command line"]),
        ("worker.resources={NPU", ["worker.resources", "JSON"]),
    ],
)
def test_a_bad_override_is_refused_by_name(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(None, [override])
    assert [word for word in words if word not in caught.value.message] == []


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        load_settings(tmp_path / "none.yaml")


def test_insecure_host_by_consent() -> None:
    assert load_settings(None, ["server.host=0.0.0.0", "server.allow_insecure=true"]).server.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("inside", "hosts"),
    [
        (True, ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost", "unix:/tmp/socket"]),
        (False, ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "example", ""]),
    ],
)
def test_is_loopback(inside: bool, hosts: list[str]) -> None:
    assert [host for host in hosts if is_loopback(host) is not inside] == []


def test_settings_are_frozen_and_survive_pickle() -> None:
    settings = load_settings(None, ["worker.count=2"])
    with pytest.raises(ValueError, match="frozen"):
        settings.worker.count = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    load_settings(path)


def test_every_setting_has_a_description() -> None:
    sections = schema()["$defs"]
    assert len(sections) == len(Settings.model_fields)
    leaves = [leaf for section in sections.values() for leaf in section["properties"].values()]
    assert [part["title"] for part in [*sections.values(), *leaves] if not part.get("description")] == []


def test_committed_schema_is_current() -> None:
    committed = json.loads((ROOT / "configs" / "schema.json").read_text())
    assert committed == schema(), "run: make schema"
