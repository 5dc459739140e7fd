"""Drain and restart over gRPC and from the command line."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from rollout import cli
from rollout.v1 import control_pb2 as pb
from rollout.v1 import control_pb2_grpc
from tests.services import PROMPT, StepGate, bits, engine_threads, sampling, soon, tiny_service
from trainer_bridge.cli_replicas import register

if not any(group.name == "replicas" for group in cli.app.registered_groups):
    register(cli.app)


async def run_cli(*arguments: str) -> Any:
    """The command beside the service that it calls."""
    return await soon(asyncio.to_thread(CliRunner().invoke, cli.app, ["replicas", *arguments]))


async def test_drain_over_the_wire(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, client):
        calm = bits(await client.generate(PROMPT, sampling()))
        first, _ = engine_threads(service)
        at = ("--address", service.address)
        async with StepGate(first, 4) as gate:
            asked = asyncio.ensure_future(client.generate(PROMPT, sampling()))
            await gate.reached()
            said = await run_cli("drain", "replica-0", "--within", "0", *at)
            assert (
                said.exit_code == 1 and "replica-0  holds 1  restarts 0  out of rotation: it is drained" in said.output
            )
            other = await client.generate(PROMPT, sampling())
            assert bits(other) == calm and other.samples[0].replica == "replica-1"
        assert bits(await soon(asked)) == calm
        assert (await run_cli("drain", "replica-0", *at)).exit_code == 0
        assert "serving" in (await run_cli("undrain", "replica-0", *at)).output
        listed = (await run_cli("list", *at)).stdout.splitlines()
        assert listed == [f"replica-{i}  holds 0  restarts 0  serving" for i in range(2)]


async def test_what_cannot_be_done_says_why(tiny_qwen3_path: Path) -> None:
    async with tiny_service(tiny_qwen3_path, replicas=2) as (service, _):
        at = ("--address", service.address)
        said = await run_cli("drain", "replica-9", *at)
        assert said.exit_code == 1 and "NOT_FOUND" in str(said.exception) and "replica-1" in str(said.exception)
        # In this process there is nothing to start again.
        assert "worker.max_restarts" in str((await run_cli("restart", *at)).exception)
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            for within in (-1.0, math.nan, math.inf, 1e9):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.DrainReplica(pb.DrainReplicaRequest(name="replica-0", within_s=within))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
