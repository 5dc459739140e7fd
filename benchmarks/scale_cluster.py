"""A cluster of replicas, one RL step long, by discrete events (simpy). What the figures mean: docs/scale.md.

A replica changes state when a sample ends, a replica dies, or work arrives from a dead one; all samples of a step are
known at its start. Between two changes every running sample advances one token each engine step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simpy

Policy = Literal["round robin", "least loaded", "hashed prompts", "hashed, bounded", "groups, least loaded"]
POLICIES: tuple[Policy, ...] = (
    "round robin",
    "least loaded",
    "hashed prompts",
    "hashed, bounded",
    "groups, least loaded",
)
OURS: Policy = "groups, least loaded"  # rollout.router: a request's samples go to the least loaded replica


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a step costs. docs/scale.md says where each figure comes from."""

    step_base_s: float = 0.018
    step_row_s: float = 0.00008
    """more for each further running sample"""
    prefill_s_per_token: float = 0.00004
    max_running: int = 64
    """samples a replica computes at a time"""
    prompts_per_replica: int = 16
    group: int = 8
    """samples of a prompt"""
    prompt_tokens: int = 1024
    length_median: float = 900.0
    length_sigma: float = 0.9
    """of the logarithm: a long tail"""
    length_limit: int = 8192
    slow_share: float = 0.01
    """replicas that are stragglers"""
    slow_factor: float = 1.5
    deaths_per_npu_hour: float = 1 / 2000
    restart_s: float = 90.0
    load_bound: float = 1.1
    """hashed, bounded: leave a replica that holds this many times the mean"""
    weights_bytes: float = 16e9
    link_bytes_s: float = 12.5e9
    """of one host, one direction"""
    chunk_bytes: float = 64e6
    relay_chunks_s: float = 6_700.0
    """messages a second that one server process relays, whatever they hold"""
    chunk_tokens: int = 16
    """tokens of one sample in a message"""


@dataclass(slots=True, eq=False)
class Sample:
    """One sample on its way."""

    prompt: int
    length: int
    done: int = 0
    """tokens already delivered; a replay computes them again but delivers none twice"""
    replays: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated step."""

    makespan_s: float
    """until the last sample is answered"""
    most_s: float
    """until 95 % of the samples are answered"""
    tokens: int
    busy: float
    """mean share of replicas that computed something"""
    tail: float
    """share of the makespan during which fewer than half of the replicas were busy"""
    hits: float
    """share of prompts whose KV was found on the replica"""
    deaths: int
    replayed: float
    """share of tokens that were computed twice"""

    @property
    def tokens_s(self) -> float:
        """Useful tokens a second, all replicas."""
        return self.tokens / self.makespan_s


class Replica:
    """One engine: a queue, a batch, and a process that advances both."""

    def __init__(self, cluster: Cluster, name: int, slow: float) -> None:
        self.cluster, self.name, self.slow = cluster, name, slow
        self.queue: deque[Sample] = deque()
        self.load = 0.0
        """tokens promised"""
        self.running: list[tuple[int, int, Sample]] = []
        """heap of (token clock at its end, order, sample)"""
        self.clock = 0
        """tokens that each running sample has advanced since the start"""
        self.cached: set[int] = set()
        self.alive = True
        self.busy_s = 0.0
        self.process = cluster.env.process(self.run())

    def run(self) -> Generator[Any, Any, None]:
        """Advance to the next end, again and again; an interrupt means new work or death."""
        env, p = self.cluster.env, self.cluster.parameters
        order = 0
        while True:
            prefill = 0.0
            while self.queue and len(self.running) < p.max_running:
                sample = self.queue.popleft()
                hit = sample.prompt in self.cached
                self.cluster.count_prompt(hit)
                prefill += 0.0 if hit else p.prompt_tokens * p.prefill_s_per_token
                self.cached.add(sample.prompt)
                order += 1
                heapq.heappush(self.running, (self.clock + sample.length, order, sample))
            if not self.running:
                # Idle: only an interrupt ends this.
                try:
                    yield env.event()
                except simpy.Interrupt as interrupt:
                    if interrupt.cause == "death":
                        self.lose()
                        yield from self.restart()
                continue
            steps = self.running[0][0] - self.clock
            each = (p.step_base_s + p.step_row_s * (len(self.running) - 1)) * self.slow
            start = env.now
            self.cluster.busy(1)
            try:
                yield env.timeout(prefill + steps * each)
            except simpy.Interrupt as interrupt:
                advanced = min(steps - 1, int(max(0.0, env.now - start - prefill) / each))
                self.clock += advanced
                self._left(start)
                if interrupt.cause == "death":
                    self.lose()
                    yield from self.restart()
                continue
            self.clock += steps
            self._left(start)
            while self.running and self.running[0][0] <= self.clock:
                sample = heapq.heappop(self.running)[2]
                self.load -= self.cluster.expected
                self.cluster.finished(sample)

    def _left(self, start: float) -> None:
        self.cluster.busy(-1)
        self.busy_s += self.cluster.env.now - start

    def lose(self) -> None:
        """Die: everything held is replayed elsewhere, with the same tokens (C2)."""
        self.alive = False
        lost = [*(s for _, _, s in self.running), *self.queue]
        for end, _, sample in self.running:
            self.cluster.replayed += sample.length - (end - self.clock)
            sample.replays += 1
        self.running, self.load, self.cached = [], 0.0, set()
        self.queue.clear()
        for sample in lost:
            self.cluster.place(sample)

    def restart(self) -> Generator[Any, Any, None]:
        """Load the model and the weights again."""
        yield self.cluster.env.timeout(self.cluster.parameters.restart_s)
        self.alive = True
        self.cluster.rejoined(self)


class Cluster:
    """All replicas of one step."""

    def __init__(self, size: int, policy: Policy, parameters: Parameters, seed: int, *, deaths: bool = True) -> None:
        self.parameters, self.policy = parameters, policy
        self.env = simpy.Environment()
        self.rng = np.random.default_rng(seed)
        self.hits = self.prompts = self.left = self.tokens = self.deaths = 0
        self.replayed = self.most_s = self.expected = 0.0
        self.total = 0
        self._homes: dict[int, Replica] = {}
        self._busy, self._since, self._tail_s, self._turn = 0, 0.0, 0.0, 0
        self.done = self.env.event()
        slow = self.rng.random(size) < parameters.slow_share
        self.replicas = [Replica(self, i, parameters.slow_factor if s else 1.0) for i, s in enumerate(slow)]
        self._loads = [(0.0, i) for i in range(size)]
        if deaths:
            self.env.process(self._die())

    def busy(self, change: int) -> None:
        """Note that a replica begins or ends to compute."""
        if self._busy * 2 < len(self.replicas):
            self._tail_s += self.env.now - self._since
        self._since = self.env.now
        self._busy += change

    def count_prompt(self, hit: bool) -> None:
        """Note a prompt that was, or was not, found."""
        self.prompts += 1
        self.hits += hit

    def finished(self, sample: Sample) -> None:
        """Note an answer."""
        self.tokens += sample.length
        self.left -= 1
        if self.left == self.total // 20:
            self.most_s = self.env.now
        if self.left == 0:
            self.done.succeed()

    # ---- routing ------------------------------------------------------------------------------------------------

    def place(self, sample: Sample) -> None:
        """Queue a sample by the policy."""
        replica = self._choose(sample)
        replica.queue.append(sample)
        # Nobody knows how long a sample will be; placing counts the mean for each.
        replica.load += self.expected
        heapq.heappush(self._loads, (replica.load, replica.name))
        if replica.process.is_alive and self.env.active_process is not replica.process and self.env.now > 0:
            replica.process.interrupt("work")

    def _choose(self, sample: Sample) -> Replica:
        if self.policy == "round robin":
            return self._next()
        if self.policy == "least loaded":
            return self._least()
        if self.policy == OURS:
            home = self._homes.get(sample.prompt)
            if home is None or not home.alive:
                home = self._homes[sample.prompt] = self._least()
            return home
        home = self.replicas[hash((sample.prompt, 0x9E3779B9)) % len(self.replicas)]
        if not home.alive:
            return self._least()
        if self.policy == "hashed prompts":
            return home
        mean = sum(r.load for r in self.replicas) / len(self.replicas) if self.env.now > 0 else self._mean
        over = home.load + self.expected > self.parameters.load_bound * max(mean, self.expected)
        return self._least() if over else home

    def rejoined(self, replica: Replica) -> None:
        """A replica takes work again."""
        heapq.heappush(self._loads, (replica.load, replica.name))

    def _next(self) -> Replica:
        while True:
            self._turn += 1
            replica = self.replicas[self._turn % len(self.replicas)]
            if replica.alive:
                return replica

    def _least(self) -> Replica:
        """A heap whose entries may be out of date: those are dropped or renewed when met."""
        while True:
            load, i = heapq.heappop(self._loads)
            replica = self.replicas[i]
            if replica.alive and load == replica.load:
                return replica
            if replica.alive:
                heapq.heappush(self._loads, (replica.load, i))

    # ---- a step -------------------------------------------------------------------------------------------------

    def _die(self) -> Generator[Any, Any, None]:
        rate = self.parameters.deaths_per_npu_hour * len(self.replicas) / 3600.0
        while True:
            yield self.env.timeout(self.rng.exponential(1.0 / rate))
            alive = [r for r in self.replicas if r.alive]
            if len(alive) > 1:
                self.deaths += 1
                alive[self.rng.integers(len(alive))].process.interrupt("death")

    def run(self) -> Outcome:
        """Simulate one step."""
        p = self.parameters
        prompts = p.prompts_per_replica * len(self.replicas)
        # A prompt's samples resemble each other in length, so a hard prompt is hard for its whole group.
        hard = self.rng.normal(0.0, p.length_sigma * 0.7, prompts)
        own = self.rng.normal(0.0, p.length_sigma * 0.7, (prompts, p.group))
        lengths = np.clip(p.length_median * np.exp(hard[:, None] + own), 1, p.length_limit).astype(int)
        self.expected = float(lengths.mean())
        self._mean = self.expected * lengths.size / len(self.replicas)
        self.left = self.total = lengths.size
        for prompt in range(prompts):
            for length in lengths[prompt].tolist():
                self.place(Sample(prompt, length))
        self.env.run(until=self.done)
        self.busy(0)
        end = self.env.now
        share = sum(r.busy_s for r in self.replicas) / (end * len(self.replicas))
        return Outcome(
            end, self.most_s, self.tokens, share, self._tail_s / end, self.hits / self.prompts, self.deaths,
            self.replayed / self.tokens,
        )  # fmt: skip
