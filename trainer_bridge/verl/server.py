"""The Ray actor that verl's client calls: verl's method names over a ``Session``."""

from __future__ import annotations

import logging
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from rollout.errors import ReplicaUnavailable, UnsupportedFeature
from trainer_bridge.verl.hosted import HostedService, hosted_settings
from trainer_bridge.verl.options import VerlOptions
from trainer_bridge.verl.sampling import LengthBudget
from trainer_bridge.verl.seeds import SampleTag
from trainer_bridge.verl.session import Session

log = logging.getLogger(__name__)


class ZerodriftServer:
    """One service as verl sees it.

    Args:
        options: see ``VerlOptions``.
        address: host:port of a running service, or None to host one here.
        model: path, dtype and sizes, from verl's config.
    """

    def __init__(self, options: dict[str, Any], address: str | None, model: dict[str, Any], sleeps: bool) -> None:
        self._options = VerlOptions.model_validate(options)
        self._address = address
        self._model = model
        self._sleeps = sleeps
        self._hosted: HostedService | None = None
        self._session: Session | None = None
        self._fenced = ""

    async def launch(self) -> str:
        """Start or reach the service; returns host:port. A second call returns the same."""
        if self._session is not None and self._address is not None:
            return self._address
        if self._address is None:
            settings = hosted_settings(
                self._options.settings,
                model_path=self._model["path"],
                dtype=self._model["dtype"],
                context_length=self._model["hosted_context_length"],
                max_running=self._model["max_running"],
            )
            self._hosted = HostedService(settings)
            self._address = await self._hosted.start()
        client = self._options.client(self._address)
        info = await client.info()
        budget = LengthBudget(
            self._model["prompt_length"], self._model["response_length"], self._model["context_length"]
        )
        run_seed = self._options.run_seed
        self._session = Session(
            client, info, self._options, budget, self._model["seed"] if run_seed is None else run_seed
        )
        return self._address

    @property
    def _ready(self) -> Session:
        assert self._session is not None, "launch() comes first"
        return self._session

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
        zerodrift_tag: SampleTag | None = None,
        **others: Any,
    ) -> TokenOutput:
        """verl's call. ``zerodrift_tag`` comes from our router.

        Raises:
            UnsupportedFeature: images, video, audio or any further argument that holds something.
        """
        others |= {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        others["mm_processor_kwargs"] = mm_processor_kwargs or None
        for name, value in others.items():
            if value is not None:
                raise UnsupportedFeature(
                    f"generate was called with {name}, which zerodrift does not support: it serves text models, one "
                    "token sequence in, one out",
                    field=name,
                )
        self._require_serving()
        turn = await self._ready.generate(prompt_ids, sampling_params, request_id, zerodrift_tag)
        return TokenOutput(
            token_ids=turn.token_ids,
            log_probs=turn.log_probs,
            stop_reason=turn.stop_reason,
            extra_fields=turn.fields,
        )

    # ---- control: every method that verl's RolloutReplica fans out ------------------------------------------------

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Admit again after ``sleep``; waking the weights alone does not."""
        if tags is None or "kv_cache" in tags:
            await self._ready.wake_up()

    async def sleep(self) -> None:
        """Let no request in until ``wake_up``. Memory is not released: the service keeps weights and KV."""
        if self._sleeps:
            await self._ready.sleep()

    async def abort_all_requests(self, reject_request: bool = False) -> int:
        """End every request with its partial tokens; later ones wait, or are answered as aborted."""
        return await self._ready.abort_all(refuse=reject_request)

    async def resume_generation(self) -> None:
        """Admit again after ``abort_all_requests``."""
        await self._ready.resume()

    async def clear_kv_cache(self) -> None:
        """Nothing to do: cached keys carry the weight version, so no later request can read stale ones."""

    async def release_kv_cache(self) -> None:
        """Nothing to do: the service keeps its KV memory. See ``sleep``."""

    async def resume_kv_cache(self) -> None:
        """Nothing to do."""

    async def set_global_steps(self, global_steps: int, version: int | None = None) -> None:
        """The trainer's step that the served weights belong to; a fenced server is up to date again."""
        self._fenced = ""
        self._ready.set_step(int(global_steps), version)

    async def get_global_steps(self) -> int:
        """Step of the weights being served; also how the router asks whether this server lives.

        Raises:
            ReplicaUnavailable: fenced.
        """
        self._require_serving()
        return self._ready.step

    async def fence(self, reason: str) -> None:
        """Serve nothing until weights arrive: the service missed an update and would answer with old ones."""
        log.error("fenced: %s", reason)
        self._fenced = reason

    def _require_serving(self) -> None:
        if self._fenced:
            raise ReplicaUnavailable(f"this server is fenced: {self._fenced}")

    async def wait_for_requests_to_drain(self) -> None:
        """Return once no request is inside."""
        while not await self._ready.drained():
            pass

    async def start_profile(self, **_: Any) -> None:
        """No profiler here; said once in the log."""
        log.warning("zerodrift has no profiler to start; see the service's metrics")

    async def stop_profile(self) -> None:
        """No profiler here."""

    async def get_server_address(self) -> str:
        """host:port of the service."""
        assert self._address is not None, "launch() comes first"
        return self._address

    async def shutdown(self) -> None:
        """Stop a hosted service."""
        if self._hosted is not None:
            await self._hosted.stop()
