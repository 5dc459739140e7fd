"""The dashboard's routes: a page without a build step, JSON of the views, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rollout.errors import InvalidRequest, NotFound, ReplicaUnavailable, RolloutError, UnsupportedFeature
from trainer_bridge.dashboard.explain import Explainer, require
from trainer_bridge.dashboard.guard import Guard
from trainer_bridge.dashboard.queries import Queries, StepRange
from trainer_bridge.dashboard.sample_line import sample_line
from trainer_bridge.dashboard.summaries import run_page, run_summary, sample_page, step_page
from trainer_bridge.dashboard.watch import Watcher
from trainer_bridge.explain.source import Side
from trainer_bridge.store.merge import plain
from trainer_bridge.store.reader import RunStore

SIDES: tuple[Side, ...] = ("rollout", "trainer")
STATIC = Path(__file__).parent / "static"
_STATUS: tuple[tuple[type[RolloutError], int], ...] = (
    (NotFound, 404),
    (InvalidRequest, 400),
    (UnsupportedFeature, 501),
    (ReplicaUnavailable, 502),
)


class Json(Response):
    """JSON; a float is written with the shortest decimal that reads back as the same float. NaN is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Bytes of the content."""
        try:
            return _dumps(content)
        except ValueError:
            # One reward that is NaN must not hide a whole run.
            return _dumps(_plain(content))


def _dumps(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return plain(value) if isinstance(value, float) else value


class Api:
    """Handlers over one store. Blocking reads run in threads."""

    def __init__(self, store: RunStore, explainer: Explainer | None) -> None:
        self._store = store
        self._queries = Queries(store)
        self._explainer = explainer
        self._explaining = asyncio.Lock()

    async def runs(self, request: Request) -> Response:
        """The run list."""

        def read() -> dict[str, Any]:
            store = self._store
            rows = [run_summary(store, name) | {"bytes": store.size_bytes(name)} for name in store.names()]
            return {"root": str(self._store.root), "runs": rows}

        return Json(await asyncio.to_thread(read))

    async def run(self, request: Request) -> Response:
        """One run: summary, trends, manifests."""
        return Json(await asyncio.to_thread(run_page, self._store, _run(request)))

    async def step(self, request: Request) -> Response:
        """Every figure of one step."""
        step = _integer(request.path_params["step"], "step")
        found = await asyncio.to_thread(step_page, self._store, _run(request), step)
        if found is None:
            raise NotFound(f"run {_run(request)!r} has no step {step}", field="step")
        return Json(found)

    async def distribution(self, request: Request) -> Response:
        """Histograms and density."""
        return Json(await asyncio.to_thread(self._queries.distribution, _run(request), _steps(request)))

    async def where(self, request: Request) -> Response:
        """Heat map and groups."""
        return Json(await asyncio.to_thread(self._queries.where, _run(request), _steps(request)))

    async def worst(self, request: Request) -> Response:
        """Unequal tokens of the largest |D|."""
        steps = _steps(request)
        total, rows = await asyncio.to_thread(self._store.worst, _run(request), steps.first, steps.last)
        return Json({"total": total, "rows": [_finite(row) for row in rows]})

    async def samples(self, request: Request) -> Response:
        """Kept samples of a step."""
        step = _integer(request.path_params["step"], "step")
        rows = await asyncio.to_thread(self._store.samples, _run(request), step)
        return Json({"total": len(rows), "rows": rows[:500]})

    async def sample(self, request: Request) -> Response:
        """One sample with its tokens."""
        return Json(await asyncio.to_thread(sample_page, self._store, _run(request), *_sample(request)))

    async def sample_file(self, request: Request) -> Response:
        """The sample as a JSONL file for ``compare``, ``explain`` and ``replay``."""
        side: Side = "trainer" if request.query_params.get("side") == "trainer" else "rollout"
        line = await asyncio.to_thread(sample_line, self._store, _run(request), *_sample(request), side)
        headers = {"content-disposition": 'attachment; filename="sample.jsonl"'}
        return PlainTextResponse(line + "\n", media_type="application/jsonl", headers=headers)

    async def explain(self, request: Request) -> Response:
        """Run the explainer on a sample."""
        explainer = require(self._explainer)
        place = (self._store, _run(request), *_sample(request))
        lines = [await asyncio.to_thread(sample_line, *place, side) for side in SIDES]
        if self._explaining.locked():
            raise ReplicaUnavailable("another explanation is running; try again when it is done")
        async with self._explaining:
            return Json(await explainer(*lines))

    async def explainer(self, request: Request) -> Response:
        """Whether a sample can be explained from the page now, by whom, and why not."""
        if self._explainer is None:
            return Json({"available": False, "address": None, "reason": ""})
        reason = await self._explainer.trouble()
        return Json({"available": not reason, "address": self._explainer.address, "reason": reason})


def build_app(
    root: Path, *, token: str | None = None, explainer: Explainer | None = None, interval_s: float = 1.0
) -> Starlette:
    """The application.

    Args:
        root: runs folder; it may be missing or empty yet.
        token: what ``/api`` calls must carry; None: whoever asks by a loopback name.
        explainer: runs ``explain`` from the page; None: the page shows the command only.
        interval_s: seconds between two looks at the folder.
    """
    store = RunStore(root)
    watcher = Watcher(store, interval_s=interval_s)
    api = Api(store, explainer)

    async def events(request: Request) -> Response:
        return StreamingResponse(
            watcher.events(),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "content-encoding": "identity"},
        )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await watcher.start()
        yield
        await watcher.stop()

    handlers: dict[str, Callable[[Request], Any]] = {
        "/api/events": events,
        "/api/explainer": api.explainer,
        "/api/runs": api.runs,
        "/api/runs/{run}": api.run,
        "/api/runs/{run}/distribution": api.distribution,
        "/api/runs/{run}/where": api.where,
        "/api/runs/{run}/worst": api.worst,
        "/api/runs/{run}/steps/{step}": api.step,
        "/api/runs/{run}/steps/{step}/samples": api.samples,
        "/api/runs/{run}/steps/{step}/sample": api.sample,
        "/api/runs/{run}/steps/{step}/sample.jsonl": api.sample_file,
    }
    routes = [Route(path, handler) for path, handler in handlers.items()]
    app = Starlette(
        routes=[
            *routes,
            Route("/api/runs/{run}/steps/{step}/explain", api.explain, methods=["POST"]),
            Route("/", _index),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, token=token), Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)],
        exception_handlers={RolloutError: _error},  # type: ignore[dict-item]
        lifespan=lifespan,
    )
    app.state.store, app.state.watcher = store, watcher
    return app


async def _index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


async def _error(request: Request, error: RolloutError) -> Response:
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    return Json({"error": error.message}, status_code=status)


def _run(request: Request) -> str:
    return str(request.path_params["run"])


def _steps(request: Request) -> StepRange:
    first, last = request.query_params.get("first"), request.query_params.get("last")
    return StepRange(
        None if first is None else _integer(first, "first"), None if last is None else _integer(last, "last")
    )


def _sample(request: Request) -> tuple[int, str, int]:
    return (
        _integer(request.path_params["step"], "step"),
        request.query_params.get("request", ""),
        _integer(request.query_params.get("index", "0"), "index"),
    )


def _integer(text: str, name: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InvalidRequest(f"{name} = {text[:40]!r} is not an integer", field=name) from None
    if not -(2**63) <= value < 2**63:
        raise InvalidRequest(f"{name} = {text[:40]} is beyond 64 bits", field=name)
    return value


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
