"""The command line: ``zerodrift VERB [options] [section.key=value ...]``.

Exit codes: 0 done and equal; 1 something differs or failed; 2 the call or the settings are wrong.
Verbs import what they need when they run, so ``--help`` is quick and environment settings come before torch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.errors import InvalidRequest, RolloutError
from rollout.openmp import spin_setting
from rollout.whole_files import require_place

app = typer.Typer(
    name="zerodrift",
    help="RL rollouts whose log-probs agree bit for bit with the trainer's own forward pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Settings.", no_args_is_help=True)
app.add_typer(config_app, name="config")

Config = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file of settings.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value, after all options.", metavar="[KEY=VALUE]...")
]


def place(path: Path | None) -> Path | None:
    """Callback of options that name a file to write: refused before the work, not after it."""
    return None if path is None else require_place(path)


JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.", callback=place)]


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """The same figures as the printed table, machine-readable."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1, allow_nan=False, default=str) + "\n", encoding="utf-8")


def wide_console() -> Any:
    """A rich console; where output goes to a file or a pipe, wide enough for tables with sentences in them."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)


@app.command()
def serve(config: Config = None, overrides: Overrides = None) -> None:
    """Start Ray, the replicas and the gRPC server; stop with SIGTERM or Ctrl-C."""
    import asyncio

    from rollout import tracing
    from rollout.config import load_settings
    from rollout.logs import configure
    from rollout.serving import Service, serve

    settings = load_settings(config, overrides or [])
    configure(settings.log.level, settings.log.as_json)
    tracing.configure("zerodrift-server")

    def ready(service: Service) -> None:
        typer.echo(f"serving {settings.model.path} on {service.address} with {settings.worker.count} replicas")

    asyncio.run(serve(settings, ready))


@app.command()
def submit(
    address: Annotated[str, typer.Option(help="Dashboard address of a running Ray head, e.g. http://127.0.0.1:8265.")],
    config: Config = None,
    replicas: Annotated[int | None, typer.Option(help="Overrides worker.count.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter on the cluster.")] = None,
    working_dir: Annotated[
        Path | None, typer.Option(help="Folder to upload when zerodrift is not installed on the cluster.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of the authority behind an https:// address; else the system's.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="KEY=VALUE in the job's environment; may be repeated.")] = None,
    verb: Annotated[list[str] | None, typer.Argument(help="Verb and options to run there; default: demo.")] = None,
) -> None:
    """Run a verb (default: the demo) as a Ray job; stream its log and return its exit code."""
    from rollout import launch

    if unclear := [item for item in env or [] if "=" not in item]:
        raise InvalidRequest(f"--env {unclear[0]!r} has no '='; write KEY=VALUE", field="env")
    code = launch.submit(
        config,
        address,
        entrypoint_args=tuple(verb or ["demo"]),
        replicas=replicas,
        env=dict(item.split("=", 1) for item in env or []),
        python=python,
        working_dir=working_dir,
        ca=ca,
    )
    raise typer.Exit(code)


@config_app.command("show")
def config_show(config: Config = None, json_file: JsonFile = None, overrides: Overrides = None) -> None:
    """Every setting, its value and where it came from."""
    from rich.console import Console
    from rich.table import Table

    from rollout.config import describe

    resolved = describe(config, overrides or [])
    table = Table()
    for name in ("setting", "value", "source"):
        table.add_column(name)
    for leaf in resolved:
        table.add_row(leaf.key, repr(leaf.value), leaf.source)
    Console().print(table)
    write_json(json_file, {leaf.key: {"value": leaf.value, "source": leaf.source} for leaf in resolved})


@app.command()
def kernels(json_file: JsonFile = None) -> None:
    """The kernel sets of this build and what each supports."""
    from rich.console import Console
    from rich.table import Table

    from rollout.kernels.base import FEATURES
    from rollout.kernels.registry import columns, platform_default

    sets = columns()
    table = Table()
    table.add_column("feature", no_wrap=True)
    for one in sets:
        table.add_column(one.title, overflow="fold")
    for feature, meaning in FEATURES.items():
        table.add_row(meaning, *(one.support[feature] for one in sets))
    table.add_row("KV page sizes", *(", ".join(map(str, sorted(one.capabilities.page_sizes))) for one in sets))
    dtypes = [sorted(str(d).removeprefix("torch.") for d in one.capabilities.dtypes) for one in sets]
    table.add_row("dtypes", *(", ".join(names) for names in dtypes))
    for operation in dict.fromkeys(operation for one in sets for operation in one.providers or ()):
        table.add_row(f"[dim]{operation}[/dim]", *((one.providers or {}).get(operation, "") for one in sets))
    console = Console()
    console.print(table)
    console.print(f"platform default: {platform_default()}")
    for name, here in {one.name: one.here for one in sets}.items():
        console.print(f"{name}: {here}")
    write_json(
        json_file,
        {
            one.title: {
                "name": one.name,
                "features": sorted(one.capabilities.features),
                "support": dict(one.support),
                "providers": one.providers and dict(one.providers),
                "here": one.here,
            }
            for one in sets
        },
    )


@app.command()
def doctor(json_file: JsonFile = None) -> None:
    """What is on this host, what is missing for which feature, and the next step."""
    # An installed torch_npu without CANN breaks `import torch`, and that is what the doctor is asked about.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    from rich.console import Console
    from rich.table import Table

    from rollout.doctor import examine

    findings = examine()
    table = Table()
    for column in ("part", "state", "found"):
        table.add_column(column, overflow="fold", min_width=len(column))
    for finding in findings:
        table.add_row(finding.part, finding.state, finding.found)
    console = Console()
    console.print(table)
    for finding in findings:
        if finding.next_step:
            console.print(f"{finding.part} (for {finding.needed_for}): {finding.next_step}", soft_wrap=True)
    write_json(json_file, {f.part: f.as_dict() for f in findings})
    if any(f.state == "broken" for f in findings):
        raise typer.Exit(1)


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whose token it is: stands in the audit log, and is its fair share.")],
    role: Annotated[str, typer.Option(help="generate, or control: also weights, pause, abort of everything.")],
    out: Annotated[
        Path | None, typer.Option(help="File for the token, readable by its owner only; else it is printed.")
    ] = None,
) -> None:
    """Make a token: the token for the client, and its line for the server's file (server.tokens)."""
    from rollout.access import new_token
    from rollout.call_scope import Role

    if role not in list(Role):
        raise InvalidRequest(f"--role {role!r} is neither {' nor '.join(Role)}", field="role")
    made, line = new_token(name, Role(role))
    if out is None:
        typer.echo(f"token, for the client: {made}", err=True)
    else:
        with open(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(made + "\n")
    typer.echo(line)


def _register_bridge() -> None:
    """Verbs of the trainer's side live with it."""
    from rollout.cli_certify import register as register_certify
    from trainer_bridge.cli import register

    register_certify(app)
    register(app)


def main() -> None:
    """Entry point."""
    # Read once, when OpenMP loads.
    os.environ.update(spin_setting())
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _register_bridge()
    try:
        app()
    except OSError as error:
        # A file or an address that the caller named.
        typer.echo(f"zerodrift: {error}", err=True)
        sys.exit(2)
    except RolloutError as error:
        typer.echo(f"zerodrift: {error.message}", err=True)
        sys.exit(2 if isinstance(error, InvalidRequest) else 1)
