"""Settings of a service: YAML file < environment ``ZERODRIFT_SECTION__KEY`` < command line ``section.key=value``.

``python -m rollout.config`` prints the JSON Schema that is committed as ``configs/schema.json``.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, NonNegativeFloat, ValidationError, model_validator

from rollout.errors import ConfigError
from rollout.server_settings import AccessSettings, RequestLimits
from rollout.server_settings import Section as _Section
from rollout.strict_json import strict_loads

ENV_PREFIX = "ZERODRIFT_"
BURST_TOKENS = 64
"""Tokens of one sample that may come in one burst: 0.8 s, the longest wait for company, at 80 tokens a second."""
TOKEN_BYTES, ALTERNATIVE_BYTES = 20, 8
"""Of a token with two log-probs and a row digest; of each of its alternatives."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost" or host.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class ModelSettings(_Section):
    """Which model is served."""

    path: str = Field("smollm2-135m-instruct", min_length=1, description="Folder of a model, or a known name.")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Dtype of weights and activations.")
    context_length: int | None = Field(
        None, ge=2, description="Most tokens of prompt and generation together; null: what the model's config says."
    )
    tokenizer: str | None = Field(None, description="Folder of the tokenizer; null: the model's folder.")


class KernelSettings(_Section):
    """Which kernel set computes."""

    name: str = Field("auto", min_length=1, description='Name of a kernel set; "auto": what the platform has.')
    attention_plan: Literal["auto", "plain", "tile_aligned", "row_by_row", "fused_infer"] = Field(
        "auto",
        description="How the npu set calls attention; auto: what the installed flash_attn_npu needs to be exact.",
    )
    vision_attention: Literal["auto", "kernel_set", "npu_fusion", "sdpa"] = Field(
        "auto", description="Attention of a multimodal model's vision tower; auto: the model's, else the platform's."
    )
    invariant_ops: Literal["auto", "batch_invariant_ops", "fixed_shape"] = Field(
        "auto", description="Products and reductions of the npu set; auto: the Ascend package if it is installed."
    )


class EngineSettings(_Section):
    """Memory and batching of one engine."""

    page_size: int = Field(128, ge=1, description="Tokens a KV page.")
    kv_cache_tokens: int = Field(65536, ge=1, description="KV memory in tokens, taken whole at start.")
    max_batch_tokens: int = Field(512, ge=1, description="Token budget of one step, prefill and decode together.")
    max_running: int = Field(32, ge=1, description="Most samples that run at a time.")
    max_waiting: int = Field(4096, ge=0, description="Most samples that wait; more are refused.")
    max_waiting_per_client: int | None = Field(
        None, ge=1, description="Most samples of one client that wait; null: all but an eighth of max_waiting."
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of one engine.")
    chunk_size: int = Field(256, ge=1, description="Most prompt tokens of one sample in one step.")
    prefix_cache: bool = Field(True, description="Whether KV of equal prefixes is shared and kept.")
    activation_log: str | None = Field(
        None, description="File for digests of keys and values of every ended sample; {name}: the replica."
    )
    strict: bool = Field(
        False, description="Serve only with a certificate of `zerodrift certify` that matches and holds."
    )
    certificate: str | None = Field(None, description="File of that certificate; null: where certify puts it.")

    @model_validator(mode="after")
    def _whole_pages(self) -> Self:
        if self.kv_cache_tokens % self.page_size:
            raise ValueError(
                f"kv_cache_tokens = {self.kv_cache_tokens} is not a multiple of page_size = {self.page_size}; "
                f"the next one is {-(-self.kv_cache_tokens // self.page_size) * self.page_size}"
            )
        return self


class WorkerSettings(_Section):
    """Ray actors that each hold one engine."""

    count: int = Field(1, ge=1, description="Replicas.")
    num_cpus: float = Field(1.0, ge=0, description="CPUs each replica asks Ray for.")
    resources: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description='Further Ray resources of each replica, such as {"NPU": 1}.'
    )
    start_timeout_s: float = Field(120, gt=0, description="Seconds until a replica must have loaded its model.")
    answer_timeout_s: float = Field(30, gt=0, description="Seconds without any answer after which a worker hangs.")
    step_timeout_s: float = Field(300, gt=0, description="Seconds in one step after which an engine hangs.")
    max_restarts: int = Field(5, ge=0, description="Failed starts in a row after which a replica stays out.")
    outlive_gateway_s: float = Field(
        0, ge=0, description="Seconds that workers wait for a new gateway after theirs died; 0: they end with it."
    )


class ServerSettings(RequestLimits, AccessSettings):
    """The gRPC server."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    max_message_bytes: int = Field(268435456, ge=65536, le=2**31 - 1, description="Largest message, both ways.")
    max_n: int = Field(256, ge=1, description="Most samples one request may ask for.")
    max_priority: int = Field(
        10, ge=0, le=1000, description="Priorities of requests lie in [-max_priority, max_priority]."
    )
    max_top_logprobs: int = Field(64, ge=0, description="Most alternatives a request may ask for at each position.")
    max_images: int = Field(16, ge=0, description="Most images one prompt or scored sequence may carry.")
    debug: bool = Field(False, description="Serve taps and weights to `zerodrift explain --address`.")
    reflection: bool = Field(True, description="Whether gRPC reflection is served.")
    drain_s: float = Field(30, ge=0, description="Seconds that running calls get at shutdown.")

    @model_validator(mode="after")
    def _room_for_a_burst(self) -> Self:
        # No burst counts against the limit of one stream, but all count against that of all together.
        burst = self.max_n * BURST_TOKENS * (TOKEN_BYTES + ALTERNATIVE_BYTES * self.max_top_logprobs)
        if self.stream_buffers_bytes < burst:
            raise ValueError(
                f"stream_buffers_bytes = {self.stream_buffers_bytes} is less than one burst of one call may take: "
                f"max_n = {self.max_n} samples, {BURST_TOKENS} tokens, max_top_logprobs = {self.max_top_logprobs} "
                f"alternatives each are {burst} bytes; raise it, or lower max_n or max_top_logprobs"
            )
        return self

    @model_validator(mode="after")
    def _insecure_only_on_loopback(self) -> Self:
        if not self.allow_insecure and self.tls_certificate is None and not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} is reachable from outside and the server has no TLS; set "
                "server.tls_certificate and server.tls_key, or use 127.0.0.1, or set server.allow_insecure=true"
            )
        return self


class WeightSettings(_Section):
    """Weight updates."""

    root: str | None = Field(
        None, description="Folder below which an update may name a folder to read; null: none may. See docs/weights.md."
    )
    bucket_bytes: int = Field(33554432, ge=4096, description="Bytes that are passed on to the replicas at a time.")
    idle_s: float = Field(60, gt=0, description="Seconds without a part of an update until it is withdrawn.")
    keep: bool = Field(
        True,
        description="Keep the last update in Ray's object store, for replicas that start when none is left with it.",
    )


class RaySettings(_Section):
    """The Ray cluster."""

    address: str | None = Field(None, description="Address of a running cluster; null: RAY_ADDRESS, else start one.")
    num_cpus: int | None = Field(
        None, ge=1, description="CPUs of a cluster started here; null: all. Unused with a running cluster."
    )
    namespace: str = Field("zerodrift", min_length=1, description="Ray namespace of the actors.")


class MetricsSettings(_Section):
    """Where metrics go."""

    exporter: Literal["auto", "ray", "prometheus", "off"] = Field(
        "auto", description="auto: Ray's exporter in a Ray job, else Prometheus if a port is set."
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address of the Prometheus port.")
    port: int | None = Field(None, ge=0, le=65535, description="Prometheus port; 0: any free one; null: none.")


class LogSettings(_Section):
    """Logging of the entry points."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level that is shown.")
    # A field named "json" would shadow a method of BaseModel.
    as_json: bool = Field(False, alias="json", description="One JSON object a line, instead of text.")


class Settings(_Section):
    """All settings of a service. ``load_settings`` is the way to make one; the bare class holds the defaults."""

    model: ModelSettings = ModelSettings()
    kernels: KernelSettings = KernelSettings()
    engine: EngineSettings = EngineSettings()
    worker: WorkerSettings = WorkerSettings()
    server: ServerSettings = ServerSettings()
    weights: WeightSettings = WeightSettings()
    ray: RaySettings = RaySettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys, so a section written twice would lose its first half."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} stands here a second time; put both into one", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        # YAML 1.1 reads 010 as 8 and 1:30 as 90.
        value: int = super().construct_yaml_int(node)
        if ":" in node.value or (value and node.value.lstrip("+-")[0] == "0" and node.value.lstrip("+-0_").isdigit()):
            raise yaml.constructor.ConstructorError(
                None, None, f"{node.value} would be read as {value}; write the number in decimal", node.start_mark
            )
        return value


_UniqueKeys.add_constructor("tag:yaml.org,2002:int", _UniqueKeys.construct_yaml_int)


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """One leaf of the settings and where its value came from."""

    key: str
    """"section.key"."""
    value: Any
    source: str
    """"default", "file PATH", "environment NAME" or "command line"."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as one source gives it, before validation."""

    value: Any
    source: str


def load_settings(path: Path | None = None, overrides: Sequence[str] = ()) -> Settings:
    """Read a YAML file, the environment and ``section.key=value`` overrides, each above the one before.

    Raises:
        ConfigError: an unknown key or a bad value; the message names the key and its source.
    """
    return _validate(_collect(path, overrides))


def describe(path: Path | None = None, overrides: Sequence[str] = ()) -> tuple[ResolvedSetting, ...]:
    """Every leaf of what ``load_settings`` returns for the same arguments, in order, with the source of its value."""
    given = _collect(path, overrides)
    settings = _validate(given).model_dump(by_alias=True)
    leaves = [(f"{section}.{key}", value) for section, fields in settings.items() for key, value in fields.items()]
    return tuple(ResolvedSetting(key, value, given[key].source if key in given else "default") for key, value in leaves)


def schema() -> dict[str, Any]:
    """JSON Schema of a settings file."""
    return Settings.model_json_schema(by_alias=True)


def _keys() -> dict[str, type[_Section]]:
    """Known keys in order, and the section class each belongs to."""
    sections = {name: info.annotation for name, info in Settings.model_fields.items()}
    return {
        f"{name}.{info.alias or field}": section
        for name, section in sections.items()
        if isinstance(section, type) and issubclass(section, _Section)
        for field, info in section.model_fields.items()
    }


def _collect(path: Path | None, overrides: Sequence[str]) -> dict[str, _Given]:
    return _from_file(path) | _from_environment() | _from_overrides(overrides)


def _from_file(path: Path | None) -> dict[str, _Given]:
    if path is None:
        return {}
    try:
        tree = _UniqueKeys(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise ConfigError(
            f"settings file {path} cannot be read ({error.strerror}); `zerodrift config show` prints the defaults"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"settings file {path} is not YAML: {error}") from error
    source = f"file {path}"
    given: dict[str, _Given] = {}
    for section, fields in _mapping(tree, f"settings {source}").items():
        if section not in Settings.model_fields:
            raise _unknown(str(section), source)
        # `server:` with nothing under it is an empty section.
        for key, value in _mapping(fields, f"{section} ({source})").items():
            given[f"{section}.{key}"] = _Given(value, source)
    return given


def _mapping(value: object, what: str) -> Mapping[Any, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what} must be a mapping of keys, not {value!r}")
    return value


def _from_environment() -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for name, text in os.environ.items():
        section, nested, field = name.removeprefix(ENV_PREFIX).partition("__")
        # Names without "__", such as ZERODRIFT_CACHE, are not settings.
        if name.startswith(ENV_PREFIX) and nested:
            key = f"{section}.{field}".lower()
            if key in given:
                raise ConfigError(f"{name} and {given[key].source} both set {key}; remove one", field=key)
            given[key] = _parse(key, text, f"environment {name}")
    return given


def _from_overrides(overrides: Sequence[str]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.removeprefix("--")
        if not equals:
            raise ConfigError(f"override {override!r} has no '='; write section.key=value, such as worker.count=2")
        given[key] = _parse(key, text, "command line")
    return given


def _parse(key: str, text: str, source: str) -> _Given:
    """Text as a value: null, JSON for a mapping, else the text itself, which pydantic turns into the field's type."""
    if text == "null":
        return _Given(None, source)
    if not text.startswith("{"):
        return _Given(text, source)
    try:
        return _Given(strict_loads(text), source)
    except ValueError as error:
        raise ConfigError(f"{key} = {text!r} ({source}) is not JSON: {error}", field=key) from error


def _validate(given: Mapping[str, _Given]) -> Settings:
    known = _keys()
    tree: dict[str, dict[str, Any]] = {}
    for key, item in given.items():
        if key not in known:
            raise _unknown(key, item.source)
        section, _, field = key.partition(".")
        tree.setdefault(section, {})[field] = item.value
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise _invalid(error, given) from error


def _unknown(key: str, source: str) -> ConfigError:
    near = difflib.get_close_matches(key, [*_keys(), *Settings.model_fields], n=1)
    hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(Settings.model_fields)}"
    return ConfigError(f"{key} ({source}) is not a setting; {hint}", field=key)


def _invalid(error: ValidationError, given: Mapping[str, _Given]) -> ConfigError:
    """Every fault in one message, so that a file is mended in one go."""
    faults = []
    for fault in error.errors(include_url=False):
        location = [str(part) for part in fault["loc"]]
        key = ".".join(location[:2])
        message = fault["msg"].removeprefix("Value error, ")
        where = f" = {given[key].value!r} ({given[key].source})" if key in given else ""
        faults.append((key, f"{key}{where}: {message}"))
    return ConfigError("; ".join(text for _, text in faults), field=faults[0][0])


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
