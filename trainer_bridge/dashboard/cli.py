"""Verbs of the record: ``dashboard`` and ``runs``. Both need the extra ``dashboard``, imported when they run."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.cli import Config, JsonFile, Overrides, write_json
from rollout.errors import ConfigError

DEFAULT_RUNS = Path("runs")
_NEEDED = ("pyarrow", "duckdb", "starlette", "uvicorn")


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(dashboard)
    app.command()(runs)


def require_extra() -> None:
    """Errors: ConfigError that names what is missing and how to get it."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'zerodrift[dashboard]'")


def dashboard(
    folder: Annotated[Path, typer.Option("--runs", help="Runs folder; it may be empty yet.")] = DEFAULT_RUNS,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8420,
    token: Annotated[
        str | None,
        typer.Option(envvar="ZERODRIFT_DASHBOARD_TOKEN", help="Beyond loopback one is made if none is given."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="The service that sampled, with server.debug=true: explain asks it.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file of a certificate chain: serve https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its private key.")] = None,
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", help="Plain http beyond loopback, on a network you trust.")
    ] = False,
    config: Config = None,
    overrides: Overrides = None,
) -> None:
    """Show recorded runs in a browser, live. Settings are those that ``explain``, run from the page, is to use."""
    require_extra()
    from trainer_bridge.dashboard.explain import default_explainer
    from trainer_bridge.dashboard.serve import access_token, bind, page_address, page_tls, serve

    verbs = _verbs()
    tls = page_tls(host, tls_certificate, tls_key, allow_insecure=allow_insecure)
    wanted = access_token(host, token)
    given = ["--config", str(config)] if config is not None else []
    listener = bind(host, port)
    typer.echo(f"dashboard of {folder} at {page_address(listener, wanted, tls)}")
    serve(
        folder,
        listener,
        token=wanted,
        explainer=default_explainer(verbs, [*given, *(overrides or [])], address=address),
        tls=tls,
    )


def _verbs() -> list[str]:
    from rollout.cli import app

    return [c.name or str(getattr(c.callback, "__name__", "")) for c in app.registered_commands]


def runs(
    folder: Annotated[Path, typer.Option("--runs", help="Runs folder.")] = DEFAULT_RUNS,
    keep: Annotated[int | None, typer.Option(min=1, help="Remove all but the newest N runs.")] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=0, help="Then remove tokens of old runs, and old runs, down to this size.")
    ] = None,
    sql: Annotated[
        str | None,
        typer.Option(help="Answer this by DuckDB instead; tables steps, samples and tokens, by run and step."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """List recorded runs with their verdict and size; with a limit, remove old ones first."""
    require_extra()
    if sql is not None:
        from trainer_bridge.store.sql import answer

        typer.echo(answer(folder, sql))
        return
    from rich.console import Console
    from rich.table import Table

    from trainer_bridge.dashboard.summaries import run_summary
    from trainer_bridge.store.reader import RunStore
    from trainer_bridge.store.retention import prune

    if keep is not None or max_bytes is not None:
        for gone in prune(folder, keep_runs=keep, max_bytes=max_bytes):
            typer.echo(f"removed {gone.what} of run {gone.run}, {gone.bytes:,} bytes")
    store = RunStore(folder)
    store.refresh()
    rows: list[dict[str, Any]] = [
        run_summary(store, name) | {"bytes": store.size_bytes(name)} for name in store.names()
    ]
    table = Table()
    for name in ("run", "verdict", "steps", "tokens", "unequal", "bytes"):
        table.add_column(name, justify="left" if name in ("run", "verdict") else "right")
    for r in rows:
        verdict = "no data" if not r["tokens"] else "equal" if r["bitwise_equal"] else "UNEQUAL"
        unequal = r["tokens"] - r["equal_tokens"]
        table.add_row(r["run"], verdict, *(f"{n:,}" for n in (r["steps"], r["tokens"], unequal, r["bytes"])))
    Console().print(table)
    typer.echo(f"{len(rows)} runs, {sum(r['bytes'] for r in rows):,} bytes in {folder}")
    write_json(json_file, {"runs": rows})


def open_browser(address: str) -> bool:
    """Show the page to whoever sits at a terminal with a screen; whether there was one."""
    screen = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return screen and sys.stdout.isatty() and webbrowser.open(address)


@contextlib.contextmanager
def demo_dashboard(record: Path | None, show: bool, settings: Sequence[str] = ()) -> Iterator[Path | None]:
    """Where the demo records, if anywhere. With ``show``, serve the dashboard meanwhile and until Ctrl-C.

    ``settings``: the demo's own, as words of the command line, for ``explain`` from the page.
    """
    if record is None and not show:
        yield None
        return
    require_extra()
    folder = record or DEFAULT_RUNS
    if not show:
        yield folder
        return
    from trainer_bridge.dashboard.explain import default_explainer
    from trainer_bridge.dashboard.serve import bind, page_address, serving_beside

    listener = bind("127.0.0.1", 0)
    with serving_beside(folder, listener, token=None, explainer=default_explainer(_verbs(), settings)):
        typer.echo(f"dashboard: {page_address(listener, None)}")
        open_browser(page_address(listener, None))
        yield folder
        typer.echo("the dashboard stays up; stop it with Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
