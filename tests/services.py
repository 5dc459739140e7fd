"""Tiny services, their references and the tools that stop an engine at an exact step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout.assets import tiny_model
from rollout.config import Settings
from rollout.engine import Engine
from rollout.engine_thread import EngineThread
from rollout.events import Event, FailureEvent
from rollout.scheduler import SchedulerLimits
from rollout.serving import Service, running_service
from rollout.types import GenerateRequest, SampleEvent, SampleRequest, SamplingParams, TokenChunk
from rollout.worker import load_served_model, load_tokenizer
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.forward import TrainingForward, TrainingSample
from trainer_bridge.wire import GenerateResult

T = TypeVar("T")
WATCHDOG_S = 20.0
PAGE, CHUNK = 16, 24
PROMPT = (3, 4, 5)
"""The tiny models' EOS is id 1."""


def tiny_settings(
    path: Path,
    *,
    replicas: int = 1,
    tokenizer: Path | None = None,
    weights: dict[str, Any] | None = None,
    **engine: Any,
) -> Settings:
    """float32, small pages, chunks and buckets, so that short sequences cross their edges; a free port."""
    sizes = {"page_size": PAGE, "kv_cache_tokens": 4096, "max_batch_tokens": 64, "max_running": 8, "chunk_size": CHUNK}
    return Settings.model_validate(
        {
            "model": {
                "path": str(path),
                "dtype": "float32",
                "context_length": 512,
                "tokenizer": None if tokenizer is None else str(tokenizer),
            },
            "engine": sizes | engine,
            "worker": {"count": replicas},
            "server": {"port": 0, "max_n": 16},
            "weights": {"bucket_bytes": 4096} | (weights or {}),
        }
    )


@asynccontextmanager
async def tiny_service(
    path: Path,
    *,
    replicas: int = 1,
    tokenizer: Path | None = None,
    weights: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[tuple[Service, AsyncRolloutClient]]:
    """A served tiny model in this process, and a client of it."""
    settings = tiny_settings(path, replicas=replicas, tokenizer=tokenizer, weights=weights, **engine)
    async with running_service(settings, in_process=True) as service, AsyncRolloutClient(service.address) as client:
        yield service, client


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, or TimeoutError where the service hangs."""
    return await asyncio.wait_for(awaitable, WATCHDOG_S)


def sampling(seed: int | None = 7, max_tokens: int | None = 40, **fields: Any) -> SamplingParams:
    """Past EOS unless told otherwise: lengths are then known."""
    return SamplingParams(seed=seed, max_tokens=max_tokens, **({"ignore_eos": True} | fields))


# ---- what is compared -------------------------------------------------------------------------------------------


class Bits(NamedTuple):
    """A sample, by bytes."""

    sample: int
    ids: tuple[int, ...]
    policy: bytes
    behavior: bytes
    digests: bytes


def bits(result: GenerateResult) -> list[Bits]:
    """Every sample of a result."""
    return [
        Bits(
            s.sample_index,
            tuple(s.token_ids.tolist()),
            s.policy_logprobs.tobytes(),
            s.behavior_logprobs.tobytes(),
            b"" if s.row_digests is None else s.row_digests.tobytes(),
        )
        for s in result.samples
    ]


def bits_of_chunks(chunks: Iterable[TokenChunk]) -> list[Bits]:
    """Samples put together from their chunks, by index; a gap or a repetition is an error."""
    parts: dict[int, list[TokenChunk]] = {}
    for chunk in chunks:
        have = parts.setdefault(chunk.sample_index, [])
        assert chunk.offset == sum(len(c.token_ids) for c in have), "a token is lost or repeated"
        have.append(chunk)
    return [
        Bits(
            index,
            tuple(int(i) for c in have for i in c.token_ids),
            b"".join(c.policy_logprobs.tobytes() for c in have),
            b"".join(c.behavior_logprobs.tobytes() for c in have),
            b"".join(c.row_digests.tobytes() for c in have if c.row_digests is not None),
        )
        for index, have in sorted(parts.items())
    ]


def make_engine(settings: Settings) -> Engine:
    """An engine as ``Worker`` makes it, without thread, pool or server."""
    path, e = Path(settings.model.path), settings.engine
    limits = SchedulerLimits(e.max_batch_tokens, e.max_running, e.max_waiting, e.chunk_size, e.page_size)
    return Engine(
        load_served_model(settings, path),
        limits,
        kv_cache_tokens=e.kv_cache_tokens,
        tokenizer=load_tokenizer(settings, path),
        prefix_cache=e.prefix_cache,
    )


def engine_bits(settings: Settings, requests: Sequence[GenerateRequest]) -> list[list[Bits]]:
    """What a bare engine answers to requests that all have a seed."""
    engine = make_engine(settings)
    owner: dict[str, int] = {}
    for number, request in enumerate(requests):
        for index in range(request.sample_index, request.sample_index + request.n):
            sample = SampleRequest(
                f"{number}/{index}", request.prompt_ids, request.sampling, index, request.row_digests
            )
            engine.add(engine.effective_request(sample))
            owner[sample.sample_id] = number
    chunks: list[list[TokenChunk]] = [[] for _ in requests]
    with engine.model.kernels.invariant_mode():
        while engine.live_ids:
            for event in engine.step():
                assert isinstance(event, SampleEvent)
                if event.chunk is not None:
                    chunks[owner[event.sample_id]].append(event.chunk)
    return [bits_of_chunks(part) for part in chunks]


def mixed_requests(count: int, *, row_digests: bool = True) -> list[GenerateRequest]:
    """Prompts across page and chunk edges, parameters of every kind, one to three samples each."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.0},
        {"top_p": 0.6},
        {"min_p": 0.2},
    ]
    lengths = (1, 15, 16, 17, 24, 25, 49)
    return [
        GenerateRequest(
            f"request-{i}",
            tuple(2 + (i + j * 7) % 60 for j in range(lengths[i % len(lengths)])),
            sampling(seed=100 + i, max_tokens=6 + 5 * (i % 4), **kinds[i % len(kinds)]),
            n=1 + i % 3,
            row_digests=row_digests,
        )
        for i in range(count)
    ]


# ---- weights and the trainer's side -----------------------------------------------------------------------------


def version_path(base: Path, seed: int) -> Path:
    """Folder of the tiny Qwen3 with other weights, beside the first."""
    folder = base.parent / f"{base.name}-weights-{seed}"
    return folder if folder.exists() else tiny_model("qwen3", folder, seed=seed)


def tensors_of(path: Path) -> list[tuple[str, torch.Tensor]]:
    """Named parameters of a folder, as a trainer sends them."""
    model = load_served_model(tiny_settings(path), path)
    return [(name, parameter.detach()) for name, parameter in model.parameters()]


def training_bits(
    path: Path, samples: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0
) -> list[tuple[bytes, bytes]]:
    """(log-probs, row digests) of (prompt, generated) pairs by the trainer's forward over one packed batch."""
    forward = TrainingForward(load_served_model(tiny_settings(path), path))
    batch = [TrainingSample(np.array(p, np.int32), np.array(g, np.int32), temperature) for p, g in samples]
    with torch.no_grad(), forward.aligned():
        out = forward(batch, digests=True)
    hashed = [d for d in out.split_digests() if d is not None]
    return [(lp.numpy().tobytes(), d.tobytes()) for lp, d in zip(out.split(), hashed, strict=True)]


def word_tokenizer(folder: Path, *, defined: int = 60) -> Path:
    """A tokenizer that spells id 7 as "w7"; ids from ``defined`` on mean nothing."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(defined)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


# ---- holding an engine ------------------------------------------------------------------------------------------


def engine_threads(service: Service) -> list[EngineThread]:
    """The engines of an in-process service, in order of replica."""
    replicas: list[Any] = service.pool._router.replicas
    return [replica._worker._thread for replica in replicas]


class StepGate:
    """Stops an engine right after its k-th step with work in it, before any further command or step."""

    def __init__(self, thread: EngineThread, steps: int) -> None:
        self._left = steps
        self._reached, self._go = threading.Event(), threading.Event()
        self._engine: Any = thread.engine
        self._step: Callable[[], list[Event]] = thread.engine.step
        self._engine.step = self._gated

    def _gated(self) -> list[Event]:
        busy = bool(self._engine.live_ids)
        events = self._step()
        if busy:
            self._left -= 1
            if self._left == 0:
                self._reached.set()
                self._go.wait(WATCHDOG_S)
        return events

    async def reached(self) -> None:
        """Wait until the engine stands."""
        assert await asyncio.to_thread(self._reached.wait, WATCHDOG_S), "the engine never came to the gate"

    def open(self) -> None:
        """Let it go on, commands first."""
        self._go.set()

    async def __aenter__(self) -> StepGate:
        return self

    async def __aexit__(self, *_: object) -> None:
        # An engine left standing would turn a failed assertion into a hang.
        self.open()


class CallSignal:
    """Says when a method of one object has been called, and returned."""

    def __init__(self, owner: Any, method: str) -> None:
        self._called = threading.Event()
        original = getattr(owner, method)

        def wrapped(*args: Any) -> Any:
            result = original(*args)
            self._called.set()
            return result

        setattr(owner, method, wrapped)

    async def called(self) -> None:
        """Wait for the next call since this was made."""
        assert await asyncio.to_thread(self._called.wait, WATCHDOG_S), "never called"


async def queued(thread: EngineThread, command: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """The command as a task that has reached the engine's queue."""
    signal = CallSignal(thread, "call")
    task = asyncio.ensure_future(command)
    await signal.called()
    return task


async def loop_turns(thread: EngineThread, count: int = 10) -> None:
    """``count`` turns of the engine's loop: each would hold a step if the engine were free to make one."""
    for _ in range(count):
        await soon(asyncio.wrap_future(thread.call(lambda: None)))


def generated(thread: EngineThread) -> dict[str, int]:
    """Tokens sampled so far by each live sample."""
    return {name: sequence.num_generated for name, sequence in thread.engine._live.items()}


async def assert_idle(client: AsyncRolloutClient) -> None:
    """Nothing runs or waits, and every page is free."""
    for replica in (await client.info()).replicas:
        assert (replica.running, replica.waiting) == (0, 0), replica
        assert replica.free_pages == replica.total_pages, replica


def check_pages(service: Service) -> None:
    """The books balance and no sequence holds a page."""
    for thread in engine_threads(service):
        thread.engine.scheduler.check()
        assert thread.engine.pages.num_free == thread.engine.pages.num_pages


def is_failure(event: Event) -> bool:
    """Whether the event is a typed failure."""
    return isinstance(event, FailureEvent)
