"""Options of the plugin: ``actor_rollout_ref.rollout.engine_kwargs.zerodrift``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, ValidationError, model_validator

from rollout.errors import ConfigError
from rollout.server_settings import Section
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.wire.channel import ClientSecurity, check_address

NAME = "zerodrift"
"""``rollout.name``, and the key in ``engine_kwargs``."""


class VerlOptions(Section):
    """How verl reaches the service."""

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
    resources: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    """Further Ray resources of a server actor that hosts a service, such as {"NPU": 1}."""

    @model_validator(mode="after")
    def _all_of_it_counts(self) -> Self:
        """Nothing is passed over: settings beside addresses would be, and two senders of one service meet."""
        if self.addresses and self.settings:
            raise ValueError(
                f"settings are those of a service that is hosted here, and with addresses = {list(self.addresses)} "
                "none is; give them to the running services, or leave one of the two out"
            )
        if twice := [address for i, address in enumerate(self.addresses) if address in self.addresses[:i]]:
            raise ValueError(f"addresses name {twice[0]} twice; replicas beyond their number share them by themselves")
        for address in self.addresses:
            try:
                check_address(address)
            except ConfigError as error:
                raise ValueError(error.message) from error
        return self

    def client(self, address: str) -> AsyncRolloutClient:
        """A client of one service, with deadline and security as given."""
        return AsyncRolloutClient(address, timeout_s=self.timeout_s, security=self.security)


def read_options(engine_kwargs: Mapping[str, Any] | None) -> VerlOptions:
    """Options out of verl's ``engine_kwargs``.

    Raises:
        ConfigError: an unknown key or a bad value, by name.
    """
    given = (engine_kwargs or {}).get(NAME)
    # Not dict(given): a list of pairs is no mapping, and OmegaConf's is.
    tree = {} if given is None else dict(given) if isinstance(given, Mapping) else given
    try:
        return VerlOptions.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        where = f"rollout.engine_kwargs.{NAME}{f'.{key}' if key else ''}"
        raise ConfigError(
            f"{where}: {first['msg']}; known keys: {', '.join(VerlOptions.model_fields)}",
            field=key,
        ) from error
