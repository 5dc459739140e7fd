"""The training forward: packed sequences through the rollout's kernel set, log-probs with gradients.

The forward bits of a token depend on its own sequence only, so packing, micro-batch size and order never show.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from rollout.attention import PackedStep
from rollout.errors import InvalidRequest
from rollout.images import ImageInput
from rollout.logprobs import effective_temperature, policy_logprobs, row_digests
from rollout.model import ModelSpec, SharedModel
from rollout.multimodal import ImageFeatures, VisualRows, visual_rows
from rollout.placement import ImageSpan, place
from rollout.types import Int32Array, UInt64Array
from trainer_bridge.checks import binary_mask
from trainer_bridge.ids import id_array

HEAD_ROWS = 512
"""Rows whose logits exist at a time; the rest of the head is recomputed in backward."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One sequence to score or train on."""

    prompt_ids: Int32Array
    """[P], P >= 1"""
    token_ids: Int32Array
    """[L], L >= 1"""
    temperature: float = 1.0
    """as sampled; 0 scores as 1"""
    images: tuple[ImageInput, ...] = ()
    """as sent with the prompt"""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """B sequences laid end to end, no padding."""

    input_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [T], restarting at every sequence"""
    cu_seqlens: torch.Tensor
    """int32 [B + 1]"""
    rows: torch.Tensor
    """int64 [N] the row whose logits score each generated token: the one before it"""
    targets: torch.Tensor
    """int64 [N] generated tokens, sequence after sequence"""
    temperatures: torch.Tensor
    """float32 [N]"""
    lengths: tuple[int, ...]
    """[B] generated tokens of each sequence; sums to N"""


def pack(samples: Sequence[TrainingSample]) -> PackedBatch:
    """Lay samples end to end.

    Raises:
        InvalidRequest: an empty batch, prompt or generation; ids that are no integers.
    """
    if not samples:
        raise InvalidRequest("no samples to pack")
    sides = [_checked_ids(sample, f"sample {i}") for i, sample in enumerate(samples)]
    sizes = [len(s.prompt_ids) + len(s.token_ids) for s in samples]
    edges = np.concatenate(([0], np.cumsum(sizes)))
    rows = [
        np.arange(edge + len(s.prompt_ids) - 1, edge + size - 1)
        for s, edge, size in zip(samples, edges[:-1], sizes, strict=True)
    ]
    lengths = tuple(len(s.token_ids) for s in samples)
    temperatures = [effective_temperature(s.temperature) for s in samples]
    return PackedBatch(
        input_ids=torch.from_numpy(np.concatenate([ids for side in sides for ids in side]).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate([np.arange(size) for size in sizes])),
        cu_seqlens=torch.from_numpy(edges.astype(np.int32)),
        rows=torch.from_numpy(np.concatenate(rows)),
        targets=torch.from_numpy(np.concatenate([generated for _, generated in sides]).astype(np.int64)),
        temperatures=torch.from_numpy(np.repeat(np.array(temperatures, np.float32), lengths)),
        lengths=lengths,
    )


def _checked_ids(sample: TrainingSample, name: str) -> tuple[Int32Array, Int32Array]:
    prompt = id_array(sample.prompt_ids, f"{name}: prompt_ids")
    generated = id_array(sample.token_ids, f"{name}: token_ids")
    if not prompt.size or not generated.size:
        raise InvalidRequest(
            f"{name} has {prompt.size} prompt and {generated.size} generated tokens; both must be at least 1"
        )
    return prompt, generated


def check_samples(samples: Sequence[TrainingSample], spec: ModelSpec, names: Sequence[str] | None = None) -> None:
    """Ids of another tokenizer's, or of a padded vocabulary, have no row here; and no rollout goes past its context.

    Args:
        names: what messages call the samples; by default their numbers.

    Raises:
        InvalidRequest: an empty part, ids that are no integers or outside the vocabulary, a sample beyond the context,
            a temperature that none is sampled at.
    """
    vocab_size, context_length = spec.vocab_size, spec.context_length
    for i, sample in enumerate(samples):
        name = f"sample {i}" if names is None else names[i]
        prompt, generated = _checked_ids(sample, name)
        try:
            effective_temperature(sample.temperature)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error.message}", field=error.field) from error
        if (length := prompt.size + generated.size) > context_length:
            raise InvalidRequest(
                f"{name} has {length} tokens, the model's context holds {context_length}; the rollouts are another "
                "model's, or model.context_length is set too low",
                field="token_ids",
            )
        for part, ids in (("prompt", prompt), ("generated", generated)):
            bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if bad.size:
                raise InvalidRequest(
                    f"{name}: {part} id {int(ids[bad[0]])} at {int(bad[0])} is outside [0, {vocab_size - 1}], the "
                    "model's vocabulary; the rollouts are another model's",
                    field="token_ids",
                )


@dataclass(frozen=True, slots=True)
class TrainingOutput:
    """What the trainer's forward says about a batch."""

    logprobs: torch.Tensor
    """float32 [N] nats, with gradient when the model trains"""
    digests: UInt64Array | None
    """uint64 [N]"""
    lengths: tuple[int, ...]
    """[B]"""

    def split(self) -> tuple[torch.Tensor, ...]:
        """Log-probs per sequence."""
        parts: tuple[torch.Tensor, ...] = self.logprobs.split(list(self.lengths))
        return parts

    def split_digests(self) -> list[UInt64Array | None]:
        """Row digests per sequence."""
        if self.digests is None:
            return [None] * len(self.lengths)
        return list(np.split(self.digests, np.cumsum(self.lengths)[:-1]))


class TrainingForward:
    """The trainer's side of the shared model. Enter ``aligned()`` around forward and backward."""

    def __init__(self, model: SharedModel) -> None:
        self.model = model

    @contextlib.contextmanager
    def aligned(self) -> Iterator[None]:
        """Row-invariant operations, as on the rollout's side."""
        with self.model.kernels.invariant_mode():
            yield

    def __call__(self, samples: Sequence[TrainingSample], *, digests: bool = False) -> TrainingOutput:
        """Log-probs of every generated token of a micro-batch.

        Args:
            digests: also hash the float32 logits rows (C1).

        Raises:
            InvalidRequest: an empty part, an id outside the vocabulary, a sample longer than the context.
        """
        batch = pack(samples)
        check_samples(samples, self.model.spec)
        step = PackedStep(self.model.kernels, batch.cu_seqlens)
        visual = self._visual(samples)
        hidden = self.model.hidden_states(batch.input_ids, batch.positions, step, visual)[
            batch.rows.to(self.model.device)
        ]
        parts: list[torch.Tensor] = []
        hashed: list[UInt64Array] = []
        for start in range(0, len(batch.targets), HEAD_ROWS):
            here = slice(start, start + HEAD_ROWS)
            parts.append(self._head(hidden[here], batch.targets[here], batch.temperatures[here]))
            if digests:
                with torch.no_grad():
                    hashed.append(row_digests(self.model.logits(hidden[here]), self.model.spec.vocab_size))
        return TrainingOutput(torch.cat(parts), np.concatenate(hashed) if digests else None, batch.lengths)

    def _visual(self, samples: Sequence[TrainingSample]) -> VisualRows | None:
        """Each image once a micro-batch, so that samples of one prompt share its features and add up its gradient."""
        part = self.model.vision
        rules = None if part is None else part.rules
        ranges = []
        for i, sample in enumerate(samples):
            ids = np.concatenate((sample.prompt_ids, sample.token_ids)).tolist()
            ranges.append((place(ids, sample.images, rules, f"samples[{i}]"), 0, len(ids)))
        if part is None:
            return None
        features: dict[bytes, ImageFeatures] = {}

        def of(span: ImageSpan) -> ImageFeatures:
            if span.digest not in features:
                features[span.digest] = part.encode(span.image)
            return features[span.digest]

        return visual_rows(ranges, of)

    def _head(self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
        def logprobs(rows: torch.Tensor) -> torch.Tensor:
            return policy_logprobs(self.model.logits(rows), targets, temperatures, self.model.spec.vocab_size)

        if not hidden.requires_grad:
            return logprobs(hidden)
        result: torch.Tensor = checkpoint(logprobs, hidden, use_reentrant=False)
        return result


def unpad(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, response_mask: torch.Tensor, temperature: float = 1.0
) -> list[TrainingSample]:
    """Samples of a padded batch: pads on any side are dropped, so positions count real tokens only.

    Args:
        input_ids, attention_mask: [B, S]. response_mask: [B, S], 1 where the model generated the token.

    Raises:
        InvalidRequest: a response mask that is not one run at the end of the real tokens (pack several turns as rows
            of their own), or that marks a pad; masks other than 0 and 1.
    """
    samples: list[TrainingSample] = []
    for b in range(input_ids.size(0)):
        real = binary_mask(attention_mask[b].cpu().numpy(), f"row {b}: attention")
        marked = binary_mask(response_mask[b].cpu().numpy(), f"row {b}: response")
        ids = id_array(input_ids[b].cpu().numpy()[real], f"row {b}: input_ids")
        generated = marked[real]
        length = int(generated.sum())
        if int(marked.sum()) != length:
            raise InvalidRequest(f"row {b}: response_mask marks a padded position", field="response_mask")
        if not 0 < length < len(ids) or not generated[-length:].all():
            raise InvalidRequest(
                f"row {b}: {length} of {len(ids)} tokens are generated and must be the last ones, after a prompt",
                field="response_mask",
            )
        samples.append(TrainingSample(ids[:-length], ids[-length:], temperature))
    return samples
