"""A veRL run in the record: every step that veRL scores is compared and written for the dashboard.

veRL's trainer hands each batch that carries ``rollout_log_probs`` to ``calculate_debug_metrics``, in its own process,
as soon as ``old_log_probs`` stand beside them. ``install`` puts a listener in front of that function; what veRL
computes is not touched. ``ZERODRIFT_RECORD`` names the runs folder, ``ZERODRIFT_RECORD_RUN`` the run,
``ZERODRIFT_RECORD_MODEL`` a checkpoint whose tokenizer gives the tokens' text, and ``ZERODRIFT_RECORD_KEEP`` the share
of equal samples that are kept.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.errors import ConfigError, InvalidRequest
from trainer_bridge.batches import DETAILS, column, samples_from_arrays, samples_from_dataproto
from trainer_bridge.compare import compare

if TYPE_CHECKING:
    from trainer_bridge.records import ScoredSample
    from trainer_bridge.store.recorder import Recorder, RecordOptions
    from trainer_bridge.store.tables import Decode

VARIABLE = "ZERODRIFT_RECORD"
_MARK = "_zerodrift_records"
_REWARDS = ("token_level_scores", "rm_scores")
log = logging.getLogger(__name__)
Metrics = Callable[[Any], dict[str, Any]]


class BatchListener:
    """Records the batches of one trainer process, in the order they come."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last = 0

    def __call__(self, data: Any) -> None:
        """Compare and hand over one batch. Nothing is raised: a record may fail, training may not."""
        from trainer_bridge.store.facts import StepFacts

        try:
            samples = samples_of(data)
            self._last = step_of(data, self._last)
            versions = [span.version for sample in samples for span in sample.spans]
            rewards = rewards_of(data)
            step = StepFacts(self._last, max(versions, default=None), rewards=tuple(rewards.values()))
            self._recorder.record(step, samples, compare(samples), facts_of(data, len(samples), rewards))
        except Exception:
            log.exception("a batch after step %d is not recorded; training goes on", self._last)


def samples_of(data: Any) -> list[ScoredSample]:
    """Rows of a ``DataProto`` that the V0 trainer (whole) or the V1 trainer (responses only) passes."""
    if "prompts" in data.batch.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        return samples_from_dataproto(data, temperature=float(data.meta_info.get("temperature", 1.0)))
    names = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")
    ours, theirs, masks, ids = (list(data.batch[name].cpu().numpy()) for name in names)
    # Padded on the right; what lies behind a row's last compared token is not known to be more than a pad.
    lengths = [int(mask.nonzero()[0].max(initial=-1)) + 1 for mask in masks]
    cut = [[row[:n] for row, n in zip(rows, lengths, strict=True)] for rows in (ours, theirs, masks, ids)]
    told = column(data.non_tensor_batch, DETAILS)
    stated = data.meta_info.get("temperature")
    return samples_from_arrays(*cut[:3], temperature=stated, otherwise=1.0, token_ids=cut[3], details=told)


def step_of(data: Any, last: int) -> int:
    """veRL's global step where the batch names it, else the one after ``last``."""
    named = data.meta_info.get("global_steps")
    return int(named) if isinstance(named, int) and named > last else last + 1


def rewards_of(data: Any) -> dict[int, float]:
    """Row -> reward, where the batch carries one a token already."""
    for name in _REWARDS:
        if name in data.batch.keys():  # noqa: SIM118
            return dict(enumerate(data.batch[name].double().sum(dim=-1).tolist()))
    return {}


def facts_of(data: Any, rows: int, rewards: Mapping[int, float]) -> list[Any]:
    """What is known of each sample beyond its tokens."""
    from trainer_bridge.store.facts import SampleFacts

    told = data.non_tensor_batch.get(DETAILS)
    digests = [(told[i] or {}).get("manifest_digest") if told is not None else None for i in range(rows)]
    return [SampleFacts(None, rewards.get(i), digests[i]) for i in range(rows)]


def listening(inner: Metrics, listener: Callable[[], Callable[[Any], None]]) -> Metrics:
    """``inner`` with a listener in front; ``listener`` makes it at the first batch."""
    made: list[Callable[[Any], None]] = []

    @functools.wraps(inner)
    def both(data: Any) -> dict[str, Any]:
        if not made:
            made.append(listener())
        made[0](data)
        return inner(data)

    setattr(both, _MARK, True)
    return both


def install() -> bool:
    """Listen, if ``ZERODRIFT_RECORD`` asks for it; whether it does.

    Raises:
        ConfigError: pyarrow is missing, or as ``check_environment``.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return False
    if importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"{VARIABLE} is set, but pyarrow is missing: pip install 'zerodrift[dashboard]'")
    check_environment(os.environ)
    from verl.utils.debug import metrics

    if not hasattr(metrics.calculate_debug_metrics, _MARK):
        metrics.calculate_debug_metrics = listening(
            metrics.calculate_debug_metrics, lambda: BatchListener(make_recorder(Path(folder), os.environ))
        )
    # The V1 trainer holds the function by name, if it was imported before us.
    trainer = sys.modules.get("verl.trainer.ppo.v1.trainer_base")
    if trainer is not None:
        trainer.calculate_debug_metrics = metrics.calculate_debug_metrics  # type: ignore[attr-defined]
    return True


def record_options(environment: Mapping[str, str]) -> RecordOptions:
    """What is kept, as the environment says.

    Raises:
        ConfigError: no share.
    """
    from trainer_bridge.store.recorder import RecordOptions

    text = environment.get(f"{VARIABLE}_KEEP")
    try:
        return RecordOptions() if text is None else RecordOptions(keep_rate=float(text))
    except (ValueError, InvalidRequest) as error:
        raise ConfigError(f"{VARIABLE}_KEEP={text!r} is not a number in [0, 1]", field=f"{VARIABLE}_KEEP") from error


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse at the start what would end the training at its first batch.

    Raises:
        ConfigError: a share that is none, a name of a run that no folder may have. NotFound: a model without tokenizer.
    """
    from trainer_bridge.store.schema import run_folder

    record_options(environment)
    run_folder(Path(), environment.get(f"{VARIABLE}_RUN") or "run")
    _decode(environment.get(f"{VARIABLE}_MODEL", ""))


def make_recorder(folder: Path, environment: Mapping[str, str]) -> Recorder:
    """The recorder that the environment describes; what it still holds is written when the process ends."""
    from trainer_bridge.store.facts import RunHead
    from trainer_bridge.store.recorder import Recorder

    model = environment.get(f"{VARIABLE}_MODEL", "")
    run = environment.get(f"{VARIABLE}_RUN") or time.strftime("verl-%Y%m%d-%H%M%S")
    options = record_options(environment)
    recorder = Recorder(folder, RunHead(run, source="verl", model=model), options=options, decode=_decode(model))
    atexit.register(recorder.close)
    log.info("run %s is recorded in %s", run, folder)
    return recorder


def _decode(model: str) -> Decode | None:
    if not model:
        return None
    from rollout.detokenize import Detokenizer
    from trainer_bridge.store.pieces import pieces_with

    return pieces_with(Detokenizer(Path(model)))
