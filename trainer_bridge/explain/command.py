"""Verbs ``explain``, ``explain-recorded`` and ``replay``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.cli import Config, JsonFile, Overrides, wide_console, write_json
from rollout.errors import InvalidRequest

if TYPE_CHECKING:
    from trainer_bridge.explain.case import Case
    from trainer_bridge.explain.sides import ModelSide, Side
    from trainer_bridge.explain.source import Stored
    from trainer_bridge.rollout_record import RolloutRecord

Rollouts = Annotated[
    Path,
    typer.Argument(
        help="File of rollouts (JSONL or Parquet), ours or another engine's; or a recorded run: RUNS/run=NAME."
    ),
]
Step = Annotated[int | None, typer.Option(min=0, help="Of a recorded run: this step alone.")]
Address = Annotated[str | None, typer.Option(help="A running service.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(explain)
    app.command()(replay)
    app.command("explain-recorded")(explain_recorded)


def explain(
    rollouts: Rollouts,
    trainer: Annotated[
        Path | None, typer.Option(help="The trainer's log-probs, in such a file; else computed here.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="The service that sampled, with server.debug=true.")] = None,
    rollout_model: Annotated[
        str | None, typer.Option(help="Folder of the rollout's weights; else the trainer's.")
    ] = None,
    sample: Annotated[int | None, typer.Option(min=0, help="Line to explain, from 0; else the first mismatch.")] = None,
    step: Step = None,
    thorough: Annotated[bool, typer.Option("--thorough", help="Ask everything, equal log-probs or not.")] = False,
    json_file: JsonFile = None,
    config: Config = None,
    overrides: Overrides = None,
) -> None:
    """Find the first place where rollout and trainer part: weights, inputs, semantics, numerics; exit 1 if they do."""
    from trainer_bridge.cli import single_settings
    from trainer_bridge.explain.run import explain as ask
    from trainer_bridge.explain.source import read_samples
    from trainer_bridge.explain.view import render, to_json
    from trainer_bridge.rollout_files import read_records

    settings = single_settings(config, overrides)
    samples = read_samples(rollouts, step)
    theirs = None if trainer is None else read_records(trainer)
    right = _model_side("trainer", settings, settings.model.path)
    number, case = choose_case(samples, theirs, right, sample)
    with _rollout_side(address, rollout_model or settings.model.path, settings, case.record.replica) as left:
        explanation = ask(
            left, right, case, vocab_size=right.model.spec.vocab_size, config=right.config(), thorough=thorough
        )
    console = wide_console()
    chosen = samples[number]
    place = f"{chosen.where} " if chosen.where else ""
    console.print(f"{place}request {case.record.request_id!r} sample {case.record.sample_index}", markup=False)
    render(explanation, console)
    note = other_weights(chosen, right)
    if note:
        console.print(note, soft_wrap=True, markup=False)
    identity = {"request_id": case.record.request_id, "sample_index": case.record.sample_index, "line": number}
    write_json(json_file, to_json(explanation) | identity | ({"note": note} if note else {}))
    raise typer.Exit(0 if explanation.clean else 1)


def replay(
    rollouts: Rollouts,
    address: Annotated[str | None, typer.Option(help="A running service; else one is started for this call.")] = None,
    weights_digest: Annotated[
        str | None, typer.Option(help="Weights they were sampled under; refused if others.")
    ] = None,
    step: Step = None,
    json_file: JsonFile = None,
    config: Config = None,
    overrides: Overrides = None,
) -> None:
    """Regenerate stored samples from their records and say equal, or where not; exit 1 if one differs."""
    import asyncio
    import dataclasses

    from trainer_bridge.cli import single_settings
    from trainer_bridge.explain.source import read_samples
    from trainer_bridge.replay import Replay, replay_records
    from trainer_bridge.single_use import service_address
    from trainer_bridge.wire.channel import ClientSecurity

    samples = read_samples(rollouts, step)
    records = [sample.record for sample in samples]
    settings = single_settings(config, overrides)
    weights_digest = weights_digest or _only_digest(samples)

    async def run() -> list[Replay]:
        async with service_address(address, settings) as where:
            security = ClientSecurity.towards(address, settings.server)
            return await replay_records(records, where, weights_digest=weights_digest, security=security)

    results = asyncio.run(run())
    for result in results:
        said = f"equal: {result.tokens} tokens" if result.equal else f"UNEQUAL: {result.difference}"
        note = f" [{result.warning}]" if result.warning else ""
        typer.echo(f"{result.request_id} sample {result.sample_index}: {said}{note}")
    equal = sum(result.equal for result in results)
    typer.echo(f"{equal} of {len(results)} samples regenerated bit for bit")
    write_json(json_file, {"equal": equal, "samples": [dataclasses.asdict(result) for result in results]})
    raise typer.Exit(0 if results and equal == len(results) else 1)


def _model_side(name: str, settings: Any, path: str) -> ModelSide:
    from rollout.assets import prepare_model
    from rollout.kernels.registry import resolve_kernels
    from rollout.model import DTYPES, load_model
    from trainer_bridge.explain.sides import ModelSide

    kernels = resolve_kernels(settings.kernels.name, page_size=settings.engine.page_size)
    model = load_model(prepare_model(path), dtype=DTYPES[settings.model.dtype], kernels=kernels)
    training = name == "trainer"
    decoder = None if training else kernels.decoder(model.hf, model.spec.context_length)
    return ModelSide(name, model, training=training, decoder=decoder)


@contextlib.contextmanager
def _rollout_side(address: str | None, path: str, settings: Any, replica: str | None) -> Iterator[Side]:
    if address is None:
        yield _model_side("rollout", settings, path)
        return
    from trainer_bridge.explain.server_side import ServerSide
    from trainer_bridge.wire.channel import ClientSecurity

    with ServerSide(address, replica=replica or "", security=ClientSecurity.from_environment()) as side:
        yield side


def _only_digest(samples: Sequence[Stored]) -> str | None:
    """Of the weights that sampled all of these. InvalidRequest: of several, which one replay cannot hold."""
    found = {sample.weights_digest: sample.where for sample in samples if sample.weights_digest is not None}
    if len(found) > 1:
        raise InvalidRequest(
            f"the run was sampled under {len(found)} sets of weights ({', '.join(found.values())}); replay one step "
            "(--step), with its weights",
            field="step",
        )
    return next(iter(found), None)


def other_weights(sample: Stored, trainer: ModelSide) -> str:
    """What to know where the weights at hand are not those that the sample was made under; empty: nothing."""
    from rollout.weights import model_digest

    if sample.weights_digest is None or (held := model_digest(trainer.model)) == sample.weights_digest:
        return ""
    return (
        f"note: {sample.where} was sampled under weights {sample.weights_digest[:16]}, the model at hand holds "
        f"{held[:16]}: what this says of bits holds for the model at hand. Give the weights of that step "
        "(model.path=FOLDER), or explain while the service holds them (--address)"
    )


def choose_case(
    samples: Sequence[Stored], theirs: Sequence[RolloutRecord] | None, trainer: ModelSide, sample: int | None
) -> tuple[int, Case]:
    """The sample asked for, or the first whose bits differ, or the first of all; with its number.

    Raises:
        InvalidRequest: no such line, or a trainer's file of another length or order.
    """
    if not samples:
        raise InvalidRequest("the file holds no rollouts")
    if sample is not None and sample >= len(samples):
        raise InvalidRequest(f"--sample {sample}: the file holds {len(samples)} lines, counted from 0")
    if theirs is not None and len(theirs) != len(samples):
        raise InvalidRequest(f"the trainer's file holds {len(theirs)} samples, the rollouts {len(samples)}")
    if theirs is not None:
        check_order(samples, theirs)
    wanted = range(len(samples)) if sample is None else (sample,)
    first: tuple[int, Case] | None = None
    for i in wanted:
        case = make_case(samples[i], None if theirs is None else theirs[i], trainer)
        if case.first_mismatch is not None:
            return i, case
        first = first or (i, case)
    assert first is not None
    return first


def check_order(samples: Sequence[Stored], theirs: Sequence[RolloutRecord]) -> None:
    """Another sample in a sample's place would pass for one that was fed other ids.

    Raises:
        InvalidRequest: the trainer's file has the samples in another order.
    """
    from trainer_bridge.checks import label

    names = [(s.record.request_id, s.record.sample_index) for s in samples]
    known = set(names)
    for place, (ours, record) in enumerate(zip(names, theirs, strict=True)):
        other = (record.request_id, record.sample_index)
        if other != ours and other in known:
            raise InvalidRequest(
                f"sample {place} is {label(*other)} in the trainer's file and {label(*ours)} among the rollouts; give "
                "both in one order",
                field="trainer",
            )


def make_case(sample: Stored, theirs: RolloutRecord | None, trainer: ModelSide) -> Case:
    """One record with the trainer's values: from its own file, from the store, or computed by the training forward."""
    import numpy as np
    import torch

    from trainer_bridge.collect import training_sample
    from trainer_bridge.explain.case import Case, FedInputs
    from trainer_bridge.forward import TrainingForward

    record = sample.record
    if theirs is None and sample.trainer_logprobs is not None:
        return Case(record, sample.trainer_logprobs)
    if theirs is None:
        forward = TrainingForward(trainer.model)
        with torch.no_grad(), forward.aligned():
            return Case(record, forward([training_sample(record)]).logprobs.numpy())
    temperature = theirs.sampling.temperature if theirs.sampling is not None else theirs.temperature
    fed = FedInputs(np.concatenate((theirs.prompt_ids, theirs.token_ids)), None, temperature)
    return Case(record, theirs.policy_logprobs, theirs.mask, fed)


def explain_recorded(
    rollout: Annotated[Path, typer.Argument(help="Activation digests of the rollout (engine.activation_log).")],
    trainer: Annotated[Path, typer.Argument(help="Activation digests of the trainer.")],
    sample: Annotated[int, typer.Option(min=0, help="Line to compare, from 0.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Bound a fault to one layer from digests that both sides recorded, without a model; exit 1 if they differ."""
    import dataclasses

    from rollout.activation_log import read_activations
    from trainer_bridge.explain.findings import Cause
    from trainer_bridge.explain.recorded import localise_recorded

    left, right = list(read_activations(rollout)), list(read_activations(trainer))
    if not sample < min(len(left), len(right)):
        raise InvalidRequest(f"line {sample}: the files hold {len(left)} and {len(right)} lines, counted from 0")
    finding = localise_recorded(left[sample], right[sample])
    typer.echo(finding.sentence)
    write_json(json_file, dataclasses.asdict(finding) | {"cause": finding.cause.value})
    raise typer.Exit(0 if finding.cause is Cause.NONE else 1)
