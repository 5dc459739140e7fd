"""Faults in what the trainer feeds: with what it fed on record, and without."""

from __future__ import annotations

import dataclasses

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


@fault("a second BOS", INPUTS, "position 0", "template", words="added to a prompt that has it")
def _(bench: Bench) -> Case:
    record = bench.record((0, *random_prompt(20, 5)))
    return scored(bench, record, [0, *ids_of(record)])


@fault("the BOS missing", INPUTS, "position 0", "template", words="id 0.*missing")
def _(bench: Bench) -> Case:
    record = bench.record((0, *random_prompt(20, 5)))
    return scored(bench, record, ids_of(record)[1:])


@fault("the prompt cut at the right, not on record", INPUTS, "position 16", "truncated", words="on the right")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = ids_of(record)
    return scored(bench, record, [*ids[:16], *ids[21:]])


@fault("the prompt cut at the right, on record", INPUTS, "position 16", "truncated", words="on the right")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = ids_of(record)
    cut = [*ids[:16], *ids[21:]]
    case = scored(bench, record, cut)
    return bench.case(record, case.trainer_logprobs, fed=fed(record, token_ids=np.array(cut, np.int32), positions=None))


@fault("an EOS put at the end", INPUTS, "token 12", "length", words="EOS put at the end")
def _(bench: Bench) -> Case:
    record = bench.record()
    return bench.case(record, np.append(bench.score(record), np.float32(-3.0)))


@fault("the sampled EOS dropped", INPUTS, "token 11", "length", words="EOS \\(id 1\\) was dropped")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = record.token_ids.copy()
    ids[-1] = 1
    record = dataclasses.replace(record, token_ids=ids)
    return bench.case(record, bench.score(record)[:-1])


@fault("one id changed by encoding again, not on record", INPUTS, "position 25", "ids", words="was sampled")
def _(bench: Bench) -> Case:
    return encoded_again(bench, [4])


@fault("three ids changed, not on record", INPUTS, "position 23", "ids", words="3 ids in all")
def _(bench: Bench) -> Case:
    return encoded_again(bench, [2, 5, 9])


def encoded_again(bench: Bench, places: list[int]) -> Case:
    record = bench.record()
    ids = record.token_ids.copy()
    ids[places] = (ids[places] + 1) % bench.vocab
    other = dataclasses.replace(record, token_ids=ids)
    return bench.case(record, bench.score(other))


@fault("pads between prompt and answer attended", INPUTS, "position 21", "padding", "padded-fp32", words="3 pad")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = ids_of(record)
    return scored(bench, record, [*ids[:21], 2, 2, 2, *ids[21:]])


@fault("pads in front attended, up to a width", INPUTS, "position 0", "padding", "padded-fp32", words="11 pad")
def _(bench: Bench) -> Case:
    record = bench.record()
    return scored(bench, record, [2] * 11 + ids_of(record))


@fault("positions of the answer start again", INPUTS, "position 21", "positions", words="trainer.*again at 0")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = ids_of(record)
    return scored(bench, record, ids, [*range(21), *range(len(ids) - 22)])


@fault("positions wrong from a later token on", INPUTS, "position 26", "positions", words="26 on are one too high")
def _(bench: Bench) -> Case:
    record = bench.record()
    ids = ids_of(record)
    return scored(bench, record, ids, [*range(26), *range(27, len(ids))])
