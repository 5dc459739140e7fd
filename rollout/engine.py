"""The native engine: paged KV, chunked prefill, continuous batching, one step at a time. Single-threaded by design.

A step computes the scheduled rows in one forward pass, samples where a sequence's last known token was fed, and returns
events. Whoever owns the engine calls ``step`` inside ``kernels.invariant_mode()`` and may add, abort or swap weights
between steps.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import torch

from rollout.activation_log import ActivationLog, digests_of_store
from rollout.attention import PagedStep
from rollout.batch import StepBatch, build_batch
from rollout.detokenize import Detokenizer
from rollout.device_sampler import DeviceTokenSampler
from rollout.errors import DuplicateRequest, InvalidRequest, NotFound, ParityError
from rollout.events import Event, FailureEvent, ScoreEvent
from rollout.given_scores import GivenScores
from rollout.kernels.base import Decoder, KVLayout
from rollout.kvcache import PageAllocator
from rollout.logprobs import effective_temperature, row_digests
from rollout.model import SharedModel, config_digest_source
from rollout.multimodal import FeatureCache, visual_rows
from rollout.placement import place
from rollout.prefix_cache import PrefixIndex
from rollout.request_checks import check_ids, check_top, without_placeholders
from rollout.sampling import sample_seed, validate_sampling
from rollout.scheduler import Scheduler, SchedulerLimits
from rollout.sequence import Sequence
from rollout.stopping import Stopper, check_room
from rollout.token_sampler import TokenSampler
from rollout.top_logprobs import tops_of
from rollout.types import (
    FinishDetail,
    FinishReason,
    PromptChunk,
    SampleEvent,
    SampleRequest,
    SampleSummary,
    ScoreSequence,
    SequenceScore,
    TokenChunk,
    TopLogprobs,
)


def _identity(model: SharedModel) -> bytes:
    """What besides weights and tokens decides the content of a KV page."""
    kernels = model.kernels
    source = f"{kernels.name}/{kernels.page_size}/{model.spec.dtype}/{config_digest_source(model)}"
    return hashlib.blake2b(source.encode(), digest_size=16).digest()


class Engine:
    """One model replica's step machine."""

    def __init__(
        self,
        model: SharedModel,
        limits: SchedulerLimits,
        *,
        kv_cache_tokens: int,
        tokenizer: Detokenizer | None = None,
        weight_version: int = 0,
        name: str = "engine",
        fused: bool = True,
        prefix_cache: bool = True,
    ) -> None:
        if limits.max_running > limits.max_batch_tokens:
            raise InvalidRequest(
                f"max_running {limits.max_running} exceeds max_batch_tokens {limits.max_batch_tokens}: "
                "a step must hold one row of every running sequence",
                field="engine.max_batch_tokens",
            )
        spec = model.spec
        num_pages = kv_cache_tokens // limits.page_size
        if num_pages < 1:
            raise InvalidRequest(
                f"kv_cache_tokens {kv_cache_tokens} is below one page of {limits.page_size}",
                field="engine.kv_cache_tokens",
            )
        self.model = model
        self.name = name
        self.weight_version = weight_version
        self.pages = PageAllocator(num_pages, PrefixIndex(_identity(model), weight_version) if prefix_cache else None)
        # Before the KV pages: what its probes need for a while is gone by then.
        self._decoder = model.kernels.decoder(model.hf, spec.context_length) if fused else None
        self.store = model.kernels.allocate_kv(
            KVLayout(spec.num_layers, num_pages, limits.page_size, spec.num_kv_heads, spec.head_dim, spec.dtype)
        )
        self.scheduler = Scheduler(limits, self.pages, self.store.copy_rows)
        self._rules = model.vision.rules if model.vision is not None else None
        self._features = FeatureCache(model.vision) if model.vision is not None else None
        self._tokenizer = tokenizer
        sampler = DeviceTokenSampler if model.kernels.device_logprobs else TokenSampler
        self._sampler = sampler(spec.vocab_size)
        self._live: dict[str, Sequence] = {}
        self.num_steps = self.num_rows = 0
        self._undefined = self._undefined_ids()
        self.activation_log: ActivationLog | None = None
        """where digests of each ended sample's keys and values go"""

    # ---- requests -----------------------------------------------------------------------------------------------

    def effective_request(self, request: SampleRequest) -> SampleRequest:
        """Validate against the model and resolve max_tokens; see ``validate_sampling`` and C6.

        Raises:
            InvalidRequest: naming the field, the value and the limit.
        """
        spec = self.model.spec
        check_ids(request.prompt_ids, "prompt_ids", spec.vocab_size)
        place(request.prompt_ids, request.images, self._rules, "prompt_ids")
        room = spec.context_length - len(request.prompt_ids)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt_ids)} tokens, the context holds {spec.context_length} "
                "including at least one to generate",
                field="prompt",
            )
        sampling = validate_sampling(without_placeholders(request.sampling, self._rules), vocab_size=spec.vocab_size)
        if (sampling.stop or sampling.bar_undefined_tokens) and self._tokenizer is None:
            raise InvalidRequest(
                "stop strings and bar_undefined_tokens need a tokenizer, and the model has none; use stop_token_ids",
                field="sampling.stop" if sampling.stop else "sampling.bar_undefined_tokens",
            )
        check_top(request.top_logprobs, spec.vocab_size)
        if request.begun.token_ids:
            check_ids(request.begun.token_ids, "resume.tokens", spec.vocab_size)
        if sampling.seed is None:
            raise InvalidRequest("a sample reached the engine without a seed", field="sampling.seed")
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        check_room(request.begun, min(wanted, room))
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, max_tokens=min(wanted, room)))

    def add(self, request: SampleRequest) -> SampleEvent | None:
        """Queue a sample whose request came through ``effective_request``; its end, where what was begun is whole."""
        self._check_new(request.sample_id)
        sampling = request.sampling
        assert sampling.max_tokens is not None and sampling.seed is not None
        barred = np.asarray(sampling.barred_token_ids, np.int64)
        if sampling.bar_undefined_tokens:
            barred = np.union1d(barred, self._undefined)
        prompt = len(request.prompt_ids)
        sequence = Sequence(
            sample_id=request.sample_id,
            token_ids=[*request.prompt_ids, *request.begun.token_ids],
            prompt_len=prompt,
            max_len=prompt + sampling.max_tokens,
            request=request,
            spans=list(request.begun.spans),
            temperature=effective_temperature(sampling.temperature),
            row_digests=request.row_digests,
            limit="context" if prompt + sampling.max_tokens >= self.model.spec.context_length else "max_tokens",
            seed=sample_seed(sampling.seed, request.sample_index),
            barred=barred,
            placement=place(request.prompt_ids, request.images, self._rules, "prompt_ids"),
            stopper=Stopper(request, self.model.spec.eos_token_ids, self._tokenizer),
            priority=request.priority,
            client=request.client,
            top_logprobs=request.top_logprobs,
        )
        if request.prompt_logprobs and prompt > 1:
            sequence.given = GivenScores(1, prompt - 1, digests=request.row_digests, top=request.top_logprobs)
        sequence.finish = sequence.end_of_begun()
        if sequence.finish is not None:
            return SampleEvent(request.sample_id, summary=self._summary(sequence))
        self.scheduler.add(sequence)
        self._live[sequence.sample_id] = sequence
        return None

    def add_score(
        self,
        sample_id: str,
        score: ScoreSequence,
        *,
        temperature: float,
        want_digests: bool,
        top_logprobs: int = 0,
        priority: int = 0,
        client: str = "",
    ) -> None:
        """Queue a sequence to score; ends in a ``ScoreEvent``."""
        self._check_new(sample_id)
        check_top(top_logprobs, self.model.spec.vocab_size)
        length = len(score.token_ids)
        check_ids(score.token_ids, "sequences", self.model.spec.vocab_size)
        if not 1 <= score.start < length:
            raise InvalidRequest(f"start {score.start} is outside [1, {length - 1}]", field="sequences.start")
        if length > self.model.spec.context_length:
            raise InvalidRequest(
                f"the sequence has {length} tokens, the context holds {self.model.spec.context_length}",
                field="sequences",
            )
        sequence = Sequence(
            sample_id=sample_id,
            token_ids=list(score.token_ids),
            prompt_len=length,
            max_len=length,
            score=score,
            temperature=effective_temperature(temperature),
            row_digests=want_digests,
            priority=priority,
            client=client,
            top_logprobs=top_logprobs,
            placement=place(score.token_ids, score.images, self._rules, "sequences"),
            given=GivenScores(score.start, length - score.start, digests=want_digests, top=top_logprobs),
        )
        self.scheduler.add(sequence)
        self._live[sample_id] = sequence

    def abort(self, sample_id: str, message: str) -> SampleEvent:
        """End a live sample now; what was sampled so far has been delivered and stays valid."""
        sequence = self._live.get(sample_id)
        if sequence is None:
            raise NotFound(f"no live sample {sample_id!r}")
        sequence.finish = FinishDetail(FinishReason.ABORTED, message=message)
        return SampleEvent(sample_id, summary=self._retire(sequence))

    def weights_changed(self, version: int) -> None:
        """The model's parameters were replaced in place; what is sampled from here on is of ``version``."""
        self.weight_version = version
        if self._decoder is not None:
            self._decoder.refresh()
        if self._features is not None:
            self._features.clear()
        self.restart_kv()

    def restart_kv(self) -> None:
        """Forget all KV, cached pages included: running sequences rebuild theirs before their next token."""
        self.scheduler.restart_kv(self.weight_version)

    @property
    def decoder(self) -> Decoder | None:
        """The kernel set's own forward, where it is used."""
        return self._decoder

    @property
    def live_ids(self) -> list[str]:
        """Ids of samples and scored sequences, running or waiting."""
        return list(self._live)

    @property
    def num_running(self) -> int:
        """Sequences admitted and not ended, those preempted for the moment included."""
        return len(self.scheduler.in_flight)

    @property
    def num_waiting(self) -> int:
        """Sequences queued for admission."""
        return len(self.scheduler.waiting)

    # ---- one step -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Compute one batch; [] when there was nothing to do."""
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return []
        batch = build_batch(scheduled, self.scheduler.limits.page_size)
        self.num_steps += 1
        self.num_rows += len(batch.input_ids)
        hidden = self._hidden_states(batch)
        for rows in scheduled:
            rows.sequence.num_computed += rows.count
        events: list[Event] = []
        if len(batch.output_rows):
            self._emit(batch, hidden, events)
        for rows in scheduled:
            sequence = rows.sequence
            if sequence.finish is None and sequence.sample_id in self._live:
                self.scheduler.tables.register(sequence)
                if sequence.score is not None and sequence.num_uncomputed == 0:
                    events.append(self._finish_score(sequence))
        return events

    def _hidden_states(self, batch: StepBatch) -> torch.Tensor:
        """Of the rows whose logits are wanted."""
        tables = batch.page_table, batch.cache_seqlens, batch.cu_seqlens_q
        if self._decoder is not None:
            rows = batch.input_ids, batch.positions, batch.slots
            return self._decoder.hidden_states(*rows, self.store, *tables, batch.output_rows)
        step = PagedStep(self.model.kernels, self.store, batch.slots, *tables)
        visual = None if self._features is None else visual_rows(batch.ranges, self._features.get)
        hidden = self.model.hidden_states(batch.input_ids, batch.positions, step, visual)
        return hidden[batch.output_rows.to(self.model.device)]

    def _emit(self, batch: StepBatch, hidden: torch.Tensor, events: list[Event]) -> None:
        logits = self.model.logits(hidden) if self._decoder is None else self._decoder.logits(hidden)
        digests = row_digests(logits, self.model.spec.vocab_size) if batch.wants_digests else None
        sampled = self._sampler.run(logits, batch.outputs)
        tops = tops_of(logits, batch.outputs, self.model.spec.vocab_size)
        for i, (output, token) in enumerate(zip(batch.outputs, sampled, strict=True)):
            sequence, position = output.sequence, output.position
            digest = digests[i] if digests is not None and sequence.row_digests else None
            if sequence.sample_id not in self._live:
                continue  # an earlier row of it has failed
            if token.error is not None:
                self._retire(sequence, spoiled=isinstance(token.error, ParityError))
                events.append(FailureEvent(sequence.sample_id, token.error))
            elif output.given:
                assert sequence.given is not None
                sequence.given.put(position + 1, token.policy_logprob, digest, tops[i])
            else:
                prompt = self._prompt_chunk(sequence)
                event = self._append(
                    sequence, token.token_id, token.policy_logprob, token.behavior_logprob, digest, tops[i]
                )
                events.append(event if prompt is None else dataclasses.replace(event, prompt=prompt))

    def _prompt_chunk(self, sequence: Sequence) -> PromptChunk | None:
        """The prompt's log-probs, once: with its first token all of them are known."""
        given, sequence.given = sequence.given, None
        if given is None:
            return None
        return PromptChunk(given.start, given.logprobs, self.weight_version, given.digests, given.top)

    def _append(
        self,
        sequence: Sequence,
        token_id: int,
        policy: np.float32,
        behavior: np.float32,
        digest: np.uint64 | None,
        top: TopLogprobs | None,
    ) -> SampleEvent:
        assert sequence.request is not None and sequence.stopper is not None
        sequence.token_ids.append(token_id)
        sequence.record_version(self.weight_version)
        chunk = TokenChunk(
            sample_index=sequence.request.sample_index,
            offset=sequence.num_generated - 1,
            token_ids=np.array([token_id], np.int32),
            policy_logprobs=np.array([policy], np.float32),
            behavior_logprobs=np.array([behavior], np.float32),
            weight_version=self.weight_version,
            row_digests=None if digest is None else np.array([digest], np.uint64),
            top=top,
        )
        sequence.finish = sequence.stopper.push(token_id) or sequence.end_by_length()
        summary = self._retire(sequence) if sequence.finish is not None else None
        return SampleEvent(sequence.sample_id, chunk, summary)

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _retire(self, sequence: Sequence, *, spoiled: bool = False) -> SampleSummary | None:
        if not spoiled:
            self.scheduler.tables.register(sequence)
        if self.activation_log is not None and sequence.request is not None:
            known = tuple(sequence.token_ids[: sequence.num_computed])
            self.activation_log.add(digests_of_store(sequence.sample_id, known, self.store, sequence.pages))
        self.scheduler.remove(sequence, spoiled=spoiled)
        del self._live[sequence.sample_id]
        return self._summary(sequence)

    def _summary(self, sequence: Sequence) -> SampleSummary | None:
        if sequence.request is None or sequence.finish is None:
            return None
        return SampleSummary(
            sample_index=sequence.request.sample_index,
            num_tokens=sequence.num_generated,
            finish=sequence.finish,
            spans=tuple(sequence.spans),
            text=self._text(sequence),
            num_cached_tokens=sequence.num_cached_tokens,
            replica=self.name,
        )

    def _finish_score(self, sequence: Sequence) -> ScoreEvent:
        self._retire(sequence)
        given = sequence.given
        assert given is not None
        score = SequenceScore(given.logprobs, given.digests, given.top)
        return ScoreEvent(sequence.sample_id, score, self.weight_version)

    def _text(self, sequence: Sequence) -> str | None:
        if self._tokenizer is None or sequence.request is None:
            return None
        text = self._tokenizer.decode(sequence.token_ids[sequence.prompt_len :])
        stop = sequence.finish.stop_string if sequence.finish is not None else None
        # Bytes decoded together may read otherwise: a stop string that is not in the whole text cuts nothing.
        return text.partition(stop)[0] if stop and not sequence.request.sampling.include_stop else text

    # ---- checks -------------------------------------------------------------------------------------------------

    def _undefined_ids(self) -> np.ndarray:
        if self._tokenizer is None:
            return np.empty(0, np.int64)
        defined = self._tokenizer.defined_ids
        return np.array([i for i in range(self.model.spec.vocab_size) if i not in defined], np.int64)

    def _check_new(self, sample_id: str) -> None:
        if sample_id in self._live:
            raise DuplicateRequest(f"sample {sample_id!r} is already live")
