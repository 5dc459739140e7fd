"""Read a checkpoint folder whole or not at all: every parameter from the files, every tensor of the files used.

transformers draws a tensor that the files lack at random, differently in every process, and leaves out one that it
does not know; both with a warning only. Here either is an error, as in a weight update (C4).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rollout.errors import ConfigError, NotFound, RolloutError
from rollout.strict_json import strict_loads

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_NAMED = 5
"""How many tensors a message names."""


def read_config(folder: Path) -> PretrainedConfig:
    """The folder's config.json.

    Raises:
        NotFound: there is none. ConfigError: it cannot be read, or says one thing twice.
    """
    file = folder / "config.json"
    if not file.exists():
        raise NotFound(f"{folder} has no config.json; give a Hugging Face checkpoint folder or a known model name")
    with _typed(f"{file} cannot be read"):
        fields = strict_loads(file.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ConfigError(f"{file} holds a {type(fields).__name__}, must be a JSON object", field="model.path")
        _check_one_theta(fields, file)
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
        _check_numbers(config.get_text_config(), file)
        return config


def _check_numbers(config: PretrainedConfig, file: Path) -> None:
    """What makes every log-prob NaN, or leaves no room for a token, says so here and not at the first request."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = {
        "rms_norm_eps": (getattr(config, "rms_norm_eps", None), 0.0, True),
        "rope_theta": (rope.get("rope_theta", getattr(config, "rope_theta", None)), 0.0, False),
        "rope factor": (rope.get("factor"), 0.0, False),
        "max_position_embeddings": (getattr(config, "max_position_embeddings", None), 1.0, True),
    }
    for name, (value, least, itself) in found.items():
        if value is not None and not (least < float(value) < math.inf or (itself and value == least)):
            raise ConfigError(
                f"{file} has {name} = {value}, must be {'at least' if itself else 'above'} {least:g} and finite",
                field="model.path",
            )


def _check_one_theta(fields: dict[str, Any], file: Path) -> None:
    """Engines disagree on which of the two holds: transformers takes the inner one, others the outer."""
    outer = fields.get("rope_theta")
    inner = (fields.get("rope_parameters") or {}).get("rope_theta")
    if outer is not None and inner is not None and float(outer) != float(inner):
        raise ConfigError(
            f"{file} has rope_theta = {outer} and rope_parameters.rope_theta = {inner}; which one was trained with is "
            "not said: remove the wrong one",
            field="model.path",
        )


def eos_token_ids(configs: Collection[PretrainedConfig], folder: Path, vocab_size: int) -> tuple[int, ...]:
    """EOS ids of config.json and generation_config.json; no sampling default is ever read from the latter.

    Raises:
        ConfigError: an id that the model cannot sample, so that nothing would ever stop, or an unreadable file.
    """
    found: list[int] = []
    sources: list[Any] = [getattr(config, "eos_token_id", None) for config in configs]
    file = folder / "generation_config.json"
    if file.exists():
        with _typed(f"{file} cannot be read"):
            sources.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    for ids in sources:
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    for token in found:
        if not 0 <= int(token) < vocab_size:
            raise ConfigError(
                f"eos_token_id {token} of {folder} is outside [0, {vocab_size - 1}]: it can never be sampled; correct "
                "config.json and generation_config.json, or remove it there and use stop_token_ids",
                field="model.path",
            )
    return tuple(dict.fromkeys(int(i) for i in found))


def load_checkpoint(loader: Any, folder: Path, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The folder's weights in a model of its architecture, cast once to ``dtype``.

    Args:
        loader: an ``AutoModel`` class. attention: name of a registered attention.

    Raises:
        ConfigError: unreadable or ambiguous files, tensors that are missing, too many, or of another shape.
    """
    if (folder / SINGLE_FILE).exists() and (folder / INDEX_FILE).exists():
        raise ConfigError(
            f"{folder} has {SINGLE_FILE} and {INDEX_FILE}, two sets of weights; remove the one that is not meant",
            field="model.path",
        )
    with _typed(f"the weights of {folder} cannot be loaded"), _quiet_loading():
        hf, report = loader.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    _check_whole(folder, report)
    _check_tied(folder, hf)
    loaded: PreTrainedModel = hf
    return loaded


def _check_whole(folder: Path, report: dict[str, Any]) -> None:
    faults = []
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, wanted = wrong[0]
        faults.append(f"{name} has shape {list(stored)}, config.json asks for {list(wanted)} ({len(wrong)} such)")
    if missing := sorted(report["missing_keys"]):
        faults.append(f"{len(missing)} parameters are in no file: {_some(missing)}")
    # Old transformers saved this constant of the rotary embedding; it is computed from config.json.
    if unused := sorted(name for name in report["unexpected_keys"] if not name.endswith("rotary_emb.inv_freq")):
        faults.append(f"{len(unused)} tensors have no place in the model: {_some(unused)}")
    if faults:
        raise ConfigError(
            f"the weights of {folder} are not those of its config.json: {'; '.join(faults)}. Save the checkpoint again "
            "whole, or correct config.json",
            field="model.path",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _check_tied(folder: Path, hf: Any) -> None:
    # With a stored head of its own transformers leaves a head untied, whatever the config says.
    tied = hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    if hf.config.tie_word_embeddings and not tied:
        raise ConfigError(
            f"config.json of {folder} ties lm_head to the embedding, its files hold another lm_head; set "
            "tie_word_embeddings to false, or remove lm_head.weight",
            field="model.path",
        )


@contextlib.contextmanager
def _typed(what: str) -> Iterator[None]:
    """What transformers, safetensors and json raise on a bad folder, as one kind of error that names the folder."""
    try:
        yield
    except (RolloutError, MemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        raise ConfigError(f"{what} ({type(error).__name__}: {said})", field="model.path") from error


@contextlib.contextmanager
def _quiet_loading() -> Iterator[None]:
    """No progress bar and no report of transformers: the one tears the caller's output, the other is checked here."""
    shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()
