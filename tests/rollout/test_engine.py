"""One engine: how samples end, what is refused, what is echoed, and that nothing is lost (C3, C4, D1, K2, K4)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.detokenize import Detokenizer
from rollout.engine import Engine
from rollout.errors import CapacityExceeded, DuplicateRequest, InvalidRequest, NotFound, ParityError
from rollout.model import SharedModel
from rollout.scheduler import SchedulerLimits
from rollout.types import FinishDetail, FinishReason, SampleRequest, SampleSummary, ScoreSequence, VersionSpan
from tests.engines import (
    Generated,
    Record,
    build_engine,
    drain,
    fresh_model,
    isolated,
    random_prompt,
    rescore,
    run,
    sample,
    shared_model,
    torch_threads,
    unequal,
)
from tests.rollout import tokenizers as small

STOP, LENGTH, ABORTED = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED
PROMPT = (2, 3, 4, 5)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def model(tiny_qwen3_path: Path) -> SharedModel:
    return shared_model(tiny_qwen3_path, torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Detokenizer:
    return Detokenizer(small.letters(tmp_path_factory.mktemp("letters")))


def summary_of(one: Generated) -> SampleSummary:
    assert one.summary is not None
    return one.summary


def lengths_agree(one: Generated) -> None:
    """ids, both log-probs, digests, summary and spans count the same tokens."""
    summary, count = summary_of(one), len(one.token_ids)
    assert count == len(one.policy) == len(one.behavior) == len(one.digests) == summary.num_tokens
    assert [v for s in summary.spans for v in [s.version] * (s.end - s.start)] == one.versions
    assert all(math.isfinite(x) for x in (*one.policy, *one.behavior))


# ---- ends (C3, C4, K4) ------------------------------------------------------------------------------------------


def eos_is(model: SharedModel, *ids: int) -> SharedModel:
    """The same modules under another list of EOS ids."""
    return SharedModel(model.hf, model.kernels, dataclasses.replace(model.spec, eos_token_ids=ids))


@pytest.fixture(scope="module")
def free(model: SharedModel) -> Generated:
    """24 tokens with nothing to stop at."""
    return isolated(model, sample(PROMPT, max_tokens=24))


def first_distinct(ids: Sequence[int]) -> tuple[int, int]:
    """Two ids of a run, the later one with its first occurrence after the earlier one's."""
    seen = list(dict.fromkeys(ids))
    return seen[2], seen[4]


@pytest.mark.parametrize("which", [0, 1])
def test_ending_on_either_of_two_eos_ids(model: SharedModel, free: Generated, which: int) -> None:
    eos = first_distinct(free.token_ids)[which]
    unused = next(t for t in range(64) if t not in free.token_ids)
    one = isolated(
        eos_is(model, *((eos, unused) if which else (unused, eos))), sample(PROMPT, max_tokens=24, ignore_eos=False)
    )
    lengths_agree(one)
    at = free.token_ids.index(eos)
    assert summary_of(one).finish == FinishDetail(STOP, stop_token_id=eos)
    assert one.token_ids == free.token_ids[: at + 1] and unequal(one.policy, free.policy[: at + 1]) == 0


def test_a_sampled_eos_keeps_its_logprob(model: SharedModel, free: Generated) -> None:
    """C4: in a batch with a longer row; what Score says of that id is what was returned."""
    eos = first_distinct(free.token_ids)[0]
    engine = build_engine(eos_is(model, eos))
    samples = run(
        engine, [sample(PROMPT, "short", max_tokens=24, ignore_eos=False), sample(PROMPT, "long", max_tokens=24)]
    )
    short = samples["short"]
    lengths_agree(short)
    assert short.token_ids[-1] == eos and eos not in short.token_ids[:-1]
    assert len(short.token_ids) < len(samples["long"].token_ids) == 24
    (score,) = rescore(engine, [[*PROMPT, *short.token_ids]], [len(PROMPT)], [1.0])
    assert unequal(score.logprobs, short.policy) == 0


def test_stop_ids(model: SharedModel, free: Generated) -> None:
    stop = first_distinct(free.token_ids)[1]
    one = isolated(model, sample(PROMPT, max_tokens=24, stop_token_ids=(stop,)))
    lengths_agree(one)
    assert summary_of(one).finish == FinishDetail(STOP, stop_token_id=stop) and one.token_ids[-1] == stop


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_two_tokens(model: SharedModel, tokenizer: Detokenizer, include: bool) -> None:
    """Ids and log-probs keep every sampled token; only the text is cut, and only when told so."""
    bars = {"barred_token_ids": tuple(i for i in range(64) if not 2 <= i <= 27), "max_tokens": 24}
    whole = run(build_engine(model, tokenizer=tokenizer), [sample(PROMPT, **bars)])["s"]
    text = summary_of(whole).text
    assert text is not None and len(text) == 24 and text == tokenizer.decode(whole.token_ids)
    stop = text[6:8]
    at = text.index(stop) + 2
    request = sample(PROMPT, stop=(stop,), include_stop=include, **bars)
    one = run(build_engine(model, tokenizer=tokenizer), [request])["s"]
    lengths_agree(one)
    assert summary_of(one).finish == FinishDetail(STOP, stop_string=stop)
    assert one.token_ids == whole.token_ids[:at] and unequal(one.policy, whole.policy[:at]) == 0
    assert summary_of(one).text == text[: at if include else at - 2]


def one_token_text(model: SharedModel, tokenizer: Detokenizer, token: str, stop: str) -> str | None:
    """Text of a sample that can only draw ``token``."""
    (wanted,) = tokenizer.encode(token)
    barred = tuple(i for i in range(64) if i != wanted)
    request = sample(PROMPT, stop=(stop,), max_tokens=3, barred_token_ids=barred)
    one = run(build_engine(model, tokenizer=tokenizer), [request])["s"]
    assert summary_of(one).finish.stop_string == stop
    return summary_of(one).text


def test_text_is_cut_before_the_stop_string(model: SharedModel, tokenizer: Detokenizer) -> None:
    assert one_token_text(model, tokenizer, "ab", "b") == "a"
    assert one_token_text(model, tokenizer, "ab", "a") == ""


def test_text_holds_no_stop_string_when_a_token_holds_two(model: SharedModel, tokenizer: Detokenizer) -> None:
    assert one_token_text(model, tokenizer, small.DOUBLE_BREAK, "\n") == ""


@pytest.mark.parametrize(
    ("context", "tokens", "limit"), [(40, 10, "max_tokens"), (14, 10, "context"), (12, 10, "context")]
)
def test_length_says_which_limit(tiny_qwen3_path: Path, context: int, tokens: int, limit: str) -> None:
    """K4: a sample cut by the context is told apart; the effective max_tokens is echoed."""
    model = fresh_model(tiny_qwen3_path, torch.float32, context_length=context)
    engine = build_engine(model)
    request = engine.effective_request(sample(PROMPT, max_tokens=tokens))
    assert request.sampling.max_tokens == min(tokens, context - 4)
    one = run(engine, [request])["s"]
    lengths_agree(one)
    assert summary_of(one).finish == FinishDetail(LENGTH, limit=limit)
    assert len(one.token_ids) == min(tokens, context - 4)


def test_unset_max_tokens_means_the_context(tiny_qwen3_path: Path) -> None:
    engine = build_engine(fresh_model(tiny_qwen3_path, torch.float32, context_length=33))
    one = run(engine, [sample(PROMPT, max_tokens=None)])["s"]
    assert len(one.token_ids) == 29 and summary_of(one).finish == FinishDetail(LENGTH, limit="context")


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_abort(model: SharedModel, free: Generated, after: int) -> None:
    engine, record = build_engine(model, chunk=2), Record()
    engine.add(engine.effective_request(sample(PROMPT, max_tokens=24)))
    drain(engine, record, steps=after)
    record.take([engine.abort("s", "why")])
    one = record.samples["s"]
    lengths_agree(one)
    assert summary_of(one).finish == FinishDetail(ABORTED, message="why")
    assert one.token_ids == free.token_ids[: max(0, after - 1)]
    assert engine.pages.num_free == engine.pages.num_pages and not engine.live_ids
    engine.scheduler.check()
    with pytest.raises(NotFound, match="'s'"):
        engine.abort("s", "again")


def test_abort_of_a_score_and_of_a_waiting_sample(model: SharedModel) -> None:
    engine = build_engine(model, running=1)
    engine.add_score("score", ScoreSequence((2,) * 100), temperature=1.0, want_digests=False)
    engine.add(engine.effective_request(sample(PROMPT, "waiting")))
    drain(engine, steps=1)
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    assert engine.abort("waiting", "x").summary is not None
    assert engine.abort("score", "x").summary is None
    assert engine.pages.num_free == engine.pages.num_pages and (engine.num_running, engine.num_waiting) == (0, 0)


# ---- n samples (D1) ---------------------------------------------------------------------------------------------


def test_siblings(model: SharedModel) -> None:
    requests = [sample(PROMPT, f"s{i}", i) for i in range(8)]
    eight = run(build_engine(model), requests)
    assert len({tuple(g.token_ids) for g in eight.values()}) == 8
    three = run(build_engine(model), requests[:3])
    assert [three[f"s{i}"].bits() for i in range(3)] == [eight[f"s{i}"].bits() for i in range(3)]
    assert [isolated(model, r).bits() for r in requests] == [eight[f"s{i}"].bits() for i in range(8)]


def test_seed(model: SharedModel) -> None:
    said = [isolated(model, sample(PROMPT, seed=s)).bits() for s in (1, 1, 2)]
    assert said[0] == said[1] != said[2]
    assert isolated(model, sample(PROMPT, seed=-1)).bits() == isolated(model, sample(PROMPT, seed=2**64 - 1)).bits()


# ---- options are honoured (property 9) --------------------------------------------------------------------------


def test_greedy_takes_the_largest_and_scores_at_one(model: SharedModel) -> None:
    engine = build_engine(model)
    one = run(engine, [sample(PROMPT, temperature=0.0)])["s"]
    again = run(engine, [sample(PROMPT, temperature=0.0, seed=99)])["s"]
    assert one.bits() == again.bits()
    (score,) = rescore(engine, [[*PROMPT, *one.token_ids]], [4], [0.0])
    (at_one,) = rescore(engine, [[*PROMPT, *one.token_ids]], [4], [1.0])
    assert unequal(score.logprobs, one.policy) == unequal(at_one.logprobs, one.policy) == 0
    top_one = run(engine, [sample(PROMPT, top_k=1)])["s"]
    assert top_one.token_ids == one.token_ids


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"barred_token_ids": (60, 61, 7)}])
def test_filters_show_in_behavior_only(model: SharedModel, options: dict[str, Any]) -> None:
    engine = build_engine(model)
    samples = run(engine, [sample(PROMPT, f"s{i}", i, **options) for i in range(6)])
    for one in samples.values():
        lengths_agree(one)
        (score,) = rescore(engine, [[*PROMPT, *one.token_ids]], [4], [1.0])
        assert unequal(score.logprobs, one.policy) == 0, "a filter reached policy_logprob"
        assert all(b >= p for b, p in zip(one.behavior, one.policy, strict=True))
    assert any(unequal(one.behavior, one.policy) for one in samples.values())
    plain = run(build_engine(model), [sample(PROMPT, f"s{i}", i) for i in range(6)])
    assert all(one.policy == one.behavior for one in plain.values())
    assert any(plain[n].token_ids != samples[n].token_ids for n in samples)


def test_barred_and_undefined_ids_are_never_sampled(model: SharedModel, tokenizer: Detokenizer) -> None:
    engine = build_engine(model, tokenizer=tokenizer)
    requests = [
        sample(PROMPT, f"s{i}", i, bar_undefined_tokens=True, barred_token_ids=(2, 35), max_tokens=20) for i in range(6)
    ]
    drawn = {t for one in run(engine, requests).values() for t in one.token_ids}
    assert drawn <= tokenizer.defined_ids - {2, 35}
    free_ids = {
        t
        for one in run(engine, [sample(PROMPT, f"s{i}", i, max_tokens=20) for i in range(6)]).values()
        for t in one.token_ids
    }
    assert not free_ids <= tokenizer.defined_ids


def test_digests_come_only_when_asked_for(model: SharedModel) -> None:
    asked = sample(PROMPT, "a")
    samples = run(build_engine(model), [asked, dataclasses.replace(asked, sample_id="b", row_digests=False)])
    assert len(samples["a"].digests) == 12 and samples["b"].digests == []
    assert samples["a"].bits()[:3] == samples["b"].bits()[:3]


def test_spans_name_the_version(model: SharedModel) -> None:
    one = run(build_engine(model, version=7), [sample(PROMPT)])["s"]
    assert summary_of(one).spans == (VersionSpan(7, 0, 12),) and set(one.versions) == {7}


# ---- refusals (K2, property 9) ----------------------------------------------------------------------------------

BAD: list[tuple[SampleRequest, str]] = [
    (sample(()), "prompt_ids"),
    (sample((2, -1)), "prompt_ids"),
    (sample((64,)), "prompt_ids"),
    (sample((2**31,)), "prompt_ids"),
    (sample((2,) * 2048), "prompt"),
    (sample((2,), temperature=math.nan), "sampling.temperature"),
    (sample((2,), temperature=-1.0), "sampling.temperature"),
    (sample((2,), top_p=0.0), "sampling.top_p"),
    (sample((2,), stop=("x",)), "sampling.stop"),
    (sample((2,), bar_undefined_tokens=True), "sampling.bar_undefined_tokens"),
    (sample((2,), stop_token_ids=(64,)), "sampling.stop_token_ids"),
    (sample((2,), seed=None), "sampling.seed"),
    (sample((2,), max_tokens=0), "sampling.max_tokens"),
]


@pytest.mark.parametrize(("request_", "field"), BAD, ids=[f[1] + str(i) for i, f in enumerate(BAD)])
def test_bad_requests_name_their_field_and_leave_the_engine_alone(
    model: SharedModel, free: Generated, request_: SampleRequest, field: str
) -> None:
    engine, record = build_engine(model), Record()
    engine.add(engine.effective_request(sample(PROMPT, max_tokens=24)))
    drain(engine, record, steps=3)
    with pytest.raises(InvalidRequest) as caught:
        engine.effective_request(dataclasses.replace(request_, sample_id="bad"))
    assert caught.value.field == field
    assert drain(engine, record).samples["s"].bits() == free.bits()


def test_the_longest_prompt_is_served(tiny_qwen3_path: Path) -> None:
    engine = build_engine(fresh_model(tiny_qwen3_path, torch.float32, context_length=33))
    one = run(engine, [sample(random_prompt(32, 0), max_tokens=5)])["s"]
    assert len(one.token_ids) == 1 and summary_of(one).finish.limit == "context"
    with pytest.raises(InvalidRequest, match="33 tokens, the context holds 33"):
        engine.effective_request(sample(random_prompt(33, 0)))


def test_live_ids_are_unique(model: SharedModel) -> None:
    engine = build_engine(model)
    request = engine.effective_request(sample(PROMPT))
    engine.add(request)
    with pytest.raises(DuplicateRequest, match="'s'"):
        engine.add(request)
    with pytest.raises(DuplicateRequest, match="'s'"):
        engine.add_score("s", ScoreSequence((2, 3)), temperature=1.0, want_digests=False)
    first = drain(engine).samples["s"]
    assert run(engine, [request])["s"].bits() == first.bits(), "an id is free again after its end"


def test_queue_and_cache_limits(model: SharedModel) -> None:
    engine = build_engine(model, waiting=2, kv_tokens=64)
    with pytest.raises(InvalidRequest, match="KV pages"):
        engine.add(engine.effective_request(sample(PROMPT, max_tokens=61)))
    for i in range(2):
        engine.add(engine.effective_request(sample(PROMPT, f"s{i}", max_tokens=60)))
    with pytest.raises(CapacityExceeded):
        engine.add(engine.effective_request(sample(PROMPT, "s2")))
    assert engine.live_ids == ["s0", "s1"]
    assert all(len(g.token_ids) == 60 for g in drain(engine).samples.values())


def test_engine_sizes(model: SharedModel) -> None:
    with pytest.raises(InvalidRequest, match="max_running 9 exceeds max_batch_tokens 8"):
        Engine(model, SchedulerLimits(8, 9, 1, 1, 16), kv_cache_tokens=64)
    with pytest.raises(InvalidRequest, match="below one page"):
        Engine(model, SchedulerLimits(8, 8, 1, 1, 16), kv_cache_tokens=15)


@pytest.mark.parametrize(
    ("ids", "start", "field"),
    [((), 1, "sequences"), ((2,), 1, "sequences.start"), ((2, 3), 0, "sequences.start"), ((2, 3), 2, "sequences.start"),
     ((2, 64), 1, "sequences"), ((2,) * 2049, 1, "sequences")],
)  # fmt: skip
def test_bad_scores(model: SharedModel, ids: tuple[int, ...], start: int, field: str) -> None:
    engine = build_engine(model)
    with pytest.raises(InvalidRequest) as caught:
        engine.add_score("x", ScoreSequence(ids, start), temperature=1.0, want_digests=False)
    assert caught.value.field == field and not engine.live_ids


# ---- broken rows ------------------------------------------------------------------------------------------------


def test_nan_weights_fail_the_sample_not_the_engine(tiny_qwen3_path: Path) -> None:
    model = fresh_model(tiny_qwen3_path, torch.float32)
    with torch.no_grad():
        model.hf.get_decoder().norm.weight[3] = torch.nan
    engine = build_engine(model)
    engine.add_score("score", ScoreSequence((2,) * 40), temperature=1.0, want_digests=True)
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        engine.add(engine.effective_request(sample(PROMPT, name, temperature=temperature)))
    samples = drain(engine).samples
    assert all(isinstance(g.error, ParityError) and not g.token_ids for g in samples.values()) and len(samples) == 3


def cold_and_barred(model: SharedModel) -> SampleRequest:
    (favourite,) = isolated(model, sample(PROMPT, temperature=0.0, max_tokens=1)).token_ids
    return sample(PROMPT, temperature=1e-4, barred_token_ids=(favourite,), max_tokens=2)


def test_a_cold_sample_with_its_favourite_barred(model: SharedModel) -> None:
    one = isolated(model, cold_and_barred(model))
    assert one.error is None and all(np.isfinite(one.behavior))


CRASH = "nothing left to sample ends the step for everyone"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"min_p": 0.1},
    ],
    ids=["plain", "greedy", "min_p"],
)
def test_nothing_left_to_sample_is_the_samples_own_fault(
    model: SharedModel, tokenizer: Detokenizer, options: dict[str, Any]
) -> None:
    """All defined ids barred by hand, the rest by bar_undefined_tokens: refused, or failed alone; never a token."""
    engine = build_engine(model, tokenizer=tokenizer)
    requests = [sample(PROMPT, "good")]
    with contextlib.suppress(InvalidRequest):
        barred = sample(PROMPT, "bad", barred_token_ids=tuple(range(36)), bar_undefined_tokens=True, **options)
        requests.append(engine.effective_request(barred))
    samples = run(engine, requests)
    assert len(samples["good"].token_ids) == 12
    assert "bad" not in samples or (samples["bad"].error is not None and not samples["bad"].token_ids)
