"""C4 as a state machine: whatever is sent, refused, cut off or broken, every replica in rotation holds one whole set.

Two replicas in this process, one sender at a time. Hypothesis chooses what the sender does next and what fails; after
each turn the live tensors of every replica are hashed and scored, and must be those of the version the pool claims.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollout.engine_thread import EngineThread
from rollout.errors import ReplicaUnavailable, RolloutError, WeightUpdateError
from rollout.pool import Pool
from rollout.replica import LocalReplica
from rollout.types import (
    ScoreRequest,
    ScoreResult,
    ScoreSequence,
    TensorChunk,
    UpdateEnd,
    UpdatePart,
    UpdatePolicy,
    WeightState,
    WeightUpdate,
)
from rollout.weight_stage import WeightStage
from rollout.weights import model_digest, root_digest
from rollout.worker import Worker
from tests.rollout.updates import chunks_of, digest_over
from tests.services import PROMPT, soon, tensors_of, tiny_settings, training_bits, version_path

IDS = (*PROMPT, *range(7, 40))
CHUNK_BYTES = 5000
REFUSING = ("stage_chunks", "verify_stage", "quiesce")
POLICIES = st.sampled_from(list(UpdatePolicy))


@dataclasses.dataclass
class Sent:
    """An update on its way."""

    task: asyncio.Task[Any]
    queue: asyncio.Queue[UpdatePart | None]
    update: WeightUpdate
    seed: int
    left: list[TensorChunk]
    """not sent yet"""
    spoiled: bool = False
    """whether something sent, or about to fail, must have it refused"""


class Faulty:
    """A replica whose next call of one method is refused."""

    def __init__(self, inner: LocalReplica) -> None:
        self.name, self._inner = inner.name, inner
        self.refuses = ""

    async def call(self, method: str, *args: Any) -> Any:
        if method == self.refuses:
            self.refuses = ""
            raise WeightUpdateError("not here")
        return await self._inner.call(method, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class UpdateMachine(RuleBasedStateMachine):
    """See the module."""

    base: Path
    scores: dict[int, bytes]
    """seed of the weights -> log-probs of IDS by the training forward"""
    sets: dict[int, dict[str, torch.Tensor]]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        options = tiny_settings(self.base, replicas=2)
        self.workers = [Worker(options, str(self.base), f"w{i}") for i in range(2)]
        self.replicas = [Faulty(LocalReplica(w, f"w{i}")) for i, w in enumerate(self.workers)]
        self.pool = Pool(list(self.replicas), options, "tiny", None)
        self.run(self.pool.start())
        self.version, self.seed = 0, 0
        self.alive = [True, True]
        self.dying: set[int] = set()
        self.sent: Sent | None = None

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(soon(work))

    # ---- what may happen ----------------------------------------------------------------------------------------

    @initialize()
    def nothing_yet(self) -> None:
        assert self.run(self.pool.info()).weights.version == 0

    @precondition(lambda self: self.sent is None and any(self.alive))
    @rule(
        seed=st.sampled_from([0, 1, 2]),
        ahead=st.integers(0, 2),
        policy=POLICIES,
        late=st.booleans(),
        order=st.randoms(),
    )
    def begin(self, seed: int, ahead: int, policy: UpdatePolicy, late: bool, order: Any) -> None:
        """``ahead`` = 0: a version that is served already."""
        tensors = self.sets[seed]
        digest = digest_over(tensors)
        update = WeightUpdate(self.version + ahead, "" if late else digest, len(tensors), policy)
        left = list(chunks_of(tensors, CHUNK_BYTES))
        order.shuffle(left)
        queue: asyncio.Queue[UpdatePart | None] = asyncio.Queue()
        task = self.loop.create_task(self.pool.update_weights(update, stream(queue)))
        self.sent = Sent(task, queue, update, seed, left, spoiled=ahead == 0)
        if ahead == 0:
            self.must_fail()

    @precondition(lambda self: self.sent is not None)
    @rule(count=st.integers(1, 40))
    def send(self, count: int) -> None:
        assert self.sent is not None
        for chunk in self.sent.left[:count]:
            self.sent.queue.put_nowait(chunk)
        del self.sent.left[:count]

    @precondition(lambda self: self.sent is not None and len(self.sent.left) > 1)
    @rule(kind=st.sampled_from(["typo", "dtype", "shape", "outside", "twice", "changed", "NaN", "half"]))
    def send_a_bad_chunk(self, kind: str) -> None:
        assert self.sent is not None
        chunk = self.sent.left.pop()
        extra = dataclasses.replace
        bad: list[TensorChunk] = {
            "typo": [extra(chunk, name=chunk.name + "x")],
            "dtype": [extra(chunk, dtype="float16")],
            "shape": [extra(chunk, shape=(*chunk.shape, 1))],
            "outside": [extra(chunk, offset=1 << 30)],
            "twice": [chunk, chunk],
            "changed": [extra(chunk, data=bytes([chunk.data[0] ^ 1]) + chunk.data[1:])],
            "NaN": [extra(chunk, data=b"\0\0\xc0\x7f" + chunk.data[4:])],
            "half": [extra(chunk, data=chunk.data[:-4])],
        }[kind]
        for one in bad:
            self.sent.queue.put_nowait(one)
        self.sent.spoiled = True

    @precondition(lambda self: self.sent is not None)
    @rule(right=st.booleans(), whole=st.booleans())
    def finish(self, right: bool, whole: bool) -> None:
        sent = self.sent
        assert sent is not None
        if whole:
            self.send(len(sent.left))
        if not sent.update.digest:
            sent.queue.put_nowait(UpdateEnd(digest_over(self.sets[sent.seed]) if right else "ab" * 32))
            sent.spoiled |= not right
        sent.queue.put_nowait(None)
        if sent.spoiled or sent.left:
            self.must_fail()
            return
        self.alive = [a and i not in self.dying for i, a in enumerate(self.alive)]
        if any(self.alive):
            state = self.run(sent.task)
            self.version, self.seed, self.sent = sent.update.version, sent.seed, None
            assert (state.version, state.digest) == (self.version, digest_over(self.sets[self.seed]))
        else:
            with pytest.raises(ReplicaUnavailable, match="could be committed on no replica"):
                self.run(sent.task)
            self.sent = None

    @precondition(lambda self: self.sent is not None)
    @rule(turns=st.integers(0, 3))
    def hang_up(self, turns: int) -> None:
        assert self.sent is not None
        for _ in range(turns):
            self.run(asyncio.sleep(0))
        self.sent.task.cancel()
        self.run(ended(self.sent.task))
        assert self.sent.task.cancelled() or self.sent.task.exception() is not None
        self.over()

    @precondition(lambda self: self.sent is not None and any(self.alive))
    @rule(which=st.integers(0, 1), method=st.sampled_from(REFUSING))
    def one_replica_will_refuse(self, which: int, method: str) -> None:
        assert self.sent is not None
        if self.alive[which] and (self.sent.left or method != "stage_chunks"):
            self.replicas[which].refuses = method
            self.sent.spoiled = True

    @precondition(lambda self: self.sent is not None)
    @rule(which=st.integers(0, 1), written=st.integers(0, 5))
    def one_replica_will_break_in_its_commit(self, which: int, written: int) -> None:
        """F9: its k-th tensor cannot be written."""
        thread: Any = self.workers[which]._thread
        original = thread._commit

        def commit() -> Any:
            write, count = thread._stage._written, iter(range(100))

            def failing(name: str, parameter: Any) -> bool:
                if next(count) == written:
                    raise RuntimeError("planted")
                return bool(write(name, parameter))

            thread._stage._written = failing
            return original()

        thread._commit = commit
        self.dying.add(which)

    @precondition(lambda self: any(self.alive))
    @rule()
    def score(self) -> None:
        """Also between two buckets of an update: the old weights go on serving."""
        answers = self.run(scores_of(self.pool))
        assert {a.scores[0].logprobs.tobytes() for a in answers} == {self.scores[self.seed]}
        assert {a.weight_version for a in answers} == {self.version}

    @precondition(lambda self: not any(self.alive))
    @rule()
    def nobody_serves(self) -> None:
        """After the last replica broke in a commit: a typed error, and no bits."""
        with pytest.raises(ReplicaUnavailable):
            self.run(scores_of(self.pool))

    # ---- what must hold -----------------------------------------------------------------------------------------

    def must_fail(self) -> None:
        assert self.sent is not None
        with pytest.raises(RolloutError) as caught:
            self.run(self.sent.task)
        assert not isinstance(caught.value, ReplicaUnavailable)
        self.over()

    def over(self) -> None:
        self.sent = None
        for replica in self.replicas:
            replica.refuses = ""

    @invariant()
    def every_replica_holds_what_the_pool_says(self) -> None:
        info = self.run(self.pool.info())
        assert [r.healthy for r in info.replicas] == self.alive
        expected = digest_over(self.sets[self.seed])
        assert info.weights.version == self.version
        for worker, alive in zip(self.workers, self.alive, strict=True):
            thread = worker._thread
            if alive:
                held = self.run(live_digest(thread))
                assert held == expected == thread.weights.digest == info.weights.digest
                assert thread.weights.version == thread.engine.weight_version == self.version
            else:
                assert thread.broken is not None, "an engine with mixed weights must never step again"

    def teardown(self) -> None:
        if self.sent is not None:
            self.sent.task.cancel()
            self.run(ended(self.sent.task))
        self.run(self.pool.stop())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


async def live_digest(thread: EngineThread) -> str:
    return await asyncio.wrap_future(thread.call(lambda: model_digest(thread.engine.model)))


async def ended(task: asyncio.Task[Any]) -> None:
    await asyncio.gather(task, return_exceptions=True)


async def scores_of(pool: Pool) -> list[ScoreResult]:
    return await asyncio.gather(*(pool.score(ScoreRequest("s", (ScoreSequence(IDS),))) for _ in range(3)))


async def stream(queue: asyncio.Queue[UpdatePart | None]) -> AsyncIterator[UpdatePart]:
    while (part := await queue.get()) is not None:
        yield part


def machine(base: Path) -> type[UpdateMachine]:
    """The machine with its references."""
    paths = {0: base, 1: version_path(base, 1), 2: version_path(base, 2)}
    scores = {seed: training_bits(path, [(IDS[:1], IDS[1:])])[0][0] for seed, path in paths.items()}
    assert len(set(scores.values())) == 3, "control: the weights matter"
    sets = {seed: dict(tensors_of(path)) for seed, path in paths.items()}
    return type("Machine", (UpdateMachine,), {"base": base, "scores": scores, "sets": sets})


def explore(base: Path, examples: int, steps: int, phases: tuple[Phase, ...] = tuple(Phase)) -> None:
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine(base),
        settings=settings(
            max_examples=examples,
            phases=phases,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=quiet,
        ),
    )


def test_no_sequence_of_events_mixes_versions(tiny_qwen3_path: Path) -> None:
    explore(tiny_qwen3_path, 10, 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_sequence_of_many_events_mixes_versions(tiny_qwen3_path: Path) -> None:
    explore(tiny_qwen3_path, 200, 40)


@pytest.mark.parametrize("fault", ["no digest check", "a tensor is forgotten"])
def test_the_machine_sees_a_broken_protocol(tiny_qwen3_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Control: without the last comparison, or with a commit that forgets a tensor, it must find the mixture."""
    if fault == "no digest check":
        verify = WeightStage.verify

        def careless(stage: WeightStage, digest: str = "") -> None:
            for incoming in stage._incoming.values():
                incoming.check_coverage()
            verify(stage, root_digest({name: one.digest() for name, one in stage._incoming.items()}))

        monkeypatch.setattr(WeightStage, "verify", careless)
    else:
        commit = WeightStage.commit

        def forgetful(stage: WeightStage) -> WeightState:
            stage._wanted.popitem()
            return dataclasses.replace(commit(stage), digest=stage.update.digest)

        monkeypatch.setattr(WeightStage, "commit", forgetful)
    # Found is enough: nothing is made of the smallest case.
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        explore(tiny_qwen3_path, 40, 20, (Phase.generate,))
