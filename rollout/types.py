"""Records that cross module borders. Frozen; shapes and units stand under each field.

Shape letters: P prompt tokens, L generated tokens of one sample, S positions of a scored sequence, V vocabulary.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rollout.images import ImageInput
from rollout.spans import NOT_BEGUN, BegunSample
from rollout.spans import VersionSpan as VersionSpan
from rollout.weight_records import ReplicaDigests as ReplicaDigests
from rollout.weight_records import TensorChunk as TensorChunk
from rollout.weight_records import UpdateEnd as UpdateEnd
from rollout.weight_records import UpdatePart as UpdatePart
from rollout.weight_records import UpdatePolicy as UpdatePolicy
from rollout.weight_records import WeightState as WeightState
from rollout.weight_records import WeightUpdate as WeightUpdate

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt64Array = npt.NDArray[np.uint64]


class FinishReason(enum.Enum):
    """Why a sample ended."""

    STOP = "stop"
    """An EOS id, a stop id or a stop string was produced by the model."""
    LENGTH = "length"
    """``max_tokens`` or the context limit cut the sample; ``FinishDetail.limit`` says which."""
    ABORTED = "aborted"
    """Ended from outside (Abort, cancel, deadline, weight update); what was sampled so far is valid."""


class LogprobMode(enum.Enum):
    """Which distribution ``policy_logprob`` belongs to. Part of the parity manifest."""

    TEMPERED = "log_softmax(float32(logits) / T)"
    GREEDY_T1 = "log_softmax(float32(logits)); temperature 0 scores as temperature 1"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Defaults are neutral; ``rollout.sampling.validate_sampling`` is the only gate.

    Unset values stay neutral: nothing is read from ``generation_config.json``.
    """

    temperature: float = 1.0
    """Divides float32 logits before softmax. 0 = greedy. Finite, >= 0; rounded once to float32."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 = off."""
    top_p: float = 1.0
    """Keep the smallest set whose mass reaches top_p; 1 = off. In (0, 1]."""
    min_p: float = 0.0
    """Drop tokens below min_p times the largest probability; 0 = off. In [0, 1)."""
    seed: int | None = None
    """64-bit. None: the service draws one and returns it."""
    max_tokens: int | None = None
    """Most tokens to generate. None: up to the context limit."""
    stop_token_ids: tuple[int, ...] = ()
    """End after any of these, in addition to the model's EOS ids."""
    stop: tuple[str, ...] = ()
    """End once the decoded text of the sample contains any of these."""
    include_stop: bool = False
    """Whether ``text`` keeps the stop string. Ids and log-probs always keep every sampled token."""
    ignore_eos: bool = False
    """Go on past the model's EOS ids (never past ``stop_token_ids``)."""
    barred_token_ids: tuple[int, ...] = ()
    """Never sampled: a filter, so it shows in ``behavior_logprob`` only."""
    bar_undefined_tokens: bool = False
    """Bar every id that the tokenizer does not define."""

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, by temperature 0."""
        return self.temperature == 0.0

    @property
    def filtered(self) -> bool:
        """Whether some tokens may be ruled out, so that ``behavior_logprob`` can differ from ``policy_logprob``."""
        return bool(
            self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.barred_token_ids or self.bar_undefined_tokens
        )

    @property
    def logprob_mode(self) -> LogprobMode:
        """What the log-probs of such samples mean."""
        return LogprobMode.GREEDY_T1 if self.greedy else LogprobMode.TEMPERED


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One client request: n samples of one prompt."""

    request_id: str
    """Client's name for it; unique among live requests."""
    prompt_ids: tuple[int, ...]
    """[P] token ids, P >= 1."""
    sampling: SamplingParams
    n: int = 1
    """How many samples."""
    sample_index: int = 0
    """Index of the first sample: n = 8 equals 8 requests with n = 1 and sample_index 0..7."""
    row_digests: bool = False
    """Also return the 64-bit digest of every sampled position's float32 logits row."""
    top_logprobs: int = 0
    """Also return this many of the likeliest tokens at every position that is reported."""
    prompt_logprobs: bool = False
    """Also return the log-probs of prompt tokens 1..P-1, once a request. Those rows are computed, never cached ones."""
    priority: int = 0
    """Higher is admitted first and preempted last. Changes no bit."""
    client: str = ""
    """Whose fair share it counts against; the service fills it in."""
    images: tuple[ImageInput, ...] = ()
    """One for each run of image placeholders in the prompt, in order."""
    resume: BegunSample | None = None
    """What the client has of the one sample asked for; takes over from a live call with the same id."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample as the engine sees it: everything resolved, nothing left to default."""

    sample_id: str
    """Internal and unique for ever: client id + random suffix + index."""
    prompt_ids: tuple[int, ...]
    """[P]"""
    sampling: SamplingParams
    """Validated, with ``seed`` and ``max_tokens`` set; ``seed`` is the request's, before mixing."""
    sample_index: int = 0
    row_digests: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    priority: int = 0
    client: str = ""
    trace: str = ""
    """W3C traceparent of the call that asked; nothing sampled depends on it."""
    images: tuple[ImageInput, ...] = ()
    begun: BegunSample = NOT_BEGUN
    """What was sampled and delivered of it already, by another replica; sampling goes on behind that."""


@dataclass(frozen=True, slots=True)
class FinishDetail:
    """How a sample ended."""

    reason: FinishReason
    stop_token_id: int | None = None
    """The EOS or stop id that ended it, if one did."""
    stop_string: str | None = None
    limit: str = ""
    """For LENGTH: "max_tokens" or "context"."""
    message: str = ""
    """For ABORTED: by what."""


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The n likeliest tokens at each of l positions (C1: no filter), likeliest first; equal ones in order of ids."""

    token_ids: Int32Array
    """[l, n]"""
    logprobs: Float32Array
    """[l, n] nats"""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Consecutive tokens of one sample, all sampled under one weight version."""

    sample_index: int
    offset: int
    """Index of the first token here among the sample's generated tokens."""
    token_ids: Int32Array
    """[l]"""
    policy_logprobs: Float32Array
    """[l] nats"""
    behavior_logprobs: Float32Array
    """[l] nats"""
    weight_version: int
    row_digests: UInt64Array | None = None
    """[l] or None when not asked for"""
    top: TopLogprobs | None = None
    """[l, n] or None when not asked for"""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Log-probs of consecutive prompt tokens, all of a request's under one weight version; before its first token."""

    start: int
    """Position of the first token here, >= 1: position 0 has no log-prob."""
    logprobs: Float32Array
    """[l] nats; entry i belongs to prompt_ids[start + i]"""
    weight_version: int
    row_digests: UInt64Array | None = None
    """[l] or None when not asked for"""
    top: TopLogprobs | None = None
    """[l, n] or None when not asked for"""


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """The end of one sample."""

    sample_index: int
    num_tokens: int
    finish: FinishDetail
    spans: tuple[VersionSpan, ...]
    text: str | None = None
    """Decoded sample, when the service has a tokenizer."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    replica: str = ""


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """What an engine step says about one sample: its prompt's log-probs, new tokens, its end; in this order."""

    sample_id: str
    chunk: TokenChunk | None = None
    summary: SampleSummary | None = None
    prompt: PromptChunk | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """Last message of a Generate stream: the effective parameters and every sample's end."""

    request_id: str
    prompt_ids: tuple[int, ...]
    """[P] echo of what was fed; for a text prompt, its encoding."""
    sampling: SamplingParams
    """Effective values: seed set, max_tokens set, temperature rounded to float32."""
    samples: tuple[SampleSummary, ...]
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class ScoreSequence:
    """A sequence whose tokens are scored by prefill."""

    token_ids: tuple[int, ...]
    """[S] S >= 2"""
    start: int = 1
    """First scored position, >= 1: position 0 has no log-prob."""
    images: tuple[ImageInput, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """One client request: log-probs of given sequences."""

    request_id: str
    sequences: tuple[ScoreSequence, ...]
    temperature: float = 1.0
    row_digests: bool = False
    top_logprobs: int = 0
    """Also return this many of the likeliest tokens at every scored position."""
    priority: int = 0
    client: str = ""

    @property
    def options(self) -> ScoreOptions:
        """What holds for every sequence."""
        return ScoreOptions(self.temperature, self.row_digests, self.top_logprobs, self.priority, self.client)


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How sequences are scored: see ``ScoreRequest`` and ``GenerateRequest``."""

    temperature: float = 1.0
    row_digests: bool = False
    top_logprobs: int = 0
    priority: int = 0
    client: str = ""


@dataclass(frozen=True, slots=True)
class SequenceScore:
    """Log-probs of positions start..S-1: entry i belongs to token_ids[start + i]."""

    logprobs: Float32Array
    """[S - start] nats"""
    row_digests: UInt64Array | None = None
    """[S - start]"""
    top: TopLogprobs | None = None
    """[S - start, n]"""


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Answer to a ``ScoreRequest``, all of it under one weight version."""

    request_id: str
    scores: tuple[SequenceScore, ...]
    temperature: float
    mode: LogprobMode
    weight_version: int
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One worker's load at a moment."""

    name: str
    healthy: bool
    running: int
    """samples being decoded or prefilled"""
    waiting: int
    """samples queued"""
    free_pages: int
    total_pages: int
    weights: WeightState


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of one engine since it started."""

    steps: int
    """forward passes"""
    rows: int
    """token rows computed, prefill and decode"""
    preemptions: int
    """samples that gave their pages up and were prefilled again"""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Answer to GetServerInfo."""

    model: str
    vocab_size: int
    context_length: int
    """tokens, prompt + generated"""
    eos_token_ids: tuple[int, ...]
    manifest: Mapping[str, str]
    """flat "section.key" -> value; see ``rollout.manifest``"""
    manifest_digest: str
    weights: WeightState
    replicas: tuple[ReplicaLoad, ...]
    paused: bool
    limits: Mapping[str, int] = field(default_factory=dict)
    """name -> value, e.g. max_n, max_message_bytes"""
    tensor_digests: Mapping[str, str] = field(default_factory=dict)
    """parameter name -> digest, hex; empty unless asked for"""
    replica_digests: tuple[ReplicaDigests, ...] = ()
    """what each living replica holds; empty unless asked for"""
