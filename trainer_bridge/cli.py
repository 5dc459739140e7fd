"""Verbs of the trainer's side: ``demo``, ``generate``, ``compare``, ``health``; others live apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout.cli import Config, JsonFile, Overrides, place, write_json
from rollout.errors import InvalidRequest
from trainer_bridge.cli_replicas import register as register_replicas
from trainer_bridge.cli_weights import register as register_weights
from trainer_bridge.dashboard.cli import register as register_dashboard
from trainer_bridge.explain.command import register as register_explain

DEMO_OVERRIDES = ("worker.count=2", "server.port=0", "engine.kv_cache_tokens=16384", "log.level=warning")
"""The demo's settings where neither a file nor the caller says otherwise."""


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(demo)
    app.command()(generate)
    app.command()(compare)
    app.command()(health)
    register_dashboard(app)
    register_explain(app)
    register_replicas(app)
    register_weights(app)


def demo(
    config: Config = None,
    steps: Annotated[int, typer.Option(min=1, help="Weight versions to sample under.")] = 3,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a step.")] = 8,
    group: Annotated[int, typer.Option(min=2, help="Samples of each prompt.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a sample.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    full: Annotated[bool, typer.Option("--full", help="Also compare row digests: whole distributions.")] = False,
    sabotage: Annotated[str | None, typer.Option(help="attention, temperature, weights or order: break it.")] = None,
    sabotage_step: Annotated[int, typer.Option(min=0, help="First step with the fault.")] = 0,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after a difference.")] = False,
    record: Annotated[Path | None, typer.Option(help="Runs folder to record every step in.")] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Record, and show it live in a browser.")] = False,
    json_file: JsonFile = None,
    overrides: Overrides = None,
) -> None:
    """A small GRPO run over the real service, compared by bits; exit 1 if a single bit differs."""
    import asyncio
    import dataclasses

    from rich.console import Console

    from rollout.config import load_settings
    from rollout.logs import configure
    from trainer_bridge.dashboard.cli import demo_dashboard
    from trainer_bridge.demo.run import DemoOptions, run_demo
    from trainer_bridge.demo.sabotage import Sabotage
    from trainer_bridge.demo.view import View

    kinds = [s.value for s in Sabotage]
    if sabotage is not None and sabotage not in kinds:
        raise InvalidRequest(f"sabotage {sabotage!r} is not one of {', '.join(kinds)}", field="sabotage")
    settings = load_settings(config, [*(() if config else DEMO_OVERRIDES), *(overrides or [])])
    configure(settings.log.level, settings.log.as_json)
    options = DemoOptions(
        steps=steps, prompts=prompts, group=group, max_tokens=max_tokens, seed=seed, full=full,
        sabotage=Sabotage(sabotage) if sabotage else None, sabotage_step=sabotage_step, keep_going=keep_going,
    )  # fmt: skip
    if options.sabotage is Sabotage.TEMPERATURE:
        # bfloat16 holds 1 exactly: the fault needs a temperature it rounds.
        options = dataclasses.replace(options, temperature=0.7)
    console = Console()
    view = View(console if console.is_terminal else Console(width=140))
    words = [*(["--config", str(config)] if config else ()), *(overrides or ())]
    with demo_dashboard(record, dashboard, words) as runs:
        run = asyncio.run(run_demo(settings, options, view, runs=runs))
        view.finished(run)
        write_json(json_file, run.to_json())
    raise typer.Exit(0 if run.exact else 1)


def generate(
    out: Annotated[Path, typer.Option(help="JSONL file of rollouts to write.", callback=place)],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='JSONL of {"prompt": text} or {"prompt_ids": [...]}.')] = None,
    address: Annotated[str | None, typer.Option(help="A running service; else one is started for this call.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Samples of each prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a sample.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 = off.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 = off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 = off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Prompt i gets seed + i; unset: drawn and recorded.")] = None,
    digests: Annotated[bool, typer.Option("--digests", help="Record row digests.")] = False,
    priority: Annotated[int, typer.Option(help="Higher is served first; changes no bit.")] = 0,
    config: Config = None,
    overrides: Overrides = None,
) -> None:
    """Sample continuations and write them, with log-probs as exact bits, to a JSONL file."""
    import asyncio

    from rollout.types import SamplingParams
    from trainer_bridge.single_use import generate_rollouts, read_prompts

    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_tokens
    )
    wanted: Sequence[str | tuple[int, ...]] = [*(prompt or []), *(read_prompts(prompts) if prompts else [])]
    settings = single_settings(config, overrides)
    records = asyncio.run(
        generate_rollouts(wanted, sampling, n=n, digests=digests, priority=priority, address=address, settings=settings)
    )
    from trainer_bridge.jsonl import write_rollouts

    write_rollouts(out, [r for r, _ in records])
    for record, text in records:
        typer.echo(f"[{record.request_id} sample {record.sample_index}] {text}")
    typer.echo(f"{len(records)} samples written to {out}")


def compare(
    rollouts: Annotated[
        Path, typer.Argument(help="JSONL (or, by its ending, Parquet) file of rollouts, ours or another engine's.")
    ],
    json_file: JsonFile = None,
    config: Config = None,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per training forward; changes no bit.")] = 8,
    policy_logprobs: Annotated[
        bool,
        typer.Option("--policy-logprobs", help="Lines that name no mode hold log_softmax(logits / T), no filter."),
    ] = False,
    positions: Annotated[int, typer.Option(min=1, help="Tokens in a bin of positions.")] = 64,
    worst: Annotated[int, typer.Option(min=0, help="How many of the worst tokens to name.")] = 10,
    keep_rows: Annotated[
        Path | None,
        typer.Option(help="File (.npz) for the trainer's logits rows where row digests differ first.", callback=place),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Recompute every log-prob with the training forward and compare bits; exit 1 if one differs."""
    from rich.console import Console

    from trainer_bridge.breakdown import break_down, breakdown_json, breakdown_tables
    from trainer_bridge.kept_rows import KEPT, write_rows
    from trainer_bridge.report import render, to_json
    from trainer_bridge.single_use import score_rollouts

    scored = score_rollouts(
        rollouts,
        single_settings(config, overrides),
        micro_batch=micro_batch,
        policy_logprobs=policy_logprobs,
        keep=0 if keep_rows is None else KEPT,
    )
    comparison, details = scored.comparison, break_down(scored.samples, width=positions, worst=worst)
    console = Console()
    if comparison.unequal_tokens:
        for table in breakdown_tables(details):
            console.print(table)
    if details.probe.has_data:
        console.print(details.probe.verdict, markup=False, soft_wrap=True)
    render(comparison, console)
    if keep_rows is not None:
        write_rows(keep_rows, scored.kept_rows)
    write_json(json_file, to_json(comparison) | {"breakdown": breakdown_json(details)})
    raise typer.Exit(0 if comparison.has_data and comparison.bitwise_equal else 1)


def single_settings(config: Path | None, overrides: list[str] | None) -> Any:
    """Settings of a verb that is one program: one replica, small, quiet unless told otherwise."""
    from rollout.config import load_settings
    from rollout.logs import configure

    settings = load_settings(config, [*(() if config else DEMO_OVERRIDES), "worker.count=1", *(overrides or [])])
    configure(settings.log.level, settings.log.as_json)
    return settings


def health(
    address: Annotated[str, typer.Argument(help="host:port of a service.")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.")] = 5.0,
) -> None:
    """Whether a service takes traffic; exit 1 if not. TLS and token come from the environment: see docs/security.md.

    Kubernetes' own gRPC probe speaks no TLS; this verb can stand in an exec probe.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from trainer_bridge.wire.channel import ClientSecurity, open_channel
    from trainer_bridge.wire.request import DEFAULT_MAX_MESSAGE_BYTES

    with open_channel(address, ClientSecurity.from_environment(), DEFAULT_MAX_MESSAGE_BYTES) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            typer.echo(f"{address}: {error.code().name} {error.details()}")
            raise typer.Exit(1) from error
    said = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    typer.echo(f"{address}: {said}")
    raise typer.Exit(0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1)
