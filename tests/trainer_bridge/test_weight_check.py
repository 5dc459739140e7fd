"""``zerodrift weights``: every replica's live bytes against a folder, a trainer, or each other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rollout import cli
from rollout.errors import InvalidRequest
from rollout.weights import digest_of
from tests.services import engine_threads, soon, tensors_of, tiny_service, version_path
from trainer_bridge.cli_weights import read_digests
from trainer_bridge.weight_check import folder_digests, verify_replicas

NAME = "model.layers.1.mlp.down_proj.weight"


async def zerodrift(*args: str) -> tuple[int, str]:
    """The command line, on a thread of its own since the service runs in this one."""
    from trainer_bridge.cli_weights import weights_app

    result = await soon(asyncio.to_thread(CliRunner().invoke, weights_app, list(args)))
    return result.exit_code, result.output


async def flip(thread: Any, name: str) -> None:
    """One bit of a live tensor, as a stray write would."""

    def turn() -> None:
        dict(thread.engine.model.parameters())[name].detach().view(-1).view(torch.uint8)[5] ^= 1

    await asyncio.wrap_future(thread.call(turn))


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[Any, Any]]:
    async with tiny_service(path, replicas=2) as pair:
        yield pair


async def test_verify_names_the_first_tensor_that_differs(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    ours = {name: digest_of(name, tensor).hex() for name, tensor in tensors_of(tiny_qwen3_path)}
    (tmp_path / "ours.json").write_text(json.dumps(ours))
    folder = ("--folder", str(tiny_qwen3_path))
    digests = ("--digests", str(tmp_path / "ours.json"))
    async with served(tiny_qwen3_path) as (service, _):
        at = ("verify", "--address", service.address)
        for against in ((), folder, digests):
            code, shown = await zerodrift(*at, *against)
            assert (code, shown.count(": holds\n")) == (0, 2), shown
        await flip(engine_threads(service)[1], NAME)
        for against in ((), folder, digests):
            code, shown = await zerodrift(*at, *against, "--json", str(tmp_path / "out.json"))
            assert code == 1
            first, second = shown.splitlines()
            assert first.endswith(": holds")
            assert f"1 tensors differ, first '{NAME}'" in second
            assert "its live tensors are not what it says it serves" in second
            told = json.loads((tmp_path / "out.json").read_text())
            assert (told["replica-0"]["holds"], told["replica-1"]["differing"]) == (True, [NAME])
        await flip(engine_threads(service)[1], NAME)
        assert (await zerodrift(*at, *folder))[0] == 0, "control: turned back"


async def test_after_an_update_the_folder_is_the_old_one(tiny_qwen3_path: Path) -> None:
    new = version_path(tiny_qwen3_path, 1)
    async with served(tiny_qwen3_path) as (service, client):
        await client.update_weights(tensors_of(new), version=7)
        code, shown = await zerodrift("verify", "--address", service.address, "--folder", str(tiny_qwen3_path))
        assert code == 1 and "version 7" in shown and "tensors differ, first 'model.embed_tokens.weight'" in shown
        assert (await zerodrift("verify", "--address", service.address, "--folder", str(new)))[0] == 0


async def test_missing_and_extra_tensors(tiny_qwen3_path: Path) -> None:
    async with served(tiny_qwen3_path) as (_, client):
        info = await client.info(tensor_digests=True)
    wanted = dict(info.tensor_digests)
    digest = wanted.pop(NAME)
    (verdict, _) = verify_replicas(info, wanted | {"model.other": digest})
    assert (verdict.missing, verdict.extra, verdict.differing) == (("model.other",), (NAME,), ())
    assert not verdict.holds and verdict.first == NAME
    with pytest.raises(InvalidRequest, match="no replica sent its digests"):
        verify_replicas(replace(info, replica_digests=()), None)


def test_a_folder_is_cast_as_the_service_casts_it(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    stored = load_file(tiny_qwen3_path / "model.safetensors")
    assert stored[NAME].dtype == torch.float32
    found = folder_digests(tiny_qwen3_path, torch.bfloat16, tied=True)
    assert found[NAME] == digest_of(NAME, stored[NAME].bfloat16()).hex() != digest_of(NAME, stored[NAME]).hex()
    head = stored["model.embed_tokens.weight"]
    for name, extra in (("same", head.clone()), ("other", head + 1)):
        (tmp_path / name).mkdir()
        save_file(stored | {"lm_head.weight": extra}, tmp_path / name / "model.safetensors")
    assert folder_digests(tmp_path / "same", torch.float32, tied=True).keys() == found.keys()
    assert "lm_head.weight" in folder_digests(tmp_path / "other", torch.float32, tied=True)
    assert "lm_head.weight" in folder_digests(tmp_path / "same", torch.float32, tied=False)


async def test_digest_of_a_folder(tiny_qwen3_path: Path, tmp_path: Path) -> None:
    code, shown = await zerodrift("digest", str(tiny_qwen3_path), "--json", str(tmp_path / "d.json"))
    assert code == 0 and shown.split()[1:] == [str(len(read_digests(tmp_path / "d.json"))), "tensors"]
    assert (
        read_digests(tmp_path / "d.json")[NAME]
        == {n: digest_of(n, t).hex() for n, t in tensors_of(tiny_qwen3_path)}[NAME]
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"a": 3}', '{"a": "zz"}', '{"a": "ab"}'])
def test_files_that_hold_no_digests(tmp_path: Path, text: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(InvalidRequest, match="holds no digests"):
        read_digests(tmp_path / "d.json")


def test_the_verb_is_there() -> None:
    from trainer_bridge.cli import register

    if not any(group.name == "weights" for group in cli.app.registered_groups):
        register(cli.app)
    shown = CliRunner().invoke(cli.app, ["weights", "--help"]).output
    assert "verify" in shown and "digest" in shown
