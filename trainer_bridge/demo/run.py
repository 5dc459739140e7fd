"""The demo's loop: rollout over gRPC, training forward and backward, comparison, optimizer step, weights over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.config import Settings
from rollout.kernels.registry import kernels_of
from rollout.manifest import build_manifest
from rollout.model import DTYPES, load_model
from rollout.serving import Service, running_service
from rollout.types import GenerateRequest, SamplingParams, ServerInfo
from rollout.worker import load_tokenizer
from trainer_bridge.aio_client import AsyncRolloutClient
from trainer_bridge.collect import TokenDigest, records_of, training_sample
from trainer_bridge.compare import compare
from trainer_bridge.contrast import OrdinaryTrainer
from trainer_bridge.demo.records import RunRecord, StepRecord
from trainer_bridge.demo.sabotage import Sabotage, plant_kernels, plant_temperature, plant_weights
from trainer_bridge.demo.task import Problem, Task
from trainer_bridge.demo.view import View
from trainer_bridge.forward import TrainingSample
from trainer_bridge.handshake import diff_manifests
from trainer_bridge.records import ScoredSample
from trainer_bridge.report import verdict
from trainer_bridge.rollout_record import RolloutRecord
from trainer_bridge.trainer import ScoredBatch, TrainedSample, Trainer, group_advantages
from trainer_bridge.wire import GenerateResult
from trainer_bridge.wire.channel import ClientSecurity

if TYPE_CHECKING:
    from trainer_bridge.demo.recording import Recording


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Size and kind of a run."""

    steps: int = 3
    prompts: int = 8
    """prompts a step"""
    group: int = 6
    """samples of each prompt"""
    max_tokens: int = 64
    seed: int = 0
    temperature: float = 1.0
    learning_rate: float = 2e-6
    micro_batch: int = 8
    """sequences per training forward"""
    threads: int = 2
    """of the trainer; the optimizer's sums depend on it, so it is part of the run's identity"""
    full: bool = False
    """also compare row digests"""
    sabotage: Sabotage | None = None
    sabotage_step: int = 0
    """first step with the fault"""
    keep_going: bool = False
    """go on after a difference, broken weights and all"""


class DemoRun:
    """One run against a running service."""

    def __init__(self, service: Service, settings: Settings, options: DemoOptions, view: View) -> None:
        self._service = service
        self._security = ClientSecurity.towards(None, settings.server)
        self._options = options
        self._view = view
        kernels = kernels_of(settings)
        model = load_model(
            service.model_path, dtype=DTYPES[settings.model.dtype], kernels=kernels, trainable=True
        )  # fmt: skip
        self._trainer = Trainer(model, learning_rate=options.learning_rate, threads=options.threads)
        self._ordinary = OrdinaryTrainer(model)
        self._task = Task(service.model_path, options.seed)
        self._digest = TokenDigest()
        self._findings: list[str] = []
        self._recording: Recording | None = None

    @property
    def trainer_manifest(self) -> dict[str, str]:
        """The trainer's parity manifest as it stands."""
        return build_manifest(self._trainer.model)

    async def run(self, replicas: int, recording: Recording | None = None) -> RunRecord:
        """All steps, each recorded; stops early once something differs, unless told to keep going."""
        self._recording = recording
        start = time.monotonic()
        steps: list[StepRecord] = []
        async with AsyncRolloutClient(self._service.address, security=self._security) as client:
            info = await client.info()
            for step in range(self._options.steps):
                known = len(self._findings)
                if step >= self._options.sabotage_step:
                    self._plant()
                if step in (0, self._options.sabotage_step):
                    self._check_manifest(info)
                # After each update they are compared anyway.
                if step == 0 or self._sabotage(step) is not None:
                    await self._check_weights(client)
                steps.append(await self._step(client, step, known))
                self._view.step(steps[-1])
                if not steps[-1].aligned.bitwise_equal:
                    self._findings.append(verdict(steps[-1].aligned))
                if self._findings and not self._options.keep_going:
                    break
        return RunRecord(
            steps=tuple(steps),
            findings=tuple(self._findings),
            token_digest=self._digest.hex,
            tokens=self._digest.tokens,
            seed=self._options.seed,
            replicas=replicas,
            threads=self._options.threads,
            seconds=time.monotonic() - start,
            manifest=dict(info.manifest),
        )

    def _plant(self) -> None:
        plant_kernels(self._trainer, self._options.sabotage)
        plant_weights(self._trainer, self._options.sabotage)

    def _sabotage(self, step: int) -> Sabotage | None:
        return self._options.sabotage if step >= self._options.sabotage_step else None

    # ---- handshake ----------------------------------------------------------------------------------------------

    def _check_manifest(self, info: ServerInfo) -> None:
        differences = diff_manifests(info.manifest, build_manifest(self._trainer.model))
        self._findings += [f"manifest (rollout, trainer): {d}" for d in differences if d.can_change_bits]

    async def _check_weights(self, client: AsyncRolloutClient) -> None:
        """Compare root digests; where they differ, name the first tensor."""
        info = await client.info()
        if info.weights.digest == self._trainer.digest():
            return
        theirs = (await client.info(tensor_digests=True)).tensor_digests
        ours = {name: digest.hex() for name, digest in self._trainer.tensor_digests().items()}
        unequal = [name for name in ours if theirs.get(name) != ours[name]]
        self._findings.append(
            f"weights v{info.weights.version}: {len(unequal)} of {len(ours)} tensors differ, first {unequal[0]!r}"
        )

    # ---- one step -----------------------------------------------------------------------------------------------

    async def _step(self, client: AsyncRolloutClient, step: int, known: int) -> StepRecord:
        """``known``: how many findings are of earlier steps."""
        options = self._options
        info = await client.info()
        problems = self._task.problems(step, options.prompts)
        began = time.monotonic()
        results = await self._rollout(client, step, problems)
        rollout_s = time.monotonic() - began
        records = records_of(results)
        self._digest.add(records)
        rewards = [self._reward(problems[i // options.group], r) for i, r in enumerate(_texts(results))]
        began = time.monotonic()
        with self._view.phase(step, "training forward, backward, optimizer step"):
            ordinary = await asyncio.to_thread(self._ordinary_scored, records)
            began = time.monotonic()
            scored = await asyncio.to_thread(self._learn, step, records, rewards)
        train_s = time.monotonic() - began
        aligned = _scored(records, scored)
        compared = compare(aligned)
        update_s = 0.0
        if options.keep_going or (compared.bitwise_equal and not self._findings):
            update_s = await self._push(client, step, info.weights.version + 1)
        groups = [rewards[i : i + options.group] for i in range(0, len(rewards), options.group)]
        result = StepRecord(
            step=step,
            weight_version=info.weights.version,
            weight_digest=info.weights.digest,
            aligned=compared,
            ordinary=compare(ordinary),
            mean_reward=sum(rewards) / len(rewards),
            mixed_groups=sum(len(set(g)) > 1 for g in groups),
            distinct_siblings=all(_distinct(r) for r in results),
            rollout_s=rollout_s,
            train_s=train_s,
            update_s=update_s,
        )
        if self._recording is not None:
            self._recording.step(result, records, aligned, ordinary, rewards, self._findings[known:])
        return result

    async def _push(self, client: AsyncRolloutClient, step: int, version: int) -> float:
        """Send the trainer's weights and compare digests; seconds it took. Weights of a broken step are not sent."""
        began = time.monotonic()
        with self._view.phase(step, "weights over gRPC"):
            await client.update_weights(self._trainer.tensors(), version=version, digest=self._trainer.digest())
            await self._check_weights(client)
        return time.monotonic() - began

    async def _rollout(
        self, client: AsyncRolloutClient, step: int, problems: Sequence[Problem]
    ) -> list[GenerateResult]:
        options = self._options

        async def one(index: int, problem: Problem) -> GenerateResult:
            # The seed says which run, step and prompt; the service derives the siblings' from the sample index.
            seed = (options.seed << 32) + step * 65536 + index
            sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, seed=seed)
            request = GenerateRequest(
                f"step{step}/{problem.name}", problem.prompt_ids, sampling, options.group, row_digests=options.full
            )
            (result,) = await client.generate_many([request])
            advance()
            return result

        with self._view.rollout(step, len(problems)) as advance:
            return list(await asyncio.gather(*(one(i, p) for i, p in enumerate(problems))))

    def _reward(self, problem: Problem, text: str) -> float:
        return self._task.reward(problem, text)

    def _learn(self, step: int, records: list[RolloutRecord], rewards: list[float]) -> ScoredBatch:
        advantages = group_advantages(rewards, self._options.group)
        samples = plant_temperature([training_sample(r) for r in records], self._sabotage(step))
        self._check_temperatures(records, samples)
        batch = [TrainedSample(s, a) for s, a in zip(samples, advantages, strict=True)]
        return self._trainer.learn(batch, micro_batch=self._options.micro_batch, digests=self._options.full)

    def _check_temperatures(self, records: list[RolloutRecord], samples: Sequence[TrainingSample]) -> None:
        for record, sample in zip(records, samples, strict=True):
            sampled = record.sampling.temperature if record.sampling is not None else None
            if sampled != sample.temperature:
                self._findings.append(
                    f"temperature: sampled at {sampled}, scored at {sample.temperature}; first in request "
                    f"{record.request_id!r} sample {record.sample_index}"
                )
                return

    def _ordinary_scored(self, records: list[RolloutRecord]) -> list[ScoredSample]:
        samples = [training_sample(r) for r in records]
        logprobs = self._ordinary.logprobs(
            samples, micro_batch=self._options.micro_batch, threads=self._options.threads
        )
        return [r.scored(lp) for r, lp in zip(records, logprobs, strict=True)]


def _scored(records: list[RolloutRecord], scored: ScoredBatch) -> list[ScoredSample]:
    return [r.scored(lp, trainer_digests=d) for r, lp, d in zip(records, scored.logprobs, scored.digests, strict=True)]


def _texts(results: Sequence[GenerateResult]) -> list[str]:
    return [s.text or "" for r in results for s in r.samples]


def _distinct(result: GenerateResult) -> bool:
    return len({s.token_ids.tobytes() for s in result.samples}) > 1


async def run_demo(
    settings: Settings, options: DemoOptions, view: View, *, runs: Path | None = None, run: str | None = None
) -> RunRecord:
    """Start the service, run, stop the service; record every step under ``runs``, if one is given."""
    view.starting(settings)
    async with running_service(settings) as service:
        demo = await asyncio.to_thread(DemoRun, service, settings, options, view)
        if runs is None:
            return await demo.run(settings.worker.count)
        # Needs the extra "dashboard", which the demo alone does not.
        from trainer_bridge.demo.recording import recording, run_heads

        heads = run_heads(
            run, settings.model.path, options.sabotage, (await service.pool.info()).manifest, demo.trainer_manifest
        )
        with recording(runs, heads, load_tokenizer(settings, service.model_path)) as record:
            return await demo.run(settings.worker.count, record)
