"""The thread that owns an engine: commands between steps, steps while there is work, events to the outbox."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import torch

from rollout.engine import Engine
from rollout.errors import ReplicaUnavailable, RolloutError, WeightUpdateError
from rollout.events import Event, FailureEvent
from rollout.outbox import Outbox
from rollout.types import TensorChunk, UpdatePolicy, WeightState, WeightUpdate
from rollout.weight_stage import WeightStage

log = logging.getLogger(__name__)
T = TypeVar("T")


def _answer(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Resolve a future that its owner may have cancelled in the meantime (client gone, deadline)."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class EngineThread:
    """Runs an engine. Every public method may be called from any thread and returns a future resolved between steps."""

    def __init__(self, engine: Engine, weights: WeightState, *, threads: int) -> None:
        self.engine = engine
        self.outbox = Outbox()
        self._weights = weights
        self._threads = threads
        self._wake = threading.Condition()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._stopping = False
        self._paused = False
        self._quiesced = False
        self._draining: Future[None] | None = None
        self._stage: WeightStage | None = None
        self._broken: RolloutError | None = None
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="zerodrift-engine", daemon=True)

    def start(self) -> None:
        """Begin to step; call once."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End the thread after the step in progress."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        self.outbox.close()

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run ``command`` between two steps, on the engine's thread."""
        future: Future[T] = Future()
        with self._wake:
            if self._stopping or self._broken is not None:
                future.set_exception(self._broken or ReplicaUnavailable("the worker is shutting down"))
                return future
            self._commands.append((command, future))
            self._wake.notify_all()
        return future

    @property
    def broken(self) -> RolloutError | None:
        """What ended the engine, if something did."""
        return self._broken

    @property
    def busy_s(self) -> float:
        """Seconds that the present turn of commands and one step has taken; 0 while there is nothing to do."""
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def weights(self) -> WeightState:
        """Version and digest being served."""
        return self._weights

    # ---- pausing ------------------------------------------------------------------------------------------------

    def pause(self) -> Future[None]:
        """No step starts after the future resolves, until ``resume``."""
        return self.call(lambda: self._set_paused(True))

    def resume(self) -> Future[None]:
        """Let steps start again; harmless when not paused."""
        return self.call(lambda: self._set_paused(False))

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        if paused and self._draining is not None and self.engine.num_running:
            draining, self._draining = self._draining, None
            _answer(
                draining, error=WeightUpdateError("a pause ended the wait for running samples; resume and update again")
            )

    # ---- weight updates, in phases ------------------------------------------------------------------------------

    def stage(self, update: WeightUpdate) -> None:
        """Phase 1: open a stage beside the weights being served; a half-finished one is dropped."""
        self._stage = WeightStage(self.engine.model, update, self._weights)

    def stage_chunks(self, chunks: list[TensorChunk]) -> None:
        """Fill the stage. Touches nothing that serves, so it runs on the caller's thread, like ``verify_stage``."""
        stage = self._current_stage()
        for chunk in chunks:
            stage.add(chunk)

    def verify_stage(self, digest: str = "") -> None:
        """Phase 2: prove the stage whole and of this root digest; "": that of its head."""
        self._current_stage().verify(digest)

    def quiesce(self, policy: UpdatePolicy) -> Future[None]:
        """Phase 3: apply the policy to requests in flight; resolves once no step will start before ``release``."""
        done: Future[None] = Future()
        self.call(lambda: self._begin_quiesce(policy, done)).add_done_callback(
            lambda f: _answer(done, error=error) if (error := f.exception()) is not None else None
        )
        return done

    def commit(self) -> Future[WeightState]:
        """Phase 4: switch."""
        return self.call(self._commit)

    def release(self) -> Future[None]:
        """End of an update, committed or not: drop the stage, go on."""
        return self.call(self._release)

    def _current_stage(self) -> WeightStage:
        if self._stage is None:
            raise WeightUpdateError("no update is staged")
        return self._stage

    def _begin_quiesce(self, policy: UpdatePolicy, done: Future[None]) -> None:
        if policy is UpdatePolicy.WAIT and self._paused and self.engine.num_running:
            raise WeightUpdateError(
                f"policy wait needs {self.engine.num_running} running samples to finish, but the service is paused; "
                "resume it, or use abort or recompute",
                field="begin.policy",
            )
        self.engine.scheduler.hold_admission = True
        if policy is UpdatePolicy.ABORT:
            running = [s.sample_id for s in self.engine.scheduler.in_flight if s.request is not None]
            self.outbox.put([self.engine.abort(i, "weight update") for i in running])
        if policy is UpdatePolicy.WAIT:
            self._draining = done
            return
        # Scored sequences that still run are scored again, whole, under the new weights.
        self._quiesced = True
        _answer(done)

    def _commit(self) -> WeightState:
        if not self._quiesced:
            raise WeightUpdateError("commit before the engine was quiesced")
        stage = self._current_stage()
        try:
            weights = stage.commit()
            self.engine.weights_changed(weights.version)
        except WeightUpdateError:
            raise  # refused before anything was written
        except Exception as error:
            # Some tensors may be new and some old: this engine must never step again, whoever asks.
            failure = ReplicaUnavailable(f"worker {self.engine.name} failed in the middle of a commit")
            with self._wake:
                self._broken = failure
            raise failure from error
        self._weights = weights
        return weights

    def _release(self) -> None:
        self._stage = None
        self._quiesced = False
        self.engine.scheduler.hold_admission = False
        draining, self._draining = self._draining, None
        if draining is not None:
            _answer(draining, error=WeightUpdateError("the update was withdrawn while samples were finishing"))

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        with self.engine.model.kernels.invariant_mode():
            while self._wait_for_work():
                try:
                    self._run_commands()
                    if self._broken is not None:
                        raise self._broken
                    if not self._paused and not self._quiesced:
                        self.outbox.put(self.engine.step())
                    self._finish_drain()
                except Exception as error:  # the engine's state can no longer be trusted: fence it, answer everyone
                    log.exception("engine step failed")
                    self._break(error)
                    return
        self._end(ReplicaUnavailable("the worker is shutting down"))

    def _has_steps(self) -> bool:
        busy = bool(self.engine.num_running) or (
            bool(self.engine.num_waiting) and not self.engine.scheduler.hold_admission
        )
        return busy and not self._paused and not self._quiesced

    def _wait_for_work(self) -> bool:
        self._turn_began = None
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._commands or self._has_steps())
            self._turn_began = time.monotonic()
            return not self._stopping

    def _run_commands(self) -> None:
        while True:
            with self._wake:
                if not self._commands or self._broken is not None:
                    return
                command, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                _answer(future, command())
            except Exception as error:
                _answer(future, error=error)

    def _finish_drain(self) -> None:
        if self._draining is not None and self.engine.num_running == 0:
            self._quiesced = True
            draining, self._draining = self._draining, None
            _answer(draining)

    def _break(self, error: Exception) -> None:
        reason = error if isinstance(error, RolloutError) else ReplicaUnavailable(f"worker {self.engine.name} failed")
        with self._wake:
            self._broken = reason
        self._end(reason)

    def _end(self, reason: RolloutError) -> None:
        """Nobody waits for ever: commands, a drain in progress and every live sequence get an answer."""
        self._turn_began = None
        failures: list[Event] = [FailureEvent(sample_id, reason) for sample_id in self.engine.live_ids]
        self._refuse_commands(reason)
        if self._draining is not None:
            _answer(self._draining, error=reason)
        self.outbox.put(failures)

    def _refuse_commands(self, reason: RolloutError) -> None:
        with self._wake:
            commands, self._commands = list(self._commands), deque()
        for _, future in commands:
            _answer(future, error=reason)
