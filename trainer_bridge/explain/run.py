"""The questions in order of likelihood and cost: weights, inputs, semantics, numerics; the first answer decides."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollout.errors import InvalidRequest
from rollout.taps import LOGITS, TraceRequest
from rollout.types import Float32Array
from trainer_bridge.explain import inputs, numerics, semantics, weights
from trainer_bridge.explain.bisect import strangers
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause, Explanation, Finding, Notebook
from trainer_bridge.explain.mistakes import Hints
from trainer_bridge.explain.rows import Rows
from trainer_bridge.explain.sides import Side
from trainer_bridge.ulp import bits

NOT_REPRODUCED = "not reproduced"
_NEAR = 0.05
"""nats; the median difference that positions off by one number, and rounding, stay below"""


def explain(
    rollout: Side,
    trainer: Side,
    case: Case,
    *,
    vocab_size: int,
    config: Mapping[str, Any],
    thorough: bool = False,
) -> Explanation:
    """Find the first place where two sides part.

    Args:
        vocab_size: the model's own vocabulary. config: fields of the checkpoint's config, for the float64 reference.
        thorough: ask every question even where all recorded log-probs are equal; equal values of the sampled tokens
            do not yet prove equal distributions.
    """
    start = time.process_time()
    notes = Notebook()
    questions = _Questions(rollout, trainer, case, notes, vocab_size, config)
    with torch.no_grad(), trainer.mode():
        findings = questions.ask(thorough)
    if findings[0].kind == NOT_REPRODUCED:
        with torch.no_grad():
            findings = (questions.outside_the_mode(findings[0]),)
    return Explanation(findings[0], tuple(notes.rows), time.process_time() - start, findings[1:])


class _Questions:
    """One explanation in progress."""

    def __init__(
        self,
        rollout: Side,
        trainer: Side,
        case: Case,
        notes: Notebook,
        vocab_size: int,
        config: Mapping[str, Any],
    ) -> None:
        self._rollout, self._trainer, self._case, self._notes = rollout, trainer, case, notes
        self._vocab, self._config = vocab_size, config
        self._read: dict[str, Rows] = {}

    def ask(self, thorough: bool) -> tuple[Finding, ...]:
        """The first stage with a finding ends it."""
        case, notes = self._case, self._notes
        if (strange := inputs.outside_vocabulary(case, self._vocab)) is not None:
            notes.note(inputs.STAGE, "are all ids the model's?", strange.sentence, False)
            return (strange,)
        mask = semantics.compare_masks(case)
        first = case.first_mismatch
        if first is None and mask is None:
            words = f"all {int(case.record.mask.sum())} log-probs hold equal bits"
            notes.note("compare", "same bits?", words, True)
            if not thorough:
                return (Finding(Cause.NONE, "equal", "", words),)
        if first is not None:
            notes.note("compare", "same bits?", f"not at token {first} (position {case.start + 1 + first})", False)
        found = weights.examine(self._rollout, self._trainer, notes)
        if found:
            return found
        if (mixed := weights.several_versions(case, notes)) is not None:
            return (mixed,)
        fed = inputs.compare_fed(case, notes, self._eos())
        if fed is not None:
            return (fed,)
        if (temperature := self._temperature()) is not None:
            return (temperature,)
        if mask is not None:
            notes.note(semantics.STAGE, "same tokens counted?", mask.sentence, False)
            return (mask,)
        found_one = self._replayed()
        if found_one is None and first is None:
            return (
                Finding(Cause.NONE, "equal", "", "log-probs, weights, inputs, readings and every tap hold equal bits"),
            )
        return (found_one or self._unknown(),)

    def _temperature(self) -> Finding | None:
        fed, sampled = self._case.fed.temperature, self._case.temperature
        if fed is None or np.float32(fed) == np.float32(sampled):
            return None
        words = f"sampled at temperature {sampled:g}, scored at {fed:g}"
        self._notes.note(semantics.STAGE, "same temperature?", words, False)
        return Finding(Cause.SEMANTICS, "temperature", "every token", words, {"sampled": sampled, "scored": fed})

    def _replayed(self) -> Finding | None:
        case, notes = self._case, self._notes
        ours, theirs = self._rows(self._rollout), self._rows(self._trainer)
        self._read = {self._rollout.name: ours, self._trainer.name: theirs}
        sides = (
            (self._trainer.name, theirs, case.trainer_logprobs),
            (self._rollout.name, ours, case.record.policy_logprobs),
        )
        plain: dict[str, bool] = {}
        for name, rows, values in sides:
            plain[name] = semantics.reads_plainly(rows, values, case.record.mask)
            answer = "its replay gives the recorded bits" if plain[name] else "its replay gives other bits"
            notes.note(semantics.STAGE, f"does the {name} mean the contract's log-prob?", answer, plain[name])
        for name, rows, values in sides:
            if not plain[name] and (found := semantics.read(case, rows, values, name)) is not None:
                notes.note(semantics.STAGE, f"what does the {name} mean?", found.sentence, False)
                return found
        for side, (name, rows, values) in zip((self._trainer, self._rollout), sides, strict=True):
            if not plain[name] and (found := self._fed_otherwise(side, rows, values)) is not None:
                return found
        for name, rows, values in sides:
            if not plain[name] and (found := semantics.nearest(case, rows, values, name)) is not None:
                notes.note(semantics.STAGE, f"is another meaning much nearer to the {name}'s values?", "yes", False)
                return found
        found = numerics.examine(self._rollout, self._trainer, case, notes, self._config)
        strange = [name for name, ok in plain.items() if not ok]
        if found is None and strange and case.first_mismatch is not None:
            return self._not_reproduced(strange, sides)
        return found

    def _not_reproduced(self, strange: list[str], sides: Sequence[tuple[str, Rows, Float32Array]]) -> Finding:
        """Nothing gives what was recorded. What serves is asked once more: it may hold what a replay does not."""
        notes = self._notes
        wrong = {name: np.flatnonzero(r.plain().view(np.uint32) != v.view(np.uint32)) for name, r, v in sides}
        if self._rollout.name in strange and (state := self._engine_state()) is not None:
            return state
        first = min(int(wrong[name][0]) for name in strange if wrong[name].size)
        fitting = f"; its first {first} tokens fit" if first else ""
        words = (
            f"the {' and the '.join(strange)} recorded what its model does not compute now, alone or in "
            f"company{fitting}: other weights, inputs or settings were in use when it was recorded, or keys and values "
            "kept from before"
        )
        notes.note("compare", "first token that no replay gives?", f"token {first}", None)
        return Finding(Cause.UNKNOWN, NOT_REPRODUCED, strange[0], words, {"token": first})

    def outside_the_mode(self, otherwise: Finding) -> Finding:
        """What ordinary operations explain, where nothing in invariant mode did. Call outside of it."""
        case, mask = self._case, self._case.record.mask
        recorded = {self._rollout.name: case.record.policy_logprobs, self._trainer.name: case.trainer_logprobs}
        for name, rows in self._read.items():
            inside, outside = (bits(v[mask]) for v in (recorded[name], rows.plain()))
            if inside.size and np.array_equal(inside, outside):
                words = (
                    f"the {name}'s logits are the aligned ones, its log-softmax is not: it ran outside of the "
                    "invariant mode"
                )
                self._notes.note(numerics.STAGE, f"and the {name}'s log-softmax by ordinary operations?", "yes", False)
                return Finding(Cause.NUMERICS, "not aligned", "log_softmax", words, {"side": name})
        if otherwise.place != self._trainer.name:
            return otherwise
        return numerics.not_aligned(self._trainer, case, self._notes) or otherwise

    def _engine_state(self) -> Finding | None:
        """Whether the service itself still gives the recorded bits, although its weights on fresh pages do not."""
        case, notes, name = self._case, self._notes, self._rollout.name
        question = f"does the {name} generate the same once more?"
        try:
            again = self._rollout.again(case.record)
        except InvalidRequest as error:
            notes.note(numerics.STAGE, question, error.message, None)
            return None
        if again is None:
            return None
        same = np.array_equal(again.policy_logprobs.view(np.uint32), case.record.policy_logprobs.view(np.uint32))
        if not same or not np.array_equal(again.token_ids, case.record.token_ids):
            notes.note(numerics.STAGE, question, "no: it was another state", None)
            return None
        notes.note(numerics.STAGE, question, "yes, on the caches that it holds", False)
        words = (
            f"the {name} gives the same bits once more, but its own weights on fresh pages do not: it attends to "
            "keys and values that these weights and tokens do not give, such as a prefix cache kept over an update, "
            "or pages that were overwritten"
        )
        return Finding(Cause.NUMERICS, "engine state", "kv cache", words, {"side": name})

    def _fed_otherwise(self, side: Side, rows: Rows, values: Float32Array) -> Finding | None:
        """Whether another feed of the same sample gives what a side recorded."""
        case, notes = self._case, self._notes

        def score(ids: tuple[int, ...], positions: tuple[int, ...] | None) -> Float32Array:
            return self._rows(side, ids, positions).plain()

        def rescored(generated: tuple[int, ...]) -> Rows:
            return replace(
                self._rows(side, (*case.prompt, *generated)[:-1]), targets=torch.tensor(generated, dtype=torch.int64)
            )

        if (found := inputs.substituted(case, values, rows, rescored, side.name)) is not None:
            notes.note(inputs.STAGE, f"did the {side.name} score other ids?", found.sentence, False)
            return found
        if self._depends_on_company(side, rows):
            # Then no feed alone gives what it gave in company; where it happens, the taps say.
            return None
        plain = rows.plain()
        wrong = np.flatnonzero((plain.view(np.uint32) != values.view(np.uint32)) & case.record.mask)
        apart = np.abs(plain.astype(np.float64) - values)[wrong]
        hints = Hints(
            bos=self._token("bos"),
            pad=self._token("pad"),
            near=bool(apart.size and np.median(apart) < _NEAR),
            first=int(wrong[0]) if wrong.size else 0,
        )
        return inputs.guess(case, values, plain, score, notes, hints, side.name)

    def _depends_on_company(self, side: Side, rows: Rows) -> bool:
        """One look at the logits only, with strangers in the pass or in chunks; ``numerics`` looks closely."""
        case, path = self._case, side.paths[0]
        training = path == "training"
        request = TraceRequest(
            case.fed_ids,
            logits_from=case.start,
            path=path,  # type: ignore[arg-type]
            decode_from=None if training else len(case.prompt),
            company=(case.trainer_company if training else case.rollout_company) or strangers(case),
            within=LOGITS,
            tensors=(LOGITS,),
            chunk=None if training else max(1, len(case.prompt) // 3 | 1),
        )
        return not torch.equal(side.trace(request).tensors[LOGITS], rows.logits)

    def _eos(self) -> frozenset[int]:
        value = self._config.get("eos_token_id")
        return frozenset(value if isinstance(value, list) else [value] if isinstance(value, int) else [])

    def _token(self, kind: str) -> int | None:
        value = self._config.get(f"{kind}_token_id")
        return value if isinstance(value, int) else None

    def _rows(self, side: Side, ids: tuple[int, ...] | None = None, positions: tuple[int, ...] | None = None) -> Rows:
        """Logits that score the sample, by the forward that side really runs, alone; of other ids in one pass."""
        case, path = self._case, side.paths[0]
        fed = ids if ids is not None else case.fed_ids
        request = TraceRequest(
            fed,
            positions=positions,
            logits_from=len(fed) - len(case.generated),
            path=path,  # type: ignore[arg-type]
            decode_from=None if path == "training" or ids is not None else len(case.prompt),
            within=LOGITS,
            tensors=(LOGITS,),
        )
        logits = side.trace(request).tensors[LOGITS]
        targets = torch.tensor(case.generated, dtype=torch.int64)
        return Rows(logits, targets, case.divisor, self._vocab, case.record.sampling, case.prompt)

    def _unknown(self) -> Finding:
        words = (
            "the records differ, yet every replay of both sides gives the same bits: recorded under other conditions"
        )
        return Finding(Cause.UNKNOWN, NOT_REPRODUCED, "", words)
