"""Random lives of one engine, replayable from a seed: whatever happens around a sample, it says what it says alone.

A ``Plan`` holds every decision, so a failing one can be cut down and played again. In between steps it lets requests
arrive with any priority and client, aborts and resumes them, preempts, shuffles free pages, poisons unused slots,
scores strangers and swaps the weights.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rollout.engine import Engine
from rollout.events import Event, FailureEvent, ScoreEvent
from rollout.model import SharedModel
from rollout.types import PromptChunk, SampleEvent, SampleRequest, ScoreSequence, SequenceScore, TokenChunk, TopLogprobs
from tests.engines import build_engine, fresh_model, random_prompt, sample
from tests.parity.test_poison import poison_unused

PAGE = 16
MOST_STEPS = 3000
BASE = random_prompt(64, 77)
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"temperature": 0.0},
    {"top_p": 0.7, "min_p": 0.01},
    {"barred_token_ids": (5, 6, 7)},
    {"ignore_eos": False, "temperature": 1.5},
)
TAILS = (1, 2, 13, 15, 16, 17, 5)


def _request(i: int) -> SampleRequest:
    prompt = (*BASE[: PAGE * (i % 4)], *random_prompt(TAILS[i % 7], i // 2))
    plain = sample(prompt, f"r{i}", i % 3, seed=i // 3, max_tokens=1 + 5 * i % 13, **KINDS[i % 7])
    return dataclasses.replace(
        plain, top_logprobs=(0, 0, 3, 1)[i % 4], prompt_logprobs=i % 5 == 0, row_digests=i % 3 != 1
    )


REQUESTS = tuple(_request(i) for i in range(28))
"""Fixed, so that isolated runs are made once. Prompts share 0 to 3 pages; none needs more than 5 in all."""
SCORES = tuple(
    (ScoreSequence((*BASE[: PAGE * (i % 4)], *random_prompt(9 + i, i)), 1 + 11 * i % (9 + i)), (0, 2)[i % 2])
    for i in range(8)
)
"""Sequences to score, and how many alternatives."""


# ---- plans ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrival:
    """A request of ``REQUESTS`` joins."""

    step: int
    request: int
    priority: int
    client: str


@dataclass(frozen=True)
class Plan:
    """One random life of an engine. Steps count from 0."""

    seed: int
    arrivals: tuple[Arrival, ...]
    """each request at most once"""
    scores: tuple[tuple[int, int], ...]
    """(step, index into SCORES)"""
    aborts: tuple[tuple[int, int, bool], ...]
    """(step, request, whether its client resumes it)"""
    preempts: tuple[tuple[int, int], ...]
    """(step, which of those that run)"""
    updates: tuple[tuple[int, bool], ...]
    """(step, whether what runs is aborted and resumed instead of rebuilt)"""
    shuffles: tuple[int, ...]
    """steps before which the free list is shuffled"""
    storm: bool
    """preempt whoever has just got a token: every token is sampled after a whole prefill"""
    poison: bool
    """NaN into every unused slot before each step"""
    prefix_cache: bool
    fused: bool
    """the kernel set's own forward, or the modules in invariant mode"""
    pages: int
    chunk: int
    batch_tokens: int
    running: int


def random_plan(seed: int) -> Plan:
    """The plan of a seed, the same for ever."""
    rng = random.Random(seed)
    storm = rng.random() < 0.25
    chosen = rng.sample(range(len(REQUESTS)), rng.randint(1, 4 if storm else 10))
    spread = rng.choice((0, 4, 12, 30))
    arrivals = tuple(
        Arrival(rng.randint(0, spread), i, rng.choice((0, 0, 0, 3, -2)), rng.choice("abc")) for i in chosen
    )
    steps = spread + 25
    batch_tokens = rng.randint(24 if storm else 3, 70)
    return Plan(
        seed=seed,
        arrivals=arrivals,
        scores=tuple((rng.randint(0, spread), rng.randrange(len(SCORES))) for _ in range(rng.choice((0, 1, 3)))),
        aborts=tuple(
            (rng.randint(0, steps), i, rng.random() < 0.7) for i in chosen if rng.random() < rng.choice((0.0, 0.4))
        ),
        preempts=tuple((rng.randint(1, steps), rng.randrange(8)) for _ in range(rng.choice((0, 3, 12)))),
        updates=tuple((rng.randint(1, steps), rng.random() < 0.4) for _ in range(rng.choice((0, 0, 0, 1, 2)))),
        shuffles=tuple(rng.randint(0, steps) for _ in range(rng.randint(0, 4))),
        storm=storm,
        poison=rng.random() < 0.3,
        prefix_cache=rng.random() < 0.8,
        fused=rng.random() < 0.85,
        pages=rng.choice((5, 6, 7, 9, 14)),
        chunk=rng.randint(16 if storm else 1, 60),
        batch_tokens=batch_tokens,
        running=rng.randint(1, min(8, batch_tokens)),
    )


# ---- what was said ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Said:
    """All that an engine said about one request, its resumes included."""

    chunks: list[TokenChunk] = field(default_factory=list)
    prompt: PromptChunk | None = None
    cut: bool = False
    """aborted for good"""
    over: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(int(i) for chunk in self.chunks for i in chunk.token_ids)


def _top_bytes(top: TopLogprobs | None) -> bytes:
    return b"" if top is None else top.token_ids.tobytes() + top.logprobs.tobytes()


def token_bits(chunk: TokenChunk) -> tuple[bytes, ...]:
    """Everything in a chunk of one token."""
    digests = b"" if chunk.row_digests is None else chunk.row_digests.tobytes()
    values = chunk.token_ids, chunk.policy_logprobs, chunk.behavior_logprobs
    return *(v.tobytes() for v in values), digests, _top_bytes(chunk.top)


def given_bits(given: PromptChunk | SequenceScore | None) -> tuple[bytes, ...]:
    """Everything in a prompt's or a sequence's scores."""
    if given is None:
        return ()
    return (
        given.logprobs.tobytes(),
        b"" if given.row_digests is None else given.row_digests.tobytes(),
        _top_bytes(given.top),
    )


# ---- references -------------------------------------------------------------------------------------------------


class Rig:
    """A model whose weights may be swapped between two sets, and isolated runs under each."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32, model: SharedModel | None = None) -> None:
        self.model = model or fresh_model(path, dtype)
        self._sets = [[p.detach().clone() for _, p in self.model.parameters()] for _ in range(2)]
        generator = torch.Generator().manual_seed(5)
        for tensor in self._sets[1]:
            tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
        self._loaded = 0
        self._alone = [self._engine_of(fresh_model(path, dtype), which) for which in range(2)]
        self._samples: dict[tuple[int, str, tuple[int, ...]], Said] = {}
        self._scores: dict[tuple[int, int], tuple[bytes, ...]] = {}

    def _engine_of(self, model: SharedModel, which: int) -> Engine:
        _copy(model, self._sets[which])
        return build_engine(model, batch_tokens=128, chunk=128, kv_tokens=PAGE * 8, prefix_cache=False)

    def load(self, which: int) -> None:
        """Put a weight set into the model."""
        if which != self._loaded:
            _copy(self.model, self._sets[which])
            self._loaded = which

    def alone(self, which: int, request: SampleRequest, done: tuple[int, ...]) -> Said:
        """The rest of a sample after ``done`` tokens, by itself under one weight set."""
        key = which, request.sample_id, done
        if key not in self._samples:
            self._samples[key] = said = Said()
            for event in _run_alone(self._alone[which], lambda e: e.add(e.effective_request(resumed(request, done)))):
                assert isinstance(event, SampleEvent)
                said.prompt = event.prompt or said.prompt
                said.chunks += [event.chunk] if event.chunk is not None else []
        return self._samples[key]

    def score(self, which: int, index: int) -> tuple[bytes, ...]:
        """A scored sequence by itself."""
        key = which, index
        if key not in self._scores:
            (event,) = _run_alone(self._alone[which], lambda e: add_score(e, "z", index))
            assert isinstance(event, ScoreEvent)
            self._scores[key] = given_bits(event.score)
        return self._scores[key]


def _copy(model: SharedModel, tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for (_, parameter), tensor in zip(model.parameters(), tensors, strict=True):
            parameter.copy_(tensor)


def _run_alone(engine: Engine, add: Callable[[Engine], None]) -> list[Event]:
    engine.store.poison()
    add(engine)
    events: list[Event] = []
    with engine.model.kernels.invariant_mode():
        while engine.live_ids:
            events += engine.step()
    return events


def add_score(engine: Engine, name: str, index: int, **fields: Any) -> None:
    sequence, top = SCORES[index]
    engine.add_score(name, sequence, temperature=1.0, want_digests=True, top_logprobs=top, **fields)


def resumed(request: SampleRequest, done: tuple[int, ...]) -> SampleRequest:
    """The request as its client sends it again after ``done`` tokens."""
    if not done:
        return request
    most = request.sampling.max_tokens
    assert most is not None
    return dataclasses.replace(
        request,
        prompt_ids=(*request.prompt_ids, *done),
        sampling=dataclasses.replace(request.sampling, max_tokens=most - len(done)),
        prompt_logprobs=False,
    )


# ---- a life -----------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was done and compared."""

    schedules: int = 0
    steps: int = 0
    tokens: int = 0
    scored: int = 0
    preemptions: int = 0
    cached: int = 0
    copied: int = 0
    aborts: int = 0
    resumes: int = 0
    updates: int = 0
    differences: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{value:,} {name}" for name, value in vars(self).items())


class Life:
    """Plays one plan and compares as it goes."""

    def __init__(self, rig: Rig, plan: Plan, tally: Tally) -> None:
        self.rig, self.plan, self.tally = rig, plan, tally
        rig.load(0)
        self.engine = build_engine(
            rig.model, batch_tokens=plan.batch_tokens, running=plan.running, chunk=plan.chunk,
            kv_tokens=plan.pages * PAGE, shuffle=plan.seed, prefix_cache=plan.prefix_cache, fused=plan.fused,
        )  # fmt: skip
        self.said = {a.request: Said() for a in plan.arrivals}
        self.terms = {a.request: a for a in plan.arrivals}
        self.ids: dict[str, int] = {}
        """sample id in the engine -> request"""
        self.live: dict[int, str] = {}
        self.scoring: dict[str, int] = {}
        self.differences: list[str] = []
        self._rng = random.Random(plan.seed)
        self._due: list[tuple[int, Callable[[], None]]] = []
        self._plan()

    def play(self) -> list[str]:
        """What differs; AssertionError when the books do not balance."""
        with self.rig.model.kernels.invariant_mode():
            for step in range(MOST_STEPS):
                while self._due and self._due[0][0] <= step:
                    self._due.pop(0)[1]()
                if not self.engine.live_ids and not self._due:
                    break
                if self.plan.poison:
                    poison_unused(self.engine)
                self.take(self.engine.step())
                self.engine.scheduler.check()
                self.tally.steps += 1
        assert not self.engine.live_ids, f"{self.engine.live_ids} never end"
        assert self.engine.pages.num_free == self.engine.pages.num_pages, "pages are missing after the drain"
        self._finish()
        return self.differences

    def _plan(self) -> None:
        plan = self.plan
        due: list[tuple[int, Callable[[], None]]] = [(a.step, lambda a=a: self.add(a.request)) for a in plan.arrivals]
        due += [(step, lambda i=i: self.add_score(i)) for step, i in plan.scores]
        due += [(step, lambda i=i, r=r: self.abort(i, r)) for step, i, r in plan.aborts]
        due += [(step, lambda c=c: self.preempt(c)) for step, c in plan.preempts]
        due += [(step, lambda c=c: self.update(c)) for step, c in plan.updates]
        due += [(step, lambda: self.engine.pages.shuffle(self._rng)) for step in plan.shuffles]
        self._due = sorted(due, key=lambda item: item[0])

    # ---- what a plan does

    def add(self, number: int) -> None:
        said, terms = self.said[number], self.terms[number]
        name = f"{REQUESTS[number].sample_id}~{len(self.ids)}"
        request = dataclasses.replace(
            resumed(REQUESTS[number], said.ids), sample_id=name, priority=terms.priority, client=terms.client
        )
        self.ids[name] = number
        self.live[number] = name
        self.engine.add(self.engine.effective_request(request))

    def add_score(self, index: int) -> None:
        name = f"score{len(self.scoring)}"
        self.scoring[name] = index
        add_score(self.engine, name, index, priority=index % 3 - 1, client="scorer")

    def abort(self, number: int, resume: bool) -> None:
        name = self.live.pop(number, None)
        if name is None:
            return
        assert self.engine.abort(name, "plan").summary is not None
        self.tally.aborts += 1
        if resume:
            self.tally.resumes += 1
            self.add(number)
        else:
            self.said[number].cut = True

    def preempt(self, choice: int) -> None:
        running = self.engine.scheduler.running
        if running:
            self.engine.scheduler.preempt(running[choice % len(running)])

    def update(self, abort: bool) -> None:
        if abort:
            for number in list(self.live):
                self.abort(number, resume=True)
        version = self.engine.weight_version + 1
        self.rig.load(version % 2)
        self.engine.weights_changed(version)
        self.tally.updates += 1

    # ---- what the engine says

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, FailureEvent):
                self.differ(event.sample_id, f"failed: {event.error}")
                self.live.pop(self.ids.get(event.sample_id, -1), None)
            elif isinstance(event, ScoreEvent):
                self.take_score(event)
            else:
                self.take_sample(event)

    def take_sample(self, event: SampleEvent) -> None:
        number = self.ids[event.sample_id]
        said = self.said[number]
        if event.prompt is not None:
            if said.prompt is not None:
                self.differ(event.sample_id, "told its prompt twice")
            said.prompt = event.prompt
        if event.chunk is not None:
            said.chunks.append(event.chunk)
        if event.summary is not None:
            said.over = True
            del self.live[number]
            self.tally.cached += event.summary.num_cached_tokens
        elif self.plan.storm:
            sequence = self.engine._live[event.sample_id]
            if sequence in self.engine.scheduler.running:
                self.engine.scheduler.preempt(sequence)

    def take_score(self, event: ScoreEvent) -> None:
        index = self.scoring[event.sample_id]
        self.tally.scored += len(event.score.logprobs)
        if given_bits(event.score) != self.rig.score(event.weight_version % 2, index):
            self.differ(event.sample_id, f"scores of sequence {index} differ")

    def differ(self, name: str, what: str) -> None:
        self.differences.append(f"{name}: {what}")

    # ---- the end

    def _finish(self) -> None:
        for number, said in self.said.items():
            self._compare(number, said)
        self.tally.preemptions += self.engine.scheduler.num_preemptions
        self.tally.copied += self.engine.scheduler.tables.num_copied
        self.tally.schedules += 1
        self.tally.differences += bool(self.differences)

    def _compare(self, number: int, said: Said) -> None:
        """Each stretch of one weight version against the isolated run from where it began."""
        request, ids, at = REQUESTS[number], said.ids, 0
        if not said.over and not said.cut:
            self.differ(request.sample_id, "was never answered")
            return
        while at < len(ids):
            version = said.chunks[at].weight_version
            end = next((i for i in range(at, len(ids)) if said.chunks[i].weight_version != version), len(ids))
            expected = self.rig.alone(version % 2, request, ids[:at]).chunks
            bits = [token_bits(chunk) for chunk in said.chunks[at:end]]
            if bits != [token_bits(chunk) for chunk in expected[: end - at]]:
                self.differ(request.sample_id, f"tokens {at} to {end} of version {version} differ")
            elif end == len(ids) and said.over and len(expected) != end - at:
                self.differ(request.sample_id, f"{len(ids)} tokens, {at + len(expected)} were due")
            at = end
        if request.prompt_logprobs and ids and len(request.prompt_ids) > 1:
            version = said.chunks[0].weight_version
            if given_bits(said.prompt) != given_bits(self.rig.alone(version % 2, request, ()).prompt):
                self.differ(request.sample_id, "log-probs of the prompt differ")
        elif said.prompt is not None:
            self.differ(request.sample_id, "told a prompt that nobody asked for")
        self.tally.tokens += len(ids)


def faults(rig: Rig, plan: Plan, tally: Tally | None = None) -> list[str]:
    """What is wrong with a life: differences, or what the books or the engine raised."""
    try:
        return Life(rig, plan, tally or Tally()).play()
    except (AssertionError, KeyError, RuntimeError) as error:
        return [f"{type(error).__name__}: {error}"]


# ---- a smaller plan that still fails ----------------------------------------------------------------------------


def _smaller(plan: Plan) -> Iterable[Plan]:
    for name in ("arrivals", "scores", "aborts", "preempts", "updates", "shuffles"):
        items = getattr(plan, name)
        for i in range(len(items)):
            yield dataclasses.replace(plan, **{name: items[:i] + items[i + 1 :]})
    for name in ("storm", "poison", "prefix_cache"):
        if getattr(plan, name):
            yield dataclasses.replace(plan, **{name: False})
    for name, calm in (("chunk", 60), ("batch_tokens", 70), ("pages", 60), ("running", 1)):
        if getattr(plan, name) != calm:
            yield dataclasses.replace(plan, **{name: calm})


def shrink(plan: Plan, fails: Callable[[Plan], bool], *, tries: int = 300) -> Plan:
    """Drop whatever can go while the plan still fails."""
    left, progress = tries, True
    while progress and left > 0:
        progress = False
        for candidate in _smaller(plan):
            left -= 1
            if left < 0:
                break
            if fails(candidate):
                plan, progress = candidate, True
                break
    return plan


def check(rig: Rig, seeds: Iterable[int], tally: Tally) -> None:
    """Play the plans of seeds; the first that fails is cut down and told with the way to play it again."""
    for seed in seeds:
        plan = random_plan(seed)
        wrong = faults(rig, plan, tally)
        if wrong:
            small = shrink(plan, lambda candidate: bool(faults(rig, candidate)))
            raise AssertionError(
                f"schedule {seed}: {wrong[:3]}\nleast that fails: {small}\n  {faults(rig, small)[:3]}\n"
                f"again: python -m tests.soak --seed {seed} --schedules 1"
            )
