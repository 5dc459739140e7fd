"""``make bench-weights``: a whole weight set to two replicas, beside a plain copy of the same bytes over loopback.

Three processes besides the replicas: the service, a trainer that sends, and a sink for the plain copy. Rounds take
turns, so that whatever else the machine does meets both alike. An update's time is the trainer's: from the call to its
answer, when every replica has hashed, checked and committed the set and repacked it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.machine import session
from rollout.assets import DEFAULT_MODEL, prepare_model
from rollout.config import Settings
from rollout.serving import Service, running_service
from rollout.weights import tensor_bytes

SOURCES = ("stream", "ray", "folder")
COPIES = {"copy": 1, "copies": 2}
"""what -> plain copies, one after the other: to one receiver, and to as many as there are replicas"""
TARGET = 0.5
"""of the speed of one plain copy, over gRPC"""
_PIECE = 4 << 20
Tensors = dict[str, torch.Tensor]


def sink(ports: Connection) -> None:
    """Take connections one after another: a length, that many bytes into memory of its own, one byte back."""
    memory = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports.send(server.getsockname()[1])
        while True:
            with server.accept()[0] as peer:
                size = int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little")
                memory = memory if len(memory) == size else bytearray(size)
                view, at = memoryview(memory), 0
                while at < size:
                    at += peer.recv_into(view[at : at + _PIECE])
                peer.sendall(b"k")


def plain_copy(tensors: Tensors, port: int) -> None:
    """The same bytes over loopback, and nothing else."""
    parts = [tensor_bytes(tensor) for tensor in tensors.values()]
    with socket.create_connection(("127.0.0.1", port)) as peer:
        peer.sendall(sum(len(part) for part in parts).to_bytes(8, "little"))
        for part in parts:
            peer.sendall(part)
        peer.recv(1)


def other(tensors: Tensors) -> Tensors:
    """A set of the same shapes whose every tensor differs."""
    return {name: tensor * 1.01 for name, tensor in tensors.items()}


class Trainer:
    """The sender's side, in a process of its own."""

    def __init__(self, path: Path, address: str, cluster: str, root: Path, port: int) -> None:
        from trainer_bridge.client import RolloutClient
        from trainer_bridge.ray_weights import RayWeights

        torch.set_num_threads(1)
        first: Tensors = load_file(path / "model.safetensors")
        self._sets = [first, other(first)]
        for i, tensors in enumerate(self._sets):
            (root / str(i)).mkdir(parents=True)
            save_file(tensors, root / str(i) / "model.safetensors")
        self._root, self._port = root, port
        self._client = RolloutClient(address, timeout_s=600)
        ray.init(address=cluster, namespace="zerodrift-bench", log_to_driver=False, logging_level=logging.ERROR)
        self._ray = RayWeights(self._client)
        self._version = 0

    @property
    def size(self) -> int:
        """Bytes of a set."""
        return sum(t.numel() * t.element_size() for t in self._sets[0].values())

    def timed(self, what: str) -> float:
        """Seconds of one copy or update."""
        start = time.perf_counter()
        if what in COPIES:
            for _ in range(COPIES[what]):
                plain_copy(self._sets[0], self._port)
            return time.perf_counter() - start
        self._version += 1
        tensors = self._sets[self._version % 2]
        if what == "stream":
            self._client.update_weights(tensors.items(), version=self._version)
        elif what == "ray":
            self._ray.push(tensors.items(), version=self._version)
        else:
            self._client.update_from_folder(str(self._version % 2), root=self._root, version=self._version)
        return time.perf_counter() - start


def trainer_process(orders: Connection, path: Path, address: str, cluster: str, root: Path, port: int) -> None:
    """Answer each order with its seconds; the first message is the size of a set."""
    trainer = Trainer(path, address, cluster, root, port)
    orders.send(trainer.size)
    while (what := orders.recv()) is not None:
        orders.send(trainer.timed(what))


@asynccontextmanager
async def cast(path: Path, service: Service, root: Path) -> AsyncIterator[Connection]:
    """Sink and trainer, started and ended; the value takes orders."""
    spawn = multiprocessing.get_context("spawn")
    ports, theirs = spawn.Pipe()
    orders, ends = spawn.Pipe()
    receiver = spawn.Process(target=sink, args=(theirs,), daemon=True)
    receiver.start()
    port = await asyncio.to_thread(ports.recv)
    cluster = ray.get_runtime_context().gcs_address
    sender = spawn.Process(target=trainer_process, args=(ends, path, service.address, cluster, root, port), daemon=True)
    sender.start()
    try:
        yield orders
    finally:
        orders.send(None)
        await asyncio.to_thread(sender.join, 30)
        receiver.terminate()


async def measure(path: Path, root: Path, rounds: int, threads: int, sources: list[str]) -> dict[str, Any]:
    """Seconds of each round."""
    settings = Settings.model_validate(
        {
            "model": {"path": str(path)},
            "engine": {"threads": threads, "kv_cache_tokens": 4096},
            "worker": {"count": 2, "num_cpus": 1},
            "server": {"port": 0},
            "ray": {"num_cpus": 2},
            "weights": {"root": str(root)},
        }
    )
    taken: dict[str, list[float]] = {what: [] for what in (*COPIES, *sources)}
    async with running_service(settings) as service, cast(path, service, root) as orders:
        size = await asyncio.to_thread(orders.recv)
        for number in range(rounds + 1):
            for what, seconds in taken.items():
                orders.send(what)
                one = await asyncio.to_thread(orders.recv)
                # The first round fills pools and page tables.
                seconds += [one] if number else []
    return {"bytes": size, "seconds": taken}


def report(found: dict[str, Any], console: Console) -> float:
    """The table; returns the stream's share of one plain copy's speed, median of paired rounds."""
    size, taken = found["bytes"], found["seconds"]
    table = Table(title=f"{size / 1e6:.0f} MB to 2 replicas", title_justify="left")
    for name in ("", "seconds, median", "range", "GB/s", "of one copy's speed", "of two copies'"):
        table.add_column(name, justify="right" if name else "left")
    shares: dict[str, float] = {}
    of_two: dict[str, float] = {}
    for what, seconds in taken.items():
        middle = statistics.median(seconds)
        shown = f"{middle:.3f}", f"{min(seconds):.3f}-{max(seconds):.3f}", f"{size / middle / 1e9:.2f}"
        if what in COPIES:
            table.add_row(f"plain copy over loopback, {('once', 'twice')[COPIES[what] - 1]}", *shown, "", "")
            continue
        shares[what], words = share(taken["copy"], seconds)
        of_two[what], words_of_two = share(taken["copies"], seconds)
        table.add_row(f"update, {what}", *shown, words, words_of_two)
    console.print(table)
    found["shares"], found["shares_of_two"] = shares, of_two
    return shares.get("stream", 1.0)


def share(copies: list[float], seconds: list[float]) -> tuple[float, str]:
    """Median of paired rounds' shares, and in words with the range."""
    paired = [copy / one for copy, one in zip(copies, seconds, strict=True)]
    middle = statistics.median(paired)
    return middle, f"{middle:.0%} ({min(paired):.0%}-{max(paired):.0%})"


def main() -> None:
    """Measure, print, keep; exit 1 below the target."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_update", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name or folder with one model.safetensors")
    parser.add_argument("--rounds", type=int, default=7, help="after one to warm up")
    parser.add_argument("--threads", type=int, default=1, help="of each replica's engine")
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--out", type=Path, default=Path("out/weights/update.json"))
    args = parser.parse_args()
    path = prepare_model(args.model)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    root = args.out.parent / f"weights-{os.getpid()}"
    try:
        found = asyncio.run(measure(path, root.absolute(), args.rounds, args.threads, args.sources))
    finally:
        for file in root.rglob("*.safetensors"):
            file.unlink()
        for folder in (*root.glob("*"), root):
            if folder.is_dir():
                folder.rmdir()
    share = report(found, Console())
    args.out.write_text(json.dumps({"session": session(args.threads), **found}, indent=1) + "\n", encoding="utf-8")
    if share < TARGET:
        sys.exit(f"over gRPC {share:.0%} of the plain copy's speed, below {TARGET:.0%}")


if __name__ == "__main__":
    main()
