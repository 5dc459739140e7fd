"""One replica: an engine on its thread behind asynchronous methods. Ray makes an actor of it; tests use it as it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollout.activation_log import ActivationLog
from rollout.certify.certificate import require_certificate
from rollout.certify.plans import take_certified_plan
from rollout.config import EngineSettings, Settings
from rollout.detokenize import Detokenizer
from rollout.engine import Engine
from rollout.engine_thread import EngineThread
from rollout.errors import ConfigError, NotFound, ReplicaUnavailable, RolloutError
from rollout.events import Event
from rollout.kernels.base import KVLayout
from rollout.kernels.registry import kernels_of
from rollout.manifest import build_manifest
from rollout.model import DTYPES, SharedModel, load_model
from rollout.openmp import passing_team
from rollout.sample_spans import SampleSpans
from rollout.scheduler import SchedulerLimits
from rollout.taps import Trace, Tracer, TraceRequest
from rollout.types import (
    EngineStats,
    ReplicaDigests,
    ReplicaLoad,
    SampleRequest,
    ScoreOptions,
    ScoreSequence,
    TensorChunk,
    UpdatePolicy,
    WeightState,
    WeightUpdate,
)
from rollout.weight_export import ExportPlace, export_bucket
from rollout.weight_transfer import bucket_of
from rollout.weights import model_digest, parameter_digests

T = TypeVar("T")
MESSAGES_PER_S = 40.0
"""How many messages of tokens a replica sends at most while samples go on; server and client pay for each."""
GATHER_S = (0.05, 0.8)
"""Shortest and longest wait of a token for company; the last tokens of a sample never wait."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a replica is; equal on all replicas of a service but for ``name``."""

    name: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    manifest: Mapping[str, str]
    weights: WeightState


def load_served_model(settings: Settings, path: Path) -> SharedModel:
    """The model a service with these settings serves: kernel set resolved once, from here on known by its name."""
    kernels = kernels_of(settings)
    return load_model(
        path,
        dtype=DTYPES[settings.model.dtype],
        kernels=kernels,
        context_length=settings.model.context_length,
        vision_attention=settings.kernels.vision_attention,
    )


def load_tokenizer(settings: Settings, path: Path) -> Detokenizer | None:
    """The checkpoint's tokenizer; None when it ships none and none was asked for."""
    if settings.model.tokenizer is not None:
        return Detokenizer(settings.model.tokenizer)
    return Detokenizer(path) if (path / "tokenizer.json").exists() else None


def load_engine(settings: Settings, path: Path, name: str) -> tuple[Engine, dict[str, str]]:
    """An engine for these settings with its manifest; with ``engine.strict`` only under a certificate."""
    engine = settings.engine
    model = load_served_model(settings, path)
    file = Path(engine.certificate) if engine.certificate is not None else None
    if engine.strict:
        take_certified_plan(model, file)
    _check_memory(model, engine)
    manifest = build_manifest(model)
    if engine.strict:
        require_certificate(manifest, path=file, threads=engine.threads)
    limits = SchedulerLimits(
        engine.max_batch_tokens,
        engine.max_running,
        engine.max_waiting,
        engine.chunk_size,
        engine.page_size,
        engine.max_waiting_per_client,
    )
    made = Engine(
        model,
        limits,
        kv_cache_tokens=engine.kv_cache_tokens,
        tokenizer=load_tokenizer(settings, path),
        name=name,
        prefix_cache=engine.prefix_cache,
    )
    if engine.activation_log is not None:
        made.activation_log = ActivationLog(Path(engine.activation_log.replace("{name}", name)))
    return made, manifest


def _check_memory(model: SharedModel, engine: EngineSettings) -> None:
    """Refuse KV that the host can never hold: it is taken whole at start, and a machine that swaps answers nobody."""
    spec = model.spec
    num_pages = engine.kv_cache_tokens // engine.page_size
    layout = KVLayout(spec.num_layers, num_pages, engine.page_size, spec.num_kv_heads, spec.head_dim, spec.dtype)
    wanted = num_pages * layout.bytes_per_page
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if model.device.type == "cpu" and wanted > total:
        fits = total // layout.bytes_per_page * engine.page_size
        raise ConfigError(
            f"engine.kv_cache_tokens = {engine.kv_cache_tokens} takes {wanted:.3g} bytes, this machine has "
            f"{total:.3g}; at most {fits} tokens fit, less the weights",
            field="engine.kv_cache_tokens",
        )


def aside(function: Callable[..., T], *args: Any) -> T:
    """Call on a thread other than the engine's, whose kernels must not lose their OpenMP threads' attention by it."""
    with passing_team():
        return function(*args)


class Worker:
    """Hosts one engine. Methods may run concurrently; the engine itself is touched by its own thread alone."""

    def __init__(self, settings: Settings, path: str, name: str) -> None:
        torch.set_num_threads(settings.engine.threads)
        with passing_team():
            self._engine, self._manifest = load_engine(settings, Path(path), name)
            weights = WeightState(0, model_digest(self._engine.model))
        self._thread = EngineThread(self._engine, weights, threads=settings.engine.threads)
        self._spans = SampleSpans(name)
        self._thread.start()

    async def info(self) -> WorkerInfo:
        """What this replica is and which weights it serves."""
        spec = self._engine.model.spec
        return WorkerInfo(
            self._engine.name,
            spec.vocab_size,
            spec.context_length,
            spec.eos_token_ids,
            self._manifest,
            self._thread.weights,
        )

    async def load(self) -> ReplicaLoad:
        """Queue lengths and free pages, without waiting for a step to end."""
        engine = self._engine
        return ReplicaLoad(
            name=engine.name,
            healthy=self._thread.broken is None,
            running=engine.num_running,
            waiting=engine.num_waiting,
            free_pages=engine.pages.num_free,
            total_pages=engine.pages.num_pages,
            weights=self._thread.weights,
        )

    async def busy_s(self) -> float:
        """Seconds since the engine's present turn began; 0 while it has nothing to do."""
        return self._thread.busy_s

    async def pid(self) -> int:
        """Of the process that hosts the engine."""
        return os.getpid()

    async def export(self, place: ExportPlace, most_bytes: int) -> tuple[list[TensorChunk], ExportPlace | None]:
        """A bucket of the weights being served, from ``place`` on, and the next place; None after the last byte."""
        return await self._do(lambda: export_bucket(self._engine.model, place, most_bytes))

    async def stats(self) -> EngineStats:
        """Counts since the start, without waiting for a step to end."""
        engine = self._engine
        return EngineStats(engine.num_steps, engine.num_rows, engine.scheduler.num_preemptions)

    async def tensor_digests(self) -> ReplicaDigests:
        """Digests of the live bytes, computed between steps."""
        model, thread = self._engine.model, self._thread
        return await self._do(
            lambda: ReplicaDigests(
                self._engine.name, thread.weights, {n: d.hex() for n, d in parameter_digests(model).items()}
            )
        )

    async def trace(self, request: TraceRequest) -> Trace:
        """Replay a sequence with taps, on pages of its own, between steps."""
        tracer = Tracer(self._engine.model, self._engine.decoder)
        return await self._do(lambda: tracer.trace(request))

    async def tensor(self, name: str) -> torch.Tensor:
        """A copy of a parameter as it is served."""

        def copy() -> torch.Tensor:
            found = dict(self._engine.model.parameters()).get(name)
            if found is None:
                raise NotFound(f"the model has no parameter {name!r}", field="name")
            return found.detach().clone()

        return await self._do(copy)

    # ---- requests -----------------------------------------------------------------------------------------------

    async def check(self, request: SampleRequest) -> SampleRequest:
        """Validate a sample and resolve its limits without queueing it."""
        return self._engine.effective_request(request)

    async def submit(self, requests: list[SampleRequest]) -> None:
        """Queue samples, all or none."""
        # First: a sample may end before this call goes on.
        self._spans.begin(requests)
        try:
            await self._do(lambda: self._add_all([lambda r=r: self._engine.add(r) for r in requests], requests))
        except BaseException:
            self._spans.forget(requests)
            raise

    async def submit_scores(self, ids: list[str], sequences: list[ScoreSequence], options: ScoreOptions) -> None:
        """Queue sequences to score, all or none."""
        adds = [lambda i=i, s=s: self._add_score(i, s, options) for i, s in zip(ids, sequences, strict=True)]
        await self._do(lambda: self._add_all(adds, ids))

    def _add_score(self, sample_id: str, sequence: ScoreSequence, options: ScoreOptions) -> None:
        self._engine.add_score(
            sample_id,
            sequence,
            temperature=options.temperature,
            want_digests=options.row_digests,
            top_logprobs=options.top_logprobs,
            priority=options.priority,
            client=options.client,
        )

    def _add_all(self, adds: list[Any], what: list[Any]) -> None:
        added: list[str] = []
        ends: list[Event] = []
        try:
            for add, item in zip(adds, what, strict=True):
                if (end := add()) is not None:
                    ends.append(end)
                else:
                    added.append(item if isinstance(item, str) else item.sample_id)
        except RolloutError:
            for sample_id in added:
                self._engine.abort(sample_id, "a sibling was refused")
            raise
        self._thread.outbox.put(ends)

    async def abort(self, sample_ids: list[str], message: str) -> int:
        """End live samples; unknown ids are ones that just ended, and are skipped. Returns how many were live."""
        return await self._do(lambda: self._abort_now(sample_ids, message))

    def _abort_now(self, sample_ids: list[str], message: str) -> int:
        count = 0
        for sample_id in sample_ids:
            try:
                self._thread.outbox.put([self._engine.abort(sample_id, message)])
            except NotFound:
                continue
            count += 1
        return count

    async def next_events(self, timeout_s: float) -> list[Event]:
        """Everything since the last call; waits for the first event up to ``timeout_s``. One reader at a time."""
        least, most = GATHER_S
        gather_s = min(most, max(least, self._engine.num_running / MESSAGES_PER_S))
        events = await asyncio.get_running_loop().run_in_executor(None, self._thread.outbox.take, timeout_s, gather_s)
        broken = self._thread.broken
        if broken is not None and not events:
            raise ReplicaUnavailable(f"worker {self._engine.name} is broken: {broken.message}")
        self._spans.see(events)
        return events

    async def abandon(self) -> None:
        """Drop everything that runs, waits or is staged, and whatever nobody fetched; the weights stay."""
        await self.release()
        await self._do(lambda: [self._engine.abort(i, "its gateway is gone") for i in self._engine.live_ids])
        self._thread.outbox.take(0.0)
        await self.resume()

    # ---- control ------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Returns once no step will start before ``resume``."""
        await asyncio.wrap_future(self._thread.pause())

    async def resume(self) -> None:
        """Let steps start again."""
        await asyncio.wrap_future(self._thread.resume())

    async def stage(self, update: WeightUpdate) -> None:
        """Phase 1: open a stage; WeightUpdateError unless the version is newer."""
        self._thread.stage(update)

    async def stage_chunks(self, chunks: list[TensorChunk]) -> None:
        """Fill the stage beside the running engine; WeightUpdateError for a chunk that does not fit the model."""
        await asyncio.get_running_loop().run_in_executor(None, aside, self._thread.stage_chunks, chunks)

    async def stage_bucket(self, bucket: list[Any]) -> None:
        """``stage_chunks`` of what one reference leads to; its bytes stay where this node's object store has them."""
        await asyncio.get_running_loop().run_in_executor(
            None, aside, lambda: self._thread.stage_chunks(bucket_of(bucket[0]))
        )

    async def verify_stage(self, digest: str = "") -> None:
        """Phase 2: WeightUpdateError unless the stage is whole and of this root digest ("": that of its head)."""
        await asyncio.get_running_loop().run_in_executor(None, aside, self._thread.verify_stage, digest)

    async def quiesce(self, policy: UpdatePolicy) -> None:
        """Phase 3: returns once requests in flight are dealt with and no step will start before ``release``."""
        await asyncio.wrap_future(self._thread.quiesce(policy))

    async def commit(self) -> WeightState:
        """Phase 4: serve the staged weights; running samples' KV is rebuilt."""
        return await asyncio.wrap_future(self._thread.commit())

    async def release(self) -> None:
        """End of an update, committed or not: drop the stage and go on."""
        await asyncio.wrap_future(self._thread.release())

    async def shutdown(self) -> None:
        """Stop the engine's thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._thread.stop)

    async def _do(self, command: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._thread.call(command))
