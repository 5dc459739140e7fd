"""Options of the plugin: ``actor_rollout_ref.rollout.engine_kwargs.zerodrift``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollout.errors import ConfigError
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire.channel import ClientSecurity

NAME = "zerodrift"
"""``rollout.name``, and the key in ``engine_kwargs``."""


class VerlOptions(BaseModel):
    """How verl reaches the service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    addresses: tuple[str, ...] = ()
    """host:port of running services; replica k uses number k modulo their count. Empty: each replica hosts one."""
    security: ClientSecurity | None = None
    """TLS and token towards the services: ca, certificate, key, server_name, token, token_file, allow_insecure."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Sections of ``rollout.config.Settings`` for a hosted service; model path and dtype come from verl."""
    run_seed: int | None = None
    """64-bit; None: ``rollout.seed``."""
    handshake: Literal["strict", "audit", "off"] = "strict"
    """What a difference between the two parity manifests does, at the first weight sync."""
    update_policy: Literal["wait", "abort", "recompute"] = "wait"
    """What a weight update does with requests in flight."""
    router: bool = True
    """Route through ``trainer_bridge.verl.router`` unless ``rollout.router_config_path`` names another router."""
    row_digests: bool = False
    """Also return the digest of every sampled position's logits row."""
    timeout_s: float = Field(3600.0, gt=0)
    """Deadline of one call to the service."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Until a replica must serve."""
    num_cpus: float = Field(1.0, ge=0)
    """CPUs that a server actor asks Ray for."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources of a server actor that hosts a service, such as {"NPU": 1}."""

    def client(self, address: str) -> AsyncRolloutClient:
        """A client of one service, with deadline and security as given."""
        return AsyncRolloutClient(address, timeout_s=self.timeout_s, security=self.security)


def read_options(engine_kwargs: Mapping[str, Any] | None) -> VerlOptions:
    """Options out of verl's ``engine_kwargs``.

    Raises:
        ConfigError: an unknown key or a bad value, by name.
    """
    given = dict((engine_kwargs or {}).get(NAME) or {})
    try:
        return VerlOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"rollout.engine_kwargs.{NAME}.{key}: {first['msg']}; known keys: {', '.join(VerlOptions.model_fields)}",
            field=key,
        ) from error
