"""``zerodrift weights``: do trainer and rollout hold the same bytes?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout.cli import JsonFile, write_json
from rollout.errors import InvalidRequest
from rollout.strict_json import strict_loads

if TYPE_CHECKING:
    from trainer_bridge.weight_check import ReplicaVerdict

weights_app = typer.Typer(help="Digests of weights.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.add_typer(weights_app, name="weights")


@weights_app.command("verify")
def verify(
    address: Annotated[str, typer.Option(help="host:port of the service.")] = "127.0.0.1:50051",
    folder: Annotated[Path | None, typer.Option(help="Checkpoint folder that every replica should hold.")] = None,
    digests: Annotated[
        Path | None, typer.Option(help="JSON of a trainer's digests: parameter name to hex, or of `weights digest`.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Hash every replica's live tensors anew and compare; exit 1 and name the first tensor where one differs.

    With neither folder nor digests: the replicas with each other and with the digest that they say they serve.
    """
    from rollout.model import DTYPES
    from trainer_bridge.client import RolloutClient
    from trainer_bridge.weight_check import folder_digests, verify_replicas
    from trainer_bridge.wire.channel import ClientSecurity

    if folder is not None and digests is not None:
        raise InvalidRequest("give a folder or digests, not both", field="folder")
    with RolloutClient(address, security=ClientSecurity.from_environment()) as client:
        info = client.info(tensor_digests=True)
    expected: dict[str, str] | None = None
    if folder is not None:
        tied = "lm_head.weight" not in info.tensor_digests
        expected = folder_digests(folder, DTYPES[info.manifest["dtype.model"]], tied=tied)
    elif digests is not None:
        expected = read_digests(digests)
    verdicts = verify_replicas(info, expected)
    for verdict in verdicts:
        typer.echo(in_words(verdict))
    if silent := [r.name for r in info.replicas if r.name not in {v.name for v in verdicts}]:
        typer.echo(f"not asked, since out of rotation: {', '.join(silent)}")
    write_json(
        json_file,
        {
            v.name: {
                "version": v.version, "root": v.root, "holds": v.holds, "claimed": v.claimed,
                "differing": v.differing, "missing": v.missing, "extra": v.extra,
            }
            for v in verdicts
        },
    )  # fmt: skip
    raise typer.Exit(0 if all(v.holds for v in verdicts) else 1)


@weights_app.command("digest")
def digest(
    folder: Annotated[Path, typer.Argument(help="Folder with *.safetensors.")],
    json_file: JsonFile = None,
) -> None:
    """Root digest of a folder, names and dtypes as stored; with --json also of every tensor."""
    from rollout.weight_folder import stored_digests
    from rollout.weights import root_digest

    found = stored_digests(folder)
    typer.echo(f"{root_digest(found)}  {len(found)} tensors")
    write_json(json_file, {name: value.hex() for name, value in found.items()})


def in_words(verdict: ReplicaVerdict) -> str:
    """One line about one replica."""
    head = f"{verdict.name}: version {verdict.version}, root {verdict.root}: "
    if verdict.holds:
        return head + "holds"
    parts = [
        f"{len(names)} {what}, first {names[0]!r}"
        for what, names in (
            ("tensors differ", verdict.differing),
            ("are missing", verdict.missing),
            ("are not expected", verdict.extra),
        )
        if names
    ]
    if not verdict.claimed:
        parts.append("its live tensors are not what it says it serves")
    return head + "DIFFERS: " + "; ".join(parts)


def read_digests(path: Path) -> dict[str, str]:
    """Parameter name -> digest, hex, from JSON.

    Raises:
        InvalidRequest: the file is something else.
    """
    try:
        value = strict_loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict) or not value:
            raise ValueError("no object with names")
        if any(len(bytes.fromhex(digest)) != 32 for digest in value.values()):
            raise ValueError("a digest is not 32 bytes")
        return {str(name): str(digest) for name, digest in value.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest(
            f"{path} holds no digests ({error}); write them with `zerodrift weights digest --json`"
        ) from None
