"""Faults in what the trainer feeds: with what it fed on record, and without."""

from __future__ import annotations

import numpy as np

from tests.engines import random_prompt
from tests.explain.bench import Bench, fault, fed
from trainer_bridge.explain.case import Case
from trainer_bridge.explain.findings import Cause
from trainer_bridge.rollout_record import RolloutRecord

INPUTS = Cause.INPUTS


def ids_of(record: RolloutRecord) -> list[int]:
    return [*record.prompt_ids.tolist(), *record.token_ids.tolist()]


def scored(bench: Bench, record: RolloutRecord, ids: list[int], positions: list[int] | None = None) -> Case:
    """The trainer fed ``ids`` (last token dropped) and wrote nothing down."""
    from rollout.logprobs import policy_logprobs

    _, targets, temperatures = bench.rows(record)
    logits = bench.logits(ids[:-1], positions)[-len(targets) :]
    return bench.case(record, policy_logprobs(logits, targets, temperatures, bench.vocab).numpy())


@fault("positions counted from the left padding, on record", INPUTS, "position 0", "positions")
def _(bench: Bench) -> Case:
    record = bench.record()
    size = len(ids_of(record))
    case = scored(bench, record, ids_of(record), list(range(7, 7 + size - 1)))
    return bench.case(record, case.trainer_logprobs, fed=fed(record, positions=np.arange(7, 7 + size, dtype=np.int32)))


@fault("positions counted from the left padding, not on record", INPUTS, "position 0", "positions", words="start at 11")
def _(bench: Bench) -> Case:
    record = bench.record()
    size = len(ids_of(record))
    return scored(bench, record, ids_of(record), list(range(11, 11 + size - 1)))


@fault("the same in bfloat16", INPUTS, "position 0", "positions", "llama-bf16", words="start at 3")
def _(bench: Bench) -> Case:
    record = bench.record()
    size = len(ids_of(record))
    return scored(bench, record, ids_of(record), list(range(3, 3 + size - 1)))


@fault("a first token added, not on record", INPUTS, "position 0", "template", words="front")
def _(bench: Bench) -> Case:
    record = bench.record()
    return scored(bench, record, [0, *ids_of(record)])


@fault("a first token added, on record", INPUTS, "position 0", "template", words="front")
def _(bench: Bench) -> Case:
    record = bench.record()
    case = scored(bench, record, [0, *ids_of(record)])
    ids = np.array([0, *ids_of(record)], np.int32)
    return bench.case(record, case.trainer_logprobs, fed=fed(record, token_ids=ids, positions=None))


@fault("the prompt cut at the left, not on record", INPUTS, "position 0", "truncated", words="first 5")
def _(bench: Bench) -> Case:
    record = bench.record()
    return scored(bench, record, ids_of(record)[5:])


@fault("the prompt cut at the left, on record", INPUTS, "position 0", "truncated", words="first 4")
def _(bench: Bench) -> Case:
    record = bench.record()
    case = scored(bench, record, ids_of(record)[4:])
    ids = np.array(ids_of(record)[4:], np.int32)
    return bench.case(record, case.trainer_logprobs, fed=fed(record, token_ids=ids, positions=None))


@fault(
    "the template's last token missing, not on record", INPUTS, "position", "template", words="last token is missing"
)
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = ids_of(record)
    del ids[len(record.prompt_ids) - 1]
    return scored(bench, record, ids)


@fault("a token changed by encoding again", INPUTS, "position 9", "ids")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = ids_of(record)
    ids[9] = (ids[9] + 1) % bench.vocab
    case = scored(bench, record, ids)
    return bench.case(record, case.trainer_logprobs, fed=fed(record, token_ids=np.array(ids, np.int32)))


@fault("another system prompt in the template", INPUTS, "position", "template")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = [*random_prompt(8, 77), *ids_of(record)[3:]]
    case = scored(bench, record, ids)
    return bench.case(record, case.trainer_logprobs, fed=fed(record, token_ids=np.array(ids, np.int32), positions=None))


@fault("the answer cut short", INPUTS, "token 9", "length")
def _(bench: Bench) -> Case:
    record = bench.record()
    return bench.case(record, bench.score(record)[:9])


@fault("positions not restarted in a packed batch", INPUTS, "position 0", "positions")
def _(bench: Bench) -> Case:
    record = bench.record()
    size = len(ids_of(record))
    places = np.arange(40, 40 + size, dtype=np.int32)
    case = scored(bench, record, ids_of(record), places[:-1].tolist())
    return bench.case(record, case.trainer_logprobs, fed=fed(record, positions=places))


@fault("positions that jump inside the sequence", INPUTS, "position 15", "positions")
def _(bench: Bench) -> Case:
    record = bench.record()
    size = len(ids_of(record))
    places = np.arange(size, dtype=np.int32)
    places[15:] += 1
    case = scored(bench, record, ids_of(record), places[:-1].tolist())
    return bench.case(record, case.trainer_logprobs, fed=fed(record, positions=places))
