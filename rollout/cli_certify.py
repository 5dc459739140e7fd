"""Verbs of the certificate and the manifest: ``certify``, ``manifest show``, ``manifest diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli import Config, JsonFile, Overrides, wide_console, write_json
from rollout.errors import InvalidRequest
from rollout.strict_json import strict_loads

if TYPE_CHECKING:
    from rollout.certify.certificate import Certificate, FamilyResult
    from rollout.model import SharedModel

manifest_app = typer.Typer(help="The parity manifest: what can change a bit.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(certify)
    app.add_typer(manifest_app, name="manifest")


def _model(config: Path | None, overrides: list[str] | None) -> tuple[Any, SharedModel]:
    from rollout.assets import prepare_model
    from rollout.config import load_settings
    from rollout.logs import configure
    from rollout.worker import load_served_model

    settings = load_settings(config, overrides or [])
    configure(settings.log.level, settings.log.as_json)
    return settings, load_served_model(settings, prepare_model(settings.model.path))


def certify(
    config: Config = None,
    full: Annotated[bool, typer.Option("--full", help="Every length and row count; minutes instead of one.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write the certificate; default: the cache.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run nothing: is there a certificate that strict serving would accept?")
    ] = False,
    json_file: JsonFile = None,
    overrides: Overrides = None,
) -> None:
    """Run the invariance battery on this machine with this model; write a certificate; exit 1 if anything differs."""
    import os

    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from rollout.certify.battery import FAMILIES
    from rollout.certify.battery import certify as run_battery
    from rollout.certify.certificate import default_path, write_certificate

    settings, model = _model(config, overrides)
    console = wide_console()
    if check:
        certificate = _accepted(settings, model)
        show(certificate, console)
        write_json(json_file, certificate.to_json())
        return
    counts = sorted({1, settings.engine.threads, min(2, os.cpu_count() or 1)})
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"certifying {model.spec.name}", total=len(FAMILIES))

        def done(result: FamilyResult) -> None:
            progress.update(
                task, advance=1, description=f"{result.name}: {'holds' if result.holds else 'DOES NOT HOLD'}"
            )

        level: Any = "full" if full else "quick"
        certificate = run_battery(model, level=level, thread_counts=counts, progress=done)
    show(certificate, console)
    path = out or default_path(certificate.manifest_digest)
    write_certificate(certificate, path)
    console.print(f"written to {path}", soft_wrap=True)
    write_json(json_file, certificate.to_json())
    raise typer.Exit(0 if certificate.holds else 1)


def _accepted(settings: Any, model: SharedModel) -> Certificate:
    """The certificate that a strict worker would accept. CertificateError: there is none, and why."""
    from rollout.certify.certificate import require_certificate
    from rollout.manifest import build_manifest

    named = settings.engine.certificate
    path = Path(named) if named is not None else None
    return require_certificate(build_manifest(model), path=path, threads=settings.engine.threads)


def show(certificate: Certificate, console: Any) -> None:
    """The certificate as a table and one line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{certificate.level} certificate of {certificate.model}", title_justify="left")
    for name in ("family", "what", "checks", "elements", "planted fault", "cpu s", ""):
        table.add_column(name, justify="right" if name in ("checks", "elements", "cpu s") else "left")
    for f in certificate.families:
        caught = f"{f.control}: {'seen' if f.control_caught else 'NOT SEEN'}"
        mark = Text("holds", style="green") if f.holds else Text("FAILS", style="bold red")
        table.add_row(f.name, f.title, f"{f.checks:,}", f"{f.compared:,}", caught, f"{f.cpu_s:.1f}", mark)
    console.print(table)
    for f in certificate.families:
        for failure in f.failures[:5]:
            console.print(Text(f"{f.name}: {failure}", style="red"), soft_wrap=True)
        if not f.control_caught:
            words = f"{f.name}: its planted fault was not seen, so this family proves nothing here"
            console.print(Text(words, style="red"), soft_wrap=True)
    console.print("plan: " + ", ".join(f"{k} {v}" for k, v in certificate.plan.items()), soft_wrap=True)
    seconds = sum(f.cpu_s for f in certificate.families)
    verdict = "holds" if certificate.holds else "DOES NOT HOLD"
    console.print(
        f"{verdict}: {sum(f.checks for f in certificate.families):,} checks, {seconds:.0f} CPU s, manifest "
        f"{certificate.manifest_digest}",
        soft_wrap=True,
    )


@manifest_app.command("show")
def manifest_show(config: Config = None, json_file: JsonFile = None, overrides: Overrides = None) -> None:
    """What this process would compute with."""
    from rollout.manifest import build_manifest, manifest_digest

    _, model = _model(config, overrides)
    manifest = build_manifest(model)
    for key, value in manifest.items():
        typer.echo(f"{key} = {value}")
    typer.echo(f"digest {manifest_digest(manifest)}")
    write_json(json_file, manifest)


@manifest_app.command("diff")
def manifest_diff(
    left: Annotated[Path, typer.Argument(help="JSON of `manifest show --json`, or a certificate.")],
    right: Annotated[Path, typer.Argument(help="Another one.")],
    json_file: JsonFile = None,
) -> None:
    """What differs between two manifests, and whether it can change a bit; exit 1 if something can."""
    from rich.table import Table

    from rollout.manifest_diff import diff_manifests, in_words

    differences = diff_manifests(read_manifest(left), read_manifest(right))
    console = wide_console()
    if differences:
        table = Table()
        for name in ("key", left.name, right.name, "can change bits?", "why"):
            table.add_column(name)
        for d in differences:
            table.add_row(d.key, str(d.left), str(d.right), "yes" if d.can_change_bits else "no", d.words)
        console.print(table)
    console.print(in_words(differences), soft_wrap=True)
    rows = [
        {"key": d.key, "left": d.left, "right": d.right, "can_change_bits": d.can_change_bits, "why": d.words}
        for d in differences
    ]
    write_json(json_file, {"differences": rows})
    raise typer.Exit(1 if any(d.can_change_bits for d in differences) else 0)


def read_manifest(path: Path) -> dict[str, str]:
    """A manifest from JSON: the flat mapping itself, or a file that holds one under "manifest".

    Raises:
        InvalidRequest: the file is neither.
    """
    try:
        value = strict_loads(path.read_text(encoding="utf-8"))
        found = value.get("manifest", value)
        return {str(k): str(v) for k, v in found.items()}
    except (ValueError, AttributeError) as error:
        raise InvalidRequest(
            f"{path} holds no manifest ({error}); write one with `zerodrift manifest show --json`"
        ) from None
