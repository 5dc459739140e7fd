"""A zerodrift service inside a verl server actor, for runs that name no address."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rollout.config import Settings
from rollout.errors import ConfigError
from rollout.serving import running_service


class HostedService:
    """One service with one worker in this process; reached over gRPC like any other."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> str:
        """Load and serve; returns host:port."""
        service = await self._stack.enter_async_context(running_service(self._settings, in_process=True))
        return service.address

    async def stop(self) -> None:
        """Drain and stop."""
        await self._stack.aclose()


def hosted_settings(
    given: Mapping[str, Any], *, model_path: str, dtype: str, context_length: int | None, max_running: int
) -> Settings:
    """Settings of a hosted service: what verl knows, overlaid with the user's sections.

    Raises:
        ConfigError: a section or value that the settings do not know.
    """
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": model_path, "dtype": dtype, "context_length": context_length},
        "engine": {"max_running": max_running},
        "server": {"port": 0, "host": "127.0.0.1"},
    }
    for section, fields in given.items():
        # `engine:` with nothing under it is an empty section.
        if not isinstance(fields, Mapping | None):
            raise ConfigError(
                f"rollout.engine_kwargs.zerodrift.settings: {section} = {fields!r:.60} must be a mapping of keys",
                field=section,
            )
        tree.setdefault(section, {}).update(fields or {})
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"rollout.engine_kwargs.zerodrift.settings: {key}: {first['msg']}", field=key) from error
